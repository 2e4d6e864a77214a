"""AdminService: gRPC calls for operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from kvhearth.contract import KEY_BYTES_MAX, KEY_BYTES_MIN, Contract, namespace_digest
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import Tier
from kvhearth.proto.v1 import admin_pb2
from kvhearth.wire.frames import ADMIN_TOKEN_KEY
from kvhearth_server.core.inspection import places
from kvhearth_server.core.state import require
from kvhearth_server.engine import snapshot as admin_work
from kvhearth_server.engine.engine import Engine
from kvhearth_server.transport import reports
from kvhearth_server.transport.messages import plain_text
from kvhearth_server.transport.operators import Operators, Right
from kvhearth_server.transport.reports import Actions, message_of, operator, refused
from kvhearth_server.transport.rpc.errors import Context, guarded, metadata_value

_SSD_ONLY = "it is on SSD only: a lookup with prefetch, or a prefetch, loads it first"
_IN_MEMORY_TOO = "this is a copy: the block is served from memory"


def key_reply(engine: Engine, key: bytes) -> admin_pb2.ExplainKeyResponse:
    """Return the places of a key.

    Raises:
        KVHearthError: ``bad_keys`` if nothing of this length can be a key.
    """
    require(
        KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX,
        Reason.BAD_KEYS,
        f"a key has {KEY_BYTES_MIN}..{KEY_BYTES_MAX} bytes, this one has {len(key)}",
    )
    return admin_pb2.ExplainKeyResponse(
        boot_id=engine.boot_id,
        places=[
            admin_pb2.KeyPlace(
                namespace=place.namespace.digest.hex(),
                tenant=place.namespace.tenant,
                group=place.kv_group,
                state=place.state.name.lower(),
                tier=place.tier.name.lower(),
                epoch=place.epoch,
                namespace_epoch=place.namespace.epoch,
                leases=place.leases,
                pins=place.pins,
                shard_bytes=place.shard_bytes,
                shards=place.shards,
                served=not place.why_not,
                why_not=place.why_not,
            )
            for place in places(engine.core.state, key)
        ]
        + _on_ssd(engine, key),
    )


def _on_ssd(engine: Engine, key: bytes) -> list[admin_pb2.KeyPlace]:
    """Return the key's blocks on SSD, in every namespace and KV group."""
    if engine.tiering is None:
        return []
    state, found = engine.core.state, []
    for namespace in state.namespaces:
        for kv_group, spec in enumerate(namespace.contract.groups):
            if not engine.tiering.present(namespace, kv_group, [key])[0]:
                continue
            here = int(state.index.find(namespace.number, kv_group, [key])[0]) >= 0
            found.append(
                admin_pb2.KeyPlace(
                    namespace=namespace.digest.hex(),
                    tenant=namespace.tenant,
                    group=kv_group,
                    state="saved",
                    tier=Tier.SSD.name.lower(),
                    epoch=namespace.epoch,
                    namespace_epoch=namespace.epoch,
                    shard_bytes=spec.page_bytes,
                    shards=spec.shards,
                    why_not=_IN_MEMORY_TOO if here else _SSD_ONLY,
                )
            )
    return found


_TIERS: Mapping[int, str | None] = {
    admin_pb2.EVICT_TIER_UNSPECIFIED: None,
    admin_pb2.EVICT_TIER_MEMORY: "memory",
    admin_pb2.EVICT_TIER_SSD: "ssd",
    admin_pb2.EVICT_TIER_ALL: "all",
}

Reply = TypeVar("Reply")


