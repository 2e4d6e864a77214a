"""A collector of OpenTelemetry traces on this host: OTLP by HTTP, as a real one takes it."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """A span that was sent: ids in hexadecimal, attributes of the span and of its process."""

    name: str
    trace: str
    span: str
    parent: str
    seconds: float
    attributes: dict[str, Any]
    resource: dict[str, Any]


def _plain(pairs: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in pairs}


class Collector:
    """Keeps the spans that arrive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Received] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server.server_port}"
        self.endpoint = f"{self.base}/v1/traces"

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of a message."""
        for process in request.resource_spans:
            resource = _plain(process.resource.attributes)
            for scope in process.scope_spans:
                for one in scope.spans:
                    assert one.end_time_unix_nano >= one.start_time_unix_nano
                    found = Received(
                        one.name,
                        one.trace_id.hex(),
                        one.span_id.hex(),
                        one.parent_span_id.hex(),
                        (one.end_time_unix_nano - one.start_time_unix_nano) / 1e9,
                        _plain(one.attributes),
                        resource,
                    )
                    with self._lock:
                        self._spans.append(found)

    def spans(self, name: str = "") -> list[Received]:
        """Return the spans that arrived, of one name or all."""
        with self._lock:
            return [one for one in self._spans if name in ("", one.name)]


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector."""
    found = Collector()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        thread.join()
        found.server.server_close()
