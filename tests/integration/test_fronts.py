"""A toy front: another protocol on the engine's blocks, in the daemon's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.core_kit import contract, full, key, refused

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import Tier
from kvhearth_server.config.load import load_settings
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import Limits
from kvhearth_server.engine.checksums import ChecksumWorkers
from kvhearth_server.engine.engine import Engine, EngineLimits
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.engine.tiering.manager import DegradedLog, drive
from kvhearth_server.memory.arena import open_arena
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS
from kvhearth_server.preflight import arena_plan
from kvhearth_server.tier_startup import open_tiers
from kvhearth_server.transport.dispatch import Dispatcher
from kvhearth_server.transport.fronts import (
    Answer,
    EngineCache,
    Front,
    FrontLimits,
    FrontServer,
    LocalCache,
    Request,
)

SHARD = 64 << 10
CONTRACT = contract(full(SHARD, shards=2), tensor_parallel=2)
BLOCK = 2 * SHARD
HEADER = struct.Struct("<c32sI")
REPLY = struct.Struct("<cI")
REQUEST_MAX = HEADER.size + BLOCK


class Toy:
    """A front that speaks frames: an operation, a key, and as many bytes as the header says."""

    def __init__(self, cache: LocalCache) -> None:
        self.cache = cache
        self.closed = 0

    def take(self, buffer: memoryview) -> Request | None:
        if len(buffer) < HEADER.size:
            return None
        operation, named, size = HEADER.unpack_from(buffer)
        if size > self.cache.block_bytes():
            raise KVHearthError(Reason.BAD_MESSAGE, f"{size} bytes are no block")
        if len(buffer) < HEADER.size + size:
            return None
        data = buffer[HEADER.size : HEADER.size + size]
        return Request(HEADER.size + size, partial(self._answer, operation, named, data))

    async def _answer(self, operation: bytes, named: bytes, data: memoryview) -> Answer:
        if operation == b"E":
            return [REPLY.pack(b"e", len(data)), data]
        if operation == b"P":
            done = await self.cache.put(named, data)
            return [REPLY.pack(b"p" if done else b"0", 0)]
        if operation == b"D":
            return [REPLY.pack(b"d", await self.cache.delete([named]))]
        if operation == b"B":
            raise ZeroDivisionError("a bug")
        found = await self.cache.get(named)
        return [REPLY.pack(b"-", 0)] if found is None else [REPLY.pack(b"g", len(found)), found]

    def refuse(self, error: KVHearthError) -> bytes:
        return REPLY.pack(b"!", len(error.reason)) + error.reason.encode()

    def close(self) -> None:
        self.closed += 1


class GatedPool(ThreadPoolExecutor):
    """A thread that waits at a gate before each copy."""

    def __init__(self) -> None:
        super().__init__(1)
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        def work() -> Any:
            self.waiting.set()
            assert self.gate.wait(30)
            return function(*arguments, **named)

        return super().submit(work)


class Kit:
    """An engine on real memory, with a toy front on a unix socket and one on a TCP port."""

    def __init__(
        self,
        engine: Engine,
        supervisor: Supervisor,
        cache: EngineCache,
        pool: GatedPool,
        path: Path,
    ) -> None:
        self.engine, self.cache, self.pool, self.path = engine, cache, pool, path
        self._supervisor = supervisor
        self.fronts: list[Toy] = []
        self.servers: list[FrontServer] = []
        self.peers: list[Peer] = []

    def serve(self, listener: socket.socket, **limits: Any) -> None:
        """Serve the front on a socket."""

        def make(cache: LocalCache) -> Front:
            self.fronts.append(Toy(cache))
            return self.fronts[-1]

        bounds = FrontLimits(**{"request_bytes_max": REQUEST_MAX, **limits})
        name = f"front_{len(self.servers)}"
        server = FrontServer(name, self.engine, listener, self.cache, make, bounds)
        server.start(self._supervisor)
        self.servers.append(server)

    async def connect(self, address: Any = None) -> Peer:
        """Connect to the front; by default through its unix socket."""
        unix = asyncio.open_unix_connection
        opened = asyncio.open_connection(*address) if address else unix(self.path)
        self.peers.append(Peer(*await opened))
        return self.peers[-1]

    def reserved(self) -> int:
        """Number of slots that somebody has reserved."""
        return int((self.engine.core.state.table.state == State.RESERVED).sum())

    async def at_rest(self) -> None:
        """Wait until nothing is reserved or leased."""
        async with asyncio.timeout(5):
            while self.reserved() or any(g.leases for g in self.engine.core.state.groups):
                await asyncio.sleep(0.001)

    def refusals(self, reason: Reason) -> int:
        """Number of refusals for a reason."""
        return self.engine.counters.get("refusals", str(reason))


class Peer:
    """The other end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def ask(
        self, operation: bytes, number: int = 0, data: bytes = b""
    ) -> tuple[bytes, bytes]:
        """Send a request, and return the answer's kind and bytes."""
        self.writer.write(HEADER.pack(operation, key(number), len(data)) + data)
        return await self.answer()

    async def answer(self) -> tuple[bytes, bytes]:
        """Return the next answer."""
        kind, size = REPLY.unpack(await self._reader.readexactly(REPLY.size))
        return kind, b"" if kind == b"d" else await self._reader.readexactly(size)

    async def ended(self) -> bool:
        """Wait for the end of the connection."""
        return await self._reader.read() == b""


