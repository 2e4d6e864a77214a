"""The answers of AdminService about leases and keys, as messages."""

from __future__ import annotations

from kvhearth.contract import KEY_BYTES_MAX, KEY_BYTES_MIN
from kvhearth.errors import Reason
from kvhearth.model import Tier
from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.core.inspection import held_by_groups, places
from kvhearth_server.core.state import require
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.snapshot import take_ssd

_SSD_ONLY = "it is on SSD only: a lookup with prefetch, or a prefetch, loads it first"
_IN_MEMORY_TOO = "this is a copy: the block is served from memory"


def leases_reply(engine: Engine) -> admin_pb2.ListLeasesResponse:
    """What each group's readers hold now."""
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
    """The SSD tier in numbers; None without one."""
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
    """Where a key is.

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
    """The key's blocks on SSD, in every namespace and KV group."""
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
