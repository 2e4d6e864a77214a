"""The metrics by namespace and by engine: who fills, uses and holds the cache."""

from __future__ import annotations

from collections.abc import Callable

from kvhearth_server.core.namespaces import Traffic
from kvhearth_server.engine.namespace_series import OTHER
from kvhearth_server.engine.snapshot import Snapshot
from kvhearth_server.observability.metrics.metric import (
    Metric,
    Read,
    Samples,
    of_engines,
    of_namespaces,
)

_ENGINE = ("tenant", "engine")


def _infos(now: Snapshot) -> Samples:
    for each in now.busiest_namespaces:
        if each.name != OTHER:
            yield (each.name, each.tenant, each.model, each.revision, each.kv_dtype), 1


def _lookups(now: Snapshot) -> Samples:
    for each in now.busiest_namespaces:
        yield (each.name, "dram"), each.traffic.hit_keys
        yield (each.name, "ssd"), each.traffic.below_keys
        yield (each.name, "miss"), each.traffic.miss_keys


def _quotas(now: Snapshot) -> Samples:
    for each in now.busiest_namespaces:
        if each.quota_bytes is not None:
            yield (each.name,), each.quota_bytes


def _unnamed(now: Snapshot) -> Samples:
    named = sum(each.name != OTHER for each in now.busiest_namespaces)
    return [((), max(0, now.namespaces - named))]


def _of_traffic(get: Callable[[Traffic], int]) -> Read:
    return of_namespaces(lambda each: get(each.traffic))


OWNERS: tuple[Metric, ...] = (
    Metric(
        "kvhearth_namespaces_other",
        "Namespaces that share the label value other.",
        "Whether the metrics by namespace name all of them.",
        _unnamed,
        unit="namespaces",
    ),
    Metric(
        "kvhearth_namespace_info",
        "Always 1; the labels tell the model of a namespace, which is named by the first digits of "
        "its digest. A local model has its directory's name and four digits of its digest.",
        "Joined to the metrics by namespace: their models.",
        _infos,
        ("namespace", "tenant", "model", "revision", "kv_dtype"),
        unit="1",
    ),
    Metric(
        "kvhearth_namespace_blocks",
        "Blocks of a namespace in memory; at most 32 namespaces are named, the others are other.",
        "Who fills the cache.",
        of_namespaces(lambda space: space.blocks),
        ("namespace",),
    ),
    Metric(
        "kvhearth_namespace_used_bytes",
        "Memory that a namespace takes.",
        "Who fills the cache.",
        of_namespaces(lambda space: space.used_bytes),
        ("namespace",),
    ),
    Metric(
        "kvhearth_namespace_quota_bytes",
        "Most memory that a namespace may take; no series without a quota.",
        "With used_bytes: who is evicted for its quota.",
        _quotas,
        ("namespace",),
    ),
    Metric(
        "kvhearth_namespace_lookup_blocks_total",
        "Keys asked for, by namespace and by where they were found: dram, ssd (or a remote), miss.",
        "Hit ratio by model and tier.",
        _lookups,
        ("namespace", "result"),
        unit="blocks",
    ),
    Metric(
        "kvhearth_namespace_store_blocks_total",
        "Blocks stored, by namespace.",
        "Who writes; a namespace that stores and never hits.",
        _of_traffic(lambda traffic: traffic.stored_blocks),
        ("namespace",),
        unit="blocks",
    ),
    Metric(
        "kvhearth_namespace_evictions_total",
        "Blocks evicted from memory, by namespace.",
        "Whose blocks make room for others'.",
        _of_traffic(lambda traffic: traffic.evicted_blocks),
        ("namespace",),
        unit="blocks",
    ),
    Metric(
        "kvhearth_namespace_fallbacks_total",
        "Decisions for which engines of a namespace went on without the cache, as they report.",
        "Alert: rising means that this model's engines cannot use the cache.",
        _of_traffic(lambda traffic: traffic.fallbacks),
        ("namespace",),
        unit="decisions",
    ),
    Metric(
        "kvhearth_namespace_asked_tokens_total",
        "Tokens that lookups of a namespace named.",
        "The whole that hit_tokens is a part of.",
        _of_traffic(lambda traffic: traffic.asked_tokens),
        ("namespace",),
        unit="tokens",
    ),
    Metric(
        "kvhearth_namespace_hit_tokens_total",
        "Tokens of those that could be restored from memory.",
        "Divided by asked_tokens: the part of prefill that is saved.",
        _of_traffic(lambda traffic: traffic.hit_tokens),
        ("namespace",),
        unit="tokens",
    ),
    Metric(
        "kvhearth_engine_leases",
        "Leases that an engine's readers hold; at most 64 engines are named, the others are other.",
        "Who holds blocks that eviction may not take.",
        of_engines(lambda engine: engine.leases),
        _ENGINE,
    ),
    Metric(
        "kvhearth_engine_oldest_lease_seconds",
        "Age of an engine's oldest lease; 0 if there is none.",
        "Alert: minutes mean a reader that leaks leases.",
        of_engines(lambda engine: engine.oldest_lease_s),
        _ENGINE,
    ),
    Metric(
        "kvhearth_engine_reserved_bytes",
        "Memory that an engine reserved and has not committed yet.",
        "Whose stock is too large.",
        of_engines(lambda engine: engine.reserved_bytes),
        _ENGINE,
    ),
    Metric(
        "kvhearth_engine_quarantined_bytes",
        "Memory that a process of an engine may still write although it left.",
        "Alert: whose dead processes hold memory back.",
        of_engines(lambda engine: engine.quarantined_bytes),
        _ENGINE,
    ),
    Metric(
        "kvhearth_engine_heartbeat_age_seconds",
        "Time since the last heartbeat of the engine's process that is silent for longest.",
        "Alert: a minute means an engine that hangs.",
        of_engines(lambda engine: engine.heartbeat_age_s),
        _ENGINE,
    ),
)
