"""Every counter of the daemon, in one table.

A counter only rises and starts at zero with the process. A labelled one is kept per value of its
label, and the number of values is bounded, because each becomes a time series.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from kvhearth.errors import Reason

LABEL_VALUES_MAX = 32
"""Upper bound on the values of one counter's free label; later values are counted under
``OTHER``.
"""

OTHER = "other"

_LABEL = re.compile(r"[a-z0-9][a-z0-9_.-]{0,47}")


@dataclass(frozen=True)
class Counter:
    """One line of the table.

    Args:
        help: the event that one count stands for.
        label: the label's name; empty for a counter without.
        values: the only values of the label; empty for any short lower-case word.
        usual: for a free label, the values that metrics show from the start, as zero: a series that
            appears with its first event shows no rise, and an alert would miss that event.
    """

    help: str
    label: str = ""
    values: frozenset[str] = frozenset()
    usual: frozenset[str] = frozenset()

    @property
    def shown(self) -> frozenset[str]:
        """Label values that metrics show before anything was counted under them."""
        return self.values or self.usual


TABLE: Mapping[str, Counter] = {
    "refusals": Counter(
        "Requests that were refused.", "reason", frozenset(reason.value for reason in Reason)
    ),
    "attach_frames_bad": Counter("Frames on the attach socket that were no valid message."),
    "sessions_opened": Counter("Processes that attached."),
    "sessions_closed": Counter("Attached processes that ended or closed their life line."),
    "groups_ended": Counter("Engines whose last process went."),
    "lookups": Counter("Lookups answered."),
    "lookup_keys": Counter("Keys asked for in lookups."),
    "hit_keys": Counter("Keys asked for in lookups that were present."),
    "below_keys": Counter("Keys asked for in lookups that were on a slower tier only."),
    "miss_keys": Counter(
        "Keys asked for in lookups that were not there to be served.",
        "reason",
        frozenset({"absent", "epoch", "not_summed"}),
    ),
    "leased_keys": Counter("Blocks leased to readers."),
    "leased_bytes": Counter("Bytes leased to readers."),
    "reserves": Counter("Reservations answered."),
    "reserved_slots": Counter("Slots handed out for writing."),
    "commits": Counter("Commits answered."),
    "stored_blocks": Counter("Blocks that became visible."),
    "stored_bytes": Counter("Bytes of blocks that became visible."),
    "duplicate_blocks": Counter("Committed blocks whose key was there already."),
    "aborts": Counter("Aborts answered."),
    "aborted_slots": Counter("Reserved slots given back unwritten."),
    "evicted_blocks": Counter(
        "Blocks evicted to make room.",
        "reason",
        usual=frozenset({"asked", "quota", "slab", "space"}),
    ),
    "removed_blocks": Counter(
        "Blocks removed for another reason than room.",
        "reason",
        usual=frozenset({"checksum", "epoch"}),
    ),
    "summed_blocks": Counter("Blocks whose checksum the daemon took."),
    "checksum_failures": Counter(
        "Blocks whose bytes were not those of their checksum.",
        "source",
        usual=frozenset({"adoption", "demotion", "reader", "scrub", "ssd"}),
    ),
    "adopted_blocks": Counter("Blocks taken over from an earlier run's arena."),
    "adoption_dropped": Counter(
        "Slots of an earlier run's arena not taken over.",
        "reason",
        usual=frozenset(
            {
                *("contract", "duplicate", "epoch", "header", "incomplete", "owner", "readers"),
                *("slab", "state_word"),
            }
        ),
    ),
    "quarantined_slots": Counter("Slots set aside because somebody may still write to them."),
    "released_quarantine_slots": Counter("Slots that came back from quarantine."),
    "task_failures": Counter(
        "Background tasks that failed and were restarted.",
        "task",
        usual=frozenset(
            {
                *(
                    "attach",
                    "attach_connection",
                    "garbage",
                    "pins",
                    "recovery",
                    "scrub",
                    "scrub_ssd",
                ),
                *("scrub_ssd", "sum", "tiering", "trim", "verify", "watch", "watchdog"),
            }
        ),
    ),
    "demoted_blocks": Counter("Blocks written to the slower tier, durable."),
    "demoted_bytes": Counter("Bytes of blocks written to the slower tier."),
    "demotion_refused": Counter(
        "Blocks that the slower tier was not to take.",
        "reason",
        usual=frozenset({"admission", "budget", "degraded", "slow", "too_large"}),
    ),
    "demotion_failed": Counter(
        "Blocks whose write to the slower tier failed.",
        "reason",
        usual=frozenset({"io", "no_space", "read_only", "short"}),
    ),
    "promoted_blocks": Counter("Blocks loaded from the slower tier."),
    "promoted_bytes": Counter("Bytes of blocks loaded from the slower tier."),
    "promotion_failed": Counter(
        "Blocks that were not loaded from the slower tier though they were to be.",
        "reason",
        usual=frozenset(
            {"cancelled", "degraded", "io", "missing", "no_room", "queue", "short", "stuck"}
        ),
    ),
    "prefetch_cancelled": Counter("Blocks on their way up whose request went away."),
    "repaired_blocks": Counter(
        "Blocks found wrong on one tier that another tier's copy brings back.",
        "tier",
        frozenset({"dram", "ssd"}),
    ),
    "ssd_catalogue_failures": Counter(
        "Reads and writes of the namespaces beside the SSD tier that failed."
    ),
    "scrubbed_blocks": Counter(
        "Blocks that were read and verified in the background.",
        "tier",
        frozenset({"dram", "ssd"}),
    ),
    "scrubbed_bytes": Counter(
        "Bytes that were read and verified in the background.",
        "tier",
        frozenset({"dram", "ssd"}),
    ),
    "scrub_rounds": Counter(
        "Times that a tier was gone through from end to end.", "tier", frozenset({"dram", "ssd"})
    ),
    "dropped_stores": Counter("Blocks that were written and then not kept."),
    "events_lost": Counter("Events that a slow reader did not get."),
}


class Counters:
    """Values of all counters. Any thread may add, hence the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {
            (name, ""): 0 for name, counter in TABLE.items() if not counter.label
        }
        self._label_values: dict[str, set[str]] = {
            name: set() for name, counter in TABLE.items() if counter.label
        }

    def add(self, name: str, n: int = 1, label: str = "") -> None:
        """Count ``n`` more (zero changes nothing).

        Raises:
            ValueError: a name that is not in the table, a negative count, a label where there is
                none (or the other way round), or one that is not among its counter's values.
        """
        with self._lock:
            if n >= 0 and (name, label) in self._counts:
                self._counts[name, label] += n
                return
        counter = TABLE.get(name)
        if counter is None:
            raise ValueError(f"there is no counter {name!r}; add it to TABLE")
        if n < 0:
            raise ValueError(f"counter {name} cannot fall by {-n}")
        if bool(label) != bool(counter.label):
            raise ValueError(f"counter {name} has label {counter.label!r}, got the value {label!r}")
        if counter.values and label not in counter.values:
            raise ValueError(f"counter {name}: {label!r} is no value of its label {counter.label}")
        if label and _LABEL.fullmatch(label) is None:
            raise ValueError(f"counter {name}: {label!r} is not a short lower-case word")
        if n == 0:
            return
        with self._lock:
            key = (name, self._bounded(name, counter, label))
            self._counts[key] = self._counts.get(key, 0) + n

    def add_all(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Add many counts by name and label value; see ``add``."""
        strange = []
        with self._lock:
            known = self._counts
            for place, n in counts.items():
                before = known.get(place)
                if n >= 0 and before is not None:
                    known[place] = before + n
                else:
                    strange.append((place, n))
        for (name, label), n in strange:
            self.add(name, n, label)

    def _bounded(self, name: str, counter: Counter, label: str) -> str:
        if not label or counter.values:
            return label
        seen = self._label_values[name]
        if label not in seen and len(seen) >= LABEL_VALUES_MAX:
            return OTHER
        seen.add(label)
        return label

    def get(self, name: str, label: str | None = None) -> int:
        """Return the count of one counter: of one label value, or (``None``) of all of them
        together.
        """
        with self._lock:
            return sum(
                count
                for (each, value), count in self._counts.items()
                if each == name and label in (None, value)
            )

    def values(self) -> dict[tuple[str, str], int]:
        """Return all counters by name and label value (empty for a counter without)."""
        with self._lock:
            return dict(self._counts)

    def snapshot(self) -> dict[str, int]:
        """Return all counts by ``name`` or ``name{label value}``; a label not seen yet is
        missing.
        """
        with self._lock:
            counts = sorted(self._counts.items())
        return {f"{name}{{{label}}}" if label else name: count for (name, label), count in counts}
