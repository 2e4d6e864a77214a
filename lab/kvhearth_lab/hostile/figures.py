"""Figures of a run under attack: bounds, one row an attack, and the object that the verb prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhearth.errors import Reason
from kvhearth_lab.bench.report import p50, p99

FACTOR_MAX = 5.0
IDLE_P99_LEAST_MS = 1.0
"""Lower bound of the idle p99 in the factor: one turn of the daemon's loop for another connection
takes 1 ms, and the kernel lets another process run for up to 3 ms before a call that has just
become ready. A quiet machine with an idle p99 of 0.3 ms would fail by these alone.
"""
RSS_MIB_MAX = 64.0
RSS_AFTER_MIB_MAX = 16.0
LIVEZ_S_MAX = 1.0
LATE_S = 0.1
"""A call may end so much after its deadline, since the client's process must be scheduled, too."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Calls:
    """Durations of the good client's calls in one phase, in milliseconds."""

    count: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Calls:
        """Summarize durations in seconds."""
        if not seconds:
            return cls()
        values = (p50(seconds), p99(seconds), max(seconds))
        return cls(len(seconds), *(round(1000 * each, 3) for each in values))

    def as_json(self) -> dict[str, float]:
        """Return the figures by name."""
        return dict(vars(self))


@dataclass
class Row:
    """Measurements of one attack.

    Attributes:
        floods: whether the attack is one in which the p99 is told and not counted.
        idle, under, after: the good client's calls in the three phases.
        idle_wait, under_wait: part of the time in which the daemon's loop waited for a processor:
            what other processes of the machine add to the times.
        attach_ms: longest attach of the client that comes and goes, under attack.
        errors: failed calls of the good clients, by reason.
        rss_before, rss_max, rss_after: resident bytes of the daemon without the arena.
        descriptors_before, descriptors_max, descriptors_after: its open descriptors.
        livez_s: longest answer of ``/livez`` under attack and after it.
        restarts: deaths of the daemon.
        rounds: rounds of the attack.
        failures: failures of the attack itself or of a good client's process.
        own: further measures of the attack that fell short.
        seconds: time under attack.
    """

    name: str
    floods: bool = False
    idle: Calls = field(default_factory=Calls)
    under: Calls = field(default_factory=Calls)
    after: Calls = field(default_factory=Calls)
    idle_wait: float = 0.0
    under_wait: float = 0.0
    attach_ms: float = 0.0
    late: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    rss_before: int = 0
    rss_max: int = 0
    rss_after: int = 0
    descriptors_before: int = 0
    descriptors_max: int = 0
    descriptors_after: int = 0
    livez_s: float = 0.0
    restarts: int = 0
    rounds: int = 0
    failures: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def factor(self) -> float:
        """The p99 under attack over the idle one."""
        return round(self.under.p99_ms / max(self.idle.p99_ms, IDLE_P99_LEAST_MS), 2)

    @property
    def growth_mib(self) -> float:
        """Greatest growth of the daemon's resident memory."""
        return round((self.rss_max - self.rss_before) / _MIB, 1)

    @property
    def left_mib(self) -> float:
        """Growth that is left after the attack."""
        return round((self.rss_after - self.rss_before) / _MIB, 1)

    @property
    def settled(self) -> bool:
        """Whether memory and descriptors are back."""
        return (
            self.left_mib <= RSS_AFTER_MIB_MAX and self.descriptors_after <= self.descriptors_before
        )

    def missed(self) -> list[str]:
        """Return the names of the measures that fell short."""
        failed = {
            "p99": (self.factor > FACTOR_MAX and not self.floods) or not self.under.count,
            "deadline": self.late > 0,
            "errors": bool(self.errors),
            "wrong": bool(self.wrong),
            "lost": bool(self.lost),
            "rss": self.growth_mib > RSS_MIB_MAX,
            "rss_after": self.left_mib > RSS_AFTER_MIB_MAX,
            "descriptors": self.descriptors_after > self.descriptors_before,
            "livez": self.livez_s > LIVEZ_S_MAX,
            "restarts": self.restarts > 0,
            "attack": bool(self.failures),
        }
        return [name for name, short in failed.items() if short] + self.own

    def as_json(self) -> dict[str, Any]:
        """Return the row for JSON."""
        values = {
            name: each.as_json() if isinstance(each, Calls) else each
            for name, each in vars(self).items()
            if name not in {"rss_before", "rss_max", "rss_after"}
        }
        return {
            **values,
            "factor": self.factor,
            "rss_mib": round(self.rss_before / _MIB, 1),
            "rss_growth_mib": self.growth_mib,
            "rss_left_mib": self.left_mib,
            "missed": self.missed(),
        }


_TIMES = frozenset({"p99", "livez", "deadline"})


def least(rows: Sequence[Row]) -> Row:
    """Return the repetition that misses least, with all that was no matter of time in any of them.

    A stall that the daemon makes is there each time; one that the machine makes is not.
    """
    best = min(rows, key=lambda row: (len(row.missed()), row.factor))
    others = [row for row in rows if row is not best]
    best.restarts += sum(row.restarts for row in others)
    best.wrong += [text for row in others for text in row.wrong]
    best.lost += [text for row in others for text in row.lost]
    best.failures += [text for row in others for text in row.failures]
    more = {name for row in others for name in row.missed() if name not in _slow(row)}
    best.own += sorted(more - set(best.missed()))
    return best


def only_slow(row: Row) -> bool:
    """Whether nothing but times fell short: such an attack is repeated."""
    return bool(row.missed()) and _slow(row).issuperset(row.missed())


def _slow(row: Row) -> frozenset[str]:
    """Return the measures that a busy machine may miss: errors only if all are missed deadlines."""
    late = all(text.endswith(f": {Reason.DEADLINE}") for text in row.errors)
    return _TIMES | {"errors"} if late else _TIMES


def summary(rows: Iterable[Row], skipped: dict[str, str]) -> dict[str, Any]:
    """Return the object that the verb prints; ``late`` are those of ``missed`` that are times."""
    done = list(rows)
    return {
        "attacks": len(done),
        "good_p99_factor_max": max((row.factor for row in done), default=0.0),
        "rss_growth_mib_max": max((row.growth_mib for row in done), default=0.0),
        "restarts": sum(row.restarts for row in done),
        "wrong": sum(len(row.wrong) for row in done),
        "lost": sum(len(row.lost) for row in done),
        "missed": [f"{row.name}/{name}" for row in done for name in row.missed()],
        "late": [
            f"{row.name}/{name}" for row in done for name in row.missed() if name in _slow(row)
        ],
        "skipped": skipped,
        "rows": {row.name: row.as_json() for row in done},
    }
