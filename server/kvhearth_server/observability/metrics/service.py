"""The metrics of the daemon as a service: readers, sessions, calls, and clients' reports."""

from __future__ import annotations

from kvhearth.errors import Reason
from kvhearth_server.core.adoption import DropCause
from kvhearth_server.engine.sessions import Closed
from kvhearth_server.engine.snapshot import Snapshot
from kvhearth_server.observability.counters import FALLBACK, Counter
from kvhearth_server.observability.metrics.metric import (
    Metric,
    Samples,
    counter,
    one,
    reported,
    words,
)


def _calls(now: Snapshot) -> Samples:
    return [((method, code), n) for (method, code), n in sorted(now.timings.ended.items())]


def _call_seconds(now: Snapshot) -> Samples:
    return [((method,), each) for method, each in sorted(now.timings.seconds.items())]


_CLIENT_BYTES = {"store": "store_bytes", "load": "load_bytes"}
_CLIENT_COPY_US = {"store": "store_copy_us", "load": "load_copy_us"}
_CLIENT_STORES = {
    "stored": "store_blocks",
    "duplicate": "store_duplicates",
    "throttled": "store_throttled",
    "refused": "store_refused",
    "failed": "store_failed",
    "dropped": "store_dropped",
}
_CLIENT_LOADS = {
    "loaded": "load_blocks",
    "throttled": "load_throttled",
    "refused": "load_refused",
    "failed": "load_failed",
}
_CLIENT_TROUBLE = (
    "links_lost",
    "attach_failures",
    "heartbeat_failures",
    "keeper_failures",
    "drains_unfinished",
    "outbox_overflow",
    "errands_void",
    "errands_late",
    "errands_unknown",
    "errands_refused",
    "stock_failures",
    "store_crashes",
    "load_crashes",
    "registration_failed",
)


def _fallbacks(now: Snapshot) -> Samples:
    told = now.client_counters
    found = {name.removeprefix(FALLBACK) for name in told if name.startswith(FALLBACK)}
    return [((each,), told.get(FALLBACK + each, 0)) for each in sorted(found | words(Reason))]


def _copy_seconds(now: Snapshot) -> Samples:
    told = now.client_counters
    return [((word,), told.get(name, 0) / 1e6) for word, name in _CLIENT_COPY_US.items()]


