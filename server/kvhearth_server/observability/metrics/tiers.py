"""The metrics of SSD and remotes; no series of a tier that is not there."""

from __future__ import annotations

from dataclasses import replace

from kvhearth_server.observability.metrics.metric import (
    DAEMON,
    Metric,
    Samples,
    Source,
    counter,
    refusals,
    words,
)
from kvhearth_server.tiers.base import Refusal
from kvhearth_server.tiers.figures import PROBLEMS, DirectoryFigures

TIER = Source("kvhearth_ssd_", lambda now: [] if now.ssd is None else [((), now.ssd)])
DIRECTORIES = Source(
    "kvhearth_ssd_",
    lambda now: [((each.path,), each) for each in now.ssd.directories] if now.ssd else [],
    ("directory",),
)
TENANTS = Source(
    "kvhearth_ssd_",
    lambda now: [((each.tenant,), each) for each in now.ssd.tenants] if now.ssd else [],
    ("tenant",),
)
INTERFACES = ("libaio", "threads")
_SSD_DROPPED = (
    *("torn", "damaged", "version", "foreign", "misplaced", "truncated", "incomplete"),
    *("duplicate", "outsized", "namespaces"),
)
_STORES = {"stored": "stored_blocks", "present": "stores_present", "corrupt": "corrupt_sources"}
_LOADS = {"loaded": "loaded_blocks", "corrupt": "corrupt_blocks"}
_SSD_REFUSED = {
    "store": words(Refusal) - {"open", "quota", "rate"},  # these are a remote's
    "load": ("degraded", "draining", "queue"),
}
_TROUBLE = (
    *("carries_without_place", "footers_failed", "read_errors", "recovery_failures"),
    *("segments_lost", "segments_not_made", "slow_requests", "stuck_batches", "write_errors"),
)


def _degraded(directory: DirectoryFigures) -> Samples:
    return [((word,), word in directory.problems) for word in PROBLEMS]


