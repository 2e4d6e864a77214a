"""CacheService: the decisions of attached engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.faults import hit
from kvhearth.model import I64
from kvhearth.proto.v1 import cache_pb2, cache_pb2_grpc, types_pb2
from kvhearth_server.core.groups import Handed
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.state import require
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.sessions import Session
from kvhearth_server.transport.rpc.guard import Context, guarded, metadata_value
from kvhearth_server.transport.rpc.messages import (
    bitmaps,
    commit_items,
    counts,
    keys_items,
    presence_message,
    slots_items,
)

TOKEN_KEY = "kvhearth-token"
COUNTERS_PER_HEARTBEAT_MAX = 64
IDS_PER_CALL_MAX = 4096

Reply = TypeVar("Reply")
Verify = Callable[[list[I64], str], Awaitable[int]]
Caller = tuple[int, Contract, Namespace]
"""Session number, contract and namespace of who is calling."""


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """One method an RPC; each checks its bounds, calls the core, and builds the reply."""

    def __init__(self, engine: Engine, verify: Verify) -> None:
        self._engine = engine
        self._verify = verify

    def admit(self, context: Context) -> Session:
        """The session of the caller's token.

        Raises:
            KVHearthError: ``unknown_token``.
        """
        return self._engine.authenticate(metadata_value(context, TOKEN_KEY))

    async def _run(
        self,
        context: Context,
        work: Callable[[Caller], Reply | Awaitable[Reply]],
        *,
        decides: bool = True,
    ) -> Reply:
        """Authenticate, then work; ``decides``: only a scheduler may."""

        def authenticated() -> Reply | Awaitable[Reply]:
            session = self.admit(context)
            group = self._engine.core.state.group_of(session.number)
            if decides and not group.members[session.number].scheduler:
                raise KVHearthError(
                    Reason.NOT_SCHEDULER, "only the group's scheduler takes decisions"
                )
            namespace = self._engine.core.state.namespaces.get(group.namespace)
            return work((session.number, namespace.contract, namespace))

        return await guarded(self._engine, context, authenticated)

    async def Heartbeat(
        self, request: cache_pb2.HeartbeatRequest, context: Context
    ) -> cache_pb2.HeartbeatResponse:
        def work(caller: Caller) -> cache_pb2.HeartbeatResponse:
            require(
                len(request.counters) <= COUNTERS_PER_HEARTBEAT_MAX,
                Reason.BAD_MESSAGE,
                f"{len(request.counters)} counters, at most {COUNTERS_PER_HEARTBEAT_MAX}",
            )
            group = self._engine.core.state.group_of(caller[0])
            self._engine.reported.note(caller[0], request.counters)
            return cache_pb2.HeartbeatResponse(
                boot_id=self._engine.boot_id,
                epoch=caller[2].epoch,
                group_complete=group.complete,
                draining=self._engine.draining,
            )

        return await self._run(context, work, decides=False)

    async def Lookup(
        self, request: cache_pb2.LookupRequest, context: Context
    ) -> cache_pb2.LookupResponse:
        engine = self._engine

        def work(caller: Caller) -> cache_pb2.LookupResponse:
            session, contract, _ = caller
            items = keys_items(contract, request.groups, engine.keys_max(contract))
            found = engine.call(
                engine.core.reading.lookup,
                session,
                request.epoch,
                items,
                request.lease_id,
                now=engine.now(),
            )
            return cache_pb2.LookupResponse(
                boot_id=engine.boot_id,
                lease_id=found.lease_id,
                hit_tokens=found.hit_tokens,
                groups=[presence_message(one) for one in found.groups],
                lease_short=str(found.short or ""),
            )

        return await self._run(context, work)

    async def Reserve(
        self, request: cache_pb2.ReserveRequest, context: Context
    ) -> cache_pb2.ReserveResponse:
        engine = self._engine

        def work(caller: Caller) -> cache_pb2.ReserveResponse:
            session, contract, _ = caller
            engine.refuse_while_draining()
            _named(request.reservation_id, "reservation_id")
            wants = counts(request.groups, engine.keys_max(contract))
            hit("reserve.before")
            reserved = engine.call(
                engine.core.writing.reserve, session, request.reservation_id, request.epoch, wants
            )
            hit("reserve.after")
            engine.counters.add("reserves")
            return cache_pb2.ReserveResponse(
                boot_id=engine.boot_id,
                groups=[self._extents(contract, part) for part in reserved.handed],
                short_reason=str(reserved.short or ""),
            )

        return await self._run(context, work)

    def _extents(self, contract: Contract, part: Handed) -> types_pb2.GroupExtents:
        length = contract.groups[part.kv_group].page_bytes
        extents = self._engine.core.state.table.extents(part.slots, length)
        extents["generation"] = part.generations.reshape(-1)
        return types_pb2.GroupExtents(
            group=part.kv_group, count=len(part.slots), extents=extents.tobytes()
        )

    async def Commit(
        self, request: cache_pb2.CommitRequest, context: Context
    ) -> cache_pb2.CommitResponse:
        engine = self._engine

        def work(caller: Caller) -> cache_pb2.CommitResponse:
            session, contract, _ = caller
            items = commit_items(contract, request.groups, engine.keys_max(contract))
            hit("commit.before")
            stored = engine.call(engine.core.writing.commit, session, request.epoch, items)
            hit("commit.after")
            engine.counters.add("commits")
            return cache_pb2.CommitResponse(
                boot_id=engine.boot_id, stored=bitmaps([item.kv_group for item in items], stored)
            )

        return await self._run(context, work)

    async def Abort(
        self, request: cache_pb2.AbortRequest, context: Context
    ) -> cache_pb2.AbortResponse:
        engine = self._engine

        def work(caller: Caller) -> cache_pb2.AbortResponse:
            items = slots_items(request.groups, IDS_PER_CALL_MAX * 256)
            _few(len(request.reservation_ids), "reservation ids")
            freed, aside = engine.call(
                engine.core.writing.abort,
                caller[0],
                items,
                list(request.reservation_ids),
                in_doubt=request.in_doubt,
            )
            engine.counters.add("aborts")
            engine.counters.add("aborted_slots", freed)
            return cache_pb2.AbortResponse(
                boot_id=engine.boot_id, freed_slots=freed, quarantined_slots=aside
            )

        return await self._run(context, work)

    async def Release(
        self, request: cache_pb2.ReleaseRequest, context: Context
    ) -> cache_pb2.ReleaseResponse:
        engine = self._engine

        async def work(caller: Caller) -> cache_pb2.ReleaseResponse:
            _few(len(request.lease_ids), "lease ids")
            try:
                engine.call(engine.core.reading.release, caller[0], list(request.lease_ids))
            finally:
                # Many releases travel together: one lease that has ended already must not lose
                # another one's report of wrong bytes, nor a bad report keep the leases.
                items = slots_items(request.bad, engine.limits.keys_max)
                await self._verify(engine.core.reading.suspects(caller[0], items), "reader")
            return cache_pb2.ReleaseResponse(boot_id=engine.boot_id)

        return await self._run(context, work)

    async def Prefetch(
        self, request: cache_pb2.PrefetchRequest, context: Context
    ) -> cache_pb2.PrefetchResponse:
        engine = self._engine

        def work(caller: Caller) -> cache_pb2.PrefetchResponse:
            session, contract, _ = caller
            items = keys_items(contract, request.groups, engine.keys_max(contract))
            engine.call(engine.core.reading.touch, session, request.epoch, items)
            found = engine.core.reading.presence(session, request.epoch, items)
            return cache_pb2.PrefetchResponse(
                boot_id=engine.boot_id, groups=[presence_message(one) for one in found]
            )

        return await self._run(context, work)

    async def Pin(self, request: cache_pb2.PinRequest, context: Context) -> cache_pb2.PinResponse:
        engine = self._engine

        def work(caller: Caller) -> cache_pb2.PinResponse:
            session, contract, _ = caller
            _named(request.pin_id, "pin_id")
            items = keys_items(contract, request.groups, engine.keys_max(contract))
            ttl_s = request.ttl_ms / 1000
            pinned = engine.call(
                engine.core.pinning.pin,
                session,
                request.epoch,
                request.pin_id,
                items,
                ttl_s=ttl_s,
                now=engine.now(),
            )
            return cache_pb2.PinResponse(
                boot_id=engine.boot_id, pinned=bitmaps([item.kv_group for item in items], pinned)
            )

        return await self._run(context, work)

    async def Unpin(
        self, request: cache_pb2.UnpinRequest, context: Context
    ) -> cache_pb2.UnpinResponse:
        engine = self._engine

        def work(caller: Caller) -> cache_pb2.UnpinResponse:
            _few(len(request.pin_ids), "pin ids")
            engine.call(engine.core.pinning.unpin, caller[0], list(request.pin_ids))
            return cache_pb2.UnpinResponse(boot_id=engine.boot_id)

        return await self._run(context, work)

    async def Touch(
        self, request: cache_pb2.TouchRequest, context: Context
    ) -> cache_pb2.TouchResponse:
        engine = self._engine

        def work(caller: Caller) -> cache_pb2.TouchResponse:
            session, contract, _ = caller
            items = keys_items(contract, request.groups, engine.keys_max(contract))
            touched = engine.call(engine.core.reading.touch, session, request.epoch, items)
            return cache_pb2.TouchResponse(boot_id=engine.boot_id, touched=touched)

        return await self._run(context, work)

    async def BumpEpoch(
        self, request: cache_pb2.BumpEpochRequest, context: Context
    ) -> cache_pb2.BumpEpochResponse:
        engine = self._engine

        def work(caller: Caller) -> cache_pb2.BumpEpochResponse:
            epoch = engine.call(engine.core.bump_epoch, caller[0], request.expected_epoch)
            return cache_pb2.BumpEpochResponse(boot_id=engine.boot_id, epoch=epoch)

        return await self._run(context, work)


def _named(number: int, what: str) -> None:
    require(
        0 < number < np.iinfo(np.int64).max,
        Reason.BAD_MESSAGE,
        f"{what} must be a random number of 1..2^63, not {number}",
    )


def _few(count: int, what: str) -> None:
    require(
        count <= IDS_PER_CALL_MAX,
        Reason.TOO_MANY_KEYS,
        f"{count} {what} in one call, at most {IDS_PER_CALL_MAX}",
    )
