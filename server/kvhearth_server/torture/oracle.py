"""What was promised: which blocks must be there, and which a fault may have taken.

A block is *sealed* when its commit was acknowledged. It must be served, right, for ever after,
unless a fault of the run hit its only copy (*excused*), eviction may have taken it, or it was in
memory that ends with the daemon and not yet on a drive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class _Model:
    epoch: int = -1
    sealed: dict[int, None] = field(default_factory=dict)
    tried: int = 0
    bumped: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    """Blocks that a client stores, of which no word has come yet."""
    struck: set[int] = field(default_factory=set)
    """Of these, blocks that a fault may have hit after their commit."""
    spoilt: set[int] = field(default_factory=set)
    """Blocks of which a fault has damaged a copy: until the daemon has found out, it takes a store
    of the same for a duplicate, or for one that is on the drive, and acknowledges it."""
    suspects: set[int] = field(default_factory=set)
    """Blocks that were excused since they were last asked for."""


class Oracle:
    """All models of one world. Any thread.

    Args:
        keeps: sealed blocks are kept from loss; false where eviction may take any of them.

    Attributes:
        excused: blocks that faults may have taken, by fault.
        vanished: sealed blocks that are gone because the weights epoch rose by itself.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self.excused: dict[str, int] = {}
        self.vanished = 0
        self._models: dict[str, _Model] = {}
        self._lock = threading.Lock()

    def tried(self, model: str, epoch: int, numbers: Iterable[int]) -> None:
        """A client begins to store blocks."""
        with self._lock:
            one = self._of(model, epoch)
            numbers = list(numbers)
            one.tried += sum(number not in one.sealed for number in numbers)
            one.begun.update(numbers)
            one.struck.difference_update(numbers)

    def bound(self, model: str, epoch: int, numbers: Iterable[int]) -> None:
        """The daemon acknowledged blocks."""
        with self._lock:
            one = self._of(model, epoch)
            numbers = list(numbers)
            one.begun.difference_update(numbers)
            if epoch == one.epoch:
                doubted = one.struck | one.spoilt
                one.sealed.update(dict.fromkeys(n for n in numbers if n not in doubted))

    def bumped(self, model: str, epoch: int) -> None:
        """The kit itself made the weights epoch ``epoch``."""
        with self._lock:
            self._models.setdefault(model, _Model()).bumped.add(epoch)

    def excuse(self, model: str, numbers: Iterable[int], why: str) -> int:
        """Blocks that a fault may have taken; how many were sealed."""
        with self._lock:
            one = self._models.get(model, _Model())
            numbers = list(numbers)
            gone = [n for n in numbers if n in one.sealed]
            one.struck.update(n for n in numbers if n not in one.sealed)
            one.suspects.update(gone)
            for number in gone:
                del one.sealed[number]
            self._count(why, len(gone))
            return len(gone)

    def spoil(self, model: str, numbers: Iterable[int], why: str) -> int:
        """As ``excuse``, and nothing is expected of them for as long as these weights are."""
        with self._lock:
            self._models.setdefault(model, _Model()).spoilt.update(numbers)
        return self.excuse(model, numbers, why)

    def sealed(self, model: str) -> tuple[int, list[int]]:
        """(epoch, blocks) that must be there."""
        with self._lock:
            one = self._models.get(model, _Model())
            return one.epoch, list(one.sealed) if self.keeps else []

    def suspects(self, model: str) -> list[int]:
        """Blocks that may be gone, or damaged: whatever is served of them must be right. Those that
        are spoilt each time, the others once.
        """
        with self._lock:
            one = self._models.get(model, _Model())
            found, one.suspects = one.suspects | one.spoilt, set()
            return sorted(found - one.sealed.keys())

    def epoch(self, model: str) -> int:
        """Of a model's weights; -1 while unknown."""
        with self._lock:
            return self._models.get(model, _Model()).epoch

    def known(self, model: str) -> list[int]:
        """Blocks that may be there."""
        with self._lock:
            return list(self._models.get(model, _Model()).sealed)

    def within_reach(self, model: str) -> list[int]:
        """Blocks that a fault may hit: those that may be there, and those being stored."""
        with self._lock:
            one = self._models.get(model, _Model())
            return [*one.sealed, *(one.begun - one.sealed.keys())]

    @property
    def total(self) -> int:
        """Blocks that must be there, or may."""
        with self._lock:
            return sum(len(one.sealed) for one in self._models.values())

    def attempts(self) -> int:
        """Blocks that clients began to store: no more than these take room."""
        with self._lock:
            return sum(one.tried for one in self._models.values())

    def _of(self, model: str, epoch: int) -> _Model:
        one = self._models.setdefault(model, _Model())
        if epoch > one.epoch:
            # Older weights' blocks are void; on purpose only if the kit bumped them.
            if epoch not in one.bumped and self.keeps:
                self.vanished += len(one.sealed)
            one.epoch, one.sealed = epoch, {}
            one.spoilt, one.suspects = set(), set()
        return one

    def _count(self, why: str, amount: int) -> None:
        if amount:
            self.excused[why] = self.excused.get(why, 0) + amount