SSD: tuple[Metric, ...] = (
    TIER.split(
        "kvhearth_ssd_interface_info",
        "1 for the kernel interface that disk I/O goes through, 0 for the others.",
        "A daemon that had to step down from libaio.",
        ("interface",),
        lambda tier: [((name,), name == tier.interface) for name in INTERFACES],
    ),
    TIER.field(
        "kvhearth_ssd_interface_broken",
        "1 if the thread or the kernel queue that drives the disks has failed.",
        "Alert: nothing is written to or read from SSD until a restart.",
        lambda tier: bool(tier.interface_broken),
    ),
    DIRECTORIES.split(
        "kvhearth_ssd_degraded",
        "1 while something is not as it should be with a directory, by what it is: buffered (no "
        "O_DIRECT), capped (its files are too small for its size), io, no_descriptors, no_space, "
        "not_writable, passed_over (files of another log), read_only, short, slow, stuck, unusable "
        "(it could not be opened).",
        "Alert: any 1; /readyz?verbose says it in a sentence.",
        ("reason",),
        _degraded,
    ),
    DIRECTORIES.field(
        "kvhearth_ssd_capacity_bytes",
        "Most that the blocks of a directory may take, by the file system's own count: its size as "
        "it was given, less 10 MiB for the namespaces' catalogue, and the first one's tokens.",
        "The whole that file_bytes is a part of.",
    ),
    DIRECTORIES.field(
        "kvhearth_ssd_file_bytes",
        "Size of a directory's segment files, which are allocated in whole before use.",
        "It grows to the capacity and stays there.",
    ),
    TENANTS.field(
        "kvhearth_ssd_tenant_bytes",
        "Size of the segment files that hold a tenant's blocks.",
        "A tenant at its quota loses its own coldest blocks, and no other tenant's.",
        "used_bytes",
    ),
    TENANTS.field(
        "kvhearth_ssd_quota_bytes",
        "Most that a tenant's segment files may take.",
        "The whole that ssd_tenant_bytes is a part of.",
    ),
    DIRECTORIES.split(
        "kvhearth_ssd_segments",
        "Segment files of a directory by state: busy (not read back yet), free, heading, open, "
        "sealing, sealed, reclaiming, lost (its device failed it).",
        "Alert: any that is lost; none free and none open: nothing can be written.",
        ("state",),
        lambda directory: [((state,), count) for state, count in directory.segments.items()],
    ),
    TIER.field(
        "kvhearth_ssd_blocks",
        "Blocks that can be loaded from SSD.",
        "How much SSD holds.",
    ),
    TIER.field(
        "kvhearth_ssd_live_bytes",
        "Payload of those blocks.",
        "With file_bytes: how much of the files is of use.",
    ),
    TIER.count(
        "kvhearth_ssd_store_blocks_total",
        "Blocks given to SSD, by outcome: stored, present (they were there already), corrupt (the "
        "bytes in memory were not those of the checksum).",
        "Write rate of blocks.",
        _STORES,
        "outcome",
    ),
    TIER.count(
        "kvhearth_ssd_load_blocks_total",
        "Blocks read from SSD, to be promoted or carried over, by outcome: loaded, corrupt.",
        "Alert: any corrupt one means a drive that changes bytes.",
        _LOADS,
        "outcome",
    ),
    TIER.split(
        "kvhearth_ssd_refused_blocks_total",
        "Blocks that SSD did not take or give at once, by direction and reason; one that is "
        "offered again is counted again.",
        "Back-pressure: queue and full mean that the drive is what is waited for.",
        ("direction", "reason"),
        refusals(_SSD_REFUSED),
    ),
    TIER.count(
        "kvhearth_ssd_stored_bytes_total",
        "Payload of blocks that were stored.",
        "Below written_bytes by the write amplification.",
    ),
    TIER.count(
        "kvhearth_ssd_written_bytes_total",
        "Everything written to drives: payload, padding, headers, footers, what is carried over, "
        "files that are prewritten (ssd_prewrite), as a whole.",
        "Wear; divided by stored_bytes: the write amplification.",
    ),
    TIER.count(
        "kvhearth_ssd_loaded_bytes_total",
        "Payload of shards that were read and verified.",
        "Read bandwidth.",
    ),
    TIER.count(
        "kvhearth_ssd_carried_blocks_total",
        "Hot blocks written anew when their segment was reclaimed.",
        "With evicted_blocks: how much of a segment is worth keeping.",
    ),
    TIER.count(
        "kvhearth_ssd_carried_bytes_total",
        "Payload of those blocks.",
        "The part of the wear that carrying costs.",
    ),
    TIER.count(
        "kvhearth_ssd_evicted_blocks_total",
        "Blocks that SSD let go of to make room.",
        "Churn: more capacity would keep them.",
    ),
    TIER.count(
        "kvhearth_ssd_segments_sealed_total",
        "Segments that were filled and got their footer.",
        "How fast the log goes round.",
    ),
    TIER.count(
        "kvhearth_ssd_segments_reclaimed_total",
        "Segments that were emptied to be filled anew.",
        "The capacity divided by its rate is the age of what is evicted.",
    ),
    TIER.count(
        "kvhearth_ssd_trouble_total",
        "What went wrong with drives, by kind.",
        "Alert: read_errors, write_errors, segments_lost.",
        {name: name for name in _TROUBLE},
        "kind",
    ),
    TIER.split(
        "kvhearth_ssd_queued_requests",
        "Requests that wait for a drive or are under way, by direction.",
        "Back-pressure.",
        ("direction",),
        lambda tier: [(("read",), tier.queued_reads), (("write",), tier.queued_writes)],
    ),
    TIER.field(
        "kvhearth_ssd_running_requests",
        "Requests in the kernel; at most ssd_depth.",
        "At its bound for long: the drive is saturated.",
    ),
    TIER.field(
        "kvhearth_ssd_read_latency_seconds",
        "Moving average of how long a read takes in the kernel and on the drive.",
        "What lookups' estimates are made of.",
        "read_latency_s",
    ),
    TIER.split(
        "kvhearth_ssd_io_seconds",
        "Time of requests in the kernel and on the drive, by direction: read, write.",
        "A drive that gets slow; the queue before it is not in it.",
        ("direction",),
        lambda tier: [((way,), seconds) for way, seconds in tier.io_seconds.items()],
        histogram=True,
    ),
    TIER.field(
        "kvhearth_ssd_read_bytes_per_second",
        "Moving average of the read bandwidth while reads run.",
        "What lookups' estimates are made of.",
        "read_bytes_per_s",
    ),
    TIER.field(
        "kvhearth_ssd_budget_left_bytes",
        "What ssd_bytes_per_day lets through now: all of written_bytes is taken off it; no series "
        "without such a budget.",
        "At 0 or below: blocks are not written for the drive's sake.",
    ),
    TIER.field(
        "kvhearth_ssd_recovering",
        "1 while the log of an earlier run is read back: absent blocks may yet appear.",
        "Hits right after a restart.",
    ),
    TIER.split(
        "kvhearth_ssd_recovery_files",
        "Segment files that were there at the start (found), and those of them read back (read).",
        "How far recovery is.",
        ("state",),
        lambda tier: [(("found",), tier.files_found), (("read",), tier.files_recovered)],
    ),
    TIER.count(
        "kvhearth_ssd_recovered_blocks_total",
        "Blocks of an earlier run that were taken over.",
        "What a restart has saved.",
    ),
    TIER.count(
        "kvhearth_ssd_recovery_dropped_total",
        "Records of an earlier run that were not taken over, by reason.",
        "What a crash has cost; damaged ones without a crash: a drive that changes bytes.",
        {reason: f"dropped_{reason}" for reason in _SSD_DROPPED},
        "reason",
    ),
    TIER.field(
        "kvhearth_ssd_locked_files",
        "Files that requests of a dead daemon still hold; while recovering, 1 more.",
        "Alert: above 0 for minutes, a device does not give requests back.",
    ),
)


