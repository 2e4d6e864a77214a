"""Attacks on the doors themselves: gRPC's server, its windows, all descriptors, the log."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from kvhearth.url import ATTACH_SOCKET, CALLS_SOCKET, GRPC_SOCKET
from kvhearth.wire.frames import SERVICE, TOKEN_KEY
from kvhearth_lab.hostile.attack import NOBODY, TENANT_A, Attack, Target
from kvhearth_lab.hostile.attacks_general import HTTP, enter, knock

_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY = 0, 1, 4, 6, 7
_END_STREAM, _END_HEADERS = 1, 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ANSWER_S = 10.0
_MESSAGE_BYTES = 4 << 20
_METHOD = f"/{SERVICE}/Heartbeat".encode()


def http2(kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
    """Return one HTTP/2 frame."""
    size = len(payload).to_bytes(3, "big")
    return size + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def field(name: bytes, value: bytes) -> bytes:
    """Return a header as an HPACK literal with a new name."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call(path: bytes, *fields: bytes, stream: int = 1, flags: int = 0) -> bytes:
    """Return the headers of a gRPC call."""
    words = [b"\x83\x86\x04", bytes([len(path)]), path, b"\x01\x01a", field(b"te", b"trailers")]
    words += [field(b"content-type", b"application/grpc"), *fields]
    return http2(_HEADERS, stream, b"".join(words), flags | _END_HEADERS)


_OPENING = _PREFACE + http2(_SETTINGS, 0, b"")


class BadPath(Attack):
    """A call whose path is no UTF-8, which ends grpcio's server, again and again."""

    name = "bad_path"
    help = "nobody sends a call whose path is no UTF-8 to the gRPC socket, again and again"
    who = NOBODY
    pause_s = 0.02

    def run(self, target: Target, number: int) -> Iterator[None]:
        """See ``Attack.run``."""
        hostile = _OPENING + call(b"/\xff", flags=_END_STREAM)
        while True:
            # Refused while the door is shut.
            with contextlib.suppress(OSError), knock(target, GRPC_SOCKET) as line:
                line.sendall(hostile)
                while line.recv(4096):
                    pass
            yield

    def check(self, target: Target, log: Sequence[str]) -> list[str]:
        """See ``Attack.check``: the door is opened again, and nothing but that is told."""
        missed = tracebacks(log)
        deadline = _ANSWER_S
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.settimeout(deadline)
            line.connect(str(Path(target.socket_dir) / GRPC_SOCKET))
            line.sendall(_OPENING)
            if line.recv(4096):
                return missed
        return [*missed, "grpc_door_shut"]


class GrpcFlood(Attack):
    """Calls with as many bytes as the windows take and messages that never end.

    gRPC would receive each message before it asks who calls.
    """

    help = "nobody sends calls of 4 MiB without a token to the gRPC socket, each as far as it may"
    name = "grpc_flood"
    who = NOBODY
    pause_s = 0.005
    connections: ClassVar[int] = 100
    streams: ClassVar[int] = 30

    def run(self, target: Target, number: int) -> Iterator[None]:
        """See ``Attack.run``."""
        fields = self.fields(target)
        begun = struct.pack(">BI", 0, _MESSAGE_BYTES)
        numbers = range(1, 2 * self.streams, 2)
        opening = _OPENING + b"".join(
            call(_METHOD, *fields, stream=each) + http2(_DATA, each, begun) for each in numbers
        )
        # 64 KiB a connection are allowed before the peer grants more.
        more = b"".join(http2(_DATA, each, bytes(2000)) for each in numbers)
        held: dict[int, socket.socket] = {}
        ended = select.poll()
        while True:
            with contextlib.suppress(OSError):
                if len(held) < self.connections:
                    line = knock(target, GRPC_SOCKET)
                    held[line.fileno()] = line
                    ended.register(line, select.POLLRDHUP)
                    line.sendall(opening)
                    line.sendall(more)
            for descriptor, _ in ended.poll(0):
                ended.unregister(descriptor)
                held.pop(descriptor).close()
            yield

    def fields(self, target: Target) -> list[bytes]:
        """Return further headers of each call."""
        return []


