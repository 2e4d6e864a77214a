"""A daemon of the bench's own, and clients of it, to measure."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from kvhearth.client import KVClient, connect
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import admin_pb2, admin_pb2_grpc, cache_pb2
from kvhearth.session.link import open_link
from kvhearth.transports.base import HEARTBEAT, CacheTransport
from kvhearth.url import ADMIN_TOKEN_FILE, GRPC_SOCKET, parse_url
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.handshake import Hello
from kvhearth_server.config.load import ENV_PREFIX

READY_S = 120.0
QUIET_S = 60.0
ATTACH_S = 60.0
DEADLINE_S = 60.0
SERVE = ("kvhearth_server.cli.app", "serve")
_TOKEN_KEY = "kvhearth-admin-token"
_LOG_SHOWN_CHARS = 2000


def broken(problem: str) -> KVHearthError:
    """Return the error of a run whose figures would mean nothing."""
    return KVHearthError(Reason.INTERNAL, f"bench: {problem}")


def contract(page_bytes: int) -> Contract:
    """Return a contract of one full-attention group whose shards have ``page_bytes``."""
    return Contract("bench", "none", "uint8", (GroupSpec(GroupKind.FULL, 16, page_bytes),))


class Served:
    """A daemon process, its log, and the kernel's figures about it.

    Args:
        folder: folder for sockets and log; a short path.
        flags: flags of ``kvhearth serve``.
        start: the module that serves, and its first arguments.
    """

    def __init__(self, folder: Path, *flags: str, start: Sequence[str] = SERVE) -> None:
        self._sockets = folder / "s"
        self._log_path = folder / "log"
        self.url = f"kvhearth+unix://{self._sockets}?lookup_ms=5000&call_ms=20000"
        command = [sys.executable, "-m", *start, *flags]
        command += ["--socket-dir", str(self._sockets), "--log-format", "json"]
        # The operator's own settings must not affect the measurement.
        kept = {name: text for name, text in os.environ.items() if not name.startswith(ENV_PREFIX)}
        kept.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")  # as `kvhearth` sets it for itself
        self._started = time.monotonic()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=kept)
        self._channel: grpc.Channel | None = None

    def ready(self) -> dict[str, Any]:
        """Wait for the log line ``ready``, and return its fields with ``seconds`` since the start.

        Raises:
            KVHearthError: the daemon did not come up; with the end of its log.
        """
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self._process.poll() is None:
            for line in self._log_path.read_text().splitlines():
                if line.startswith("{") and line.endswith("}"):
                    said: dict[str, Any] = json.loads(line)
                    if said.get("event") == "ready":
                        return {**said, "seconds": time.monotonic() - self._started}
            time.sleep(0.002)
        raise broken(f"no daemon: {self._log_path.read_text()[-_LOG_SHOWN_CHARS:]}")

    def private_bytes(self) -> int:
        """Return the resident memory of the process without the shared arena."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return sum(int(found[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024

    def anonymous_bytes(self) -> int:
        """Return the private memory without a file, which grows with the index."""
        text = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        line = next(line for line in text.splitlines() if line.startswith("Anonymous:"))
        return int(line.split()[1]) * 1024

    def cpu_s(self) -> float:
        """Return the processor time of all its live threads."""
        nanoseconds = 0
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                nanoseconds += int((task / "schedstat").read_text().split()[0])
        return nanoseconds / 1e9

    def stats(self, *, check_books: bool = False) -> admin_pb2.StatsResponse:
        """Return the statistics that ``kvhearth stat`` shows."""
        stub, token = self._admin()
        request = admin_pb2.StatsRequest(check_books=check_books)
        return stub.Stats(request, metadata=token, timeout=DEADLINE_S)

    def evict_all(self) -> int:
        """Evict every namespace as ``kvhearth evict --keep 0`` does; returns the number of
        blocks.
        """
        stub, token = self._admin()
        spaces = stub.ListNamespaces(
            admin_pb2.ListNamespacesRequest(), metadata=token, timeout=DEADLINE_S
        )
        replies = [
            stub.Evict(
                admin_pb2.EvictRequest(namespace=space.namespace, keep_bytes=0),
                metadata=token,
                timeout=DEADLINE_S,
            )
            for space in spaces.namespaces
        ]
        return sum(reply.evicted_blocks for reply in replies)

    def _admin(self) -> tuple[admin_pb2_grpc.AdminServiceStub, tuple[tuple[str, str]]]:
        """Return the stub of the operator's calls, and the metadata that each call needs."""
        token = (self._sockets / ADMIN_TOKEN_FILE).read_text().strip()
        if self._channel is None:
            target = f"unix:{self._sockets / GRPC_SOCKET}"
            options = [("grpc.enable_http_proxy", 0), ("grpc.default_authority", "localhost")]
            self._channel = grpc.insecure_channel(target, options=options)
        return admin_pb2_grpc.AdminServiceStub(self._channel), ((_TOKEN_KEY, token),)

    def wait_quiet(self) -> None:
        """Wait until all committed blocks are checksummed and all leases released, so that the next
        measurement has the machine to itself.

        Raises:
            KVHearthError: the daemon did not become quiet in time.
        """
        end = time.monotonic() + QUIET_S
        while True:
            found = self.stats()
            unsummed = found.counters["stored_blocks"] - found.counters["summed_blocks"]
            if not found.leases and not unsummed:
                return
            if time.monotonic() > end:
                raise broken(f"not quiet: {found.leases} leases, {unsummed} blocks not summed")
            time.sleep(0.002)

    def end(self) -> None:
        """Stop the daemon."""
        if self._channel is not None:
            self._channel.close()
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def served(*flags: str, start: Sequence[str] = SERVE) -> Iterator[Served]:
    """Run a daemon during the block."""
    with tempfile.TemporaryDirectory(prefix="kvh-") as name:
        daemon = Served(Path(name), *flags, start=start)
        try:
            yield daemon
        finally:
            daemon.end()


@contextlib.contextmanager
def attached(url: str, made: Contract, engine_id: str = "bench") -> Iterator[KVClient]:
    """Provide a client that is ready.

    Raises:
        KVHearthError: it cannot attach.
    """
    client = connect(url, made, engine_id=engine_id)
    try:
        if not client.wait_ready(ATTACH_S):
            raise broken(f"cannot attach: {client.refusal or 'no daemon'}")
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def wire(url: str, made: Contract, *, calls: str = "grpc") -> Iterator[CacheTransport]:
    """Provide a bare transport with its own session, for empty calls."""
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        engine_id=f"bench-wire-{calls}",
        contract=made.to_json(),
        rank=0,
        map_arena=False,
        pid=os.getpid(),
    )
    link = open_link(replace(parse_url(url), calls=calls), hello)
    try:
        yield link.transport
    finally:
        link.close()


def empty_call(calls: CacheTransport) -> float:
    """Return the seconds of an empty heartbeat."""
    request = cache_pb2.HeartbeatRequest()
    start = time.perf_counter()
    calls.call(HEARTBEAT, request, DEADLINE_S)
    return time.perf_counter() - start
