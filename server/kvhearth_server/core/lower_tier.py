"""Slower tiers, as the core sees them: what they have, and queues of blocks to copy to them.

Every block that becomes servable is offered once. Eviction takes only saved or refused blocks: a
block that still waits keeps its room, and a reservation that needs the room is refused.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvhearth.contract import GroupSpec
from kvhearth.model import I64, U32, Bools, Records
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.slot_table import CopyState, SlotTable, State

U64 = npt.NDArray[np.uint64]


class Below(NamedTuple):
    """What slower tiers have of some keys; each of shape (n,).

    Attributes:
        present: could be loaded.
        remote: those of the present ones that only a shared tier has; None for none.
        asking: not known yet: a shared tier is being asked; None for none.
    """

    present: Bools
    remote: Bools | None = None
    asking: Bools | None = None


class LowerTier(Protocol):
    """The slower tiers, as a lookup sees them."""

    def ask(
        self, namespace: Namespace, kv_group: int, keys: Sequence[bytes], here: Bools
    ) -> Below | None:
        """Report which keys of a chain of the namespace's current epoch could be loaded, except
        those that are in memory (``here``); None if no tier has any. Never waits.
        """

    def present(self, namespace: Namespace, kv_group: int, keys: Sequence[bytes]) -> Bools:
        """Report which keys of the current epoch the daemon's own tiers have."""

    def shared_has(self, namespace: Namespace, kv_group: int, keys: Sequence[bytes]) -> Bools:
        """Report which keys a shared tier has, as far as is known without asking it."""

    def list_keys(
        self, namespace: Namespace, kv_group: int, place: int, count: int
    ) -> tuple[list[bytes], int]:
        """List blocks of the namespace's current epoch on the daemon's own tiers; see ``Tier``."""


@dataclass(frozen=True)
class PromotionRequest:
    """Blocks on a slower tier that would lengthen a hit, root first.

    ``parents`` are the preceding keys in the chain, empty for none; ``until``: time, in seconds,
    from which the requester no longer waits for blocks of a shared tier.
    """

    namespace: Namespace
    kv_group: int
    spec: GroupSpec
    keys: list[bytes]
    parents: list[bytes]
    until: float = field(default=math.inf, compare=False)

    def split(self, count: int) -> tuple[PromotionRequest, PromotionRequest | None]:
        """Split off the first ``count`` blocks; the second part is None if there are no more."""
        if len(self.keys) <= count:
            return self, None
        head = replace(self, keys=self.keys[:count], parents=self.parents[:count])
        return head, replace(self, keys=self.keys[count:], parents=self.parents[count:])

    def some(self, rows: Iterable[int]) -> PromotionRequest:
        """Return the request of some of the blocks."""
        pairs = [(self.keys[row], self.parents[row]) for row in rows]
        return replace(
            self, keys=[key for key, _ in pairs], parents=[before for _, before in pairs]
        )


