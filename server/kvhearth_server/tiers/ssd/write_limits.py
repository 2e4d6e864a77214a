"""Limits on writes to the drives: an admission policy and the daily byte budget. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvhearth.model import Bools
from kvhearth_server.tiers.base import Bucket, Counts


class SeenTwice:
    """Admits a block when it is offered for the second time: most blocks that a prompt leaves
    behind are never requested again, and cost the drive nothing this way.

    Offered blocks are remembered in two sets of 64-bit hashes, of at most ``remembered`` each. When
    the younger set is full, the older one is forgotten.
    """

    def __init__(self, remembered: int = 1 << 18) -> None:
        self._size = max(1, remembered)
        self._young: set[int] = set()
        self._old: set[int] = set()

    def admit(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> Bools:
        """Decide once for each block that might be stored; return which are admitted, (n,)."""
        good = np.zeros(len(keys), np.bool_)
        for row, key in enumerate(keys):
            name = hash((namespace, group, key))
            good[row] = name in self._young or name in self._old
            self._remember(name)
        return good

    def _remember(self, name: int) -> None:
        if len(self._young) >= self._size:
            self._young, self._old = set(), self._young
        self._young.add(name)


DAY_S = 86400.0


class WriteBudget(Bucket):
    """Counts all bytes written to drives, and bounds them: a bucket that fills at ``bytes_per_day``
    and holds the bytes of an hour. Called on the loop only.

    All written bytes are spent, including writes that cannot be refused: these can put the bucket
    into debt, and writes that can be refused wait until the debt is paid. The bucket starts a tenth
    full, so that repeated restarts write hardly more. Zero bytes a day stand for no bound.
    """

    def __init__(self, bytes_per_day: int, counts: Counts, now: float) -> None:
        super().__init__(0.0, 0.0, now)
        self._counts = counts
        self.use(bytes_per_day, now)

    def use(self, bytes_per_day: int, now: float) -> None:
        """Fill at another rate from now on."""
        left = self.left(now)
        if bytes_per_day / DAY_S != self._rate:
            fresh = self.unbounded
            self._rate, self._size = bytes_per_day / DAY_S, float(bytes_per_day // 24)
            self._level = self._size / 10 if fresh else min(self._size, left)

    def wrote(self, size: int, now: float, *, taken: bool = False) -> None:
        """Count ``size`` bytes that go to a drive; ``taken``: they are spent already."""
        self._counts.add("written_bytes", size)
        if not taken:
            self.spend(size, now)

    def give_back(self, size: int) -> None:
        """Return ``size`` bytes that were spent but will not be written."""
        self._level = min(self._size, self._level + size)

    def take(self, size: int, count: int, now: float) -> int:
        """Spend the level on blocks of ``size`` bytes; return how many of ``count`` may be written.

        The last block may overdraw the bucket: otherwise a block larger than the bucket would be
        kept out forever. Later blocks wait until the overdraft is paid.
        """
        if self.unbounded:
            return count
        taken = min(count, math.ceil(max(0.0, self.left(now)) / size))
        self._level -= taken * size
        return taken

    def has(self, size: int, now: float) -> bool:
        """Whether ``size`` bytes can be spent without debt."""
        return self.unbounded or self.left(now) >= size

    def may_carry(self, share_bytes: int, now: float) -> bool:
        """Whether blocks of a segment, ``share_bytes`` at most, may be written once more.

        They may leave a debt of ``share_bytes``, which new blocks pay: new blocks spend the whole
        income of the budget, and without a debt no hot block would ever be kept.
        """
        return self.unbounded or self.left(now) >= -share_bytes
