"""The breaker opens after failures in a row, probes after a pause, and closes on an answer."""

from __future__ import annotations

import pytest

from kvhearth.errors import Reason
from kvhearth.fail_open import Breaker, BreakerState


def make(jitter: float = 1.0) -> Breaker:
    return Breaker(failures_max=3, backoff_s=1.0, backoff_max_s=4.0, jitter=lambda: jitter)


def fail(breaker: Breaker, now: float, times: int = 3) -> None:
    for _ in range(times):
        breaker.record(Reason.DEADLINE, now)


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = make()
    fail(breaker, 0.0, 2)
    breaker.record(None, 0.0)
    fail(breaker, 0.0, 2)
    assert breaker.allow(0.0)
    fail(breaker, 0.0, 1)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow(0.99)


def test_a_refusal_is_an_answer() -> None:
    breaker = make()
    fail(breaker, 0.0, 2)
    breaker.record(Reason.HELD_CAP, 0.0)
    fail(breaker, 0.0, 2)
    assert breaker.allow(0.0)


def test_one_probe_goes_through_and_closes_it() -> None:
    breaker = make()
    fail(breaker, 0.0)
    assert breaker.allow(1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allow(1.1)
    breaker.record(None, 1.2)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allow(1.2)


def test_failed_probes_double_the_pause_up_to_its_bound() -> None:
    breaker = make()
    fail(breaker, 0.0)
    now, pauses = 0.0, []
    for _ in range(5):
        start = now
        while not breaker.allow(now):
            now += 0.125
        pauses.append(now - start)
        breaker.record(Reason.DAEMON_AWAY, now)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_probe_that_never_ends_does_not_hold_the_next_one_for_ever() -> None:
    breaker = make()
    fail(breaker, 0.0)
    assert breaker.allow(1.0)
    assert not breaker.allow(1.5)
    assert breaker.allow(2.0)


def test_late_failures_while_open_do_not_move_the_probe() -> None:
    breaker = make()
    fail(breaker, 0.0)
    fail(breaker, 0.9, 5)
    assert breaker.allow(1.0)


@pytest.mark.parametrize(("jitter", "pause_s"), [(0.0, 0.5), (0.5, 0.75)])
def test_jitter_shortens_the_pause(jitter: float, pause_s: float) -> None:
    breaker = make(jitter)
    fail(breaker, 0.0)
    assert not breaker.allow(pause_s - 0.01)
    assert breaker.allow(pause_s)
