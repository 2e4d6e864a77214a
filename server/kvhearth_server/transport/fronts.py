"""Fronts: other cache protocols, served from the engine in the daemon's own process.

A front is a protocol object. It takes bytes apart into requests and answers each from a
``LocalCache``; it knows neither sockets nor the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE, U8, Ids, Records, Tier, checksum_of
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.handshake import Hello
from kvhearth_server.config.value_types import is_loopback
from kvhearth_server.core.namespaces import check_epoch
from kvhearth_server.core.removal import Cause, remove_blocks
from kvhearth_server.core.state import group_spec, require
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.sessions import Peer
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.observability.logs import LimitedLog, get_logger
from kvhearth_server.transport.dispatch import Dispatcher, failure

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview
Answer = Sequence[Bytes]
"""Parts of an answer, sent one after the other."""

_PROMOTION_LOOK_S = 0.002
_READ_BYTES = 256 * 1024
_ACCEPT_PAUSE_S = 0.05
_log = get_logger("kvhearth.front")
_troubles = LimitedLog(_log)


class LocalCache(Protocol):
    """Whole blocks of one namespace, by key.

    A block's value is the bytes of its shards, concatenated in order: ``block_bytes`` in total.
    Values are verified: ``get`` returns the bytes that were put, or none. A key names its content,
    so that a second ``put`` of a key changes nothing.

    The caller guarantees that ``data`` does not change any more. The implementation guarantees that
    each call ends by the cache's deadline, that it may be cancelled at any time, and that neither
    leaves a slot, a lease or a reservation behind. All methods run on the engine's loop.

    Raises:
        KVHearthError: from every call: ``bad_keys``, ``bad_group``, ``too_many_keys``;
            ``stale_epoch`` once the namespace's weights have changed; ``group_gone`` after the
            cache was closed.
    """

    def block_bytes(self, kv_group: int = 0) -> int:
        """Return the bytes of one block of a KV group."""
        ...

    async def lookup(self, keys: Sequence[bytes], kv_group: int = 0) -> list[Tier]:
        """Return the fastest tier that has each block; ``NOWHERE`` for an absent one."""
        ...

    async def get(self, key: bytes, kv_group: int = 0) -> Bytes | None:
        """Return a block's bytes, promoting it first if it is on a slower tier; None for a miss.

        Raises:
            KVHearthError: ``deadline``, ``held_cap``, ``too_many_leases``.
        """
        ...

    async def put(self, key: bytes, data: Bytes, kv_group: int = 0, parent: bytes = b"") -> bool:
        """Store a block; return False if it was stored before. ``parent`` is the key before it.

        Raises:
            KVHearthError: ``bad_message`` for data of another length, ``deadline``, ``draining``,
                or the bound that leaves no room.
        """
        ...

    async def delete(self, keys: Sequence[bytes], kv_group: int = 0) -> int:
        """Stop serving blocks, and return how many there were.

        A restart of the daemon may find copies on SSD again.
        """
        ...


class EngineCache:
    """A ``LocalCache`` over an engine in the same process. It is one attached engine to the core:
    a scheduler and all ranks of its contract, which map nothing.

    A call that its caller abandons runs on to its end, because a thread may still be copying; the
    deadline bounds the wait, and ``copies_max`` the blocks that are held in memory meanwhile.

    Args:
        engine, decisions: the daemon's.
        tenant: the owner of the namespace; established by the caller, never by a peer's string.
        contract: the properties of the bytes; with the tenant it selects the namespace.
        name: the engine id that operators see.
        pool: threads that copy and checksum; the loop does neither.
        copies_max: blocks that are copied at once; others wait for a place.
        deadline_s: time allowed for one call.

    Raises:
        KVHearthError: as ``Engine.attach``.
    """

    def __init__(
        self,
        engine: Engine,
        dispatcher: Dispatcher,
        tenant: str,
        contract: Contract,
        name: str,
        *,
        pool: Executor,
        copies_max: int = 4,
        deadline_s: float = 10.0,
    ) -> None:
        self._engine = engine
        self._dispatcher = dispatcher
        self._contract = contract
        self._pool = pool
        self._deadline_s = deadline_s
        self._places = asyncio.Semaphore(copies_max)
        self._ids = Ids()
        self._views: list[U8] = [segment.view for segment in engine.arena.segments]
        self._under_way: set[asyncio.Task[Any]] = set()
        peer = Peer(os.getuid(), os.getpid(), -1)
        with contextlib.ExitStack() as undo:
            for rank in range(contract.world_size):
                hello = Hello(
                    PROTOCOL_VERSION, name, contract.to_json(), rank == 0, rank, map_arena=False
                )
                attached = engine.attach(hello, peer, tenant)
                undo.callback(engine.leave, attached.session, finished=True)
                if rank == 0:
                    self._session, self._epoch = attached.session, attached.welcome.epoch
            self._leave = undo.pop_all()

    async def close(self) -> None:
        """Let the calls under way end, then end the session. Idempotent."""
        while self._under_way:
            await asyncio.wait(self._under_way)
        self._leave.close()

    def block_bytes(self, kv_group: int = 0) -> int:
        """See ``LocalCache.block_bytes``."""
        spec = group_spec(self._contract, kv_group)
        return spec.shards * spec.page_bytes

    async def lookup(self, keys: Sequence[bytes], kv_group: int = 0) -> list[Tier]:
        """See ``LocalCache.lookup``."""
        request = cache_pb2.LookupRequest(epoch=self._epoch, groups=[self._keys(keys, kv_group)])
        reply = await self._ask("Lookup", request)
        return [Tier(tier) for tier in reply.groups[0].tiers]

    async def get(self, key: bytes, kv_group: int = 0) -> Bytes | None:
        """See ``LocalCache.get``."""
        return await self._to_its_end(self._get(key, kv_group))

    async def put(self, key: bytes, data: Bytes, kv_group: int = 0, parent: bytes = b"") -> bool:
        """See ``LocalCache.put``."""
        size = self.block_bytes(kv_group)
        require(len(data) == size, Reason.BAD_MESSAGE, f"{len(data)} bytes, but a block has {size}")
        return await self._to_its_end(self._put(key, data, kv_group, parent))

    async def delete(self, keys: Sequence[bytes], kv_group: int = 0) -> int:
        """See ``LocalCache.delete``."""
        named = list(dict.fromkeys(keys))
        tiers = await self.lookup(named, kv_group)
        self._engine.call(self._remove, named, kv_group)
        return sum(tier is not Tier.NOWHERE for tier in tiers)

    # -- calls under way ---------------------------------------------------------------------------

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call to its end, but wait for it only until the deadline."""
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise KVHearthError(Reason.DEADLINE, f"not done in {self._deadline_s} s") from None

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        async with asyncio.timeout(self._deadline_s):
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    async def _put(self, key: bytes, data: Bytes, kv_group: int, parent: bytes) -> bool:
        async with self._place():
            if await self.lookup([key], kv_group) == [Tier.DRAM]:
                return False
            number = self._ids.new_id()
            wanted = types_pb2.GroupCount(group=kv_group, count=1)
            reply = await self._ask(
                "Reserve",
                cache_pb2.ReserveRequest(reservation_id=number, epoch=self._epoch, groups=[wanted]),
            )
            in_doubt = committed = False
            try:
                extents = np.frombuffer(reply.groups[0].extents, EXTENT_DTYPE)
                checksums = await self._beside(self._copy_in, extents, data)
                commit = cache_pb2.GroupCommit(
                    group=kv_group,
                    keys=key,
                    slots=extents["slot"].tobytes(),
                    generations=extents["generation"].tobytes(),
                    checksums=checksums,
                    parent=parent,
                )
                request = cache_pb2.CommitRequest(epoch=self._epoch, groups=[commit])
                stored = await self._ask("Commit", request)
                committed = True
                return bool(stored.stored[0].bits[0])
            except asyncio.CancelledError:
                in_doubt = True  # the loop ends; the thread may still be copying
                raise
            finally:
                if not committed:
                    with contextlib.suppress(KVHearthError):
                        await self._ask(
                            "Abort",
                            cache_pb2.AbortRequest(reservation_ids=[number], in_doubt=in_doubt),
                        )

    async def _get(self, key: bytes, kv_group: int) -> Bytes | None:
        async with self._place():
            lease_id = self._ids.new_id()
            extents = await self._lease(key, kv_group, lease_id)
            if extents is None:
                return None
            release = cache_pb2.ReleaseRequest(lease_ids=[lease_id])
            try:
                data, right = await self._beside(_copy_out, self._views, extents)
                generation = self._engine.core.state.table.generation[extents["slot"]]
                if not right:
                    release.bad.add(
                        group=kv_group,
                        slots=extents["slot"].tobytes(),
                        generations=extents["generation"].tobytes(),
                    )
                current = (generation == extents["generation"]).all()
                return data.data if right and current else None
            finally:
                await self._ask("Release", release)

    async def _lease(self, key: bytes, kv_group: int, lease_id: int) -> Records | None:
        """Lease a block and return its extents; wait for its promotion if it is on a slower tier.

        Returns None for a miss.
        """
        request = cache_pb2.LookupRequest(
            epoch=self._epoch,
            lease_id=lease_id,
            prefetch=True,
            groups=[self._keys([key], kv_group)],
        )
        promoted = False
        try:
            async with asyncio.timeout(self._deadline_s):
                while True:
                    reply = await self._ask("Lookup", request)
                    if reply.lease_id:
                        return np.frombuffer(reply.groups[0].extents, EXTENT_DTYPE)
                    if reply.lease_short:
                        raise KVHearthError(Reason(reply.lease_short), "the block is not leased")
                    if not reply.eta_us:
                        return None
                    promoted = True
                    await asyncio.sleep(max(_PROMOTION_LOOK_S, reply.eta_us / 1e6))
        except TimeoutError:
            if promoted:
                await self._ask("Release", cache_pb2.ReleaseRequest(cancelled_ids=[lease_id]))
            raise

    def _remove(self, keys: list[bytes], kv_group: int) -> None:
        core, tiering = self._engine.core, self._engine.tiering
        state = core.state
        namespace = state.namespaces.get(state.group_of(self._session.number).namespace)
        check_epoch(namespace, self._epoch)
        if tiering is not None:
            tiering.tier.forget(tiering.family(namespace, kv_group).namespace, kv_group, keys)
            core.writeback.lost(namespace, kv_group, keys)
        heads = state.index.find(namespace.number, kv_group, keys)
        remove_blocks(state, heads[heads >= 0], Cause.ASKED)

    # -- parts of a call ---------------------------------------------------------------------------

    async def _ask(self, name: str, request: Any) -> Any:
        """Make one of the calls that an attached engine makes."""
        reply = self._dispatcher.decide(name, request, self._session)
        return await reply if isawaitable(reply) else reply

    def _copy_in(self, extents: Records, data: Bytes) -> bytes:
        """Copy a block's bytes into its slots and return the checksums of its shards."""
        self._engine.arena.populator.touch(extents)
        rest, sums = np.frombuffer(data, np.uint8), []
        for part in _parts(self._views, extents):
            shard, rest = rest[: len(part)], rest[len(part) :]
            part[:] = shard
            sums.append(checksum_of(shard.data))
        return b"".join(sums)

    async def _beside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function on a thread; it releases the interpreter's lock while it works."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def _keys(self, keys: Sequence[bytes], kv_group: int) -> types_pb2.GroupKeys:
        width = self._contract.hash_bytes
        require(
            all(len(key) == width for key in keys),
            Reason.BAD_KEYS,
            f"a key of this contract has {width} bytes",
        )
        return types_pb2.GroupKeys(group=kv_group, keys=b"".join(keys))


