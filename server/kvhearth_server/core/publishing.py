"""Publishing of blocks to a remote: which ones, in which order, and the holds on their slots.

Best effort: a block that waits here can be evicted at any time. Only blocks that are being copied
are held, as by a reader.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvhearth.model import I64, U32, Bools
from kvhearth_server.core.lower_tier import BlockBatch
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import CoreState
from kvhearth_server.core.writeback import Copies

QUEUED_BLOCKS_MAX = 1 << 16
"""Upper bound on waiting blocks; further ones are skipped until they are used again."""
RENEW_PAUSE = 1 / 16
"""Part of a block's life after which a renewal that failed is tried again."""
HELD_FRACTION_MAX = 0.0625
"""Upper bound on bytes being published, as a fraction of the smallest segment."""


class PublishPolicy(enum.StrEnum):
    """Blocks that are published: those that are used a second time with all blocks before them,
    all, or none.
    """

    REUSE = "reuse"
    ALL = "all"
    NEVER = "never"


class Publishing(Copies):
    """Blocks that wait to be published, and those that are being published.

    Watches a core's blocks through its ``WritebackQueue`` if the policy publishes any.

    Args:
        policy: blocks to publish; ``use`` changes it.

    Attributes:
        now: present time in seconds, set by whoever runs the batches.
    """

    def __init__(self, state: CoreState, policy: PublishPolicy = PublishPolicy.NEVER) -> None:
        super().__init__(state)
        self._queue: deque[tuple[I64, U32, bool]] = deque()
        """Blocks, their generations, and whether they are renewed."""
        # The generation, plus one, under which a block was used last and queued last.
        self._used = self._queued = np.zeros(0, np.uint32)
        # Time from which a use renews a published block; infinity while it is not published.
        self._renew_at: npt.NDArray[np.float64] = np.zeros(0)
        self.now = 0.0
        self.waiting = 0
        """Number of blocks in the queue."""
        self.use(policy)

    def use(self, policy: PublishPolicy, life_s: float = 0.0) -> None:
        """Publish by this policy from now on.

        Args:
            life_s: seconds after which the shared tier drops a block, which a use in the second
                half of that time renews; 0 for never.
        """
        self._policy, self._life_s = policy, life_s
        queue, count = self._state.writeback_queue, len(self._state.table.generation)
        queue.watcher = None if policy is PublishPolicy.NEVER else self
        if queue.watcher is None:
            self.skip_waiting("never")
        elif len(self._used) < count:
            self._used, self._queued = np.zeros((2, count), np.uint32)
            self._renew_at = np.full(count, math.inf)

    # -- the queue ---------------------------------------------------------------------------------

    def offered(self, heads: I64) -> None:
        """Handle blocks that became servable."""
        if self._policy is PublishPolicy.ALL:
            self._add(heads)

    def used(self, heads: I64) -> None:
        """Handle a use of blocks."""
        marks = self._state.table.generation[heads] + np.uint32(1)
        if self._policy is PublishPolicy.REUSE:
            again = self._used[heads] == marks
            if np.count_nonzero(again) < len(again):
                self._used[heads] = marks
                heads, marks = heads[again], marks[again]
        new = self._queued[heads] != marks
        if np.count_nonzero(new):
            self._add(heads[new])
        if self._life_s:
            old = np.unique(heads[~new])
            due = old[self._renew_at[old] <= self.now]
            if len(due):
                self._renew_at[due] = math.inf
                self._enqueue(due, renew=True)

    def leaving(self, namespace: Namespace, kv_group: int, keys: Sequence[bytes]) -> I64:
        """Queue blocks of a current epoch that the daemon's last tier is about to drop and that
        are worth publishing; return the rows of those that are not in memory.
        """
        if self._policy is PublishPolicy.NEVER or namespace.label is None:
            return np.zeros(0, np.int64)
        table = self._state.table
        heads = self._state.index.find(namespace.number, kv_group, keys)
        here = heads[heads >= 0]
        here = here[(table.state[here] == State.SUMMED) & (table.epoch[here] == namespace.epoch)]
        here = here[self._queued[here] != self._marks(here)]
        if len(here):
            self._add(here)
        absent: I64 = np.flatnonzero(heads < 0)
        return absent

    def _add(self, heads: I64) -> None:
        """Queue blocks that are not queued, with those before them in their chains."""
        table = self._state.table
        heads = np.unique(heads)
        self._queued[heads] = self._marks(heads)
        before = self._ancestors(heads)
        if len(before):
            self._queued[before] = self._marks(before)
            heads = np.concatenate([before, heads])
        self._renew_at[heads] = math.inf
        self._enqueue(heads[np.argsort(table.sequence[heads], kind="stable")], renew=False)

    def _enqueue(self, heads: I64, *, renew: bool) -> None:
        table = self._state.table
        room = QUEUED_BLOCKS_MAX - self.waiting
        if len(heads) > room:
            self._skip(heads[room:], "queue", renew=renew)
            heads = heads[:room]
        if len(heads):
            self._queue.append((heads, table.generation[heads].copy(), renew))
            self.waiting += len(heads)

    def _ancestors(self, heads: I64) -> I64:
        """Return the blocks before these in their chains that are not queued."""
        found = list[int]()
        for head in heads[self._lacks_parent(heads)].tolist():
            parent = self._parent(head)
            while parent >= 0 and self._is_new(parent):
                self._queued[parent] = self._marks(np.array([parent]))[0]
                found.append(parent)
                parent = self._parent(parent)
        return np.array(found, np.int64)

    def _parent(self, head: int) -> int:
        return int(self._state.table.parent.item(head)) - 1

    def _is_new(self, head: int) -> bool:
        return bool(self._queued[head] != self._marks(np.array([head]))[0])

    def _lacks_parent(self, heads: I64) -> Bools:
        """Return which blocks have a parent in memory that is neither queued nor published."""
        links = self._state.table.parent[heads].astype(np.int64) - 1
        parents = np.maximum(links, 0)
        lacks: Bools = (links >= 0) & (self._queued[parents] != self._marks(parents))
        return lacks

    def _marks(self, heads: I64) -> U32:
        marks: U32 = self._state.table.generation[heads] + np.uint32(1)
        return marks

    def _skip(self, heads: I64, why: str, *, renew: bool = False) -> None:
        """Leave out blocks; they are queued again when they are used."""
        self._later(heads, renew=renew)
        self._state.count("publish_skipped", len(heads), why)

    def _later(self, heads: I64, *, renew: bool) -> None:
        """Queue blocks again at their next use, renewals after a pause."""
        if renew:
            self._renew_at[heads] = self.now + RENEW_PAUSE * self._life_s
        else:
            self._queued[heads] = 0

    def skip_waiting(self, why: str) -> None:
        """Leave out all blocks that wait."""
        while self._queue:
            heads, generations, renew = self._queue.popleft()
            alive = self._state.table.generation[heads] == generations
            self._skip(heads[alive], why, renew=renew)
        self.waiting = 0

    # -- batches -----------------------------------------------------------------------------------

    def begin(self, blocks_max: int, bytes_max: int) -> BlockBatch | None:
        """Take the longest-waiting blocks of one kind and hold them until ``resolve``; None if
        none may be taken now.
        """
        while self._queue:
            heads, generations, renew = self._queue.popleft()
            self.waiting -= len(heads)
            heads = self._fit(heads, generations, renew=renew)
            if len(heads):
                return self._begin(heads, blocks_max, bytes_max, renew=renew)
        return None

    def _fit(self, heads: I64, generations: U32, *, renew: bool) -> I64:
        """Return the blocks that are still there, current, and wanted at a shared tier."""
        table, namespaces = self._state.table, self._state.namespaces
        live = (table.generation[heads] == generations) & (table.state[heads] == State.SUMMED)
        heads = heads[live]
        for number in np.unique(table.namespace[heads]).tolist():
            space = namespaces.get(number)
            mine = table.namespace[heads] == number
            # Without a label it stays marked, and is not looked at again.
            heads = heads[~mine | ((table.epoch[heads] == space.epoch) & (space.label is not None))]
        if renew:
            return heads
        orphans = self._lacks_parent(heads)
        if orphans.any():
            self._skip(heads[orphans], "parent")
            heads = heads[~orphans]
        return heads

    def _begin(
        self, heads: I64, blocks_max: int, bytes_max: int, *, renew: bool
    ) -> BlockBatch | None:
        count = self._room(heads, bytes_max, blocks_max=blocks_max)
        self._put_back(heads[count:], renew=renew)
        if not count:
            return None
        heads = heads[:count]
        return self._hold(heads, self._parent_keys(heads), renew=renew)

    def _put_back(self, heads: I64, *, renew: bool) -> None:
        if len(heads):
            self._queue.appendleft((heads, self._state.table.generation[heads].copy(), renew))
            self.waiting += len(heads)

    def _parent_keys(self, heads: I64) -> list[bytes]:
        links = self._state.table.parent[heads].astype(np.int64) - 1
        names = iter(self._state.index.keys(links[links >= 0]))
        return [next(names) if link >= 0 else b"" for link in links.tolist()]

    def retreat(self, batch: BlockBatch) -> None:
        """Queue a batch again that no tier took now."""
        alive = self._end(batch)
        self._put_back(batch.slots[alive, 0], renew=batch.renew)

    def skip(self, batch: BlockBatch, why: str, *, for_good: bool = False) -> None:
        """Leave out a batch that no tier took, and everything behind it in its chains.

        Args:
            for_good: do not offer it again.
        """
        alive = self._end(batch)
        heads = batch.slots[alive, 0]
        if for_good:
            self._state.count("publish_skipped", len(heads), why)
        else:
            self._skip(heads, why, renew=batch.renew)

    def resolve(self, batch: BlockBatch, published: I64, wrong: I64) -> None:
        """Release a batch's slots and record the outcome by row: ``published``, or ``wrong``: the
        bytes in memory do not match their checksum, and the block is removed. Others failed and
        are queued again when they are used.
        """
        state, heads = self._state, batch.slots[:, 0]
        alive = self._end(batch)
        failed = np.ones(len(heads), np.bool_)
        failed[published] = failed[wrong] = False
        self._later(heads[failed & alive], renew=batch.renew)
        if self._life_s:
            self._renew_at[heads[published][alive[published]]] = self.now + self._life_s / 2
        self._remove_wrong(heads[wrong][alive[wrong]], "publishing")
        state.count("renewed_blocks", len(published) if batch.renew else 0)
        state.count("published_blocks", len(published))
        state.count("published_bytes", len(published) * batch.block_bytes)