SERVICE: tuple[Metric, ...] = (
    Metric(
        "kvhearth_build_info",
        "Always 1; the version is its label.",
        "Which version runs where.",
        lambda now: [((now.version,), 1)],
        ("version",),
        unit="1",
    ),
    Metric(
        "kvhearth_ready",
        "1 while stores and attaches are taken, 0 while the daemon drains.",
        "Alert: a daemon that stays at 0 takes no stores.",
        one(lambda now: not now.draining),
        unit="bool",
    ),
    Metric(
        "kvhearth_doors_shut",
        "Doors that take nobody for the moment; /readyz names them.",
        "Alert: 1 for longer than a second.",
        one(lambda now: now.doors_shut),
        unit="doors",
    ),
    Metric(
        "kvhearth_uptime_seconds",
        "Time since this run of the daemon began.",
        "Restarts.",
        one(lambda now: now.uptime_s),
    ),
    Metric(
        "kvhearth_leases",
        "Leases that readers hold.",
        "Loads under way.",
        one(lambda now: now.leases),
    ),
    Metric(
        "kvhearth_oldest_lease_seconds",
        "Age of the oldest lease; 0 if there is none.",
        "Alert: minutes mean a reader that leaks leases.",
        one(lambda now: now.oldest_lease_s),
    ),
    Metric(
        "kvhearth_pins",
        "Pins that hold blocks.",
        "What eviction may not take.",
        one(lambda now: now.pins),
    ),
    Metric(
        "kvhearth_sessions",
        "Attached processes.",
        "Engines' processes that are missing.",
        one(lambda now: now.sessions),
    ),
    Metric(
        "kvhearth_sessions_leaving",
        "Processes that left and may still be writing.",
        "Dead clients whose memory is not back yet.",
        one(lambda now: now.sessions_leaving),
        unit="sessions",
    ),
    Metric(
        "kvhearth_groups",
        "Engines that are attached or still hold something.",
        "Engines beside their processes.",
        one(lambda now: now.groups),
    ),
    counter(
        "kvhearth_sessions_opened_total",
        "Processes that attached.",
        "Rising without new engines: they lose their attach socket.",
        "sessions_opened",
        unit="sessions",
    ),
    counter(
        "kvhearth_sessions_closed_total",
        "Attached processes that ended or closed their attach socket.",
        "Crashes of engines.",
        "sessions_closed",
        unit="sessions",
    ),
    counter(
        "kvhearth_groups_ended_total",
        "Engines whose last process went.",
        "Restarts of engines.",
        "groups_ended",
        unit="groups",
    ),
    counter(
        "kvhearth_attach_bad_frames_total",
        "Frames on the attach socket that were no valid message.",
        "Something else than a client talks to the socket.",
        "attach_frames_bad",
    ),
    counter(
        "kvhearth_calls_closed_total",
        "Connections for calls that the daemon closed, by reason.",
        "A client that breaks a bound of the protocol; `memory`: what clients leave unfinished or "
        "unread exceeds its budget.",
        "calls_closed",
        "reason",
        words(Closed),
        unit="connections",
    ),
    counter(
        "kvhearth_refusals_total",
        "Requests that were refused, by reason of the error table; gRPC, attach and HTTP.",
        "What clients run into.",
        "refusals",
        "reason",
        words(Reason),
        unit="requests",
    ),
    counter(
        "kvhearth_connections_refused_total",
        "Connections that were closed because a door had its share of descriptors, by door. gRPC "
        "tells of none of its own.",
        "Alert: somebody takes all places of a door.",
        "connections_refused",
        "door",
        {"attach", "calls", "http"},
        unit="connections",
    ),
    counter(
        "kvhearth_door_restarts_total",
        "Sockets and operators' tokens made anew, by door: they were removed.",
        "Alert: rising means that somebody removes them.",
        "door_restarts",
        "door",
        {"admin", "admin_token", "attach", "calls"},
    ),
    counter(
        "kvhearth_checksum_failures_total",
        "Blocks whose bytes were not those of their checksum, by who found it.",
        "Alert: any one means damaged memory or a writer that is not ours.",
        "checksum_failures",
        "source",
        usual={"demotion", "publishing", "reader", "remote", "ssd"},
        unit="blocks",
    ),
    counter(
        "kvhearth_adopted_blocks_total",
        "Blocks taken over from an earlier run's arena.",
        "What a restart has saved.",
        "adopted_blocks",
    ),
    counter(
        "kvhearth_adoption_dropped_total",
        "Slots of an earlier run's arena that were not taken over, by reason.",
        "What a restart has cost.",
        "adoption_dropped",
        "reason",
        usual=words(DropCause),
        unit="slots",
    ),
    Metric(
        "kvhearth_adoption_seconds",
        "Time that reading the earlier run's journal took at start.",
        "Slow starts.",
        one(lambda now: now.adopt_s),
    ),
    counter(
        "kvhearth_task_failures_total",
        "Background tasks that failed and were restarted.",
        "Alert: any one is a bug; its traceback is in the log.",
        "task_failures",
        "task",
        usual={
            *("admin_door", "attach", "attach_connection", "calls", "catalogue", "drains"),
            *("files", "garbage", "gateway", "http_accept", "http_path", "http_tick"),
            *("lag", "miss_ratios", "pins"),
            *("populate", "recovery", "reload", "sum", "tiering", "trim"),
            *("verify", "watch", "watchdog"),
        },
    ),
    Metric(
        "kvhearth_rpc_requests_total",
        "Calls by method and status code, over gRPC and over the calls' socket.",
        "Rates and errors.",
        _calls,
        ("method", "code"),
        (Counter("reserves"), Counter("commits"), Counter("aborts")),
        unit="calls",
    ),
    Metric(
        "kvhearth_rpc_seconds",
        "Time of calls in the daemon, from the message's arrival to the reply, by method.",
        "Latency of decisions: lookups should stay below a millisecond.",
        _call_seconds,
        ("method",),
        kind="histogram",
    ),
    Metric(
        "kvhearth_loop_lag_seconds",
        "How late a timer of the loop that takes all decisions fires; sampled ten times a second, "
        "once a second while engines are idle.",
        "Stalls: each call waits for as long. A busy processor counts, too.",
        one(lambda now: now.timings.loop_lag),
        kind="histogram",
    ),
    Metric(
        "kvhearth_client_copy_bytes_total",
        "Bytes that clients copied, by direction; told with heartbeats.",
        "Bandwidth of copies.",
        reported(_CLIENT_BYTES),
        ("direction",),
    ),
    Metric(
        "kvhearth_client_copy_seconds_total",
        "Time that clients' copiers worked, by direction; checksums included, waiting not.",
        "With the bytes: how fast copies are; near 1 a second, copiers are what is waited for.",
        _copy_seconds,
        ("direction",),
    ),
    Metric(
        "kvhearth_client_store_blocks_total",
        "Blocks that clients were given to store, by outcome.",
        "Dropped or throttled stores: copies cannot keep up.",
        reported(_CLIENT_STORES),
        ("outcome",),
    ),
    Metric(
        "kvhearth_client_load_blocks_total",
        "Blocks that clients were given to load, by outcome.",
        "Failed loads are computed again.",
        reported(_CLIENT_LOADS),
        ("outcome",),
    ),
    Metric(
        "kvhearth_client_hit_tokens_total",
        "Tokens that lookups found restorable, as clients count them.",
        "Prefill that was saved.",
        one(lambda now: now.client_counters.get("lookup_hit_tokens", 0)),
    ),
    Metric(
        "kvhearth_client_fallbacks_total",
        "Decisions for which an engine went on without the cache, by reason.",
        "Alert: rising means engines cannot use the cache.",
        _fallbacks,
        ("reason",),
        unit="decisions",
    ),
    Metric(
        "kvhearth_client_trouble_total",
        "Other trouble that clients had, by kind.",
        "What to look for in engines' logs.",
        reported({name: name for name in _CLIENT_TROUBLE}),
        ("kind",),
        unit="events",
    ),
)
