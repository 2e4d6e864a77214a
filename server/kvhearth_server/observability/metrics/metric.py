"""Definition of a metric, and readers that take its values off a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvhearth_server.engine.snapshot import NamespaceNow, SegmentNow, Snapshot, SsdNow
from kvhearth_server.observability import counters
from kvhearth_server.observability.timings import Histogram

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
        kind: Prometheus's name of its type.
        unit: of one value.
        help: its meaning.
        use: the question that it answers.
        read: its samples in a snapshot.
        labels: names of its labels, each with few values.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    use: str
    read: Read
    labels: tuple[str, ...] = ()


def one(get: Callable[[Snapshot], Value]) -> Read:
    """Return a reader of one sample without labels."""
    return lambda now: [((), get(now))]


def counted(name: str) -> Read:
    """Return a reader of a counter of the daemon, all its label values together."""
    return lambda now: [((), now.count(name))]


def by_label(name: str) -> Read:
    """Return a reader of a labelled counter of the daemon; the values of its label that are known
    show as zero.
    """
    shown = counters.TABLE[name].shown

    def read(now: Snapshot) -> Samples:
        found = {label: count for (each, label), count in now.counts.items() if each == name}
        return [((label,), found.get(label, 0)) for label in sorted(shown | found.keys())]

    return read


def outcomes(names: Mapping[str, str]) -> Read:
    """Return a reader of several counters of the daemon, each as one outcome: outcome to name."""
    return lambda now: [((outcome,), now.count(name)) for outcome, name in names.items()]


def of_segments(get: Callable[[SegmentNow], float]) -> Read:
    """Return a reader of one sample for each tenant."""
    return lambda now: [((each.tenant,), get(each)) for each in now.segments]


def of_namespaces(get: Callable[[NamespaceNow], float]) -> Read:
    """Return a reader of one sample for each namespace that is shown."""
    return lambda now: [((each.name,), get(each)) for each in now.namespaces]


def reported(names: Mapping[str, str]) -> Read:
    """Return a reader of several counters of the clients: label value to name."""
    return lambda now: [((label,), now.reported.get(name, 0)) for label, name in names.items()]


def of_ssd(read: Callable[[SsdNow], Samples]) -> Read:
    """Return a reader of the SSD tier's samples; none where there is no such tier."""
    return lambda now: [] if now.ssd is None else read(now.ssd)


def if_ssd(read: Read) -> Read:
    """Return ``read`` where there is an SSD tier; no samples elsewhere."""
    return lambda now: [] if now.ssd is None else read(now)
