"""The metrics of blocks and of the memory that holds them."""

from __future__ import annotations

from kvhearth_server.core.lookup import MissCause
from kvhearth_server.core.removal import EVICTIONS, Cause
from kvhearth_server.engine.snapshot import Snapshot
from kvhearth_server.observability.counters import Counter
from kvhearth_server.observability.metrics.metric import (
    Metric,
    Samples,
    counter,
    of_segments,
    one,
    words,
)


def _pages(now: Snapshot) -> Samples:
    return [((each.tenant, each.page_kind), each.page_bytes) for each in now.segments]


def _lookups(now: Snapshot) -> Samples:
    yield ("dram", ""), now.count("hit_keys")
    yield ("ssd", ""), now.count("below_keys")
    yield ("remote", ""), now.count("remote_keys")
    for reason in MissCause:
        yield ("miss", reason.value), now.counts.get(("miss_keys", reason.value), 0)


def _hit_ratios(now: Snapshot) -> Samples:
    for curve in now.curves:
        if curve.asked_keys:
            for tier, ratios in (("memory", curve.memory), ("ssd", curve.ssd)):
                for each in ratios:
                    yield (curve.tenant, curve.namespace, tier, f"{each.factor:g}"), each.hit_ratio


CACHE: tuple[Metric, ...] = (
    Metric(
        "kvhearth_lookup_blocks_total",
        "Keys asked for in lookups, by where they were found: dram, ssd or remote (there only: "
        "they have to be loaded first); misses by reason: absent, epoch"
        " (stored under older weights), not_summed (its checksum is still being taken). Their"
        " sum is the keys asked for.",
        "Hit ratio: the part with result dram, and what ssd adds. Many epoch misses: weights "
        "changed; many "
        "not_summed: checksums cannot keep up.",
        _lookups,
        ("result", "reason"),
        (
            *(Counter("lookup_keys"), Counter("hit_keys"), Counter("below_keys")),
            Counter("remote_keys"),
            Counter("miss_keys", "reason", words(MissCause)),
        ),
    ),
    counter(
        "kvhearth_lookups_total",
        "Lookups answered.",
        "Keys of one lookup, on average.",
        "lookups",
        unit="calls",
    ),
    counter(
        "kvhearth_lookup_asked_tokens_total",
        "Tokens that lookups named.",
        "The whole that hit_tokens is a part of.",
        "asked_tokens",
        unit="tokens",
    ),
    counter(
        "kvhearth_lookup_hit_tokens_total",
        "Tokens that lookups could restore from memory.",
        "Divided by asked_tokens: the part of prefill that is saved.",
        "hit_tokens",
        unit="tokens",
    ),
    counter(
        "kvhearth_leased_blocks_total",
        "Blocks leased to readers.",
        "What lookups really gave out to load.",
        "leased_keys",
    ),
    counter(
        "kvhearth_leased_bytes_total",
        "Bytes leased to readers.",
        "Bandwidth of loads; bytes that nobody had to compute again.",
        "leased_bytes",
    ),
    Metric(
        "kvhearth_store_blocks_total",
        "Committed blocks, by outcome: stored, or duplicate (somebody else's was there first).",
        "Store rate; many duplicates: engines compute the same prefix at the same time.",
        lambda now: [
            (("stored",), now.count("stored_blocks")),
            (("duplicate",), now.count("duplicate_blocks")),
        ],
        ("outcome",),
        (Counter("stored_blocks"), Counter("duplicate_blocks")),
    ),
    counter(
        "kvhearth_store_bytes_total",
        "Bytes of blocks that became visible.",
        "Bandwidth of stores.",
        "stored_bytes",
    ),
    counter(
        "kvhearth_summed_blocks_total",
        "Blocks that became servable because their checksum was taken or given.",
        "Falling behind the stores: more sum_threads.",
        "summed_blocks",
    ),
    counter(
        "kvhearth_reserved_slots_total",
        "Slots handed out for writing.",
        "Compare with what was stored.",
        "reserved_slots",
    ),
    counter(
        "kvhearth_aborted_slots_total",
        "Reserved slots given back unwritten.",
        "Engines that reserve more than they store.",
        "aborted_slots",
    ),
    counter(
        "kvhearth_store_dropped_blocks_total",
        "Blocks that were written and then not kept.",
        "Alert: stores that were lost.",
        "dropped_stores",
    ),
    counter(
        "kvhearth_quarantined_slots_total",
        "Slots in quarantine because somebody may still write to them or read them.",
        "With what came back: how much dead clients leave behind.",
        "quarantined_slots",
    ),
    counter(
        "kvhearth_quarantine_released_slots_total",
        "Slots that came back from quarantine.",
        "Alert: falling behind kvhearth_quarantined_slots_total for good.",
        "released_quarantine_slots",
    ),
    Metric(
        "kvhearth_capacity_bytes",
        "Memory of a tenant's segment, less what was given up because the machine had no more.",
        "The whole that the other gauges are parts of.",
        of_segments(lambda s: s.capacity_bytes),
        ("tenant",),
    ),
    Metric(
        "kvhearth_used_bytes",
        "Memory that committed blocks take.",
        "How full the cache is.",
        of_segments(lambda s: s.committed_bytes),
        ("tenant",),
    ),
    Metric(
        "kvhearth_reserved_bytes",
        "Memory reserved for writing and not committed yet.",
        "Stocks that are too large.",
        of_segments(lambda s: s.reserved_bytes),
        ("tenant",),
    ),
    Metric(
        "kvhearth_evictable_bytes",
        "The part of used_bytes that nobody leases or pins.",
        "Alert: near 0 with little free, stores are refused.",
        of_segments(lambda s: s.evictable_bytes),
        ("tenant",),
    ),
    Metric(
        "kvhearth_quarantined_bytes",
        "Memory in quarantine because somebody may still write to it or read it.",
        "A dead client that holds memory back.",
        of_segments(lambda s: s.quarantined_bytes),
        ("tenant",),
    ),
    Metric(
        "kvhearth_free_bytes",
        "Memory that nobody uses, slack inside slabs included.",
        "Room before evictions begin.",
        of_segments(lambda s: s.free_bytes),
        ("tenant",),
    ),
    Metric(
        "kvhearth_unassigned_bytes",
        "Slabs that no slot size holds yet.",
        "Room for any slot size.",
        of_segments(lambda s: s.unassigned_bytes),
        ("tenant",),
    ),
    Metric(
        "kvhearth_largest_free_bytes",
        "The largest slot that could be taken without evicting anything.",
        "Fragmentation: small while free_bytes is large.",
        of_segments(lambda s: s.largest_free_bytes),
        ("tenant",),
    ),
    Metric(
        "kvhearth_page_bytes",
        "Page size that the segment's memory is on, by kind of page.",
        "Alert: below 2097152 the arena is not on huge pages.",
        _pages,
        ("tenant", "kind"),
    ),
    Metric(
        "kvhearth_populated_bytes",
        "Bytes of the segment that have pages; the daemon takes them while it serves.",
        "Not growing and below the memory that was asked for: the machine has no more.",
        of_segments(lambda s: s.populated_bytes),
        ("tenant",),
    ),
    Metric(
        "kvhearth_huge_page_bytes",
        "Bytes of the segment that were in huge pages of any kind once all of it had pages.",
        "Alert: less than the segment's bytes. Copies and the drive are slower on small pages.",
        of_segments(lambda s: s.huge_bytes),
        ("tenant",),
    ),
    Metric(
        "kvhearth_blocks",
        "Blocks in the index.",
        "How much the cache holds.",
        one(lambda now: now.blocks),
    ),
    Metric(
        "kvhearth_namespaces",
        "Namespaces: tenants' contracts.",
        "Growth towards namespaces_max: contracts that differ by mistake.",
        one(lambda now: now.namespaces),
    ),
    Metric(
        "kvhearth_capacity_hit_ratio",
        "Part of the keys looked up that would have been found with another capacity: factor times "
        "the present memory (tier memory), or the present memory and factor times the present SSD "
        "tier (tier ssd). By namespace: all, the first ones by name, and other; those of the last "
        "hour or so. An estimate for an LRU cache from a sample of the keys.",
        "What more memory or a larger SSD tier would bring: compare factor 2 with 1.",
        _hit_ratios,
        ("tenant", "namespace", "tier", "factor"),
    ),
    counter(
        "kvhearth_evictions_total",
        "Blocks evicted, by reason: space, slab (another slot size needed it), quota, asked.",
        "Churn; slab evictions: models of several page sizes compete.",
        "evicted_blocks",
        "reason",
        usual=words(EVICTIONS),
        unit="blocks",
    ),
    counter(
        "kvhearth_removals_total",
        "Blocks removed for another reason than room.",
        "Blocks replaced, or found damaged.",
        "removed_blocks",
        "reason",
        usual=words(frozenset(Cause) - EVICTIONS),
        unit="blocks",
    ),
    Metric(
        "kvhearth_eviction_age_seconds",
        "Time from a block's last use to its eviction, too high by at most about a second "
        "(more for ages of hours).",
        "Memory is too small where blocks go within minutes.",
        one(lambda now: now.eviction_ages),
        kind="histogram",
    ),
)
