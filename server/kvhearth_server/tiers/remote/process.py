"""Daemon's side of a mover: starts the helper process, feeds it, ends it when it misses a deadline.

Deadlines hold whatever the library does. At a request's deadline its caller is told. If the helper
has not answered 250 ms later it is killed: once it is gone, by its pidfd and by the locks of its
mappings, nobody writes to its requests' slots any more, and a new helper is started.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvhearth.errors import KVHearthError
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.base import BlockSpec, Counts, Failure, Refusal, Throttled
from kvhearth_server.tiers.remote.mover import (
    Answer,
    Exists,
    FrameReader,
    Get,
    Head,
    Work,
    decode_answer,
    encode,
    encode_work,
    whole_pages,
)
from kvhearth_server.tiers.remote.record import record_bytes
from kvhearth_server.tiers.remote.url import RemoteUrl

QUEUE_MAX = 256
"""Requests that wait or run."""
GRACE_S = 0.25
"""From a missed deadline to the end of the helper."""
_START_S = 30.0
_END_S = 2.0
_PAUSE_FIRST_S = 0.1
_PAUSE_MAX_S = 5.0
_STEADY_S = 10.0
_MAPPED_S = 0.02
"""Between two looks at the locks of a helper that is gone."""
_KILLS_MANY = 3
_KILLS_WITHIN_S = 60.0
_RECEIVE_BYTES = 1 << 20
_LOCK_BYTE = 1 << 40
"""The mover's lock byte, far behind those of clients."""
_log = get_logger("kvhearth.remote")


class Region(Protocol):
    """An arena segment, as a mover needs it (``memory.mapping.Segment``)."""

    bytes: int

    def lock_client_byte(self, index: int) -> int:
        """Return a new descriptor of the memory that holds a lock on byte ``index``."""

    def client_byte_held(self, index: int) -> bool:
        """Whether a process still holds or maps that descriptor."""


class Staging:
    """Places in a mover's staging memory, first fit. The daemon keeps them: a helper that is killed
    takes none of the books with it.

    Attributes:
        size: all bytes, whole pages.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lent: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that are not lent."""
        return self.size - sum(self._lent.values())

    def take(self, size: int) -> int | None:
        """Lend ``size`` bytes, at least one; return their offset, None without room."""
        start = 0
        for at in sorted(self._lent):
            if at - start >= size:
                break
            start = at + self._lent[at]
        if start + size > self.size:
            return None
        self._lent[start] = size
        return start

    def give(self, start: int) -> None:
        """Take back what ``take`` lent."""
        del self._lent[start]


@dataclass(eq=False)
class _Child:
    """A helper process.

    Attributes:
        unsent: frames that the socket had no room for.
        value_bytes_max: most bytes of a value at the remote; 0 until the helper has told them.
        ended: whether the process has ended; its mappings may live on in a child of its own.
    """

    process: subprocess.Popen[bytes]
    connection: socket.socket
    pidfd: int
    began: float
    reader: FrameReader = field(default_factory=FrameReader)
    unsent: bytearray = field(default_factory=bytearray)
    value_bytes_max: int = 0
    killed: bool = False
    ended: bool = False

    @property
    def serves(self) -> bool:
        """Whether it takes requests."""
        return self.value_bytes_max > 0 and not (self.killed or self.ended)


