"""Runs ``kvhearth bench remote``: bare sockets, our gateway and other caches in turns."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvhearth.client import KVClient
from kvhearth.copiers.base import Copier, Done, Ticket
from kvhearth.copiers.remote import RemoteCopier
from kvhearth.model import U8
from kvhearth.page_layout import PagedKV
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth.results import CommitGroup
from kvhearth.session.remote_arena import RemoteArena
from kvhearth.transports.base import LOOKUP, CacheTransport
from kvhearth.version import __version__
from kvhearth_lab.bench.daemon import (
    DEADLINE_S,
    URL_OPTIONS,
    Served,
    attached,
    broken,
    contract,
    empty_call,
    keys_of,
    served,
    store_zeros,
    wire,
)
from kvhearth_lab.bench.local.figures import BATCH, KEYS, PAGE_BYTES, SMALL_BYTES
from kvhearth_lab.bench.peers.adapter import (
    Adapter,
    PeerFailed,
    adapter_of,
    interpreters,
    parse_count,
    seconds_of,
)
from kvhearth_lab.bench.peers.adapters.harness import (
    CONNECTIONS,
    compare,
    fill,
    free_port,
    huge_or_not,
    stamp,
    wipe,
)
from kvhearth_lab.bench.remote.ceiling import FarEnd, cpu_s
from kvhearth_lab.bench.remote.figures import (
    BATCH_BYTES,
    FIGURES,
    PEERS,
    STORM_CONNECTIONS,
    Sizes,
)
from kvhearth_lab.bench.remote.storm import storm
from kvhearth_lab.bench.report import Result, machine, missed, p50, p99, steps, us

PUT, GET = "put", "get"
_CONTRACT = contract(PAGE_BYTES)
_SMALL = contract(SMALL_BYTES)
_BLOCKS = 4096
Note = Callable[[str], None]


class Side(Protocol):
    """One contender: a batch of blocks there or back, on a number of connections."""

    @property
    def pids(self) -> Sequence[int]:
        """Processes of the serving end."""

    def run(self, operation: str, connections: int, number: int) -> float:
        """Return the seconds of one batch; every byte that came back was compared."""


class Ceiling:
    """Bare sockets; see ``Side``."""

    def __init__(self, far: FarEnd, source: U8, target: U8) -> None:
        self.pids = (far.pid,)
        self._far, self._source, self._target = far, source, target

    def run(self, operation: str, connections: int, number: int) -> float:
        if operation == PUT:
            return self._far.put(self._source, connections)
        return self._far.get(self._target, connections)


class Ours:
    """KVHearth through a gateway; see ``Side``.

    Args:
        daemon: the gateway's.
        clients: by number of connections, an attached client.
        verified: whether checksums travel, and are compared at both ends.
    """

    def __init__(
        self,
        daemon: Served,
        clients: Mapping[int, KVClient],
        source: U8,
        target: U8,
        *,
        verified: bool = True,
    ) -> None:
        self.pids = [daemon.pid, *daemon.children()]
        self._daemon = daemon
        self._source, self._target = source, target
        self._clients = clients
        self._copiers: dict[int, tuple[Copier, Copier]] = {}
        for count, client in clients.items():
            arena = client.arena
            if not isinstance(arena, RemoteArena):
                raise broken("no arena on another host is attached")
            self._copiers[count] = (
                RemoteCopier(PagedKV([source]), arena, sums=verified),
                RemoteCopier(PagedKV([target]), arena, verify=verified),
            )
        self._keys: list[bytes] = []

    def run(self, operation: str, connections: int, number: int) -> float:
        return self.move(operation, connections, number, np.arange(BATCH))

    def move(self, operation: str, connections: int, number: int, pages: Any) -> float:
        """Return the seconds of storing or loading these pages."""
        if operation == PUT:
            stamp(self._source[pages], number)
            seconds = self._put(connections, pages)
            self._daemon.wait_quiet()
            return seconds
        wipe(self._target[pages])
        seconds = self._get(connections, pages)
        compare(self._source[pages], self._target[pages])
        return seconds

    def _put(self, connections: int, pages: Any) -> float:
        client, copier = self._clients[connections], self._copiers[connections][0]
        keys = [secrets.token_bytes(32) for _ in pages]
        start = time.perf_counter()
        slots = client.reserve({0: len(pages)})
        extents = slots.groups[0]
        ticket = copier.store(slots.boot_id, pages[: len(extents)], extents[:, 0])
        done = _finished(copier, ticket, len(pages))
        answer = client.commit(
            {0: CommitGroup(keys, extents, done.checksums)}, boot_id=slots.boot_id
        )
        seconds = time.perf_counter() - start
        if not answer.stored[0].all():
            raise broken(f"a put failed: {answer.reason}")
        self._keys = keys
        return seconds

    def _get(self, connections: int, pages: Any) -> float:
        client, copier = self._clients[connections], self._copiers[connections][1]
        start = time.perf_counter()
        found = client.lookup({0: self._keys})
        extents = found.groups[0].extents
        if len(extents) < len(pages):
            raise broken(f"a lookup missed: {found.reason or found.lease_short or 'evicted'}")
        ticket = copier.load(found.boot_id, extents, pages[: len(extents)])
        _finished(copier, ticket, len(pages))
        seconds = time.perf_counter() - start
        client.release(found.lease)
        return seconds

    def book_errors(self) -> list[str]:
        """Return what does not balance in the daemon's books."""
        return self._daemon.book_errors()

    def close(self) -> None:
        """End the copiers; the clients are the caller's."""
        for pair in self._copiers.values():
            for copier in pair:
                copier.close()


