"""Stores of the scheduler's half: chooses full blocks, follows their copies, commits on a thread.

All blocks that a step fills are one store: one job for the workers, one report, one commit. A
commit is a call to the daemon, and the scheduler's thread makes none.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvhearth.connectors.core.engine import (
    NULL_PAGE,
    UNBOUNDED_TOKENS,
    BlockTable,
    Context,
    PagePool,
)
from kvhearth.connectors.core.step_metadata import Move, RankStored, StoreJob, WorkerReport
from kvhearth.contract import TOKENS_TOLD_MAX, GroupKind
from kvhearth.model import CHECKSUM_BYTES, TOKENS_UNKNOWN, TOKENS_UNPUBLISHED, U8, Bools
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
        """Keep pages from reuse for store ``number``, which may hold others already."""
        self._pool.hold(pages)
        self._held_by.setdefault(number, []).extend(pages)
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
        keys: n keys, chain after chain, each in chain order.
        parents: the key of the block before each, empty for none.
        pages: the engine's n pages.
        tokens: the ids of the tokens of each, as ``CommitGroup`` has them; empty if nobody
            publishes them.
        granted: pieces of the slots that the blocks are copied to, in order.
        slots: all n slots, once the store is complete.
        outcomes: results of the ranks' copies, with their shard.
    """

    keys: list[bytes] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    granted: list[Slots] = field(default_factory=list)
    outcomes: list[tuple[int, RankStored]] = field(default_factory=list)
    slots: Slots = field(init=False)

    def complete(self) -> Move:
        """Fix the blocks, and return their copies."""
        first = self.granted[0]
        self.slots = first
        if len(self.granted) > 1:
            every = np.concatenate([each.extents for each in self.granted])
            self.slots = Slots(first.boot_id, first.session_id, every)
        return Move(np.array(self.pages, np.int64), self.slots.extents)

    def results(self) -> tuple[Bools, U8 | None]:
        """Return which blocks (n,) all ranks have copied well, and the checksums (n, shards, 16) if
        the ranks computed those of all of them.
        """
        shape = self.slots.extents.shape
        ok, summed = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        sums = np.zeros((*shape, CHECKSUM_BYTES), np.uint8)
        for shard, outcome in self.outcomes:
            ok[outcome.positions, shard] = outcome.ok
            if outcome.sums is not None:
                sums[outcome.positions, shard] = outcome.sums
                summed[outcome.positions, shard] = True
        good: Bools = np.logical_and.reduce(ok, axis=1)
        return good, sums if summed[good].all() else None

    def commit_of(self, good: Bools, sums: U8 | None) -> CommitGroup:
        """Return the commit of the ``good`` (n,) blocks, at least one, with checksums of all n or
        none.
        """
        rows = np.flatnonzero(good).tolist()
        keys, parents = [self.keys[row] for row in rows], [self.parents[row] for row in rows]
        chains = [
            (at, parent) for at, parent in enumerate(parents) if not at or parent != keys[at - 1]
        ]
        tokens = None
        if self.tokens:
            packed = b"".join(self.tokens[row] for row in rows)
            tokens = np.frombuffer(packed, np.uint32).reshape(len(rows), -1)
        chosen = None if sums is None else sums[good]
        return CommitGroup(keys, self.slots.extents[good], chosen, chains=chains, tokens=tokens)


@dataclass(eq=False)
class OpenStore:
    """A store that ranks work on; a void one is not committed."""

    number: int
    epoch: int
    session_id: str
    ranks_left: int
    begun_at: float
    parts: dict[int, StorePart] = field(default_factory=dict)
    void: bool = False


