"""Attacks on the doors themselves: all descriptors, the log."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvhearth.url import ATTACH_SOCKET, CALLS_SOCKET
from kvhearth_lab.hostile.attack import NOBODY, Attack, Target
from kvhearth_lab.hostile.attacks_general import HTTP, knock


class AllDescriptors(Attack):
    """Silent connections to all doors at once, as many as they take."""

    name = "all_descriptors"
    help = "nobody holds 1,000 silent connections to each door at once"
    who = NOBODY
    pause_s = 0.02
    connections: ClassVar[int] = 1000
    portion: ClassVar[int] = 50

    def run(self, target: Target, number: int) -> Iterator[None]:
        doors = (CALLS_SOCKET, ATTACH_SOCKET, HTTP)
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
        return ["descriptors"] if any("Too many open files" in line for line in log) else []


class ForgedLog(Attack):
    """Texts that uvicorn would log: a HEAD request whose body is none, a path with escapes."""

    name = "forged_log"
    help = "nobody sends what libraries would write into the log as it came"
    who = NOBODY
    pause_s = 0.001
    forged: ClassVar[bytes] = b'/forged\x1b[31m{"event":"forged"}'

    def run(self, target: Target, number: int) -> Iterator[None]:
        head = b"HEAD %b HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        bad_head = head % b"/livez" + b"Transfer-Encoding: chunked\r\n\r\nnone\r\n\r\n"
        while True:
            for data in (bad_head, head % self.forged + b"\r\n"):
                with contextlib.suppress(OSError), knock(target, HTTP) as line:
                    line.sendall(data)
                    line.recv(4096)
            yield

    def check(self, target: Target, log: Sequence[str]) -> list[str]:
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
