"""The metrics of gateways, which report their counts to the daemon (``transport.attach``)."""

from __future__ import annotations

from collections.abc import Mapping

from kvhearth.errors import Reason
from kvhearth.wire.remote import Outcome
from kvhearth_server.observability.counters import Counter
from kvhearth_server.observability.metrics.metric import Metric, counter, words

_REPORTED: tuple[Metric, ...] = (
    counter(
        "kvhearth_gateway_connections_total",
        "TCP connections that gateways accepted, of strangers too.",
        "A rate far above that of sessions: somebody knocks.",
        "gateway_connections",
    ),
    counter(
        "kvhearth_gateway_requests_total",
        "Requests of remote engines to gateways, by kind.",
        "Load of the gateways.",
        "gateway_requests",
        "kind",
        {"call", "put", "get", "ask"},
    ),
    counter(
        "kvhearth_gateway_bytes_total",
        "Bytes of KV that gateways received (in) and sent (out).",
        "Bandwidth between hosts.",
        "gateway_bytes",
        "direction",
        {"in", "out"},
    ),
    counter(
        "kvhearth_gateway_refusals_total",
        "Connections and calls that gateways refused, by reason.",
        "Alert: unknown_token or peer_not_allowed rising means somebody tries to get in.",
        "gateway_refusals",
        "reason",
        words(Reason),
        unit="requests",
    ),
    counter(
        "kvhearth_gateway_extents_refused_total",
        "Extents of puts and gets that were not moved, by outcome.",
        "Alert: foreign_extent means a peer that names what was not given to it; "
        "checksum_mismatch a damaged link.",
        "gateway_extents_refused",
        "outcome",
        {each.name.lower() for each in Outcome} - {"ok"},
        unit="extents",
    ),
    counter(
        "kvhearth_gateway_peers_refused_total",
        "Remote peers whose token or certificate was refused, by cause.",
        "Alert: wrong tokens mean guessing, or an engine with an old one.",
        "gateway_peers_refused",
        "cause",
        {"nothing_shown", "wrong_token", "wrong_certificate"},
        unit="peers",
    ),
    counter(
        "kvhearth_gateway_bounds_met_total",
        "Requests that were refused because an identity has used up a bound.",
        "Identities that need a larger bound, or misbehave.",
        "gateway_bounds_met",
        "bound",
        {"sessions", "connections", "calls_per_s", "held_blocks", "held_bytes"},
        unit="requests",
    ),
)

GATEWAY: tuple[Metric, ...] = (
    *_REPORTED,
    counter(
        "kvhearth_gateway_restarts_total",
        "Gateway processes of this daemon that ended unasked and were started again.",
        "Alert: any one; the log has the exit status.",
        "gateway_restarts",
    ),
)

GATEWAY_COUNTERS: Mapping[str, Counter] = {
    each.name: each for row in _REPORTED for each in row.counters
}
"""Counters that a gateway may report, by name."""
