"""A connected socket on the loop, a thinner one than asyncio's transport: what comes is handed over
by the event that brought it, what is written leaves at once. A call costs half as much this way.
"""

from __future__ import annotations

import asyncio
import socket


class Stream:
    """One connection; a subclass says what to do with it. All methods are for the loop's thread.

    Args:
        connection: a non-blocking stream socket, the stream's own from now on.
        inbox: what it reads into. Streams may share one: what came is handed over before the next
            of them reads.
        waiting_bytes_max: written bytes that the peer has not taken, above which it is ``full``.
    """

    def __init__(
        self, connection: socket.socket, inbox: memoryview, waiting_bytes_max: int
    ) -> None:
        self.full = False
        """The peer takes nothing: more should be written only after ``emptied``."""
        self.closing = False
        """Nothing is read any more, and nothing more can be written."""
        self._socket = connection
        self._inbox = inbox
        self._waiting_bytes_max = waiting_bytes_max
        self._waiting = bytearray()
        self._reading = True
        self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._read)

    def received(self, data: memoryview) -> None:
        """Some bytes have come; they are gone after this returns."""
        raise NotImplementedError

    def filled(self) -> None:
        """The stream has become ``full``."""
        raise NotImplementedError

    def emptied(self) -> None:
        """It is not ``full`` any more."""
        raise NotImplementedError

    def ended(self) -> None:
        """The connection is closed, whoever closed it; called once, by the loop."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Send as much as the peer takes now, the rest when it does."""
        if self.closing:
            return
        if not self._waiting:
            sent = self._send(data)
            if sent == len(data) or self.closing:
                return
            data = data[sent:]
            self._loop.add_writer(self._socket, self._flush)
        self._waiting += data
        if len(self._waiting) > self._waiting_bytes_max and not self.full:
            self.full = True
            self.filled()

    def read_on(self, reading: bool) -> None:
        """Whether what the peer sends is read, or left in its own socket."""
        if reading is self._reading or self.closing:
            return
        self._reading = reading
        if reading:
            self._loop.add_reader(self._socket, self._read)
        else:
            self._loop.remove_reader(self._socket)

    def close(self) -> None:
        """Read nothing more; end when the peer has taken what was written."""
        self.read_on(False)
        self.closing = True
        if not self._waiting:
            self.abort()

    def abort(self) -> None:
        """End now."""
        if self._has_ended:
            return
        self.read_on(False)
        self._has_ended = self.closing = True
        self._loop.remove_writer(self._socket)
        self._waiting.clear()
        self._socket.close()
        self._loop.call_soon(self.ended)

    def _read(self) -> None:
        try:
            count = self._socket.recv_into(self._inbox)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abort()
            return
        if count:
            self.received(self._inbox[:count])
        else:
            self.close()

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.abort()
            return 0

    def _flush(self) -> None:
        sent = self._send(self._waiting)
        del self._waiting[:sent]
        if self._has_ended:
            return
        if not self._waiting:
            self._loop.remove_writer(self._socket)
            if self.closing:
                self.abort()
                return
        if self.full and len(self._waiting) <= self._waiting_bytes_max // 4:
            self.full = False
            self.emptied()