def _parts(views: Sequence[U8], extents: Records) -> list[U8]:
    places = zip(
        extents["segment"].tolist(),
        extents["offset"].tolist(),
        extents["length"].tolist(),
        strict=True,
    )
    return [views[segment][offset : offset + length] for segment, offset, length in places]


def _copy_out(views: Sequence[U8], extents: Records) -> tuple[U8, bool]:
    """Return a copy of a block's bytes, and whether they match the checksums of its shards."""
    parts = _parts(views, extents)
    found = np.empty(sum(map(len, parts)), np.uint8)
    rest, right = found, True
    for part, checksum in zip(parts, extents["checksum"], strict=True):
        shard, rest = rest[: len(part)], rest[len(part) :]
        shard[:] = part
        right &= checksum_of(shard.data) == checksum.tobytes()
    return found, right


class Request(NamedTuple):
    """One request.

    Attributes:
        used: number of bytes that it takes at the front of the buffer, at least 1.
        work: makes the answer; called once. A ``KVHearthError`` from it answers this request only.
    """

    used: int
    work: Callable[[], Awaitable[Answer]]


class Front(Protocol):
    """The protocol of one connection.

    The caller feeds it a buffer that grows, and asks for the next request only after it has sent
    the answer to the last one. It bounds the buffer, and all times.
    """

    def take(self, buffer: memoryview) -> Request | None:
        """Return the request at the front of ``buffer``; None if it is not whole yet.

        Called after each piece of bytes, so it must be cheap on a part of a request. A request may
        keep slices of ``buffer``, which does not change once a request was taken from it.

        Raises:
            KVHearthError: ``bad_message``: the connection is refused and ends. Refuse a request
                that will be too large as soon as its size is known.
        """
        ...

    def refuse(self, error: KVHearthError) -> bytes:
        """Return the answer that tells the peer of an error."""
        ...

    def close(self) -> None:
        """Handle the end of the connection, from either side; called once."""
        ...


