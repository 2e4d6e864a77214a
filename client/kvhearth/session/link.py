"""A client's link to the daemon: attach socket, mapping and transport, opened and closed as one.

Attach passes identity and descriptors over a socket whose closing then ends the session. The epoch
of the engine's weights outlives links.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.native.table import Table
from kvhearth.session.arena import ArenaMapping, map_tables
from kvhearth.transports.base import CacheTransport
from kvhearth.transports.frames_unix import FramesUnixTransport
from kvhearth.transports.grpc_unix import GrpcUnixTransport
from kvhearth.url import DaemonUrl
from kvhearth.wire.frames import rebuild_error
from kvhearth.wire.handshake import FrameDecoder, Hello, Welcome, encode_frame

EPOCH_UNKNOWN = -1


class WeightsEpoch:
    """This engine's epoch, and the daemon's last reported one. Thread-safe.

    An engine gets no new weights because another one did, so its epoch follows only its own calls.
    But a daemon that starts cold has none of the old blocks and begins at an epoch that no earlier
    run used; its welcome names another lineage. An engine whose epoch was the daemon's at the last
    contact adopts the new one. A daemon that starts warm keeps lineage and epochs: a higher epoch
    is another engine's bump. If a daemon names no lineage, a cold start cannot be recognized, so
    the engine keeps its epoch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: int | None = None
        self._daemon = EPOCH_UNKNOWN
        self._boot_id = ""
        self._lineage = ""

    @property
    def own(self) -> int:
        """Epoch of this engine's weights; -1 while it is not known."""
        own = self._own
        return EPOCH_UNKNOWN if own is None else own

    @property
    def daemon(self) -> int:
        """The daemon's last reported epoch; -1 before the first report."""
        return self._daemon

    def use(self, epoch: int) -> None:
        """Set the epoch of the engine's weights; -1 for none."""
        with self._lock:
            self._own = epoch

    def bumped(self, boot_id: str, epoch: int) -> None:
        """Record the daemon's bump to ``epoch``, which this engine's weights now have."""
        with self._lock:
            self._own = epoch
            self._note(boot_id, epoch)

    def attached(self, boot_id: str, epoch: int, lineage: str = "") -> None:
        """Record a welcome; ``lineage`` identifies the daemon's cold start, "" if not given."""
        with self._lock:
            cold = "" not in (lineage, self._lineage) and lineage != self._lineage
            if self._own is None or (cold and self._own == self._daemon):
                self._own = epoch
            if boot_id != self._boot_id:
                self._boot_id, self._daemon = boot_id, EPOCH_UNKNOWN
            self._lineage = lineage
            self._note(boot_id, epoch)

    def heard(self, boot_id: str, epoch: int) -> None:
        """Record the epoch of a heartbeat's reply; replies of an earlier boot are ignored."""
        with self._lock:
            self._note(boot_id, epoch)

    def _note(self, boot_id: str, epoch: int) -> None:
        if boot_id == self._boot_id:
            # Replies may overtake each other; within a boot an epoch only grows.
            self._daemon = max(self._daemon, epoch)


DESCRIPTORS_MAX = 253
"""The kernel's bound for one message (SCM_MAX_FD)."""
_READ_BYTES = 64 * 1024
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)


