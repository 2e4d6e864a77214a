"""Stores of the scheduler's half: chooses full blocks, follows their copies, commits on a thread.

A commit is a call to the daemon, and the scheduler's thread makes none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from kvhearth.connectors.core.engine import NULL_PAGE, BlockTable, Context, PagePool
from kvhearth.connectors.core.step_metadata import Move, RankStored, StoreJob, WorkerReport
from kvhearth.contract import GroupKind
from kvhearth.model import CHECKSUM_BYTES, U8, Bools
from kvhearth.results import CommitGroup
from kvhearth.transfer.slot_pool import ReservationPool, Slots
from kvhearth.worker_thread import SupervisedThread


class BlockRefs:
    """References to the engine's pages, by store. Used by the scheduler's thread only.

    Args:
        pool: the engine's pages.
        percent: share of them that may be held. Beyond it nothing more is stored, since requests
            cannot use held pages.

    Attributes:
        held_count: pages held, counted once for each store that holds them.
    """

    def __init__(self, pool: PagePool, percent: int) -> None:
        self._pool = pool
        self._pages_max = max(1, pool.page_count * percent // 100)
        self._held_by: dict[int, list[int]] = {}
        self.held_count = 0

    @property
    def room(self) -> int:
        """Number of pages that may still be held."""
        return max(self._pages_max - self.held_count, 0)

    def hold(self, number: int, pages: Sequence[int]) -> None:
        """Keep pages from reuse for store ``number``."""
        self._pool.hold(pages)
        self._held_by[number] = list(pages)
        self.held_count += len(pages)

    def release(self, number: int) -> None:
        """Release a store's pages, its tail first, so that the tail is reused first.
        Idempotent.
        """
        pages = self._held_by.pop(number, None)
        if pages:
            self.held_count -= len(pages)
            self._pool.release(pages[::-1])

    def release_all(self) -> None:
        """Release the pages of all stores. Call it only when no copy reads them any more."""
        for number in list(self._held_by):
            self.release(number)

    @property
    def would_free(self) -> bool:
        """Whether a held page has no other holder and becomes free when its store ends."""
        single = self._pool.has_one_reference
        return any(single(page) for pages in self._held_by.values() for page in pages)

    def check_books(self) -> None:
        """Raise AssertionError if ``held_count`` differs from the number of pages held."""
        held = sum(len(pages) for pages in self._held_by.values())
        assert held == self.held_count, f"{held} pages held, counted {self.held_count}"


COMMITS_MAX = 4096
"""Upper bound on finished stores that wait for their commit; further ones are given back."""
_TICK_S = 0.25


@dataclass(eq=False)
class StorePart:
    """One group of a store.

    Attributes:
        keys: n keys in chain order.
        parent: the key before the first one, or empty.
        slots: slots that the blocks are copied to.
        ok, summed: (n, shards): copied well, and with a checksum in ``sums`` (n, shards, 16).
    """

    keys: list[bytes]
    parent: bytes
    slots: Slots
    ok: Bools
    sums: U8
    summed: Bools


@dataclass(eq=False)
class OpenStore:
    """A store that ranks work on; a void one is not committed."""

    parts: dict[int, StorePart]
    epoch: int
    ranks_left: int
    begun_at: float
    void: bool = False


class Committer:
    """Binds keys to slots that every rank has written.

    Args:
        context: the engine's shared objects.
        slot_pool: supplies slots and takes back those whose copies failed.

    Attributes:
        under_way: (group, key) of every block that is being stored.
    """

    def __init__(self, context: Context, slot_pool: ReservationPool) -> None:
        self.under_way: set[tuple[int, bytes]] = set()
        self._client = context.client
        self._counters = context.counters
        self._slot_pool = slot_pool
        self._commits: deque[OpenStore] = deque()
        self._at_hand: OpenStore | None = None
        self._worker = SupervisedThread("kvhearth-commit", self._step, self._recover)
        self._changed = self._worker.changed
        self._worker.start()

    def put(self, store: OpenStore) -> None:
        """Queue the commit of a store that every rank has finished."""
        with self._changed:
            if len(self._commits) < COMMITS_MAX:
                self._commits.append(store)
                self._changed.notify()
                return
        self._give_up(store)

    def drain(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` until all finished copies are committed; False if some are
        not.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._commits and self._at_hand is None, deadline_s
            )

    def close(self, deadline_s: float) -> bool:
        """Commit finished stores and stop the thread; False if that took too long."""
        until = time.monotonic() + deadline_s
        self.drain(deadline_s)
        return self._worker.stop(max(until - time.monotonic(), 0.1))

    # -- the thread --------------------------------------------------------------------------------

    def _step(self) -> None:
        with self._changed:
            if not self._commits:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._commits or self._worker.stopping, _TICK_S)
                return
            self._at_hand = self._commits.popleft()
        self._commit(self._at_hand)
        with self._changed:
            self._at_hand = None
            self._changed.notify_all()

    def _commit(self, store: OpenStore) -> None:
        commits: dict[int, CommitGroup] = {}
        boot_id = ""
        for group, part in store.parts.items():
            good = part.ok.all(axis=1)
            boot_id = part.slots.boot_id
            if not good.all():
                self._counters.add("store_failed", int(np.count_nonzero(~good)))
                bad = part.slots.extents[~good]
                self._slot_pool.give_back(group, Slots(boot_id, part.slots.session_id, bad))
            if good.any():
                keys = [part.keys[at] for at in np.flatnonzero(good).tolist()]
                sums = part.sums[good] if part.summed[good].all() else None
                commits[group] = CommitGroup(keys, part.slots.extents[good], sums, part.parent)
        if commits:
            result = self._client.commit(commits, boot_id=boot_id, epoch=store.epoch)
            asked = sum(len(item.keys) for item in commits.values())
            stored = sum(int(np.count_nonzero(flags)) for flags in result.stored.values())
            self._counters.add("store_failed" if result.reason else "store_blocks", asked)
            if not result.reason:
                self._counters.add("store_duplicates", asked - stored)
            self._slot_pool.nudge()
        self._forget(store)

    def _give_up(self, store: OpenStore) -> None:
        for group, part in store.parts.items():
            self._counters.add("store_failed", len(part.keys))
            self._slot_pool.give_back(group, part.slots)
        self._forget(store)

    def _forget(self, store: OpenStore) -> None:
        for group, part in store.parts.items():
            self.under_way.difference_update((group, key) for key in part.keys)

    def _recover(self) -> None:
        self._client.count("commit_crashes")
        store, self._at_hand = self._at_hand, None
        if store is not None:
            self._forget(store)


@dataclass
class Progress:
    """How far a request's blocks have been stored.

    Attributes:
        hashes: the engine's own list, which grows.
        key_salt: digest that belongs into the keys; nothing is stored while it is None (unknown).
        next_block: by group, the first block that was not examined yet.
        due_tokens: token count before which no further block becomes full.
        present: by group, blocks that the daemon had when it was asked.
        tokens_max: bound on stored tokens.
    """

    hashes: Sequence[bytes]
    next_block: list[int]
    key_salt: bytes | None = b""
    due_tokens: int = 0
    present: dict[int, Bools] = field(default_factory=dict)
    tokens_max: int = 1 << 62


class _Chosen(NamedTuple):
    """A block to store: its position in the request, its page, its key."""

    block: int
    page: int
    key: bytes


class Stores:
    """Plans, follows and commits stores.

    Args:
        context: the engine's shared objects.
        block_refs: references to the engine's pages.
    """

    def __init__(self, context: Context, block_refs: BlockRefs) -> None:
        self._client = context.client
        self._groups = context.groups
        self._geometry = context.geometry
        self._counters = context.counters
        self._block_refs = block_refs
        pool_tokens = context.settings.pool_tokens or 2 * context.facts.step_tokens_max
        pool_blocks = {
            group: max(2, -(-pool_tokens // spec.block_tokens))
            for group, spec in enumerate(context.groups.specs)
        }
        self._slot_pool = ReservationPool(context.client, pool_blocks)
        self._number = 0
        self._open: dict[int, OpenStore] = {}
        self._due: list[StoreJob] = []
        self._committer = Committer(context, self._slot_pool)

    @property
    def open_count(self) -> int:
        """Number of stores that ranks have not finished."""
        return len(self._open)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest open store in seconds."""
        first = next(iter(self._open.values()), None)
        return 0.0 if first is None else time.monotonic() - first.begun_at

    def take_due(self) -> list[StoreJob]:
        """Return the jobs planned since the last call, for the workers."""
        due, self._due = self._due, []
        return due

    def plan(
        self,
        progress: Progress,
        find_table: Callable[[], BlockTable],
        tokens: int,
        states: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """Store blocks that became full.

        Args:
            progress: the request's progress, which is advanced.
            find_table: returns the request's block table. It may be slow, so it is called at most
                once, and only if there is a block to store.
            tokens: tokens computed when the workers copy, all of them known.
            states: recurrent states that the engine hands off, as in ``Step``.
        """
        if progress.key_salt is None or self._client.epoch < 0:
            return
        tokens = min(tokens, progress.tokens_max)
        table = cache(find_table)
        moves: dict[int, Move] = {}
        parts: dict[int, StorePart] = {}
        held: list[int] = []
        session_id = boot_id = ""
        for group, spec in enumerate(self._groups.specs):
            room = min(self._block_refs.room - len(held), self._slot_pool.held(group))
            if room <= 0:
                continue
            if spec.kind is GroupKind.MAMBA:
                chosen = self._choose_states(progress, group, tokens, states)[:room]
            else:
                chosen = self._choose(progress, group, table, tokens, room)
            slots = self._slot_pool.take(group, len(chosen))
            if parts and slots.session_id != session_id:
                slots = Slots("", "", slots.extents[:0])  # a new session began in between
            if len(slots) < len(chosen):
                progress.next_block[group] = chosen[len(slots)].block
                chosen = chosen[: len(slots)]
            if not chosen:
                continue
            session_id, boot_id = slots.session_id, slots.boot_id
            pages = [one.page for one in chosen]
            held += pages
            moves[group] = Move(np.asarray(pages, np.int64), slots.extents)
            parts[group] = self._part(progress, group, chosen, slots)
        progress.due_tokens = self._groups.due_tokens(progress.next_block)
        if parts:
            self._begin(boot_id, moves, parts, held)

    def left_blocks(self, progress: Progress, tokens: int) -> int:
        """Count the blocks of a request that were not stored, for want of slots or of blocks to
        hold.
        """
        if progress.key_salt is None:
            return 0
        tokens = min(tokens, progress.tokens_max)
        return sum(
            max(self._groups.full_blocks(group, progress.hashes, tokens) - begin, 0)
            for group, begin in enumerate(progress.next_block)
            if self._groups.specs[group].kind is not GroupKind.MAMBA
        )

    def _choose(
        self,
        progress: Progress,
        group: int,
        find_table: Callable[[], BlockTable],
        tokens: int,
        blocks_max: int,
    ) -> list[_Chosen]:
        """Return the blocks of a group to store now; those that do not fit are examined again in
        the next step.
        """
        block = progress.next_block[group]
        end = self._groups.full_blocks(group, progress.hashes, tokens)
        if block >= end:
            return []
        table = find_table()[self._groups.kv_groups[group]]
        end = min(end, len(table))
        chosen: list[_Chosen] = []
        while block < end and len(chosen) < blocks_max:
            found = self._wanted(progress, group, block, table[block])
            if found is not None:
                chosen.append(found)
            block += 1
        progress.next_block[group] = block
        return chosen

    def _choose_states(
        self,
        progress: Progress,
        group: int,
        tokens: int,
        states: Sequence[tuple[int, int, int]],
    ) -> list[_Chosen]:
        """Return the states that the engine hands off at a block's end. A state between two ends
        has no key of a block and is skipped.
        """
        size, kv_group = self._groups.specs[group].block_tokens, self._groups.kv_groups[group]
        end = self._groups.full_blocks(group, progress.hashes, tokens)
        found = [
            self._wanted(progress, group, at // size - 1, page)
            for from_group, page, at in states
            if from_group == kv_group and at % size == 0 and 0 < at // size <= end
        ]
        return [one for one in found if one is not None]

    def _wanted(self, progress: Progress, group: int, block: int, page: int) -> _Chosen | None:
        """Return the block, unless it has no page, is in the daemon or on its way there."""
        present = progress.present.get(group)
        if page == NULL_PAGE or (present is not None and block < len(present) and present[block]):
            return None
        key = self._groups.key(group, progress.hashes, block, progress.key_salt or b"")
        return None if (group, key) in self._committer.under_way else _Chosen(block, page, key)

    def _part(
        self, progress: Progress, group: int, chosen: list[_Chosen], slots: Slots
    ) -> StorePart:
        first = chosen[0].block
        parent = b""
        if first:
            parent = self._groups.key(group, progress.hashes, first - 1, progress.key_salt or b"")
        keys = [one.key for one in chosen]
        self._committer.under_way.update((group, key) for key in keys)
        shape = slots.extents.shape
        return StorePart(
            keys,
            parent,
            slots,
            np.zeros(shape, np.bool_),
            np.zeros((*shape, CHECKSUM_BYTES), np.uint8),
            np.zeros(shape, np.bool_),
        )

    def _begin(
        self, boot_id: str, moves: dict[int, Move], parts: dict[int, StorePart], held: list[int]
    ) -> None:
        self._number += 1
        self._block_refs.hold(self._number, held)
        self._open[self._number] = OpenStore(
            parts, self._client.epoch, self._geometry.ranks, time.monotonic()
        )
        self._due.append(StoreJob(self._number, boot_id, moves))

    def reported(self, report: WorkerReport) -> None:
        """Process ranks' finished copies."""
        for number, outcomes in report.stores.items():
            store = self._open.get(number)
            if store is not None:
                for group, outcome in outcomes:
                    self._enter(store.parts[group], outcome)
        for number, count in report.stored_ranks.items():
            store = self._open.get(number)
            if store is None:
                continue
            store.ranks_left -= count
            if store.ranks_left <= 0:
                del self._open[number]
                if store.void:
                    for part in store.parts.values():
                        part.ok[:] = False
                self._block_refs.release(number)
                self._committer.put(store)

    def void(self) -> None:
        """Void the open stores, so that none is committed: another cache's load failed in a step
        that has already computed on it, and it is not known which pages hold the results.
        """
        for store in self._open.values():
            store.void = True

    def _enter(self, part: StorePart, outcome: RankStored) -> None:
        shard = self._geometry.shard_of(outcome.rank)
        part.ok[outcome.positions, shard] = outcome.ok
        if outcome.sums is not None:
            part.sums[outcome.positions, shard] = outcome.sums
            part.summed[outcome.positions, shard] = True

    def drain(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` until all finished copies are committed; False if some are
        not.
        """
        return self._committer.drain(deadline_s)

    def close(self, deadline_s: float) -> bool:
        """Commit finished stores, give the pool back and release blocks."""
        until = time.monotonic() + deadline_s
        ended = self._committer.close(deadline_s)
        for number, store in list(self._open.items()):
            self._block_refs.release(number)
            for group, part in store.parts.items():
                # A worker may still be writing.
                extents = {group: part.slots.extents}
                self._client.abort(extents, boot_id=part.slots.boot_id, in_doubt=True)
        self._open.clear()
        return self._slot_pool.close(max(until - time.monotonic(), 0.1)) and ended
