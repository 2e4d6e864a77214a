"""A client's link to the daemon: life line, arena and transport, opened and closed as one.

Attach passes identity and, on one host, descriptors over a socket whose closing then ends the
session. A life line to a gateway may be resumed after a break. The epoch of the engine's weights
outlives links.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import INFO
from typing import Any

from kvhearth.clock import REAL_TIME, Clock
from kvhearth.counters import log_event
from kvhearth.errors import KVHearthError, Reason
from kvhearth.native.table import Table
from kvhearth.session.arena import ArenaMapping, map_tables
from kvhearth.session.remote_arena import RemoteArena
from kvhearth.transports.base import CacheTransport
from kvhearth.transports.data import DataLines
from kvhearth.transports.frames import over_unix
from kvhearth.transports.grpc_unix import GrpcUnixTransport
from kvhearth.transports.tcp import Dialer, over_tcp
from kvhearth.url import DaemonUrl, RemoteUrl, UnixUrl
from kvhearth.wire.frames import rebuild_error
from kvhearth.wire.handshake import FrameDecoder, Hello, Welcome, encode_frame
from kvhearth.wire.remote import GatewayTerms, Identify, Purpose

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
        self._label: str | None = ""
        self._label_due = False

    @property
    def own(self) -> int:
        """Epoch of this engine's weights; -1 while it is not known."""
        own = self._own
        return EPOCH_UNKNOWN if own is None else own

    @property
    def daemon(self) -> int:
        """The daemon's last reported epoch; -1 before the first report."""
        return self._daemon

    @property
    def label_due(self) -> bool:
        """Whether the daemon, after a cold start, takes this engine's weights for those of the
        contract: ``label`` must be sent before any lookup.
        """
        return self._label_due

    @property
    def label(self) -> str | None:
        """Name of this engine's weights on remote tiers: "" for those of the contract, None for
        unknown ones.
        """
        return self._label

    def use(self, epoch: int, label: str | None = None) -> None:
        """Set the epoch of the engine's weights, and their label; -1 for none."""
        with self._lock:
            self._own, self._label = epoch, label

    def bumped(self, boot_id: str, epoch: int, label: str | None = None) -> None:
        """Record the daemon's bump to ``epoch``, which this engine's weights now have."""
        with self._lock:
            self._own, self._label, self._label_due = epoch, label, False
            self._note(boot_id, epoch)

    def attached(self, boot_id: str, epoch: int, lineage: str = "") -> None:
        """Record a welcome; ``lineage`` identifies the daemon's cold start, "" if not given."""
        with self._lock:
            cold = "" not in (lineage, self._lineage) and lineage != self._lineage
            if self._own is None or (cold and self._own == self._daemon):
                self._label_due = self._own is not None and self._label != ""
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

    def mend(self) -> None:
        """Resume a broken life line where that is possible; waits for an attach at most."""

    def fileno(self) -> int:
        """Return the attach socket's descriptor; it becomes readable when the session has ended."""
        return self._life_line.fileno()

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


_CERTIFICATE_ALERTS = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")
"""Words in the names of TLS's alerts about a client's certificate."""


