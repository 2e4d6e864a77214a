"""Service of a helper: probes the remote, runs the daemon's requests by the driver, answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import socket
import threading
import time
from collections import Counter

from kvhearth.failpoints import hit
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.base import Corrupt, Done, Failed, Failure, Missing, Outcome
from kvhearth_server.tiers.remote.helper.drivers.base import Driver, Refused
from kvhearth_server.tiers.remote.helper.moves import Memory, Movers
from kvhearth_server.tiers.remote.helper.sealing import Sealer
from kvhearth_server.tiers.remote.mover import (
    Answer,
    Delete,
    FrameReader,
    Get,
    Work,
    decode_work,
    encode,
    encode_answer,
)
from kvhearth_server.tiers.remote.names import MARK_NAME, fleet_mark, object_names, probe_name
from kvhearth_server.tiers.remote.record import Suspect, record_bytes

_log = get_logger("kvhearth.remote")
_READ_BYTES = 1 << 20
_AGAIN_FIRST_S = 1.0
_AGAIN_MAX_S = 30.0
PROBE_S = 5.0
_LOOK_S = 1.0
"""Between two looks at the files of a remote with which something is wrong."""
_PROBE_BYTES = 4096
_FIXES = {
    Failure.DENIED: (
        "refuses access: check that the bucket exists, the secret, its rights to read, write and "
        "delete, and this host's clock"
    ),
    Failure.TIMEOUT: "does not answer in time; check the network and the server",
    Failure.UNREACHABLE: "cannot be reached; check the address, the network and the server",
    Failure.NO_SPACE: "is full",
    Failure.READ_ONLY: (
        "takes no writes: it is a replica, or was made read-only; name the primary, or check "
        "whether a fail-over is under way"
    ),
}


class Service:
    """Runs the requests of one daemon. Its loop asks; threads move blocks and answer.

    Args:
        connection: to the daemon.
    """

    def __init__(
        self, connection: socket.socket, driver: Driver, memory: Memory, fleet_key: bytes
    ) -> None:
        self._connection = connection
        self._driver = driver
        self._fleet_key = fleet_key
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set()
        self._asking: set[asyncio.Task[None]] = set()
        self._cancelled: set[int] = set()
        self._movers = Movers(driver, memory, Sealer(fleet_key), self._cancelled, self._answer)
        self._reader = FrameReader()
        self._lock = threading.Lock()
        """Guards the sending side and what follows, which threads use."""
        self._told: Counter[str] = Counter()
        self._problem = self._refused = ""
        """What the last probe found; ``_refused`` where no request is to be sent."""
        self._failing = False
        """Whether the last probe or the last request failed."""
        self._wrong = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the daemon closes the connection."""
        watching = asyncio.create_task(self._watch())
        watching.add_done_callback(lambda task: self._ended.set())
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
            data = self._connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
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
                elif head["kind"] == "reopen":
                    self._wrong.set()
                else:
                    self._take(decode_work(head, body))
        except (ValueError, KeyError, IndexError) as error:
            # The daemon is of another version, most likely.
            _log.error("remote.daemon_confused", error=str(error))
            self._ended.set()

    def _send(self, frame: bytes) -> None:
        """Send a frame, from any thread; the daemon always reads."""
        with self._lock, contextlib.suppress(OSError):  # it is gone, as the next read tells
            self._connection.sendall(frame)

    # -- the remote's condition --------------------------------------------------------------------

    async def _watch(self) -> None:
        """Probe the remote at first, and again while something is wrong with it or may be: then
        over new connections, with what the secrets' files say now.
        """
        pause_s = _AGAIN_FIRST_S
        await self._probe()
        while True:
            if self._problem:
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_MAX_S)
            else:
                pause_s = _AGAIN_FIRST_S
                await asyncio.sleep(_AGAIN_FIRST_S)
                await self._pause(math.inf)
            self._wrong.clear()
            await self._probe(reopen=True)

    async def _pause(self, seconds: float) -> None:
        """Wait, at most until a probe is due: for the daemon or the remote asks for one, or there
        are other secrets while requests fail.
        """
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            if self._failing and self._driver.files_changed():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wrong.wait(), min(left_s, _LOOK_S))
                return

    async def _probe(self, *, reopen: bool = False) -> None:
        """Find out what is wrong with the remote, and tell the daemon."""
        problem = refused = ""
        try:
            hit("mover.before_probe")
            if reopen:
                self._driver.reopen()
            await probe(self._driver, self._fleet_key)
        except Refused as error:
            problem = refused = str(error)
        except Unavailable as error:
            problem = str(error)
        self._problem, self._refused, self._failing = problem, refused, bool(problem)
        most = self._driver.value_bytes_max
        self._send(encode({"kind": "state", "problem": problem, "value_bytes_max": most}))

    # -- requests ----------------------------------------------------------------------------------

    def _take(self, work: Work) -> None:
        request = work.request
        self._open.add(work.ticket)
        if self._refused:
            self._answer(work.failed(Failure.DENIED), Counter())
            return
        names = object_names(self._fleet_key, request.space, request.keys)
        if isinstance(request, Get):
            self._movers.move(work, request, names)
        else:
            task = self._loop.create_task(self._ask(work, names))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, work: Work, names: list[str]) -> None:
        if isinstance(work.request, Delete):
            found = await self._driver.delete(names, work.deadline)
        else:
            size = record_bytes(work.request.family)
            found = await self._driver.exists(names, size, work.deadline)
        wrong = sum(isinstance(each, Corrupt) for each in found)
        self._answer(Answer(work.ticket, found), Counter({Suspect.ALTERED: wrong}))

    def _answer(self, answer: Answer, counts: Counter[str]) -> None:
        """Answer a request, from any thread."""
        self._open.discard(answer.ticket)
        self._cancelled.discard(answer.ticket)
        kinds = set(answer.outcomes)
        failed = {kind.reason for kind in kinds if isinstance(kind, Failed)} - {Failure.CANCELLED}
        self._failing = bool(failed or self._problem or (self._failing and Done() not in kinds))
        if not self._problem and failed & {Failure.DENIED, Failure.READ_ONLY}:
            self._loop.call_soon_threadsafe(self._wrong.set)
        for kind in kinds:
            if isinstance(kind, Corrupt):
                counts[f"corrupt_{kind.where}"] += answer.outcomes.count(kind)
        with self._lock:
            for name, amount in dict(self._driver.requests).items():
                counts[f"requests_{name}"] += amount - self._told[name]
                self._told[name] = amount
        hit("mover.before_results")
        self._send(encode_answer(answer, counts))
        hit("mover.after_results")


