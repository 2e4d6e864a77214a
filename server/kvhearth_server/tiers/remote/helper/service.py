"""Service of a helper: takes requests from the daemon, runs them by the driver, answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter

from kvhearth.failpoints import hit
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.base import Corrupt, Failed, Failure
from kvhearth_server.tiers.remote.frames import (
    FrameReader,
    Results,
    Work,
    decode_work,
    encode,
    encode_results,
)
from kvhearth_server.tiers.remote.helper.drivers.base import DENIED, Driver, Refused
from kvhearth_server.tiers.remote.helper.memory import Memory
from kvhearth_server.tiers.remote.helper.moves import Movers
from kvhearth_server.tiers.remote.helper.probe import Unavailable, probe
from kvhearth_server.tiers.remote.helper.sealing import Sealer
from kvhearth_server.tiers.remote.mover import Delete, Get, Put
from kvhearth_server.tiers.remote.names import object_names
from kvhearth_server.tiers.remote.record import record_bytes

_log = get_logger("kvhearth.remote")
_READ_BYTES = 1 << 20
_AGAIN_FIRST_S = 1.0
_AGAIN_MAX_S = 30.0


class Service:
    """Runs the requests of one daemon. Its loop asks; threads move blocks and answer.

    Args:
        connection: to the daemon, not blocking.
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
        self._fleet_key = fleet_key
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set()
        self._asking: set[asyncio.Task[None]] = set()
        self._cancelled: set[int] = set()
        self._movers = Movers(
            driver,
            memory,
            Sealer(fleet_key),
            self._cancelled.__contains__,
            self._answer,
        )
        self._reader = FrameReader()
        self._lock = threading.Lock()
        """Guards what follows, which threads use."""
        self._unsent = bytearray()
        self._told: Counter[str] = Counter()
        self._refused = ""
        self._wrong = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the daemon closes the connection."""
        watching = asyncio.create_task(self._watch())
        self._loop.add_reader(self._connection, self._read)
        try:
            await self._ended.wait()
        finally:
            self._loop.remove_reader(self._connection)
            watching.cancel()
            for task in list(self._asking):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await self._driver.close()

    def _read(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended.set()
            return
        try:
            for head, body in self._reader.feed(data):
                if head["kind"] == "cancel":
                    self._cancelled.update({head["ticket"]} & self._open)
                else:
                    self._take(decode_work(head, body))
        except (ValueError, KeyError, IndexError) as error:
            _log.error("remote.daemon_confused", error=str(error))
            self._ended.set()

    def _send(self, frame: bytes) -> None:
        """Send a frame, from any thread: what the socket takes, and the rest when it takes more."""
        with self._lock:
            waited = bool(self._unsent)
            self._unsent += frame
            if not waited and not self._push():
                self._loop.call_soon_threadsafe(self._send_later)

    def _push(self) -> bool:
        """Send what the socket takes; return whether that was everything."""
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()  # the daemon is gone, as the next read tells
        return True

    def _send_later(self) -> None:
        with self._lock:
            if self._push():
                self._loop.remove_writer(self._connection)
            else:
                self._loop.add_writer(self._connection, self._send_later)

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
            self._tell(problem)
            if problem:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_MAX_S)
            else:
                pause_s = _AGAIN_FIRST_S
                await self._wrong.wait()

    def _tell(self, problem: str) -> None:
        caps = self._driver.caps
        values = [caps.value_bytes_max, caps.evicts, caps.durable, caps.creates_once]
        self._send(encode({"kind": "state", "problem": problem, "caps": values}))

    # -- requests ----------------------------------------------------------------------------------

    def _take(self, work: Work) -> None:
        request = work.request
        self._open.add(work.ticket)
        if self._refused:
            self._answer(work, Results([DENIED] * len(request.keys)), Counter())
            return
        names = object_names(self._fleet_key, request.space, request.keys)
        try:
            if isinstance(request, Put):
                self._movers.put(work, request, names)
            elif isinstance(request, Get):
                self._movers.get(work, request, names)
            else:
                task = self._loop.create_task(self._ask(work, names))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
        except ValueError:
            # A place outside the arena: the daemon's mistake, which must not end the others' work.
            self._answer(work, Results([Failed(Failure.IO)] * len(names)), Counter())

    async def _ask(self, work: Work, names: list[str]) -> None:
        if isinstance(work.request, Delete):
            found = await self._driver.delete(names, work.deadline)
        else:
            size = record_bytes(work.request.family)
            found = await self._driver.exists(names, size, work.deadline)
        self._answer(work, Results(found), Counter())

    def _answer(self, work: Work, results: Results, counts: Counter[str]) -> None:
        """Answer a request, from any thread."""
        self._open.discard(work.ticket)
        self._cancelled.discard(work.ticket)
        kinds = set(results.outcomes)
        if DENIED in kinds and not self._refused:
            self._loop.call_soon_threadsafe(self._wrong.set)
        for kind in kinds:
            if isinstance(kind, Corrupt):
                counts[f"corrupt_{kind.where}"] += results.outcomes.count(kind)
        with self._lock:
            for name, amount in dict(self._driver.requests).items():
                counts[f"requests_{name}"] += amount - self._told[name]
                self._told[name] = amount
        hit("mover.before_results")
        self._send(encode_results(work.ticket, results, counts))
        hit("mover.after_results")