class RemoteSession(Session):
    """One attached process, and its life line to a gateway, which may break and be resumed.

    It is alive while the life line is, and while it may still be resumed: until the gateway refuses
    that, or its ``resume_s`` are over.

    Attributes:
        terms: the gateway's.
        dialer: opens connections.
        on_retired: called by ``retire``.
    """

    def __init__(
        self,
        welcome: Welcome,
        life_line: socket.socket,
        url: RemoteUrl,
        terms: GatewayTerms,
        dialer: Dialer,
        clock: Clock,
    ) -> None:
        super().__init__(welcome, life_line, [])
        self._clock = clock
        self.terms = terms
        self.dialer = dialer
        self.on_retired: Callable[[], None] = lambda: None
        self._url = url
        self._broken_at: float | None = None

    def alive(self) -> bool:
        """Return whether the session may be used; see ``Session.alive``."""
        if self._retired or os.getpid() != self._pid:
            return False
        with self._lock:
            if self._events is None:
                return False
            if not self._events.poll(0):
                return True
            if self._broken_at is None:
                self._broken_at = self._clock.now()
            if self._clock.now() < self._broken_at + self.terms.resume_s:
                return True
            self._retired = True
        self.on_retired()
        return False

    def retire(self) -> None:
        """See ``Session.retire``; waits for the network end."""
        super().retire()
        self.on_retired()

    def mend(self) -> None:
        """Resume a broken life line; a refusal retires the session.

        Waits for ``attach_ms`` at most.
        """
        with self._lock:
            broken = self._events is not None and bool(self._events.poll(0))
            if broken and _only_tls(self._life_line):
                broken = False
            if not broken:
                self._broken_at = None
                return
        try:
            line = self._resumed()
        except ConnectionRefusedError:
            # The process that had the session is gone, and the session with it.
            self.retire()
        except OSError:
            self.alive()  # notes when it broke; tried again while there is time
        except KVHearthError:
            self.retire()
        else:
            self._exchange(line)

    def _resumed(self) -> socket.socket:
        """Return a new life line of this session.

        Raises:
            KVHearthError: the gateway's refusal.
            OSError: it cannot be reached.
        """
        deadline = time.monotonic() + self._url.attach_ms / 1000
        line = self.dialer.connect(Purpose.LIFE_LINE, deadline)
        try:
            identify = Identify(self._url.secret(), self.welcome.token)
            line.sendall(encode_frame(identify.to_message()))
            answer = next(_messages(line, deadline))
            if answer.get("kind") != "resumed":
                raise _refusal(answer)
            line.setblocking(False)
        except BaseException:
            line.close()
            raise
        return line

    def _exchange(self, line: socket.socket) -> None:
        """Put a resumed life line in the broken one's place."""
        with self._lock:
            if self._events is None:  # closed meanwhile
                line.close()
                return
            self._life_line.close()
            self._life_line = line
            self._events = select.poll()
            self._events.register(line, select.POLLIN)
            self._broken_at = None
        log_event(INFO, "session.resumed", "resumed the connection to the gateway")


def _only_tls(line: socket.socket) -> bool:
    """Return whether a readable life line brought only records of TLS itself."""
    if not isinstance(line, ssl.SSLSocket):
        return False
    try:
        line.recv(1)
    except ssl.SSLWantReadError:
        return True
    except OSError:
        return False
    return False


def attach(url: DaemonUrl, hello: Hello, clock: Clock = REAL_TIME) -> Session:
    """Attach to the daemon at ``url``, on this host or by a gateway; waits at most
    ``url.attach_ms``. The clock times how long a broken life line may be resumed.

    Raises:
        KVHearthError: the daemon's refusal with its details; ``daemon_away`` if no daemon listens
            or the connection ends; ``deadline``; ``socket_unusable`` if this user may not connect;
            ``bad_message`` for a malformed answer; ``peer_not_allowed`` if the daemon runs as
            another user than the URL names, or if the gateway's certificate is not trusted;
            ``bad_url`` for a file that the URL names.
    """
    if isinstance(url, UnixUrl):
        return _attach_local(url, hello)
    return _attach_remote(url, hello, clock)


def _attach_local(url: UnixUrl, hello: Hello) -> Session:
    deadline = time.monotonic() + url.attach_ms / 1000
    try:
        life_line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # no descriptor is free
        raise _translate(error, url, url.attach_path) from None
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
            raise _translate(error, url, url.attach_path) from None
        raise


def _attach_remote(url: RemoteUrl, hello: Hello, clock: Clock) -> RemoteSession:
    deadline = time.monotonic() + url.attach_ms / 1000
    dialer = Dialer(url)
    opening = encode_frame(Identify(url.secret()).to_message()) + encode_frame(hello.to_message())
    try:
        line = dialer.connect(Purpose.LIFE_LINE, deadline)
        try:
            line.sendall(opening)
            answers = _messages(line, deadline)
            answer = next(answers)
            if answer.get("kind") != "gateway":
                raise _refusal(answer)
            terms = GatewayTerms.from_message(answer)
            welcome = _read_answer(next(answers))
            dialer.keepalive_s = terms.keepalive_s
            dialer.set_keepalive(line)
            line.setblocking(False)
            return RemoteSession(welcome, line, url, terms, dialer, clock)
        except BaseException:
            # No copy ever began.
            _say_bye(line)
            line.close()
            raise
    except OSError as error:
        raise _translate(error, url, url.place) from None