class Session:
    """One attached process: the daemon's welcome, and the attach socket.

    Attributes:
        welcome: the daemon's answer.
        descriptors: owned until ``take_descriptors``: one per segment in the welcome's order, then
            the generations' memfd, then one per table; empty if the arena was not requested.
    """

    def __init__(self, welcome: Welcome, life_line: socket.socket, descriptors: list[int]) -> None:
        self.welcome = welcome
        self.descriptors = descriptors
        self._life_line = life_line
        self._pid = os.getpid()
        self._retired = False
        # Held across the system call, so that a closed descriptor's number is never polled.
        self._lock = threading.Lock()
        self._events: select.poll | None = select.poll()
        self._events.register(life_line, select.POLLIN)
        _live.add(self)

    def take_descriptors(self) -> list[int]:
        """Hand the descriptors to the caller, who closes them."""
        taken, self.descriptors = self.descriptors, []
        return taken

    def alive(self) -> bool:
        """Return whether the session may be used: not retired, and the daemon of this boot lives.

        One system call, no waiting. Once False, it stays False.
        """
        if self._retired or os.getpid() != self._pid:
            return False
        with self._lock:
            # The daemon sends nothing after the welcome: a byte is as bad a sign as the end of the
            # stream. A read would report the same by an exception, which costs three times as much.
            return self._events is not None and not self._events.poll(0)

    def retire(self) -> None:
        """Make ``alive`` False for good, so that no copy begins; the attach socket stays open."""
        self._retired = True

    def goodbye(self) -> None:
        """Announce a deliberate end of the session, then ``close``. Drain copies first."""
        _close_all(self.take_descriptors())
        if os.getpid() == self._pid:
            with self._lock:
                _say_bye(self._life_line)
        self.close()

    def close(self) -> None:
        """Close the attach socket and descriptors that were not taken. Idempotent."""
        with self._lock:
            self._events = None
            self._life_line.close()
        _close_all(self.take_descriptors())

    def leave_open(self) -> None:
        """Leave the attach socket open until the process ends, which ends the session."""
        with self._lock, contextlib.suppress(OSError):
            self._events = None
            self._life_line.detach()

    def _forget(self) -> None:
        """Close a forked child's copies: they must not make a dead parent look alive."""
        self._lock = threading.Lock()
        self.close()


_live: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for session in list(_live):
        session._forget()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def attach(url: DaemonUrl, hello: Hello) -> Session:
    """Attach to the daemon at ``url``; waits at most ``url.attach_ms``.

    An older daemon refuses a hello with fields that it does not know. It gets the hello again
    without them, on another connection.

    Raises:
        KVHearthError: the daemon's refusal with its details; ``daemon_away`` if no daemon listens
            or the connection ends; ``deadline``; ``socket_unusable`` if this user may not connect;
            ``bad_message`` for a malformed answer; ``peer_not_allowed`` if the daemon runs as
            another user than the URL names.
    """
    deadline = time.monotonic() + url.attach_ms / 1000
    *newer, oldest = hello.versions()
    for each in newer:
        try:
            return _attach(url, each, deadline)
        except KVHearthError as error:
            if error.reason is not Reason.BAD_MESSAGE:
                raise
    return _attach(url, oldest, deadline)


def _attach(url: DaemonUrl, hello: Hello, deadline: float) -> Session:
    try:
        life_line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # no descriptor is free
        raise _translate(error, url) from None
    descriptors: list[int] = []
    try:
        _set_timeout(life_line, deadline)
        life_line.connect(url.attach_path)
        url.check_daemon(life_line)
        life_line.sendall(encode_frame(hello.to_message()))
        welcome = _read_answer(_receive(life_line, deadline, descriptors))
        _check_descriptors(hello, welcome, descriptors)
        life_line.setblocking(False)
        return Session(welcome, life_line, descriptors)
    except BaseException as error:
        _close_all(descriptors)
        # In all of these cases no copy ever began.
        _say_bye(life_line)
        life_line.close()
        if isinstance(error, OSError):
            raise _translate(error, url) from None
        raise