@contextlib.asynccontextmanager
async def kit(folder: Path, *, ssd: bool = False, **options: Any) -> AsyncIterator[Kit]:
    """Run an engine and its front; at the end nothing may be left of either."""
    flags = {"memory": "16MiB", "slab_bytes": "2MiB", "hugepages": "off", "arena_dir": "none"}
    if ssd:
        flags |= {"ssd_dirs": f"{folder / 'ssd'}=64MiB", "ssd_segment_bytes": "2MiB"}
    settings = load_settings(flags)
    supervisor, limits = Supervisor(counters := Counters(COUNTERS)), EngineLimits(1 << 20, 0.0, 0.0)
    with contextlib.ExitStack() as undo:
        arena = open_arena(arena_plan(settings))
        undo.callback(arena.close)
        tiers = open_tiers(settings, arena)
        for tier in tiers:
            undo.callback(tier.close)
        engine = Engine(arena, Limits(), limits, counters, tiers=tiers)
        background = ChecksumWorkers(engine, supervisor, sum_threads=1, verify=True)
        undo.callback(background.close)
        background.start()
        if engine.tiering is not None:
            degraded = DegradedLog(engine.tiering.tier.problems)
            supervisor.spawn("tiering", partial(drive, engine.tiering, degraded, engine.turns))
        pool = undo.enter_context(GatedPool())
        values = {"pool": pool, "deadline_s": 20.0, **options.pop("cache", {})}
        decisions = Dispatcher(engine, background.verify_blocks)
        cache = EngineCache(engine, decisions, "default", CONTRACT, "toy", **values)
        made = Kit(engine, supervisor, cache, pool, folder / "front.sock")
        listener = undo.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(made.path))
        listener.listen()
        made.serve(listener, **options)
        async with asyncio.timeout(60):
            yield made
            pool.gate.set()
            for peer in made.peers:
                peer.writer.transport.abort()
            for server in made.servers:
                await server.stop()
            await made.at_rest()
            await cache.close()
            assert [front.closed for front in made.fronts] == [1] * len(made.fronts)
            assert (made.reserved(), len(engine.sessions)) == (0, 0)
            engine.core.check_books()
            await supervisor.stop()


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test's coroutine on a loop of its own."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@on_loop
async def test_what_is_put_is_got_by_any_peer_until_it_is_deleted(tmp_path: Path) -> None:
    async with kit(tmp_path) as made:
        listener = socket.create_server(("127.0.0.1", 0))
        made.serve(listener)
        one, other = await made.connect(), await made.connect(listener.getsockname())
        data = os.urandom(BLOCK)
        assert await one.ask(b"E", data=b"hello") == (b"e", b"hello")
        assert await other.ask(b"G", 1) == (b"-", b"")
        assert await one.ask(b"P", 1, data) == (b"p", b"")
        assert await other.ask(b"P", 1, os.urandom(BLOCK)) == (b"0", b"")
        assert await other.ask(b"G", 1) == (b"g", data)
        assert await made.cache.lookup([key(1), key(2)]) == [Tier.DRAM, Tier.NOWHERE]
        assert await other.ask(b"D", 1) == (b"d", b"")
        assert await one.ask(b"G", 1) == (b"-", b"")


