"""What is dealt over a whole run, so that nothing comes twice before all came once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

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
