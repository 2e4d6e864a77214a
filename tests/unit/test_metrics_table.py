"""The table of metrics: names valid for Prometheus, every counter exported, bounded labels."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import selectors
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as families
from support.reports import report

import kvhearth_server
from kvhearth.errors import Reason
from kvhearth_server.core.adoption import DropCause
from kvhearth_server.engine.miss_ratio import Curve, HitRatio
from kvhearth_server.engine.namespace_series import NamespaceNow
from kvhearth_server.engine.snapshot import EngineNow, SegmentNow, Snapshot
from kvhearth_server.observability.counters import (
    AGE_BOUNDS,
    LABEL_VALUES_MAX,
    NAMES_MAX,
    OTHER,
    SECONDS_BOUNDS,
    CallTimings,
    Counters,
    Histogram,
    Reported,
    TickClock,
    watch_lag,
)
from kvhearth_server.observability.exposition import Renderings
from kvhearth_server.observability.metrics import COUNTERS, TABLE
from kvhearth_server.tiers.base import Refusal
from kvhearth_server.tiers.figures import (
    DirectoryFigures,
    RemoteFigures,
    TenantFigures,
    TierFigures,
)
from kvhearth_server.tiers.ssd.disk.probe import NAMES
from kvhearth_server.tiers.ssd.format import Doubt

SERVER = Path(kvhearth_server.__file__).resolve().parent


def a_tier(**changes: Any) -> TierFigures:
    """A tier in which every counter has a distinct value."""
    values: dict[str, Any] = {
        "interface": "libaio",
        "directories": [
            DirectoryFigures("/a", 700, 600, {"open": 1, "sealed": 4}, [], []),
            DirectoryFigures("/b", 500, 0, {}, ["unusable"], ["/b is used by another daemon"]),
        ],
        "tenants": [TenantFigures("t", 28, 29)],
        "recovering": True,
        "files_found": 33,
        "queued_writes": 37,
        "read_latency_s": 0.003,
        "budget_left_bytes": 39,
        "counters": {name: number for number, name in enumerate(sorted(TIER_COUNTS), 9000)},
        "demoting_blocks": 40,
        "promotion_seconds": Histogram(SECONDS_BOUNDS),
        "io_seconds": {"read": Histogram(SECONDS_BOUNDS), "write": Histogram(SECONDS_BOUNDS)},
    }
    return report(TierFigures, **(values | changes))


def a_remote() -> RemoteFigures:
    """A remote that works."""
    counters = {"stored_blocks": 90, "put_keys": 91, "breaker_openings": 92}
    return report(
        RemoteFigures, name="s3://b", mover_up=True, counters=counters, seconds={"put": 93.5}
    )


def a_snapshot(**changes: Any) -> Snapshot:
    """A daemon in which every counter and label of the table has a distinct value."""
    ages, timings = Histogram(AGE_BOUNDS), CallTimings()
    ages.observe(30.0, 3)
    timings.loop_lag.observe(0.004)
    timings.observe("Lookup", "OK", 0.0004)
    timings.observe("Lookup", "UNAVAILABLE", 2.0)
    values: dict[str, Any] = {
        "version": "1.2",
        "doors_shut": 23,
        "segments": [SegmentNow("t", "2MiB", 2 << 20, 80, 90, 100, 1, 2, 48, 3, 4, 5, 6, 7)],
        "busiest_namespaces": [
            NamespaceNow("abc", 8, 9, "t", "m", quota_bytes=47),
            NamespaceNow("other", 10, 11),
        ],
        "namespaces": 40,
        "ssd": a_tier(),
        "counts": {
            name: dict.fromkeys(counter.words if counter.label else ("",), number)
            for number, (name, counter) in enumerate(COUNTERS.items(), 1000)
        },
        "client_counters": Counter(
            {"store_bytes": 20, "fail_open_deadline": 21, "links_lost": 22, "store_copy_us": 2500}
        ),
        "timings": timings,
        "eviction_ages": ages,
        "engines": [EngineNow("e", "t", leases=48, heartbeat_age_s=4.5)],
        "curves": [Curve("t", "all", 47, 48, 0.5, 49, 50, [HitRatio(0.5, 24, 0.25)], [])],
        "remote": a_remote(),
    }
    return report(Snapshot, **(values | changes))


def _words(pattern: str, folder: str = ".") -> set[str]:
    """Returns the matches of ``pattern``'s group in the daemon's source."""
    sources = [path.read_text() for path in (SERVER / folder).rglob("*.py")]
    return {word for text in sources for word in re.findall(pattern, text)}


TIER_COUNTS = (
    _words(r"""counts\.add\(\s*"(\w+)\"""", "tiers/ssd")
    | {f"{what}_{of}" for what in ("stored", "carried") for of in ("blocks", "bytes")}
    | {f"dropped_{doubt.value}" for doubt in Doubt}
)


