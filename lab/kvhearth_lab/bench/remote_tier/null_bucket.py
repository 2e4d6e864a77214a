"""A bucket with nothing behind it: keeps values in memory, and costs as little as sockets do.

``python -m kvhearth_lab.bench.remote_tier.null_bucket`` prints its port, and ends with its standard
input.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

_HEAD_BYTES_MAX = 1 << 16
_BUFFER_BYTES = 4 << 20
_FOUND = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nLast-Modified: Mon, 23 Nov 2026 10:00:00 GMT\r\n'


class _Connection:
    """One connection of a client."""

    def __init__(self, line: socket.socket, values: dict[bytes, memoryview]) -> None:
        self._line, self._values = line, values
        self._data = bytearray()

    def serve(self) -> None:
        """Answer requests until the client leaves."""
        with self._line:
            while (head := self._head()) is not None:
                self._answer(head)

    def _head(self) -> bytes | None:
        while (end := self._data.find(b"\r\n\r\n")) < 0:
            more = self._line.recv(_HEAD_BYTES_MAX)
            if not more:
                return None
            self._data += more
        head = bytes(self._data[:end])
        del self._data[: end + 4]
        return head

    def _body(self, size: int) -> memoryview:
        body = memoryview(bytearray(size))
        taken = min(size, len(self._data))
        body[:taken] = self._data[:taken]
        del self._data[:taken]
        left = body[taken:]
        while left:
            count = self._line.recv_into(left)
            if not count:
                raise ConnectionError("closed")
            left = left[count:]
        return body

    def _answer(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        method, path, _ = first.split(b" ")
        length = 0
        for line in lines:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        body = self._body(length)
        if method == b"PUT":
            self._values[path] = body
            self._line.sendall(_FOUND + b"Content-Length: 0\r\n\r\n")
        elif method == b"POST":
            keys = [part.partition(b"</Key>")[0] for part in bytes(body).split(b"<Key>")[1:]]
            for key in keys:
                self._values.pop(b"/".join((path.partition(b"?")[0], key)), None)
            parts = b"".join(b"<Deleted><Key>%s</Key></Deleted>" % key for key in keys)
            done = b"<DeleteResult>%s</DeleteResult>" % parts
            self._line.sendall(_FOUND + b"Content-Length: %d\r\n\r\n" % len(done) + done)
        else:
            self._read(method, path)

    def _read(self, method: bytes, path: bytes) -> None:
        value = self._values.get(path)
        if value is None:
            self._line.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            self._line.sendall(_FOUND + b"Content-Length: %d\r\n\r\n" % len(value))
            if method == b"GET":
                self._line.sendall(value)


def main() -> None:
    """Serve until stdin ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    values: dict[bytes, memoryview] = {}

    def accept() -> None:
        while True:
            line, _ = listener.accept()
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                line.setsockopt(socket.SOL_SOCKET, name, _BUFFER_BYTES)
            threading.Thread(target=_Connection(line, values).serve, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    main()
    os._exit(0)
