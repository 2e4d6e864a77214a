"""Daemons of a benchmark's own, and clients of them, to measure."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth.client import KVClient, connect
from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import checksum_of
from kvhearth.proto.v1 import cache_pb2
from kvhearth.results import CommitGroup, Lease
from kvhearth.session.link import open_link
from kvhearth.transports.base import HEARTBEAT, CacheTransport
from kvhearth.url import parse_url
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.handshake import Hello
from kvhearth_lab.harness.daemon import SERVE, Daemon, Starter
from kvhearth_lab.harness.engine import contract_of

QUIET_S = 60.0
ATTACH_S = 60.0
DEADLINE_S = 60.0
URL_OPTIONS = "lookup_ms=5000&call_ms=20000"
CHAIN_KEYS = 8192
"""Number of keys in one chain, as of a long prompt."""


def broken(problem: str) -> KVHearthError:
    """Return the error of a run whose figures would mean nothing."""
    return KVHearthError(Reason.INTERNAL, f"bench: {problem}")


def contract(page_bytes: int) -> Contract:
    """Return a contract of one full-attention group whose shards have ``page_bytes``."""
    return contract_of(page_bytes, model="bench")


def keys_of(seed: bytes, start: int, count: int) -> list[bytes]:
    """Return keys ``start`` to ``start + count`` of a run, which any of its processes can derive;
    neighbours are neighbours in a chain.
    """
    return [
        hashlib.sha256(seed + number.to_bytes(8, "big")).digest()
        for number in range(start, start + count)
    ]


class Served(Daemon):
    """A daemon to measure."""

    @property
    def client_url(self) -> str:
        """URL for clients, with deadlines that a run keeps."""
        return self.url(URL_OPTIONS)

    def ready(self) -> dict[str, Any]:
        """Wait until it is ready, and has all its memory, so that what is measured next has the
        machine to itself; returns the fields of its line ``ready``.
        """
        said = super().ready()
        self.populated()
        return said

    def book_errors(self) -> list[str]:
        """Return what does not balance in the books."""
        return [error for error in [self.operator(DEADLINE_S).books().error] if error]

    def wait_heard(self, lease: Lease | None) -> None:
        """Wait until the daemon has heard of a lease that the mapped index gave."""
        end = time.monotonic() + QUIET_S
        while lease is not None and not lease.grant.heard:
            if time.monotonic() > end:
                raise broken("the daemon has not heard of a lease")
            time.sleep(0.002)

    def wait_quiet(self) -> None:
        """Wait until all committed blocks are checksummed and all leases released, so that the next
        measurement has the machine to itself.

        Raises:
            KVHearthError: the daemon did not become quiet in time.
        """
        end = time.monotonic() + QUIET_S
        while True:
            found = self.stats()
            unsummed = found.counters.get("stored_blocks", 0) - found.counters.get(
                "summed_blocks", 0
            )
            if not found.leases and not unsummed:
                return
            if time.monotonic() > end:
                raise broken(f"not quiet: {found.leases} leases, {unsummed} blocks not summed")
            time.sleep(0.002)

    def leave_to_ssd(self) -> None:
        """Move all blocks out of memory, once all of them are on SSD.

        Raises:
            KVHearthError: they do not leave in time, or are not on SSD.
        """
        self.wait_quiet()
        operator, end = self.operator(DEADLINE_S), time.monotonic() + QUIET_S
        while (found := operator.stats()).blocks:
            if time.monotonic() > end:
                raise broken(f"{found.blocks} blocks stay in memory: {dict(found.counters)}")
            if found.counters.get("demoted_blocks", 0) < found.counters["stored_blocks"]:
                time.sleep(0.002)
                continue
            for each in operator.namespaces().namespaces:
                operator.evict(each.namespace, 0, "memory")


@contextlib.contextmanager
def served(starter: Starter = SERVE, **settings: object) -> Iterator[Served]:
    """Run a daemon during the block, without HTTP unless ``settings`` say so; ``ready`` waits until
    it can be used.
    """
    with tempfile.TemporaryDirectory(prefix="kvh-") as name:
        daemon = Served(Path(name), None, {"http": "off", **settings}, starter)
        try:
            daemon.launch()
            yield daemon
        finally:
            daemon.kill()


@contextlib.contextmanager
def attached(
    url: str, made: Contract, engine_id: str = "bench", *, map_arena: bool = True
) -> Iterator[KVClient]:
    """Provide a scheduler's client that is ready; ranks beside its own are attached with it.

    Raises:
        KVHearthError: it cannot attach.
    """
    with contextlib.ExitStack() as undo:
        for rank in range(made.world_size - 1, -1, -1):
            client = connect(
                url,
                made,
                engine_id=engine_id,
                scheduler=not rank,
                rank=rank,
                map_arena=map_arena and not rank,
            )
            undo.callback(client.close)
        if not client.wait_ready(ATTACH_S):
            raise broken(f"cannot attach: {client.refusal or 'no daemon'}")
        yield client


@contextlib.contextmanager
def wire(url: str, made: Contract, *, calls: str = "grpc") -> Iterator[CacheTransport]:
    """Provide a bare transport with its own session, for empty calls."""
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        engine_id=f"bench-wire-{secrets.token_hex(4)}",
        contract=made.to_json(),
        rank=0,
        map_arena=False,
        pid=os.getpid(),
    )
    link = open_link(parse_url(f"{url}{'&' if '?' in url else '?'}calls={calls}"), hello)
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


def store_zeros(
    client: KVClient,
    page_bytes: int,
    seed: bytes,
    start: int,
    count: int,
    *,
    group: int = 0,
    scattered: bool = False,
) -> None:
    """Commit a part of a chain whose bytes are zeros, as a new arena's are.

    Args:
        group: KV group of the blocks.
        scattered: neighbours in the chain are none in memory, as after long use.

    Raises:
        KVHearthError: not all of them were kept.
    """
    keys = keys_of(seed, start, count)
    parent = keys_of(seed, start - 1, 1)[0] if start % CHAIN_KEYS else b""
    slots = client.reserve({group: count})
    extents = slots.groups[group]
    granted, shards = extents.shape
    if scattered:
        extents = np.random.default_rng(start).permutation(extents)
    digest = np.frombuffer(checksum_of(bytes(page_bytes)), np.uint8)
    sums = np.tile(digest, (granted, shards, 1))
    stored = CommitGroup(keys[:granted], extents, sums, parent)
    answer = client.commit({group: stored}, boot_id=slots.boot_id)
    if np.count_nonzero(answer.stored[group]) < count:
        raise broken(f"stores failed: {slots.short_reason or answer.reason or 'known key'}")


def end_child(child: subprocess.Popen[str]) -> None:
    """End a process that ends with its standard input."""
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    try:
        child.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
