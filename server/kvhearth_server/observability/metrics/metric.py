"""What a metric is, and how values are read off a snapshot."""

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
        kind: what Prometheus calls its type.
        unit: of one value.
        help: what it is.
        use: what somebody looks at it for.
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
    """One sample without labels."""
    return lambda now: [((), get(now))]


def counted(name: str) -> Read:
    """A counter of the daemon, all its label values together."""
    return lambda now: [((), now.count(name))]


def by_label(name: str) -> Read:
    """A labelled counter of the daemon; the values of its label that are known show as zero."""
    shown = counters.TABLE[name].shown

    def read(now: Snapshot) -> Samples:
        found = {label: count for (each, label), count in now.counts.items() if each == name}
        return [((label,), found.get(label, 0)) for label in sorted(shown | found.keys())]

    return read


def outcomes(names: Mapping[str, str]) -> Read:
    """Counters of the daemon by what they stand for: outcome to name."""
    return lambda now: [((outcome,), now.count(name)) for outcome, name in names.items()]


def of_segments(get: Callable[[SegmentNow], float]) -> Read:
    """One sample a tenant."""
    return lambda now: [((each.tenant,), get(each)) for each in now.segments]


def of_namespaces(get: Callable[[NamespaceNow], float]) -> Read:
    """One sample a namespace that is shown."""
    return lambda now: [((each.name,), get(each)) for each in now.namespaces]


def reported(names: Mapping[str, str]) -> Read:
    """Clients' counters by what they stand for: label value to name."""
    return lambda now: [((label,), now.reported.get(name, 0)) for label, name in names.items()]


def of_ssd(read: Callable[[SsdNow], Samples]) -> Read:
    """Samples of the SSD tier; none where there is no such tier."""
    return lambda now: [] if now.ssd is None else read(now.ssd)


def if_ssd(read: Read) -> Read:
    """The same where there is an SSD tier; no samples elsewhere."""
    return lambda now: [] if now.ssd is None else read(now)
