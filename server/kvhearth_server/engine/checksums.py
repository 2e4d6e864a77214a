"""Background tasks of the engine: checksums, draining of sessions, expired pins; verification of
blocks that a reader suspects.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvhearth.errors import KVHearthError
from kvhearth.failpoints import hit
from kvhearth.model import CHECKSUM_BYTES, FLAG_VERIFY, I64, U8, U32, Records, sum_extents
from kvhearth_server.core.actions import Sum
from kvhearth_server.core.slot_table import SlotTable, State
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.recovery import ORPHANED_LOADS_S
from kvhearth_server.engine.sessions import Session
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.observability.logs import get_logger

_SUM_BYTES = 64 << 20
"""Bytes that one thread call sums: enough to amortise the hand-over, few enough to stay fair."""

_SUM_HERE_BYTES = 256 << 10
"""Bytes that the loop sums itself: handing them over to a thread and back takes longer."""
_SUM_BLOCKS_MAX = 1024
"""Upper bound on the blocks of one thread call; one call on the loop enters their checksums."""
_VERIFIED_MAX = 256
"""The same where blocks are verified: one call on the loop removes the corrupt ones."""
_EXPIRED_MAX = 64
"""Upper bound on the pins that one call on the loop ends; each names up to ``keys_max`` blocks."""

_SUM_AFTER_S = 0.001
_SUM_EVERY_S = 0.006
"""Distance of small batches while engines decode: each costs the loop as much as 20 blocks."""
_SUM_SOON_BLOCKS = 64
"""Blocks that do not wait for more."""
UNREAD_S = 60.0
"""Time after which the events of a namespace are kept no more if nobody reads them."""
_WATCH_S = 0.05
_IDLE_S = 1.0
_log = get_logger("kvhearth.engine")


class ChecksumWorkers:
    """The engine's background tasks."""

    def __init__(self, engine: Engine, supervisor: Supervisor, *, sum_threads: int) -> None:
        self._engine = engine
        self._supervisor = supervisor
        self._pool = ThreadPoolExecutor(
            sum_threads, thread_name_prefix="kvhearth-sum", initializer=_let_others_first
        )
        self._views: list[U8] = [segment.view for segment in engine.arena.segments]
        self._idle = asyncio.Event()

    def start(self) -> None:
        """Start all tasks; call on the loop."""
        self._supervisor.spawn("sum", self._sum_forever)
        self._supervisor.spawn("drains", self._watch_forever)
        self._supervisor.spawn("pins", self._expire_forever)

    async def settled(self) -> None:
        """Wait until no committed block lacks its checksum."""
        while self._engine.to_sum or not self._idle.is_set():
            await asyncio.sleep(0.005)

    def close(self) -> None:
        """Stop the threads; running checksums finish first."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # -- checksums ---------------------------------------------------------------------------------

    async def _sum_forever(self) -> None:
        engine = self._engine
        if engine.to_sum:
            # A failed run cleared the event and left work behind: perhaps nothing else will set it.
            self._engine.work.set()
        loop, next_at = asyncio.get_running_loop(), 0.0
        while True:
            self._idle.set()
            await self._engine.work.wait()
            self._engine.work.clear()
            self._idle.clear()
            # The commit's answer goes first, then the engine: it may run on this processor.
            blocks = sum(len(action.slots) for action in engine.to_sum)
            later_s = next_at - loop.time() if blocks < _SUM_SOON_BLOCKS else 0.0
            await asyncio.sleep(max(_SUM_AFTER_S, later_s))
            next_at = loop.time() + _SUM_EVERY_S
            while engine.to_sum:
                action, count = self._next_sums()
                await self._sum_one(action)
                for _ in range(count):
                    engine.to_sum.popleft()

    def _next_sums(self) -> tuple[Sum, int]:
        """Return the next work and the number of actions in it. Those of many small commits are
        done at once: handing over to a thread and back costs more than the sum of a small block.
        """
        queue, parts, blocks = self._engine.to_sum, list[Sum](), 0
        for action in queue:
            blocks += len(action.slots)
            same = not parts or action.slots.shape[1] == parts[0].slots.shape[1]
            if parts and (blocks > _SUM_BLOCKS_MAX or not same):
                break
            parts.append(action)
        if len(parts) == 1:
            return parts[0], 1
        slots = np.concatenate([each.slots for each in parts])
        return Sum(slots, np.concatenate([each.generations for each in parts])), len(parts)

    async def _sum_one(self, action: Sum) -> None:
        """Sum an action's blocks in portions; the core skips blocks that are gone by then."""
        engine = self._engine
        table = engine.core.state.table
        count, shards = action.slots.shape
        sizes = table.slot_bytes_of(action.slots).sum(axis=1)
        step = _blocks_at_once(int(sizes.max()))
        for start in range(0, count, step):
            portion = slice(start, start + step)
            slots, generations = _living(table, action, portion, State.COMMITTED)
            if not len(slots):
                continue
            sums = await self._sums(slots.reshape(-1))
            hit("sum.computed")
            engine.call(
                engine.core.writing.summed, slots, generations, sums.reshape(len(slots), shards, -1)
            )

    async def _sums(self, slots: I64) -> U8:
        """Return the current checksums of slots, shape (n, 16); those of more than a few bytes are
        computed on a thread.
        """
        state = self._engine.core.state
        table = state.table
        extents = table.extents(slots, 0)
        extents["length"] = lengths = self._lengths(slots)
        if lengths.sum() <= _SUM_HERE_BYTES:
            await asyncio.sleep(0)  # others have their turn between two of these
            return self._sum(extents)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._sum, extents)

    def _sum(self, extents: Records) -> U8:
        try:
            self._engine.arena.populator.touch(extents)
        except KVHearthError:  # committed without having been written
            return np.zeros((len(extents), CHECKSUM_BYTES), np.uint8)
        return sum_extents(self._views, extents)

    def _lengths(self, slots: I64) -> I64:
        state = self._engine.core.state
        table = state.table
        kinds, lengths = table.kinds(slots), np.zeros(len(slots), np.int64)
        for number, kv_group, _ in table.by_kind(slots):
            page_bytes = state.namespaces.get(number).contract.groups[kv_group].page_bytes
            lengths[kinds == (number << 8 | kv_group)] = page_bytes
        return lengths

    # -- verification ------------------------------------------------------------------------------

    async def verify_blocks(self, blocks: list[I64]) -> int:
        """Verify distinct blocks (see ``SlotTable.blocks_of``); return how many were removed."""
        return sum([await self._verify_all(slots) for slots in blocks])

    async def _verify_all(self, slots: I64) -> int:
        """Verify distinct blocks, shape (n, shards); return the number removed because they did not
        match.

        Works in portions, so that a reader who suspects everything does not delay others'
        checksums, and in arrays, because a portion may have thousands of blocks.
        """
        table = self._engine.core.state.table
        blocks = Sum(slots, table.generation[slots])
        sizes = table.slot_bytes_of(slots).sum(axis=1)
        step, removed = min(_blocks_at_once(int(sizes.max(initial=0))), _VERIFIED_MAX), 0
        for start in range(0, len(slots), step):
            removed += await self._verify_portion(blocks, slice(start, start + step))
        if removed:
            _log.error("blocks.corrupt", blocks=removed, found_by="reader", message="removed")
        return removed

    async def _verify_portion(self, blocks: Sum, portion: slice) -> int:
        table = self._engine.core.state.table
        slots, generations = _living(table, blocks, portion, State.SUMMED)
        if not len(slots):
            return 0
        every = slots.reshape(-1)
        sums = await self._sums(every)
        stored = table.checksum[every].view(np.uint8).reshape(len(every), -1)
        wrong = (sums != stored).any(axis=1)
        same = table.generation[every] == generations.reshape(-1)
        table.flags[every[~wrong & same]] &= ~np.uint8(FLAG_VERIFY)
        bad = wrong.reshape(slots.shape).any(axis=1) & same.reshape(slots.shape).all(axis=1)
        return self._remove(slots[bad, 0], generations[bad, 0]) if bad.any() else 0

    def _remove(self, heads: I64, generations: U32) -> int:
        """Remove corrupt blocks, and promote those that have good copies in the lower tier."""
        engine = self._engine
        bring_back = None
        if engine.tiering is not None:
            current = engine.core.state.table.generation[heads] == generations
            heads, generations = heads[current], generations[current]
            bring_back = engine.tiering.repair(heads)
        gone: int = engine.call(engine.core.reading.remove_bad, heads, generations)
        if gone and bring_back is not None:
            bring_back()
        return gone

    # -- who is gone -------------------------------------------------------------------------------

    async def _watch_forever(self) -> None:
        while True:
            gone = [session for session in self._engine.sessions if session.gone]
            for session in gone:
                if self._quiet(session):
                    self._engine.drained(session)
            if gone:
                await asyncio.sleep(_WATCH_S)
            else:
                self._engine.sessions.someone_left.clear()
                await self._engine.sessions.someone_left.wait()

    def _quiet(self, session: Session) -> bool:
        """Return whether the session's process, its mapping and its GPU's grace are all over."""
        engine = self._engine
        exited = session.exited()
        mapped = session.lock_byte >= 0 and engine.arena.segments[session.segment].client_byte_held(
            session.lock_byte
        )
        group = engine.core.state.groups.of_session(session.number)
        # A group that was never handed a slot cannot write anywhere. A process that attaches and
        # fails again and again must not keep one record per attempt for as long as it lives.
        writer = group is not None and bool(group.handed)
        if mapped or (writer and exited is False):
            session.drained_since = None
            return False
        if session.drained_since is None:
            session.drained_since = engine.now()
        has_undrained_member = exited is None and not session.ghost
        grace = (
            engine.shell.drain_grace_no_pidfd_s
            if has_undrained_member
            else engine.shell.drain_grace_s
        )
        return engine.now() - session.drained_since >= grace

    async def _expire_forever(self) -> None:
        engine = self._engine
        while True:
            while engine.call(engine.core.pinning.expire, engine.now(), _EXPIRED_MAX):
                await asyncio.sleep(0)
            if engine.tiering is None and engine.now() - engine.started_at > ORPHANED_LOADS_S:
                engine.call(engine.core.promotions.free_orphaned_loads)
            engine.core.state.events.end_unread(engine.now() - UNREAD_S)
            engine.core.short_keys.end_unread()
            engine.ticks.note(engine.core.state.clock, engine.now())
            await asyncio.sleep(_IDLE_S)


def _blocks_at_once(block_bytes: int) -> int:
    """Return the number of blocks that one thread call sums."""
    return min(max(1, _SUM_BYTES // max(1, block_bytes)), _SUM_BLOCKS_MAX)


def _living(table: SlotTable, blocks: Sum, portion: slice, state: State) -> tuple[I64, U32]:
    """Return the slots and generations of a portion's blocks that still live, in a state."""
    slots, generations = blocks.slots[portion], blocks.generations[portion]
    live = (table.generation[slots] == generations).all(axis=1)
    live &= (table.state[slots] == state).all(axis=1)
    return slots[live], generations[live]


def _let_others_first() -> None:
    """Run checksum threads under SCHED_BATCH, so that they do not preempt engine threads: an answer
    that has just left is more urgent than any checksum.
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
