"""What the worlds of a run could hit, and what of it was hit: fault points, sector boundaries."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

BOUNDARY = "boundary"
"""The kind of (sectors of a record, sectors that were left of it)."""
POINT = "point"
"""The kind of a fault point of the daemon; ``CLIENT_POINT`` of a client."""
CLIENT_POINT = "client_point"
Mark = tuple[str, str | tuple[int, int]]


@dataclass
class Coverage:
    """Counts of hits; aims are what the worlds so far allowed. The kit's main thread only."""

    aims: set[Mark] = field(default_factory=set)
    hits: Counter[Mark] = field(default_factory=Counter)
    misses: Counter[Mark] = field(default_factory=Counter)

    def point(self, name: str, *, reached: bool, kind: str = POINT) -> None:
        """A process was to die at a fault point."""
        (self.hits if reached else self.misses)[kind, name] += 1

    def torn(self, sectors: int, boundary: int) -> None:
        """A record of so many sectors was cut."""
        self.hits[BOUNDARY, (sectors, boundary)] += 1

    def as_json(self) -> dict[str, Any]:
        """For ``Report.as_json``.

        ``points_total``: those that the run's worlds can come by; ``points_times``: [reached, not
        reached] of each; ``torn_boundaries``: by sectors of a record, at how many of its sector
        boundaries one ended, of how many there are.
        """
        found: dict[str, Any] = {}
        for kind in (POINT, CLIENT_POINT):
            names = self._all(kind)
            missing = [name for name in names if not self.hits[kind, name]]
            found[f"{kind}s_reached"] = len(names) - len(missing)
            found[f"{kind}s_total"] = len(names)
            found[f"{kind}s_missing"] = missing
            found[f"{kind}s_times"] = {
                name: [self.hits[kind, name], self.misses[kind, name]] for name in names
            }
        sizes: dict[int, list[int]] = {}
        missed: dict[str, list[int]] = {}
        for sectors, boundary in self._all(BOUNDARY):
            of = sizes.setdefault(sectors, [0, sectors + 1])
            if self.hits[BOUNDARY, (sectors, boundary)]:
                of[0] += 1
            else:
                missed.setdefault(str(sectors), []).append(boundary)
        found["torn_records"] = sum(n for (kind, _), n in self.hits.items() if kind == BOUNDARY)
        found["torn_boundaries"] = {str(size): counts for size, counts in sizes.items()}
        found["boundaries_reached"] = sum(reached for reached, _ in sizes.values())
        found["boundaries_total"] = sum(total for _, total in sizes.values())
        found["boundaries_missing"] = missed
        return found

    def _all(self, kind: str) -> list[Any]:
        marks = self.aims | self.hits.keys() | self.misses.keys()
        return sorted(name for each, name in marks if each == kind)
