"""One warning of each kind in an interval, with the number of those suppressed."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvhearth_server.observability import logs
from kvhearth_server.observability.logs import (
    FOREIGN_CHARS_MAX,
    KINDS_MAX,
    LimitedLog,
    LimitedRecords,
    Throttle,
)


class Clock:
    """A clock in seconds that only the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    out = io.StringIO()
    logs.configure("info", "json", out)
    yield out
    root.setLevel(level)
    root.handlers[:] = handlers
    structlog.reset_defaults()


def lines(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_flood_is_one_a_second_with_a_count(clock: Clock, written: io.StringIO) -> None:
    log = LimitedLog(logs.get_logger("kvhearth.test"), Throttle(1.0, clock))
    for number in range(1000):
        log.warning("refused", kind="bad_message", uid=number)
    log.warning("refused", kind="deadline", uid=7)
    clock.now += 1.0
    log.warning("refused", kind="bad_message", uid=8)
    clock.now += 5.0
    log.warning("refused", kind="bad_message", uid=9)
    found = [(line["uid"], line.get("suppressed"), line["level"]) for line in lines(written)]
    assert found == [
        (0, None, "warning"),
        (7, None, "warning"),
        (8, 999, "warning"),
        (9, None, "warning"),
    ]


def test_a_burst_passes_and_the_rest_is_counted(clock: Clock, written: io.StringIO) -> None:
    log = LimitedLog(logs.get_logger("kvhearth.test"), Throttle(1.0, clock, burst=3))
    for number in range(10):
        log.info("engine.attached", kind="engine.attached", pid=number)
    clock.now += 0.9
    log.info("engine.attached", kind="engine.attached", pid=10)
    clock.now += 0.1
    log.info("engine.attached", kind="engine.attached", pid=11)
    log.info("engine.attached", kind="engine.attached", pid=12)
    found = [(line["pid"], line.get("suppressed"), line["level"]) for line in lines(written)]
    assert found == [
        (n, s, "info") for n, s in [(0, None), (1, None), (2, None), (11, 8), (12, None)]
    ]


def test_kinds_have_a_bound(clock: Clock) -> None:
    throttle = Throttle(1.0, clock)
    admitted = [throttle.admit(f"k{number}") for number in range(10 * KINDS_MAX)]
    assert admitted.count(0) == KINDS_MAX + 1
    clock.now += 1.0
    assert throttle.admit("k0") == 0
    assert throttle.admit("another") == 9 * KINDS_MAX - 1


def test_other_packages_records_by_their_place_in_the_code(
    clock: Clock, written: io.StringIO
) -> None:
    """Errors too: a peer can cause both, and choose the text."""
    log = logging.getLogger("grpc.test.records")
    log.addFilter(LimitedRecords(Throttle(1.0, clock)))
    for number in range(10):
        log.warning(f"no HTTP from {number}")
        log.error("no file for %d", number)
    clock.now += 1.0
    for number in range(10, 12):
        log.warning(f"no HTTP from {number}")
    found = [(line["event"], line.get("suppressed")) for line in lines(written)]
    assert found == [
        ("no HTTP from 0", None),
        ("no file for 0", None),
        ("no HTTP from 10", None),
    ]


def test_a_flood_of_another_package_does_not_reach_the_log(written: io.StringIO) -> None:
    log = logging.getLogger("uvicorn.error")
    for number in range(10_000):
        log.error(f"{number} " + "x" * 10_000)
    assert 1 <= len(lines(written)) < 100
    assert len(written.getvalue()) < 100 * (FOREIGN_CHARS_MAX + 500)


def test_our_own_records_all_pass(written: io.StringIO) -> None:
    log = logs.get_logger("kvhearth.test")
    for number in range(100):
        log.error("a bug", number=number)
    assert [line["number"] for line in lines(written)] == list(range(100))
