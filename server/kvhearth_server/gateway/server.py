"""The gateway's listeners and connections, a thread for each connection."""

from __future__ import annotations

import contextlib
import hashlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import DaemonUrl
from kvhearth.wire import frames
from kvhearth.wire.handshake import (
    FRAME_HEADER_BYTES,
    HELLO_PARTS_MAX,
    FrameDecoder,
    Hello,
    encode_frame,
    refused,
)
from kvhearth.wire.remote import (
    PREFACE,
    TOKEN_BYTES_MAX,
    DataFrame,
    DataKind,
    GatewayTerms,
    Identify,
    Purpose,
    purpose_of,
)
from kvhearth.worker_thread import SupervisedThread
from kvhearth_server.gateway.calls import Budget, CallsConnection
from kvhearth_server.gateway.data import DataConnection
from kvhearth_server.gateway.identity import Doorkeeper, Identity
from kvhearth_server.gateway.sessions import RemoteSession, Sessions
from kvhearth_server.gateway.streams import Ended, Stream, widen
from kvhearth_server.gateway.tally import Tally
from kvhearth_server.observability.logs import LimitedLog, get_logger

_IDENTIFY_BYTES_MAX = 4096
_BYE_BYTES_MAX = 256
_UNOPENED_MAX = 64
_CONNECTIONS_MAX = 1024
_BACKLOG = 256
_BUDGET_BYTES = 64 << 20
_JANITOR_S = 0.2
_ACCEPT_WAIT_S = 0.5
_HOLD_MS = 1000
_log = get_logger("kvhearth.gateway")
_troubles = LimitedLog(_log)


@dataclass(frozen=True)
class Limits:
    """Bounds of a gateway; see ``GatewayTerms``.

    Attributes:
        handshake_s: time for a connection to open.
        frame_s: time for a frame, in addition to that of its payload.
    """

    window_bytes: int = 64 << 20
    data_connections: int = 32
    calls_connections: int = 32
    resume_s: float = 10.0
    keepalive_s: float = 15.0
    handshake_s: float = 5.0
    frame_s: float = 10.0


@dataclass(frozen=True)
class Place:
    """A gateway process among those that share an address: its index, their number, and the port
    of its own (that of all where there is one).
    """

    index: int
    count: int
    ports: tuple[int, ...]

    def port_of(self, tenant: str, engine_id: str) -> int:
        """Return the port of the process that serves an engine."""
        digest = hashlib.sha256(f"{tenant}\0{engine_id}".encode()).digest()
        return self.ports[int.from_bytes(digest[:8], "little") % self.count]