@on_loop
async def test_requests_sent_ahead_are_answered_in_order(tmp_path: Path) -> None:
    async with kit(tmp_path) as made:
        peer, data = await made.connect(), os.urandom(BLOCK)
        puts = b"".join(HEADER.pack(b"P", key(n), BLOCK) + data for n in range(5))
        for part in (puts, *(HEADER.pack(b"G", key(n), 0) for n in range(5))):
            peer.writer.write(part)
        answers = [await peer.answer() for _ in range(10)]
        assert answers == [(b"p", b"")] * 5 + [(b"g", data)] * 5


@pytest.mark.parametrize("sent", [1, HEADER.size, HEADER.size + BLOCK - 1])
@on_loop
async def test_a_connection_killed_while_it_puts_leaves_nothing(tmp_path: Path, sent: int) -> None:
    async with kit(tmp_path) as made:
        peer = await made.connect()
        peer.writer.write((HEADER.pack(b"P", key(1), BLOCK) + bytes(BLOCK))[:sent])
        await peer.writer.drain()
        peer.writer.transport.abort()
        other = await made.connect()
        assert await other.ask(b"G", 1) == (b"-", b"")
        while not made.fronts[0].closed:
            await asyncio.sleep(0.001)
        assert made.reserved() == 0


@pytest.mark.parametrize("how", ["the peer", "the server"])
@on_loop
async def test_an_end_in_the_middle_of_a_copy_frees_no_slot_before_the_copy(
    tmp_path: Path, how: str
) -> None:
    async with kit(tmp_path) as made:
        peer, data = await made.connect(), os.urandom(BLOCK)
        made.pool.gate.clear()
        peer.writer.write(HEADER.pack(b"P", key(1), BLOCK) + data)
        await asyncio.to_thread(made.pool.waiting.wait, 10)
        if how == "the peer":
            peer.writer.transport.abort()
        else:
            await made.servers[0].stop()
        await asyncio.sleep(0.05)
        assert made.reserved() == 2  # a thread still writes to both shards
        made.pool.gate.set()
        await made.at_rest()
        assert await made.cache.get(key(1)) == data


@on_loop
async def test_a_copy_that_fails_gives_its_slots_back(tmp_path: Path) -> None:
    async with kit(tmp_path) as made:
        made.pool.shutdown()
        with pytest.raises(RuntimeError):
            await made.cache.put(key(1), bytes(BLOCK))
        assert made.reserved() == 0
        assert await made.cache.lookup([key(1)]) == [Tier.NOWHERE]


@on_loop
async def test_too_large_requests_are_refused_before_they_are_held(tmp_path: Path) -> None:
    async with kit(tmp_path) as made:
        peer = await made.connect()
        peer.writer.write(HEADER.pack(b"P", key(1), BLOCK + 1))
        assert await peer.answer() == (b"!", b"bad_message")
        assert await peer.ended()
        assert made.refusals(Reason.BAD_MESSAGE) == 1
        with refused(Reason.BAD_MESSAGE):
            await made.cache.put(key(1), bytes(BLOCK - 1))


@on_loop
async def test_a_request_that_never_ends_is_refused_at_the_bound(tmp_path: Path) -> None:
    async with kit(tmp_path, request_bytes_max=HEADER.size - 1) as made:
        peer = await made.connect()
        peer.writer.write(HEADER.pack(b"E", key(1), 0))
        assert await peer.answer() == (b"!", b"bad_message")


