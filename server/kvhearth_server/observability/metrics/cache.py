"""The metrics of blocks, of the memory that holds them, and of who fills and uses it."""

from __future__ import annotations

from kvhearth_server.core.lookup import MissCause
from kvhearth_server.core.removal import EVICTIONS, Cause
from kvhearth_server.engine.namespace_series import OTHER, NamespaceNow
from kvhearth_server.engine.snapshot import Snapshot
from kvhearth_server.observability.counters import Counter
from kvhearth_server.observability.metrics.metric import (
    DAEMON,
    Metric,
    Samples,
    Source,
    counter,
    words,
)

SEGMENTS = Source(
    "kvhearth_", lambda now: [((each.tenant,), each) for each in now.segments], ("tenant",)
)


def _lookups(now: Snapshot) -> Samples:
    yield ("dram", ""), now.count("hit_keys")
    yield ("ssd", ""), now.count("below_keys")
    yield ("remote", ""), now.count("remote_keys")
    for reason, misses in sorted(now.counts["miss_keys"].items()):
        yield ("miss", reason), misses


def _hit_ratios(now: Snapshot) -> Samples:
    for curve in now.curves:
        if curve.asked_keys:
            for tier, ratios in (("memory", curve.memory), ("ssd", curve.ssd)):
                for each in ratios:
                    yield (curve.tenant, curve.namespace, tier, f"{each.factor:g}"), each.hit_ratio