_BETWEEN: tuple[Metric, ...] = (
    counter(
        "kvhearth_demoted_blocks_total",
        "Blocks written to SSD and acknowledged: they survive a crash of the daemon.",
        "Write rate; compare with the stores.",
    ),
    counter(
        "kvhearth_demoted_bytes_total",
        "Bytes of those blocks.",
        "Bandwidth of writes that were asked for.",
    ),
    counter(
        "kvhearth_demotions_refused_total",
        "Blocks that stay in memory only, by why SSD was not to take them: admission, budget, "
        "degraded, slow (it could not keep up while room was needed), too_large.",
        "Blocks that are gone once they are evicted.",
        "reason",
        {"admission", "budget", "degraded", "slow", "too_large"},
        count="demotion_refused",
    ),
    counter(
        "kvhearth_demotions_failed_total",
        "Blocks whose write to SSD failed, by reason.",
        "Alert: a drive that fails or is full.",
        "reason",
        {"io", "no_space", "read_only", "short"},
        count="demotion_failed",
    ),
    counter(
        "kvhearth_promoted_blocks_total",
        "Blocks loaded into memory from SSD or a remote, verified.",
        "What these have saved engines from computing again.",
    ),
    counter(
        "kvhearth_promoted_bytes_total",
        "Bytes of those blocks.",
        "Bandwidth of loads from SSD and remotes.",
    ),
    counter(
        "kvhearth_promotions_failed_total",
        "Blocks that were asked for and not loaded, by reason; no_room: all memory is held.",
        "Hits that became misses.",
        "reason",
        {
            *("cancelled", "degraded", "denied", "io", "missing", "no_room", "open", "queue"),
            *("short", "stuck", "timeout", "unreachable"),
        },
        count="promotion_failed",
    ),
    counter(
        "kvhearth_prefetch_cancelled_blocks_total",
        "Blocks on their way up to memory when the request that asked for them went away.",
        "Many: requests give up before SSD or a remote answers.",
        count="prefetch_cancelled",
    ),
    TIER.field(
        "kvhearth_promotion_seconds",
        "Time of loads from SSD or a remote into memory, a batch each, from the queue's end to the "
        "last block.",
        "How long a request waits for such blocks; compare with ssd_io_seconds.",
        "promotion_seconds",
        histogram=True,
    ),
    TIER.split(
        "kvhearth_tier_waiting_blocks",
        "Blocks that wait for SSD or are under way, by direction: demotion, promotion.",
        "Demotions that only grow: the drive cannot keep up with the stores.",
        ("direction",),
        lambda ssd: [(("demotion",), ssd.demoting_blocks), (("promotion",), ssd.promoting_blocks)],
    ),
    counter(
        "kvhearth_repaired_blocks_total",
        "Blocks found wrong on one tier that the other tier's copy brings back, by where.",
        "With the checksum failures: which of them cost nothing.",
        "tier",
        {"dram", "ssd"},
    ),
    counter(
        "kvhearth_ssd_catalogue_failures_total",
        "Reads and writes of the namespaces' catalogue beside the SSD tier that failed.",
        "Alert: after a cold start blocks on SSD may not be found.",
    ),
)


