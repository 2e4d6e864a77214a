"""Calls socket of a scripted daemon: a function answers the frames."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.wire import frames
from kvhearth.wire.frames import encode_status
from kvhearth_lab.harness import HUNG_S

BODY_MAX = 1 << 24
Answer = Callable[[str, Any, str], Any]
"""Function from method, request and token to a reply; a ``KVHearthError`` is sent as a refusal."""


class Listener:
    """Calls ``serve`` with each connection, on a thread of its own, until ``stop``."""

    def __init__(self, path: Path, serve: Callable[[socket.socket], None]) -> None:
        self.connections: list[socket.socket] = []
        self._serve = serve
        self._threads: list[threading.Thread] = []
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._spawn(self._accept)

    def refuse(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def drop(self) -> None:
        """Shut all connections down."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the threads; answers in progress get five seconds."""
        for thread in self._threads:
            thread.join(HUNG_S)

    def _spawn(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            self._spawn(self._serve, connection)


class FakeCalls:
    """Serves calls until ``stop``."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self._answer = answer
        self._listener = Listener(path, self._serve)

    def stop(self) -> None:
        """Close everything; answers in progress get five seconds."""
        self._listener.refuse()
        self._listener.drop()
        self._listener.join()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            _, _, token = _frame(connection)
            connection.sendall(frames.encode(frames.DONE, 0, b"", BODY_MAX))
            while True:
                kind, number, body = _frame(connection)
                connection.sendall(self._reply(kind, number, body, token.decode()))

    def _reply(self, kind: int, number: int, body: bytes, token: str) -> bytes:
        name = frames.NAMES[kind]
        request = getattr(pb, f"{name}Request").FromString(body)
        try:
            reply = self._answer(name, request, token)
        except KVHearthError as error:
            return frames.encode(frames.REFUSED, number, encode_status(error), BODY_MAX)
        return frames.encode(frames.DONE, number, reply.SerializeToString(), BODY_MAX)


def _frame(connection: socket.socket) -> tuple[int, int, bytes]:
    size, kind, number = frames.HEADER.unpack(_exactly(connection, frames.HEADER.size))
    if size > BODY_MAX:
        raise KVHearthError(Reason.BAD_MESSAGE, f"{size} bytes")
    return kind, number, _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