@dataclass(frozen=True, eq=False)
class BlockBatch:
    """Blocks of one namespace, epoch and KV group that are to be written to a slower tier.

    ``slots`` (n, shards); ``generations`` (n,) of the heads; ``checksums`` (n, shards) of 16 bytes;
    ``sequences`` and ``parents`` (n,): the numbers of these commits and of the commits that they
    continue, 0 for none; ``parent_keys``: keys of these for shared tiers, else empty; ``renew``:
    the shared tier has them, and their life there begins again.
    """

    namespace: Namespace
    kv_group: int
    spec: GroupSpec
    segment: int
    epoch: int
    keys: list[bytes]
    slots: I64
    generations: U32
    checksums: Records
    sequences: U64
    parents: U64
    parent_keys: list[bytes] = field(default_factory=list)
    renew: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's shards."""
        return int(self.slots.shape[1]) * self.spec.page_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of all shards."""
        return self.slots.size * self.spec.page_bytes


class Watcher(Protocol):
    """Hears of the blocks that become servable or are used."""

    def offered(self, heads: I64) -> None:
        """Handle blocks that became servable."""

    def used(self, heads: I64) -> None:
        """Handle a use of blocks."""


_SUMMED = int(State.SUMMED)
_SAVED = int(CopyState.SAVED)
_RUN = 1024
"""Blocks in one entry of the queue: each look at an entry costs its length."""


class WritebackQueue:
    """The write-back queues, one per arena segment; off while there is no slower tier."""

    def __init__(self, table: SlotTable, add: Callable[[str, int, str], None]) -> None:
        """Make empty queues; ``add`` counts: the name of a counter, an amount, a label."""
        self._table, self._add = table, add
        self._stride = table.geometry.stride
        count = len(table.geometry.segments)
        self._queues: list[deque[tuple[I64, U32]]] = [deque() for _ in range(count)]
        self._last = 0
        self.on = False
        """Whether there is a slower tier."""
        self.watcher: Watcher | None = None
        """Hears of the same blocks, whether there is a slower tier or not."""
        self.closed = ""
        """Reason why offered blocks are refused at once; empty while the tier accepts some."""
        self.under_pressure = False
        """Whether room was missing because blocks wait here; reset by the writer of the blocks."""
        self.waiting = 0
        """Number of blocks in the queue; blocks removed meanwhile count until it is their turn."""

    def offer(self, heads: I64) -> None:
        """Queue blocks of one segment for saving, oldest first, except waiting and saved ones."""
        if self.watcher is not None:
            self.watcher.offered(heads)
        if not self.on:
            return
        table = self._table
        copy_state = table.copy_state[heads]
        fit = ((copy_state == CopyState.NOT) | (copy_state == CopyState.REFUSED)) & (
            table.state[heads] == _SUMMED
        )
        if not fit.all():
            heads = heads[fit]
        if not len(heads):
            return
        if self.closed:
            table.copy_state[heads] = CopyState.REFUSED
            self._add("demotion_refused", len(heads), self.closed)
        else:
            table.copy_state[heads] = CopyState.QUEUED
            for start in range(0, len(heads), _RUN):
                run = heads[start : start + _RUN]
                self._queue_of(run).append((run, table.generation[run].copy()))
            self.waiting += len(heads)

    def used(self, heads: I64) -> None:
        """Offer refused blocks once more, because they were used."""
        if self.watcher is not None:
            self.watcher.used(heads)
        if not self.on or self.closed:
            return
        refused = heads[self._table.copy_state[heads] == CopyState.REFUSED]
        if len(refused):
            self.offer(np.unique(refused))

    @property
    def follows(self) -> bool:
        """Whether it matters which blocks become servable or are used."""
        return self.on or self.watcher is not None

    def evictable(self, head: int) -> bool:
        """Whether evicting the block loses nothing that was to be kept."""
        return not self.on or self._table.copy_state.item(head) >= _SAVED

    def segments(self) -> Iterator[int]:
        """Yield segments with waiting blocks; the one that was served last comes last."""
        count = len(self._queues)
        for step in range(1, count + 1):
            if self._queues[(self._last + step) % count]:
                yield (self._last + step) % count

    def served(self, segment: int) -> None:
        """Note that a segment was served; the others take their turn."""
        self._last = segment

    def take(self, segment: int) -> tuple[I64, U32] | None:
        """Take the oldest entry of a segment that still waits: heads and generations; or None."""
        queue = self._queues[segment]
        while queue:
            heads, generations = queue.popleft()
            self.waiting -= len(heads)
            live = self._table.generation[heads] == generations
            live &= self._table.copy_state[heads] == CopyState.QUEUED
            if live.any():
                return heads[live], generations[live]
        return None

    def put_back(self, heads: I64, generations: U32) -> None:
        """Return heads to the front of their queue."""
        if len(heads):
            self._table.copy_state[heads] = CopyState.QUEUED
            self._queue_of(heads).appendleft((heads, generations))
            self.waiting += len(heads)

    def reject_all(self) -> int:
        """Refuse all waiting blocks, so that their room can be taken; returns their number."""
        refused = 0
        for segment in list(self.segments()):
            while (taken := self.take(segment)) is not None:
                self._table.copy_state[taken[0]] = CopyState.REFUSED
                refused += len(taken[0])
        return refused

    def _queue_of(self, heads: I64) -> deque[tuple[I64, U32]]:
        return self._queues[int(self._table.slab_segment[heads[0] // self._stride])]