class Mover:
    """One remote's helper process, as the daemon's loop sees it.

    The loop drives it like a tier: ``submit`` never waits, ``event_fd`` becomes readable when
    ``poll`` has something to report. The remote's client library is loaded in the helper only.

    Args:
        url: the remote.
        fleet_key: secret of the fleet, of which the names are made.
        regions: arena segments, in the order of their numbers.
        staging_bytes: memory of the helper through which all bytes pass.
        log_level, log_format: of the helper's log.

    Attributes:
        starting: the problem while there is none but that a helper starts.
        staging: places in the helper's memory through which all bytes pass.
        counts: counters by name; they only rise.
        good_probes: number of probes that found nothing wrong.
    """

    def __init__(
        self,
        url: RemoteUrl,
        fleet_key: bytes,
        regions: Sequence[Region],
        staging_bytes: int = 256 << 20,
        *,
        log_level: str = "info",
        log_format: str = "auto",
    ) -> None:
        self.url = url
        self.starting = f"the helper process of {url.place} starts"
        self._fleet_key = fleet_key
        self._regions = regions
        self._log_settings = {"log_level": log_level, "log_format": log_format}
        self.staging = Staging(whole_pages(staging_bytes))
        self.counts = Counts()
        self.good_probes = 0
        self._tickets = itertools.count(1)
        self._pending: dict[int, Work] = {}
        self._ready: list[Answer] = []
        self._child: _Child | None = None
        self._start_at = 0.0
        self._pause_s = _PAUSE_FIRST_S
        self._starts = 0
        self._kills: deque[float] = deque(maxlen=_KILLS_MANY)
        self._problem = ""
        self._draining = self._closed = False
        self._too_large_told = False
        self._epoll = select.epoll()
        self.event_fd = self._epoll.fileno()
        self._start()

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, request: Exists, deadline_s: float) -> int | Throttled:
        """Begin a request. Return its ticket, or ``Throttled`` where the queue or the staging
        memory is full or no helper runs.

        Args:
            deadline_s: time after which the request is answered as ``Failed("timeout")``, whatever
                the library does.
        """
        child = self._child
        if self._draining or self._closed:
            return Throttled(Refusal.DRAINING)
        if child is None or not child.serves:
            return Throttled(Refusal.DEGRADED, self._pause_s)
        if len(self._pending) >= QUEUE_MAX:
            return Throttled(Refusal.QUEUE)
        work = Work(next(self._tickets), request, time.monotonic() + deadline_s)
        if isinstance(request, Get):
            if not self.takes(request.family):
                return Throttled(Refusal.TOO_LARGE)
            size = record_bytes(request.family)
            if (taken := self.staging.take(len(request.keys) * whole_pages(size))) is None:
                return Throttled(Refusal.QUEUE)
            work.staging = taken
        self._pending[work.ticket] = work
        self._send(child, encode_work(work))
        return work.ticket

    def takes(self, family: BlockSpec) -> bool:
        """Whether blocks of a family fit the remote and the staging memory, as far as is known."""
        known = self._child.value_bytes_max if self._child is not None else 0
        size, most = record_bytes(family), min(known or self.staging.size, self.staging.size)
        if size > most and not self._too_large_told:
            self._too_large_told = True
            _log.error("remote.block_too_large", remote=self.url.place, bytes=size, bytes_max=most)
        return size <= most

    def cancel(self, ticket: int) -> None:
        """Give up a request: what has not begun ends as ``Failed("cancelled")``."""
        if self._child is not None and ticket in self._pending:
            self._send(self._child, encode({"kind": "cancel", "ticket": ticket}))

    def reopen(self) -> None:
        """Have the helper read the remote's secrets again and probe it over new connections."""
        if self._child is not None:
            self._send(self._child, encode({"kind": "reopen"}))

    def poll(self) -> list[Answer]:
        """Return the answers since the last call; restart a helper that ended."""
        events = {fd for fd, _ in self._epoll.poll(0)}
        child = self._child
        if child is not None:
            if child.connection.fileno() in events:
                self._receive(child)
                self._send(child, b"")
            self._watch(child, ended=child.pidfd in events)
        elif not self._closed and time.monotonic() >= self._start_at:
            self._start()
        found, self._ready = self._ready, []
        return found

    @property
    def up(self) -> bool:
        """Whether it takes requests."""
        return self._child is not None and self._child.serves

    @property
    def problem(self) -> str:
        """Reason why it takes none, or what its first probe found, as a sentence that says what to
        do; empty for none.
        """
        return self._many_kills() or self._problem or ("" if self.up else self.starting)

    @property
    def restarts(self) -> int:
        """Helper processes that were started again, since the daemon's start."""
        return max(self._starts - 1, 0)

    @property
    def alone(self) -> bool:
        """Whether no helper of an earlier daemon can write to the arena any more."""
        return self._starts > 0  # its locks are free only once an earlier one is gone

    @property
    def pid(self) -> int | None:
        """Process id of the helper; None while none runs."""
        return None if self._child is None else self._child.process.pid

    def _many_kills(self) -> str:
        recent = [at for at in self._kills if time.monotonic() - at < _KILLS_WITHIN_S]
        if len(recent) < _KILLS_MANY:
            return ""
        return (
            f"{self.url.place} missed its deadlines so often that its helper process was ended "
            f"{_KILLS_MANY} times in a minute; check the server and the network"
        )

    # -- the helper --------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start a helper."""
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair()
                undo.callback(theirs.close)
                regions = []
                for region in self._regions:
                    descriptor = region.lock_client_byte(_LOCK_BYTE)
                    undo.callback(os.close, descriptor)
                    regions.append([descriptor, region.bytes])
                process = subprocess.Popen(
                    [sys.executable, "-m", "kvhearth_server.tiers.remote.helper"],
                    stdin=subprocess.PIPE,
                    pass_fds=[theirs.fileno(), *(fd for fd, _ in regions)],
                )
            except (OSError, KVHearthError) as error:
                # Out of descriptors or processes, or a dead daemon's helper still maps the arena:
                # the daemon goes on, and tries again.
                self._problem = f"no helper process for {self.url.place} can be started: {error}"
                self._later()
                return
            message = {
                "url": self.url.text,
                "fleet_key": self._fleet_key.hex(),
                "staging_bytes": self.staging.size,
                "connection": theirs.fileno(),
                "regions": regions,
                **self._log_settings,
            }
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has died: its pidfd tells
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
        self._starts += 1
        ours.setblocking(False)
        child = _Child(process, ours, os.pidfd_open(process.pid), time.monotonic())
        for fd in (ours.fileno(), child.pidfd):
            self._epoll.register(fd, select.EPOLLIN)
        self._child = child

    def _later(self) -> None:
        """Start the next helper after a pause, which grows while helpers do not live long."""
        child, now = self._child, time.monotonic()
        if child is not None and now - child.began > _STEADY_S:
            self._pause_s = _PAUSE_FIRST_S
        # The first death, and a kill at a missed deadline, are followed at once.
        at_once = child is not None and child.killed and not self._many_kills()
        self._start_at = now if at_once else now + self._pause_s
        if not at_once:
            self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)

    def _watch(self, child: _Child, *, ended: bool) -> None:
        """Tell callers of missed deadlines; end a helper that keeps none; bury one that ended."""
        now = time.monotonic()
        overdue = False
        for work in self._pending.values():
            if not work.told and now >= work.deadline:
                work.told = True
                self.counts.add("deadlines_missed")
                self._ready.append(work.failed(Failure.TIMEOUT, final=False))
            overdue = overdue or now >= work.deadline + GRACE_S
        late_start = not child.value_bytes_max and now - child.began > _START_S
        if (overdue or late_start) and not child.killed and not child.ended:
            self._kill(child)
        if not child.ended and ended:
            child.ended = True
            self._receive(child)
            self._epoll.unregister(child.pidfd)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(child.connection.fileno())
        if child.ended and not self._mapped():
            self._bury(child)

    def _kill(self, child: _Child) -> None:
        child.killed = True
        self._kills.append(time.monotonic())
        self.counts.add("kills")
        _log.error("remote.helper_killed", remote=self.url.place, pid=child.process.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def _mapped(self) -> bool:
        """Whether any process still maps the arena by what the helper was given."""
        return any(region.client_byte_held(_LOCK_BYTE) for region in self._regions)

    def _bury(self, child: _Child) -> None:
        """Give final answers to everything that the helper had, and have another one started."""
        reason = Failure.TIMEOUT if child.killed else Failure.UNREACHABLE
        for work in list(self._pending.values()):
            self._finish(work, work.failed(reason))
        code = self._end(child)
        _log.error("remote.helper_ended", remote=self.url.place, code=code)
        self._later()
        self._child = None

    def _end(self, child: _Child) -> int:
        """End a helper that may still run; return its exit status."""
        child.connection.close()
        assert child.process.stdin is not None
        with contextlib.suppress(OSError):
            child.process.stdin.close()
        try:
            child.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
        os.close(child.pidfd)
        return child.process.wait()

    # -- frames ------------------------------------------------------------------------------------

    def _send(self, child: _Child, frame: bytes) -> None:
        """Send what the socket takes, and the rest when it takes more."""
        waited = bool(child.unsent)
        child.unsent += frame
        try:
            while child.unsent and not child.ended:
                sent = child.connection.send(child.unsent)
                del child.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            child.unsent.clear()  # it has died: its pidfd tells
        if waited != bool(child.unsent) and not child.ended:
            events = select.EPOLLIN | (select.EPOLLOUT if child.unsent else 0)
            self._epoll.modify(child.connection.fileno(), events)

    def _receive(self, child: _Child) -> None:
        while True:
            try:
                data = child.connection.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                if not child.ended:
                    with contextlib.suppress(OSError, ValueError):
                        self._epoll.unregister(child.connection.fileno())
                return
            try:
                for head, body in child.reader.feed(data):
                    self._take(child, head, body)
            except (ValueError, KeyError, IndexError) as error:
                _log.error("remote.helper_confused", remote=self.url.place, error=str(error))
                self._kill(child)
                return

    def _take(self, child: _Child, head: Head, body: bytes) -> None:
        if head["kind"] == "state":
            self._problem = head["problem"]
            self.good_probes += not head["problem"]
            child.value_bytes_max = head["value_bytes_max"]
            return
        for name, amount in head.get("counts", {}).items():
            self.counts.add(name, amount)
        if (work := self._pending.get(head["ticket"])) is not None:
            self._finish(work, decode_answer(head, body))

    def _finish(self, work: Work, answer: Answer) -> None:
        """Give a request its final answer and take its staging memory back."""
        del self._pending[work.ticket]
        if isinstance(work.request, Get):
            self.staging.give(work.staging)
        self._ready.append(work.failed(Failure.TIMEOUT) if work.told else answer)

    @property
    def due_at(self) -> float:
        """Monotonic time at which ``poll`` must be called, if nothing happens before."""
        child = self._child
        if child is None:
            return math.inf if self._closed else self._start_at
        if child.ended:
            return time.monotonic() + _MAPPED_S
        moments = [work.deadline for work in self._pending.values() if not work.told]
        if not child.killed:
            moments += [work.deadline + GRACE_S for work in self._pending.values() if work.told]
            moments += [] if child.value_bytes_max else [child.began + _START_S]
        return min(moments, default=math.inf)

    # -- end ---------------------------------------------------------------------------------------

    def drain(self, deadline_s: float) -> bool:
        """Take no requests any more and wait for those in flight; false if that takes too long."""
        self._draining = True
        end = time.monotonic() + deadline_s
        while self._pending:
            now = time.monotonic()
            if now >= end:
                return False
            select.select([self.event_fd], [], [], max(0.0, min(end, self.due_at) - now))
            self._ready = self.poll() + self._ready
        return True

    def close(self) -> None:
        """End the helper and release all resources."""
        if self._closed:
            return
        self._closed = True
        if self._child is not None:
            self._end(self._child)
            self._child = None
        self._epoll.close()
