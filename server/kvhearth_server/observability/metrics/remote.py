"""The metrics of remote tiers; those with the label ``remote`` have no series without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvhearth_server.engine.snapshot import Snapshot
from kvhearth_server.observability.metrics.metric import Metric, Read, Samples, counter, one
from kvhearth_server.tiers.figures import RemoteFigures

_KINDS = ("exists", "get", "put", "delete")
_BLOCKS = {
    "published": "stored_blocks",
    "present": "stores_present",
    "loaded": "loaded_blocks",
    "altered": "mover_altered",
    "foreign": "mover_foreign",
    "torn": "mover_torn",
    "late": "loads_too_late",
}
_FAILURES = ("denied", "io", "no_space", "timeout", "unreachable")
_CACHE = {"known": "cache_hits", "unknown": "cache_misses"}
_REFUSED = {
    "store": ("draining", "open", "queue", "quota", "rate", "too_large"),
    "load": ("draining", "open", "queue"),
}


def _remotes(now: Snapshot) -> list[RemoteFigures]:
    return [] if now.remote is None else [now.remote]


def _each(get: Callable[[RemoteFigures], float]) -> Read:
    return lambda now: [((each.name,), get(each)) for each in _remotes(now)]


def _count(name: str) -> Read:
    return _each(lambda each: each.count(name))


def _by_word(names: Mapping[str, str]) -> Read:
    return lambda now: [
        ((each.name, word), each.count(name))
        for each in _remotes(now)
        for word, name in names.items()
    ]


def _seconds(now: Snapshot) -> Samples:
    for each in _remotes(now):
        for kind in _KINDS:
            yield (each.name, kind), each.seconds.get(kind, 0.0)


def _refused(now: Snapshot) -> Samples:
    for each in _remotes(now):
        for direction, reasons in _REFUSED.items():
            for reason in reasons:
                name = f"{direction}s_refused_{reason}"
                yield (each.name, direction, reason), each.count(name)


REMOTE: tuple[Metric, ...] = (
    Metric(
        "kvhearth_remote_up",
        "1 while requests are sent to a remote: its helper process runs and its breaker is closed.",
        "Alert: 0 for minutes; /readyz?verbose says why. Lookups cost nothing meanwhile.",
        _each(lambda each: each.mover_up and not each.breaker_open),
        ("remote",),
        unit="bool",
    ),
    Metric(
        "kvhearth_remote_breaker_open",
        "1 while a remote's breaker is open after requests that failed; it closes by itself.",
        "Tells a remote that does not answer from a helper process that does not run.",
        _each(lambda each: each.breaker_open),
        ("remote",),
        unit="bool",
    ),
    Metric(
        "kvhearth_remote_breaker_openings_total",
        "Times that the breaker opened.",
        "Often: the remote or the way to it is overloaded.",
        _count("breaker_openings"),
        ("remote",),
        unit="openings",
    ),
    Metric(
        "kvhearth_remote_helper_restarts_total",
        "Helper processes that were started again, after a crash or a missed deadline.",
        "Alert: more than one a day.",
        _each(lambda each: each.mover_restarts),
        ("remote",),
        unit="processes",
    ),
    Metric(
        "kvhearth_remote_requests_total",
        "Keys of requests to a remote, by kind: exists, get, put, delete. A bucket bills each.",
        "Load on the remote, and what it bills.",
        _by_word({kind: f"{kind}_keys" for kind in _KINDS}),
        ("remote", "kind"),
        unit="requests",
    ),
    Metric(
        "kvhearth_remote_calls_total",
        "Batches of such requests, by kind.",
        "Keys of a batch, on average.",
        _by_word({kind: f"{kind}_calls" for kind in _KINDS}),
        ("remote", "kind"),
        unit="calls",
    ),
    Metric(
        "kvhearth_remote_request_seconds_total",
        "Time of these batches, from the daemon's side, by kind.",
        "Mean latency, divided by the calls.",
        _seconds,
        ("remote", "kind"),
    ),
    Metric(
        "kvhearth_remote_failures_total",
        "Batches that failed, by reason; misses are no failures.",
        "Alert: denied means credentials that do not hold any more.",
        _by_word({word: f"failed_{word}" for word in _FAILURES}),
        ("remote", "reason"),
        unit="requests",
    ),
    Metric(
        "kvhearth_remote_blocks_total",
        "Blocks by outcome: published, present (known to be there, not sent), loaded, late (not "
        "loaded: the caller would not have waited), or why a record was not believed: altered "
        "(another block's, changed, cut off or sealed without the fleet's key; deleted), torn "
        "(its bytes changed while it was made; deleted), foreign (none of ours; left alone).",
        "What the remote brings. Alert: any altered, torn or foreign one.",
        _by_word(_BLOCKS),
        ("remote", "outcome"),
        unit="blocks",
    ),
    Metric(
        "kvhearth_remote_bytes_total",
        "Payload published to (out) and loaded from (in) a remote.",
        "Bandwidth.",
        _by_word({"out": "stored_bytes", "in": "loaded_bytes"}),
        ("remote", "direction"),
    ),
    Metric(
        "kvhearth_remote_refused_blocks_total",
        "Blocks that were not sent or loaded at once, by direction and reason: open (the breaker, "
        "or weights without a label), rate, quota, queue (it or the staging memory is full).",
        "Bounds that are too low, or a remote that is too slow.",
        _refused,
        ("remote", "direction", "reason"),
        unit="blocks",
    ),
    Metric(
        "kvhearth_remote_cache_lookups_total",
        "Keys of lookups that memory and SSD lack, by whether the existence cache knew of them.",
        "Most should be known: the others cost requests.",
        _by_word(_CACHE),
        ("remote", "result"),
        unit="keys",
    ),
    Metric(
        "kvhearth_remote_cache_entries",
        "Entries of the existence cache.",
        "At the bound of 131,072, entries are lost early.",
        _each(lambda each: each.cache_entries),
        ("remote",),
    ),
    Metric(
        "kvhearth_remote_searches",
        "Chains whose end is being looked for at a remote.",
        "Many: the remote answers slowly.",
        _each(lambda each: each.asking),
        ("remote",),
    ),
    Metric(
        "kvhearth_remote_batches",
        "Batches under way, by direction: reading, writing.",
        "What the remote is doing.",
        lambda now: [
            ((each.name, word), count)
            for each in _remotes(now)
            for word, count in (("reading", each.reading), ("writing", each.writing))
        ],
        ("remote", "direction"),
    ),
    Metric(
        "kvhearth_remote_staging_bytes",
        "Staging memory of a remote's helper process, by state: free, used.",
        "No free bytes: blocks are skipped; raise remote_staging.",
        lambda now: [
            ((each.name, word), size)
            for each in _remotes(now)
            for word, size in (
                ("free", each.staging_free_bytes),
                ("used", each.staging_bytes - each.staging_free_bytes),
            )
        ],
        ("remote", "state"),
    ),
    Metric(
        "kvhearth_publish_waiting_blocks",
        "Blocks that wait to be published to remotes.",
        "One that only grows: the remote cannot keep up with remote_write.",
        one(lambda now: now.publishing_blocks),
    ),
    counter(
        "kvhearth_published_blocks_total",
        "Blocks that a remote has since this daemon offered them.",
        "What other hosts can find.",
        "published_blocks",
    ),
    counter(
        "kvhearth_published_bytes_total",
        "Payload of those blocks.",
        "Size of what other hosts can find.",
        "published_bytes",
    ),
    counter(
        "kvhearth_renewed_blocks_total",
        "Published blocks that were sent again because they were used in the second half of the "
        "remote's ttl.",
        "What keeps hot blocks at a remote with a ttl costs.",
        "renewed_blocks",
    ),
    counter(
        "kvhearth_publish_skipped_total",
        "Blocks that were to be published and were left out until they are used again, by reason: "
        "queue (too many wait, or the staging memory is full), quota, parent (the block before was "
        "left out), too_large, leaving (hot, and gone from the SSD before they could be read), "
        "never (remote_write was set so).",
        "Bounds that are too low.",
        "publish_skipped",
        "reason",
        usual={"leaving", "parent", "queue", "quota", "too_large"},
        unit="blocks",
    ),
    counter(
        "kvhearth_publish_failed_total",
        "Blocks whose publishing failed, by reason.",
        "Alert: a remote that fails or denies.",
        "publish_failed",
        "reason",
        usual={"denied", "io", "no_space", "timeout", "unreachable"},
        unit="blocks",
    ),
)