@dataclass(frozen=True)
class FrontLimits:
    """Bounds of a front's connections; each holds at most one request and its answer.

    Attributes:
        request_bytes_max: bytes of one request.
        connections_max: open connections; a further one is closed at once.
        idle_s: time allowed between two requests.
        receive_s: time allowed for a request to arrive, from its first byte.
        answer_s: time allowed for the work of a request.
        send_s: time allowed for the peer to take an answer.
    """

    request_bytes_max: int
    connections_max: int = 64
    idle_s: float = 60.0
    receive_s: float = 10.0
    answer_s: float = 10.0
    send_s: float = 10.0


class FrontServer:
    """Serves a front on a socket; every connection is a task of its own.

    Args:
        name: names the task that accepts connections; unique in the daemon.
        engine: the engine that counts refusals.
        listener: a listening unix socket, or a TCP socket of a loopback address; owned by the
            server from now on.
        cache: the blocks that peers may read and write. Whoever may connect may use all of it.
        make: makes the protocol of one connection.

    Raises:
        KVHearthError: ``socket_unusable`` if other machines could reach the socket.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        listener: socket.socket,
        cache: LocalCache,
        make: Callable[[LocalCache], Front],
        limits: FrontLimits,
    ) -> None:
        if listener.family != socket.AF_UNIX and not is_loopback(listener.getsockname()[0]):
            raise KVHearthError(
                Reason.SOCKET_UNUSABLE, "a front serves unix sockets and loopback addresses only"
            )
        listener.setblocking(False)
        self._name = name
        self._engine = engine
        self._listener = listener
        self._cache = cache
        self._make = make
        self._limits = limits
        self._connections: set[asyncio.Task[None]] = set()

    def start(self, supervisor: Supervisor) -> None:
        """Accept connections from now on."""
        supervisor.spawn(self._name, self._accept_forever)

    async def stop(self) -> None:
        """Close the socket and all connections."""
        self._listener.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while self._listener.fileno() >= 0:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors, most likely
                _troubles.warning("front.cannot_accept", kind="accept", error=str(error))
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            connection.setblocking(False)
            if len(self._connections) >= self._limits.connections_max:
                self._engine.counters.add("refusals", 1, str(Reason.TOO_MANY_SESSIONS))
                connection.close()
            else:
                task = loop.create_task(self._serve(connection))
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
            # Accepting does not wait while peers queue up: without this nothing else would run.
            await asyncio.sleep(0)

    async def _serve(self, connection: socket.socket) -> None:
        front = self._make(self._cache)
        stream = _Stream(front, connection, self._limits)
        with connection, contextlib.closing(front), contextlib.suppress(OSError):
            try:
                while (request := await stream.receive()) is not None:
                    await stream.send(await self._answer(front, request))
                    await asyncio.sleep(0)  # a peer that sends ahead leaves others their turns
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - a connection's main: its bug is not the others'
                await stream.send([front.refuse(failure(self._engine, error))])

    async def _answer(self, front: Front, request: Request) -> Answer:
        try:
            async with asyncio.timeout(self._limits.answer_s):
                return await request.work()
        except TimeoutError:
            error: Exception = KVHearthError(Reason.DEADLINE, "the request took too long")
        except Exception as other:  # noqa: BLE001 - a call's main: one call's bug is not the others'
            error = other
        return [front.refuse(failure(self._engine, error))]


class _Stream:
    """One connection's bytes: cut into requests by its front, within the limits."""

    def __init__(self, front: Front, connection: socket.socket, limits: FrontLimits) -> None:
        self._front = front
        self._socket = connection
        self._limits = limits
        self._buffer = bytearray()
        self._taken = 0
        """Bytes of the buffer that belong to earlier requests."""

    async def receive(self) -> Request | None:
        """Return the next request; None at the end of the connection."""
        limits = self._limits
        begun = self._taken < len(self._buffer)
        try:
            async with asyncio.timeout(limits.receive_s if begun else limits.idle_s) as deadline:
                while (request := self._take()) is None:
                    count = len(self._buffer)
                    if count >= limits.request_bytes_max:
                        message = f"a request has at most {limits.request_bytes_max} bytes"
                        raise KVHearthError(Reason.BAD_MESSAGE, message)
                    loop = asyncio.get_running_loop()
                    room = min(_READ_BYTES, limits.request_bytes_max - count)
                    data = await loop.sock_recv(self._socket, room)
                    if not data:
                        return None
                    if not count:
                        deadline.reschedule(loop.time() + limits.receive_s)
                    self._buffer += data
                return request
        except TimeoutError:
            if not self._buffer:
                return None  # idle
            message = f"the request was not whole within {limits.receive_s} s"
            raise KVHearthError(Reason.DEADLINE, message) from None

    def _take(self) -> Request | None:
        """Return the next request that is whole; None, with only its part in the buffer."""
        with memoryview(self._buffer) as whole, whole[self._taken :] as left:
            request = self._front.take(left) if left else None
            if request is None and self._taken:
                # A new buffer: requests may have kept slices of this one.
                self._buffer, self._taken = bytearray(left), 0
        if request is not None:
            self._taken += request.used
        return request

    async def send(self, answer: Answer) -> None:
        """Send an answer.

        Raises:
            OSError: the peer is gone; ``TimeoutError`` if it does not take the answer in time.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._limits.send_s):
            for part in answer:
                await loop.sock_sendall(self._socket, part)
