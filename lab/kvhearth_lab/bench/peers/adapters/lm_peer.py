"""Adapter of LMCache's ``lm://`` server over TCP, driven by a bare socket of its protocol.

The server acknowledges no put; a question for the last key ends a series of them.
"""

from __future__ import annotations

import importlib.metadata
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvhearth_lab.bench.peers.adapters.harness import Child, Config, WirePeer, free_port

_ASKED = struct.Struct("iiiiiiiii150s")
"""Command, length, format, dtype, location, four dimensions, key."""
_TOLD = struct.Struct("iiiiiiiii")
"""Code, length, format, dtype, four dimensions, location."""
_PUT, _GET, _EXISTS = 1, 2, 3
_GOOD = 200
_BINARY, _UINT8 = 4, 6
_DEADLINE_S = 60.0


class Peer(WirePeer):
    """See ``harness.Peer``."""

    def __init__(self) -> None:
        super().__init__()
        self._port = 0

    def start(self, config: Config) -> Mapping[str, Any]:
        kind = self.prepare(config)
        self._port = free_port()
        command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(self._port), "cpu"]
        self.children.append(Child(config.folder, "lmcache_server", command))
        self.children[0].wait_port(self._port)
        return {
            "versions": {
                "lmcache": importlib.metadata.version("lmcache"),
                "python": sys.version.split()[0],
            },
            "settings": "lm:// server in memory, a bare socket as client",
            "pages": kind,
            "leftovers": [],
            "pids": [self.children[0].pid],
        }

    def connect(self) -> socket.socket:
        line = socket.create_connection(("127.0.0.1", self._port), timeout=_DEADLINE_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return line

    def put(self, connection: socket.socket, pages: Sequence[int]) -> None:
        for page in pages:
            own = memoryview(self.source[page])
            connection.sendall(_ask(_PUT, page, len(own)))
            connection.sendall(own)
        connection.sendall(_ask(_EXISTS, pages[-1], 0))
        _answer(connection)

    def get(self, connection: socket.socket, pages: Sequence[int]) -> None:
        for page in pages:
            own = memoryview(self.target[page])
            connection.sendall(_ask(_GET, page, 0))
            length = _answer(connection)
            if length != len(own):
                raise RuntimeError(f"a block of {length} bytes, not {len(own)}")
            _receive(connection, own)


def _ask(command: int, page: int, length: int) -> bytes:
    key = f"model@1@0@{page:016x}@uint8".encode().ljust(150)
    return _ASKED.pack(command, length, _BINARY, _UINT8, 1, length, 0, 0, 0, key)


def _answer(line: socket.socket) -> int:
    """Return the length that an answer announces.

    Raises:
        RuntimeError: the block is not there.
    """
    head = bytearray(_TOLD.size)
    _receive(line, memoryview(head))
    code, length, *_ = _TOLD.unpack(head)
    if code != _GOOD:
        raise RuntimeError(f"the server answers {code}")
    return int(length)


def _receive(line: socket.socket, into: memoryview) -> None:
    while into:
        size = line.recv_into(into)
        if not size:
            raise RuntimeError("the server closed the connection")
        into = into[size:]
