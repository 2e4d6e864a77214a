"""What operators read, as bytes: statistics as JSON, and metrics in the format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.registry import CollectorRegistry

from kvhearth_server.engine.snapshot import Snapshot, as_json
from kvhearth_server.observability.counters import Histogram
from kvhearth_server.observability.metrics import TABLE, Metric

FRESH_S = 1.0
"""Age up to which a rendering is shared by all who ask."""
SCRAPE_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Renderings:
    """Statistics and metrics as bytes; each is rendered once in ``FRESH_S`` at most, however
    many ask.

    Args:
        take: gives a snapshot of this moment.
    """

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take
        # The process's own metrics, outside of any registry: only ``collect`` is used.
        self._process = ProcessCollector(registry=CollectorRegistry())
        self._last: dict[str, tuple[float, bytes]] = {}

    def stats(self, *, fresh: bool = False) -> bytes:
        """Return the statistics as JSON; ``fresh``: of this moment."""
        return self._shared("stats", lambda: as_json(self._take()), fresh=fresh)

    def scrape(self) -> bytes:
        """Return the metrics, as ``SCRAPE_TYPE``."""
        return self._shared("metrics", self._metrics)

    def _metrics(self) -> bytes:
        now = self._take()
        own = "".join([_text_of(metric, now) for metric in TABLE])
        return own.encode() + generate_latest(self._process)

    def _shared(self, name: str, render: Callable[[], bytes], *, fresh: bool = False) -> bytes:
        now = time.monotonic()
        if fresh or name not in self._last or now - self._last[name][0] >= FRESH_S:
            self._last[name] = now, render()
        return self._last[name][1]


def _text_of(metric: Metric, now: Snapshot) -> str:
    """Return one metric with its samples; prometheus_client takes five times as long."""
    name = metric.name
    lines = [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
    for values, value in metric.read(now):
        pairs = zip(metric.labels, values, strict=True)
        labels = ",".join([f'{label}="{_escaped(text)}"' for label, text in pairs])
        if isinstance(value, Histogram):
            lines += _buckets(name, labels, value)
        else:
            lines.append(
                f"{name}{{{labels}}} {float(value)!r}" if labels else f"{name} {float(value)!r}"
            )
    lines.append("")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _buckets(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    """Yield the lines of a histogram, each bucket with the count of all that are at most that."""
    before, total = labels + "," if labels else "", 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        yield f'{name}_bucket{{{before}le="{bound}"}} {float(total)!r}'
    braces = f"{{{labels}}}" if labels else ""
    yield f"{name}_count{braces} {float(total)!r}"
    yield f"{name}_sum{braces} {histogram.sum!r}"