class Unavailable(Exception):
    """The remote does not answer; requests may be tried all the same."""


async def probe(driver: Driver, fleet_key: bytes) -> None:
    """Write, read and remove a value, and compare the fleet's mark with ours.

    Raises:
        Refused: the remote must not be used before somebody has done as the text says.
        Unavailable: the remote does not answer or fails.
    """
    place, name, value = driver.url.place, probe_name(), secrets.token_bytes(_PROBE_BYTES)
    _check(await _put(driver, name, value), place, "a write")
    try:
        found = await _get(driver, name, _PROBE_BYTES)
        if isinstance(found, memoryview) and found != value:
            raise Refused(f"{place} returns other bytes than were written; use another server")
        if isinstance(found, Missing):
            raise Refused(
                f"{place} does not find what was just written: check that the bucket exists and "
                "that the server keeps values"
            )
        if not isinstance(found, memoryview):
            _check(found, place, "a read")
    finally:
        removed = await driver.delete([name], _soon())
    _check(removed[0], place, "a removal")
    await _mark(driver, fleet_mark(fleet_key))


async def _mark(driver: Driver, ours: bytes) -> None:
    place = driver.url.place
    found = await _get(driver, MARK_NAME, len(ours))
    if isinstance(found, Missing):
        _check(await _put(driver, MARK_NAME, ours), place, "a write")
        found = await _get(driver, MARK_NAME, len(ours))
    if isinstance(found, memoryview) and found == ours:
        return
    if isinstance(found, Failed):
        _check(found, place, "a read")
    raise Refused(
        f"{place} belongs to a fleet with another key: copy that fleet's key file to this host, or "
        "give the URL another prefix (if its key is lost, its blocks are, too: kvhearth remote "
        "purge --yes removes them and the key's mark)"
    )


async def _put(driver: Driver, name: str, value: bytes) -> Outcome:
    (found,) = await asyncio.to_thread(driver.put, [name], [memoryview(value)], _soon())
    return found


async def _get(driver: Driver, name: str, size: int) -> memoryview | Outcome:
    into = memoryview(bytearray(size))
    (found,) = await asyncio.to_thread(driver.get, [name], [into], _soon())
    return found


def _soon() -> float:
    return time.monotonic() + PROBE_S


def _check(outcome: Outcome, place: str, what: str) -> None:
    if isinstance(outcome, Done):
        return
    reason = outcome.reason if isinstance(outcome, Failed) else None
    if reason is Failure.DENIED:
        raise Refused(f"{place} {_FIXES[reason]} ({what} failed)")
    if isinstance(outcome, Missing):
        raise Refused(f"{place} has no such bucket or directory; make it or correct the URL")
    text = _FIXES.get(reason, "fails") if reason is not None else "fails"
    raise Unavailable(f"{place} {text} ({what} failed)")
