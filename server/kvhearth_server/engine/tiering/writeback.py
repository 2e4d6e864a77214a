"""Writes blocks back to the tier while they stay in memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvhearth.failpoints import hit
from kvhearth.model import I64
from kvhearth_server.core.core import Core
from kvhearth_server.core.lower_tier import BlockBatch
from kvhearth_server.engine.tiering.naming import BlockNaming
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.base import (
    Completion,
    Corrupt,
    Done,
    Failed,
    Refusal,
    Throttled,
    Tier,
)

PATIENCE_S = 2.0
"""If the tier makes no progress for this long while room is wanted, pending writes are given up."""
READ_BACK_PATIENCE_S = 60.0
"""The same limit while the log is read back.

A store can only wait then, and a healthy drive that engines load their weights from may take long
for one read; the kernel itself aborts a read after 30 s.
"""
_TURN_S_MAX = 0.5
"""Most that one turn adds to the wait: a process that was stopped made no progress either."""

_SLOTS_PER_TURN = 256
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.002, 0.1
_WRITE_BYTES_MAX = 256 << 20
_WRITE_FRACTION_MAX = 0.125
"""Upper bound on the bytes being written at once, as a fraction of the smallest segment."""
_PORTIONS = 2
"""Number of portions being written at once.

A portion makes room for the next only when it is written completely, so the drive needs two. More
and smaller ones would cost more processor time, most of it to wake up.
"""
_AGAIN = frozenset({Refusal.FULL, Refusal.QUEUE, Refusal.RECOVERING, Refusal.DRAINING})
"""Reasons for refusing a store that may soon be accepted."""
_log = get_logger("kvhearth.tiering")


class WritebackLoop:
    """Stores to the tier; see ``Tiering`` for the arguments."""

    def __init__(
        self,
        core: Core,
        tier: Tier,
        names: BlockNaming,
        call: Callable[..., Any],
        now: Callable[[], float],
    ) -> None:
        self._core = core
        self._tier = tier
        self._names = names
        self._call = call
        self._now = now
        self._stores: dict[int, BlockBatch] = {}
        self._progress = tier.progress
        self._waited_s, self._turn_at = 0.0, now()
        self._open_at = 0.0
        self._again_at = 0.0
        # Half of the tier's write queue, or a portion would wait until the tier is idle.
        self._slots_max = max(1, min(_SLOTS_PER_TURN, tier.queue_writes // 2))
        geometry = core.state.table.geometry
        smallest = min(geometry.segment_bytes(i) for i in range(len(geometry.segments)))
        self._write_bytes = max(
            geometry.slab_bytes, min(_WRITE_BYTES_MAX, int(smallest * _WRITE_FRACTION_MAX))
        )

    @property
    def blocks(self) -> int:
        """Number of blocks queued or being written."""
        under_way = sum(len(portion.keys) for portion in self._stores.values())
        return under_way + self._core.state.writeback_queue.waiting

    @property
    def due_at(self) -> float:
        """Time at which a turn has something to write; infinity if that takes another event."""
        writeback_queue = self._core.state.writeback_queue
        full = self._core.writeback.payload_bytes >= self._write_bytes
        return self._again_at if writeback_queue.waiting and not full else math.inf

    def completed(self, completion: Completion) -> bool:
        """Handle the completion of a store; return False if it belongs to no store."""
        portion = self._stores.get(completion.ticket)
        if portion is None:
            return False
        if completion.final:
            del self._stores[completion.ticket]
            self._stored(portion, completion)
        return True

    def begin(self, end: float = math.inf) -> None:
        """Write queued blocks until the time ``end``, as far as the tier accepts them and they fit
        into a turn.
        """
        writeback_queue, now = self._core.state.writeback_queue, self._now()
        if writeback_queue.closed and now >= self._open_at:
            writeback_queue.closed = ""
        left, recovering = self._slots_max, self._tier.recovering
        if recovering and not writeback_queue.under_pressure:
            # Queued blocks may lie in a part of the log that is not read back yet.
            self._again_at = now + _PAUSE_MAX_S
        while writeback_queue.waiting and left > 0 and now >= self._again_at:
            portion = self._portion(left)
            if portion is None:
                if self._core.writeback.payload_bytes < self._write_bytes:
                    self._again_at = now + _PAUSE_MAX_S  # nothing more may be held
                break
            left -= portion.slots.size
            ticket = self._tier.submit_store(self._names.store_batch(portion))
            if isinstance(ticket, Throttled):
                self._call(self._core.writeback.retreat, portion)
                self._put_off(ticket, now)
                break
            self._stores[ticket] = portion
            hit("demote.submitted")
            if recovering:
                writeback_queue.under_pressure = (
                    False  # no more than is wanted: it may be written a second time
                )
            if time.perf_counter() > end:
                break
        self._wait(now)

    def _wait(self, now: float) -> None:
        """Give up queued blocks if the tier makes no progress for too long while room is wanted."""
        writeback_queue = self._core.state.writeback_queue
        turn_s, self._turn_at = min(now - self._turn_at, _TURN_S_MAX), now
        writeback_queue.under_pressure = (
            writeback_queue.under_pressure and writeback_queue.waiting > 0
        )
        if self._tier.progress != self._progress or not (writeback_queue.waiting or self._stores):
            self._progress, self._waited_s = self._tier.progress, 0.0
        elif writeback_queue.under_pressure:
            self._waited_s += turn_s
        recovering = self._tier.recovering
        if writeback_queue.under_pressure and self._waited_s > (
            READ_BACK_PATIENCE_S if recovering else PATIENCE_S
        ):
            self._close("slow", PATIENCE_S, now)

    def _portion(self, slots_max: int) -> BlockBatch | None:
        """Return the next portion to write, or None if no more may be written now."""
        room = self._write_bytes - self._core.writeback.payload_bytes
        if room <= 0:
            return None
        most = min(slots_max, self._tier.batch_blocks_max)
        room = min(room, max(1, self._write_bytes // _PORTIONS))
        portion: BlockBatch | None = self._call(self._core.writeback.begin, most, room)
        return portion

    def _put_off(self, why: Throttled, now: float) -> None:
        if why.reason in _AGAIN:
            self._again_at = now + min(max(why.retry_after_s, _PAUSE_MIN_S), _PAUSE_MAX_S)
        else:
            self._close(why.reason, max(why.retry_after_s, 1.0), now)

    def _close(self, reason: str, pause_s: float, now: float) -> None:
        """Stop write-back for ``pause_s``; blocks become evictable without a copy."""
        state = self._core.state
        state.writeback_queue.closed = reason
        self._open_at = now + pause_s
        state.writeback_queue.under_pressure = False
        state.release_epoch += 1
        given_up = state.writeback_queue.reject_all()
        state.count("demotion_refused", given_up, reason)
        if given_up:
            _log.warning("ssd.not_saved", blocks=given_up, reason=str(reason))

    def _stored(self, portion: BlockBatch, completion: Completion) -> None:
        state, now = self._core.state, self._now()
        again = []
        refused = []
        wrong = [completion.rows(Corrupt)]
        for outcome, rows in completion.parts:
            if isinstance(outcome, Throttled) and outcome.reason in _AGAIN:
                again.append(rows)
                self._put_off(outcome, now)
            elif isinstance(outcome, Throttled):
                refused.append(rows)
                state.count("demotion_refused", len(rows), outcome.reason)
            elif isinstance(outcome, Failed):
                refused.append(rows)
                state.count("demotion_failed", len(rows), outcome.reason)
        if not again:
            self._again_at = 0.0
        if sum(map(len, again)) < len(portion.keys):
            self._waited_s = 0.0
        hit("demote.done")
        self._call(
            self._core.writeback.resolve,
            portion,
            saved=completion.rows(Done),
            refused=_joined(refused),
            wrong=_joined(wrong),
            again=_joined(again),
        )
        self._look_again(portion)

    def _look_again(self, portion: BlockBatch) -> None:
        """Keep as saved only the keys that the tier can find: a written block may be gone again, or
        an older block of a key may have been written after a newer one.
        """
        family = self._names.family(portion.namespace, portion.kv_group)
        absent = np.flatnonzero(~self._tier.look_up(family, portion.keys).present)
        if len(absent):
            keys = [portion.keys[row] for row in absent.tolist()]
            self._core.writeback.lost(portion.namespace, portion.kv_group, keys)


def _joined(parts: list[I64]) -> I64:
    return np.concatenate([np.zeros(0, np.int64), *parts])
