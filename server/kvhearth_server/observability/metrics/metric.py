"""Definition of a metric, and readers that take its values off a snapshot."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kvhearth_server.engine.namespace_series import NamespaceNow
from kvhearth_server.engine.snapshot import (
    EngineNow,
    SegmentNow,
    Snapshot,
)
from kvhearth_server.observability.counters import Counter
from kvhearth_server.observability.timings import Histogram
from kvhearth_server.tiers.figures import TierFigures

Kind = Literal["counter", "gauge", "histogram"]
Value = float | Histogram
Samples = Iterable[tuple[tuple[str, ...], Value]]
"""Label values in the order of the metric's labels, and the value."""

Read = Callable[[Snapshot], Samples]


@dataclass(frozen=True)
class Metric:
    """One line of the table.

    Args:
        name: as it is scraped.
        help: its meaning.
        use: the question that it answers.
        read: its samples in a snapshot.
        labels: names of its labels, each with few values.
        counters: the daemon's own counters that it shows; ``/v1/stats`` has them by their names.
        unit: of one value; by default the last word of the name.
        kind: Prometheus's name of its type; by default a counter if the name ends in ``_total``,
            else a gauge.
    """

    name: str
    help: str
    use: str
    read: Read
    labels: tuple[str, ...] = ()
    counters: tuple[Counter, ...] = ()
    unit: str = ""
    kind: Kind | Literal[""] = ""

    def __post_init__(self) -> None:
        word = self.name.removesuffix("_total")
        kind = "gauge" if word == self.name else "counter"
        object.__setattr__(self, "unit", self.unit or word.rsplit("_", 1)[1])
        object.__setattr__(self, "kind", self.kind or kind)


def counter(
    name: str,
    help: str,
    use: str,
    count: str,
    label: str = "",
    only: Iterable[str] = (),
    *,
    usual: Iterable[str] = (),
    unit: str = "",
) -> Metric:
    """Return the row of one counter of the daemon and its metric.

    Args:
        count: name of the counter, in the daemon and in ``/v1/stats``.
        label, only, usual: see ``Counter``.
        unit: see ``Metric``.
    """
    counted = Counter(count, label, frozenset(only), frozenset(usual))

    def read(now: Snapshot) -> Samples:
        if not label:
            return [((), now.count(count))]
        found = now.labelled(count)
        return [((value,), found.get(value, 0)) for value in sorted(counted.shown | found.keys())]

    return Metric(name, help, use, read, (label,) if label else (), (counted,), unit)


def words(kinds: Iterable[enum.StrEnum]) -> frozenset[str]:
    """Return label values as plain strings."""
    return frozenset(kind.value for kind in kinds)


def one(get: Callable[[Snapshot], Value]) -> Read:
    """Return a reader of one sample without labels."""
    return lambda now: [((), get(now))]


def of_segments(get: Callable[[SegmentNow], float]) -> Read:
    """Return a reader of one sample for each tenant."""
    return lambda now: [((each.tenant,), get(each)) for each in now.segments]


def of_namespaces(get: Callable[[NamespaceNow], float]) -> Read:
    """Return a reader of one sample for each namespace that is shown."""
    return lambda now: [((each.name,), get(each)) for each in now.busiest_namespaces]


def of_engines(get: Callable[[EngineNow], float]) -> Read:
    """Return a reader of one sample for each engine that is shown."""
    return lambda now: [((each.tenant, each.engine_id), get(each)) for each in now.engines]


def reported(names: Mapping[str, str]) -> Read:
    """Return a reader of several counters of the clients: label value to name."""
    return lambda now: [((word,), now.client_counters.get(name, 0)) for word, name in names.items()]


def of_ssd(read: Callable[[TierFigures], Samples]) -> Read:
    """Return a reader of the SSD tier's samples; none where there is no such tier."""
    return lambda now: [] if now.tier is None else read(now.tier)


def if_ssd(metric: Metric) -> Metric:
    """Return ``metric`` without samples where there is no SSD tier."""
    return replace(metric, read=lambda now: [] if now.ssd is None else metric.read(now))
