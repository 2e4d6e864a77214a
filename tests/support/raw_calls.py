"""Raw access to the calls socket."""

from __future__ import annotations

from typing import Any

from kvhearth.errors import KVHearthError
from kvhearth.wire import frames
from kvhearth.wire.frames import decode_status
from support.daemon import Daemon
from support.raw_door import RawLine

BODY_MAX = 1 << 30


def packed(kind: int, number: int, body: bytes = b"") -> bytes:
    """Encode a frame."""
    return frames.encode(kind, number, body, BODY_MAX)


class RawCalls(RawLine):
    """A connection to the calls socket; opened if it is given a token."""

    def __init__(self, daemon: Daemon, token: str = "") -> None:
        super().__init__(daemon.socket_dir / "calls.sock")
        if token:
            self.send(packed(frames.OPEN, 0, token.encode()))
            assert self.frame() == (frames.DONE, 0, b"")

    def __enter__(self) -> RawCalls:
        return self

    def frame(self) -> tuple[int, int, bytes]:
        """Return the next answer: kind, number, body."""
        size, kind, number = frames.HEADER.unpack(self._exactly(frames.HEADER.size))
        return kind, number, self._exactly(size)

    def call(self, method: str, request: Any, number: int = 1) -> bytes:
        """Make one call and return the reply's bytes.

        Raises:
            KVHearthError: the refusal.
        """
        self.send(packed(frames.METHODS[method], number, request.SerializeToString()))
        kind, answered, body = self.frame()
        assert answered == number
        if kind == frames.REFUSED:
            raise decode_status(body)
        return body

    def connection_refused(self) -> KVHearthError:
        """Return the refusal of the whole connection, which must end."""
        kind, number, body = self.frame()
        assert (kind, number) == (frames.REFUSED, 0)
        assert self.ended(), "it refused, but keeps the connection"
        return decode_status(body)

    def send_for(self, seconds: float, data: bytes, times: int) -> int:
        """Send ``data`` up to ``times`` times while the daemon accepts it. Return how often
        it did.
        """
        self._socket.settimeout(seconds)
        for sent in range(times):
            try:
                self._socket.sendall(data)
            except OSError:  # the daemon accepts no more, or has closed the connection
                return sent
        return times

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            assert more, "the daemon hung up without a word"
            data += more
        return data