def scraped(now: Snapshot) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Returns samples by name and labels, as parsed by Prometheus' own parser."""
    body = Renderings(lambda: now).scrape()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families(body.decode())
        for sample in family.samples
    }


def value(found: Any, name: str, **labels: str) -> float:
    return float(found["kvhearth_" + name, frozenset(labels.items())])


def test_names_follow_the_rules() -> None:
    names = [metric.name for metric in TABLE]
    assert len(set(names)) == len(names)
    for metric in TABLE:
        assert re.fullmatch(r"kvhearth_[a-z][a-z_]*[a-z]", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith(".")
        assert metric.use.endswith(".")
        text = metric.help + metric.use
        assert not set("|\\\n").intersection(text), "they are cells and lines"


def test_every_line_of_the_table_has_a_sample_with_its_labels() -> None:
    now = a_snapshot()
    for metric in TABLE:
        samples = list(metric.read(now))
        assert samples, metric.name
        assert all(len(labels) == len(metric.labels) for labels, _ in samples), metric.name
        assert len({labels for labels, _ in samples}) == len(samples), metric.name


def test_every_counter_is_shown() -> None:
    """Recognises each counter by its value, which no other counter has."""
    elsewhere = {
        *("reserves", "commits", "aborts"),  # rpc_requests_total counts the calls
        "lookup_keys",  # the sum of lookup_blocks_total
        "recovered_segments",  # ssd_recovery_files reports it
    }
    now = a_snapshot()
    assert now.ssd is not None
    assert len(now.ssd.counters) > 20
    shown = {v for metric in TABLE for _, v in metric.read(now) if not isinstance(v, Histogram)}
    counts = {name: {now.count(name), *counts.values()} for name, counts in now.counts.items()}
    counts |= {name: {count} for name, count in now.ssd.counters.items()}
    assert {name for name, values in counts.items() if not shown & values} == elsewhere


def test_labelled_counters_are_there_from_the_start() -> None:
    """Without an event yet: a rise from an absent series is none, so an alert would miss it."""
    counts = Counters(COUNTERS).values()
    now = a_snapshot(counts=counts, client_counters=Counter(), ssd=a_tier(counters={}))
    found = scraped(now)
    for source in ("reader", "ssd"):
        assert value(found, "checksum_failures_total", source=source) == 0
    for reason in Reason:
        assert value(found, "refusals_total", reason=reason.value) == 0
        assert value(found, "client_fallbacks_total", reason=reason.value) == 0
    for word in ("admission", "budget", "full", "queue"):
        assert value(found, "ssd_refused_blocks_total", direction="store", reason=word) == 0
    for doubt in Doubt:
        assert value(found, "ssd_recovery_dropped_total", reason=doubt.value) == 0
    assert value(found, "ssd_load_blocks_total", outcome="corrupt") == 0
    assert value(found, "demotions_failed_total", reason="io") == 0
    assert value(found, "repaired_blocks_total", tier="dram") == 0
    labelled = [name for name, counter in COUNTERS.items() if counter.label]
    assert [name for name in labelled if not COUNTERS[name].words] == []


def test_a_word_that_is_not_usual_is_shown_once_it_came() -> None:
    counted = Counters(COUNTERS)
    counted.add("adoption_dropped", 3, "comet")
    counted.add("adoption_dropped", 2, "slab")
    found = scraped(a_snapshot(counts=counted.values()))
    read = {word: value(found, "adoption_dropped_total", reason=word) for word in DropCause}
    assert read == {word: 2 * (word == "slab") for word in DropCause}
    assert value(found, "adoption_dropped_total", reason="comet") == 3


def test_usual_tasks_are_those_that_the_daemon_spawns() -> None:
    used = _words(r"""spawn\(\s*"(\w+)\"""") | {"attach_connection"}
    assert len(used) > 1
    assert used <= COUNTERS["task_failures"].words


def test_types_are_those_of_the_table() -> None:
    body = Renderings(a_snapshot).scrape()
    kinds = {family.name: family.type for family in families(body.decode())}
    for metric in TABLE:
        assert kinds[metric.name.removesuffix("_total")] == metric.kind


def test_values() -> None:
    now = a_snapshot()
    found = scraped(now)
    assert value(found, "build_info", version="1.2") == 1
    assert value(found, "ready") == 1
    assert value(scraped(a_snapshot(draining=True)), "ready") == 0
    assert value(found, "page_bytes", tenant="t", kind="2MiB") == 2 << 20
    assert value(found, "largest_free_bytes", tenant="t") == 7
    assert value(found, "namespaces_other") == 39
    assert value(found, "namespace_blocks", namespace="other") == 10
    assert value(found, "lookup_blocks_total", result="dram", reason="") == now.count("hit_keys")
    assert value(found, "lookup_blocks_total", result="ssd", reason="") == now.count("below_keys")
    assert value(found, "rpc_requests_total", method="Lookup", code="UNAVAILABLE") == 1
    assert value(found, "rpc_seconds_bucket", method="Lookup", le="0.0005") == 1
    assert value(found, "rpc_seconds_count", method="Lookup") == 2
    assert value(found, "eviction_age_seconds_bucket", le="10.0") == 0
    assert value(found, "eviction_age_seconds_bucket", le="60.0") == 3
    assert value(found, "eviction_age_seconds_sum") == 90
    assert value(found, "loop_lag_seconds_bucket", le="0.0025") == 0
    assert value(found, "loop_lag_seconds_bucket", le="0.005") == 1
    assert value(found, "client_copy_bytes_total", direction="store") == 20
    assert value(found, "client_copy_seconds_total", direction="store") == 0.0025
    assert value(found, "client_fallbacks_total", reason="deadline") == 21
    assert value(found, "client_trouble_total", kind="links_lost") == 22


# -- the SSD tier ----------------------------------------------------------------------------------


def test_values_of_the_ssd_tier() -> None:
    found = scraped(a_snapshot())
    assert value(found, "ssd_interface_info", interface="libaio") == 1
    assert value(found, "ssd_interface_info", interface="threads") == 0
    assert value(found, "ssd_interface_broken") == 0
    assert value(found, "ssd_capacity_bytes", directory="/b") == 500
    assert value(found, "ssd_file_bytes", directory="/a") == 600
    assert value(found, "ssd_segments", directory="/a", state="sealed") == 4
    assert value(found, "ssd_tenant_bytes", tenant="t") == 28
    assert value(found, "ssd_quota_bytes", tenant="t") == 29
    assert value(found, "ssd_degraded", directory="/b", reason="unusable") == 1
    assert value(found, "ssd_degraded", directory="/a", reason="unusable") == 0
    assert value(found, "ssd_recovering") == 1
    assert value(found, "ssd_recovery_files", state="found") == 33
    assert value(found, "ssd_queued_requests", direction="write") == 37
    assert value(found, "ssd_read_latency_seconds") == 0.003
    assert value(found, "ssd_budget_left_bytes") == 39
    assert value(found, "tier_waiting_blocks", direction="demotion") == 40


def test_a_remotes_figures() -> None:
    found = scraped(a_snapshot())
    assert value(found, "remote_up", remote="s3://b") == 1
    assert value(found, "remote_requests_total", remote="s3://b", kind="put") == 91
    assert value(found, "remote_blocks_total", remote="s3://b", outcome="published") == 90
    assert value(found, "remote_request_seconds_total", remote="s3://b", kind="put") == 93.5
    assert value(found, "remote_breaker_openings_total", remote="s3://b") == 92
    none = scraped(a_snapshot(remote=None))
    assert not [name for name, _ in none if "_remote_" in name and "gateway" not in name]


def test_labels_are_the_tiers_own_words() -> None:
    found = scraped(a_snapshot(ssd=a_tier(counters={})))

    def shown(name: str, label: str) -> set[str]:
        return {dict(labels)[label] for each, labels in found if each == f"kvhearth_{name}"}

    assert shown("ssd_interface_info", "interface") == set(NAMES)
    dropped = {doubt.value for doubt in Doubt} | {"namespaces"}
    assert shown("ssd_recovery_dropped_total", "reason") == dropped
    given = {Refusal[word].value for word in _words(r"Refusal\.(\w+)", "tiers/ssd")}
    assert shown("ssd_refused_blocks_total", "reason") == given != set()


def test_without_an_ssd_tier_there_are_no_series_of_it() -> None:
    found = scraped(a_snapshot(ssd=None))
    about = {name for name, _ in found if re.search("ssd|demot|promot|prefetch|repaired", name)}
    assert about == set()


def test_labels_cannot_break_a_line() -> None:
    name = 'a"\n\\b'
    found = scraped(a_snapshot(busiest_namespaces=[NamespaceNow(name, 1, 1)]))
    assert value(found, "namespace_blocks", namespace=name)


def test_scrapes_at_once_share_one_rendering() -> None:
    taken = []

    def take() -> Snapshot:
        taken.append(1)
        return a_snapshot()

    renderings = Renderings(take)
    assert len({renderings.scrape() for _ in range(60)}) == len(taken) == 1


# -- reports of clients ------------------------------------------------------------------------


def test_client_counters_only_rise() -> None:
    reported = Reported()
    for session, count in ((1, 5), (1, 5), (1, 3), (2, 1)):
        reported.note(session, "t", {"a": count})
    reported.forget(1)
    assert reported.totals == {"a": 6}


def test_a_client_that_attaches_again_is_not_counted_twice() -> None:
    for ended in (True, False):
        reported = Reported()
        reported.note(1, "t", {"a": 5})
        if ended:
            reported.forget(1)
        reported.follow(2, 1)
        reported.note(2, "t", {"a": 7})
        assert reported.totals == {"a": 7}
        reported.follow(4, 3)
        reported.note(4, "t", {"a": 1})
        assert reported.totals == {"a": 8}


def test_names_are_bounded() -> None:
    reported = Reported()
    reported.note(1, "t", {'x"} 1\n': 1, "Upper": 1, "y" * 100: 1, "": 1})
    assert not reported.totals
    reported.note(1, "t", {f"n{number}": 1 for number in range(2 * NAMES_MAX)})
    assert len(reported.totals) == NAMES_MAX
    reported.note(2, "u", {"copies_failed": 3, "n0": 1})
    assert reported.totals["copies_failed"] == 3, "another tenant has names of its own"
    assert reported.totals["n0"] == 2


# -- ages --------------------------------------------------------------------------------------


def ages(clock: TickClock, now: float, *ticks: int) -> list[float]:
    return [float(age) for age in clock.ages_s(np.array(ticks, np.uint32), now)]


def test_ages() -> None:
    clock = TickClock(100.0)
    clock.note(0, 101.0)
    clock.note(10, 102.0)
    clock.note(10, 150.0)
    clock.note(20, 151.0)
    assert ages(clock, 160.0, 0, 1, 10, 11, 20, 21) == [59.0, 59.0, 59.0, 10.0, 10.0, 9.0]


def test_many_samples_stay_bounded_and_near() -> None:
    clock = TickClock(0.0)
    for second in range(1, 20_000):
        clock.note(7 * second, float(second))
    found = ages(clock, 20_000.0, 7 * 19_990, 7 * 10_000, 7 * 100)
    assert found == pytest.approx([10.0, 10_000.0, 19_900.0], rel=0.01, abs=2)


def test_a_clock_that_wrapped_starts_anew() -> None:
    clock = TickClock(0.0)
    clock.note(2**32 - 1, 1.0)
    clock.note(5, 2.0)
    clock.note(9, 3.0)
    assert ages(clock, 10.0, 7) == [8.0]


def test_many_counts_are_added_as_one_by_one() -> None:
    together, apart = Counters(COUNTERS), Counters(COUNTERS)
    many = {
        ("lookups", ""): 3,
        ("miss_keys", "absent"): 2,
        ("miss_keys", "epoch"): 0,
        ("evicted_blocks", "space"): 5,
    }
    for _ in range(2):
        together.add_all(many)
        for (name, label), count in many.items():
            apart.add(name, count, label)
        assert together.values() == apart.values()
    for place, count in ((("nothing", ""), 1), (("lookups", ""), -1), (("miss_keys", ""), 1)):
        with pytest.raises(ValueError, match="counter"):
            together.add_all({("commits", ""): 1, place: count})
    for number in range(40):
        together.add_all({("evicted_blocks", f"cause_{number}"): 1})
    assert together.get("evicted_blocks", OTHER) == 40 - LABEL_VALUES_MAX


def test_a_histogram_counts_many_as_it_counts_one_by_one() -> None:
    one, many = Histogram((1.0, 10.0)), Histogram((1.0, 10.0))
    values = [0.0, 1.0, 1.5, 10.0, 11.0, 500.0]
    for value in values:
        one.observe(value)
    many.observe_all(np.array(values))
    many.observe_all(np.zeros(0))
    assert many == one
    assert (many.counts, many.sum) == ([2, 2, 2], 523.5)
    assert list(SECONDS_BOUNDS) == sorted(SECONDS_BOUNDS)


# -- the lag of the loop ---------------------------------------------------------------------------


class SteppedLoop(asyncio.SelectorEventLoop):
    """A loop whose time stands while tasks run, and moves to the next timer when all wait."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(Steps(self))

    def time(self) -> float:
        return self.now


class Steps(selectors.SelectSelector):
    """Waits for nothing, and moves its loop's time instead."""

    def __init__(self, loop: SteppedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.now += timeout or 0.0
        return super().select(0)


def test_a_loop_that_is_held_lags() -> None:
    lag, loop = Histogram((0.001, 0.05)), SteppedLoop()

    async def work() -> None:
        watching = asyncio.create_task(watch_lag(lag, itertools.count().__next__, 0.01))
        await asyncio.sleep(0.035)
        assert lag.counts == [3, 0, 0]
        loop.now += 0.1
        await asyncio.sleep(0.005)
        watching.cancel()

    with contextlib.closing(loop):
        loop.run_until_complete(work())
    assert lag.counts == [3, 0, 1]
    assert lag.sum == pytest.approx(0.095)


def test_an_idle_loop_is_seldom_woken() -> None:
    lag, loop = Histogram((0.001, 0.05)), SteppedLoop()

    async def work() -> None:
        watching = asyncio.create_task(watch_lag(lag, lambda: 7, 0.001, 30.0))
        await asyncio.sleep(61.0)
        watching.cancel()

    with contextlib.closing(loop):
        loop.run_until_complete(work())
    assert sum(lag.counts) == 2
