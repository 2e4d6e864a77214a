"""The metrics of blocks on their way between memory and SSD, and of the scrub."""

from __future__ import annotations

from kvhearth_server.engine.snapshot import SsdNow
from kvhearth_server.observability.metrics.metric import (
    Metric,
    by_label,
    counted,
    if_ssd,
    of_ssd,
)


def _waiting(now: SsdNow) -> list[tuple[tuple[str, ...], float]]:
    return [(("demotion",), now.demoting_blocks), (("promotion",), now.promoting_blocks)]


TIERS: tuple[Metric, ...] = (
    Metric(
        "kvhearth_demoted_blocks_total",
        "counter",
        "blocks",
        "Blocks written to SSD and acknowledged: they survive a crash of the daemon.",
        "Write rate; compare with the stores.",
        if_ssd(counted("demoted_blocks")),
    ),
    Metric(
        "kvhearth_demoted_bytes_total",
        "counter",
        "bytes",
        "Bytes of those blocks.",
        "Bandwidth of writes that were asked for.",
        if_ssd(counted("demoted_bytes")),
    ),
    Metric(
        "kvhearth_demotions_refused_total",
        "counter",
        "blocks",
        "Blocks that stay in memory only, by why SSD was not to take them: admission, budget, "
        "degraded, slow (it could not keep up while room was needed), too_large.",
        "Blocks that are gone once they are evicted.",
        if_ssd(by_label("demotion_refused")),
        ("reason",),
    ),
    Metric(
        "kvhearth_demotions_failed_total",
        "counter",
        "blocks",
        "Blocks whose write to SSD failed, by reason.",
        "Alert: a drive that fails or is full.",
        if_ssd(by_label("demotion_failed")),
        ("reason",),
    ),
    Metric(
        "kvhearth_promoted_blocks_total",
        "counter",
        "blocks",
        "Blocks loaded from SSD into memory, verified.",
        "What SSD has saved engines from computing again.",
        if_ssd(counted("promoted_blocks")),
    ),
    Metric(
        "kvhearth_promoted_bytes_total",
        "counter",
        "bytes",
        "Bytes of those blocks.",
        "Bandwidth of loads from SSD.",
        if_ssd(counted("promoted_bytes")),
    ),
    Metric(
        "kvhearth_promotions_failed_total",
        "counter",
        "blocks",
        "Blocks that were asked for and not loaded, by reason; no_room: all memory is held.",
        "Hits that became misses.",
        if_ssd(by_label("promotion_failed")),
        ("reason",),
    ),
    Metric(
        "kvhearth_prefetch_cancelled_blocks_total",
        "counter",
        "blocks",
        "Blocks on their way up from SSD when the request that asked for them went away.",
        "Many: requests give up before SSD answers.",
        if_ssd(counted("prefetch_cancelled")),
    ),
    Metric(
        "kvhearth_tier_waiting_blocks",
        "gauge",
        "blocks",
        "Blocks that wait for SSD or are under way, by direction: demotion, promotion.",
        "Demotions that only grow: the drive cannot keep up with the stores.",
        of_ssd(_waiting),
        ("direction",),
    ),
    Metric(
        "kvhearth_repaired_blocks_total",
        "counter",
        "blocks",
        "Blocks found wrong on one tier that the other tier's copy brings back, by where.",
        "With the checksum failures: which of them cost nothing.",
        if_ssd(by_label("repaired_blocks")),
        ("tier",),
    ),
    Metric(
        "kvhearth_ssd_catalogue_failures_total",
        "counter",
        "calls",
        "Reads and writes of the namespaces' catalogue beside the SSD tier that failed.",
        "Alert: after a cold start blocks on SSD may not be found.",
        if_ssd(counted("ssd_catalogue_failures")),
    ),
    Metric(
        "kvhearth_scrubbed_blocks_total",
        "counter",
        "blocks",
        "Blocks read and verified in the background, by tier.",
        "Whether the scrub runs.",
        by_label("scrubbed_blocks"),
        ("tier",),
    ),
    Metric(
        "kvhearth_scrubbed_bytes_total",
        "counter",
        "bytes",
        "Bytes read and verified in the background, by tier.",
        "Its bandwidth: at most scrub_rate for each tier.",
        by_label("scrubbed_bytes"),
        ("tier",),
    ),
    Metric(
        "kvhearth_scrub_rounds_total",
        "counter",
        "rounds",
        "Times that the scrub went through a tier from end to end.",
        "How old damage can be when it is found.",
        by_label("scrub_rounds"),
        ("tier",),
    ),
    Metric(
        "kvhearth_scrub_round_ratio",
        "gauge",
        "1",
        "How much of its round the scrub has seen, 0 to 1, by tier.",
        "How long a round takes.",
        lambda now: [((tier,), done) for tier, done in sorted(now.scrub_progress.items())],
        ("tier",),
    ),
)
