"""A network between clients and a gateway that can be cut, slowed and held: byte by byte, by the
purpose of connections.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvhearth.wire.remote import PREFACE, Purpose, purpose_of

_READ_BYTES = 1 << 18
_HELD_S = 0.02
_FIRST_S = 10.0
_JOIN_S = 5.0


class _Pair(NamedTuple):
    """One forwarded connection: the client's end and the gateway's."""

    near: socket.socket
    far: socket.socket


class _Trap(NamedTuple):
    purpose: Purpose
    action: Callable[[], object]


class Relay:
    """Forwards connections to a gateway on 127.0.0.1, until ``stop``.

    It has the gateway's own port on another address.

    Args:
        port: the gateway's.
        host: address for clients, of the loopback network.

    Attributes:
        counts: connections so far, by purpose.
        garble: changes bytes on their way to the client, given the connection's purpose.
        delay_s: pause before each piece is forwarded, seconds.
        held: whether nothing is forwarded, while connections stay open.
        away: whether new connections are closed at once.
    """

    def __init__(self, port: int, host: str = "127.0.0.2") -> None:
        self.host = host
        self.counts = dict.fromkeys(Purpose, 0)
        self.garble: Callable[[Purpose, bytes], bytes] = lambda purpose, data: data
        self.delay_s = 0.0
        self.held = False
        self.away = False
        self._gateway = ("127.0.0.1", port)
        self._lock = threading.Lock()
        self._pairs: dict[_Pair, Purpose] = {}
        self._trap: _Trap | None = None
        self._left = 0
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((host, port))
        self._spawn(self._accept)

    def cut(self, *purposes: Purpose) -> int:
        """Break the connections of these purposes (none: of all); new ones work. Return their
        number.
        """
        found = self._of(purposes)
        for pair in found:
            _shut(pair.near)
            _shut(pair.far)
        return len(found)

    def half_close(self, *purposes: Purpose, near: bool) -> None:
        """End one direction of the connections of these purposes: the client's side (``near``) or
        the gateway's hears the end of the stream, and may go on to send.
        """
        for pair in self._of(purposes):
            with contextlib.suppress(OSError):
                (pair.near if near else pair.far).shutdown(socket.SHUT_WR)

    def trap(self, purpose: Purpose, after_bytes: int, action: Callable[[], object]) -> None:
        """Call ``action`` once, on a thread of the relay, when connections of this purpose have
        carried ``after_bytes`` more bytes in both directions: no byte follows before it returns.
        """
        with self._lock:
            self._trap, self._left = _Trap(purpose, action), after_bytes

    @property
    def armed(self) -> bool:
        """Whether a trap waits."""
        return self._trap is not None

    def disarm(self) -> bool:
        """Remove the trap; False if it was sprung."""
        with self._lock:
            armed, self._trap = self._trap is not None, None
            return armed

    def stop(self) -> None:
        """Break all connections, and take no more."""
        self._stopped, self.held = True, False
        _shut(self._listener)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _of(self, purposes: tuple[Purpose, ...]) -> list[_Pair]:
        with self._lock:
            return [
                pair for pair, purpose in self._pairs.items() if purpose in purposes or not purposes
            ]

    def _spawn(self, function: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.away:
                near.close()
            else:
                self._spawn(self._carry, near)

    def _carry(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self._gateway) as far:
            near.settimeout(_FIRST_S)
            first = near.recv(PREFACE.size, socket.MSG_WAITALL)
            near.settimeout(None)
            if len(first) < PREFACE.size:
                return
            purpose = purpose_of(first)
            pair = _Pair(near, far)
            with self._lock:
                self.counts[purpose] += 1
                self._pairs[pair] = purpose
            try:
                far.sendall(first)
                back = threading.Thread(
                    target=self._pump,
                    args=(far, near, purpose),
                    kwargs={"back": True},
                    daemon=True,
                )
                back.start()
                self._pump(near, far, purpose)
                back.join()
            finally:
                with self._lock:
                    del self._pairs[pair]

    def _pump(
        self,
        source: socket.socket,
        target: socket.socket,
        purpose: Purpose,
        *,
        back: bool = False,
    ) -> None:
        """Forward one direction until its end; a break of it is one of both."""
        try:
            while data := source.recv(_READ_BYTES):
                time.sleep(self.delay_s)
                while self.held:
                    time.sleep(_HELD_S)
                piece, action = self._sprung(purpose, len(data))
                if action is not None:
                    target.sendall(data[:piece])
                    action()
                    data = data[piece:]
                target.sendall(self.garble(purpose, data) if back else data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            _shut(source)
            _shut(target)

    def _sprung(self, purpose: Purpose, size: int) -> tuple[int, Callable[[], object] | None]:
        """Count bytes to be forwarded; return where among them the trap's action is due, if any."""
        with self._lock:
            trap = self._trap
            if trap is None or trap.purpose is not purpose:
                return size, None
            if size <= self._left:
                self._left -= size
                return size, None
            self._trap = None
            return self._left, trap.action


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relay(port: int) -> Iterator[Relay]:
    """Relay to the gateway at a port during the block."""
    made = Relay(port)
    try:
        yield made
    finally:
        made.stop()