class GrpcSlowMessages(GrpcFlood):
    """The same with a token: messages of a session that never end."""

    name = "grpc_slow_messages"
    help = "tenant a begins calls of 4 MiB over gRPC with its token and never ends one"
    who = TENANT_A
    connections = 30

    def fields(self, target: Target) -> list[bytes]:
        """See ``GrpcFlood.fields``."""
        self._session = enter(target, "slow-messages")  # lives as long as this process
        return [field(TOKEN_KEY.encode(), self._session.welcome.token.encode())]


class AllDescriptors(Attack):
    """Silent connections to all doors at once, as many as they take."""

    name = "all_descriptors"
    help = "nobody holds 1,000 silent connections to each door at once"
    who = NOBODY
    pause_s = 0.02
    connections: ClassVar[int] = 1000
    portion: ClassVar[int] = 50

    def run(self, target: Target, number: int) -> Iterator[None]:
        """See ``Attack.run``."""
        doors = (GRPC_SOCKET, CALLS_SOCKET, ATTACH_SOCKET, HTTP)
        held: dict[int, tuple[str, socket.socket]] = {}
        ended = select.poll()
        while True:
            for door in doors:
                count = sum(each == door for each, _ in held.values())
                with contextlib.suppress(OSError):
                    for _ in range(min(self.portion, self.connections - count)):
                        line = knock(target, door)
                        held[line.fileno()] = door, line
                        ended.register(line, select.POLLRDHUP)
            for descriptor, _ in ended.poll(0):
                ended.unregister(descriptor)
                held.pop(descriptor)[1].close()
            yield

    def check(self, target: Target, log: Sequence[str]) -> list[str]:
        """See ``Attack.check``."""
        return ["descriptors"] if any("Too many open files" in line for line in log) else []


class ForgedLog(Attack):
    """Texts that gRPC and uvicorn would log: GOAWAY with line feeds and escapes, a HEAD request
    whose body is none, a path with escapes.
    """

    name = "forged_log"
    help = "nobody sends what libraries would write into the log as it came"
    who = NOBODY
    pause_s = 0.001
    forged: ClassVar[bytes] = b'forged\n\x1b[31m{"event": "forged"}'

    def run(self, target: Target, number: int) -> Iterator[None]:
        """See ``Attack.run``."""
        goaway = http2(_GOAWAY, 0, struct.pack(">II", 0, 2) + self.forged)
        head = b"HEAD /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        bad_head = head + b"Transfer-Encoding: chunked\r\n\r\nnone\r\n\r\n"
        path = call(b"/\x1b[31mforged/x", flags=_END_STREAM)
        while True:
            with contextlib.suppress(OSError), knock(target, GRPC_SOCKET) as line:
                line.sendall(_OPENING + path + goaway * 20 + http2(_PING, 0, bytes(8)))
                line.recv(4096)
            with contextlib.suppress(OSError), knock(target, HTTP) as line:
                line.sendall(bad_head)
                line.recv(4096)
            yield

    def check(self, target: Target, log: Sequence[str]) -> list[str]:
        """See ``Attack.check``."""
        forged = any(_event(line) in ("", "forged") for line in log)
        return [*tracebacks(log), *(["forged_lines"] if forged else [])]


def tracebacks(log: Sequence[str]) -> list[str]:
    """Return the name of the measure if the daemon has logged an exception."""
    return ["tracebacks"] if any("Traceback" in line for line in log) else []


def _event(line: str) -> str:
    """Return the event of a log line, "" for any other line."""
    with contextlib.suppress(ValueError):
        said = json.loads(line)
        if isinstance(said, dict):
            return str(said.get("event", ""))
    return ""
