"""Formats the table of metrics as Prometheus's scrape and as the documentation page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as BlockSpec
from prometheus_client.registry import Collector

from kvhearth_server.engine.snapshot import Snapshot
from kvhearth_server.observability.metrics import TABLE, Metric
from kvhearth_server.observability.timings import Histogram

_DOC_HEAD = """# Metrics

The daemon serves these at `/metrics` of its HTTP address (`--http`, by default
`http://127.0.0.1:9460/metrics`), beside Prometheus' usual `process_*`. This page is written by
`make golden` from the table in `server/kvhearth_server/observability/metrics`; a test fails if they
differ.

Values are read when somebody scrapes, and a scrape costs the same whatever the cache holds. Every
label has few values. Counters start at zero with the daemon; those of clients travel with their
heartbeats.
"""


class Exposition:
    """Answers scrapes; ``take`` gives a snapshot of this moment."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Table(take))
        ProcessCollector(registry=self._registry)

    def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics, and their content type as an ``Accept`` header asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _Table(Collector):
    """The table's metrics, read off one snapshot for each scrape."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take

    def collect(self) -> Iterator[BlockSpec]:
        now = self._take()
        for metric in TABLE:
            yield family_of(metric, now)


def family_of(metric: Metric, now: Snapshot) -> BlockSpec:
    """Return one metric with its samples."""
    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in metric.read(now):
            assert isinstance(value, Histogram)
            histograms.add_metric(labels, _buckets(value), value.sum)
        return histograms
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in metric.read(now):
        assert not isinstance(value, Histogram)
        family.add_metric(labels, float(value))
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return (upper bound, how many are at most that), the form that Prometheus wants."""
    buckets, total = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
    return buckets


def metrics_page() -> str:
    """Return the text of ``docs/metrics.md``."""
    lines = [
        _DOC_HEAD,
        "| metric | type | labels | unit | what it is | what for |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for metric in TABLE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        cells = (f"`{metric.name}`", metric.kind, labels, metric.unit, metric.help, metric.use)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