def _finished(copier: Copier, ticket: Ticket | None, count: int) -> Done:
    """Wait for a batch; all its blocks must have been copied."""
    done = None if ticket is None else copier.wait(ticket, DEADLINE_S)
    if done is None or len(done.ok) != count or not done.ok.all():
        raise broken(f"a copy failed: {done.reasons if done else 'not taken, or late'}")
    return done


class Peer:
    """Another cache; see ``Side``."""

    def __init__(self, adapter: Adapter, pids: Sequence[int]) -> None:
        self.pids = pids
        self._adapter = adapter

    def run(self, operation: str, connections: int, number: int) -> float:
        name = {PUT: "store", GET: "load"}[operation]
        answer = self._adapter.run(f"{name}_{connections}", number)
        if operation == GET and not parse_count(answer, "compared_bytes"):
            raise PeerFailed("its adapter compared nothing")
        return seconds_of(answer)


@dataclass
class Samples:
    """Seconds and server's processor seconds of one side, by operation and connections."""

    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    cpu: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    own_cpu: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def gbs(self, operation: str) -> dict[str, float]:
        """Return the median GB/s by number of connections."""
        return {
            str(count): round(BATCH_BYTES / p50(times) / 1e9, 3)
            for (own, count), times in self.seconds.items()
            if own == operation
        }


def run(sizes: Sizes, pythons: Mapping[str, Path | None], note: Note) -> dict[str, Any]:
    """Measure everything and return the object that the verb prints.

    Args:
        sizes: counts of the run.
        pythons: the interpreter of each peer, or None.
        note: receives a line for a person at each step.

    Raises:
        KVHearthError: our side does not work.
    """
    result, start = Result(), time.monotonic()
    usable, skipped = interpreters(pythons)
    found: dict[str, Any] = {"version": __version__, "machine": machine()}
    with contextlib.ExitStack() as undo:
        pages = [huge_or_not(BATCH, PAGE_BYTES, hugepages=False)[0] for _ in range(2)]
        fill(pages[0])
        pages[1][:] = 0
        ours = _our_sides(undo, sizes, *pages)
        far = FarEnd(max(CONNECTIONS))
        undo.callback(far.close)
        sides: dict[str, Side] = {"sockets": Ceiling(far, *pages), **ours}
        found["peers"] = _peer_sides(undo, sizes, usable, sides, skipped, note)
        samples = _batches(sides, sizes, skipped)
        found["gbs"] = {
            name: {operation: own.gbs(operation) for operation in (PUT, GET)}
            for name, own in samples.items()
        }
        _ratios(result, samples)
        _ones(result, ours["kvhearth"], sizes)
        errors = [error for side in ours.values() for error in side.book_errors()]
    errors += _control(result, sizes, note)
    found["books"] = {"balanced": not errors, "errors": errors}
    found["seconds"] = round(time.monotonic() - start, 1)
    found |= {**result.values, "spread": result.spread, "skipped": skipped}
    return {**found, "missed": missed(found, FIGURES)}


