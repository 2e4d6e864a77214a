"""The metrics of the daemon as a service: sessions, calls, clients' reports, gateways."""

from __future__ import annotations

from collections.abc import Mapping

from kvhearth.errors import Reason
from kvhearth.wire.remote import Outcome
from kvhearth_server.core.adoption import DropCause
from kvhearth_server.engine.sessions import Closed
from kvhearth_server.observability.counters import FALLBACK, Counter
from kvhearth_server.observability.metrics.metric import (
    DAEMON,
    Metric,
    Samples,
    Source,
    counter,
    words,
)

CLIENTS = Source(
    "kvhearth_client_",
    lambda now: [((), now.client_counters)],
    counts=lambda told: told,
)
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
    *("links_lost", "attach_failures", "heartbeat_failures", "keeper_failures"),
    *("drains_unfinished", "outbox_overflow", "errands_void", "errands_late", "errands_unknown"),
    *("errands_refused", "stock_failures", "store_crashes", "load_crashes", "registration_failed"),
    *("events_left_out", "hints_refused", "retain_refused", "retain_crashes"),
)


def _fallbacks(told: Mapping[str, int]) -> Samples:
    found = {name.removeprefix(FALLBACK) for name in told if name.startswith(FALLBACK)}
    return [((each,), told.get(FALLBACK + each, 0)) for each in sorted(found | words(Reason))]


