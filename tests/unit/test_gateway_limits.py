"""Bounds of identities: what is refused, why, and when there is room again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.scripted_clock import HandClock

from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import UnixUrl
from kvhearth_server.gateway.counters import ReportedCounters
from kvhearth_server.gateway.grants import Grants
from kvhearth_server.gateway.limits import IdentityLimits
from kvhearth_server.gateway.sessions import Sessions
from kvhearth_server.gateway.tokens import Bounds, Identity


class Held(Grants):
    """Grants of some blocks and bytes."""

    def __init__(self, blocks: int, size: int) -> None:
        super().__init__()
        self.now = blocks, size

    def held(self) -> tuple[int, int]:
        return self.now


def reason_of(work: Callable[[], None]) -> Reason:
    with pytest.raises(KVHearthError) as caught:
        work()
    assert "rack1" in caught.value.message
    reason: Reason = caught.value.reason
    return reason


def limits_of(
    met: Callable[[str], None] = lambda bound: None,
    *,
    clock: HandClock | None = None,
    **bounds: int,
) -> IdentityLimits:
    limits = IdentityLimits("rack1", met, clock or HandClock())
    limits.use(Bounds(**bounds))
    return limits


def test_sessions_and_connections_are_counted() -> None:
    met = list[str]()
    limits = limits_of(met.append, sessions=2, connections=2)
    for bound in ("sessions", "connections"):
        limits.enter(bound)
        limits.enter(bound)
        assert reason_of(lambda bound=bound: limits.enter(bound)) is Reason.TOO_MANY_SESSIONS
        limits.leave(bound)
        limits.enter(bound)
    assert met == ["sessions", "connections"]
    free = limits_of()
    for _ in range(1000):
        free.enter("sessions")


def test_calls_come_back_with_time() -> None:
    clock = HandClock()
    limits = limits_of(clock=clock, calls_per_s=10)
    for _ in range(10):
        limits.call()
    assert reason_of(limits.call) is Reason.QUOTA_EXCEEDED
    clock.now += 0.35
    for _ in range(3):
        limits.call()
    assert reason_of(limits.call) is Reason.QUOTA_EXCEEDED
    clock.now += 1000.0
    for _ in range(10):
        limits.call()
    assert reason_of(limits.call) is Reason.QUOTA_EXCEEDED


def test_held_memory_is_summed_over_groups() -> None:
    met = list[str]()
    limits = limits_of(met.append, held_bytes=1000, held_blocks=4)
    limits.admit(4, 1000)
    assert reason_of(lambda: limits.admit(5, 10)) is Reason.HELD_CAP
    assert reason_of(lambda: limits.admit(1, 1001)) is Reason.HELD_CAP
    first, second = Held(2, 500), Held(2, 100)
    limits.grants += [first, first, second]  # two sessions of one group
    assert reason_of(limits.admit) is Reason.HELD_CAP
    second.now = 0, 0
    limits.admit(2, 500)
    assert Counter(met) == {"held_blocks": 2, "held_bytes": 1}


def test_bounds_change_with_the_file() -> None:
    limits = limits_of(sessions=1)
    limits.enter("sessions")
    assert reason_of(lambda: limits.enter("sessions")) is Reason.TOO_MANY_SESSIONS
    limits.use(Bounds(sessions=2))
    limits.enter("sessions")


def test_limits_that_nobody_uses_are_forgotten() -> None:
    url = UnixUrl(Path("/nowhere"))
    sessions = Sessions(url, ReportedCounters(url), speaks=True)
    busy = sessions.limits_of(Identity("busy", "t"))
    with busy.connection():
        for number in range(5000):
            sessions.limits_of(Identity(f"n{number}", "t"))
        assert sessions.limits_of(Identity("busy", "t", bounds=Bounds(sessions=1))) is busy
    assert len(sessions._limits) <= 1025
