"""The ordered stream of what happened to blocks, for whoever subscribes.

Events are numbered without gaps. The log keeps a bounded window; a reader that fell out of it is
told so and must take a snapshot. Nothing is kept while nobody subscribes, but the numbers go on.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass


class EventKind(enum.StrEnum):
    """What happened."""

    STORED = "stored"
    REMOVED = "removed"
    MOVED = "moved"


@dataclass(frozen=True)
class Event:
    """One batch of blocks to which the same thing happened at once.

    ``cause`` is why (an eviction reason), ``tier`` where the blocks are now ("" for nowhere).
    """

    sequence: int
    kind: EventKind
    namespace: int
    group: int
    keys: tuple[bytes, ...]
    cause: str
    tier: str


@dataclass(frozen=True)
class EventBatch:
    """Events from a reader's cursor on; ``lost`` is how many fell out of the window unread."""

    events: tuple[Event, ...]
    next_sequence: int
    lost: int


class EventLog:
    """A bounded window over the stream; ``keys_max`` bounds its memory."""

    def __init__(self, keys_max: int = 1 << 18) -> None:
        self._keys_max = keys_max
        self._window: deque[Event] = deque()
        self._keys = 0
        self._next = 1
        self._readers = 0

    @property
    def next_sequence(self) -> int:
        """Number that the next event will have."""
        return self._next

    def subscribe(self) -> int:
        """Start to keep events; returns the cursor to read from."""
        self._readers += 1
        return self._next

    def unsubscribe(self) -> None:
        """One reader less; the window is dropped with the last one."""
        self._readers -= 1
        if self._readers == 0:
            self._window.clear()
            self._keys = 0

    def append(
        self,
        kind: EventKind,
        namespace: int,
        group: int,
        keys: list[bytes],
        *,
        cause: str = "",
        tier: str = "",
    ) -> None:
        """Number an event, and keep it if somebody reads."""
        sequence = self._next
        self._next += 1
        if not self._readers:
            return
        self._window.append(Event(sequence, kind, namespace, group, tuple(keys), cause, tier))
        self._keys += len(keys)
        while self._keys > self._keys_max and len(self._window) > 1:
            self._keys -= len(self._window.popleft().keys)

    def read(self, cursor: int, count_max: int = 1024) -> EventBatch:
        """Events from ``cursor`` on, in order, at most ``count_max``."""
        oldest = self._window[0].sequence if self._window else self._next
        lost = max(0, oldest - cursor)
        start = max(cursor, oldest)
        skip = start - oldest
        events = tuple(
            self._window[i] for i in range(skip, min(len(self._window), skip + count_max))
        )
        return EventBatch(events, start + len(events), lost)
