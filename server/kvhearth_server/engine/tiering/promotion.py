"""Promotes blocks from the tier: queues requests by requester, loads, handles the outcomes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvhearth.failpoints import hit
from kvhearth.model import I64, Records
from kvhearth_server.core.core import Core
from kvhearth_server.core.lower_tier import PromotionRequest
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.promotion import Promotion, Requester
from kvhearth_server.core.removal import tell_gone
from kvhearth_server.engine.tiering.naming import BlockNaming
from kvhearth_server.observability.counters import SECONDS_BOUNDS, Histogram
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.base import (
    Completion,
    Corrupt,
    Done,
    Failed,
    Failure,
    LoadBatch,
    Missing,
    Refusal,
    Throttled,
    Tier,
)


class PromotionQueue:
    """Promotion requests, oldest first, with each block once per requester.

    A requester that asks again while it waits, as engines do, must not fill the queue and be served
    over and over before all others.
    """

    def __init__(self) -> None:
        self.blocks = self.records = 0
        """Blocks that wait, and the tier's records of them: one for each shard."""
        self._queue: deque[tuple[PromotionRequest, Requester]] = deque()
        self._named: dict[Requester, set[tuple[int, int, bytes]]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def fresh(self, request: PromotionRequest, requester: Requester) -> PromotionRequest | None:
        """Return the part of a request, if any, that does not wait for this requester yet."""
        named, names = self._named.get(requester) or set(), _names(request)
        if named.isdisjoint(names) and len(set(names)) == len(names):
            return request
        new = dict[tuple[int, int, bytes], int]()
        for row, name in enumerate(names):
            if name not in named:
                new.setdefault(name, row)
        return request.some(new.values()) if new else None

    def add(self, request: PromotionRequest, requester: Requester) -> None:
        """Append a request to the queue."""
        self._named.setdefault(requester, set()).update(_names(request))
        self.put_back(request, requester)

    def take(self) -> tuple[PromotionRequest, Requester]:
        """Remove and return the first request; the caller then calls ``put_back`` or ``done``."""
        request, requester = self._queue.popleft()
        self._count(request, -1)
        return request, requester

    def put_back(
        self, request: PromotionRequest, requester: Requester, *, first: bool = False
    ) -> None:
        """Return a taken request to the queue."""
        (self._queue.appendleft if first else self._queue.append)((request, requester))
        self._count(request, 1)

    def done(self, request: PromotionRequest, requester: Requester) -> None:
        """Forget a taken request; it no longer waits."""
        named = self._named.get(requester)
        if named is not None:
            named.difference_update(_names(request))
            if not named:
                del self._named[requester]

    def drop(self, requesters: set[Requester]) -> None:
        """Remove all requests of these requesters."""
        found = requesters & self._named.keys()
        if not found:
            return
        for requester in found:
            del self._named[requester]
        before, self._queue = self._queue, deque[tuple[PromotionRequest, Requester]]()
        self.blocks = self.records = 0
        for request, requester in before:
            if requester not in found:
                self.put_back(request, requester)

    def requesters_of(self, group: int) -> set[Requester]:
        """Return a group's requesters that have requests in the queue."""
        return {requester for requester in self._named if requester[0] == group}

    def _count(self, request: PromotionRequest, sign: int) -> None:
        self.blocks += sign * len(request.keys)
        self.records += sign * len(request.keys) * request.spec.shards


def _names(request: PromotionRequest) -> list[tuple[int, int, bytes]]:
    number, kv_group = request.namespace.number, request.kv_group
    return [(number, kv_group, key) for key in request.keys]


_SLOTS_PER_TURN = 256
BEGUN_AT_ONCE = 32
"""Most slots of one load: taking them may evict as many blocks, some 40 us each."""
_BEGUN_BYTES = 16 << 20
"""Most bytes of one load, which ends as a whole: a client copies them while the next is read."""
_LOOKS_PER_TURN = 64
_REQUESTED_BLOCKS_MAX = 1 << 16
_log = get_logger("kvhearth.tiering")


@dataclass(eq=False)
class _Load:
    promotion: Promotion
    checksums: Records
    began_at: float = field(default_factory=time.monotonic)


class Promoter:
    """Loads from the tier; see ``Tiering`` for the arguments."""

    def __init__(
        self,
        core: Core,
        tier: Tier,
        names: BlockNaming,
        call: Callable[..., Any],
        now: Callable[[], float],
    ) -> None:
        self._core = core
        self._now = now
        self._tier = tier
        self._names = names
        self._call = call
        self._loads: dict[int, _Load] = {}
        self.seconds = Histogram(SECONDS_BOUNDS)
        """Times from a load's begin to its end."""
        self.queue = PromotionQueue()
        """Requests whose load has not begun."""
        self.stalled = False
        """Whether they wait for room, which takes another event."""
        self._lack = ""
        self._slots_max = max(1, min(_SLOTS_PER_TURN, tier.queue_reads // 2))

    @property
    def under_way(self) -> int:
        """Number of blocks that are being loaded."""
        return len(self._core.promotions)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued and nothing is under way."""
        return not (self._loads or self.queue)

    def ask(self, promotion_queue: Iterable[PromotionRequest], requester: Requester) -> None:
        """Queue promotion requests, and begin to load at once if the queue was empty."""
        before = len(self.queue)
        for request in promotion_queue:
            new = self.queue.fresh(request, requester)
            if new is None:
                continue
            if self.queue.blocks + len(new.keys) > _REQUESTED_BLOCKS_MAX:
                self._core.state.count("promotion_failed", len(new.keys), "queue")
                continue
            self.queue.add(new, requester)
        if not before:
            self.begin()  # one batch: the requester waits for this call

    def cancel(self, group: int, lease_ids: Iterable[int]) -> None:
        """Cancel the promotion requests of lookups that went away."""
        gone = {(group, lease_id) for lease_id in lease_ids}
        self.queue.drop(gone)
        for requester in gone:
            self._stop(self._core.promotions.drop_requester(requester))

    def group_ended(self, group: int) -> None:
        """Cancel all promotion requests of a group."""
        self.queue.drop(self.queue.requesters_of(group))
        self._stop(self._core.promotions.forget_group(group))

    def _stop(self, promotions: list[Promotion]) -> None:
        if not promotions:
            return
        for ticket, load in self._loads.items():
            if load.promotion in promotions:
                self._tier.cancel(ticket)
                self._core.state.count("prefetch_cancelled", len(load.promotion.request.keys))

    def begin(self, end: float = 0.0) -> None:
        """Begin to load requested blocks, until the time ``end`` or up to a turn's limit.

        A request that finds no room waits for the loads that occupy it; requests behind it may find
        some.
        """
        left, self.stalled = self._slots_max, True
        for _ in range(min(len(self.queue), _LOOKS_PER_TURN)):
            if left <= 0:
                break
            request, requester = self.queue.take()
            most = min(left, BEGUN_AT_ONCE, _BEGUN_BYTES // request.spec.page_bytes)
            most //= request.spec.shards
            head, rest = request.split(max(1, most))
            left -= len(head.keys) * request.spec.shards
            self._load(head, requester)
            if not self._lack:
                self.stalled = False
                self.queue.done(head, requester)
                if rest is not None:
                    self.queue.put_back(rest, requester, first=True)
            elif self._loads or self._lack == "queue":
                self.queue.put_back(request, requester)
            else:
                self.queue.done(request, requester)
                self._core.state.count("promotion_failed", len(request.keys), self._lack)
            if time.perf_counter() > end:
                # What was tried found room, or the tier's next completion is another chance.
                self.stalled = bool(self._lack)
                break

    def _load(self, request: PromotionRequest, requester: Requester) -> None:
        """Load one batch, if there is anything to load and room for it.

        Sets ``_lack`` to the resource that ran short, or "".
        """
        promotion: Promotion | None = self._call(
            self._core.promotions.begin, request, requester, self._tier.batch_blocks_max
        )
        self._lack = "no_room" if self._core.promotions.short else ""
        if promotion is None:
            return
        hit("promote.loading")
        family = self._names.family(request.namespace, request.kv_group)
        keys = promotion.request.keys
        facts = self._tier.look_up(family, keys)
        places = self._names.places(promotion.slots, request.spec.page_bytes)
        wait_s = request.until - self._now()
        batch = LoadBatch(family, keys, places, wait_s=wait_s)
        ticket = self._tier.submit_load(batch)
        if isinstance(ticket, Throttled):
            if ticket.reason == Refusal.QUEUE:
                self._lack = "queue"
            else:
                self._core.state.count("promotion_failed", len(keys), ticket.reason)
            none = np.zeros(len(keys), np.bool_)
            self._call(self._core.promotions.finish, promotion, none, facts.checksums)
            return
        self._loads[ticket] = _Load(promotion, facts.checksums)

    def completed(self, completion: Completion) -> bool:
        """Handle the completion of a load; return False if it belongs to no load."""
        load = self._loads.get(completion.ticket)
        if load is None:
            return False
        if completion.final:
            del self._loads[completion.ticket]
            self.seconds.observe(time.monotonic() - load.began_at)
            self._loaded(load, completion)
        else:
            stuck = sum(len(rows) for _, rows in completion.parts)
            self._core.state.count("promotion_failed", stuck, "stuck")
        return True

    def _loaded(self, load: _Load, completion: Completion) -> None:
        state, request = self._core.state, load.promotion.request
        good = np.zeros(len(request.keys), np.bool_)
        good[completion.rows(Done)] = True
        if completion.facts is not None:
            shared = completion.facts.present
            load.checksums[shared] = completion.facts.checksums[shared]
        for outcome, rows in completion.parts:
            match outcome:
                case Corrupt("remote"):
                    self.count_wrong(len(rows), "remote")
                case Corrupt():
                    keys = [request.keys[row] for row in rows.tolist()]
                    self.found_wrong(request.namespace, request.kv_group, keys)
                case Missing():
                    state.count("promotion_failed", len(rows), "missing")
                case Failed() | Throttled():
                    state.count("promotion_failed", len(rows), outcome.reason)
        hit("promote.loaded")
        self._call(self._core.promotions.finish, load.promotion, good, load.checksums)
        if completion.facts is not None:
            self._save(request, np.flatnonzero(completion.facts.present & good))
        self._look_again(load, completion)

    def _save(self, request: PromotionRequest, rows: I64) -> None:
        """Write back blocks that came from a shared tier: it may lose them at any time."""
        queue = self._core.state.writeback_queue
        if queue.on and len(rows):
            keys = [request.keys[row] for row in rows.tolist()]
            self._core.writeback.lost(request.namespace, request.kv_group, keys)
            number = request.namespace.number
            heads = self._core.state.index.find(number, request.kv_group, keys)
            queue.offer(heads[heads >= 0])

    def _look_again(self, load: _Load, completion: Completion) -> None:
        """Handle blocks that did not arrive.

        The tier may have dropped them. A requester may also have asked for them after they were
        cancelled.
        """
        request = load.promotion.request
        for outcome, rows in completion.parts:
            if isinstance(outcome, Done):
                continue
            keys = [request.keys[row] for row in rows.tolist()]
            family = self._names.family(request.namespace, request.kv_group)
            gone = ~self._tier.look_up(family, keys).present
            lost = [key for key, absent in zip(keys, gone.tolist(), strict=True) if absent]
            self._core.writeback.lost(request.namespace, request.kv_group, lost)
            if isinstance(outcome, Failed) and outcome != Failed(Failure.CANCELLED):
                tell_gone(
                    self._core.state, request.namespace, request.kv_group, lost, outcome.reason
                )
        called_off = [r for outcome, r in completion.parts if outcome == Failed(Failure.CANCELLED)]
        for requester in load.promotion.requesters if called_off else ():
            self._ask_again(request.some(np.concatenate(called_off).tolist()), requester)

    def _ask_again(self, request: PromotionRequest, requester: Requester) -> None:
        new = self.queue.fresh(request, requester)
        if new is not None:
            self.queue.add(new, requester)

    def found_wrong(self, namespace: Namespace | None, kv_group: int, keys: list[bytes]) -> None:
        """Handle keys whose copies in the tier were corrupt, which it forgot."""
        self.count_wrong(len(keys))
        if namespace is not None:
            self.store_again(namespace, kv_group, keys)
            tell_gone(self._core.state, namespace, kv_group, keys, "checksum")

    def count_wrong(self, blocks: int, where: str = "ssd") -> None:
        """Count and log copies in a tier that were corrupt."""
        if blocks:
            self._core.state.count("checksum_failures", blocks, where)
            _log.error("blocks.corrupt", blocks=blocks, found_by=where)

    def store_again(self, namespace: Namespace, kv_group: int, keys: list[bytes]) -> None:
        """Write back again the blocks in memory whose copies in the tier were corrupt."""
        state = self._core.state
        here = self._core.writeback.lost(namespace, kv_group, keys)
        heads = state.index.find(namespace.number, kv_group, keys)[here]
        state.writeback_queue.offer(heads)
        state.count("repaired_blocks", len(heads), "ssd")