class AdminService:
    """Reads the engine's state; ``Evict``, ``ForgetNamespace`` and ``Drain`` change it."""

    def __init__(self, engine: Engine, operators: Operators) -> None:
        self._engine = engine
        self._actions = Actions(engine, "grpc")
        self._operators = operators

    def admit(self, context: Context) -> str:
        """Refuse a caller without admin rights; return the name that operators share.

        Raises:
            KVHearthError: ``not_admin``.
        """
        right, name = self._operators.at_once(metadata_value(context, ADMIN_TOKEN_KEY))
        if right < Right.ALL:
            refused("grpc", context.peer())
            raise KVHearthError(
                Reason.NOT_ADMIN, "send the content of admin.token of the socket directory"
            )
        operator.set(name)
        return "operator"

    async def _run(self, context: Context, work: Callable[[], Reply | Awaitable[Reply]]) -> Reply:
        def admitted() -> Reply | Awaitable[Reply]:
            self.admit(context)
            return work()

        return await guarded(self._engine, context, admitted)

    async def Stats(
        self, request: admin_pb2.StatsRequest, context: Context
    ) -> admin_pb2.StatsResponse:
        return await self._run(context, lambda: self._stats(request.check_books))

    async def _stats(self, check: bool) -> admin_pb2.StatsResponse:
        error = await admin_work.check_books(self._engine) if check else ""
        report = reports.stats(self._engine)
        return message_of(admin_pb2.StatsResponse, report, books_error=error)

    async def ListSessions(
        self, request: admin_pb2.ListSessionsRequest, context: Context
    ) -> admin_pb2.ListSessionsResponse:
        def work() -> admin_pb2.ListSessionsResponse:
            return message_of(admin_pb2.ListSessionsResponse, reports.sessions(self._engine))

        return await self._run(context, work)

    async def ListNamespaces(
        self, request: admin_pb2.ListNamespacesRequest, context: Context
    ) -> admin_pb2.ListNamespacesResponse:
        def work() -> admin_pb2.ListNamespacesResponse:
            return message_of(admin_pb2.ListNamespacesResponse, reports.namespaces(self._engine))

        return await self._run(context, work)

    async def ListLeases(
        self, request: admin_pb2.ListLeasesRequest, context: Context
    ) -> admin_pb2.ListLeasesResponse:
        async def work() -> admin_pb2.ListLeasesResponse:
            return message_of(admin_pb2.ListLeasesResponse, await reports.leases(self._engine))

        return await self._run(context, work)

    async def ExplainKey(
        self, request: admin_pb2.ExplainKeyRequest, context: Context
    ) -> admin_pb2.ExplainKeyResponse:
        return await self._run(context, lambda: key_reply(self._engine, request.key))

    async def ExplainContract(
        self, request: admin_pb2.ExplainContractRequest, context: Context
    ) -> admin_pb2.ExplainContractResponse:
        return await self._run(context, lambda: self._explain(request))

    def _explain(
        self, request: admin_pb2.ExplainContractRequest
    ) -> admin_pb2.ExplainContractResponse:
        state = self._engine.core.state
        contract = Contract.from_json(request.contract_json)
        tenant = request.tenant or state.table.geometry.segments[0].tenant
        digest = namespace_digest(tenant, contract)
        nearest = [
            admin_pb2.NamespaceDifference(
                namespace=space.digest.hex(),
                fields=[
                    admin_pb2.FieldDifference(
                        field=name, asked=plain_text(asked), stored=plain_text(stored)
                    )
                    for name, asked, stored in fields
                ],
            )
            for space, fields in state.namespaces.explain(tenant, contract)
        ]
        return admin_pb2.ExplainContractResponse(
            boot_id=self._engine.boot_id,
            namespace=digest.hex(),
            exists=state.namespaces.find(digest) is not None,
            nearest=nearest,
            shares=[
                admin_pb2.ShareStats(**dataclasses.asdict(each))
                for each in admin_work.take_shares(self._engine)
                if each.tenant == tenant
            ],
        )

    async def Evict(
        self, request: admin_pb2.EvictRequest, context: Context
    ) -> admin_pb2.EvictResponse:
        async def work() -> admin_pb2.EvictResponse:
            tier = _TIERS.get(request.tier, str(request.tier))
            report = await self._actions.evict(
                context.peer(), request.namespace, request.keep_bytes, tier
            )
            return message_of(admin_pb2.EvictResponse, report)

        return await self._run(context, work)

    async def ForgetNamespace(
        self, request: admin_pb2.ForgetNamespaceRequest, context: Context
    ) -> admin_pb2.ForgetNamespaceResponse:
        async def work() -> admin_pb2.ForgetNamespaceResponse:
            expected = request.expected_epoch or None
            label = request.label if request.HasField("label") else None
            report = await self._actions.forget(context.peer(), request.namespace, expected, label)
            return message_of(admin_pb2.ForgetNamespaceResponse, report)

        return await self._run(context, work)

    async def ReloadSettings(
        self, request: admin_pb2.ReloadSettingsRequest, context: Context
    ) -> admin_pb2.ReloadSettingsResponse:
        async def work() -> admin_pb2.ReloadSettingsResponse:
            report = await self._actions.reload(context.peer())
            return message_of(admin_pb2.ReloadSettingsResponse, report)

        return await self._run(context, work)

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        def work() -> admin_pb2.DrainResponse:
            return message_of(admin_pb2.DrainResponse, self._actions.drain(context.peer()))

        return await self._run(context, work)
