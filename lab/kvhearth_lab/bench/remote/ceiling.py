"""The ceiling: a sink and a source of bytes behind a bare socket of loopback, without a store.

The far end is a process: ``python -m kvhearth_lab.bench.remote.ceiling``. It prints its port, and
ends with its standard input.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvhearth.model import U8
from kvhearth_lab.bench.daemon import broken, end_child

_REQUEST = struct.Struct("<cII")
"""``S`` or ``G`` (the far end sinks or gives), messages, and bytes of each."""
_ACK = b"\1"
_BUFFER_BYTES = 4 << 20
_DEADLINE_S = 60.0


def connect(port: int) -> socket.socket:
    """Return a connection to the far end, with buffers as large as the kernel allows."""
    line = socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S)
    tune(line)
    return line


def tune(line: socket.socket) -> None:
    """Set what a fast connection of loopback wants."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        line.setsockopt(socket.SOL_SOCKET, name, _BUFFER_BYTES)


def receive(line: socket.socket, into: memoryview) -> None:
    """Fill ``into``.

    Raises:
        ConnectionError: the far end closed the connection.
    """
    while into:
        size = line.recv_into(into)
        if not size:
            raise ConnectionError("closed")
        into = into[size:]


class FarEnd:
    """The process of the far end, and connections to it.

    Args:
        connections: how many it gets.
    """

    def __init__(self, connections: int) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        assert self._child.stdout is not None
        port = self._child.stdout.readline().strip()
        if not port:
            raise broken("the far end of the sockets did not start")
        self.pid = self._child.pid
        self._lines = [connect(int(port)) for _ in range(connections)]
        self._threads = ThreadPoolExecutor(connections, "ceiling")

    def put(self, pages: U8, count: int) -> float:
        """Return the seconds to send all pages, shape (n, bytes), on ``count`` connections."""
        return self._timed(pages, count, b"S", _send)

    def get(self, pages: U8, count: int) -> float:
        """Return the seconds to receive as many bytes into the pages, on ``count`` connections."""
        return self._timed(pages, count, b"G", _receive)

    def _timed(
        self, pages: U8, count: int, kind: bytes, move: Callable[[socket.socket, U8], None]
    ) -> float:
        def run(line: socket.socket, own: U8) -> None:
            line.sendall(_REQUEST.pack(kind, len(own), own.shape[1]))
            move(line, own)

        start = time.perf_counter()
        parts = np.array_split(pages, count)
        for done in [
            self._threads.submit(run, *each) for each in zip(self._lines, parts, strict=False)
        ]:
            done.result(_DEADLINE_S)
        return time.perf_counter() - start

    def close(self) -> None:
        """End it."""
        for line in self._lines:
            line.close()
        self._threads.shutdown()
        end_child(self._child)


def _send(line: socket.socket, pages: U8) -> None:
    for page in pages:
        line.sendall(memoryview(page))
    receive(line, memoryview(bytearray(1)))


def _receive(line: socket.socket, pages: U8) -> None:
    for page in pages:
        receive(line, memoryview(page))


def cpu_s(pids: Sequence[int]) -> float:
    """Return the processor seconds that processes have used so far."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _serve(line: socket.socket) -> None:
    """Sink or give what is asked for, in one message's memory, until the connection ends."""
    tune(line)
    request, memory = memoryview(bytearray(_REQUEST.size)), memoryview(b"")
    with line:
        while True:
            try:
                receive(line, request)
            except ConnectionError:
                return
            kind, count, size = _REQUEST.unpack(request)
            if len(memory) < size:
                memory = memoryview(bytearray(size))
            for _ in range(count):
                if kind == b"S":
                    receive(line, memory[:size])
                else:
                    line.sendall(memory[:size])
            if kind == b"S":
                line.sendall(_ACK)


def main() -> None:
    """Serve until standard input ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()

    def accept() -> None:
        while True:
            line, _ = listener.accept()
            threading.Thread(target=_serve, args=(line,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
