"""A network between clients and a gateway that a test can cut: by the purpose of connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kvhearth.wire.remote import PREFACE, Purpose, purpose_of

_HOST = "127.0.0.2"
_READ_BYTES = 1 << 18


class Relay:
    """Forwards connections to a gateway on 127.0.0.1, until ``stop``.

    It has the gateway's own port on another address, so that clients need no redirection.

    Args:
        port: the gateway's.

    Attributes:
        host: address for clients.
        counts: connections so far, by purpose.
        garble: changes bytes on their way to the client, given the connection's purpose.
    """

    host = _HOST

    def __init__(self, port: int) -> None:
        self._gateway = ("127.0.0.1", port)
        self.counts = dict.fromkeys(Purpose, 0)
        self.garble: Callable[[Purpose, bytes], bytes] = lambda purpose, data: data
        self._pairs: dict[Purpose, list[socket.socket]] = {purpose: [] for purpose in Purpose}
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((_HOST, port))
        self._spawn(self._accept)

    def cut(self, *purposes: Purpose) -> None:
        """Break the connections of these purposes; new ones work."""
        for purpose in purposes or Purpose:
            pairs, self._pairs[purpose] = self._pairs[purpose], []
            for end in pairs:
                _shut(end)

    def stop(self) -> None:
        """Break all connections, and take no more."""
        _shut(self._listener)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _spawn(self, function: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._spawn(self._carry, near)

    def _carry(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self._gateway) as far:
            first = near.recv(PREFACE.size, socket.MSG_WAITALL)
            if len(first) < PREFACE.size:
                return
            purpose = purpose_of(first)
            self.counts[purpose] += 1
            self._pairs[purpose] += [near, far]
            far.sendall(first)
            back = threading.Thread(target=self._pump, args=(far, near, purpose), daemon=True)
            back.start()
            self._pump(near, far, None)
            back.join(5)

    def _pump(self, source: socket.socket, target: socket.socket, purpose: Purpose | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_READ_BYTES):
                target.sendall(data if purpose is None else self.garble(purpose, data))
        _shut(source)
        _shut(target)


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
