"""Outputs of the core: actions that its shell performs before a reply leaves, and block events."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvhearth.model import I64, U32
from kvhearth_server.core.slot_table import State


@dataclass(frozen=True)
class Mark:
    """Write a new state (and the owner's group number) of slots to the journal."""

    slots: I64
    state: State
    owner: int = 0


@dataclass(frozen=True)
class Bind:
    """Write the headers of newly committed blocks.

    ``slots`` has shape (n, shards), ``sequences`` (n,): every shard of a block carries the same
    sequence. ``parents`` (n,) are the heads that the blocks continue, -1 for none. ``length`` is
    the bytes of one shard.
    """

    slots: I64
    sequences: I64
    parents: I64
    length: int
    keys: list[bytes]
    namespace: int
    group: int
    epoch: int
    state: State


class BindOne(NamedTuple):
    """``Bind`` for one block of one slot, handed out at ``generation``, in plain numbers."""

    slot: int
    generation: int
    sequence: int
    parent: int
    length: int
    key: bytes
    namespace: int
    group: int
    epoch: int
    state: State

    def whole(self) -> Bind:
        """Convert to the general action."""
        return Bind(
            np.array([[self.slot]], np.int64),
            np.array([self.sequence], np.int64),
            np.array([self.parent], np.int64),
            self.length,
            [self.key],
            self.namespace,
            self.group,
            self.epoch,
            self.state,
        )


@dataclass(frozen=True)
class Summed:
    """Write the checksums of slots (flat) and then their state."""

    slots: I64


class Sum(NamedTuple):
    """Compute checksums of slots off the loop and report them to ``Writing.summed``.

    Arrays have shape (n, shards).
    """

    slots: I64
    generations: U32


@dataclass(frozen=True)
class SlabSized:
    """Write the new slot size of a slab (0: none)."""

    slab: int
    slot_bytes: int


Action = Mark | Bind | BindOne | Summed | Sum | SlabSized


class EventKind(enum.StrEnum):
    """The kind of change that an event reports."""

    STORED = "stored"
    REMOVED = "removed"
    MOVED = "moved"


@dataclass(frozen=True)
class Event:
    """One batch of blocks that changed in the same way at once.

    ``cause`` is the reason (an eviction cause), ``tier`` the present location of the blocks ("" for
    nowhere).
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
    """Events from a reader's cursor on; ``lost`` is the number that left the window unread."""

    events: tuple[Event, ...]
    next_sequence: int
    lost: int


class EventLog:
    """Ordered stream of block events for subscribers; ``keys_max`` bounds its memory.

    Events are numbered without gaps. The log keeps a bounded window; a reader that falls out of it
    learns how many events it lost and must take a snapshot. Without subscribers no events are kept,
    but the numbers continue.
    """

    def __init__(self, keys_max: int = 1 << 18) -> None:
        self._keys_max = keys_max
        self._window: deque[Event] = deque()
        self._keys = 0
        self._next = 1
        self._readers = 0

    @property
    def next_sequence(self) -> int:
        """Number of the next event."""
        return self._next

    @property
    def has_readers(self) -> bool:
        """Whether keys of new events are kept."""
        return self._readers > 0

    def subscribe(self) -> int:
        """Start keeping events; returns the cursor to read from."""
        self._readers += 1
        return self._next

    def unsubscribe(self) -> None:
        """Remove one reader; the window is dropped with the last one."""
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
        """Number an event, and keep it if there are readers."""
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
