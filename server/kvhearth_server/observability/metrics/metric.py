"""Definition of a metric, and the sources whose fields and counts metrics show."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from kvhearth_server.engine.snapshot import Snapshot
from kvhearth_server.observability.counters import Counter, Histogram

Value = float | Histogram
Samples = Iterable[tuple[tuple[str, ...], Value]]
"""Label values in the order of the metric's labels, and the value."""


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
        histogram: whether its values are histograms.
    """

    name: str
    help: str
    use: str
    read: Callable[[Snapshot], Samples]
    labels: tuple[str, ...] = ()
    counters: tuple[Counter, ...] = ()
    histogram: bool = False

    @property
    def kind(self) -> str:
        """Prometheus's name of its type."""
        if self.histogram:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


def counter(
    name: str,
    help: str,
    use: str,
    label: str = "",
    words: Iterable[str] = (),
    *,
    count: str = "",
) -> Metric:
    """Return the row of one counter of the daemon and its metric.

    Args:
        label, words: see ``Counter``.
        count: name of the counter, in the daemon and in ``/v1/stats``; by default the metric's
            without ``kvhearth_`` and ``_total``.
    """
    count = count or DAEMON.rest(name)
    counted = Counter(count, label, frozenset(words))

    def read(now: Snapshot) -> Samples:
        found = sorted(now.counts[count].items())
        return [((value,) if label else (), n) for value, n in found]

    return Metric(name, help, use, read, (label,) if label else (), (counted,))


def words(kinds: Iterable[enum.StrEnum]) -> frozenset[str]:
    """Return label values as plain strings."""
    return frozenset(kind.value for kind in kinds)


def refusals(usual: Mapping[str, Iterable[str]]) -> Callable[[Any], Samples]:
    """Return what splits a tier's refusals by direction and reason.

    Args:
        usual: reasons by direction (store, load) that metrics show from the start.
    """

    def split(tier: Any) -> Samples:
        for direction, reasons in usual.items():
            prefix = f"{direction}s_refused_"
            told = {name.removeprefix(prefix) for name in tier.counters if name.startswith(prefix)}
            for reason in sorted(told.union(reasons)):
                yield (direction, reason), tier.counters.get(prefix + reason, 0)

    return split


@dataclass(frozen=True)
class Source:
    """Things of one kind in a snapshot, such as its segments; makes the rows of their metrics.

    Args:
        prefix: begin of the metrics' names; the rest is by default the name of what is shown.
        find: returns the things, each with the values of ``labels``; none where there are none.
        labels: names of the labels that tell the things apart.
        counts: returns a thing's counters by name.
    """

    prefix: str
    find: Callable[[Snapshot], Iterable[tuple[tuple[str, ...], Any]]]
    labels: tuple[str, ...] = ()
    counts: Callable[[Any], Mapping[str, int]] = attrgetter("counters")

    def rest(self, name: str) -> str:
        """Return a metric's name without its prefix and ``_total``."""
        return name.removeprefix(self.prefix).removesuffix("_total")

    def field(
        self,
        name: str,
        help: str,
        use: str,
        get: str | Callable[[Any], Value | None] = "",
        *,
        histogram: bool = False,
    ) -> Metric:
        """Return the row of a field; None gives no sample.

        Args:
            get: the field's path with dots, or what returns its value.
            histogram: see ``Metric``.
        """
        of = get if callable(get) else attrgetter(get or self.rest(name))

        def read(now: Snapshot) -> Samples:
            values = [(labels, of(each)) for labels, each in self.find(now)]
            return [(labels, value) for labels, value in values if value is not None]

        return Metric(name, help, use, read, self.labels, (), histogram)

    def split(
        self,
        name: str,
        help: str,
        use: str,
        labels: tuple[str, ...],
        split: Callable[[Any], Samples],
        *,
        counters: tuple[Counter, ...] = (),
        histogram: bool = False,
    ) -> Metric:
        """Return the row of several samples of each thing, by further ``labels``."""

        def read(now: Snapshot) -> Samples:
            for of, each in self.find(now):
                for values, value in split(each):
                    yield (*of, *values), value

        return Metric(name, help, use, read, (*self.labels, *labels), counters, histogram)

    def count(
        self,
        name: str,
        help: str,
        use: str,
        count: str | Mapping[str, str] = "",
        label: str = "",
    ) -> Metric:
        """Return the row of a counter, or of several by the values of ``label``; 0 for one in which
        nothing was counted.
        """
        names = count if isinstance(count, Mapping) else {"": count or self.rest(name)}

        def split(thing: Any) -> Samples:
            counts = self.counts(thing)
            return [((word,) if label else (), counts.get(name, 0)) for word, name in names.items()]

        return self.split(name, help, use, (label,) if label else (), split)


DAEMON = Source("kvhearth_", lambda now: [((), now)])
