"""Decisions as frames on a stream, to the daemon or a gateway: a few system calls each, no thread.

A call has a connection to itself, so that a late answer is discarded with the connection. Idle
connections are kept for the next calls.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError

from kvhearth.errors import KVHearthError, Reason
from kvhearth.transports.base import ReplyT, RequestT, Rpc
from kvhearth.wire import frames
from kvhearth.wire.frames import BareError, decode_status

_IDLE_MAX = 8
_OPEN_MAX = 48
"""Most calls at a time; a daemon accepts 64 connections per session."""
_BACKLOG_PAUSE_S = 0.002
_READ_BYTES = 64 * 1024
_WANTS_BYTES = (BlockingIOError, ssl.SSLWantReadError)
_WANTS_ROOM = (BlockingIOError, ssl.SSLWantWriteError)
Connect = Callable[[float], socket.socket]
"""Function from a monotonic deadline to a connected socket that does not block.

It raises ``OSError``, also ``TimeoutError`` at the deadline, or ``KVHearthError`` for a peer that
must not be used.
"""
_Frame = tuple[int, memoryview, int, memoryview]
"""Result of ``_Connection._receive``: kind, body, number, and the remaining bytes."""


class FramesTransport:
    """A ``CacheTransport`` of one session; connects on its first call.

    Args:
        connect: opens a connection.
        place: where it leads, for messages.
        token: the session's secret.
        message_bytes_max: bound of one message, both ways.
        may_break: whether a connection may end before its session does, as on a network: an idle
            one is then looked at before it is used.
    """

    def __init__(
        self,
        connect: Connect,
        place: str,
        token: str,
        message_bytes_max: int,
        *,
        may_break: bool = False,
    ) -> None:
        self._open_stream = connect
        self._place = place
        self._token = token.encode()
        self._message_bytes_max = message_bytes_max
        self._may_break = may_break
        self._pid = os.getpid()
        # Taking the lock directly costs half as much as taking it through the condition.
        self._lock = threading.RLock()
        self._place_free = threading.Condition(self._lock)
        self._busy = 0
        self._waiting = 0
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()
        self._closed = False
        _live.add(self)

    def call(self, rpc: Rpc[RequestT, ReplyT], request: RequestT, deadline_s: float) -> ReplyT:
        end = time.monotonic() + deadline_s
        body = rpc.serialize(request)
        frames.check_size(len(body), self._message_bytes_max)
        try:
            return self._call(rpc, body, end)
        except OSError as error:
            raise self._translate(error) from None

    def _call(self, rpc: Rpc[RequestT, ReplyT], body: bytes, end: float) -> ReplyT:
        connection = self._take(end)
        try:
            if connection is None:
                connection = self._connect(end)
            kind, reply = connection.exchange(frames.METHODS[rpc.name], body, end)
            # Parsed before the connection is given back, because its next call overwrites the
            # reply.
            answer = rpc.parse(reply) if kind == frames.DONE else decode_status(bytes(reply))
        except DecodeError as error:
            self._drop(connection)
            raise KVHearthError(
                Reason.BAD_MESSAGE, f"the reply cannot be parsed: {error}"
            ) from None
        except BaseException:
            self._drop(connection)
            raise
        self._give(connection)
        if isinstance(answer, KVHearthError):
            raise answer
        return answer

    def has_connection(self) -> bool:
        """See ``CacheTransport.has_connection``: the kernel closes a dead daemon's end."""
        return bool(self._idle)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._place_free:
            self._closed = True
            idle, busy = set(self._idle), self._open - set(self._idle)
            self._idle.clear()
            self._open = set(busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            connection.end()

    def _take(self, end: float) -> _Connection | None:
        """Take a place, and an idle connection if there is one; ends by ``_give`` or ``_drop``."""
        with self._lock:
            if self._busy >= _OPEN_MAX:
                self._wait_for_place(end)
            if self._closed:
                raise self._closed_error()
            self._busy += 1
            while self._idle:
                connection = self._idle.pop()
                if not self._may_break or connection.silent():
                    return connection
                self._discard(connection)
            return None

    def _wait_for_place(self, end: float) -> None:
        self._waiting += 1
        try:
            free = self._place_free.wait_for(
                lambda: self._busy < _OPEN_MAX or self._closed, end - time.monotonic()
            )
        finally:
            self._waiting -= 1
        if not free:
            raise KVHearthError(Reason.DEADLINE, f"{_OPEN_MAX} calls are under way")

    def _connect(self, end: float) -> _Connection:
        stream = self._open_stream(end)
        connection = _Connection(stream, self._token, self._message_bytes_max)
        with self._place_free:
            self._open.add(connection)
        if self._ended():
            self._discard(connection)
            raise self._closed_error()
        return connection

    def _ended(self) -> bool:
        return self._closed

    def _closed_error(self) -> KVHearthError:
        if os.getpid() != self._pid:
            return KVHearthError(
                Reason.CLOSED, "this session is the parent process's: connect anew"
            )
        return KVHearthError(Reason.CLOSED, "the transport is closed")

    def _give(self, connection: _Connection) -> None:
        """Return the connection of a successful call, for use by the next one."""
        with self._lock:
            self._leave_place()
            if not self._closed and len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        self._discard(connection)

    def _drop(self, connection: _Connection | None) -> None:
        """Discard a failed call's connection, so that its late answer reaches no other call."""
        with self._place_free:
            self._leave_place()
        if connection is not None:
            self._discard(connection)

    def _leave_place(self) -> None:
        self._busy -= 1
        if self._waiting:
            self._place_free.notify()

    def _discard(self, connection: _Connection) -> None:
        with self._place_free:
            self._open.discard(connection)
        connection.close()

    def _translate(self, error: OSError) -> KVHearthError:
        if self._closed:
            return KVHearthError(Reason.CLOSED, "the transport was closed during the call")
        if isinstance(error, TimeoutError):
            return KVHearthError(Reason.DEADLINE, "no answer from the daemon in time")
        if isinstance(error, PermissionError):
            return KVHearthError(
                Reason.SOCKET_UNUSABLE,
                f"may not connect to {self._place}: run as a user or group that may",
            )
        return KVHearthError(Reason.DAEMON_AWAY, f"no daemon at {self._place} ({error})")

    def _forget(self) -> None:
        """Close a forked child's copies of the connections; the parent's stay open."""
        self._lock = threading.RLock()
        self._place_free = threading.Condition(self._lock)
        self._closed = True
        for connection in self._open:
            connection.close()
        self._open, self._idle = set(), deque()


class _Connection:
    """One stream with at most one call under way.

    Args:
        stream: connected, and does not block; owned from then on.
    """

    def __init__(self, stream: socket.socket, token: bytes, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._number = 0
        # The token travels with the first request and costs no extra round trip.
        self._preface = frames.encode(frames.OPEN, 0, token, message_bytes_max)
        # A timeout set in Python would poll before each send too. A kernel timeout would also wake
        # the reader when the daemon takes the request, not only when it answers.
        self._socket = stream
        # Bytes that TLS has decrypted already wake no poll.
        self._pending = stream.pending if isinstance(stream, ssl.SSLSocket) else None
        self._send_flags = 0 if self._pending else socket.MSG_NOSIGNAL
        # One buffer, reused: allocating memory for each answer costs more than reading it.
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._answers = select.poll()
        self._answers.register(self._socket, select.POLLIN)

    def silent(self) -> bool:
        """Return whether nothing came while it was idle: neither bytes nor its end."""
        return not self._answers.poll(0)

    def exchange(self, method: int, body: bytes, end: float) -> tuple[int, memoryview]:
        """Send a request; return the kind and body of its answer, valid until the next exchange.

        Raises:
            KVHearthError: ``bad_message`` if the daemon breaks the protocol; the refusal of the
                token.
            OSError: the connection ended, or the deadline passed.
        """
        self._number = number = (self._number + 1) % frames.NUMBERS
        preface, self._preface = self._preface, b""
        left_ms = self._send(preface + frames.HEADER.pack(len(body), method, number) + body, end)
        data = self._read(left_ms)
        if preface:
            kind, reply, _, data = self._receive(data, 0, end)
            if kind == frames.REFUSED:
                raise _refused_connection(reply)
        kind, reply, answered, data = self._receive(data, number, end)
        if answered != number:
            raise _refused_connection(reply)
        if data:
            raise KVHearthError(Reason.BAD_MESSAGE, "the daemon said more than it was asked")
        return kind, reply

    def end(self) -> None:
        """Wake the thread that waits on the connection, from another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it. Idempotent."""
        self._socket.close()

    def _send(self, data: bytes, end: float) -> int:
        """Send all of ``data``, mostly with one system call; return the milliseconds left."""
        left_ms = _left_ms(end)
        view = memoryview(data)
        while True:
            try:
                view = view[self._socket.send(view, self._send_flags) :]
                if not view:
                    return left_ms
            except _WANTS_ROOM:
                room = select.poll()
                room.register(self._socket, select.POLLOUT)
                room.poll(left_ms)
            left_ms = _left_ms(end)

    def _read(self, left_ms: int) -> memoryview:
        """Wait up to ``left_ms`` milliseconds for bytes, which are valid until the next read."""
        while True:
            if not (self._pending and self._pending()) and not self._answers.poll(left_ms):
                raise TimeoutError
            try:
                size = self._socket.recv_into(self._buffer)
                break
            except _WANTS_BYTES:  # part of a TLS record
                continue
        if not size:
            raise ConnectionResetError("the daemon closed the connection")
        return self._buffer[:size]

    def _receive(self, data: memoryview, number: int, end: float) -> _Frame:
        """Take one frame from the front of the received data, reading more as needed.

        Returns the frame's kind, body and number, and the remaining data. A refusal with number 0
        applies to the whole connection.
        """
        header = frames.HEADER
        if len(data) < header.size:
            data = self._fill(data, header.size, end)
        size, kind, answered = header.unpack_from(data)
        frames.check_size(size, self._message_bytes_max)
        mine = answered == number or (kind == frames.REFUSED and answered == 0)
        if not mine or kind not in (frames.DONE, frames.REFUSED):
            raise KVHearthError(Reason.BAD_MESSAGE, "the daemon answered another call")
        total = header.size + size
        if len(data) < total:
            data = self._fill(data, total, end)
        return kind, data[header.size : total], answered, data[total:]

    def _fill(self, data: memoryview, size: int, end: float) -> memoryview:
        """Read until there are at least ``size`` bytes."""
        whole = bytearray(data)
        while len(whole) < size:
            whole += self._read(_left_ms(end))
        return memoryview(whole)


def _left_ms(end: float) -> int:
    """Return the whole milliseconds until the monotonic time ``end``, at least one.

    Raises:
        TimeoutError: it has passed.
    """
    left_ms = math.ceil((end - time.monotonic()) * 1000)
    if left_ms <= 0:
        raise TimeoutError
    return left_ms


def _refused_connection(reply: memoryview) -> KVHearthError:
    """Turn a connection-level refusal into an error; only ``unknown_token`` keeps its type.

    Other refusals become ``BareError``, since they say nothing about the call.
    """
    error = decode_status(bytes(reply))
    if error.reason is Reason.UNKNOWN_TOKEN:
        return error
    return BareError(error.reason, error.message, **error.details)


def unix_stream(
    path: str, end: float, check: Callable[[socket.socket], None] = lambda _: None
) -> socket.socket:
    """Connect to a unix socket; see ``Connect``.

    Args:
        path: the socket.
        end: monotonic deadline.
        check: raises ``KVHearthError`` if a connection must not be used; called before anything is
            sent on it.
    """
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.setblocking(False)
        while True:
            try:
                stream.connect(path)
                break
            except BlockingIOError:
                # The daemon's backlog is full; the kernel waits for a place only without a timeout.
                _left_ms(end)
                time.sleep(_BACKLOG_PAUSE_S)
        check(stream)
    except BaseException:
        stream.close()
        raise
    return stream


def over_unix(
    path: str,
    token: str,
    message_bytes_max: int,
    check: Callable[[socket.socket], None] = lambda _: None,
) -> FramesTransport:
    """Return a transport over the daemon's calls socket; see ``FramesTransport``."""

    def connect(end: float) -> socket.socket:
        return unix_stream(path, end, check)

    return FramesTransport(connect, path, token, message_bytes_max)


_live: weakref.WeakSet[FramesTransport] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for transport in list(_live):
        transport._forget()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
