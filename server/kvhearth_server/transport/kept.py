"""Bytes that a door keeps for its peers, such as unfinished frames: one budget for all of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

_GIVE_BACK_BYTES = 8 << 20


class Keeper(Protocol):
    """A connection for whose peer bytes are kept."""

    @property
    def owner(self) -> Hashable:
        """Who the peer is: its connections count together."""

    @property
    def kept_bytes(self) -> int:
        """Bytes kept now; 0 once it is ended."""

    def end_for_memory(self) -> None:
        """End the connection, for this reason; calls nothing of the budget's."""


K = TypeVar("K", bound=Keeper)


class Kept(Generic[K]):
    """The budget. Thread-safe.

    When it is spent, the owner whose connections keep the most loses that which keeps the most.

    Args:
        freed: called once most of a large amount is free again, to give the memory back.
    """

    def __init__(self, bytes_max: int, freed: Callable[[], object]) -> None:
        self._bytes_max, self._freed = bytes_max, freed
        self._lock = threading.Lock()
        self._most_bytes = 0
        self._bytes: dict[K, int] = {}
        self.total_bytes = 0

    def note(self, keeper: K) -> None:
        """Record how many bytes a connection keeps now."""
        with self._lock:
            self._note(keeper)
            freed = self.total_bytes <= self._most_bytes // 8
            freed = freed and self._most_bytes >= _GIVE_BACK_BYTES
            if freed:
                self._most_bytes = 0
        if freed:
            self._freed()

    def _note(self, keeper: K) -> None:
        self._record(keeper)
        if self.total_bytes > self._bytes_max:
            for each in list(self._bytes):  # nobody tells when a peer reads what waits for it
                self._record(each)
        while self.total_bytes > self._bytes_max:
            largest = self._largest()
            largest.end_for_memory()
            self._record(largest)
        self._most_bytes = max(self._most_bytes, self.total_bytes)

    def _record(self, keeper: K) -> None:
        count = keeper.kept_bytes
        self.total_bytes += count - self._bytes.pop(keeper, 0)
        if count:
            self._bytes[keeper] = count

    def _largest(self) -> K:
        by_owner: Counter[Hashable] = Counter()
        for keeper, count in self._bytes.items():
            by_owner[keeper.owner] += count
        owner = max(by_owner, key=by_owner.__getitem__)
        its = [each for each in self._bytes if each.owner == owner]
        return max(its, key=self._bytes.__getitem__)
