"""Bytes of blocks over connections to a gateway, pipelined.

Each connection has a thread, which sends requests as far as the gateway's window allows and takes
their answers in order. Payload moves between the network and the memory that a request names, by
one system call a direction where the kernel can. A break ends puts: their blocks are not stored.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvhearth.counters import Warnings
from kvhearth.errors import KVHearthError, Reason
from kvhearth.transports.tcp import Dialer
from kvhearth.wire.frames import decode_status
from kvhearth.wire.remote import DATA_HEADER, DataFrame, DataKind, Outcome, Purpose
from kvhearth.worker_thread import SupervisedThread

PORTION_BYTES = 4 << 20
"""Payload that a request should have. Measured on loopback with two cores: with 1 MiB both ends
spend twice the processor time a byte on waking each other, and beyond 4 MiB nothing is gained. A
connection takes no further request while more is unanswered.
"""
GETS_IN_ROW_MAX = 8
"""Gets that go before a put that waits."""
UNANSWERED_MAX = 64
"""Most unanswered requests of a connection."""
GET_TRIES_MAX = 2
"""How often a get is begun, on one connection after another."""
STALL_S = 5.0
"""Longest time without progress, by default."""
_IDLE_S = 5.0
_OVER_S = 0.05
_BUFFERS_MAX = 512
"""Most buffers of one system call; the kernel takes 1024."""
_STATUS_BYTES_MAX = 64 << 10
_OK = int(Outcome.OK)

Buffer = Any
"""Contiguous bytes: a memoryview or an array of uint8."""


class Request(Protocol):
    """One request for the gateway. A line calls its methods from its thread, one after another.

    Attributes:
        kind: ``PUT`` or ``GET``.
        count: number of extents.
        payload_bytes: bytes of all blocks.
        tries: how often it was begun; the lines count.
    """

    kind: DataKind
    count: int
    payload_bytes: int
    tries: int

    def prepare(self) -> bool:
        """Take what it needs before it is begun, once; False to be asked again later. Does not
        wait.
        """

    def records(self) -> bytes:
        """Return its extents; a put's bytes are in place afterwards, with their checksums.

        Empty if they cannot be: the request then ends.
        """

    def buffers(self, chosen: Sequence[int]) -> list[Buffer]:
        """Return the memory of its blocks at these positions, in their order."""

    def end(self, outcomes: bytes) -> None:
        """Take the outcomes: a byte for each extent (``Outcome``), empty if it was not carried out.

        Nothing touches the memory afterwards. Called once.
        """


class DataLines:
    """The data connections of a session; connects with the first request. Thread-safe.

    Args:
        dialer: opens connections.
        token: the session's secret.
        count: most connections.
        window_bytes: most payload of a connection's unanswered requests.
        connect_s: deadline of a connection's opening, in seconds.
        alive: whether the session may be used; without it, requests end.
        stall_s: a connection without progress for as long is broken.
    """

    def __init__(
        self,
        dialer: Dialer,
        token: str,
        count: int,
        *,
        window_bytes: int,
        connect_s: float,
        alive: Callable[[], bool],
        stall_s: float = STALL_S,
    ) -> None:
        self.dialer = dialer
        self.token = token.encode()
        self.window_bytes = window_bytes
        self.connect_s = connect_s
        self.alive = alive
        self.stall_s = stall_s
        self.numbers = itertools.count(1)
        self.warnings = Warnings()
        self.closed = False
        self.changed = threading.Condition()
        self._gets: deque[Request] = deque()
        self._puts: deque[Request] = deque()
        self._gets_in_row = 0
        self._idle = 0
        self._lines: list[_Line] = []
        self._count = count
        self._pid = os.getpid()
        _live.add(self)

    def put(self, request: Request) -> None:
        """Queue a request; its ``end`` is called in any case."""
        if os.getpid() != self._pid:
            request.end(b"")
            return
        with self.changed:
            if not self.closed:
                (self._gets if request.kind is DataKind.GET else self._puts).append(request)
                waiting = len(self._gets) + len(self._puts)
                if waiting > self._idle and len(self._lines) < self._count:
                    self._lines.append(_Line(self))
                self.changed.notify()
                return
        request.end(b"")

    def put_back(self, get: Request) -> None:
        """Let another line begin a get again; it goes first."""
        with self.changed:
            if not self.closed:
                self._gets.appendleft(get)
                self.changed.notify()
                return
        get.end(b"")

    def wake(self) -> None:
        """Look again at requests that could not be prepared."""
        with self.changed:
            self.changed.notify_all()

    def take(self, kind: DataKind | None, room_bytes: int, wait_s: float) -> Request | None:
        """Take the next request if it is of that kind (any for None), fits and could be prepared.

        Args:
            kind: kind of the caller's unanswered requests.
            room_bytes: what the caller's window has left.
            wait_s: how long to wait for one; it returns sooner if the lines are woken.
        """
        with self.changed:
            if wait_s > 0 and not self.closed and not self._fits(kind, room_bytes):
                self._idle += 1
                self.changed.wait(wait_s)
                self._idle -= 1
            return self._pop() if self._fits(kind, room_bytes) else None

    def drop(self) -> Request | None:
        """Take the next request of any kind, to end it; None if there is none."""
        with self.changed:
            return self._pop() if self._gets or self._puts else None

    def interrupt(self) -> None:
        """End all waits for the network: the session is over."""
        with self.changed:
            lines = list(self._lines)
        for line in lines:
            line.interrupt()
        self.wake()

    def close(self, deadline_s: float = 1.0) -> bool:
        """End the threads and connections; False if a thread did not end in time. Idempotent."""
        if os.getpid() != self._pid:
            return True
        with self.changed:
            self.closed = True
            lines, left = list(self._lines), [*self._gets, *self._puts]
            self._gets.clear()
            self._puts.clear()
            self.changed.notify_all()
        for request in left:
            request.end(b"")
        until = time.monotonic() + deadline_s
        ended = [line.stop(until) for line in lines]
        return all(ended)

    def _fits(self, kind: DataKind | None, room_bytes: int) -> bool:
        if not (self._gets or self._puts):
            return False
        head = self._next()[0]
        if kind is not None and (kind is not head.kind or head.payload_bytes > room_bytes):
            return False
        return head.prepare()

    def _next(self) -> deque[Request]:
        """Return the queue whose turn it is: loads go first, since requests wait for them."""
        if not self._puts or (self._gets and self._gets_in_row < GETS_IN_ROW_MAX):
            return self._gets
        return self._puts

    def _pop(self) -> Request:
        chosen = self._next()
        self._gets_in_row = self._gets_in_row + 1 if chosen is self._gets else 0
        return chosen.popleft()

    def _forget(self) -> None:
        """Close a forked child's copies of the connections."""
        self.changed = threading.Condition()
        self.closed = True
        for line in self._lines:
            line.forget()


