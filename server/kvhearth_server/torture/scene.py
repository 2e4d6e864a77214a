"""What a world is made of, and what faults say of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvhearth.faults import DISK_ENVIRONMENT_NAME
from kvhearth_server.torture import damage
from kvhearth_server.torture.clock import set_offsets
from kvhearth_server.torture.content import key_of
from kvhearth_server.torture.damage import ARENA, DRIVE
from kvhearth_server.torture.oracle import Oracle
from kvhearth_server.torture.places import Places
from kvhearth_server.torture.report import Report
from kvhearth_server.torture.script import Plan
from kvhearth_server.torture.served import Daemon
from kvhearth_server.torture.shape import ROOMY
from kvhearth_server.torture.stalls import Stalls

ON_DRIVE = "checksum_failures{ssd}"
"""The daemon's counter of what did not leave the drive."""

PATIENCE_S = 15.0
"""What is not served, given back or closed after so long never will be."""


class Scene:
    """Places, promises, and the daemon's settings; the daemon does not run yet.

    Attributes:
        models: names of the shape's models.
        patience_s: ``PATIENCE_S``; shorter where something is known to be lost.
        monotonic_s: how far the daemon's monotonic clock is ahead.
        damaged: where faults damaged bytes: in the ``ARENA``, on the ``DRIVE``.
        drive_is_good: no fault has hit the drive, so everything must reach it.
        drive_is_suspect: a fault has hit it since the daemon's start.
        counted: boot and counters of the daemon at the last look.
    """

    def __init__(self, plan: Plan, places: Places, report: Report, stalls: Stalls) -> None:
        self.plan, self.shape, self.places, self.report = plan, plan.shape, places, report
        self.stalls = stalls
        self.oracle = Oracle(keeps=self.shape.keeps)
        self.models = [self.model_name(number) for number in range(len(self.shape.models))]
        self.step = 0
        self.patience_s = PATIENCE_S
        self.monotonic_s = 0.0
        self.damaged: set[str] = set()
        self.drive_is_good = True
        self.drive_is_suspect = False
        self.counted: tuple[str, dict[str, int]] = ("", {})
        self.orders()
        set_offsets(places.clock, 0.0, 0.0)
        self.daemon = Daemon(
            places.folder,
            self.shape.flags(places.arena, places.ssd),
            {DISK_ENVIRONMENT_NAME: str(places.orders)} if self.shape.ssd_bytes else {},
            places.clock if self.shape.skewed else None,
        )

    @property
    def where(self) -> dict[str, Any]:
        """For findings."""
        return {"world": self.plan.number, "step": self.step, "kind_of_world": self.shape.kind}

    @property
    def arena_dir(self) -> Path:
        """Of the arena's files."""
        return self.places.arena

    @property
    def ssd_dir(self) -> Path:
        """The drive's directory."""
        return self.places.ssd

    @property
    def clock_file(self) -> Path:
        """What the daemon's clocks follow."""
        return self.places.clock

    def model_name(self, number: int) -> str:
        """Of one of the world's models."""
        return f"m{self.plan.seed}.{self.plan.number}.{number}"

    @contextlib.contextmanager
    def window(self, why: str) -> Iterator[None]:
        """What takes long meanwhile is explained."""
        opened = self.stalls.open(why)
        try:
            yield
        finally:
            self.stalls.close(opened)

    def orders(self, **said: Any) -> None:
        """Command the drive; without arguments it is good again."""
        fresh = self.places.orders.with_suffix(".new")
        fresh.write_text(json.dumps(said))
        fresh.replace(self.places.orders)

    def drive_faulted(self) -> None:
        """What cannot be written is evicted without a copy, what cannot be read is forgotten, a
        tier that was told "no space" makes room in what it has: until the daemon's next start any
        block may get lost that does not fit into memory.
        """
        self.drive_is_good, self.drive_is_suspect = False, True
        if self.shape.kind != ROOMY:
            self.oracle.keeps = False

    def trust_drive(self) -> None:
        """The daemon is dead: its successor knows what is whole on the drive, and no more."""
        if self.drive_is_suspect and self.shape.kind != ROOMY:
            self.excuse_not_on_disk("drive fault")
            self.oracle.keeps = self.shape.keeps
        self.drive_is_suspect = False

    def explains_checksum(self, source: str) -> bool:
        """Whether a checksum that failed at this source is due to a fault. What is wrong on the
        drive is stopped there: it must not come as far as the arena and its readers.
        """
        return ARENA in self.damaged or (DRIVE in self.damaged and source == ON_DRIVE)

    def excuse(self, keys: Iterable[bytes], why: str, *, spoilt: bool = False) -> None:
        """Blocks that may be gone.

        Args:
            spoilt: the daemon may not have found out yet (``Oracle.spoil``).
        """
        wanted = set(keys)
        take = self.oracle.spoil if spoilt else self.oracle.excuse
        for model in self.models:
            known = self.oracle.within_reach(model)
            take(model, [number for number in known if key_of(model, number) in wanted], why)

    def excuse_unless_on_disk(
        self, keys: Iterable[bytes], why: str, *, spoilt: bool = False
    ) -> None:
        """Blocks whose copy in memory is damaged: a whole one on the drive repairs them.

        Args:
            spoilt: as for ``excuse``.
        """
        wanted = set(keys)
        take = self.oracle.spoil if spoilt else self.oracle.excuse
        for model, above in self.not_on_disk().items():
            take(model, [number for number in above if key_of(model, number) in wanted], why)

    def excuse_all(self, why: str) -> None:
        """Nobody can name the blocks any more."""
        for model in self.models:
            self.oracle.excuse(model, self.oracle.within_reach(model), why)

    def excuse_not_on_disk(self, why: str) -> None:
        """Blocks that are in memory only."""
        for model, above in self.not_on_disk().items():
            self.oracle.excuse(model, above, why)

    def not_on_disk(self, *, sealed: bool = False) -> dict[str, list[int]]:
        """By model, blocks that are not whole on the drive under the present weights.

        Args:
            sealed: only those that were acknowledged; else also those that may be.
        """
        whole = damage.blocks_on_disk(self.ssd_dir) if self.shape.ssd_bytes else set()
        found = {}
        for model in self.models:
            epoch = self.oracle.epoch(model)
            known = self.oracle.known(model) if sealed else self.oracle.within_reach(model)
            found[model] = [n for n in known if (key_of(model, n), epoch) not in whole]
        return found
