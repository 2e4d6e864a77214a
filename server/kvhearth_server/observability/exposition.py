"""What operators read, as bytes: statistics as JSON, the table of metrics as Prometheus's scrape,
and the table as the documentation page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from kvhearth_server.engine.snapshot import Snapshot, as_json
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


FRESH_S = 1.0
"""Age up to which a rendering is shared by all who ask."""
PORTION_S = 0.001
_OPENMETRICS = "application/openmetrics-text"
_END = b"# EOF\n"


@dataclass
class _Rendering:
    """The last rendering in one format; ``lock`` is held by whoever renders the next one."""

    encode: Callable[[Collector], bytes]
    content_type: str
    body: bytes = b""
    taken_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Renderings:
    """Statistics and metrics as bytes.

    Each format is rendered once in ``FRESH_S`` at most, however many ask; metrics in portions, so
    that no turn of the loop takes long.

    Args:
        take: gives a snapshot of this moment.
    """

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take
        # The process's own metrics, outside of any registry: only ``collect`` is used.
        self._process = ProcessCollector(registry=CollectorRegistry())
        # Two formats whatever is asked: else each spelling of the header would cost a rendering.
        self._text = _Rendering(*choose_encoder(""))
        self._open = _Rendering(*choose_encoder(_OPENMETRICS))
        self._stats, self._stats_at = b"", float("-inf")

    def stats(self, *, fresh: bool = False) -> bytes:
        """Return the statistics as JSON; ``fresh``: of this moment."""
        now = time.monotonic()
        if fresh or now - self._stats_at >= FRESH_S:
            self._stats, self._stats_at = as_json(self._take()), now
        return self._stats

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics, and their content type as an ``Accept`` header asks for it."""
        wanted = choose_encoder(accept)[1]
        last = self._open if wanted.startswith(_OPENMETRICS) else self._text
        async with last.lock:
            if time.monotonic() - last.taken_at >= FRESH_S:
                last.taken_at = time.monotonic()
                last.body = await self._render(last)
        return last.body, last.content_type

    async def _render(self, how: _Rendering) -> bytes:
        now = self._take()
        parts = list[bytes]()
        began = time.monotonic()
        opened = how is self._open
        for metric in TABLE:
            parts.append(_text_of(metric, now, opened=opened).encode())
            if time.monotonic() - began > PORTION_S:
                await asyncio.sleep(0)
                began = time.monotonic()
        parts.append(how.encode(self._process).removesuffix(_END))
        if opened:
            parts.append(_END)
        return b"".join(parts)


def _text_of(metric: Metric, now: Snapshot, *, opened: bool) -> str:
    """Return one metric with its samples; prometheus_client takes five times as long.

    Args:
        opened: in the form of OpenMetrics, whose counters are declared without ``_total``.
    """
    name, kind = metric.name, metric.kind
    declared = name.removesuffix("_total") if opened else name
    lines = [f"# HELP {declared} {_escaped(metric.help, opened)}", f"# TYPE {declared} {kind}"]
    for values, value in metric.read(now):
        pairs = zip(metric.labels, values, strict=True)
        labels = ",".join([f'{label}="{_escaped(text, True)}"' for label, text in pairs])
        if isinstance(value, Histogram):
            lines += _buckets(name, labels, value)
        else:
            lines.append(
                f"{name}{{{labels}}} {float(value)!r}" if labels else f"{name} {float(value)!r}"
            )
    lines.append("")
    return "\n".join(lines)


def _escaped(text: str, quotes: bool) -> str:
    if "\\" in text or "\n" in text or '"' in text:
        text = text.replace("\\", "\\\\").replace("\n", "\\n")
        return text.replace('"', '\\"') if quotes else text
    return text


def _buckets(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    """Yield the lines of a histogram, each bucket with the count of all that are at most that."""
    before, total = labels + "," if labels else "", 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        yield f'{name}_bucket{{{before}le="{bound}"}} {float(total)!r}'
    braces = f"{{{labels}}}" if labels else ""
    yield f"{name}_count{braces} {float(total)!r}"
    yield f"{name}_sum{braces} {histogram.sum!r}"


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