def _set_timeout(life_line: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    life_line.settimeout(left_s)


def _receive(life_line: socket.socket, deadline: float, descriptors: list[int]) -> dict[str, Any]:
    """Return the first frame; append descriptors to ``descriptors`` as they come, close-on-exec."""
    decoder = FrameDecoder()
    while True:
        _set_timeout(life_line, deadline)
        data, ancillary, flags, _ = life_line.recvmsg(
            _READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise KVHearthError(
                Reason.BAD_MESSAGE, "descriptors were lost on the way: raise RLIMIT_NOFILE"
            )
        if not data:
            raise KVHearthError(Reason.DAEMON_AWAY, "the daemon closed the connection at attach")
        messages = decoder.feed(data)
        if messages:
            return messages[0]


def _read_answer(message: dict[str, Any]) -> Welcome:
    if message.get("kind") != "refused":
        try:
            return Welcome.from_message(message)
        except (TypeError, ValueError) as error:
            raise KVHearthError(Reason.BAD_MESSAGE, f"welcome: {error}") from None
    details = message.get("details")
    raise rebuild_error(
        str(message.get("reason", "")),
        str(message.get("message", "")),
        details if isinstance(details, dict) else {},
    )


def _check_descriptors(hello: Hello, welcome: Welcome, descriptors: list[int]) -> None:
    tables = len(welcome.tables)
    wanted = (len(welcome.segments) if hello.map_arena else 0) + tables
    wanted += 1 if hello.map_arena or tables else 0
    if tables and not hello.shared_index:
        raise KVHearthError(Reason.BAD_MESSAGE, "welcome has tables that were not asked for")
    if len(descriptors) != wanted:
        raise KVHearthError(
            Reason.BAD_MESSAGE, f"welcome came with {len(descriptors)} descriptors, not {wanted}"
        )


def _translate(error: OSError, url: DaemonUrl) -> KVHearthError:
    if isinstance(error, TimeoutError):
        return KVHearthError(
            Reason.DEADLINE, f"no answer at {url.attach_path} in {url.attach_ms} ms"
        )
    if isinstance(error, PermissionError):
        return KVHearthError(
            Reason.SOCKET_UNUSABLE,
            f"may not connect to {url.attach_path}: run as a user or group that may",
        )
    return KVHearthError(
        Reason.DAEMON_AWAY, f"no daemon at {url.attach_path} ({error}): is it running?"
    )


def _say_bye(life_line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        life_line.send(encode_frame({"kind": "bye"}), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()


@dataclass(frozen=True, eq=False)
class Link:
    """One attachment to one boot of the daemon; ``tables`` are those of the shared index."""

    session: Session
    transport: CacheTransport
    mapping: ArenaMapping | None
    tables: Sequence[Table] = ()

    @cached_property
    def welcome(self) -> Welcome:
        """The daemon's answer at attach."""
        return self.session.welcome

    @cached_property
    def boot_id(self) -> str:
        """Boot id of the daemon."""
        return self.session.welcome.boot_id

    @cached_property
    def session_id(self) -> str:
        """Id of this attachment, unique across boots."""
        return f"{self.boot_id}/{self.welcome.session}"

    def close(self) -> None:
        """Close everything and say goodbye; the caller's copies have drained.

        The mapping goes first: the daemon may reuse this client's memory once the mapping is gone,
        and the closing of the attach socket makes the daemon check that.
        """
        if self.mapping is not None:
            self.mapping.close()
        self.transport.close()
        self.session.goodbye()


def open_link(url: DaemonUrl, hello: Hello) -> Link:
    """Attach, map the arena if ``hello`` asks for it, and prepare the transport.

    Raises:
        KVHearthError: as ``session.attach`` and ``arena.ArenaMapping``; nothing stays open then.
    """
    session = attach(url, hello)
    with contextlib.ExitStack() as undo:
        # No copy ever began: the daemon has nothing to wait for.
        undo.callback(session.goodbye)
        welcome = session.welcome
        mapping = None
        descriptors = session.take_descriptors()
        try:
            if hello.map_arena:
                own = descriptors[: len(welcome.segments) + 1]
                mapping = ArenaMapping(welcome, own, session.alive)
                undo.callback(mapping.close)
            tables = map_tables(welcome, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        transport = _transport(url, welcome)
        undo.pop_all()
    return Link(session, transport, mapping, tables)


def _transport(url: DaemonUrl, welcome: Welcome) -> CacheTransport:
    if url.calls == "grpc":
        return GrpcUnixTransport(url.grpc_target, welcome.token, welcome.message_bytes_max)
    return FramesUnixTransport(
        url.calls_path, welcome.token, welcome.message_bytes_max, url.check_daemon
    )
