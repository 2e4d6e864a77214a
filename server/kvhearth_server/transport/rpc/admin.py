"""AdminService: gRPC calls for operators."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from kvhearth.contract import KEY_BYTES_MAX, KEY_BYTES_MIN, Contract, namespace_digest
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import Tier
from kvhearth.proto.v1 import admin_pb2, admin_pb2_grpc
from kvhearth.version import __version__
from kvhearth_server.core.inspection import held_by_groups, places
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.state import require
from kvhearth_server.engine import snapshot as portions
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.snapshot import take_ssd
from kvhearth_server.transport.audit import audited, refused
from kvhearth_server.transport.messages import plain_text
from kvhearth_server.transport.rpc.errors import Context, guarded, metadata_value

_SSD_ONLY = "it is on SSD only: a lookup with prefetch, or a prefetch, loads it first"
_IN_MEMORY_TOO = "this is a copy: the block is served from memory"


def leases_reply(engine: Engine) -> admin_pb2.ListLeasesResponse:
    """Return the leases that each group's readers hold now."""
    state = engine.core.state
    digests = {space.number: space.digest.hex() for space in state.namespaces}
    return admin_pb2.ListLeasesResponse(
        boot_id=engine.boot_id,
        groups=[
            admin_pb2.LeaseInfo(
                tenant=held.group.tenant,
                engine_id=held.group.engine_id,
                incarnation=held.group.incarnation,
                namespace=digests.get(held.group.namespace, ""),
                leases=held.leases,
                slots=held.slots,
                bytes=held.bytes,
                oldest_s=held.oldest_s,
            )
            for held in held_by_groups(state, engine.now())
        ],
    )


def ssd_stats(engine: Engine) -> admin_pb2.SsdStats | None:
    """Return statistics of the SSD tier; None without one."""
    now = take_ssd(engine)
    if now is None:
        return None
    tier = now.tier
    return admin_pb2.SsdStats(
        interface=tier.interface,
        interface_broken=tier.interface_broken,
        directories=[
            admin_pb2.SsdDirectory(
                path=each.path,
                capacity_bytes=each.capacity_bytes,
                file_bytes=each.file_bytes,
                segments=each.segments,
                reasons=[told for _, told in each.findings],
            )
            for each in tier.directories
        ],
        blocks=tier.blocks,
        live_bytes=tier.live_bytes,
        recovering=tier.recovering,
        files_found=tier.files_found,
        files_recovered=tier.files_recovered,
        demoting_blocks=now.demoting_blocks,
        promoting_blocks=now.promoting_blocks,
        queued_reads=tier.queued_reads,
        queued_writes=tier.queued_writes,
        read_latency_s=tier.read_latency_s,
        read_bytes_per_s=tier.read_bytes_per_s,
        budget_left_bytes=tier.budget_left_bytes,
        counters=tier.counts,
    )


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


ADMIN_TOKEN_KEY = "kvhearth-admin-token"

_TIERS: Mapping[int, portions.Where | None] = {
    admin_pb2.EVICT_TIER_UNSPECIFIED: None,
    admin_pb2.EVICT_TIER_MEMORY: "memory",
    admin_pb2.EVICT_TIER_SSD: "ssd",
    admin_pb2.EVICT_TIER_ALL: "all",
}