class _Line:
    """One connection and its thread."""

    def __init__(self, lines: DataLines) -> None:
        self._lines = lines
        self._stream: socket.socket | None = None
        self._plain = True
        self._unanswered: deque[tuple[Request, int]] = deque()
        self._unanswered_bytes = 0
        self._worker = SupervisedThread("kvhearth-data", self._step, self._recover, wake=lines.wake)
        self._worker.start()

    def interrupt(self) -> None:
        """End the thread's wait for the network."""
        stream = self._stream
        if stream is not None:
            with contextlib.suppress(OSError):
                # Not that of TLS, which would take the keys from the thread that uses them.
                socket.socket.shutdown(stream, socket.SHUT_RDWR)

    def stop(self, until: float) -> bool:
        """End the thread; False if it did not end in time."""
        self.interrupt()
        ended = self._worker.stop(max(until - time.monotonic(), 0.0))
        if ended:
            for request in self._hang_up():
                request.end(b"")
        return ended

    def forget(self) -> None:
        """Close a forked child's copy of the connection."""
        if self._stream is not None:
            self._stream.close()

    # -- the thread --------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._lines.closed or not self._lines.alive():
            self._end_all()
            self._worker.rest(_OVER_S)
            return
        try:
            self._send_some()
            if self._unanswered:
                self._receive()
        except (OSError, KVHearthError) as error:
            self._broken(error)

    def _send_some(self) -> None:
        """Begin requests as long as there are some that the window takes."""
        lines = self._lines
        while len(self._unanswered) < UNANSWERED_MAX and self._unanswered_bytes <= PORTION_BYTES:
            busy = bool(self._unanswered)
            kind = self._unanswered[0][0].kind if busy else None
            room_bytes = lines.window_bytes - self._unanswered_bytes
            request = lines.take(kind, room_bytes, 0.0 if busy else _IDLE_S)
            if request is None:
                return
            self._begin(request, next(lines.numbers))

    def _begin(self, request: Request, number: int) -> None:
        self._unanswered.append((request, number))
        self._unanswered_bytes += request.payload_bytes
        request.tries += 1
        records = request.records()
        if not records:
            self._unanswered.pop()
            self._unanswered_bytes -= request.payload_bytes
            request.end(b"")
            return
        stream = self._stream or self._connect()
        put = request.kind is DataKind.PUT
        payload = request.payload_bytes if put else 0
        header = DataFrame(request.kind, request.count, number, payload).pack()
        buffers = request.buffers(range(request.count)) if put else []
        self._send_all(stream, [header + records, *buffers])

    def _receive(self) -> None:
        """Take the answer to the oldest request."""
        request, number = self._unanswered[0]
        frame, outcomes = self._answer(request, number)
        if request.kind is DataKind.PUT:
            if frame.kind is not DataKind.STORED or frame.payload_bytes:
                raise _out_of_step(frame)
        else:
            if frame.kind is not DataKind.BYTES:
                raise _out_of_step(frame)
            outcomes = self._receive_bytes(request, frame, outcomes)
        self._unanswered.popleft()
        self._unanswered_bytes -= request.payload_bytes
        request.end(outcomes)

    def _receive_bytes(self, request: Request, frame: DataFrame, outcomes: bytes) -> bytes:
        """Receive the payload and the frame behind it; return the outcomes of both."""
        chosen = [index for index, outcome in enumerate(outcomes) if outcome == _OK]
        buffers = request.buffers(chosen)
        if frame.payload_bytes != sum(len(buffer) for buffer in buffers):
            raise _out_of_step(frame)
        tail = bytearray(DATA_HEADER.size + request.count)
        self._receive_all([*buffers, tail])
        last = DataFrame.unpack(bytes(tail[: DATA_HEADER.size]))
        if last != DataFrame(DataKind.COPIED, request.count, frame.number, 0):
            raise _out_of_step(last)
        after = bytes(tail[DATA_HEADER.size :])
        if outcomes == after:
            return after
        return bytes(one or two for one, two in zip(outcomes, after, strict=True))

    def _answer(self, request: Request, number: int) -> tuple[DataFrame, bytes]:
        """Receive the header and the outcomes of the next answer.

        Raises:
            KVHearthError: the gateway's refusal, or ``bad_message`` for another answer.
        """
        head = bytearray(DATA_HEADER.size)
        self._receive_all([head])
        frame = DataFrame.unpack(bytes(head))
        if frame.kind is DataKind.REFUSED:
            raise self._refusal(frame)
        if frame.number != number or frame.count != request.count:
            raise _out_of_step(frame)
        outcomes = bytearray(frame.count)
        self._receive_all([outcomes])
        return frame, bytes(outcomes)

    def _refusal(self, frame: DataFrame) -> KVHearthError:
        if frame.payload_bytes > _STATUS_BYTES_MAX:
            return _out_of_step(frame)
        status = bytearray(frame.payload_bytes)
        self._receive_all([status])
        return decode_status(bytes(status))

    # -- breaks ------------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        lines = self._lines
        stream = lines.dialer.connect(Purpose.DATA, time.monotonic() + lines.connect_s)
        self._plain = not isinstance(stream, ssl.SSLSocket)
        if self._plain:
            # A kernel timeout, so that one call moves a whole payload.
            stream.setblocking(True)
            whole, part = divmod(lines.stall_s, 1.0)
            limit = struct.pack("ll", int(whole), int(part * 1e6))
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        else:
            stream.settimeout(lines.stall_s)
        self._stream = stream
        token = lines.token
        stream.sendall(DataFrame(DataKind.OPEN, 0, 0, len(token)).pack() + token)
        return stream

    def _broken(self, error: Exception) -> None:
        """Hang up; end what was under way, but let another connection begin its gets again."""
        if self._lines.alive() and not self._lines.closed:
            self._lines.warnings.warn(
                "data.broken", "a connection for bytes broke, opening another", error=error
            )
        for request in reversed(self._hang_up()):  # each goes first
            # Another error than a break's is an answer to the requests themselves.
            again = isinstance(error, OSError) and request.kind is DataKind.GET
            if again and request.tries < GET_TRIES_MAX:
                self._lines.put_back(request)
            else:
                request.end(b"")

    def _end_all(self) -> None:
        """End all requests of a session that is over, also those that no line has begun."""
        for request in self._hang_up():
            request.end(b"")
        while (waiting := self._lines.drop()) is not None:
            waiting.end(b"")

    def _recover(self) -> None:
        """Hang up after a step that raised: what is under way is lost."""
        self._broken(KVHearthError(Reason.INTERNAL, "a step failed"))

    def _hang_up(self) -> list[Request]:
        """Close the connection; return the requests that it leaves without an answer."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        begun = [request for request, _ in self._unanswered]
        self._unanswered.clear()
        self._unanswered_bytes = 0
        return begun

    # -- bytes -------------------------------------------------------------------------------------

    def _send_all(self, stream: socket.socket, buffers: list[Buffer]) -> None:
        if not self._plain:
            for buffer in buffers:
                stream.sendall(buffer)
            return
        for start in range(0, len(buffers), _BUFFERS_MAX):
            some = buffers[start : start + _BUFFERS_MAX]
            while some:
                try:
                    sent = stream.sendmsg(some, (), socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    raise TimeoutError("the gateway takes no bytes") from None
                some = _rest(some, sent)

    def _receive_all(self, buffers: list[Buffer]) -> None:
        """Fill all buffers.

        Raises:
            OSError: the connection ended, or stalls.
        """
        stream = self._stream
        if stream is None:
            raise ConnectionResetError("the connection is closed")
        if not self._plain:
            for buffer in buffers:
                view = memoryview(buffer)
                while view:
                    size = stream.recv_into(view)
                    if not size:
                        raise ConnectionResetError("the gateway closed the connection")
                    view = view[size:]
            return
        for start in range(0, len(buffers), _BUFFERS_MAX):
            some = [each for each in buffers[start : start + _BUFFERS_MAX] if len(each)]
            while some:
                try:
                    size = stream.recvmsg_into(some, 0, socket.MSG_WAITALL)[0]
                except BlockingIOError:
                    raise TimeoutError("the gateway sends no bytes") from None
                if not size:
                    raise ConnectionResetError("the gateway closed the connection")
                some = _rest(some, size)


def _rest(buffers: list[Buffer], size: int) -> list[Buffer]:
    """Return what is left of buffers after their first bytes."""
    for index, buffer in enumerate(buffers):
        if size < len(buffer):
            return [memoryview(buffer)[size:], *buffers[index + 1 :]]
        size -= len(buffer)
    return []


def _out_of_step(frame: DataFrame) -> KVHearthError:
    return KVHearthError(
        Reason.BAD_MESSAGE,
        f"the gateway answered with {frame.kind.name}, number {frame.number}, {frame.count} "
        f"outcomes and {frame.payload_bytes} bytes: not what was asked",
    )


_live: weakref.WeakSet[DataLines] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lines in list(_live):
        lines._forget()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
