"""Bytes that are not, or not quite, HTTP, beside a good engine.

Every answer is an HTTP response, and a rejection is a problem document with a reason.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.daemon import Daemon, until
from support.fuzz import depths, fuzz, pieces, refusals_by_reason, unharmed
from support.http_door import ANY_PORT, address_of, ask
from support.raw_door import RawSession, raw_contract

from kvhearth.errors import Reason
from kvhearth_lab.harness.engine import Engine
from kvhearth_server.config.rlimit import HTTP_MAX
from kvhearth_server.transport.web.server import STUCK_S

ANSWER_S = 10.0
QUIET_S = 0.05
"""Time to listen on a connection that may have nothing more to send."""


DAEMON = {"http": ANY_PORT}


def opened(daemon: Daemon) -> socket.socket:
    """Opens a connection to the daemon's HTTP server."""
    return socket.create_connection(address_of(daemon), timeout=ANSWER_S)


def heard(line: socket.socket, quiet_s: float = QUIET_S) -> tuple[bytes, bool]:
    """Returns the bytes received until a pause, and whether the daemon has hung up."""
    data = b""
    line.settimeout(quiet_s)
    while True:
        try:
            part = line.recv(1 << 16)
        except TimeoutError:
            return data, False
        except ConnectionResetError:
            return data, True
        if not part:
            return data, True
        data += part


class _Readable:
    """The part of a socket that ``HTTPResponse`` uses."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def makefile(self, _: str) -> io.BytesIO:
        return self._file


def answers(data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Returns the responses in ``data``; the last one may be cut off."""
    found = []
    while data:
        if data.startswith(b"HTTP/1.1 100 "):  # asks for a body, which may never come
            data = data[data.index(b"\r\n\r\n") + 4 :]
            continue
        response = http.client.HTTPResponse(_Readable(data))  # type: ignore[arg-type]
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        head = data.index(b"\r\n\r\n", data.index(b"HTTP/1.1 %d" % response.status)) + 4
        if "content-length" not in headers:  # uvicorn's own refusal, after which it hangs up
            assert (response.status, headers["connection"]) == (400, "close")
            return [*found, (400, headers, b"")]
        size = int(headers["content-length"])
        found.append((response.status, headers, data[head : head + size]))
        data = data[head + size :]
    return found


def judged(data: bytes) -> list[Reason]:
    """Returns the reasons of all rejections in ``data``; malformed rejections or responses fail.
    What is no HTTP, uvicorn refuses by itself.
    """
    reasons = []
    for status, headers, body in answers(data):
        assert status < 500, body
        if "content-length" not in headers:
            continue
        if status >= 300 and len(body) == int(headers["content-length"]):
            assert headers["content-type"] == "application/problem+json"
            found: dict[str, Any] = json.loads(body)
            assert found["status"] == status
            assert found["detail"]
            reasons.append(Reason(found["reason"]))
    return reasons


# -- inputs ----------------------------------------------------------------------------------------

