"""The metrics of the SSD tier itself; none of them has a series without such a tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvhearth_server.engine.snapshot import Snapshot
from kvhearth_server.observability.metrics.metric import (
    Metric,
    Read,
    Samples,
    counter,
    if_ssd,
    of_ssd,
    words,
)
from kvhearth_server.tiers.base import (
    Refusal,
)
from kvhearth_server.tiers.figures import DirectoryFigures, TierFigures

INTERFACES = ("libaio", "threads")
PROBLEMS = (
    *("buffered", "capped", "io", "no_descriptors", "no_space", "not_writable", "passed_over"),
    *("read_only", "short", "slow", "stuck", "unusable"),
)
"""Problems that a directory can have."""
_DROPPED = (
    *("torn", "damaged", "version", "foreign", "misplaced", "truncated", "incomplete"),
    *("duplicate", "outsized", "namespaces"),
)
_STORES = {"stored": "stored_blocks", "present": "stores_present", "corrupt": "corrupt_sources"}
_LOADS = {"loaded": "loaded_blocks", "corrupt": "corrupt_blocks"}
_REFUSED = {
    "store": words(Refusal) - {"open", "quota", "rate"},  # these are a remote's
    "load": ("degraded", "draining", "queue"),
}
_TROUBLE = (
    *("carries_without_place", "footers_failed", "read_errors", "recovery_failures"),
    *("segments_lost", "segments_not_made", "slow_requests", "stuck_batches", "write_errors"),
)


def _gauge(get: Callable[[TierFigures], float]) -> Read:
    return of_ssd(lambda tier: [((), get(tier))])


def _count(name: str) -> Read:
    return of_ssd(lambda tier: [((), tier.count(name))])


def _counts(names: Mapping[str, str]) -> Read:
    """Return a reader of the tier's counters by label value."""
    return of_ssd(lambda tier: [((word,), tier.count(name)) for word, name in names.items()])


def _directories(get: Callable[[DirectoryFigures], float]) -> Read:
    return of_ssd(lambda tier: [((each.path,), get(each)) for each in tier.directories])


def _segments(tier: TierFigures) -> Samples:
    for each in tier.directories:
        for state, count in each.segments.items():
            yield (each.path, state), count


def _degraded(tier: TierFigures) -> Samples:
    for each in tier.directories:
        found = {word for word, _ in each.findings}
        for word in PROBLEMS:
            yield (each.path, word), word in found


def _refused(tier: TierFigures) -> Samples:
    for direction, usual in _REFUSED.items():
        prefix = f"{direction}s_refused_"
        reported = {name.removeprefix(prefix) for name in tier.counts if name.startswith(prefix)}
        for reason in sorted(reported.union(usual)):
            yield (direction, reason), tier.count(prefix + reason)


def _budget(tier: TierFigures) -> Samples:
    left = tier.budget_left_bytes
    return [] if left is None else [((), left)]


