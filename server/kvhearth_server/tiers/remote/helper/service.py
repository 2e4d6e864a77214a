"""Service of a helper: takes requests from the daemon, runs them by the driver, answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from kvhearth.failpoints import hit
from kvhearth.model import CHECKSUM_BYTES, U8
from kvhearth_server.tiers.base import Corrupt, Done, Failed, Failure, Missing, Outcome
from kvhearth_server.tiers.remote.frames import (
    FrameReader,
    Head,
    Results,
    Work,
    decode_work,
    encode,
    encode_results,
)
from kvhearth_server.tiers.remote.helper.drivers.base import DENIED, Driver, Refused
from kvhearth_server.tiers.remote.helper.memory import Memory
from kvhearth_server.tiers.remote.helper.probe import Unavailable, probe
from kvhearth_server.tiers.remote.mover import Delete, Get, Put
from kvhearth_server.tiers.remote.names import object_name
from kvhearth_server.tiers.remote.record import Doubt, Name, record_bytes
from kvhearth_server.tiers.remote.record import Head as RecordHead

_READ_BYTES = 1 << 20
_THREADS = 2
"""Threads that copy and verify."""
_AHEAD = 2
_AGAIN_FIRST_S = 1.0
_AGAIN_MAX_S = 30.0
_INLINE_BYTES = 4 << 20
"""Records up to this size are copied by the loop itself."""


class Service:
    """Runs the requests of one daemon.

    Args:
        connection: to the daemon.
        place: the remote, for messages.
    """

    def __init__(
        self,
        connection: socket.socket,
        driver: Driver,
        memory: Memory,
        fleet_key: bytes,
        place: str,
    ) -> None:
        self._connection = connection
        self._driver = driver
        self._memory = memory
        self._fleet_key = fleet_key
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(_THREADS, "kvhearth-mover")
        # Some more than the driver wants: they are under way while others are copied and verified.
        self._slots = {kind: asyncio.Semaphore(driver.parallel + _AHEAD) for kind in (Get, Put)}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._refused = ""
        self._wrong = asyncio.Event()
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Serve until the daemon closes the connection."""
        watching = asyncio.create_task(self._watch())
        reader = FrameReader()
        try:
            while data := await self._loop.sock_recv(self._connection, _READ_BYTES):
                for head, body in reader.feed(data):
                    self._take(head, body)
        finally:
            watching.cancel()
            for task in list(self._tasks.values()):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await self._driver.close()

    def _take(self, head: Head, body: bytes) -> None:
        if head["kind"] == "cancel":
            if head["ticket"] in self._tasks:
                self._cancelled.add(head["ticket"])
            return
        work = decode_work(head, body)
        self._tasks[work.ticket] = asyncio.create_task(self._serve(work))

    async def _send(self, frame: bytes) -> None:
        async with self._sending:
            await self._loop.sock_sendall(self._connection, frame)

    # -- the remote's condition --------------------------------------------------------------------

    async def _watch(self) -> None:
        """Probe the remote at first, and again while something is wrong with it."""
        pause_s = _AGAIN_FIRST_S
        while True:
            self._wrong.clear()
            problem = self._refused = ""
            try:
                hit("mover.before_probe")
                await probe(self._driver, self._place, self._fleet_key)
            except Refused as error:
                problem = self._refused = str(error)
            except Unavailable as error:
                problem = str(error)
            await self._tell(problem)
            if problem:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_MAX_S)
            else:
                pause_s = _AGAIN_FIRST_S
                await self._wrong.wait()

    async def _tell(self, problem: str) -> None:
        caps = self._driver.caps
        values = [caps.value_bytes_max, caps.evicts, caps.durable, caps.creates_once]
        await self._send(encode({"kind": "state", "problem": problem, "caps": values}))

    # -- requests ----------------------------------------------------------------------------------

    async def _serve(self, work: Work) -> None:
        try:
            if self._refused:
                results = Results([DENIED] * len(work.request.keys))
            else:
                results = await self._run(work)
        except ValueError:
            # A place outside the arena: the daemon's mistake, which must not end the others' work.
            results = Results([Failed(Failure.IO)] * len(work.request.keys))
        self._cancelled.discard(work.ticket)
        del self._tasks[work.ticket]
        if any(outcome == DENIED for outcome in results.outcomes) and not self._refused:
            self._wrong.set()
        for outcome in results.outcomes:
            if isinstance(outcome, Corrupt):
                self._counts[f"corrupt_{outcome.where}"] += 1
        sent = {f"requests_{kind}": count for kind, count in self._driver.requests.items()}
        now = self._counts + Counter(sent)
        counts = dict(now - self._told)
        self._told = now
        hit("mover.before_results")
        await self._send(encode_results(work.ticket, results, counts))
        hit("mover.after_results")

    async def _run(self, work: Work) -> Results:
        request = work.request
        names = [object_name(self._fleet_key, request.space, key) for key in request.keys]
        if isinstance(request, Put):
            return await self._put(work, request, names)
        if isinstance(request, Get):
            return await self._get(work, request, names)
        if isinstance(request, Delete):
            return Results(await self._driver.delete(names, work.deadline))
        size = record_bytes(request.family)
        return Results(await self._driver.exists(names, size, work.deadline))

    def _gone(self, work: Work) -> Outcome | None:
        """Outcome of a row that must not begin any more."""
        if work.ticket in self._cancelled:
            return Failed(Failure.CANCELLED)
        return Failed(Failure.TIMEOUT) if time.monotonic() >= work.deadline else None

    async def _copied(self, size: int, copy: Callable[..., Any], *args: object) -> Any:
        """Run a copy where it does not hold up the loop."""
        if size <= _INLINE_BYTES:
            return copy(*args)
        return await self._loop.run_in_executor(self._pool, copy, *args)

    async def _put(self, work: Work, request: Put, names: list[str]) -> Results:
        size = record_bytes(request.family)
        outcomes: list[Outcome] = [Done()] * len(names)

        async def send(index: int, staged: U8) -> None:
            async with self._slots[Put]:
                gone = self._gone(work)
                outcomes[index] = gone or await self._put_one(
                    names[index], staged, work.deadline, replace=request.replace
                )

        sending = []
        try:
            for index, key in enumerate(request.keys):
                into = self._memory.staged(work.offsets[index], size)
                name = Name(request.space, request.family, key)
                head = RecordHead(request.checksums[index], request.parents[index])
                places = request.places[index]
                outcome = await self._copied(size, self._memory.stage, name, head, places, into)
                outcomes[index] = outcome
                hit("mover.staged")
                if isinstance(outcome, Done):
                    sending.append(asyncio.create_task(send(index, into)))
                # What was staged is on its way while the next one is copied.
                await asyncio.sleep(0)
        finally:
            hit("mover.before_copied")
            await self._send(encode({"kind": "copied", "ticket": work.ticket}))
            await _all(sending)
        return Results(outcomes)

    async def _put_one(self, name: str, value: U8, deadline: float, *, replace: bool) -> Outcome:
        began = time.monotonic()
        hit("mover.before_put")
        outcome = await self._driver.put(name, value.data, deadline, replace=replace)
        hit("mover.after_put")
        self._counts["put_ms"] += round(1000 * (time.monotonic() - began))
        if isinstance(outcome, Done):
            self._counts["put_bytes"] += len(value)
        return outcome

    async def _get(self, work: Work, request: Get, names: list[str]) -> Results:
        size, count = record_bytes(request.family), len(names)
        sums = np.zeros((count, request.family.shards), f"V{CHECKSUM_BYTES}")
        parents = [b""] * count
        first_miss = count

        outcomes: list[Outcome] = [Missing()] * count

        def finish(index: int, found: memoryview) -> Outcome:
            name = Name(request.space, request.family, request.keys[index])
            record = np.frombuffer(found, np.uint8)
            head = self._memory.unstage(name, record, request.places[index])
            if isinstance(head, Doubt):
                self._counts[f"doubt_{head.value}"] += 1
                return head.outcome
            hit("mover.unstaged")
            self._counts["get_bytes"] += size
            sums[index], parents[index] = head.checksums, head.parent
            return Done()

        async def portion(rows: range) -> None:
            nonlocal first_miss
            async with self._slots[Get]:
                if rows[0] > first_miss:
                    return
                if (gone := self._gone(work)) is not None:
                    outcomes[rows[0] : rows[-1] + 1] = [gone] * len(rows)
                    return
                into = [self._memory.staged(work.offsets[row], size).data for row in rows]
                hit("mover.before_get")
                found = await self._driver.get([names[row] for row in rows], into, work.deadline)
                hit("mover.after_get")
            for row, each in zip(rows, found, strict=True):
                outcome: Outcome = (
                    each
                    if not isinstance(each, memoryview)
                    else (await self._copied(size, finish, row, each))
                )
                outcomes[row] = outcome
                if isinstance(outcome, Missing):
                    first_miss = min(first_miss, row)

        began = time.monotonic()
        step = self._driver.portion(size)
        portions = [range(at, min(at + step, count)) for at in range(0, count, step)]
        await _all(portion(rows) for rows in portions)
        self._counts["get_ms"] += round(1000 * (time.monotonic() - began))
        for index in range(first_miss, count):
            outcomes[index], parents[index] = Missing(), b""
            sums[index] = np.zeros((), sums.dtype)
        return Results(outcomes, sums, parents)


_T = TypeVar("_T")


async def _all(rows: Iterable[Awaitable[_T]]) -> list[_T]:
    """Run rows side by side; a batch is over when its last row is."""
    found = await asyncio.gather(*rows, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if not isinstance(each, BaseException)]
