"""The gateway's listener and connections, a thread for each connection."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import UnixUrl
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
from kvhearth_server.gateway.doors import Doors
from kvhearth_server.gateway.identity import Identity
from kvhearth_server.gateway.meter import Meter, Meters
from kvhearth_server.gateway.sessions import RemoteSession, Sessions
from kvhearth_server.gateway.streams import Ended, Stream
from kvhearth_server.gateway.tally import Tally
from kvhearth_server.observability.logs import LimitedLog, get_logger

_IDENTIFY_BYTES_MAX = 4096
_BYE_BYTES_MAX = 256
_UNOPENED_MAX = 64
_CONNECTIONS_MAX = 1024
_BUDGET_BYTES = 64 << 20
_JANITOR_S = 0.2
_ACCEPT_WAIT_S = 0.5
_ACCEPT_PAUSE_S = 0.1
_HOLD_MS = 1000
_STOP_S = 2.0
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


@dataclass(eq=False)
class _Guest:
    """An accepted connection; ``socket`` is replaced by that of TLS."""

    socket: socket.socket
    peer: str
    since: float

    @property
    def address(self) -> str:
        """The peer's address without its port."""
        return self.peer.rpartition(":")[0]

    def shut(self) -> None:
        """Make its thread's system calls return."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


class Gateway:
    """Serves engines on other hosts.

    Args:
        url: the daemon.
        doors: tell who a peer is, and whether connections are secured.
    """

    def __init__(self, url: UnixUrl, doors: Doors, limits: Limits) -> None:
        self.tally = Tally()
        self.meters = Meters()
        self.sessions = Sessions(url, self.meters, speaks=doors.know_peers)
        self._url = url
        self._doors = doors
        self._limits = limits
        self._budget = Budget(_BUDGET_BYTES)
        self._lock = threading.Lock()
        self._unopened: dict[_Guest, None] = {}
        self._open = 0
        self._closing = False
        self._attaching = threading.Lock()
        self._janitor = SupervisedThread("gateway-janitor", self._tidy)
        self._threads = [self._janitor]

    def start(self, listener: socket.socket) -> None:
        """Accept connections from a listening socket."""
        self._threads.append(SupervisedThread("gateway-accept", partial(self._accept, listener)))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Refuse new connections and end all sessions, after their transfers."""
        self._closing = True
        for thread in self._threads:
            thread.stop(_STOP_S)
        with self._lock:
            unopened = list(self._unopened)
        for guest in unopened:
            guest.shut()
        for session in self.sessions.all():
            self.sessions.end(session, "gateway ends")

    # -- connections -------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        ready = select.poll()
        ready.register(listener, select.POLLIN)
        if not ready.poll(_ACCEPT_WAIT_S * 1000):
            return
        try:
            connection, place = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors, most likely
            _troubles.warning("gateway.cannot_accept", kind="accept", error=str(error))
            self._janitor.rest(_ACCEPT_PAUSE_S)
            return
        self.tally.add("gateway_connections")
        guest = _Guest(connection, "{}:{}".format(*place[:2]), time.monotonic())
        with self._lock:
            full = self._open >= _CONNECTIONS_MAX or self._closing
            if not full:
                self._open += 1
                self._unopened[guest] = None
                if len(self._unopened) > _UNOPENED_MAX:
                    oldest = next(iter(self._unopened))
                    del self._unopened[oldest]
                    oldest.shut()
        if full:
            refusal = KVHearthError(Reason.TOO_MANY_SESSIONS, "too many connections; close some")
            if self._closing:
                refusal = KVHearthError(Reason.DRAINING, "the gateway is ending; connect again")
            self._refused(refusal, guest.peer)
            connection.close()
            return
        main = threading.Thread(
            target=self._run, args=(guest,), name="gateway-connection", daemon=True
        )
        try:
            main.start()
        except RuntimeError:  # the machine has no room for a thread
            self._ended(guest)
            raise

    def _run(self, guest: _Guest) -> None:
        """Serve a connection: the main of its thread."""
        try:
            self._serve(guest)
        except Ended:
            pass
        except KVHearthError as error:
            self._refused(error, guest.peer)
        except OSError as error:
            why = str(error) or "too slow"
            _troubles.info("gateway.lost", kind="lost", peer=guest.peer, why=why)
        except Exception:  # noqa: BLE001 - a connection's main: its bug is not the others'
            self.tally.add("gateway_refusals", 1, str(Reason.INTERNAL))
            _log.exception("gateway.connection_failed", peer=guest.peer)
        finally:
            self._ended(guest)

    def _ended(self, guest: _Guest) -> None:
        self._opened(guest)
        with self._lock:
            self._open -= 1
        with contextlib.suppress(OSError):
            guest.socket.close()

    def _opened(self, guest: _Guest) -> None:
        with self._lock:
            self._unopened.pop(guest, None)

    def _serve(self, guest: _Guest) -> None:
        end = guest.since + self._limits.handshake_s
        guest.socket.settimeout(self._limits.handshake_s)
        context = self._doors.context
        if context is not None:
            _shake_hands(guest, context)
        stream = Stream(guest.socket, self._limits.keepalive_s)
        stream.wait(end)
        purpose = purpose_of(bytes(stream.read(PREFACE.size, end)))
        serve = {
            Purpose.LIFE_LINE: self._live,
            Purpose.CALLS: self._calls,
            Purpose.DATA: self._data,
        }
        serve[purpose](stream, guest, end)

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

    def _live(self, stream: Stream, guest: _Guest, end: float) -> None:
        meter: Meter | None = None
        try:
            asked = Identify.from_message(_message(stream, _IDENTIFY_BYTES_MAX, end))
            certificate: Any = None
            if isinstance(guest.socket, ssl.SSLSocket):
                certificate = guest.socket.getpeercert()
            identity = self._doors.identify(asked.secret, certificate, guest.address)
            found = self.meters.of(identity)
            found.open_connection()
            meter = found
            session = self._open_session(stream, guest, asked, identity, end)
            self._opened(guest)
            over = self._hold(session, stream)
        except KVHearthError as error:
            stream.refuse(encode_frame(refused(error)))
            raise
        finally:
            if meter is not None:
                meter.close_connection()
        if over:
            self.sessions.end(session, "bye")

    def _open_session(
        self, stream: Stream, guest: _Guest, asked: Identify, identity: Identity, end: float
    ) -> RemoteSession:
        """Return the session of a new life line."""
        if asked.resume:
            session = self.sessions.find(asked.resume)
            if not session.belongs_to(identity):
                raise KVHearthError(Reason.UNKNOWN_TOKEN, "no session has this token; attach again")
            session.take_line(stream)
            stream.send([encode_frame({"kind": "resumed"})], end)
            return session
        hello = Hello.from_message(_message(stream, None, end))
        # One at a time: many would take the interpreter from those whose calls are relayed.
        with self._attaching:
            session = self.sessions.open(identity, hello)
        with contextlib.ExitStack() as undo:
            undo.callback(self.sessions.end, session, "no welcome")
            session.take_line(stream)
            answer = encode_frame(self._terms().to_message())
            answer += encode_frame(session.remote_welcome.to_message())
            stream.send([answer], time.monotonic() + self._limits.handshake_s)
            undo.pop_all()
        _log.info(
            "gateway.attached",
            engine_id=hello.engine_id,
            rank=hello.rank,
            session=session.welcome.session,
            identity=identity.name,
            tenant=identity.tenant,
            peer=guest.peer,
        )
        return session

    def _terms(self) -> GatewayTerms:
        limits = self._limits
        return GatewayTerms(
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
        old = time.monotonic() - self._limits.handshake_s
        with self._lock:
            late_ones = [each for each in self._unopened if each.since < old]
        for guest in late_ones:
            guest.shut()
        self.sessions.settle()
        self._janitor.rest(_JANITOR_S)

    # -- calls and data ----------------------------------------------------------------------------

    def _calls(self, stream: Stream, guest: _Guest, end: float) -> None:
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
            self._opened(guest)
            served = CallsConnection(
                *(stream, session, self._url.calls_path, self.tally, self._budget),
                frame_s=self._limits.frame_s,
            )
            stream.send([header.pack(0, frames.DONE, 0)], time.monotonic() + 1)
            served.serve()
        except KVHearthError as error:
            status = frames.encode_status(error)
            stream.refuse(frames.HEADER.pack(len(status), frames.REFUSED, 0) + status)
            raise
        finally:
            if served is not None:
                served.close()
            if session is not None:
                session.leave(stream)

    def _data(self, stream: Stream, guest: _Guest, end: float) -> None:
        session: RemoteSession | None = None
        try:
            frame, _ = DataConnection.receive(stream, TOKEN_BYTES_MAX, self._limits.handshake_s)
            if frame.kind is not DataKind.OPEN:
                raise KVHearthError(Reason.BAD_MESSAGE, "a connection opens once, with its token")
            token = stream.read(frame.payload_bytes, end).decode("ascii", "replace")
            found = self.sessions.find(token)
            found.join(stream, Purpose.DATA, self._limits.data_connections)
            session = found
            self._opened(guest)
            DataConnection(
                *(stream, session, self.tally),
                window_bytes=self._limits.window_bytes,
                frame_s=self._limits.frame_s,
            ).serve()
        except KVHearthError as error:
            status = frames.encode_status(error)
            header = DataFrame(DataKind.REFUSED, 0, 0, len(status)).pack()
            stream.refuse(header + status)
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


def _shake_hands(guest: _Guest, context: ssl.SSLContext) -> None:
    """Begin TLS on a new connection.

    Raises:
        KVHearthError: ``peer_not_allowed``: the peer shows no good certificate, or speaks no TLS.
        OSError: the connection ended.
    """
    # Known to the guest before the first byte, so that the janitor can end a slow handshake.
    guest.socket = secured = context.wrap_socket(
        guest.socket, server_side=True, do_handshake_on_connect=False
    )
    try:
        secured.do_handshake()
    except ssl.SSLEOFError:
        raise Ended("the peer closed the connection in its handshake") from None
    except ssl.SSLError as error:
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else ""
        why = why or (error.reason or "it speaks no TLS").lower().replace("_", " ")
        raise KVHearthError(Reason.PEER_NOT_ALLOWED, f"no TLS connection: {why}") from None
