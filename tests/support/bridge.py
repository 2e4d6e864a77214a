"""A TCP or TLS door to a unix socket: what a gateway does for calls, less everything else."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvhearth.wire.remote import PREFACE, Purpose, purpose_of
from kvhearth_lab.harness import HUNG_S


class Bridge:
    """Carries the connections for calls of a port to a unix socket, until ``stop``."""

    def __init__(self, path: Path, context: ssl.SSLContext | None = None) -> None:
        self._path = path
        self._context = context
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._spawn(self._accept)

    def stop(self) -> None:
        """Close everything."""
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(HUNG_S)

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
        with contextlib.ExitStack() as both, contextlib.suppress(OSError):
            both.enter_context(near)
            if self._context is not None:
                near = both.enter_context(self._context.wrap_socket(near, server_side=True))
            first = near.recv(PREFACE.size)
            if not first:
                return
            assert purpose_of(first) is Purpose.CALLS
            far = both.enter_context(socket.socket(socket.AF_UNIX))
            far.connect(str(self._path))
            self._open += [near, far]
            # One direction at a time: a connection has one call under way, answered in whole.
            back = threading.Thread(target=_pump, args=(far, near), daemon=True)
            back.start()
            _pump(near, far)
            back.join(HUNG_S)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            socket.socket.shutdown(each, socket.SHUT_RDWR)