class Gateway:
    """Serves one process's listeners.

    Args:
        url: the daemon.
        doorkeeper: tells who a peer is.
        place: this process among several.
        speaks: whether peers have identities, whose tenants it names to the daemon.
        tls: returns the context of new connections, None for plain TCP.
    """

    def __init__(
        self,
        url: DaemonUrl,
        doorkeeper: Doorkeeper,
        place: Place,
        *,
        speaks: bool = False,
        limits: Limits | None = None,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        self.sessions = Sessions(url, speaks=speaks)
        self.tally = Tally()
        self._url = url
        self._doorkeeper = doorkeeper
        self._place = place
        self._limits = limits or Limits()
        self._tls = tls
        self._budget = Budget(_BUDGET_BYTES)
        self._lock = threading.Lock()
        self._unopened: dict[socket.socket, float] = {}
        self._open = 0
        self._closing = False
        self._threads: list[SupervisedThread] = []

    def start(self, listeners: list[socket.socket]) -> None:
        """Accept connections from listening sockets, which the gateway owns from now on."""
        for listener in listeners:
            self._threads.append(
                SupervisedThread("gateway-accept", partial(self._accept, listener))
            )
        self._threads.append(SupervisedThread("gateway-janitor", self._tidy))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Refuse new connections and end all sessions, after their transfers."""
        self._closing = True
        for thread in self._threads:
            thread.stop(2.0)
        with self._lock:
            unopened = list(self._unopened)
        for connection in unopened:
            _shut(connection)
        for session in self.sessions.all():
            self.sessions.end(session, "gateway ends")

    # -- connections -------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        ready = select.poll()
        ready.register(listener, select.POLLIN)
        if not ready.poll(_ACCEPT_WAIT_S * 1000):
            return
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        self.tally.add("gateway_connections")
        with self._lock:
            full = self._open >= _CONNECTIONS_MAX or self._closing
            if not full:
                self._open += 1
                self._unopened[connection] = time.monotonic()
                if len(self._unopened) > _UNOPENED_MAX:
                    _shut(next(iter(self._unopened)))
        if full:
            self._refused(KVHearthError(Reason.TOO_MANY_SESSIONS, "too many connections"), "")
            connection.close()
            return
        threading.Thread(
            target=self._run, args=(connection,), name="gateway-connection", daemon=True
        ).start()

    def _run(self, connection: socket.socket) -> None:
        """Serve a connection: the main of its thread."""
        peer = ""
        try:
            peer = "{}:{}".format(*connection.getpeername()[:2])
            self._serve(connection, peer)
        except Ended:
            pass
        except OSError as error:
            _troubles.info("gateway.lost", kind="lost", peer=peer, why=str(error) or "too slow")
        except Exception:  # noqa: BLE001 - a connection's main: its bug is not the others'
            self.tally.add("gateway_refusals", 1, str(Reason.INTERNAL))
            _log.exception("gateway.connection_failed", peer=peer)
        finally:
            self._opened(connection)
            with self._lock:
                self._open -= 1
            with contextlib.suppress(OSError):
                connection.close()

    def _opened(self, connection: socket.socket) -> None:
        with self._lock:
            self._unopened.pop(connection, None)

    def _serve(self, connection: socket.socket, peer: str) -> None:
        end = time.monotonic() + self._limits.handshake_s
        connection.settimeout(self._limits.handshake_s)
        port = connection.getsockname()[1]
        context = self._tls()
        plain = connection
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        stream = Stream(connection, self._limits.keepalive_s)
        try:
            stream.wait(end)
            purpose = purpose_of(bytes(stream.read(PREFACE.size, end)))
            work = {
                Purpose.LIFE_LINE: lambda: self._live(stream, plain, peer, port, end),
                Purpose.CALLS: lambda: self._calls(stream, plain, end),
                Purpose.DATA: lambda: self._data(stream, plain, end),
            }
            work[purpose]()
        except KVHearthError as error:
            self._refused(error, peer)
        finally:
            stream.close()

    def _refused(self, error: KVHearthError, peer: str) -> None:
        self.tally.add("gateway_refusals", 1, str(error.reason))
        _troubles.warning(
            "gateway.refused",
            kind=str(error.reason),
            reason=str(error.reason),
            why=error.message,
            peer=peer,
        )

    # -- life lines --------------------------------------------------------------------------------

    def _live(self, stream: Stream, plain: socket.socket, peer: str, port: int, end: float) -> None:
        try:
            session = self._open_session(stream, peer, port, end)
            if session is None:
                return
            self._opened(plain)
            over = self._hold(session, stream)
        except KVHearthError as error:
            with contextlib.suppress(OSError):
                stream.send([encode_frame(refused(error))], time.monotonic() + 1)
            raise
        if over:
            self.sessions.end(session, "bye")

    def _open_session(
        self, stream: Stream, peer: str, port: int, end: float
    ) -> RemoteSession | None:
        """Return the session of a new life line; None if it belongs to another process."""
        asked = Identify.from_message(_message(stream, _IDENTIFY_BYTES_MAX, end))
        identity = self._identity(stream, asked)
        if asked.resume:
            session = self.sessions.find(asked.resume)
            if session.identity != identity:
                raise KVHearthError(Reason.UNKNOWN_TOKEN, "no session has this token; attach again")
            session.take_line(stream)
            stream.send([encode_frame({"kind": "resumed"})], end)
            return session
        hello = Hello.from_message(_message(stream, None, end))
        terms = self._terms(identity, hello, port)
        if terms.port != port:
            stream.send([encode_frame(terms.to_message())], end)
            return None
        session = self.sessions.open(identity, hello)
        try:
            session.take_line(stream)
            answer = encode_frame(terms.to_message())
            answer += encode_frame(session.remote_welcome.to_message())
            stream.send([answer], time.monotonic() + self._limits.handshake_s)
        except BaseException:
            self.sessions.end(session, "no welcome")
            raise
        _log.info(
            "gateway.attached",
            engine_id=hello.engine_id,
            rank=hello.rank,
            session=session.welcome.session,
            identity=identity.name,
            tenant=identity.tenant,
            peer=peer,
        )
        return session

    def _identity(self, stream: Stream, asked: Identify) -> Identity:
        certificate: Any = None
        if isinstance(stream.socket, ssl.SSLSocket):
            certificate = stream.socket.getpeercert()
        return self._doorkeeper.identify(asked.secret, certificate)

    def _terms(self, identity: Identity, hello: Hello, port: int) -> GatewayTerms:
        limits, place = self._limits, self._place
        own = place.port_of(identity.tenant, hello.engine_id) if place.count > 1 else port
        return GatewayTerms(
            own,
            limits.window_bytes,
            limits.data_connections,
            limits.calls_connections,
            limits.resume_s,
            limits.keepalive_s,
        )

    def _hold(self, session: RemoteSession, stream: Stream) -> bool:
        """Wait for the end of a life line; return whether it ends the session now."""
        ends = select.poll()
        ends.register(stream.socket, select.POLLIN)
        ends.register(session.daemon.fileno(), select.POLLIN)
        over = False
        try:
            while session.daemon.alive() and not session.ended:
                ready = {fd for fd, _ in ends.poll(_HOLD_MS)}
                if stream.pending() or stream.socket.fileno() in ready:
                    end = time.monotonic() + self._limits.frame_s
                    if _message(stream, _BYE_BYTES_MAX, end) != {"kind": "bye"}:
                        raise KVHearthError(Reason.BAD_MESSAGE, "a life line carries only 'bye'")
                    return True
            over = True
        except OSError:
            over = session.ended or not session.daemon.alive()
        finally:
            mine = session.broken(stream, time.monotonic() + self._limits.resume_s)
        return mine and over

    def _tidy(self) -> None:
        """End sessions whose life line stayed broken, or whose daemon went away."""
        for session in self.sessions.all():
            late = session.line is None and time.monotonic() > session.expires
            if not session.daemon.alive():
                self.sessions.end(session, "daemon away")
            elif late:
                self.sessions.end(session, "lost")
        with self._lock:
            old = time.monotonic() - 2 * self._limits.handshake_s
            late_ones = [each for each, since in self._unopened.items() if since < old]
        for connection in late_ones:
            _shut(connection)
        for thread in self._threads[-1:]:
            thread.rest(_JANITOR_S)

    # -- calls and data ----------------------------------------------------------------------------

    def _calls(self, stream: Stream, plain: socket.socket, end: float) -> None:
        served: CallsConnection | None = None
        session: RemoteSession | None = None
        try:
            header = frames.HEADER
            size, kind, _ = header.unpack(stream.read(header.size, end))
            frames.check_size(size, TOKEN_BYTES_MAX)
            if kind != frames.OPEN:
                raise KVHearthError(Reason.BAD_MESSAGE, "a connection opens once, with its token")
            found = self.sessions.find(stream.read(size, end).decode("ascii", "replace"))
            found.join(stream, Purpose.CALLS, self._limits.calls_connections)
            session = found
            self._opened(plain)
            served = CallsConnection(
                *(stream, session, self._url.calls_path, self.tally, self._budget),
                frame_s=self._limits.frame_s,
            )
            stream.send([header.pack(0, frames.DONE, 0)], time.monotonic() + 1)
            served.serve()
        except KVHearthError as error:
            status = frames.encode_status(error)
            with contextlib.suppress(OSError):
                stream.send(
                    [frames.HEADER.pack(len(status), frames.REFUSED, 0) + status],
                    time.monotonic() + 1,
                )
            raise
        finally:
            if served is not None:
                served.close()
            if session is not None:
                session.leave(stream)

    def _data(self, stream: Stream, plain: socket.socket, end: float) -> None:
        session: RemoteSession | None = None
        try:
            frame, _ = DataConnection.receive(stream, TOKEN_BYTES_MAX, self._limits.handshake_s)
            if frame.kind is not DataKind.OPEN:
                raise KVHearthError(Reason.BAD_MESSAGE, "a connection opens once, with its token")
            token = stream.read(frame.payload_bytes, end).decode("ascii", "replace")
            found = self.sessions.find(token)
            found.join(stream, Purpose.DATA, self._limits.data_connections)
            session = found
            self._opened(plain)
            DataConnection(
                *(stream, session, self.tally),
                window_bytes=self._limits.window_bytes,
                frame_s=self._limits.frame_s,
            ).serve()
        except KVHearthError as error:
            status = frames.encode_status(error)
            header = DataFrame(DataKind.REFUSED, 0, 0, len(status)).pack()
            with contextlib.suppress(OSError):
                stream.send([header + status], time.monotonic() + 1)
            raise
        finally:
            if session is not None:
                session.leave(stream)


def _message(stream: Stream, bytes_max: int | None, end: float) -> dict[str, Any]:
    """Return the next JSON frame.

    Raises:
        OSError: as ``Stream.read``.
        KVHearthError: ``bad_message``.
    """
    decoder = (
        FrameDecoder(parts_max=HELLO_PARTS_MAX)
        if bytes_max is None
        else FrameDecoder(bytes_max, HELLO_PARTS_MAX)
    )
    head = stream.read(FRAME_HEADER_BYTES, end)
    messages = decoder.feed(bytes(head))
    if not messages:
        messages = decoder.feed(bytes(stream.read(int.from_bytes(head, "little"), end)))
    return messages[0]


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket; ``shared`` with other processes by SO_REUSEPORT.

    Raises:
        KVHearthError: ``socket_unusable``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        widen(listener)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise KVHearthError(
            Reason.SOCKET_UNUSABLE, f"cannot listen on {host}:{port}: {error.strerror}"
        ) from None
    listener.setblocking(False)
    return listener
