"""The breaker, and the caller's rule that nothing is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.scripted_clock import ScriptedClock

from kvhearth.clock import REAL_TIME, Clock
from kvhearth.counters import Counters
from kvhearth.errors import KVHearthError, Reason
from kvhearth.fail_open import Breaker, BreakerState, Caller
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.transports.base import LOOKUP


def make(jitter: float = 1.0) -> Breaker:
    return Breaker(failures_max=3, backoff_s=1.0, backoff_max_s=4.0, jitter=lambda: jitter)


def fail(breaker: Breaker, now: float, times: int = 3) -> None:
    for _ in range(times):
        breaker.record(Reason.DEADLINE, now)


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


@pytest.mark.parametrize(("jitter", "pause_s"), [(0.0, 0.5), (0.5, 0.75)])
def test_jitter_shortens_the_pause(jitter: float, pause_s: float) -> None:
    breaker = make(jitter)
    fail(breaker, 0.0)
    assert not breaker.allow(pause_s - 0.01)
    assert breaker.allow(pause_s)


class Line:
    """A session, its transport and its manager, as far as a caller sees them."""

    def __init__(self, *, has_connection: bool = True, living: bool = True) -> None:
        self.session = self.transport = self
        self.link: Line | None = self
        self.refusal = None
        self.boot_id = "b"
        self.is_warm, self.living = has_connection, living
        self.fails: Reason | None = None
        self.answers_as = "b"
        self.asked = self.called = 0
        self.lost: list[object] = []

    def has_connection(self) -> bool:
        return self.is_warm

    def alive(self) -> bool:
        self.asked += 1
        return self.living

    def lose(self, link: Line, why: object) -> None:
        self.link = None
        self.lost.append(why)

    def call(self, *_: object) -> pb.LookupResponse:
        self.called += 1
        if self.fails is not None:
            raise KVHearthError(self.fails, "as the test says")
        return pb.LookupResponse(boot_id=self.answers_as)


def caller_of(line: Line, *, clock: Clock = REAL_TIME, decides: bool = True) -> Caller:
    session_manager: Any = line
    return Caller(session_manager, Counters(), clock, decides=decides)


def ask(caller: Caller) -> Any:
    return caller.call(caller.link_to_ask(), LOOKUP, pb.LookupRequest(), 1.0)


def refused(work: Callable[[], object]) -> KVHearthError:
    with pytest.raises(KVHearthError) as caught:
        work()
    return caught.value


def test_a_call_on_a_connection_that_is_there_asks_nothing_more() -> None:
    line = Line()
    assert ask(caller_of(line)).boot_id == "b"
    assert (line.asked, line.called) == (0, 1)


@pytest.mark.parametrize("has_connection", [True, False])
def test_without_a_call_the_life_line_is_asked(has_connection: bool) -> None:
    line = Line(has_connection=has_connection, living=False)
    assert refused(caller_of(line).link).reason is Reason.DAEMON_AWAY
    assert len(line.lost) == 1


@pytest.mark.parametrize(
    ("fails", "lost"),
    [
        (Reason.DAEMON_AWAY, 0),
        (Reason.DEADLINE, 0),
        (Reason.STALE_EPOCH, 0),
        (Reason.UNKNOWN_TOKEN, 1),
    ],
)
def test_a_daemon_that_lives_is_taken_at_its_word(fails: Reason, lost: int) -> None:
    line = Line()
    line.fails = fails
    assert refused(lambda: ask(caller_of(line))).reason is fails
    assert len(line.lost) == lost


def test_the_answer_of_another_daemon_is_not_taken() -> None:
    line = Line()
    line.answers_as = "c"
    assert refused(lambda: ask(caller_of(line))).reason is Reason.STALE_BOOT
    assert len(line.lost) == 1


def test_only_who_decides_has_a_link() -> None:
    line = Line()
    caller = caller_of(line, decides=False)
    for link in (caller.link, caller.link_to_ask, caller.held_link):
        assert refused(link).reason is Reason.NOT_SCHEDULER


def test_after_three_silences_nothing_is_sent_for_a_while(clock: ScriptedClock) -> None:
    line = Line()
    line.fails = Reason.DEADLINE
    caller = caller_of(line, clock=clock)
    for _ in range(5):
        refused(lambda: ask(caller))
    assert line.called == 3
    clock.pass_time(60)
    refused(lambda: ask(caller))
    assert line.called == 4


def test_an_answer_makes_the_breaker_forget() -> None:
    line = Line()
    caller = caller_of(line)
    for fails in (Reason.DEADLINE, Reason.DEADLINE, None) * 3:
        line.fails = fails
        if fails is None:
            ask(caller)
        else:
            refused(lambda: ask(caller))
    assert line.called == 9
