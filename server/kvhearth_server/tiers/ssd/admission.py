"""Which blocks are worth a write to the drive. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvhearth.model import Bools


class Admission(Protocol):
    """Asked once for each block that might be stored."""

    def admit(self, namespace: bytes, group: int, keys: Sequence[bytes], length: int) -> Bools:
        """Which blocks of shards of ``length`` bytes are let in, shape (n,)."""


class AdmitAll:
    """Everything within bounds of size.

    Args:
        length_min, length_max: bytes of a shard; ``length_max`` 0 stands for no bound.
    """

    def __init__(self, length_min: int = 0, length_max: int = 0) -> None:
        self._min, self._max = length_min, length_max

    def admit(self, namespace: bytes, group: int, keys: Sequence[bytes], length: int) -> Bools:
        good = length >= self._min and (not self._max or length <= self._max)
        return np.full(len(keys), good)


class SeenTwice:
    """A block gets in when it is offered for the second time: most of what one prompt leaves is
    never asked for again, and costs the drive nothing.

    The memory of what was offered is two sets of 64-bit hashes, of at most ``remembered`` each;
    when the younger one is full, the older one is forgotten.
    """

    def __init__(self, remembered: int = 1 << 18, rule: Admission | None = None) -> None:
        self._size = max(1, remembered)
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._rule = rule or AdmitAll()

    def admit(self, namespace: bytes, group: int, keys: Sequence[bytes], length: int) -> Bools:
        good = self._rule.admit(namespace, group, keys, length)
        family = (namespace, group)
        for row in np.flatnonzero(good).tolist():
            name = hash((family, keys[row]))
            good[row] = name in self._young or name in self._old
            self._remember(name)
        return good

    def _remember(self, name: int) -> None:
        if len(self._young) >= self._size:
            self._young, self._old = set(), self._young
        self._young.add(name)