def _gateway(undo: contextlib.ExitStack, sizes: Sizes, **settings: Any) -> tuple[Served, str]:
    """Start a daemon with a gateway; return it and the address."""
    address = f"127.0.0.1:{free_port()}"
    daemon = undo.enter_context(
        served(
            memory=sizes.memory_bytes,
            stock_fraction_max=0.5,
            listen=address,
            **settings,
        )
    )
    daemon.ready()
    return daemon, address


def _certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that signs itself, and its key; return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvhearth bench")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "tls.crt", folder / "tls.key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].touch(0o600)
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


def _our_sides(undo: contextlib.ExitStack, sizes: Sizes, source: U8, target: U8) -> dict[str, Ours]:
    sides: dict[str, Ours] = {}
    folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvh-")))
    certificate, key = _certificate(folder)
    secure = {"tls_cert": certificate, "tls_key": key}
    for name, settings, verified in (
        ("kvhearth", {}, True),
        ("unverified", {}, False),
        ("tls", secure, True),
    ):
        # A daemon each: a side would evict what another one is about to get.
        daemon, address = _gateway(undo, sizes, **settings)
        scheme, trust = ("kvhearths", f"&ca={certificate}") if settings else ("kvhearth", "")
        url = f"{scheme}://{address}?{URL_OPTIONS}{trust}"
        clients = {
            count: undo.enter_context(
                attached(f"{url}&connections={count}", _CONTRACT, f"bench-{name}-{count}")
            )
            for count in CONNECTIONS
        }
        side = Ours(daemon, clients, source, target, verified=verified)
        undo.callback(side.close)
        sides[name] = side
    return sides


def _peer_sides(
    undo: contextlib.ExitStack,
    sizes: Sizes,
    usable: Mapping[str, Path],
    sides: dict[str, Side],
    skipped: dict[str, str],
    note: Note,
) -> dict[str, Any]:
    """Start the peers, add them to ``sides``, and return what they say of themselves."""
    described: dict[str, Any] = {}
    for name, python in usable.items():
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvh-")))
        adapter = adapter_of(python, name, folder)
        undo.callback(adapter.close)
        try:
            said = adapter.prepare(
                part="wire",
                memory_bytes=sizes.memory_bytes,
                batch=BATCH,
                page_bytes=PAGE_BYTES,
                small_bytes=SMALL_BYTES,
                blocks=0,
                keys=KEYS,
                hugepages=False,
            )
        except PeerFailed as failed:
            skipped[name] = str(failed)
            note(f"{name}: skipped: {failed}")
            continue
        sides[name] = Peer(adapter, said.pop("pids"))
        described[name] = said
        note(f"{name}: {said['settings']}")
    return described


def _batches(sides: dict[str, Side], sizes: Sizes, skipped: dict[str, str]) -> dict[str, Samples]:
    """Run all batches, side by side; the order alternates each round."""
    samples = {name: Samples() for name in sides}
    for number in steps(sizes.rounds + 1, "batches of 128 x 2 MiB"):
        for count in CONNECTIONS:
            for operation in (PUT, GET):
                for name in list(sides)[:: -1 if number % 2 else 1]:
                    try:
                        _sample(samples[name], sides[name], operation, count, number)
                    except PeerFailed as failed:
                        skipped[name] = str(failed)
                        del sides[name]
    return samples


def _sample(samples: Samples, side: Side, operation: str, count: int, number: int) -> None:
    before, own = cpu_s(side.pids), time.process_time()
    seconds = side.run(operation, count, number)
    own, used = time.process_time() - own, cpu_s(side.pids) - before
    if number:  # the first round touches memory
        samples.seconds.setdefault((operation, count), []).append(seconds)
        samples.cpu.setdefault((operation, count), []).append(used)
        samples.own_cpu.setdefault((operation, count), []).append(own)


def _best(samples: Samples, operation: str) -> int:
    """Return the number of connections with the least median."""
    known = {count: times for (own, count), times in samples.seconds.items() if own == operation}
    return min(known, key=lambda count: p50(known[count]))


