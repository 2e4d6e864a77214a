"""Bounds of identities: what is refused, why, and when there is room again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.gateway.identity import Bounds, Identity, Role
from kvhearth_server.gateway.meter import Meters


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def reason_of(work: Callable[[], None]) -> Reason:
    with pytest.raises(KVHearthError) as caught:
        work()
    assert "rack1" in caught.value.message
    reason: Reason = caught.value.reason
    return reason


def identity(**bounds: int) -> Identity:
    return Identity("rack1", "t", Role.ENGINE, Bounds(**bounds))


def test_sessions_and_connections_are_counted_over_the_identity() -> None:
    meters = Meters()
    for open_one, close_one in (
        ("open_session", "close_session"),
        ("open_connection", "close_connection"),
    ):
        for _ in range(2):
            getattr(meters.of(identity(sessions=2, connections=2)), open_one)()
        meter = meters.of(identity(sessions=2, connections=2))
        assert reason_of(getattr(meter, open_one)) is Reason.TOO_MANY_SESSIONS
        getattr(meter, close_one)()
        getattr(meter, open_one)()
    assert meters.refusals() == {"sessions": 1, "connections": 1}
    free = meters.of(Identity("other", "t"))
    for _ in range(1000):
        free.open_session()


def test_calls_come_back_with_time() -> None:
    clock = Clock()
    meter = Meters(clock=clock).of(identity(calls_per_s=10))
    for _ in range(10):
        meter.call()
    assert reason_of(meter.call) is Reason.QUOTA_EXCEEDED
    clock.now = 0.35
    for _ in range(3):
        meter.call()
    assert reason_of(meter.call) is Reason.QUOTA_EXCEEDED
    clock.now = 1000.0
    for _ in range(10):
        meter.call()
    assert reason_of(meter.call) is Reason.QUOTA_EXCEEDED


def test_held_memory_is_summed_over_sources() -> None:
    meter = Meters().of(identity(held_bytes=1000, held_blocks=4))
    meter.admit(4, 1000)
    assert reason_of(lambda: meter.admit(5, 10)) is Reason.HELD_CAP
    assert reason_of(lambda: meter.admit(1, 1001)) is Reason.HELD_CAP
    meter.hold("book 1", 2, 500)
    meter.hold("book 2", 2, 100)
    assert reason_of(meter.admit) is Reason.HELD_CAP
    meter.hold("book 2", 0, 0)
    meter.admit(2, 500)
    assert not meter.idle
    meter.hold("book 1", 0, 0)
    assert meter.idle
    assert meter.refusals == {"held_blocks": 2, "held_bytes": 1}


def test_bounds_change_with_the_file() -> None:
    meters = Meters()
    meter = meters.of(identity(sessions=1))
    meter.open_session()
    assert reason_of(meter.open_session) is Reason.TOO_MANY_SESSIONS
    assert meters.of(identity(sessions=2)) is meter
    meter.open_session()


def test_idle_meters_are_forgotten_and_their_refusals_are_not() -> None:
    meters = Meters()
    busy = meters.of(identity(sessions=1))
    busy.open_session()
    reason_of(busy.open_session)
    idle = meters.of(Identity("idle", "t", bounds=Bounds(connections=1)))
    idle.open_connection()
    with pytest.raises(KVHearthError):
        idle.open_connection()
    idle.close_connection()
    for number in range(5000):
        meters.of(Identity(f"n{number}", "t"))
    assert len(meters._meters) <= 1025
    assert meters.of(identity(sessions=1)) is busy
    assert meters.refusals() == {"sessions": 1, "connections": 1}
