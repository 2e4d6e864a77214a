"""A pool of reserved slots, so that a step never waits for an RPC to get some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvhearth.client import KVClient
from kvhearth.errors import KVHearthError, NoReason, Reason
from kvhearth.model import EXTENT_DTYPE, Records
from kvhearth.worker_thread import SupervisedThread

RESERVE_BLOCKS_MAX = 1024
"""Most blocks in one refill."""

_TICK_S = 0.25
_WATCH_S = 0.05
_PAUSE_S = 0.005
_PAUSE_MAX_S = 0.25


@dataclass(frozen=True, eq=False)
class Slots:
    """Reserved slots that were taken from the pool: to be committed, or given back.

    Attributes:
        boot_id: boot of the daemon that granted them.
        session_id: session that reserved them; they are void once the client has another one.
        extents: (n, shards) ``EXTENT_DTYPE``; n is 0 if there were none.
    """

    boot_id: str
    session_id: str
    extents: Records

    def __len__(self) -> int:
        return len(self.extents)


class ReservationPool:
    """Holds reserved slots of each KV cache group; a thread refills it. Thread-safe.

    No other engine can use the held slots, so ``blocks_max`` is two steps' worth at most. A pool
    that is half empty is refilled. A group that a caller waits for goes first, and gets the idle
    slots of the other groups if the daemon has no more to give. All slots are dropped when the
    session ends: the daemon takes them back by itself.

    Args:
        client: the scheduler's client.
        blocks_max: by KV group, the number of blocks to hold.

    Raises:
        KVHearthError: ``bad_contract`` for an unknown group or a bound below 1.
    """

    def __init__(self, client: KVClient, blocks_max: Mapping[int, int]) -> None:
        specs = client.contract.groups
        for kv_group, count in blocks_max.items():
            if not 0 <= kv_group < len(specs) or count < 1:
                raise KVHearthError(
                    Reason.BAD_CONTRACT, f"a pool of {count} blocks of group {kv_group}"
                )
        self._client = client
        self._clock = client.clock
        self._blocks_max = dict(blocks_max)
        self._empty: dict[int, Records] = {
            kv_group: np.empty((0, specs[kv_group].shards), EXTENT_DTYPE) for kv_group in blocks_max
        }
        self._held = dict(self._empty)
        self._waiting = dict.fromkeys(blocks_max, 0)
        self._short: dict[int, Reason | NoReason] = {}
        self._session_id = ""
        self._boot_id = ""
        self._silence: Reason | NoReason = Reason.DAEMON_AWAY
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._answer_count = 0
        self._stirred = False
        self._worker = SupervisedThread(
            "kvhearth-slot-pool", self._step, self._recover, clock=client.clock
        )
        self._changed = self._worker.changed
        self._lock = self._worker.lock
        self._worker.start()

    def short_reason(self, kv_group: int) -> Reason | NoReason:
        """Return why the last reservation of the group brought less than requested, or ""."""
        return self._silence or self._short.get(kv_group, "")

    def held(self, kv_group: int) -> int:
        """Return the number of blocks in hand."""
        return 0 if self._worker.foreign else len(self._held[kv_group])

    def take(self, kv_group: int, count: int, *, wait_s: float = 0.0) -> Slots:
        """Take up to ``count`` slots.

        Args:
            kv_group: a group that the pool was made for.
            count: number of blocks.
            wait_s: how long to wait for all of them; after an answer of the daemon, the slots in
                hand are enough.
        """
        if self._worker.foreign:
            return Slots("", "", self._empty[kv_group])
        count = min(count, self._blocks_max[kv_group])
        with self._lock:
            self._follow_session()
            if wait_s > 0 and len(self._held[kv_group]) < count:
                self._wait(kv_group, count, wait_s)
            if self._worker.stopping:
                return Slots("", "", self._empty[kv_group])
            held = self._held[kv_group]
            self._held[kv_group] = left = held[count:]
            if len(left) <= self._low(kv_group):
                self._stir()
            return Slots(self._boot_id, self._session_id, held[:count])

    def give_back(self, kv_group: int, slots: Slots) -> None:
        """Return slots that no copy writes to any more."""
        if len(slots) and slots.session_id == self._client.session_id:
            self._client.abort({kv_group: slots.extents}, boot_id=slots.boot_id)
            self.nudge()

    def nudge(self) -> None:
        """Retry a short reservation at once, because slots were committed or given back."""
        if self._worker.foreign:
            return
        with self._changed:
            self._pause_s = self._retry_at = 0.0
            self._stir()

    def close(self, deadline_s: float = 5.0) -> bool:
        """End the thread and give everything back; False if the thread did not end in time."""
        if self._worker.foreign:
            return True
        ended = self._worker.stop(deadline_s)
        with self._changed:
            self._give_back_idle(list(self._held))
        return ended

    # -- the thread --------------------------------------------------------------------------------

    def _step(self) -> None:
        with self._changed:
            self._follow_session()
            want = self._wanted() if self._session_id else {}
            pause_s = self._retry_at - self._clock.now()
            if not want or pause_s > 0:
                calm_s = _TICK_S if self._session_id and not self._anybody_waits() else _WATCH_S
                self._clock.wait_for(
                    self._changed,
                    lambda: self._stirred or self._worker.stopping,
                    min(pause_s, calm_s) if want else calm_s,
                )
                self._stirred = False
                return
            session_id = self._session_id
        self._refill(session_id, want)

    def _follow_session(self) -> None:
        """Drop the slots that another session reserved."""
        session_id = self._client.session_id
        if session_id == self._session_id:
            return
        for kv_group, held in self._held.items():
            self._held[kv_group] = held[:0]
        self._short.clear()
        self._session_id = session_id
        self._pause_s = self._retry_at = 0.0
        refusal = self._client.refusal
        self._silence = Reason.DAEMON_AWAY if refusal is None else refusal.reason

    def _wanted(self) -> dict[int, int]:
        """Return the blocks to request by group; while a caller waits, only those of its group."""
        waiting = self._anybody_waits()
        room = RESERVE_BLOCKS_MAX
        want = {}
        for kv_group, held in self._held.items():
            missing = min(self._blocks_max[kv_group] - len(held), room)
            urgent = self._waiting[kv_group] > 0
            if missing and (urgent or (not waiting and len(held) <= self._low(kv_group))):
                want[kv_group] = missing
                room -= missing
        return want

    def _refill(self, session_id: str, want: dict[int, int]) -> None:
        brought = self._client.reserve(want)
        with self._changed:
            self._answer_count += 1
            if brought.reason:
                self._silence = brought.reason
                self._back_off()
            elif self._client.session_id != session_id or self._worker.stopping:
                # Reserved under one of two sessions: the daemon knows which one.
                self._client.abort(brought.groups, boot_id=brought.boot_id)
            else:
                self._put(want, brought.boot_id, brought.groups, brought.short_reason)
            self._changed.notify_all()

    def _put(
        self,
        want: dict[int, int],
        boot_id: str,
        groups: dict[int, Records],
        short_reason: Reason | NoReason,
    ) -> None:
        self._silence = ""
        self._boot_id = boot_id
        gained = 0
        for kv_group, asked in want.items():
            extents = groups[kv_group]
            gained += len(extents)
            self._held[kv_group] = _in_place_order(self._held[kv_group], extents)
            self._short[kv_group] = short_reason if len(extents) < asked else ""
        if not short_reason:
            self._pause_s = self._retry_at = 0.0
            return
        starved = [g for g in want if self._waiting[g] and not len(self._held[g])]
        if starved:
            self._give_back_idle([g for g in self._held if not self._waiting[g]])
        if short_reason == Reason.STOCK_CAP:
            # Only slots that leave our own hands change that: `nudge` ends the pause.
            self._pause_s = _PAUSE_MAX_S
        elif gained:
            self._pause_s = 0.0
        self._back_off()

    def _give_back_idle(self, kv_groups: list[int]) -> None:
        idle = {g: self._held[g] for g in kv_groups if len(self._held[g])}
        if idle and self._session_id == self._client.session_id:
            self._client.abort(idle, boot_id=self._boot_id)
        for kv_group, held in idle.items():
            self._held[kv_group] = held[:0]

    def _back_off(self) -> None:
        self._pause_s = min(max(self._pause_s * 2, _PAUSE_S), _PAUSE_MAX_S)
        self._retry_at = self._clock.now() + self._pause_s

    def _recover(self) -> None:
        self._client.count("stock_failures")
        with self._changed:
            self._silence = Reason.INTERNAL
            self._back_off()

    def _wait(self, kv_group: int, count: int, wait_s: float) -> None:
        answers = self._answer_count

        def settled() -> bool:
            have = len(self._held[kv_group])
            answered = have > 0 and self._answer_count > answers
            return have >= count or answered or self._worker.stopping

        self._waiting[kv_group] += 1
        self._stir()
        try:
            self._clock.wait_for(self._changed, settled, wait_s)
        finally:
            self._waiting[kv_group] -= 1
        self._follow_session()

    def _stir(self) -> None:
        """End the thread's wait: what it waits for may have changed."""
        self._stirred = True
        self._changed.notify_all()

    def _anybody_waits(self) -> bool:
        return any(self._waiting.values())

    def _low(self, kv_group: int) -> int:
        return self._blocks_max[kv_group] // 2


def _in_place_order(held: Records, more: Records) -> Records:
    """Join both in the order of their memory: neighbours are copied by one call."""
    every: Records = np.concatenate((held, more))
    first = every[:, 0]
    return every[np.lexsort((first["offset"], first["segment"]))]