SERVICE: tuple[Metric, ...] = (
    DAEMON.split(
        "kvhearth_build_info",
        "Always 1; the version is its label.",
        "Which version runs where.",
        ("version",),
        lambda now: [((now.version,), 1)],
    ),
    DAEMON.field(
        "kvhearth_ready",
        "1 while stores and attaches are taken, 0 while the daemon drains.",
        "Alert: a daemon that stays at 0 takes no stores.",
        lambda now: not now.draining,
    ),
    DAEMON.field(
        "kvhearth_doors_shut",
        "Doors that take nobody for the moment; /readyz names them.",
        "Alert: 1 for longer than a second.",
    ),
    DAEMON.field(
        "kvhearth_uptime_seconds",
        "Time since this run of the daemon began.",
        "Restarts.",
        "uptime_s",
    ),
    DAEMON.field(
        "kvhearth_leases",
        "Leases that readers hold.",
        "Loads under way.",
    ),
    DAEMON.field(
        "kvhearth_oldest_lease_seconds",
        "Age of the oldest lease; 0 if there is none.",
        "Alert: minutes mean a reader that leaks leases.",
        "oldest_lease_s",
    ),
    DAEMON.field(
        "kvhearth_pins",
        "Pins that keep blocks.",
        "What eviction takes last.",
    ),
    DAEMON.field(
        "kvhearth_retained_blocks",
        "Blocks with a pin, which are evicted last, as requests ask to have theirs kept.",
        "KV that waits for its next turn.",
    ),
    counter(
        "kvhearth_retained_total",
        "Blocks that got their first pin.",
        "How much agents ask for.",
    ),
    counter(
        "kvhearth_retained_ended_total",
        "Blocks whose last pin ended, by how: released, as its session went on; expired; epoch, "
        "with new weights; ended, with a private run; operator, by unpin or evict; evicted, as "
        "nothing else was left; removed, as wrong or replaced; or refused.",
        "Expired ones were kept for nothing: shorter times, or agents that never came back. "
        "Refused ones never were: the reason is in refusals_total. Many evicted ones: a smaller "
        "pinned_fraction_max, or more memory.",
        "how",
        {"ended", "epoch", "evicted", "expired", "operator", "refused", "released", "removed"},
    ),
    counter(
        "kvhearth_retained_hit_blocks_total",
        "Blocks of hits in memory that have a pin.",
        "What keeping them was good for.",
    ),
    DAEMON.field(
        "kvhearth_sessions",
        "Attached processes.",
        "Engines' processes that are missing.",
    ),
    DAEMON.field(
        "kvhearth_sessions_leaving",
        "Processes that left and may still be writing.",
        "Dead clients whose memory is not back yet.",
    ),
    DAEMON.field(
        "kvhearth_groups",
        "Engines that are attached or still hold something.",
        "Engines beside their processes.",
    ),
    counter(
        "kvhearth_sessions_opened_total",
        "Processes that attached.",
        "Rising without new engines: they lose their attach socket.",
    ),
    counter(
        "kvhearth_sessions_closed_total",
        "Attached processes that ended or closed their attach socket.",
        "Crashes of engines.",
    ),
    counter(
        "kvhearth_groups_ended_total",
        "Engines whose last process went.",
        "Restarts of engines.",
    ),
    counter(
        "kvhearth_attach_bad_frames_total",
        "Frames on the attach socket that were no valid message.",
        "Something else than a client talks to the socket.",
        count="attach_frames_bad",
    ),
    counter(
        "kvhearth_calls_closed_total",
        "Connections for calls that the daemon closed, by reason.",
        "A client that breaks a bound of the protocol; `memory`: what clients leave unfinished or "
        "unread exceeds its budget.",
        "reason",
        words(Closed),
    ),
    counter(
        "kvhearth_refusals_total",
        "Requests that were refused, by reason of the error table; gRPC, attach and HTTP.",
        "What clients run into.",
        "reason",
        words(Reason),
    ),
    counter(
        "kvhearth_connections_refused_total",
        "Connections that were closed because a door had its share of descriptors, by door. gRPC "
        "tells of none of its own.",
        "Alert: somebody takes all places of a door.",
        "door",
        {"attach", "calls", "http"},
    ),
    counter(
        "kvhearth_door_restarts_total",
        "Sockets and operators' tokens made anew, by door: they were removed.",
        "Alert: rising means that somebody removes them.",
        "door",
        {"admin", "admin_token", "attach", "calls"},
    ),
    counter(
        "kvhearth_checksum_failures_total",
        "Blocks whose bytes were not those of their checksum, by who found it.",
        "Alert: any one means damaged memory or a writer that is not ours.",
        "source",
        {"demotion", "publishing", "reader", "remote", "ssd"},
    ),
    counter(
        "kvhearth_adopted_blocks_total",
        "Blocks taken over from an earlier run's arena.",
        "What a restart has saved.",
    ),
    counter(
        "kvhearth_adoption_dropped_total",
        "Slots of an earlier run's arena that were not taken over, by reason.",
        "What a restart has cost.",
        "reason",
        words(DropCause),
    ),
    DAEMON.field(
        "kvhearth_adoption_seconds",
        "Time that reading the earlier run's journal took at start.",
        "Slow starts.",
        "adopt_s",
    ),
    counter(
        "kvhearth_task_failures_total",
        "Background tasks that failed and were restarted.",
        "Alert: any one is a bug; its traceback is in the log.",
        "task",
        {
            *("admin_door", "attach", "attach_connection", "calls", "catalogue", "drains"),
            *("files", "garbage", "gateway", "http_accept", "http_path", "http_tick"),
            *("lag", "miss_ratios", "pins"),
            *("populate", "recovery", "reload", "sum", "tiering", "tokens", "trim"),
            *("verify", "watch", "watchdog"),
        },
    ),
    DAEMON.split(
        "kvhearth_rpc_requests_total",
        "Calls by method and status code, over gRPC and over the calls' socket.",
        "Rates and errors.",
        ("method", "code"),
        lambda now: sorted(now.timings.ended.items()),
        counters=(Counter("reserves"), Counter("commits"), Counter("aborts")),
    ),
    DAEMON.split(
        "kvhearth_rpc_seconds",
        "Time of calls in the daemon, from the message's arrival to the reply, by method.",
        "Latency of decisions: lookups should stay below a millisecond.",
        ("method",),
        lambda now: [((method,), each) for method, each in sorted(now.timings.seconds.items())],
        histogram=True,
    ),
    DAEMON.field(
        "kvhearth_loop_lag_seconds",
        "How late a timer of the loop that takes all decisions fires; sampled ten times a second, "
        "once a second while engines are idle.",
        "Stalls: each call waits for as long. A busy processor counts, too.",
        "timings.loop_lag",
        histogram=True,
    ),
    counter(
        "kvhearth_events_lost_total",
        "Changes of blocks that an engine which follows them did not read in time.",
        "Rising: an engine follows too slowly, and lists its namespace's blocks each time.",
    ),
    counter(
        "kvhearth_block_tokens_lost_total",
        "Blocks whose tokens could not be kept or read for events.",
        "Rising: routers are told blocks that they cannot match; the log has block_tokens.failed.",
    ),
    CLIENTS.count(
        "kvhearth_client_copy_bytes_total",
        "Bytes that clients copied, by direction; told with heartbeats.",
        "Bandwidth of copies.",
        {"store": "store_bytes", "load": "load_bytes"},
        "direction",
    ),
    CLIENTS.split(
        "kvhearth_client_copy_seconds_total",
        "Time that clients' copiers worked, by direction; checksums included, waiting not.",
        "With the bytes: how fast copies are; near 1 a second, copiers are what is waited for.",
        ("direction",),
        lambda told: [((way,), told.get(f"{way}_copy_us", 0) / 1e6) for way in ("store", "load")],
    ),
    CLIENTS.count(
        "kvhearth_client_store_blocks_total",
        "Blocks that clients were given to store, by outcome.",
        "Dropped or throttled stores: copies cannot keep up.",
        _CLIENT_STORES,
        "outcome",
    ),
    CLIENTS.count(
        "kvhearth_client_load_blocks_total",
        "Blocks that clients were given to load, by outcome.",
        "Failed loads are computed again.",
        _CLIENT_LOADS,
        "outcome",
    ),
    CLIENTS.count(
        "kvhearth_client_hit_tokens_total",
        "Tokens that lookups found restorable, as clients count them.",
        "Prefill that was saved.",
        "lookup_hit_tokens",
    ),
    CLIENTS.split(
        "kvhearth_client_fallbacks_total",
        "Decisions for which an engine went on without the cache, by reason.",
        "Alert: rising means engines cannot use the cache.",
        ("reason",),
        _fallbacks,
    ),
    CLIENTS.count(
        "kvhearth_client_trouble_total",
        "Other trouble that clients had, by kind.",
        "What to look for in engines' logs.",
        {name: name for name in _CLIENT_TROUBLE},
        "kind",
    ),
)


