"""Coverage of fault points and sector boundaries, and the decks that spread faults over a run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

BOUNDARY = "boundary"
"""Kind of the marks (sectors of a record, sectors left of it)."""
POINT = "point"
"""Kind of the daemon's fault points; ``CLIENT_POINT`` is the kind of a client's, ``MOVER_POINT`` of
a remote's helper process.
"""
CLIENT_POINT, MOVER_POINT = "client_point", "mover_point"
Mark = tuple[str, str | tuple[int, int]]


@dataclass
class Coverage:
    """Counts of hits and misses; ``aims`` holds the marks that the worlds so far allowed. Only for
    the kit's main thread.
    """

    aims: set[Mark] = field(default_factory=set)
    hits: Counter[Mark] = field(default_factory=Counter)
    misses: Counter[Mark] = field(default_factory=Counter)

    def point(self, name: str, *, reached: bool, kind: str = POINT) -> None:
        """Record whether a process died at a fault point."""
        (self.hits if reached else self.misses)[kind, name] += 1

    def torn(self, sectors: int, boundary: int) -> None:
        """Record that a record of ``sectors`` sectors was cut at ``boundary``."""
        self.hits[BOUNDARY, (sectors, boundary)] += 1

    def as_json(self) -> dict[str, Any]:
        """Return the part of ``Report.as_json``.

        ``points_total``: number of points that the run's worlds can reach. ``points_times``:
        [reached, not reached] of each. ``torn_boundaries``: by sectors of a record, [sector
        boundaries at which a record ended, all its boundaries].
        """
        found: dict[str, Any] = {}
        for kind in (POINT, CLIENT_POINT, MOVER_POINT):
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


Card = TypeVar("Card", bound=Hashable)


class Deck(Generic[Card]):
    """Cards in a seeded order. A card that does not fit a world waits for one that it fits. A card
    wanted more often is present several times, and returns once all others were dealt.
    """

    def __init__(self, seed: str, cards: Iterable[Card]) -> None:
        self._rng = random.Random(seed)
        self._cards = list(cards)
        self._hand: list[Card] = []

    def deal(self, count: int, fits: Callable[[Card], bool] = lambda _: True) -> list[Card]:
        """Return the next ``count`` cards that fit; fewer only if no card fits."""
        dealt: list[Card] = []
        while len(dealt) < count:
            found = next((card for card in self._hand if fits(card)), None)
            if found is not None:
                self._hand.remove(found)
                dealt.append(found)
            elif any(map(fits, self._cards)):
                # Waiting cards are not shuffled in a second time.
                self._hand += self._shuffled()
            else:
                break
        return dealt

    def _shuffled(self) -> list[Card]:
        """Return the cards that are not in the hand; none appears a second time before all others
        appeared once.
        """
        fresh = list((Counter(self._cards) - Counter(self._hand)).elements())
        self._rng.shuffle(fresh)
        turns = [fresh[:place].count(card) for place, card in enumerate(fresh)]
        return [fresh[place] for place in sorted(range(len(fresh)), key=turns.__getitem__)]


class Decks:
    """The decks of a run, by name. A world's cards follow from the seed and from the worlds before,
    whether or not these were run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._decks: dict[str, Deck[str]] = {}
        self._numbers: dict[int, Deck[int]] = {}

    def names(self, what: str, names: Iterable[str]) -> Deck[str]:
        """Return the deck of these names."""
        if what not in self._decks:
            self._decks[what] = Deck(f"{self._seed}/{what}", names)
        return self._decks[what]

    def boundaries(self, sectors: int) -> Deck[int]:
        """Return the deck of a record's sector boundaries, including its beginning and its end."""
        if sectors not in self._numbers:
            self._numbers[sectors] = Deck(f"{self._seed}/sectors {sectors}", range(sectors + 1))
        return self._numbers[sectors]
