"""The answers of AdminService about leases and keys, as messages."""

from __future__ import annotations

from kvhearth.contract import KEY_BYTES_MAX, KEY_BYTES_MIN
from kvhearth.errors import Reason
from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.core.inspection import held_by_groups, places
from kvhearth_server.core.state import require
from kvhearth_server.engine.engine import Engine


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
        ],
    )