def _messages(line: socket.socket, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the messages that come until the deadline.

    Raises:
        KVHearthError: ``bad_message``.
        OSError: the connection ended; ``TimeoutError`` at the deadline.
    """
    decoder = FrameDecoder()
    while True:
        _set_timeout(line, deadline)
        if not (data := line.recv(_READ_BYTES)):
            raise ConnectionResetError("the gateway closed the connection")
        yield from decoder.feed(data)


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
    raise _refusal(message)


def _refusal(message: dict[str, Any]) -> KVHearthError:
    if message.get("kind") != "refused":
        return KVHearthError(Reason.BAD_MESSAGE, "neither a welcome nor a refusal came")
    details = message.get("details")
    return rebuild_error(
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


def _translate(error: OSError, url: DaemonUrl, place: str) -> KVHearthError:
    if isinstance(error, TimeoutError):
        return KVHearthError(Reason.DEADLINE, f"no answer at {place} in {url.attach_ms} ms")
    alert = getattr(error, "reason", "") if isinstance(error, ssl.SSLError) else ""
    if any(word in str(alert) for word in _CERTIFICATE_ALERTS):
        return KVHearthError(
            Reason.PEER_NOT_ALLOWED,
            f"{place} takes no client without a certificate that it trusts ({alert}): name one by "
            "cert= and key=",
        )
    if isinstance(error, PermissionError):
        return KVHearthError(
            Reason.SOCKET_UNUSABLE,
            f"may not connect to {place}: run as a user or group that may",
        )
    return KVHearthError(Reason.DAEMON_AWAY, f"no daemon at {place} ({error}): is it running?")


def _say_bye(life_line: socket.socket) -> None:
    bye = encode_frame({"kind": "bye"})
    # TLS takes no flags, and does not block here: its life line is not blocking once it is one.
    flags = (socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT,)
    with contextlib.suppress(OSError):
        life_line.send(bye, *(() if isinstance(life_line, ssl.SSLSocket) else flags))


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()


Arena = ArenaMapping | RemoteArena


@dataclass(frozen=True, eq=False)
class Link:
    """One attachment to one boot of the daemon.

    Attributes:
        mapping: the arena, where it was asked for: mapped, or on another host.
        tables: those of the shared index.
    """

    session: Session
    transport: CacheTransport
    mapping: Arena | None
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


def open_link(url: DaemonUrl, hello: Hello, clock: Clock = REAL_TIME) -> Link:
    """Attach, open the arena if ``hello`` asks for it, and prepare the transport.

    Raises:
        KVHearthError: as ``attach``, ``arena.ArenaMapping`` and ``RemoteArena``; nothing stays open
            then.
    """
    session = attach(url, hello, clock)
    with contextlib.ExitStack() as undo:
        # No copy ever began: the daemon has nothing to wait for.
        undo.callback(session.goodbye)
        if isinstance(url, UnixUrl):
            link = _local_link(url, hello, session, undo)
        else:
            assert isinstance(session, RemoteSession), "attach goes by the URL's kind"
            link = _remote_link(url, hello, session)
        undo.pop_all()
    return link


def _local_link(url: UnixUrl, hello: Hello, session: Session, undo: contextlib.ExitStack) -> Link:
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
    transport: CacheTransport
    if url.calls == "grpc":
        transport = GrpcUnixTransport(url.grpc_target, welcome.token, welcome.message_bytes_max)
    else:
        transport = over_unix(
            url.calls_path, welcome.token, welcome.message_bytes_max, url.check_daemon
        )
    return Link(session, transport, mapping, tables)


def _remote_link(url: RemoteUrl, hello: Hello, session: RemoteSession) -> Link:
    welcome, terms = session.welcome, session.terms
    transport = over_tcp(session.dialer, url.place, welcome.token, welcome.message_bytes_max)
    if not hello.map_arena:
        return Link(session, transport, None)
    lines = DataLines(
        session.dialer,
        welcome.token,
        min(url.connections, terms.data_connections),
        window_bytes=terms.window_bytes,
        connect_s=url.attach_ms / 1000,
        alive=session.alive,
    )
    session.on_retired = lines.interrupt
    return Link(session, transport, RemoteArena(welcome, lines, url.staging_bytes, session.alive))
