"""Attacks of one session on the loop and the memory of the daemon, through the calls socket."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
from collections.abc import Iterator
from typing import ClassVar

from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth.session.link import Session
from kvhearth.wire import frames
from kvhearth_lab.hostile.attack import Attack, Target
from kvhearth_lab.hostile.attacks_general import enter, frame, lookup, opened, random_keys

CONNECTIONS = 64
"""Connections that a session may have."""
_EMPTY_PART = b"\x0a\x00"
_ALLOWED_PARTS_BYTES = 64 << 10
_UNFINISHED_BYTES = 256 << 10
_ID_MAX = (1 << 63) - 1


class Crowd:
    """All connections of one session, opened again when the daemon closes them."""

    def __init__(self, target: Target, session: Session, count: int = CONNECTIONS) -> None:
        self.session = session
        self._target = target
        self._ready = select.poll()
        self.lines: dict[int, socket.socket] = {}
        self._left: dict[int, bytes] = {}
        self._count = count

    def fill(self) -> list[socket.socket]:
        """Open the connections that are missing, without waiting on any; return the new ones."""
        added = []
        with contextlib.suppress(OSError):
            while len(self.lines) < self._count:
                line = opened(self._target, self.session)
                line.setblocking(False)
                self.lines[line.fileno()] = line
                self._ready.register(line, select.POLLIN)
                added.append(line)
        return added

    def answered(self, wait_ms: int = 1000) -> list[socket.socket]:
        """Send what is left; take the bytes that the daemon sent; return the connections that got
        some.
        """
        self.push()
        found = []
        for descriptor, _ in self._ready.poll(wait_ms):
            line = self.lines[descriptor]
            with contextlib.suppress(OSError):
                if line.recv(1 << 20):
                    found.append(line)
                    continue
            self.drop(line)
        return found

    def drop(self, line: socket.socket) -> None:
        """Close a connection."""
        self._ready.unregister(line)
        self._left.pop(line.fileno(), None)
        del self.lines[line.fileno()]
        line.close()

    def send(self, line: socket.socket, data: bytes) -> None:
        """Send as much as the daemon takes now, the rest later; nothing while a rest is left."""
        if self._left.setdefault(line.fileno(), data) is data:
            self._push(line)

    def push(self) -> None:
        """Send what is left, as much as the daemon takes now."""
        for descriptor in list(self._left):
            self._push(self.lines[descriptor])

    def _push(self, line: socket.socket) -> None:
        left = self._left.pop(line.fileno())
        with contextlib.suppress(OSError):
            with contextlib.suppress(BlockingIOError):
                left = left[line.send(left) :]
            if left:
                self._left[line.fileno()] = left
            return
        self.drop(line)


class EmptyParts(Attack):
    """Aborts of two million empty parts, 4 MiB each, on all connections of a session."""

    name = "empty_parts"
    help = "tenant a sends aborts of 4 MiB of empty parts on 64 connections"
    pause_s = 0.001
    body_bytes: ClassVar[int] = 4 << 20

    def run(self, target: Target, number: int) -> Iterator[None]:
        parts = _EMPTY_PART * (self.body_bytes // len(_EMPTY_PART))
        call = frame(frames.METHODS["Abort"], parts)
        session = enter(target, f"parts-{number}")
        while True:
            with contextlib.suppress(OSError), opened(target, session) as line:
                line.sendall(call)
                while line.recv(1 << 16):
                    pass
            yield


class ManyEmptyParts(EmptyParts):
    """Aborts of as many empty parts as fit into a body of an allowed size."""

    name = "many_empty_parts"
    help = "tenant a sends aborts of 64 KiB of empty parts, one connection after another"
    body_bytes = _ALLOWED_PARTS_BYTES


class Crowded(Attack):
    """The same call on all connections of a session, again as soon as it is answered."""

    pause_s = 0.001
    floods = True

    def call(self, session: Session, number: int) -> bytes:
        """Return the next frame of a connection."""
        raise NotImplementedError

    def run(self, target: Target, number: int) -> Iterator[None]:
        crowd = Crowd(target, enter(target, f"{self.name}-{number}"))
        turn = 0
        while True:
            for line in [*crowd.fill(), *crowd.answered()]:
                turn += 1
                crowd.send(line, self.call(crowd.session, turn))
            yield


class CrowdedLookups(Crowded):
    """Lookups of the most keys that a call may have, on all connections."""

    name = "crowded_lookups"
    help = "tenant a looks up 8,192 random keys a call on 64 connections of a session"

    def __init__(self) -> None:
        super().__init__()
        self._made: list[bytes] = []

    def call(self, session: Session, number: int) -> bytes:
        if len(self._made) < 4:
            self._made.append(lookup(session, random_keys(session)))
        return self._made[number % len(self._made)]


class CrowdedReservations(Crowded):
    """Reservations of all that a session may have, and aborts of them, on all connections."""

    name = "crowded_reservations"
    help = "tenant a reserves all it may and gives it back, on 64 connections of a session"

    def call(self, session: Session, number: int) -> bytes:
        name = secrets.randbelow(_ID_MAX) + 1
        wanted = types_pb2.GroupCount(group=0, count=session.welcome.keys_max)
        epoch = session.welcome.epoch
        reserve = cache_pb2.ReserveRequest(reservation_id=name, epoch=epoch, groups=[wanted])
        abort = cache_pb2.AbortRequest(reservation_ids=[name])
        return frame(frames.METHODS["Reserve"], reserve.SerializeToString()) + frame(
            frames.METHODS["Abort"], abort.SerializeToString()
        )


class PipelinedCalls(Attack):
    """Thousands of small calls sent ahead on all connections, whose answers are read at leisure."""

    name = "pipelined_calls"
    help = "tenant a sends 2,000 heartbeats ahead on each of 64 connections"
    pause_s = 0.01
    floods = True

    def run(self, target: Target, number: int) -> Iterator[None]:
        calls = frame(frames.METHODS["Heartbeat"], b"") * 2000
        crowd = Crowd(target, enter(target, f"pipelined-{number}"))
        while True:
            for line in [*crowd.fill(), *crowd.answered()]:
                crowd.send(line, calls)
            yield


class UnfinishedFrames(Attack):
    """Lookups without their last byte on all connections of several sessions."""

    name = "unfinished_frames"
    help = "tenant a leaves frames of 256 KiB unfinished on 64 connections of each of 4 sessions"
    pause_s = 0.05
    sessions: ClassVar[int] = 4

    def run(self, target: Target, number: int) -> Iterator[None]:
        part = frame(frames.METHODS["Lookup"], bytes(_UNFINISHED_BYTES))[:-1]
        crowds = [
            Crowd(target, enter(target, f"unfinished-{number}-{index}"))
            for index in range(self.sessions)
        ]
        while True:
            for crowd in crowds:
                for line in crowd.fill():
                    crowd.send(line, part)
                crowd.answered(0)
            yield


class UnreadReplies(Attack):
    """Lookups on all connections of several sessions, whose replies are never read."""

    name = "unread_replies"
    help = "tenant a never reads the replies to its lookups on 64 connections of each of 3 sessions"
    pause_s = 0.02
    floods = True
    sessions: ClassVar[int] = 3

    def run(self, target: Target, number: int) -> Iterator[None]:
        crowds = [
            Crowd(target, enter(target, f"unread-{number}-{index}"))
            for index in range(self.sessions)
        ]
        calls = [lookup(crowd.session, random_keys(crowd.session)) for crowd in crowds]
        while True:
            for crowd, call in zip(crowds, calls, strict=True):
                crowd.fill()
                for line in list(crowd.lines.values()):
                    crowd.send(line, call)
                crowd.push()
            yield


class OpenStorm(Attack):
    """Connections that give the right token and end."""

    name = "open_storm"
    help = "tenant a opens and closes connections for calls at full speed"
    processes = 2

    def run(self, target: Target, number: int) -> Iterator[None]:
        session = enter(target, f"opens-{number}")
        while True:
            with contextlib.suppress(OSError), opened(target, session) as line:
                line.recv(64)
            yield
