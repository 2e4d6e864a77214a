"""The lab's relay carries every byte, and breaks where it is told to."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator

import pytest

from kvhearth.wire.remote import Purpose, preface
from kvhearth_lab.harness.relay import Relay

WAIT_S = 10.0
SHORT_S = 0.2


class Lines:
    """A relay, and connections whose both ends a test holds."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.relay = Relay(self.port)
        self._open = [self._listener]

    def connect(self, purpose: Purpose) -> tuple[socket.socket, socket.socket]:
        """Return the client's end and the gateway's of a connection whose preface was carried."""
        near = socket.create_connection((self.relay.host, self.port), WAIT_S)
        near.sendall(preface(purpose))
        far, _ = self._listener.accept()
        self._open += [near, far]
        far.settimeout(WAIT_S)
        assert whole(far, len(preface(purpose))) == preface(purpose)
        return near, far

    def close(self) -> None:
        """Close everything."""
        self.relay.stop()
        for each in self._open:
            each.close()


@pytest.fixture
def lines() -> Iterator[Lines]:
    made = Lines()
    yield made
    made.close()


def whole(end: socket.socket, size: int) -> bytes:
    """Return the next ``size`` bytes; fewer if the stream ends."""
    data = b""
    while len(data) < size and (more := end.recv(size - len(data))):
        data += more
    return data


def is_silent(end: socket.socket) -> bool:
    """Return whether a connection is open and brings nothing for a while."""
    end.settimeout(SHORT_S)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(WAIT_S)
    return False


def test_bytes_are_carried_both_ways_and_connections_counted(lines: Lines) -> None:
    near, far = lines.connect(Purpose.DATA)
    data = os.urandom(1 << 20)
    near.sendall(data)
    assert whole(far, 1 << 20) == data
    far.sendall(data[:100])
    assert whole(near, 100) == data[:100]
    lines.connect(Purpose.CALLS)
    assert lines.relay.counts == {Purpose.LIFE_LINE: 0, Purpose.CALLS: 1, Purpose.DATA: 1}
    near.close()
    assert whole(far, 1) == b""


@pytest.mark.parametrize("after_bytes", [0, 1, 999])
def test_a_trap_is_sprung_after_that_many_bytes_of_its_purpose(
    lines: Lines, after_bytes: int
) -> None:
    sprung: queue.SimpleQueue[int] = queue.SimpleQueue()
    near, far = lines.connect(Purpose.DATA)
    calls, far_calls = lines.connect(Purpose.CALLS)

    def cut() -> None:
        sprung.put(lines.relay.cut(Purpose.DATA))

    lines.relay.trap(Purpose.DATA, after_bytes, cut)
    calls.sendall(bytes(5000))
    assert whole(far_calls, 5000) == bytes(5000)
    assert lines.relay.armed
    near.sendall(bytes(1000))
    assert whole(far, 1000) == bytes(after_bytes)
    assert sprung.get(timeout=WAIT_S) == 1
    assert not lines.relay.disarm()
    assert is_silent(far_calls), "connections of other purposes live"
    lines.relay.trap(Purpose.DATA, 1, cut)
    assert lines.relay.disarm(), "not sprung"


def test_one_direction_ends(lines: Lines) -> None:
    near, far = lines.connect(Purpose.CALLS)
    lines.relay.half_close(Purpose.CALLS, near=True)
    assert whole(near, 1) == b""
    near.sendall(b"on")
    assert whole(far, 2) == b"on"


def test_a_network_holds_and_is_away(lines: Lines) -> None:
    near, far = lines.connect(Purpose.DATA)
    lines.relay.held = True
    near.sendall(b"late")
    assert is_silent(far)
    lines.relay.held = False
    assert whole(far, 4) == b"late"
    lines.relay.away = True
    with socket.create_connection((lines.relay.host, lines.port), WAIT_S) as refused:
        assert whole(refused, 1) == b""
    lines.relay.away = False
    lines.connect(Purpose.DATA)
