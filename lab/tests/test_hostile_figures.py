"""Figures of ``kvhearth hostile``: each bound by itself, repetitions, the object's sums."""

from __future__ import annotations

import dataclasses

import pytest

from kvhearth_lab.hostile.figures import Calls, Row, least

MIB = 1 << 20
QUIET = Calls(100, 0.4, 0.6, 0.9)


def row(**changes: object) -> Row:
    """Returns a row that misses nothing, with changes."""
    good = Row(
        name="x",
        idle=QUIET,
        under=QUIET,
        after=QUIET,
        rss_before=100 * MIB,
        rss_max=100 * MIB,
        rss_after=100 * MIB,
        descriptors_before=30,
        descriptors_max=900,
        descriptors_after=30,
    )
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


def test_calls() -> None:
    found = Calls.of([each / 1000 for each in range(1, 201)])
    assert (found.count, found.p50_ms, found.p99_ms, found.max_ms) == (200, 100.5, 199.0, 200.0)
    assert Calls.of([]) == Calls()


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"under": Calls(100, 1, 5.0, 80)}, []),  # 5 x the least idle p99, not 8 x the measured
        ({"under": Calls(100, 1, 5.1, 80)}, ["p99"]),
        ({"idle": Calls(100, 1, 4.0, 9), "under": Calls(100, 1, 19.9, 80)}, []),
        ({"under": Calls(100, 1, 5.1, 80), "floods": True}, []),
        ({"under": Calls(), "floods": True}, ["p99"]),
        ({"under": Calls()}, ["p99"]),  # no call at all is no good figure
        ({"late": 1}, ["deadline"]),
        ({"errors": {"load: deadline": 1}}, ["errors"]),
        ({"wrong": ["w"]}, ["wrong"]),
        ({"lost": ["l"]}, ["lost"]),
        ({"rss_max": 164 * MIB}, []),
        ({"rss_max": 165 * MIB}, ["rss"]),
        ({"rss_after": 116 * MIB}, []),
        ({"rss_after": 117 * MIB}, ["rss_after"]),
        ({"descriptors_after": 31}, ["descriptors"]),
        ({"livez_s": 1.1}, ["livez"]),
        ({"restarts": 1}, ["restarts"]),
        ({"failures": ["f"]}, ["attack"]),
        ({"own": ["log"]}, ["log"]),
    ],
)
def test_each_bound(changes: dict[str, object], missed: list[str]) -> None:
    assert row(**changes).missed() == missed


def test_the_least_of_repetitions_keeps_what_else_went_wrong() -> None:
    slow = row(under=Calls(100, 1, 60, 80))
    bad = row(
        under=Calls(100, 1, 9, 80),
        rss_max=900 * MIB,
        restarts=1,
        lost=["block 1"],
        failures=["f"],
    )
    good = row(under=Calls(100, 1, 2, 80))
    late = row(late=1, errors={"load: deadline": 1})
    found = least([slow, bad, good, late])
    assert found.factor == 2.0
    assert sorted(found.missed()) == ["attack", "lost", "restarts", "rss"]