CACHE: tuple[Metric, ...] = (
    DAEMON.split(
        "kvhearth_lookup_blocks_total",
        "Keys asked for in lookups, by where they were found: dram, ssd or remote (there only: "
        "they have to be loaded first); misses by reason: absent, epoch"
        " (stored under older weights), not_summed (its checksum is still being taken). Their"
        " sum is the keys asked for.",
        "Hit ratio: the part with result dram, and what ssd adds. Many epoch misses: weights "
        "changed; many "
        "not_summed: checksums cannot keep up.",
        ("result", "reason"),
        _lookups,
        counters=(
            *(Counter("lookup_keys"), Counter("hit_keys"), Counter("below_keys")),
            Counter("remote_keys"),
            Counter("miss_keys", "reason", words(MissCause)),
        ),
    ),
    counter(
        "kvhearth_lookups_total",
        "Lookups answered.",
        "Keys of one lookup, on average.",
    ),
    counter(
        "kvhearth_lookup_asked_tokens_total",
        "Tokens that lookups named.",
        "The whole that hit_tokens is a part of.",
        count="asked_tokens",
    ),
    counter(
        "kvhearth_lookup_hit_tokens_total",
        "Tokens that lookups could restore from memory.",
        "Divided by asked_tokens: the part of prefill that is saved.",
        count="hit_tokens",
    ),
    counter(
        "kvhearth_leased_blocks_total",
        "Blocks leased to readers.",
        "What lookups really gave out to load.",
        count="leased_keys",
    ),
    counter(
        "kvhearth_leased_bytes_total",
        "Bytes leased to readers.",
        "Bandwidth of loads; bytes that nobody had to compute again.",
    ),
    DAEMON.split(
        "kvhearth_store_blocks_total",
        "Committed blocks, by outcome: stored, or duplicate (somebody else's was there first).",
        "Store rate; many duplicates: engines compute the same prefix at the same time.",
        ("outcome",),
        lambda now: [((word,), now.count(f"{word}_blocks")) for word in ("stored", "duplicate")],
        counters=(Counter("stored_blocks"), Counter("duplicate_blocks")),
    ),
    counter(
        "kvhearth_store_bytes_total",
        "Bytes of blocks that became visible.",
        "Bandwidth of stores.",
        count="stored_bytes",
    ),
    counter(
        "kvhearth_summed_blocks_total",
        "Blocks that became servable because their checksum was taken or given.",
        "Falling behind the stores: more sum_threads.",
    ),
    counter(
        "kvhearth_reserved_slots_total",
        "Slots handed out for writing.",
        "Compare with what was stored.",
    ),
    counter(
        "kvhearth_aborted_slots_total",
        "Reserved slots given back unwritten.",
        "Engines that reserve more than they store.",
    ),
    counter(
        "kvhearth_store_dropped_blocks_total",
        "Blocks that were written and then not kept.",
        "Alert: stores that were lost.",
        count="dropped_stores",
    ),
    counter(
        "kvhearth_quarantined_slots_total",
        "Slots in quarantine because somebody may still write to them or read them.",
        "With what came back: how much dead clients leave behind.",
    ),
    counter(
        "kvhearth_quarantine_released_slots_total",
        "Slots that came back from quarantine.",
        "Alert: falling behind kvhearth_quarantined_slots_total for good.",
        count="released_quarantine_slots",
    ),
    SEGMENTS.field(
        "kvhearth_capacity_bytes",
        "Memory of a tenant's segment, less what was given up because the machine had no more.",
        "The whole that the other gauges are parts of.",
    ),
    SEGMENTS.field(
        "kvhearth_used_bytes",
        "Memory that committed blocks take.",
        "How full the cache is.",
        "committed_bytes",
    ),
    SEGMENTS.field(
        "kvhearth_reserved_bytes",
        "Memory reserved for writing and not committed yet.",
        "Stocks that are too large.",
    ),
    SEGMENTS.field(
        "kvhearth_evictable_bytes",
        "The part of used_bytes that nobody leases; pinned blocks go last.",
        "Alert: near 0 with little free, stores are refused.",
    ),
    SEGMENTS.field(
        "kvhearth_pinned_bytes",
        "The part of used_bytes that pins keep until nothing else is left to evict.",
        "Near pinned_fraction_max of capacity_bytes, further pins are refused.",
    ),
    SEGMENTS.field(
        "kvhearth_quarantined_bytes",
        "Memory in quarantine because somebody may still write to it or read it.",
        "A dead client that holds memory back.",
    ),
    SEGMENTS.field(
        "kvhearth_free_bytes",
        "Memory that nobody uses, slack inside slabs included.",
        "Room before evictions begin.",
    ),
    SEGMENTS.field(
        "kvhearth_unassigned_bytes",
        "Slabs that no slot size holds yet.",
        "Room for any slot size.",
    ),
    SEGMENTS.field(
        "kvhearth_largest_free_bytes",
        "The largest slot that could be taken without evicting anything.",
        "Fragmentation: small while free_bytes is large.",
    ),
    SEGMENTS.split(
        "kvhearth_page_bytes",
        "Page size that the segment's memory is on, by kind of page.",
        "Alert: below 2097152 the arena is not on huge pages.",
        ("kind",),
        lambda segment: [((segment.page_kind,), segment.page_bytes)],
    ),
    SEGMENTS.field(
        "kvhearth_populated_bytes",
        "Bytes of the segment that have pages; the daemon takes them while it serves.",
        "Not growing and below the memory that was asked for: the machine has no more.",
    ),
    SEGMENTS.field(
        "kvhearth_huge_page_bytes",
        "Bytes of the segment that were in huge pages of any kind once all of it had pages.",
        "Alert: less than the segment's bytes. Copies and the drive are slower on small pages.",
        "huge_bytes",
    ),
    DAEMON.field(
        "kvhearth_blocks",
        "Blocks in the index.",
        "How much the cache holds.",
    ),
    DAEMON.field(
        "kvhearth_namespaces",
        "Namespaces: tenants' contracts.",
        "Growth towards namespaces_max: contracts that differ by mistake.",
    ),
    DAEMON.split(
        "kvhearth_capacity_hit_ratio",
        "Part of the keys looked up that would have been found with another capacity: factor times "
        "the present memory (tier memory), or the present memory and factor times the present SSD "
        "tier (tier ssd). By namespace: all, the first ones by name, and other; those of the last "
        "hour or so. An estimate for an LRU cache from a sample of the keys.",
        "What more memory or a larger SSD tier would bring: compare factor 2 with 1.",
        ("tenant", "namespace", "tier", "factor"),
        _hit_ratios,
    ),
    counter(
        "kvhearth_evictions_total",
        "Blocks evicted, by reason: space, slab (another slot size needed it), quota, asked.",
        "Churn; slab evictions: models of several page sizes compete.",
        "reason",
        words(EVICTIONS),
        count="evicted_blocks",
    ),
    counter(
        "kvhearth_removals_total",
        "Blocks removed for another reason than room.",
        "Blocks replaced, or found damaged.",
        "reason",
        words(frozenset(Cause) - EVICTIONS),
        count="removed_blocks",
    ),
    DAEMON.field(
        "kvhearth_eviction_age_seconds",
        "Time from a block's last use to its eviction, too high by at most about a second "
        "(more for ages of hours).",
        "Memory is too small where blocks go within minutes.",
        "eviction_ages",
        histogram=True,
    ),
)


