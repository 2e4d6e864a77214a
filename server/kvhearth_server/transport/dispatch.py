"""Handlers for attached engines: the work of each CacheService call, shared by all transports."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.failpoints import hit
from kvhearth.model import I64, Bools, Tier
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth.wire.frames import METHODS
from kvhearth_server.core.events import Cursor, Event
from kvhearth_server.core.groups import Group, SlotGrant
from kvhearth_server.core.lookup import KeysItem, Presence
from kvhearth_server.core.lower_tier import PromotionRequest
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.reservations import Commit, Reserved
from kvhearth_server.core.state import require
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.sessions import Session
from kvhearth_server.engine.token_store import Place
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.transport.messages import (
    COUNTERS_PER_HEARTBEAT_MAX,
    IDS_PER_CALL_MAX,
    SMALL_BODY_BYTES,
    add_presence,
    bitmaps,
    body_bounds,
    check_parts,
    commit_items,
    counts,
    few_commits,
    keys_items,
    plain_error,
    slots_items,
    told_tokens,
)
from kvhearth_server.transport.operators import bumped, check_label

EVICTED_PER_TURN_MAX = 24
"""Blocks that a reservation evicts before others have their turn: about a millisecond."""
BOUND_PER_TURN_MAX = 64
"""Blocks that a commit binds before others have their turn: about a millisecond."""

PREFETCHED_PER_TURN_MAX = 256
"""Blocks whose promotion a prefetch requests before others have their turn: about a millisecond."""

TOLD_PER_TURN_MAX = 2048
"""Blocks that an answer about events names: about a millisecond."""
_EVENT_BYTES = 48
"""Bytes of an event in a message, without its keys."""

Verify = Callable[[list[I64]], Awaitable[int]]
_log = get_logger("kvhearth.client")


class CallContext(NamedTuple):
    """The calling session: its number, contract, namespace, group, and keys per call at most."""

    session: int
    contract: Contract
    namespace: Namespace
    keys_max: int
    group: Group


def failure(engine: Engine, error: Exception) -> KVHearthError:
    """Convert ``error`` into the error that the caller receives, and count it.

    A bug becomes ``internal``: the caller learns nothing else, and the log has the traceback.
    """
    if isinstance(error, KVHearthError):
        refusal = plain_error(error)
    else:
        _log.error("call.failed", exc_info=error)
        refusal = KVHearthError(Reason.INTERNAL, "the call failed in the daemon; see its log")
    engine.counters.add("refusals", 1, str(refusal.reason))
    return refusal


class Dispatcher:
    """Handlers of the calls, one method each, named like the call: it checks its bounds, calls the
    core, and builds the reply.

    Args:
        engine: the engine that the calls read and change.
        verify: verifies blocks whose bytes a reader found wrong.
    """

    def __init__(self, engine: Engine, verify: Verify) -> None:
        self._engine = engine
        self._verify = verify
        self._work: Mapping[str, Callable[[Any, CallContext], Any]] = {
            name: getattr(self, _handler_name(name)) for name in METHODS
        }
        self._parse: Mapping[str, Callable[[bytes], Any]] = {
            name: getattr(cache_pb2, f"{name}Request").FromString for name in METHODS
        }

    def admit(self, token: str) -> Session:
        """Return the session of a token.

        Raises:
            KVHearthError: ``unknown_token``.
        """
        return self._engine.sessions.authenticate(token, self._engine.boot_id)

    def body_bounds(self, session: Session) -> Mapping[int, tuple[str, int]]:
        """Return each call's name and the most bytes of its body for a session, by its kind.

        Raises:
            KVHearthError: ``group_gone``.
        """
        engine = self._engine
        group = engine.core.state.group_of(session.number)
        contract = engine.core.state.namespaces.get(group.namespace).contract
        return body_bounds(contract, session.keys_max, engine.shell.message_bytes_max)

    def parse(self, name: str, data: bytes) -> Any:
        """Parse the request of a call; only for admitted callers, because parsing can cost a
        hundred times what it cost to send.

        Raises:
            KVHearthError: ``bad_message``; ``TooManyParts``.
        """
        if len(data) > SMALL_BODY_BYTES:
            check_parts(data)
        try:
            return self._parse[name](data)
        except DecodeError as error:
            raise KVHearthError(
                Reason.BAD_MESSAGE, f"the request cannot be parsed: {error}"
            ) from None

    def decide(self, name: str, request: Any, session: Session) -> Any:
        """Return the reply to a request, or a coroutine that returns it.

        Raises:
            KVHearthError: the reason of a refusal.
        """
        try:
            return self.decide_deferred(name, request, session)
        finally:
            self._engine.run_deferred()

    def decide_deferred(self, name: str, request: Any, session: Session) -> Any:
        """Answer like ``decide``, but by ``Engine.call_deferred``."""
        group = self._engine.core.state.group_of(session.number)
        if name != "Heartbeat" and not group.members[session.number].scheduler:
            raise KVHearthError(Reason.NOT_SCHEDULER, "only the group's scheduler takes decisions")
        namespace = self._engine.core.state.namespaces.get(group.namespace)
        caller = CallContext(session.number, namespace.contract, namespace, session.keys_max, group)
        return self._work[name](request, caller)

    def _heartbeat(
        self, request: cache_pb2.HeartbeatRequest, caller: CallContext
    ) -> cache_pb2.HeartbeatResponse:
        require(
            len(request.counters) <= COUNTERS_PER_HEARTBEAT_MAX,
            Reason.BAD_MESSAGE,
            f"{len(request.counters)} counters, at most {COUNTERS_PER_HEARTBEAT_MAX}",
        )
        group = self._engine.core.state.group_of(caller.session)
        self._engine.heard(caller.session, caller.namespace, request.counters)
        return cache_pb2.HeartbeatResponse(
            boot_id=self._engine.boot_id,
            epoch=caller.namespace.epoch,
            group_complete=group.complete,
            draining=self._engine.draining,
            unpopulated=self._engine.arena.populator.unpopulated(group.segment),
        )

    def _lookup(
        self, request: cache_pb2.LookupRequest, caller: CallContext
    ) -> cache_pb2.LookupResponse:
        engine, contract = self._engine, caller.contract
        items = keys_items(contract, request.groups, caller.keys_max)
        found = engine.call_deferred(
            engine.core.reading.lookup,
            caller.session,
            request.epoch,
            items,
            request.lease_id,
            now=engine.now(),
            portion=request.portion,
            joins=request.joins,
            released=request.released,
        )
        reply = cache_pb2.LookupResponse(
            boot_id=engine.boot_id,
            lease_id=found.lease_id,
            hit_tokens=found.hit_tokens,
        )
        if found.short is not None:
            reply.lease_short = str(found.short)
        if found.promotion_queue or found.asking:
            until = math.inf if not request.wait_us else engine.now() + request.wait_us / 1e6
            reply.eta_us = self._request_promotion(
                [replace(each, until=until) for each in found.promotion_queue],
                caller,
                request.lease_id,
                go=request.prefetch,
                found=found.groups,
                asking=found.asking,
            )
        # Who waits for blocks to be promoted asks again, and is counted then.
        if not (request.prefetch and (found.promotion_queue or found.asking)):
            self._used(caller, request, lookup=True)
        for presence in found.groups:
            add_presence(reply.groups, presence)
        return reply

    def _used(self, caller: CallContext, request: Any, *, lookup: bool) -> None:
        """Take down the keys of a request for the hit ratios of other capacities."""
        ratios, age_us = self._engine.miss_ratios, request.age_us if lookup else 0
        for group in request.groups:
            place = caller.namespace, request.epoch, group.group
            ratios.used(*place, group.keys, lookup=lookup, age_us=age_us)

    def _request_promotion(
        self,
        promotion_queue: list[PromotionRequest],
        caller: CallContext,
        lease_id: int,
        *,
        go: bool,
        found: Sequence[Presence] = (),
        asking: bool = False,
    ) -> int:
        """Promote blocks if the caller asked for it; return the microseconds until they could be in
        memory, or until a shared tier has said whether it has others (``asking``).
        """
        tiering = self._engine.tiering
        if tiering is None or not (promotion_queue or asking):
            return 0
        remote = bool(promotion_queue) and any((each.tiers == Tier.REMOTE).any() for each in found)
        # Before they wait behind themselves.
        eta_us = tiering.eta_us(promotion_queue, remote=remote, asking=asking)
        if promotion_queue and go and not self._engine.draining:
            group = self._engine.core.state.group_of(caller.session)
            tiering.promote(promotion_queue, group.number, lease_id)
        return eta_us

    def _reserve(
        self, request: cache_pb2.ReserveRequest, caller: CallContext
    ) -> cache_pb2.ReserveResponse | Awaitable[cache_pb2.ReserveResponse]:
        engine = self._engine
        engine.refuse_while_draining()
        _named(request.reservation_id, "reservation_id")
        wants = counts(request.groups, caller.keys_max)
        hit("reserve.before")
        reserved = engine.call(
            engine.core.writing.reserve,
            caller.session,
            request.reservation_id,
            request.epoch,
            wants,
            EVICTED_PER_TURN_MAX,
        )
        if reserved.more:
            return self._reserve_more(request, caller)
        return self._reserved(caller, reserved)

    async def _reserve_more(
        self, request: cache_pb2.ReserveRequest, caller: CallContext
    ) -> cache_pb2.ReserveResponse:
        """Evict in portions, and serve others in between."""
        engine, number = self._engine, request.reservation_id
        more = True
        while more:
            await asyncio.sleep(0)
            try:
                reserved = engine.call(
                    engine.core.writing.reserve_more,
                    caller.session,
                    number,
                    request.epoch,
                    EVICTED_PER_TURN_MAX,
                )
            except KVHearthError:
                # The client learns of none of the slots, so it cannot give them back.
                with contextlib.suppress(KVHearthError):
                    abort = engine.core.writing.abort
                    engine.call(abort, caller.session, [], [number], in_doubt=False)
                raise
            more = reserved.more
        return self._reserved(caller, reserved)

    def _reserved(self, caller: CallContext, reserved: Reserved) -> cache_pb2.ReserveResponse:
        engine = self._engine
        hit("reserve.after")
        engine.counters.add("reserves")
        return cache_pb2.ReserveResponse(
            boot_id=engine.boot_id,
            groups=[self._extents(caller.contract, part) for part in reserved.handed],
            short_reason=str(reserved.short or ""),
        )

    def _extents(self, contract: Contract, part: SlotGrant) -> types_pb2.GroupExtents:
        length = contract.groups[part.kv_group].page_bytes
        extents = self._engine.core.state.table.extents(part.slots, length)
        extents["generation"] = part.generations.reshape(-1)
        return types_pb2.GroupExtents(
            group=part.kv_group, count=len(part.slots), extents=extents.tobytes()
        )

    def _commit(
        self, request: cache_pb2.CommitRequest, caller: CallContext
    ) -> cache_pb2.CommitResponse | Awaitable[cache_pb2.CommitResponse]:
        engine, contract = self._engine, caller.contract
        few = few_commits(contract, request.groups)
        hit("commit.before")
        if few is not None and len(few) <= caller.keys_max:
            commit_few, epoch = engine.core.writing.commit_few, request.epoch
            stored = engine.call_deferred(commit_few, caller.group, caller.namespace, epoch, few)
            if stored is not None:
                self._used(caller, request, lookup=False)
                return self._committed(caller, request, [few[0].kv_group], [np.array(stored)])
        items = commit_items(contract, request.groups, caller.keys_max)
        commit = engine.core.writing.begin_commit(caller.session, request.epoch, items)
        engine.call(commit.bind_some, BOUND_PER_TURN_MAX)
        self._used(caller, request, lookup=False)
        if commit.unfinished:
            return self._commit_more(caller, request, commit)
        return self._committed(caller, request, [item.kv_group for item in items], commit.stored)

    async def _commit_more(
        self, caller: CallContext, request: cache_pb2.CommitRequest, commit: Commit
    ) -> cache_pb2.CommitResponse:
        """Bind in portions, and serve others in between."""
        while commit.unfinished:
            await asyncio.sleep(0)
            hit("commit.between")
            self._engine.call(commit.bind_some, BOUND_PER_TURN_MAX)
        kv_groups = [item.kv_group for item in commit.items]
        return self._committed(caller, request, kv_groups, commit.stored)

    def _committed(
        self,
        caller: CallContext,
        request: cache_pb2.CommitRequest,
        kv_groups: Sequence[int],
        stored: Sequence[Bools],
    ) -> cache_pb2.CommitResponse:
        engine = self._engine
        for group in request.groups:
            if group.tokens:
                place = Place(caller.namespace.digest, group.group)
                engine.tokens.keep(place, told_tokens(caller.contract, group))
        hit("commit.after")
        engine.core.state.count("commits")
        return cache_pb2.CommitResponse(boot_id=engine.boot_id, stored=bitmaps(kv_groups, stored))

    def _abort(
        self, request: cache_pb2.AbortRequest, caller: CallContext
    ) -> cache_pb2.AbortResponse:
        engine = self._engine
        shards = max(spec.shards for spec in caller.contract.groups)
        items = slots_items(request.groups, caller.keys_max * shards)
        _few(len(request.reservation_ids), "reservation ids")
        freed, quarantined = engine.call(
            engine.core.writing.abort,
            caller.session,
            items,
            list(request.reservation_ids),
            in_doubt=request.in_doubt,
        )
        engine.counters.add("aborts")
        engine.counters.add("aborted_slots", freed)
        return cache_pb2.AbortResponse(
            boot_id=engine.boot_id, freed_slots=freed, quarantined_slots=quarantined
        )

    def _release(
        self, request: cache_pb2.ReleaseRequest, caller: CallContext
    ) -> cache_pb2.ReleaseResponse | Awaitable[cache_pb2.ReleaseResponse]:
        engine = self._engine
        _few(len(request.lease_ids), "lease ids")
        _few(len(request.cancelled_ids), "cancelled ids")
        if engine.tiering is not None and request.cancelled_ids:
            group = engine.core.state.group_of(caller.session)
            engine.tiering.promoter.cancel(group.number, request.cancelled_ids)
        if request.bad:
            return self._release_bad(request, caller)
        engine.call_deferred(engine.core.reading.release, caller.session, list(request.lease_ids))
        return cache_pb2.ReleaseResponse(boot_id=engine.boot_id)

    async def _release_bad(
        self, request: cache_pb2.ReleaseRequest, caller: CallContext
    ) -> cache_pb2.ReleaseResponse:
        engine = self._engine
        try:
            engine.call(engine.core.reading.release, caller.session, list(request.lease_ids))
        finally:
            # Many releases travel together: one lease that has already ended must not lose
            # another's report of wrong bytes, nor a bad report keep the leases.
            items = slots_items(request.bad, caller.keys_max)
            await self._verify(engine.core.reading.suspects(caller.session, items))
        return cache_pb2.ReleaseResponse(boot_id=engine.boot_id)

    def _prefetch(
        self, request: cache_pb2.PrefetchRequest, caller: CallContext
    ) -> cache_pb2.PrefetchResponse | Awaitable[cache_pb2.PrefetchResponse]:
        engine, contract = self._engine, caller.contract
        items = keys_items(contract, request.groups, caller.keys_max)
        engine.call(engine.core.reading.touch, caller.session, request.epoch, items)
        if sum(len(item.keys) for item in items) > PREFETCHED_PER_TURN_MAX:
            return self._prefetch_more(request, caller, items)
        found, promotion_queue, asking = engine.core.reading.presence(
            caller.session, request.epoch, items
        )
        eta_us = self._request_promotion(
            promotion_queue, caller, 0, go=True, found=found, asking=asking
        )
        return self._prefetched(request, found, eta_us)

    async def _prefetch_more(
        self, request: cache_pb2.PrefetchRequest, caller: CallContext, items: list[KeysItem]
    ) -> cache_pb2.PrefetchResponse:
        """Ask for the blocks in portions, and serve others in between."""
        await asyncio.sleep(0)
        reading = self._engine.core.reading
        found, promotion_queue, asking = reading.presence(caller.session, request.epoch, items)
        eta_us = self._request_promotion(
            promotion_queue, caller, 0, go=False, found=found, asking=asking
        )
        for asked in promotion_queue:
            rest: PromotionRequest | None = asked
            while rest is not None:
                await asyncio.sleep(0)
                portion, rest = rest.split(PREFETCHED_PER_TURN_MAX)
                self._request_promotion([portion], caller, 0, go=True)
        return self._prefetched(request, found, eta_us)

    def _prefetched(
        self, request: cache_pb2.PrefetchRequest, found: list[Presence], eta_us: int
    ) -> cache_pb2.PrefetchResponse:
        reply = cache_pb2.PrefetchResponse(boot_id=self._engine.boot_id, eta_us=eta_us)
        for one in found:
            add_presence(reply.groups, one)
        return reply

    def _pin(self, request: cache_pb2.PinRequest, caller: CallContext) -> cache_pb2.PinResponse:
        engine, contract = self._engine, caller.contract
        _named(request.pin_id, "pin_id")
        check_label(request.session)
        items = keys_items(contract, request.groups, caller.keys_max)
        pinned = engine.call(
            engine.core.pinning.pin,
            caller.session,
            request.epoch,
            request.pin_id,
            items,
            ttl_s=request.ttl_ms / 1000,
            now=engine.now(),
            name=request.session,
        )
        return cache_pb2.PinResponse(
            boot_id=engine.boot_id, pinned=bitmaps([item.kv_group for item in items], pinned)
        )

    def _unpin(
        self, request: cache_pb2.UnpinRequest, caller: CallContext
    ) -> cache_pb2.UnpinResponse:
        engine = self._engine
        _few(len(request.pin_ids), "pin ids")
        engine.call(engine.core.pinning.unpin, caller.session, list(request.pin_ids))
        return cache_pb2.UnpinResponse(boot_id=engine.boot_id)

    def _touch(
        self, request: cache_pb2.TouchRequest, caller: CallContext
    ) -> cache_pb2.TouchResponse:
        engine, contract = self._engine, caller.contract
        items = keys_items(contract, request.groups, caller.keys_max)
        touched = engine.call(engine.core.reading.touch, caller.session, request.epoch, items)
        return cache_pb2.TouchResponse(boot_id=engine.boot_id, touched=touched)

    def _bump_epoch(
        self, request: cache_pb2.BumpEpochRequest, caller: CallContext
    ) -> cache_pb2.BumpEpochResponse | Awaitable[cache_pb2.BumpEpochResponse]:
        engine = self._engine
        label = request.label if request.HasField("label") else None
        check_label(label)
        epoch = engine.call(
            engine.core.bump_epoch,
            caller.session,
            request.expected_epoch,
            only_alone=request.only_alone,
            label=label,
            relabel=request.relabel,
        )
        engine.tokens.sweep()
        if (record := engine.sessions.find(caller.session)) is not None:
            bumped(record, epoch)
        reply = cache_pb2.BumpEpochResponse(boot_id=engine.boot_id, epoch=epoch)
        # An engine that is alone and keeps its weights may meet its old blocks again.
        drives = bool(engine.ssd_catalogue.paths) and not request.only_alone
        return self._confirmed(reply, drives=drives) if engine.durable else reply

    def _events(
        self, request: cache_pb2.EventsRequest, caller: CallContext
    ) -> cache_pb2.EventsResponse | Awaitable[cache_pb2.EventsResponse]:
        engine, namespace = self._engine, caller.namespace
        # Each block may have an event of its own.
        size = caller.contract.hash_bytes + _EVENT_BYTES
        if request.tokens:
            size += 2 * caller.contract.hash_bytes + caller.contract.token_bytes
        most = engine.message_room // size
        most = min(most, TOLD_PER_TURN_MAX)
        found = engine.core.following.read(
            caller.session,
            request.epoch,
            _cursor(request.cursor, engine.boot_id, namespace),
            min(request.blocks_max or most, most),
            engine.now(),
        )
        engine.counters.add("events_lost", found.lost)
        reply = cache_pb2.EventsResponse(
            boot_id=engine.boot_id,
            next=f"{engine.boot_id}/{namespace.number}/{found.cursor.number}/{found.cursor.place}",
            lost=found.lost,
            listing=found.cursor.place >= 0,
        )
        for each in found.events:
            reply.events.add(
                kind=each.kind,
                group=each.kv_group,
                keys=b"".join(each.keys),
                tier=each.tier,
                cause=each.cause,
            )
        if request.tokens:
            return self._with_tokens(reply, found.events, namespace)
        return reply

    async def _with_tokens(
        self, reply: cache_pb2.EventsResponse, events: Sequence[Event], namespace: Namespace
    ) -> cache_pb2.EventsResponse:
        """Add to a reply what the blocks hold that are somewhere."""
        named = defaultdict[int, dict[bytes, None]](dict)
        for event in events:
            if event.tier:
                named[event.kv_group].update(dict.fromkeys(event.keys))
        for kv_group, names in named.items():
            blocks = await self._engine.tokens.find(Place(namespace.digest, kv_group), list(names))
            keys, parents, rows = (b"".join(block[at] for block in blocks) for at in range(3))
            reply.tokens.add(group=kv_group, keys=keys, parents=parents, tokens=rows)
        return reply

    async def _confirmed(
        self, reply: cache_pb2.BumpEpochResponse, *, drives: bool
    ) -> cache_pb2.BumpEpochResponse:
        await self._engine.catalogue.written()
        if drives:
            await self._engine.ssd_catalogue.confirm()
        return reply


def _cursor(text: str, boot_id: str, namespace: Namespace) -> Cursor | None:
    """Return the cursor that a reader of events got, None for the empty one.

    Raises:
        KVHearthError: ``stale_boot``, ``bad_message``.
    """
    if not text:
        return None
    boot, _, rest = text.partition("/")
    if boot != boot_id:
        raise KVHearthError(Reason.STALE_BOOT, "a cursor of another boot; begin without one")
    found = re.fullmatch(r"(\d{1,5})/(\d{1,18})/(-1|\d{1,18})", rest, re.ASCII)
    if found is None or int(found[1]) != namespace.number:
        raise KVHearthError(Reason.BAD_MESSAGE, "no cursor of this namespace; begin without one")
    return Cursor(int(found[2]), int(found[3]))


def _handler_name(method: str) -> str:
    """Return the name of the handler of a call: ``_bump_epoch`` for ``BumpEpoch``."""
    return re.sub(r"(?=[A-Z])", "_", method).lower()


def _named(number: int, what: str) -> None:
    require(
        0 < number < np.iinfo(np.int64).max,
        Reason.BAD_MESSAGE,
        f"{what} must be a random number of 1..2^63, not {number}",
    )


def _few(count: int, what: str) -> None:
    if count > IDS_PER_CALL_MAX:
        raise KVHearthError(
            Reason.TOO_MANY_KEYS, f"{count} {what} in one call, at most {IDS_PER_CALL_MAX}"
        )
