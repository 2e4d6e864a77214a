"""Service of a helper: takes requests from the daemon, runs them by the driver, answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeGuard

import numpy as np

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
from kvhearth_server.tiers.remote.record import Doubt, record_bytes
from kvhearth_server.tiers.remote.record import Head as RecordHead

_READ_BYTES = 1 << 20
_COPYING = 2
"""Threads that copy to staging."""
_AGAIN_FIRST_S = 1.0
_AGAIN_MAX_S = 30.0


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
        self._copying = ThreadPoolExecutor(_COPYING, "kvhearth-copying")
        self._putting = ThreadPoolExecutor(driver.parallel, "kvhearth-putting")
        self._getting = ThreadPoolExecutor(driver.parallel, "kvhearth-getting")
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
        await self._send(encode_results(work.ticket, results, counts))

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
        """Outcome of rows that must not begin any more."""
        if work.ticket in self._cancelled:
            return Failed(Failure.CANCELLED)
        return Failed(Failure.TIMEOUT) if time.monotonic() >= work.deadline else None

    def _portions(self, size: int, count: int) -> list[range]:
        """Divide rows evenly among the threads, in calls of the size that suits the driver."""
        each = -(-count // self._driver.parallel)
        step = max(1, min(self._driver.portion(size), each))
        return [range(at, min(at + step, count)) for at in range(0, count, step)]

    async def _put(self, work: Work, request: Put, names: list[str]) -> Results:
        """Stage a batch in one thread; each portion is on its way while the next one is copied."""
        size, count = record_bytes(request.family), len(names)
        outcomes: list[Outcome] = [Done()] * count
        portions = self._portions(size, count)
        sent = _Portions(self._loop, len(portions))

        def send(rows: list[int]) -> None:
            if (gone := self._gone(work)) is not None:
                found = [gone] * len(rows)
            else:
                values = [self._memory.staged(work.offsets[row], size) for row in rows]
                found = self._driver.put([names[row] for row in rows], values, work.deadline)
            for row, outcome in zip(rows, found, strict=True):
                outcomes[row] = outcome

        def stage() -> None:
            self._memory.check(request)
            self._memory.write_heads(request, work.offsets)
            for rows in portions:
                whole = self._memory.stage(request, work.offsets, rows).tolist()
                good = [row for row, same in zip(rows, whole, strict=True) if same]
                for row in set(rows).difference(good):
                    outcomes[row] = Corrupt("source")
                sent.begin(self._putting, partial(send, good))

        began = time.monotonic()
        try:
            await self._loop.run_in_executor(self._copying, stage)
        finally:
            await self._send(encode({"kind": "copied", "ticket": work.ticket}))
        await sent.ended
        self._counts["put_ms"] += round(1000 * (time.monotonic() - began))
        self._counts["put_bytes"] += size * sum(isinstance(each, Done) for each in outcomes)
        return Results(outcomes)

    async def _get(self, work: Work, request: Get, names: list[str]) -> Results:
        """Get the portions side by side; the thread that got one verifies and copies it, while its
        bytes are in the processor's cache.
        """
        size, count = record_bytes(request.family), len(names)
        sums = np.zeros((count, request.family.shards), f"V{CHECKSUM_BYTES}")
        parents = [b""] * count
        outcomes: list[Outcome] = [Missing()] * count
        misses = [count]

        def portion(rows: range) -> None:
            if rows[0] > min(misses):
                return
            if (gone := self._gone(work)) is not None:
                outcomes[rows.start : rows.stop] = [gone] * len(rows)
                return
            into = [self._memory.staged(work.offsets[row], size) for row in rows]
            found = self._driver.get(names[rows.start : rows.stop], into, work.deadline)
            there = [row for row, each in zip(rows, found, strict=True) if _is_value(each)]
            records = [np.frombuffer(each, np.uint8) for each in found if _is_value(each)]
            for row, each in zip(rows, found, strict=True):
                if not isinstance(each, memoryview):
                    outcomes[row] = each
            for row, head in zip(there, self._unstage(request, there, records), strict=True):
                if isinstance(head, Doubt):
                    outcomes[row] = head.outcome
                else:
                    outcomes[row] = Done()
                    sums[row], parents[row] = head.checksums, head.parent
            misses.extend(row for row in rows if isinstance(outcomes[row], Missing))

        self._memory.check(request)
        began = time.monotonic()
        portions = self._portions(size, count)
        got = _Portions(self._loop, len(portions))
        for rows in portions:
            got.begin(self._getting, partial(portion, rows))
        await got.ended
        self._counts["get_ms"] += round(1000 * (time.monotonic() - began))
        self._counts["get_bytes"] += size * sum(isinstance(each, Done) for each in outcomes)
        for index in range(min(misses), count):
            outcomes[index], parents[index] = Missing(), b""
            sums[index] = np.zeros((), sums.dtype)
        return Results(outcomes, sums, parents)

    def _unstage(
        self, request: Get, rows: list[int], records: list[U8]
    ) -> list[RecordHead | Doubt]:
        heads = self._memory.unstage(request, rows, records) if rows else []
        for head in heads:
            if isinstance(head, Doubt):
                self._counts[f"doubt_{head.value}"] += 1
        return heads


def _is_value(found: memoryview | Outcome) -> TypeGuard[memoryview]:
    return isinstance(found, memoryview)


class _Portions:
    """Portions of a batch, which run in threads.

    Args:
        count: of all portions.

    Attributes:
        ended: done when the last one has ended; it raises what a portion raised.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self._loop, self._left = loop, count
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def begin(self, pool: ThreadPoolExecutor, portion: Callable[[], None]) -> None:
        """Have a portion run."""
        pool.submit(portion).add_done_callback(self._ran)

    def _ran(self, portion: Future[None]) -> None:
        with self._lock:
            self._error = self._error or portion.exception()
            self._left -= 1
            last = not self._left
        if last:
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self.ended.done():
            return
        if self._error is not None:
            self.ended.set_exception(self._error)
        else:
            self.ended.set_result(None)