def _if_ssd(metric: Metric) -> Metric:
    """Return ``metric`` without samples where there is no SSD tier."""
    return replace(metric, read=lambda now: [] if now.ssd is None else metric.read(now))


TIERS: tuple[Metric, ...] = tuple(map(_if_ssd, _BETWEEN))


REMOTES = Source(
    "kvhearth_remote_",
    lambda now: [] if now.remote is None else [((now.remote.name,), now.remote)],
    ("remote",),
)
_REMOTE_KINDS = ("exists", "ask", "get", "put", "delete")
_REMOTE_BLOCKS = {
    "published": "stored_blocks",
    "present": "stores_present",
    "loaded": "loaded_blocks",
    "altered": "mover_altered",
    "torn": "mover_torn",
    "late": "loads_too_late",
}
_REMOTE_FAILURES = ("denied", "io", "no_space", "read_only", "timeout", "unreachable")
_REMOTE_REFUSED = {
    "store": ("draining", "open", "queue", "quota", "rate", "too_large"),
    "load": ("draining", "open", "queue"),
}


REMOTE: tuple[Metric, ...] = (
    REMOTES.field(
        "kvhearth_remote_up",
        "1 while requests are sent to a remote: its helper process runs and its breaker is closed.",
        "Alert: 0 for minutes; /readyz?verbose says why. Lookups cost nothing meanwhile.",
        lambda remote: remote.mover_up and not remote.breaker_open,
    ),
    REMOTES.field(
        "kvhearth_remote_breaker_open",
        "1 while a remote's breaker is open after requests that failed; it closes by itself.",
        "Tells a remote that does not answer from a helper process that does not run.",
    ),
    REMOTES.count(
        "kvhearth_remote_breaker_openings_total",
        "Times that the breaker opened.",
        "Often: the remote or the way to it is overloaded.",
    ),
    REMOTES.field(
        "kvhearth_remote_helper_restarts_total",
        "Helper processes that were started again, after a crash or a missed deadline.",
        "Alert: more than one a day.",
        "mover_restarts",
    ),
    REMOTES.count(
        "kvhearth_remote_requests_total",
        "Keys of requests to a remote, by kind: exists (for lookups), ask (the same before a put), "
        "get, put, delete. A bucket bills each.",
        "Load on the remote, and what it bills.",
        {kind: f"{kind}_keys" for kind in _REMOTE_KINDS},
        "kind",
    ),
    REMOTES.count(
        "kvhearth_remote_calls_total",
        "Batches of such requests, by kind.",
        "Keys of a batch, on average.",
        {kind: f"{kind}_calls" for kind in _REMOTE_KINDS},
        "kind",
    ),
    REMOTES.split(
        "kvhearth_remote_request_seconds_total",
        "Time of these batches, from the daemon's side, by kind.",
        "Mean latency, divided by the calls.",
        ("kind",),
        lambda remote: [((kind,), remote.seconds.get(kind, 0.0)) for kind in _REMOTE_KINDS],
    ),
    REMOTES.count(
        "kvhearth_remote_failures_total",
        "Batches that failed, by reason; misses are no failures.",
        "Alert: denied means credentials that do not hold any more.",
        {word: f"failed_{word}" for word in _REMOTE_FAILURES},
        "reason",
    ),
    REMOTES.count(
        "kvhearth_remote_blocks_total",
        "Blocks by outcome: published, present (there already, not sent), loaded, late (not "
        "loaded: the caller would not have waited), or why a record was not believed: altered "
        "(another block's or none, changed, cut off or sealed without the fleet's key; deleted), "
        "torn (its bytes changed while it was made; deleted).",
        "What the remote brings. Alert: any altered or torn one.",
        _REMOTE_BLOCKS,
        "outcome",
    ),
    REMOTES.count(
        "kvhearth_remote_bytes_total",
        "Payload published to (out) and loaded from (in) a remote.",
        "Bandwidth.",
        {"out": "stored_bytes", "in": "loaded_bytes"},
        "direction",
    ),
    REMOTES.split(
        "kvhearth_remote_refused_blocks_total",
        "Blocks that were not sent or loaded at once, by direction and reason: open (the breaker, "
        "or weights without a label), rate, quota, queue (it or the staging memory is full).",
        "Bounds that are too low, or a remote that is too slow.",
        ("direction", "reason"),
        refusals(_REMOTE_REFUSED),
    ),
    REMOTES.count(
        "kvhearth_remote_cache_lookups_total",
        "Keys of lookups that memory and SSD lack, by whether the existence cache knew of them.",
        "Most should be known: the others cost requests.",
        {"known": "cache_hits", "unknown": "cache_misses"},
        "result",
    ),
    REMOTES.field(
        "kvhearth_remote_cache_entries",
        "Entries of the existence cache.",
        "At the bound of 131,072, entries are lost early.",
    ),
    REMOTES.field(
        "kvhearth_remote_searches",
        "Chains whose end is being looked for at a remote.",
        "Many: the remote answers slowly.",
        "asking",
    ),
    REMOTES.split(
        "kvhearth_remote_batches",
        "Batches under way, by direction: reading, writing.",
        "What the remote is doing.",
        ("direction",),
        lambda remote: [(("reading",), remote.reading), (("writing",), remote.writing)],
    ),
    REMOTES.split(
        "kvhearth_remote_staging_bytes",
        "Staging memory of a remote's helper process, by state: free, used.",
        "No free bytes: blocks are skipped; raise remote_staging.",
        ("state",),
        lambda remote: [
            (("free",), remote.staging_free_bytes),
            (("used",), remote.staging_bytes - remote.staging_free_bytes),
        ],
    ),
    DAEMON.field(
        "kvhearth_publish_waiting_blocks",
        "Blocks that wait to be published to remotes.",
        "One that only grows: the remote cannot keep up with remote_write.",
        "publishing_blocks",
    ),
    counter(
        "kvhearth_published_blocks_total",
        "Blocks that a remote has since this daemon offered them.",
        "What other hosts can find.",
    ),
    counter(
        "kvhearth_published_bytes_total",
        "Payload of those blocks.",
        "Size of what other hosts can find.",
    ),
    counter(
        "kvhearth_renewed_blocks_total",
        "Published blocks that were sent again because they were used in the second half of the "
        "remote's ttl.",
        "What keeps hot blocks at a remote with a ttl costs.",
    ),
    counter(
        "kvhearth_publish_skipped_total",
        "Blocks that were to be published and were left out until they are used again, by reason: "
        "queue (too many wait, or the staging memory is full), quota, parent (the block before was "
        "left out), too_large, leaving (hot, and gone from the SSD before they could be read), "
        "never (remote_write was set so).",
        "Bounds that are too low.",
        "reason",
        {"leaving", "parent", "queue", "quota", "too_large"},
    ),
    counter(
        "kvhearth_publish_failed_total",
        "Blocks whose publishing failed, by reason.",
        "Alert: a remote that fails or denies.",
        "reason",
        {"denied", "io", "no_space", "read_only", "timeout", "unreachable"},
    ),
)
