"""Connections: whole reads and writes with deadlines, plain or TLS; terms of remote peers."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.wire.remote import GatewayTerms

TERMS = GatewayTerms(
    window_bytes=64 << 20,
    data_connections=32,
    calls_connections=32,
    resume_s=10.0,
    keepalive_s=15.0,
)
FRAME_S = 10.0
"""Time for a frame, in addition to that of its payload."""
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
        connection: connected.
        peer: its address and port; "" for the daemon.

    Attributes:
        began: monotonic time of its begin.
    """

    def __init__(self, connection: socket.socket, peer: str = "") -> None:
        self.socket = connection
        self.peer = peer
        self.began = time.monotonic()
        self._tls: ssl.SSLSocket | None = None
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        # A timeout set in Python would poll before each call, and a call would not wait for all.
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
        if connection.family != socket.AF_UNIX:
            _prepare(connection, int(TERMS.keepalive_s))

    @property
    def address(self) -> str:
        """The peer's address without its port."""
        return self.peer.rpartition(":")[0]

    @property
    def certificate(self) -> Any:
        """The peer's certificate; None without one."""
        return None if self._tls is None else self._tls.getpeercert()

    def secure(self, context: ssl.SSLContext, timeout_s: float) -> None:
        """Begin TLS.

        Raises:
            KVHearthError: ``peer_not_allowed``: the peer shows no good certificate, or speaks no
                TLS.
            OSError: the connection ended.
        """
        self.socket.settimeout(timeout_s)
        # Known before the first byte, so that ``end`` ends a slow handshake.
        self.socket = self._tls = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )
        try:
            self._tls.do_handshake()
        except ssl.SSLEOFError:
            raise Ended("the peer closed the connection in its handshake") from None
        except ssl.SSLError as error:
            why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else ""
            why = why or (error.reason or "it speaks no TLS").lower().replace("_", " ")
            raise KVHearthError(Reason.PEER_NOT_ALLOWED, f"no TLS connection: {why}") from None
        self._tls.settimeout(_TICK_S)

    def wait(self) -> None:
        """Wait for bytes of the next frame."""
        if not self.pending():
            self._readable.poll()

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

    def send(self, parts: Sequence[memoryview | bytes | bytearray], end: float) -> None:
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


def _prepare(connection: socket.socket, idle_s: int) -> None:
    """Set a TCP connection's options: no delay, and a look whether the peer lives after ``idle_s``
    of silence or of bytes that it does not acknowledge. The kernel chooses the buffers: a size of
    ours would end its tuning, below what it may reach by itself.
    """
    for level, name, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, idle_s // 3),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * idle_s),
    ):
        connection.setsockopt(level, name, value)
