"""A bucket over HTTP that keeps values in memory, and misbehaves as a test wants."""

from __future__ import annotations

import contextlib
import re
import socketserver
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvhearth_lab.harness import HUNG_S

_NO_BUCKET = b"<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>"
_SKEW = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"
_EXPIRED = b"<Error><Code>ExpiredToken</Code></Error>"
_CODES = {
    "403": b"<Error><Code>AccessDenied</Code></Error>",
    "404": _NO_BUCKET,
    "429": b"<Error><Code>SlowDown</Code></Error>",
    "500": b"<Error><Code>InternalError</Code></Error>",
    "503": b"<Error><Code>SlowDown</Code></Error>",
}


class BadBucket(ThreadingHTTPServer):
    """The server.

    Attributes:
        mode: present misbehaviour; empty for none.
        token: the only session's token that is accepted; empty for any.
        tokens: those of requests that were accepted.
        values: by path.
        requests: method and path of each request.
        payload_sums: what clients said of the bodies' checksums.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode = self.token = ""
        self.tokens: set[str] = set()
        self.methods = ("GET", "PUT", "HEAD", "DELETE", "POST")
        self.values: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.payload_sums: set[str] = set()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        """URL of the bucket ``bucket`` as a remote."""
        return f"s3://bucket/p?endpoint=http://127.0.0.1:{self.server_address[1]}&region=r"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep silent: clients leave at their deadlines."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    server: BadBucket

    def log_message(self, format: str, *args: Any) -> None:
        """Keep silent."""

    def do_GET(self) -> None:
        self._act(self._get)

    def do_PUT(self) -> None:
        self._act(self._put)

    def do_HEAD(self) -> None:
        self._act(self._head)

    def do_DELETE(self) -> None:
        self._act(self._delete)

    def do_POST(self) -> None:
        self._act(self._delete_many)

    def _act(self, act: Any) -> None:
        self.server.requests.append((self.command, self.path))
        mode = self.server.mode if self.command in self.server.methods else ""
        if self.command == "PUT":
            self.server.payload_sums.add(self.headers.get("x-amz-content-sha256", ""))
        token = self.headers.get("x-amz-security-token", "")
        if self.server.token not in ("", token):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(400, _EXPIRED)
            return
        self.server.tokens.add(token)
        if mode == "skew":
            self._answer(403, _SKEW)
            self.close_connection = True
        elif mode in _CODES:
            if length := int(self.headers.get("Content-Length", 0)):
                self.rfile.read(length)
            self._answer(int(mode), _CODES[mode])
        elif mode == "stall":
            self.server.released.wait(HUNG_S)
            self.close_connection = True
        elif mode == "reset":
            self.connection.close()
            self.close_connection = True
        else:
            act(mode)

    def _answer(self, status: int, body: bytes = b"", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 10:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _put(self, mode: str) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.values[self.path] = body
        self._answer(200)

    def _get(self, mode: str) -> None:
        value = self.server.values.get(self.path)
        if value is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif mode == "truncated":
            self._answer(200, value[: len(value) // 2], len(value))
            self.close_connection = True
        elif mode == "short":
            self._answer(200, value[:-1])
        elif mode == "wrong_object":
            other = next((v for k, v in self.server.values.items() if k != self.path), b"")
            self._answer(200, other)
        elif mode == "flipped":
            self._answer(200, value[:-9] + bytes([value[-9] ^ 1]) + value[-8:])
        elif mode == "endless":
            self._endless()
        elif mode == "endless_said_right":
            self._answer(200, value + value)
        elif mode in ("trickle", "slow"):
            self._slowly(value, 1 if mode == "trickle" else 100_000)
        else:
            self._answer(200, value)

    def _endless(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 10:00:00 GMT")
        self.end_headers()
        while not self.server.released.is_set():
            self.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")

    def _slowly(self, value: bytes, portion: int) -> None:
        self._answer(200, b"", len(value))
        for start in range(0, len(value), portion):
            if self.server.released.is_set():
                break
            self.wfile.write(value[start : start + portion])
            time.sleep(0.1)

    def _head(self, mode: str) -> None:
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, b"", len(value or b""))

    def _delete_many(self, mode: str) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", body)
        for key in keys:
            self.server.values.pop(f"/bucket/{key}", None)
        done = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{done}</DeleteResult>".encode())

    def _delete(self, mode: str) -> None:
        self.server.values.pop(self.path, None)
        self._answer(204)


@contextlib.contextmanager
def bad_bucket() -> Iterator[BadBucket]:
    """Serve a bucket for the length of a block."""
    server = BadBucket()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="bad-bucket")
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        socketserver.TCPServer.server_close(server)