_REPORTED: tuple[Metric, ...] = (
    counter(
        "kvhearth_gateway_connections_total",
        "TCP connections that gateways accepted, of strangers too.",
        "A rate far above that of sessions: somebody knocks.",
    ),
    counter(
        "kvhearth_gateway_requests_total",
        "Requests of remote engines to gateways, by kind.",
        "Load of the gateways.",
        "kind",
        {"call", "put", "get", "ask"},
    ),
    counter(
        "kvhearth_gateway_bytes_total",
        "Bytes of KV that gateways received (in) and sent (out).",
        "Bandwidth between hosts.",
        "direction",
        {"in", "out"},
    ),
    counter(
        "kvhearth_gateway_refusals_total",
        "Connections and calls that gateways refused, by reason.",
        "Alert: unknown_token or peer_not_allowed rising means somebody tries to get in.",
        "reason",
        words(Reason),
    ),
    counter(
        "kvhearth_gateway_extents_refused_total",
        "Extents of puts and gets that were not moved, by outcome.",
        "Alert: foreign_extent means a peer that names what was not given to it; "
        "checksum_mismatch a damaged link.",
        "outcome",
        {each.name.lower() for each in Outcome} - {"ok"},
    ),
    counter(
        "kvhearth_gateway_peers_refused_total",
        "Remote peers whose token or certificate was refused, by cause.",
        "Alert: wrong tokens mean guessing, or an engine with an old one.",
        "cause",
        {"nothing_shown", "wrong_token", "wrong_certificate"},
    ),
    counter(
        "kvhearth_gateway_bounds_met_total",
        "Requests that were refused because an identity has used up a bound.",
        "Identities that need a larger bound, or misbehave.",
        "bound",
        {"sessions", "connections", "calls_per_s", "held_blocks", "held_bytes"},
    ),
)

GATEWAY: tuple[Metric, ...] = (
    *_REPORTED,
    counter(
        "kvhearth_gateway_restarts_total",
        "Gateway processes of this daemon that ended unasked and were started again.",
        "Alert: any one; the log has the exit status.",
    ),
)

GATEWAY_COUNTERS: Mapping[str, Counter] = {
    each.name: each for row in _REPORTED for each in row.counters
}
"""Counters that a gateway may report, by name."""