SSD: tuple[Metric, ...] = (
    Metric(
        "kvhearth_ssd_interface_info",
        "1 for the kernel interface that disk I/O goes through, 0 for the others.",
        "A daemon that had to step down from libaio.",
        of_ssd(lambda tier: [((name,), name == tier.interface) for name in INTERFACES]),
        ("interface",),
        unit="1",
    ),
    Metric(
        "kvhearth_ssd_interface_broken",
        "1 if the thread or the kernel queue that drives the disks has failed.",
        "Alert: nothing is written to or read from SSD until a restart.",
        _gauge(lambda tier: bool(tier.interface_broken)),
        unit="bool",
    ),
    Metric(
        "kvhearth_ssd_degraded",
        "1 while something is not as it should be with a directory, by what it is: buffered (no "
        "O_DIRECT), capped (its files are too small for its size), io, no_descriptors, no_space, "
        "not_writable, passed_over (files of another log), read_only, short, slow, stuck, unusable "
        "(it could not be opened).",
        "Alert: any 1; /readyz?verbose says it in a sentence.",
        of_ssd(_degraded),
        ("directory", "reason"),
        unit="bool",
    ),
    Metric(
        "kvhearth_ssd_capacity_bytes",
        "Most that the blocks of a directory may take, by the file system's own count: its size as "
        "it was given, less 10 MiB for the namespaces' catalogue.",
        "The whole that file_bytes is a part of.",
        _directories(lambda each: each.capacity_bytes),
        ("directory",),
    ),
    Metric(
        "kvhearth_ssd_file_bytes",
        "Size of a directory's segment files, which are allocated in whole before use.",
        "It grows to the capacity and stays there.",
        _directories(lambda each: each.file_bytes),
        ("directory",),
    ),
    Metric(
        "kvhearth_ssd_tenant_bytes",
        "Size of the segment files that hold a tenant's blocks.",
        "A tenant at its quota loses its own coldest blocks, and no other tenant's.",
        of_ssd(lambda tier: [((each.tenant,), each.used_bytes) for each in tier.tenants]),
        ("tenant",),
    ),
    Metric(
        "kvhearth_ssd_quota_bytes",
        "Most that a tenant's segment files may take.",
        "The whole that ssd_tenant_bytes is a part of.",
        of_ssd(lambda tier: [((each.tenant,), each.quota_bytes) for each in tier.tenants]),
        ("tenant",),
    ),
    Metric(
        "kvhearth_ssd_segments",
        "Segment files of a directory by state: busy (not read back yet), free, heading, open, "
        "sealing, sealed, reclaiming, lost (its device failed it).",
        "Alert: any that is lost; none free and none open: nothing can be written.",
        of_ssd(_segments),
        ("directory", "state"),
    ),
    Metric(
        "kvhearth_ssd_blocks",
        "Blocks that can be loaded from SSD.",
        "How much SSD holds.",
        _gauge(lambda tier: tier.blocks),
    ),
    Metric(
        "kvhearth_ssd_live_bytes",
        "Payload of those blocks.",
        "With file_bytes: how much of the files is of use.",
        _gauge(lambda tier: tier.live_bytes),
    ),
    Metric(
        "kvhearth_ssd_store_blocks_total",
        "Blocks given to SSD, by outcome: stored, present (they were there already), corrupt (the "
        "bytes in memory were not those of the checksum).",
        "Write rate of blocks.",
        _counts(_STORES),
        ("outcome",),
    ),
    Metric(
        "kvhearth_ssd_load_blocks_total",
        "Blocks read from SSD, to be promoted or carried over, by outcome: loaded, corrupt.",
        "Alert: any corrupt one means a drive that changes bytes.",
        _counts(_LOADS),
        ("outcome",),
    ),
    Metric(
        "kvhearth_ssd_refused_blocks_total",
        "Blocks that SSD did not take or give at once, by direction and reason; one that is "
        "offered again is counted again.",
        "Back-pressure: queue and full mean that the drive is what is waited for.",
        of_ssd(_refused),
        ("direction", "reason"),
    ),
    Metric(
        "kvhearth_ssd_stored_bytes_total",
        "Payload of blocks that were stored.",
        "Below written_bytes by the write amplification.",
        _count("stored_bytes"),
    ),
    Metric(
        "kvhearth_ssd_written_bytes_total",
        "Everything written to drives: payload, padding, headers, footers, what is carried over, "
        "files that are prewritten (ssd_prewrite), as a whole.",
        "Wear; divided by stored_bytes: the write amplification.",
        _count("written_bytes"),
    ),
    Metric(
        "kvhearth_ssd_loaded_bytes_total",
        "Payload of shards that were read and verified.",
        "Read bandwidth.",
        _count("loaded_bytes"),
    ),
    Metric(
        "kvhearth_ssd_carried_blocks_total",
        "Hot blocks written anew when their segment was reclaimed.",
        "With evicted_blocks: how much of a segment is worth keeping.",
        _count("carried_blocks"),
    ),
    Metric(
        "kvhearth_ssd_carried_bytes_total",
        "Payload of those blocks.",
        "The part of the wear that carrying costs.",
        _count("carried_bytes"),
    ),
    Metric(
        "kvhearth_ssd_evicted_blocks_total",
        "Blocks that SSD let go of to make room.",
        "Churn: more capacity would keep them.",
        _count("evicted_blocks"),
    ),
    Metric(
        "kvhearth_ssd_segments_sealed_total",
        "Segments that were filled and got their footer.",
        "How fast the log goes round.",
        _count("segments_sealed"),
        unit="segments",
    ),
    Metric(
        "kvhearth_ssd_segments_reclaimed_total",
        "Segments that were emptied to be filled anew.",
        "The capacity divided by its rate is the age of what is evicted.",
        _count("segments_reclaimed"),
        unit="segments",
    ),
    Metric(
        "kvhearth_ssd_trouble_total",
        "What went wrong with drives, by kind.",
        "Alert: read_errors, write_errors, segments_lost.",
        _counts({name: name for name in _TROUBLE}),
        ("kind",),
        unit="events",
    ),
    Metric(
        "kvhearth_ssd_queued_requests",
        "Requests that wait for a drive or are under way, by direction.",
        "Back-pressure.",
        of_ssd(
            lambda tier: [
                (("read",), tier.queued_reads),
                (("write",), tier.queued_writes),
            ]
        ),
        ("direction",),
    ),
    Metric(
        "kvhearth_ssd_running_requests",
        "Requests in the kernel; at most ssd_depth.",
        "At its bound for long: the drive is saturated.",
        _gauge(lambda tier: tier.running_requests),
    ),
    Metric(
        "kvhearth_ssd_read_latency_seconds",
        "Moving average of how long a read takes in the kernel and on the drive.",
        "What lookups' estimates are made of.",
        _gauge(lambda tier: tier.read_latency_s),
    ),
    Metric(
        "kvhearth_ssd_io_seconds",
        "Time of requests in the kernel and on the drive, by direction: read, write.",
        "A drive that gets slow; the queue before it is not in it.",
        of_ssd(lambda tier: [((each,), found) for each, found in tier.io_seconds.items()]),
        ("direction",),
        kind="histogram",
    ),
    Metric(
        "kvhearth_ssd_read_bytes_per_second",
        "Moving average of the read bandwidth while reads run.",
        "What lookups' estimates are made of.",
        _gauge(lambda tier: tier.read_bytes_per_s),
        unit="bytes a second",
    ),
    Metric(
        "kvhearth_ssd_budget_left_bytes",
        "What ssd_bytes_per_day lets through now: all of written_bytes is taken off it; no series "
        "without such a budget.",
        "At 0 or below: blocks are not written for the drive's sake.",
        of_ssd(_budget),
    ),
    Metric(
        "kvhearth_ssd_recovering",
        "1 while the log of an earlier run is read back: absent blocks may yet appear.",
        "Hits right after a restart.",
        _gauge(lambda tier: tier.recovering),
        unit="bool",
    ),
    Metric(
        "kvhearth_ssd_recovery_files",
        "Segment files that were there at the start (found), and those of them read back (read).",
        "How far recovery is.",
        of_ssd(
            lambda tier: [
                (("found",), tier.files_found),
                (("read",), tier.files_recovered),
            ]
        ),
        ("state",),
    ),
    Metric(
        "kvhearth_ssd_recovered_blocks_total",
        "Blocks of an earlier run that were taken over.",
        "What a restart has saved.",
        _count("recovered_blocks"),
    ),
    Metric(
        "kvhearth_ssd_recovery_dropped_total",
        "Records of an earlier run that were not taken over, by reason.",
        "What a crash has cost; damaged ones without a crash: a drive that changes bytes.",
        _counts({reason: f"dropped_{reason}" for reason in _DROPPED}),
        ("reason",),
        unit="records",
    ),
    Metric(
        "kvhearth_ssd_locked_files",
        "Files that requests of a dead daemon still hold; while recovering, 1 more.",
        "Alert: above 0 for minutes, a device does not give requests back.",
        _gauge(lambda tier: tier.locked_files),
    ),
)