NAMESPACES = Source(
    "kvhearth_namespace_",
    lambda now: [((each.name,), each) for each in now.busiest_namespaces],
    ("namespace",),
)
ENGINES = Source(
    "kvhearth_engine_",
    lambda now: [((each.tenant, each.engine_id), each) for each in now.engines],
    ("tenant", "engine"),
)


def _info(space: NamespaceNow) -> Samples:
    if space.name != OTHER:
        yield (space.tenant, space.model, space.revision, space.kv_dtype), 1


def _lookups_of(space: NamespaceNow) -> Samples:
    found = space.traffic
    return [
        (("dram",), found.hit_keys),
        (("ssd",), found.below_keys),
        (("miss",), found.miss_keys),
    ]


def _unnamed(now: Snapshot) -> int:
    named = sum(each.name != OTHER for each in now.busiest_namespaces)
    return max(0, now.namespaces - named)


OWNERS: tuple[Metric, ...] = (
    DAEMON.field(
        "kvhearth_namespaces_other",
        "Namespaces that share the label value other.",
        "Whether the metrics by namespace name all of them.",
        _unnamed,
    ),
    NAMESPACES.split(
        "kvhearth_namespace_info",
        "Always 1; the labels tell the model of a namespace, which is named by the first digits of "
        "its digest. A local model has its directory's name and four digits of its digest.",
        "Joined to the metrics by namespace: their models.",
        ("tenant", "model", "revision", "kv_dtype"),
        _info,
    ),
    NAMESPACES.field(
        "kvhearth_namespace_blocks",
        "Blocks of a namespace in memory; at most 32 namespaces are named, the others are other.",
        "Who fills the cache.",
    ),
    NAMESPACES.field(
        "kvhearth_namespace_used_bytes",
        "Memory that a namespace takes.",
        "Who fills the cache.",
    ),
    NAMESPACES.field(
        "kvhearth_namespace_quota_bytes",
        "Most memory that a namespace may take; no series without a quota.",
        "With used_bytes: who is evicted for its quota.",
    ),
    NAMESPACES.split(
        "kvhearth_namespace_lookup_blocks_total",
        "Keys asked for, by namespace and by where they were found: dram, ssd (or a remote), miss.",
        "Hit ratio by model and tier.",
        ("result",),
        _lookups_of,
    ),
    NAMESPACES.field(
        "kvhearth_namespace_store_blocks_total",
        "Blocks stored, by namespace.",
        "Who writes; a namespace that stores and never hits.",
        "traffic.stored_blocks",
    ),
    NAMESPACES.field(
        "kvhearth_namespace_evictions_total",
        "Blocks evicted from memory, by namespace.",
        "Whose blocks make room for others'.",
        "traffic.evicted_blocks",
    ),
    NAMESPACES.field(
        "kvhearth_namespace_fallbacks_total",
        "Decisions for which engines of a namespace went on without the cache, as they report.",
        "Alert: rising means that this model's engines cannot use the cache.",
        "traffic.fallbacks",
    ),
    NAMESPACES.field(
        "kvhearth_namespace_asked_tokens_total",
        "Tokens that lookups of a namespace named.",
        "The whole that hit_tokens is a part of.",
        "traffic.asked_tokens",
    ),
    NAMESPACES.field(
        "kvhearth_namespace_hit_tokens_total",
        "Tokens of those that could be restored from memory.",
        "Divided by asked_tokens: the part of prefill that is saved.",
        "traffic.hit_tokens",
    ),
    ENGINES.field(
        "kvhearth_engine_leases",
        "Leases that an engine's readers hold; at most 64 engines are named, the others are other.",
        "Who holds blocks that eviction may not take.",
    ),
    ENGINES.field(
        "kvhearth_engine_oldest_lease_seconds",
        "Age of an engine's oldest lease; 0 if there is none.",
        "Alert: minutes mean a reader that leaks leases.",
        "oldest_lease_s",
    ),
    ENGINES.field(
        "kvhearth_engine_reserved_bytes",
        "Memory that an engine reserved and has not committed yet.",
        "Whose stock is too large.",
    ),
    ENGINES.field(
        "kvhearth_engine_quarantined_bytes",
        "Memory that a process of an engine may still write although it left.",
        "Alert: whose dead processes hold memory back.",
    ),
    ENGINES.field(
        "kvhearth_engine_heartbeat_age_seconds",
        "Time since the last heartbeat of the engine's process that is silent for longest.",
        "Alert: a minute means an engine that hangs.",
        "heartbeat_age_s",
    ),
)
