"""A gateway's listening socket: ports that are taken, for a moment or for good."""

from __future__ import annotations

import itertools
import socket
import time
from types import SimpleNamespace

import pytest

from kvhearth.errors import KVHearthError, Reason
from kvhearth.transports.tcp import Dialer
from kvhearth.url import RemoteUrl, parse_url
from kvhearth.wire.remote import Purpose
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.gateway import process
from kvhearth_server.gateway.process import listen

HOST = "127.0.0.1"


def test_a_port_that_a_dying_gateway_holds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = listen(HOST, 0)
    port = before.getsockname()[1]
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: before.close())
    monkeypatch.setattr(process, "time", clock)
    with listen(HOST, port) as after:
        assert after.getsockname()[1] == port


def test_a_port_that_stays_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None)
    monkeypatch.setattr(process, "time", clock)
    with listen(HOST, 0) as before, pytest.raises(KVHearthError, match="give a free port") as info:
        listen(HOST, before.getsockname()[1])
    assert info.value.reason is Reason.SOCKET_UNUSABLE


def test_a_connection_to_itself_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may choose the port that a client connects to for its own end."""
    with socket.socket() as line:
        line.bind((HOST, 0))
        port = line.getsockname()[1]
        line.connect((HOST, port))
        assert line.getsockname() == line.getpeername()
        monkeypatch.setattr(socket, "create_connection", lambda *_: line)
        url = parse_url(f"kvhearth://{HOST}:{port}")
        assert isinstance(url, RemoteUrl)
        with pytest.raises(ConnectionRefusedError):
            Dialer(url).connect(Purpose.CALLS, time.monotonic() + HUNG_S)