def _waiting(now: Snapshot) -> Samples:
    if now.ssd is not None:
        yield ("demotion",), now.ssd.demoting_blocks
        yield ("promotion",), now.ssd.promoting_blocks


_BETWEEN: tuple[Metric, ...] = (
    counter(
        "kvhearth_demoted_blocks_total",
        "Blocks written to SSD and acknowledged: they survive a crash of the daemon.",
        "Write rate; compare with the stores.",
        "demoted_blocks",
    ),
    counter(
        "kvhearth_demoted_bytes_total",
        "Bytes of those blocks.",
        "Bandwidth of writes that were asked for.",
        "demoted_bytes",
    ),
    counter(
        "kvhearth_demotions_refused_total",
        "Blocks that stay in memory only, by why SSD was not to take them: admission, budget, "
        "degraded, slow (it could not keep up while room was needed), too_large.",
        "Blocks that are gone once they are evicted.",
        "demotion_refused",
        "reason",
        usual={"admission", "budget", "degraded", "slow", "too_large"},
        unit="blocks",
    ),
    counter(
        "kvhearth_demotions_failed_total",
        "Blocks whose write to SSD failed, by reason.",
        "Alert: a drive that fails or is full.",
        "demotion_failed",
        "reason",
        usual={"io", "no_space", "read_only", "short"},
        unit="blocks",
    ),
    counter(
        "kvhearth_promoted_blocks_total",
        "Blocks loaded into memory from SSD or a remote, verified.",
        "What these have saved engines from computing again.",
        "promoted_blocks",
    ),
    counter(
        "kvhearth_promoted_bytes_total",
        "Bytes of those blocks.",
        "Bandwidth of loads from SSD and remotes.",
        "promoted_bytes",
    ),
    counter(
        "kvhearth_promotions_failed_total",
        "Blocks that were asked for and not loaded, by reason; no_room: all memory is held.",
        "Hits that became misses.",
        "promotion_failed",
        "reason",
        usual={
            *("cancelled", "degraded", "denied", "io", "missing", "no_room", "open", "queue"),
            *("short", "stuck", "timeout", "unreachable"),
        },
        unit="blocks",
    ),
    counter(
        "kvhearth_prefetch_cancelled_blocks_total",
        "Blocks on their way up to memory when the request that asked for them went away.",
        "Many: requests give up before SSD or a remote answers.",
        "prefetch_cancelled",
    ),
    Metric(
        "kvhearth_promotion_seconds",
        "Time of loads from SSD or a remote into memory, a batch each, from the queue's end to the "
        "last block.",
        "How long a request waits for such blocks; compare with ssd_io_seconds.",
        lambda now: [] if now.promotion_s is None else [((), now.promotion_s)],
        kind="histogram",
    ),
    Metric(
        "kvhearth_tier_waiting_blocks",
        "Blocks that wait for SSD or are under way, by direction: demotion, promotion.",
        "Demotions that only grow: the drive cannot keep up with the stores.",
        _waiting,
        ("direction",),
    ),
    counter(
        "kvhearth_repaired_blocks_total",
        "Blocks found wrong on one tier that the other tier's copy brings back, by where.",
        "With the checksum failures: which of them cost nothing.",
        "repaired_blocks",
        "tier",
        {"dram", "ssd"},
    ),
    counter(
        "kvhearth_ssd_catalogue_failures_total",
        "Reads and writes of the namespaces' catalogue beside the SSD tier that failed.",
        "Alert: after a cold start blocks on SSD may not be found.",
        "ssd_catalogue_failures",
        unit="calls",
    ),
)


TIERS: tuple[Metric, ...] = tuple(map(if_ssd, _BETWEEN))