@on_loop
async def test_a_slow_drip_has_a_deadline(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    # A plain socket: a stream whose peer has closed loses what it has not read yet.
    with socket.socket(socket.AF_UNIX) as slow:
        async with kit(tmp_path, receive_s=0.3) as made:
            slow.connect(str(made.path))
            slow.setblocking(False)

            async def drip() -> None:
                with contextlib.suppress(BrokenPipeError):
                    for byte in HEADER.pack(b"E", key(1), 0):
                        await loop.sock_sendall(slow, bytes([byte]))
                        await asyncio.sleep(0.1)

            task = asyncio.create_task(drip())
            answer = await loop.sock_recv(slow, 100)
            assert answer[REPLY.size :] == b"deadline"
            assert made.refusals(Reason.DEADLINE) == 1
            await task


@on_loop
async def test_an_idle_peer_is_let_go(tmp_path: Path) -> None:
    async with kit(tmp_path, idle_s=0.2) as made:
        peer = await made.connect()
        assert await peer.ask(b"E", data=b"hello") == (b"e", b"hello")
        assert await peer.ended()
        assert made.refusals(Reason.DEADLINE) == 0


@on_loop
async def test_a_late_answer_is_refused_and_the_work_ends_by_itself(tmp_path: Path) -> None:
    async with kit(tmp_path, cache={"deadline_s": 0.2, "copies_max": 1}) as made:
        peer = await made.connect()
        made.pool.gate.clear()
        assert await peer.ask(b"P", 1, bytes(BLOCK)) == (b"!", b"deadline")
        # The thread holds the only place.
        assert await peer.ask(b"P", 2, bytes(BLOCK)) == (b"!", b"deadline")
        assert made.reserved() == 2
        made.pool.gate.set()
        await made.at_rest()
        assert await made.cache.lookup([key(1), key(2)]) == [Tier.DRAM, Tier.NOWHERE]


@on_loop
async def test_a_bug_of_a_front_is_one_requests_and_connections_are_few(tmp_path: Path) -> None:
    async with kit(tmp_path, connections_max=1) as made:
        peer = await made.connect()
        assert await peer.ask(b"B") == (b"!", b"internal")
        assert await peer.ask(b"E", data=b"on") == (b"e", b"on")
        assert await (await made.connect()).ended()
        assert made.refusals(Reason.TOO_MANY_SESSIONS) == 1


@on_loop
async def test_wrong_bytes_are_a_miss_and_are_removed(tmp_path: Path) -> None:
    async with kit(tmp_path) as made:
        assert await made.cache.put(key(1), os.urandom(BLOCK))
        (first, *_) = np.flatnonzero(made.engine.core.state.table.state == State.SUMMED)
        (extent,) = made.engine.core.state.table.extents(np.array([first]), SHARD)
        made.engine.arena.segments[0].view[int(extent["offset"])] ^= 1
        assert await made.cache.get(key(1)) is None
        assert made.engine.counters.get("checksum_failures", "reader") == 1
        assert await made.cache.lookup([key(1)]) == [Tier.NOWHERE]


@on_loop
async def test_new_weights_end_a_cache(tmp_path: Path) -> None:
    async with kit(tmp_path) as made:
        assert await made.cache.put(key(1), bytes(BLOCK))
        (space,) = made.engine.core.state.namespaces
        made.engine.call(made.engine.core.bump_namespace, space.digest)
        for call in (
            made.cache.get(key(1)),
            made.cache.put(key(1), bytes(BLOCK)),
            made.cache.delete([key(1)]),
        ):
            with refused(Reason.STALE_EPOCH):
                await call


@on_loop
async def test_blocks_on_ssd_are_promoted_for_a_get(tmp_path: Path) -> None:
    async with kit(tmp_path, ssd=True) as made:
        engine, data = made.engine, os.urandom(BLOCK)
        assert await made.cache.put(key(1), data)
        (space,) = engine.core.state.namespaces
        while not engine.counters.get("demoted_blocks"):
            await asyncio.sleep(0.01)
        engine.call(engine.core.evict, space.digest, 0)
        assert await made.cache.lookup([key(1)]) == [Tier.SSD]
        peer = await made.connect()
        assert await peer.ask(b"G", 1) == (b"g", data)
        assert await made.cache.delete([key(1), key(2)]) == 1
        assert await made.cache.lookup([key(1)]) == [Tier.NOWHERE]
        assert await made.cache.get(key(1)) is None


@on_loop
async def test_a_front_is_not_served_to_other_machines(tmp_path: Path) -> None:
    async with kit(tmp_path) as made:
        with socket.create_server(("0.0.0.0", 0)) as listener, refused(Reason.SOCKET_UNUSABLE):
            made.serve(listener)