junk = st.binary(max_size=40)
words = st.sampled_from(
    [b"", b"GET", b"POST", b"PUT", b"get", b"G\0T", b"PRI", b"CONNECT", b"A" * 99]
)
TARGETS = (
    b"/livez /metrics /v1/stats /v1/namespaces/x:evict * // /%00 /% /livez#x /readyz?a=b".split()
)
targets = st.sampled_from([*TARGETS, b"/" + b"a" * 20_000, b"http://evil.example/livez", b"\xff"])
versions = st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"http/1.1", b""])
HEADERS = rb"""Host: localhost|Host: evil.example|Host:|host : x|Content-Length: 5
Content-Length: -1|Content-Length: 5, 6|Content-Length: 1e3|Content-Length: |Content-Length: +5
Content-Length: 70000|Content-Length: 99999999999999999999999|Transfer-Encoding: chunked
Transfer-Encoding: gzip, chunked|Transfer-Encoding: x|Expect: 100-continue|Connection: close
Connection: upgrade|Upgrade: websocket|Upgrade: h2c| folded|no colon
Content-Type: application/json"""
BAD_HEADERS = (b"X: " + b"x" * 30_000, b"\0: \0", b"X: \xff", b"Authorization: Bearer \xff")
headers = st.sampled_from([*HEADERS.replace(b"\n", b"|").split(b"|"), *BAD_HEADERS])
BODIES = (b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"f" * 17 + b"\r\n", b"-1\r\n", b"\r\n" * 10)
LONG = (b"5;" + b"e" * 9000, b"x" * 70_000, b"4000\r\n" + b"x" * 0x4000, b"0\r\nTrailer: x\r\n\r\n")
bodies = st.sampled_from([*BODIES, *LONG])
ends = st.sampled_from([b"\r\n", b"\n", b"\r"])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Draws something like a request: most of it right, so that the rest gets far."""
    if draw(st.integers(0, 9)) == 0:
        return draw(junk)
    end = draw(ends) if draw(st.integers(0, 9)) == 0 else b"\r\n"
    first = [draw(words), draw(targets), draw(versions)]
    if draw(st.booleans()):
        first = [draw(st.sampled_from([b"GET", b"POST"])), draw(targets), b"HTTP/1.1"]
    lines = [b" ".join(first)]
    if draw(st.booleans()):
        lines.append(b"Host: localhost")
    lines += draw(st.lists(headers, max_size=4))
    return end.join(lines) + end + end + draw(bodies)


GOOD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/admin:drain HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@depths(150)
def test_any_bytes(daemon: Daemon, neighbour: Engine, examples: int) -> None:
    reported: list[Reason] = []

    @settings(fuzz, max_examples=examples)
    @given(st.lists(requests(), max_size=4), st.lists(st.integers(0, 99_999), max_size=3))
    @example([GOOD, b"\x16\x03\x01\r\n\r\n"], [])
    @example([GOOD * 50], [])
    @example([CHUNKED + b"zz\r\n"], [])
    @example([CHUNKED + b"4000\r\n" + b"x" * 0x4000 + b"\r\n4000\r\n", b"x" * 70_000, b"zz"], [])
    @example([b"\r\n" * 1000, GOOD], [2])
    def send(parts: list[bytes], cuts: list[int]) -> None:
        data = b"".join(parts)
        with opened(daemon) as line:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for piece in pieces(data, cuts):
                    line.sendall(piece)
            found, _ = heard(line)
            reported.extend(judged(found))

    before = refusals_by_reason(daemon)
    with unharmed(daemon, neighbour):
        send()
    after = refusals_by_reason(daemon)
    for reason in set(reported) - {Reason.NO_SUCH_PATH}:  # a wrong path is no refusal
        assert after[reason] - before[reason] >= reported.count(reason)
    assert ask(daemon, "/readyz").status == 200


def test_a_good_request_before_bad_ones_is_answered(daemon: Daemon, neighbour: Engine) -> None:
    with unharmed(daemon, neighbour), opened(daemon) as line:
        line.sendall(GOOD * 20 + b"what?\r\n\r\n" + GOOD)
        found, ended = heard(line, ANSWER_S)
        assert ended
        statuses = [status for status, _, _ in answers(found)]
        assert statuses == [200] * 20 + [400]
        assert judged(found) == []


# -- incomplete requests ---------------------------------------------------------------------------


SIZED, CHUNKS = b"Content-Length: 18\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
HALVES = (SIZED, SIZED + b'{"keep_bytes"', CHUNKS, CHUNKS + b"zz\r\n")


def evictions_of(daemon: Daemon, namespace: bytes) -> int:
    """Returns how many evictions of a namespace the daemon has logged."""
    return sum("admin.evict" in line and namespace.decode() in line for line in daemon.own_lines())


@pytest.mark.parametrize("sent", HALVES)
def test_half_a_body_does_nothing(daemon: Daemon, neighbour: Engine, sent: bytes) -> None:
    """Without its body the action would evict everything not held. The log tells whether it ran,
    because the neighbour evicts blocks, too.
    """
    token = (daemon.socket_dir / "admin.token").read_bytes()
    contract = raw_contract(model="halved").to_json()
    with unharmed(daemon, neighbour), RawSession(daemon, contract=contract) as session:
        keys, _ = session.store(4)
        space = session.welcome["namespace"].encode()
        before = refusals_by_reason(daemon)[Reason.BAD_MESSAGE]
        evictions = evictions_of(daemon, space)
        with opened(daemon) as line:
            line.sendall(b"POST /v1/namespaces/%b:evict HTTP/1.1\r\nHost: localhost\r\n" % space)
            line.sendall(b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n" % token)
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
        until(lambda: refusals_by_reason(daemon)[Reason.BAD_MESSAGE] == before + 1, "it is counted")
        path = f"/v1/namespaces/{space.decode()}:evict"
        assert ask(daemon, path, "POST", b"{}", admin=True).status == 200
        assert session.lookup(keys).groups[0].present == b"\0"
        assert evictions_of(daemon, space) == evictions + 1, (
            "the whole request alone is carried out"
        )


# -- too many, too slow ----------------------------------------------------------------------------


def test_silent_connections_have_a_bound(daemon: Daemon, neighbour: Engine) -> None:
    ask(daemon, "/livez")
    before = daemon.descriptor_count()
    with unharmed(daemon, neighbour), contextlib.ExitStack() as lines:
        for number in range(HTTP_MAX + 100):
            line = lines.enter_context(opened(daemon))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                line.sendall(b"GET /li"[: number % 8])
        assert ask(daemon, "/livez").status == 200
        assert daemon.descriptor_count() <= before + HTTP_MAX + 20


def dripping(line: socket.socket, drip: bytes, most_s: float) -> tuple[float, bytes]:
    """Sends ``drip`` repeatedly; returns the time until the daemon hung up, and its answer."""
    started, data, ended = time.monotonic(), b"", False
    while not ended and time.monotonic() < started + most_s:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            line.sendall(drip)
        more, ended = heard(line, 0.2)
        data += more
    return time.monotonic() - started, data


SLOW = {
    "a head": (b"GET /livez HTTP/1.1\r\n", b"A: b\r\n"),
    "a second head": (GOOD + b"GET", b"A"),
    "a body": (CHUNKED, b"1\r\nx\r\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_slow_senders_are_ended(daemon: Daemon, neighbour: Engine, name: str) -> None:
    first, drip = SLOW[name]
    with unharmed(daemon, neighbour), opened(daemon) as line:
        line.sendall(first)
        took_s, data = dripping(line, drip, 2 * STUCK_S)
        assert took_s < 1.5 * STUCK_S
        assert judged(data) == ([Reason.DEADLINE] if name == "a body" else [])


@pytest.mark.slow
def test_a_peer_that_reads_nothing_is_ended(daemon: Daemon, neighbour: Engine) -> None:
    before = daemon.descriptor_count()
    with unharmed(daemon, neighbour), opened(daemon) as line:
        line.settimeout(1.0)
        ask_again = GOOD.replace(b"/livez", b"/openapi.json") * 100
        with contextlib.suppress(TimeoutError, ConnectionResetError, BrokenPipeError):
            for _ in range(1000):
                line.sendall(ask_again)
        until(lambda: daemon.descriptor_count() <= before, "it is ended", 2 * STUCK_S)


@pytest.mark.slow
def test_a_silent_peer_is_ended(daemon: Daemon, neighbour: Engine) -> None:
    with unharmed(daemon, neighbour), opened(daemon) as silent, opened(daemon) as idle:
        idle.sendall(GOOD)
        assert heard(silent, 2 * STUCK_S) == (b"", True)
        assert heard(idle, 2 * STUCK_S)[1]
