"""Listening sockets of gateways: bound once, they outlive the processes that accept from them."""

from __future__ import annotations

import errno
import hashlib
import socket
import time
from dataclasses import dataclass

from kvhearth.errors import KVHearthError, Reason

_BACKLOG = 256
_PORT_MAX = 65535
_TAKEN_S = 3.0
_TAKEN_PAUSE_S = 0.05


@dataclass(frozen=True)
class Place:
    """One gateway process among those that share an address.

    Attributes:
        index: its number.
        ports: the port of each process's own; that of all if there is one process.
    """

    index: int
    ports: tuple[int, ...]

    def port_of(self, tenant: str, engine_id: str) -> int:
        """Return the port of the process that serves an engine."""
        digest = hashlib.sha256(f"{tenant}\0{engine_id}".encode(errors="replace")).digest()
        return self.ports[int.from_bytes(digest[:8], "little") % len(self.ports)]


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket; ``shared`` with others of this user by SO_REUSEPORT.

    Raises:
        KVHearthError: ``socket_unusable``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(listener, host, port)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise KVHearthError(
            Reason.SOCKET_UNUSABLE,
            f"cannot listen on {host}:{port} ({error.strerror or error}); give a free port of an "
            "address of this machine",
        ) from None
    listener.setblocking(False)
    return listener


def _bind(listener: socket.socket, host: str, port: int) -> None:
    """Bind; wait a little for a port that is taken, most likely by the gateway of a daemon that was
    killed a moment ago.
    """
    end = time.monotonic() + _TAKEN_S
    while True:
        try:
            listener.bind((host, port))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise
            time.sleep(_TAKEN_PAUSE_S)


def listen_all(host: str, port: int, processes: int) -> list[tuple[Place, list[socket.socket]]]:
    """Return each process's place and listening sockets: with several, one of the port that they
    share and one of its own, ``port`` + 1 + index.

    Raises:
        KVHearthError: ``socket_unusable``.
    """
    opened: list[socket.socket] = []
    try:
        if processes == 1:
            opened.append(listen(host, port))
            return [(Place(0, (opened[0].getsockname()[1],)), opened)]
        first = listen(host, port, shared=True)
        opened.append(first)
        base = first.getsockname()[1]
        if base + processes > _PORT_MAX:
            raise KVHearthError(
                Reason.SOCKET_UNUSABLE, f"{processes} ports after {base} are more than there are"
            )
        opened += [listen(host, base, shared=True) for _ in range(1, processes)]
        own = [listen(host, base + 1 + index) for index in range(processes)]
        ports = tuple(each.getsockname()[1] for each in own)
        return [(Place(index, ports), [opened[index], own[index]]) for index in range(processes)]
    except KVHearthError:
        for each in opened:
            each.close()
        raise
