"""Connections of remote peers: whole reads and writes with deadlines, plain or TLS."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence

_TICK_S = 1
"""Longest wait of one system call; a deadline is noticed this much later at most."""
_TICK = struct.pack("@ll", _TICK_S, 0)
_LINGER_S = 1.0
_WASTE_BYTES = 64 << 10
_PARTS_MAX = 512
"""Most buffers of one system call; the kernel's bound is 1024."""


class Ended(ConnectionError):
    """The peer closed the connection."""


class Stream:
    """One connection, used by one thread; ``end`` may be called by any.

    Args:
        connection: connected, with its TLS handshake done.
        keepalive_s: seconds of silence after which the kernel asks whether the peer lives.
    """

    def __init__(self, connection: socket.socket, keepalive_s: float) -> None:
        self.socket = connection
        self._tls = connection if isinstance(connection, ssl.SSLSocket) else None
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        prepare(connection, keepalive_s)
        if self._tls is not None:
            connection.settimeout(_TICK_S)
            return
        # A timeout set in Python would poll before each call, and a call would not wait for all.
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)

    def wait(self, end: float | None = None) -> None:
        """Wait for bytes of the next frame, without a bound if ``end`` (monotonic) is None.

        Raises:
            TimeoutError: ``end`` has passed.
        """
        if self.pending():
            return
        left_ms = None if end is None else max(0.0, end - time.monotonic()) * 1000
        if not self._readable.poll(left_ms):
            raise TimeoutError

    def pending(self) -> bool:
        """Return whether decrypted bytes wait, of which the kernel does not know."""
        return self._tls is not None and self._tls.pending() > 0

    def read(self, size: int, end: float) -> bytearray:
        """Return exactly ``size`` bytes, received by the monotonic time ``end``.

        Raises:
            OSError: ``Ended``, ``TimeoutError``, or the kernel's error.
        """
        data = bytearray(size)
        self.fill([memoryview(data)], end)
        return data

    def fill(self, parts: Sequence[memoryview], end: float) -> None:
        """Receive into all ``parts``, straight from the socket. Raises as ``read``."""
        left = [part for part in parts if len(part)]
        while left:
            count = self._receive(left)
            if count < sum(map(len, left[:_PARTS_MAX])) and time.monotonic() > end:
                raise TimeoutError
            _advance(left, count)

    def _receive(self, parts: list[memoryview]) -> int:
        """Return the number of bytes received, 0 after a tick without any."""
        try:
            if self._tls is not None:
                count = self._tls.recv_into(parts[0])
            elif len(parts) == 1:
                count = self.socket.recv_into(parts[0], 0, socket.MSG_WAITALL)
            else:
                count = self.socket.recvmsg_into(parts[:_PARTS_MAX], 0, socket.MSG_WAITALL)[0]
        except (BlockingIOError, InterruptedError, TimeoutError):
            return 0
        if not count:
            raise Ended("the peer closed the connection")
        return count

    def send(self, parts: Sequence[memoryview | bytes], end: float) -> None:
        """Send all ``parts`` by the monotonic time ``end``. Raises as ``read``."""
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        while left:
            try:
                if self._tls is not None:
                    count = self._tls.send(left[0])
                else:
                    count = self.socket.sendmsg(left[:_PARTS_MAX], (), socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError, TimeoutError):
                count = 0
            if count < sum(map(len, left[:_PARTS_MAX])) and time.monotonic() > end:
                raise TimeoutError
            _advance(left, count)

    def refuse(self, data: bytes) -> None:
        """Send a last frame, and drop what the peer still sends, so that it can read the frame: the
        kernel would reset a connection that is closed with unread bytes. Takes a second or two.
        """
        with contextlib.suppress(OSError):
            end = time.monotonic() + _LINGER_S
            self.send([data], end)
            socket.socket.shutdown(self.socket, socket.SHUT_WR)
            waste = [memoryview(bytearray(_WASTE_BYTES))]
            while time.monotonic() < end:
                self._receive(waste)

    def end(self) -> None:
        """Make the thread that waits on the connection return, with an ``OSError``."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with contextlib.suppress(OSError):
            self.socket.close()


def _advance(parts: list[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes."""
    done = 0
    while done < len(parts) and count >= len(parts[done]):
        count -= len(parts[done])
        done += 1
    del parts[:done]
    if count:
        parts[0] = parts[0][count:]


def prepare(connection: socket.socket, keepalive_s: float) -> None:
    """Set a TCP connection's options: no delay, and a look whether the peer lives after
    ``keepalive_s`` of silence or of bytes that it does not acknowledge. The kernel chooses the
    buffers: a size of ours would end its tuning, below what it may reach by itself.
    """
    idle_s = max(1, int(keepalive_s))
    for level, name, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle_s // 3)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * idle_s),
    ):
        connection.setsockopt(level, name, value)
