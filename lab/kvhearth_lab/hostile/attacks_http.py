"""Floods of whole HTTP requests: scrapes, lists and probes on many connections, and churn."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator
from typing import ClassVar

from kvhearth_lab.hostile.attack import NOBODY, Attack, Target

_CONNECT_S = 1.0
_TURN_S = 0.05
_READ_BYTES = 1 << 18


class HttpFlood(Attack):
    """Requests on many connections, each with the next one as soon as an answer begins to come."""

    who = NOBODY
    pause_s = 0.002
    floods = True
    connections: ClassVar[int] = 200
    path: ClassVar[str] = "/metrics"

    def run(self, target: Target, number: int) -> Iterator[None]:
        request = f"GET {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        with contextlib.ExitStack() as undo:
            poll, lines = select.poll(), dict[int, socket.socket]()
            undo.callback(_close, lines)
            while True:
                with contextlib.suppress(OSError):  # as many as the daemon takes now
                    while len(lines) < self.connections:
                        line = socket.create_connection(target.http_address, _CONNECT_S)
                        lines[line.fileno()] = line
                        poll.register(line, select.POLLIN)
                        line.setblocking(False)
                        line.send(request)
                for descriptor, _ in poll.poll(_TURN_S * 1000):
                    if not _again(lines[descriptor], request):
                        poll.unregister(descriptor)
                        lines.pop(descriptor).close()
                yield


def _close(lines: dict[int, socket.socket]) -> None:
    for line in lines.values():
        line.close()


def _again(line: socket.socket, request: bytes) -> bool:
    """Read what has come and ask again; return False if the daemon has ended the connection."""
    try:
        if not line.recv(_READ_BYTES):
            return False
        line.send(request)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True


class HttpScrapes(HttpFlood):
    """Scrapes, which cost a rendering each where none is shared."""

    name = "http_scrapes"
    help = "nobody scrapes /metrics on 200 connections at full speed"


class HttpLists(HttpFlood):
    """Lists of all tenants' namespaces, which need a token."""

    name = "http_lists"
    help = "nobody asks for /v1/namespaces on 200 connections at full speed"
    path = "/v1/namespaces"


class HttpProbes(HttpFlood):
    """Probes, which go before other requests."""

    name = "http_probes"
    help = "nobody asks for /livez on 200 connections at full speed"
    path = "/livez"


class HttpChurn(Attack):
    """Connections that ask once and close, sometimes before the answer."""

    name = "http_churn"
    help = "nobody connects, asks for /v1/stats and closes at full speed"
    who = NOBODY
    processes = 4
    pause_s = 0.001

    def run(self, target: Target, number: int) -> Iterator[None]:
        request = b"GET /v1/stats HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        count = 0
        while True:
            count += 1
            with socket.create_connection(target.http_address, _CONNECT_S) as line:
                line.sendall(request)
                if count % 3:
                    line.recv(_READ_BYTES)
            yield