Reply = TypeVar("Reply")


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Reads the engine's state; ``Evict``, ``ForgetNamespace`` and ``Drain`` change it."""

    def __init__(self, engine: Engine, admin_token: str) -> None:
        self._engine = engine
        self._admin_token = admin_token

    def admit(self, context: Context) -> None:
        """Refuse a caller without admin rights.

        Raises:
            KVHearthError: ``not_admin``.
        """
        given = metadata_value(context, ADMIN_TOKEN_KEY)
        if not hmac.compare_digest(given.encode(), self._admin_token.encode()):
            refused("grpc", context.peer())
            raise KVHearthError(
                Reason.NOT_ADMIN, "send the content of admin.token of the socket directory"
            )

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
        engine, state = self._engine, self._engine.core.state
        books_error = await portions.check_books(engine) if check else ""
        segments = [
            admin_pb2.SegmentStats(
                tenant=shape.tenant,
                bytes=books.capacity,
                free_bytes=books.free,
                reserved_bytes=books.reserved,
                committed_bytes=books.committed,
                quarantined_bytes=books.quarantined,
                held_bytes=books.held,
                page_bytes=mapped.page_bytes,
                page_kind=str(mapped.page_kind),
            )
            for shape, books, mapped in zip(
                state.table.geometry.segments,
                state.ledger.segments,
                engine.arena.segments,
                strict=True,
            )
        ]
        return admin_pb2.StatsResponse(
            boot_id=engine.boot_id,
            version=__version__,
            uptime_s=engine.now() - engine.started_at,
            draining=engine.draining,
            segments=segments,
            counters=engine.counters.snapshot(),
            blocks=len(state.index),
            leases=sum(len(group.leases) for group in state.groups),
            sessions=state.groups.sessions,
            groups=len(state.groups),
            pins=len(engine.core.pinning),
            books_error=books_error,
            ssd=ssd_stats(engine),
        )

    async def ListSessions(
        self, request: admin_pb2.ListSessionsRequest, context: Context
    ) -> admin_pb2.ListSessionsResponse:
        return await self._run(context, self._sessions)

    def _sessions(self) -> admin_pb2.ListSessionsResponse:
        engine, state = self._engine, self._engine.core.state
        # An ended group may outlive its namespace, which was empty and made place for another one.
        digests = {space.number: space.digest.hex() for space in state.namespaces}
        infos = []
        for group in state.groups:
            for member in group.members.values():
                record = engine.sessions.find(member.session)
                infos.append(
                    admin_pb2.SessionInfo(
                        session=member.session,
                        tenant=group.tenant,
                        engine_id=group.engine_id,
                        incarnation=group.incarnation,
                        scheduler=member.scheduler,
                        rank=member.rank,
                        world_size=group.world_size,
                        pid=record.peer.pid if record else 0,
                        namespace=digests.get(group.namespace, ""),
                        state=str(member.state),
                    )
                )
        return admin_pb2.ListSessionsResponse(boot_id=engine.boot_id, sessions=infos)

    async def ListNamespaces(
        self, request: admin_pb2.ListNamespacesRequest, context: Context
    ) -> admin_pb2.ListNamespacesResponse:
        return await self._run(
            context,
            lambda: admin_pb2.ListNamespacesResponse(
                boot_id=self._engine.boot_id,
                namespaces=[_info(space) for space in self._engine.core.state.namespaces],
            ),
        )

    async def ListLeases(
        self, request: admin_pb2.ListLeasesRequest, context: Context
    ) -> admin_pb2.ListLeasesResponse:
        return await self._run(context, lambda: leases_reply(self._engine))

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
        )

    async def Evict(
        self, request: admin_pb2.EvictRequest, context: Context
    ) -> admin_pb2.EvictResponse:
        return await self._run(context, lambda: self._evict(request, context.peer()))

    async def _evict(self, request: admin_pb2.EvictRequest, peer: str) -> admin_pb2.EvictResponse:
        engine, keep_bytes = self._engine, request.keep_bytes
        asked = {"namespace": request.namespace, "keep_bytes": keep_bytes}
        with audited("evict", "grpc", peer, **asked) as told:
            require(request.tier in _TIERS, Reason.BAD_MESSAGE, f"there is no tier {request.tier}")
            where = told["tier"] = _TIERS[request.tier]
            removed = await portions.evict(engine, _digest(request), keep_bytes, where)
            told |= {"evicted_blocks": removed.memory, "ssd_blocks": removed.ssd}
        return admin_pb2.EvictResponse(
            boot_id=engine.boot_id, evicted_blocks=removed.memory, ssd_blocks=removed.ssd
        )

    async def ForgetNamespace(
        self, request: admin_pb2.ForgetNamespaceRequest, context: Context
    ) -> admin_pb2.ForgetNamespaceResponse:
        return await self._run(context, lambda: self._forget(request, context.peer()))

    async def _forget(
        self, request: admin_pb2.ForgetNamespaceRequest, peer: str
    ) -> admin_pb2.ForgetNamespaceResponse:
        engine, expected = self._engine, request.expected_epoch or None
        with audited("forget", "grpc", peer, namespace=request.namespace) as told:
            epoch = told["epoch"] = await portions.forget(engine, _digest(request), expected)
        return admin_pb2.ForgetNamespaceResponse(boot_id=engine.boot_id, epoch=epoch)

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        def work() -> admin_pb2.DrainResponse:
            with audited("drain", "grpc", context.peer()):
                self._engine.drain()
            return admin_pb2.DrainResponse(boot_id=self._engine.boot_id)

        return await self._run(context, work)


def _digest(request: admin_pb2.EvictRequest | admin_pb2.ForgetNamespaceRequest) -> bytes:
    """Return the namespace digest of a request.

    Raises:
        KVHearthError: ``unknown_namespace``.
    """
    try:
        return bytes.fromhex(request.namespace)
    except ValueError:
        raise KVHearthError(
            Reason.UNKNOWN_NAMESPACE, "a namespace is named by its 64 hex digits"
        ) from None


def _info(space: Namespace) -> admin_pb2.NamespaceInfo:
    return admin_pb2.NamespaceInfo(
        namespace=space.digest.hex(),
        tenant=space.tenant,
        contract_json=space.contract.to_json(),
        epoch=space.epoch,
        blocks=space.blocks,
        bytes=space.used_bytes,
        quota_bytes=space.quota_bytes or 0,
    )