class Committer:
    """Binds keys to slots that every rank has written.

    Args:
        context: the engine's shared objects.
        slot_pool: supplies slots and takes back those whose copies failed.

    Attributes:
        under_way: by group, the keys of all blocks that are being stored.
    """

    def __init__(self, context: Context, slot_pool: ReservationPool) -> None:
        self.under_way: list[set[bytes]] = [set() for _ in range(context.groups.count)]
        self._client = context.client
        self._clock = context.client.clock
        self._counters = context.counters
        self._slot_pool = slot_pool
        self._commits: deque[OpenStore] = deque()
        self._at_hand: OpenStore | None = None
        self._worker = SupervisedThread(
            "kvhearth-commit", self._step, self._recover, clock=context.client.clock
        )
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
            return self._clock.wait_for(
                self._changed, lambda: not self._commits and self._at_hand is None, deadline_s
            )

    def close(self, deadline_s: float) -> bool:
        """Commit finished stores and stop the thread; False if that took too long."""
        until = self._clock.now() + deadline_s
        self.drain(deadline_s)
        return self._worker.stop(max(until - self._clock.now(), 0.1))

    # -- the thread --------------------------------------------------------------------------------

    def _step(self) -> None:
        with self._changed:
            if not self._commits:
                self._changed.notify_all()
                self._clock.wait_for(
                    self._changed, lambda: self._commits or self._worker.stopping, _TICK_S
                )
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
            good, sums = part.results()
            if store.void:
                good[:] = False
            boot_id = part.slots.boot_id
            if not good.all():
                self._counters.add("store_failed", int(np.count_nonzero(~good)))
                bad = part.slots.extents[~good]
                self._slot_pool.give_back(group, Slots(boot_id, part.slots.session_id, bad))
            if good.any():
                commits[group] = part.commit_of(good, sums)
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
            self.under_way[group].difference_update(part.keys)

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
        token_ids: as in ``RequestOptions``.
    """

    hashes: Sequence[bytes]
    next_block: list[int]
    key_salt: bytes | None = b""
    due_tokens: int = 0
    present: dict[int, Bools] = field(default_factory=dict)
    tokens_max: int = UNBOUNDED_TOKENS
    token_ids: Sequence[int] | None = None


class _Run(NamedTuple):
    """Blocks of one group that one request stores, in chain order: their positions in the request,
    their pages and their keys, and the key of the block before each.
    """

    progress: Progress
    group: int
    blocks: list[int]
    pages: list[int]
    keys: list[bytes]
    parents: list[bytes]


STORE_BLOCKS_MAX = 1024
"""Most blocks of one store, so that its commit comes soon after its copies."""


class Stores:
    """Plans, follows and commits stores.

    Args:
        context: the engine's shared objects.
        block_refs: references to the engine's pages.
    """

    def __init__(self, context: Context, block_refs: BlockRefs) -> None:
        self._publishes = context.facts.publishes
        self._client = context.client
        self._clock = context.client.clock
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
        self._chosen: list[_Run] = []
        self._page_room = 0
        self._slot_room = [0] * context.groups.count
        self._planned: OpenStore | None = None
        self._open: dict[int, OpenStore] = {}
        self._due: list[StoreJob] = []
        self._committer = Committer(context, self._slot_pool)

    @property
    def open_count(self) -> int:
        """Number of stores that ranks have not finished."""
        return len(self._open) + (self._planned is not None)

    @property
    def short_reasons(self) -> str:
        """Why the daemon granted fewer slots than were asked for last, by group, or empty."""
        reasons = map(self._slot_pool.short_reason, range(self._groups.count))
        return ",".join(filter(None, reasons))

    @property
    def oldest_s(self) -> float:
        """Age of the oldest open store in seconds."""
        first = next(iter(self._open.values()), self._planned)
        return 0.0 if first is None else self._clock.now() - first.begun_at

    def take_due(self) -> list[StoreJob]:
        """Return the jobs planned since the last call, for the workers: one, unless the session or
        the epoch has changed in between.
        """
        self.hold_chosen()
        self._complete()
        due, self._due = self._due, []
        return due

    def begin(self) -> bool:
        """Note how many blocks ``plan`` may choose until ``hold_chosen``; False if none."""
        self.hold_chosen()
        known = self._client.epoch >= 0
        self._page_room = self._block_refs.room if known else 0
        for group in range(len(self._slot_room)):
            self._slot_room[group] = self._slot_pool.held(group)
        return self._page_room > 0 and any(self._slot_room)

    def plan(
        self,
        progress: Progress,
        find_table: Callable[[], BlockTable],
        tokens: int,
        states: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """Choose blocks that became full for the next store. Their pages must stay valid until
        ``hold_chosen``.

        Args:
            progress: the request's progress, which is advanced.
            find_table: returns the request's block table. It may be slow, so it is called at most
                once, and only if there is a block to store.
            tokens: tokens computed when the workers copy, all of them known.
            states: recurrent states that the engine hands off, as in ``Step``.
        """
        if progress.key_salt is None:
            return
        tokens = min(tokens, progress.tokens_max)
        table: BlockTable | None = None
        for group, spec in enumerate(self._groups.specs):
            room = min(self._page_room, self._slot_room[group])
            if room <= 0:
                continue
            end = self._groups.full_blocks(group, progress.hashes, tokens)
            if spec.kind is GroupKind.MAMBA:
                pages: Mapping[int, int] | Sequence[int] = self._states(group, end, states)
                chosen, _ = self._choose(progress, group, pages, list(pages), room)
            else:
                block = progress.next_block[group]
                if block >= end:
                    continue
                table = find_table() if table is None else table
                pages = table[self._groups.kv_groups[group]]
                full = range(block, min(end, len(pages)))
                chosen, done = self._choose(progress, group, pages, full, room)
                progress.next_block[group] += done
            self._page_room -= chosen
            self._slot_room[group] -= chosen
        progress.due_tokens = self._groups.due_tokens(progress.next_block)

    def _choose(
        self,
        progress: Progress,
        group: int,
        pages: Mapping[int, int] | Sequence[int],
        candidates: Sequence[int],
        room: int,
    ) -> tuple[int, int]:
        """Choose up to ``room`` blocks that have a page and are neither in the daemon nor on their
        way there. Return their number, and that of the candidates examined.
        """
        key_of, hashes, salt = self._groups.key, progress.hashes, progress.key_salt or b""
        under_way, present = self._committer.under_way[group], progress.present.get(group)
        known = 0 if present is None else len(present)
        blocks, chosen, examined = list[int](), list[int](), 0
        keys, parents = list[bytes](), list[bytes]()
        for block in candidates:
            if len(keys) == room:
                break
            examined += 1
            page = pages[block]
            if page == NULL_PAGE or (present is not None and block < known and present[block]):
                continue
            key = key_of(group, hashes, block, salt)
            if key not in under_way:
                if blocks and blocks[-1] == block - 1:
                    parents.append(keys[-1])
                else:
                    parents.append(key_of(group, hashes, block - 1, salt) if block else b"")
                blocks.append(block)
                chosen.append(page)
                keys.append(key)
        if keys:
            under_way.update(keys)
            self._chosen.append(_Run(progress, group, blocks, chosen, keys, parents))
        return len(keys), examined

    def _states(
        self, group: int, end: int, states: Sequence[tuple[int, int, int]]
    ) -> dict[int, int]:
        """Return the pages, by block, of the states that the engine hands off at the end of one of
        the first ``end`` blocks. A state between two ends has no key of a block and is skipped.
        """
        size, kv_group = self._groups.specs[group].block_tokens, self._groups.kv_groups[group]
        return {
            at // size - 1: page
            for from_group, page, at in states
            if from_group == kv_group and at % size == 0 and 0 < at // size <= end
        }

    def hold_chosen(self) -> None:
        """Give the chosen blocks slots, and keep their pages from reuse."""
        if not self._chosen:
            return
        runs, self._chosen = self._chosen, []
        for group in range(self._groups.count):
            own = [run for run in runs if run.group == group]
            if own:
                slots = self._slot_pool.take(group, sum(len(run.keys) for run in own))
                self._enter_runs(group, own, slots)

    def _enter_runs(self, group: int, runs: list[_Run], slots: Slots) -> None:
        """Add runs to the planned store, as far as there are slots for them."""
        left = len(slots)
        store = self._store_for(slots) if left else None
        part = StorePart() if store is None else store.parts.setdefault(group, StorePart())
        before = len(part.pages)
        for run in runs:
            taken = min(left, len(run.keys))
            left -= taken
            if taken < len(run.keys):  # a new session began in between
                self._committer.under_way[group].difference_update(run.keys[taken:])
                block = min(run.progress.next_block[group], run.blocks[taken])
                run.progress.next_block[group], run.progress.due_tokens = block, 0
            if taken:
                part.keys += run.keys[:taken]
                part.parents += run.parents[:taken]
                part.pages += run.pages[:taken]
                part.tokens += self._tokens(run, taken)
        if store is not None:
            part.granted.append(slots)
            self._block_refs.hold(store.number, part.pages[before:])

    def _tokens(self, run: _Run, count: int) -> list[bytes]:
        """Return what the first ``count`` blocks of a run hold, as ``CommitGroup`` tells it: of
        those in which an adapter has a part nothing is to be published.
        """
        progress, size = run.progress, self._groups.specs[run.group].block_tokens
        if not self._publishes or size > TOKENS_TOLD_MAX:
            return []
        blank = TOKENS_UNPUBLISHED if progress.key_salt else TOKENS_UNKNOWN
        nothing, ids = array("I", [blank]) * size, progress.token_ids
        if progress.key_salt or not ids:
            return [nothing.tobytes()] * count
        tokens = [array("I", ids[at * size : (at + 1) * size]) for at in run.blocks[:count]]
        return [(row if len(row) == size else nothing).tobytes() for row in tokens]

    def _store_for(self, slots: Slots) -> OpenStore:
        """Return the planned store if more slots fit into it; otherwise plan another one."""
        store, epoch = self._planned, self._client.epoch
        if store is not None:
            blocks = sum(len(part.keys) for part in store.parts.values())
            fits = not blocks or blocks + len(slots) <= STORE_BLOCKS_MAX
            if fits and (store.session_id, store.epoch) == (slots.session_id, epoch):
                return store
            self._complete()
        self._number += 1
        ranks = self._geometry.ranks
        store = OpenStore(self._number, epoch, slots.session_id, ranks, self._clock.now())
        self._planned = store
        return store

    def _complete(self) -> None:
        """Make the planned store a job for the workers."""
        store, self._planned = self._planned, None
        if store is None:
            return
        moves = {group: part.complete() for group, part in store.parts.items()}
        boot_id = next(iter(store.parts.values())).slots.boot_id
        self._open[store.number] = store
        self._due.append(StoreJob(store.number, boot_id, moves))

    def storing(self, keys: Mapping[int, Sequence[bytes]]) -> bool:
        """Whether some of these blocks are being stored."""
        under_way = self._committer.under_way
        return any(not under_way[group].isdisjoint(named) for group, named in keys.items())

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

    def reported(self, report: WorkerReport) -> None:
        """Process ranks' finished copies."""
        for number, outcomes in report.stores.items():
            store = self._open.get(number)
            if store is not None:
                for group, outcome in outcomes:
                    shard = self._geometry.shard_of(outcome.rank)
                    store.parts[group].outcomes.append((shard, outcome))
        for number, count in report.stored_ranks.items():
            store = self._open.get(number)
            if store is None:
                continue
            store.ranks_left -= count
            if store.ranks_left <= 0:
                del self._open[number]
                self._block_refs.release(number)
                self._committer.put(store)

    def void(self) -> None:
        """Void the open stores, so that none is committed: another cache's load failed in a step
        that has already computed on it, and it is not known which pages hold the results.
        """
        self._complete()
        for store in self._open.values():
            store.void = True

    def drain(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` until all finished copies are committed; False if some are
        not.
        """
        return self._committer.drain(deadline_s)

    def close(self, deadline_s: float) -> bool:
        """Commit finished stores, give the pool back and release blocks."""
        until = self._clock.now() + deadline_s
        ended = self._committer.close(deadline_s)
        self._complete()
        for number, store in list(self._open.items()):
            self._block_refs.release(number)
            for group, part in store.parts.items():
                # A worker may still be writing.
                extents = {group: part.slots.extents}
                self._client.abort(extents, boot_id=part.slots.boot_id, in_doubt=True)
        self._open.clear()
        return self._slot_pool.close(max(until - self._clock.now(), 0.1)) and ended
