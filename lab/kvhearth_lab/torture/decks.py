"""What the worlds of a run could hit, and what of it was hit: fault points, sector boundaries."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

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


Card = TypeVar("Card", bound=Hashable)


class Deck(Generic[Card]):
    """Cards in a seeded order. What a world has no use for waits for one that has. A card that is
    wanted more often is there several times, and comes again when all others came once.
    """

    def __init__(self, seed: str, cards: Iterable[Card]) -> None:
        self._dice = random.Random(seed)
        self._cards = list(cards)
        self._hand: list[Card] = []

    def deal(self, count: int, fits: Callable[[Card], bool] = lambda _: True) -> list[Card]:
        """The next ``count`` cards that fit; fewer only if no card fits."""
        dealt: list[Card] = []
        while len(dealt) < count:
            found = next((card for card in self._hand if fits(card)), None)
            if found is not None:
                self._hand.remove(found)
                dealt.append(found)
            elif any(map(fits, self._cards)):
                # Those that wait are not shuffled in a second time.
                self._hand += self._shuffled()
            else:
                break
        return dealt

    def _shuffled(self) -> list[Card]:
        """What is not in the hand; no card comes a second time before all others came once."""
        fresh = list((Counter(self._cards) - Counter(self._hand)).elements())
        self._dice.shuffle(fresh)
        turns = [fresh[:place].count(card) for place, card in enumerate(fresh)]
        return [fresh[place] for place in sorted(range(len(fresh)), key=turns.__getitem__)]


class Decks:
    """The decks of a run, by name. What is dealt to a world follows from the seed and from the
    worlds before, whether or not these were gone through.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._decks: dict[str, Deck[str]] = {}
        self._numbers: dict[int, Deck[int]] = {}

    def names(self, what: str, names: Iterable[str]) -> Deck[str]:
        """The deck of these names."""
        if what not in self._decks:
            self._decks[what] = Deck(f"{self._seed}/{what}", names)
        return self._decks[what]

    def boundaries(self, sectors: int) -> Deck[int]:
        """The deck of the sector boundaries of a record, its beginning and its end among them."""
        if sectors not in self._numbers:
            self._numbers[sectors] = Deck(f"{self._seed}/sectors {sectors}", range(sectors + 1))
        return self._numbers[sectors]