def _ratios(result: Result, samples: Mapping[str, Samples]) -> None:
    """Record ratios of batches, each side at its best number of connections."""
    gb = BATCH_BYTES / 1e9
    for operation in (PUT, GET):
        best = {
            name: own.seconds[operation, _best(own, operation)]
            for name, own in samples.items()
            if own.seconds
        }
        ours, bare = best["kvhearth"], best["sockets"]
        ceiling = "ceiling_put_gbs" if operation == PUT else "ceiling_gbs"
        result.put(ceiling, [gb / seconds for seconds in bare], 2)
        result.put(f"{operation}_ratio", _over(bare, ours))
        result.put(f"{operation}_unverified_ratio", _over(bare, best["unverified"]))
        for peer in PEERS:
            if peer in best:
                result.put(f"{operation}_vs_{peer}", _over(best[peer], ours))
        if operation == PUT:
            result.put("tls_ratio", _over(ours, best["tls"]))
        own = samples["kvhearth"]
        place = operation, _best(own, operation)
        suffix = "" if operation == PUT else "_get"
        result.put(f"cpu_s_per_gb{suffix}", [used / gb for used in own.cpu[place]])
        result.put(f"client_cpu_s_per_gb{suffix}", [used / gb for used in own.own_cpu[place]])


def _over(slower: Sequence[float], faster: Sequence[float]) -> list[float]:
    return [over / under for over, under in zip(slower, faster, strict=False)]


def _ones(result: Result, side: Ours, sizes: Sizes) -> None:
    """Measure single blocks, on four connections."""
    times: dict[str, list[float]] = {PUT: [], GET: []}
    for number in steps(sizes.ones, "single blocks of 2 MiB"):
        for operation, samples in times.items():
            samples.append(side.move(operation, 4, number, np.array([number % BATCH])))
    for operation, samples in times.items():
        result.values[f"{operation}_one_p50_us"] = us(p50(samples))
        result.values[f"{operation}_one_p99_us"] = us(p99(samples))


def _control(result: Result, sizes: Sizes, note: Note) -> list[str]:
    """Measure lookups over TCP, and local ones beside a storm of stores; return what does not
    balance in the daemon's books.
    """
    with contextlib.ExitStack() as undo:
        daemon, address = _gateway(undo, sizes)
        url = f"kvhearth://{address}?{URL_OPTIONS}"
        seed = secrets.token_bytes(16)
        local = undo.enter_context(attached(daemon.client_url, _SMALL, "bench-local"))
        for first in range(0, _BLOCKS, _BLOCKS // 4):
            store_zeros(local, SMALL_BYTES, seed, first, _BLOCKS // 4)
        keys = keys_of(seed, 0, KEYS)
        bare = undo.enter_context(wire(url, _SMALL, calls="frames"))
        far = undo.enter_context(attached(url, _SMALL, "bench-far", map_arena=False))
        pairs = [
            (empty_call(bare), _lookup(far, keys)) for _ in steps(sizes.lookups, "remote lookups")
        ]
        frames, lookups = zip(*pairs, strict=True)
        result.values["frame_remote_p50_us"] = us(p50(frames))
        result.values["lookup512_remote_p50_us"] = us(p50(lookups))
        result.values["lookup512_remote_ratio"] = round(p50(lookups) / p50(frames), 3)
        # Mapped or not, a lookup that answers itself would not see the daemon's loop.
        calls = undo.enter_context(wire(daemon.client_url, _SMALL, calls="frames"))
        note(f"a storm of stores on {STORM_CONNECTIONS} connections")
        idle = _lookups_for(calls, keys, local.epoch, sizes.storm_s)
        with storm(f"{url}&connections=1", STORM_CONNECTIONS):
            busy = _lookups_for(calls, keys, local.epoch, sizes.storm_s)
        result.values["control_idle_p99_us"] = us(p99(idle))
        result.values["control_storm_p99_us"] = us(p99(busy))
        result.values["control_p99_factor"] = round(p99(busy) / p99(idle), 2)
        return daemon.book_errors()


def _lookup(client: KVClient, keys: list[bytes]) -> float:
    start = time.perf_counter()
    found = client.lookup({0: keys})
    seconds = time.perf_counter() - start
    if not found.groups[0].leased.all():
        raise broken(f"a lookup missed: {found.reason or found.lease_short}")
    client.release(found.lease)
    return seconds


def _lookups_for(
    calls: CacheTransport, keys: list[bytes], epoch: int, seconds: float
) -> list[float]:
    """Return the seconds of each call of a lookup without a lease, one after the other."""
    groups = [types_pb2.GroupKeys(group=0, keys=b"".join(keys))]
    request = cache_pb2.LookupRequest(groups=groups, epoch=epoch)
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        calls.call(LOOKUP, request, DEADLINE_S)
        times.append(time.perf_counter() - start)
    return times
