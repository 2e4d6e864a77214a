"""The gateway's listener and connections, a thread for each connection."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import UnixUrl
from kvhearth.wire.handshake import (
    FRAME_HEADER_BYTES,
    HELLO_PARTS_MAX,
    FrameDecoder,
    Hello,
    encode_frame,
    refused,
)
from kvhearth.wire.remote import PREFACE, Identify, Purpose, purpose_of
from kvhearth.worker_thread import SupervisedThread
from kvhearth_server.gateway.calls import CallsConnection
from kvhearth_server.gateway.counters import ReportedCounters
from kvhearth_server.gateway.credentials import Credentials
from kvhearth_server.gateway.data import DataConnection
from kvhearth_server.gateway.sessions import RemoteSession, Sessions
from kvhearth_server.gateway.streams import FRAME_S, TERMS, Ended, Stream
from kvhearth_server.gateway.tokens import Identity
from kvhearth_server.observability.logs import LimitedLog, get_logger

_IDENTIFY_BYTES_MAX = 4096
_BYE_BYTES_MAX = 256
_UNOPENED_MAX = 64
_CONNECTIONS_MAX = 1024
_JANITOR_S = 0.2
_ACCEPT_WAIT_S = 0.5
_ACCEPT_PAUSE_S = 0.1
_HOLD_MS = 1000
_STOP_S = 2.0
_log = get_logger("kvhearth.gateway")
_troubles = LimitedLog(_log)


class Gateway:
    """Serves engines on other hosts.

    Args:
        url: the daemon.
        credentials: tell who a peer is, and whether connections are secured.
        handshake_s: time for a connection to open.
    """

    def __init__(
        self,
        url: UnixUrl,
        credentials: Credentials,
        counters: ReportedCounters,
        handshake_s: float,
    ) -> None:
        self._sessions = Sessions(url, counters, speaks=credentials.know_peers)
        self._credentials = credentials
        self._counters = counters
        self._handshake_s = handshake_s
        self._lock = threading.Lock()
        self._connections: dict[Stream, bool] = {}
        """Whether each connection has opened, oldest first."""
        self._attaching = threading.Lock()
        self._janitor = SupervisedThread("gateway-janitor", self._tidy)
        self._threads = [self._janitor]

    def start(self, listener: socket.socket) -> None:
        """Accept connections from a listening socket."""
        self._threads.append(SupervisedThread("gateway-accept", partial(self._accept, listener)))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Accept no connections any more and end all sessions, after their transfers."""
        for thread in self._threads:
            thread.stop(_STOP_S)
        for stream in self._unopened():
            stream.end()
        for session in self._sessions.all():
            self._sessions.end(session, "gateway ends")

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
        self._counters.add("gateway_connections")
        stream = Stream(connection, "{}:{}".format(*place[:2]))
        if len(self._connections) >= _CONNECTIONS_MAX:
            refusal = KVHearthError(Reason.TOO_MANY_SESSIONS, "too many connections; close some")
            self._refused(refusal, stream.peer)
            stream.close()
            return
        with self._lock:
            self._connections[stream] = False
        for late in self._unopened()[:-_UNOPENED_MAX]:
            late.end()
        main = threading.Thread(
            target=self._run, args=(stream,), name="gateway-connection", daemon=True
        )
        try:
            main.start()
        except RuntimeError:  # the machine has no room for a thread
            self._ended(stream)
            raise

    def _run(self, stream: Stream) -> None:
        """Serve a connection: the main of its thread."""
        try:
            self._serve(stream)
        except Ended:
            pass
        except KVHearthError as error:
            self._refused(error, stream.peer)
        except OSError as error:
            why = str(error) or "too slow"
            _troubles.info("gateway.lost", kind="lost", peer=stream.peer, why=why)
        except Exception:  # noqa: BLE001 - a connection's main: its bug is not the others'
            self._counters.add("gateway_refusals", str(Reason.INTERNAL))
            _log.exception("gateway.connection_failed", peer=stream.peer)
        finally:
            self._ended(stream)

    def _ended(self, stream: Stream) -> None:
        with self._lock:
            del self._connections[stream]
        stream.close()

    def _opened(self, stream: Stream) -> None:
        with self._lock:
            self._connections[stream] = True

    def _unopened(self) -> list[Stream]:
        with self._lock:
            return [stream for stream, opened in self._connections.items() if not opened]

    def _serve(self, stream: Stream) -> None:
        end = stream.began + self._handshake_s
        context = self._credentials.context
        if context is not None:
            stream.secure(context, self._handshake_s)
        purpose = purpose_of(bytes(stream.read(PREFACE.size, end)))
        if purpose is Purpose.LIFE_LINE:
            self._live(stream, end)
        else:
            kind = CallsConnection if purpose is Purpose.CALLS else DataConnection
            self._join(kind, stream, end)

    def _refused(self, error: KVHearthError, peer: str) -> None:
        reason = str(error.reason)
        self._counters.add("gateway_refusals", reason)
        _troubles.warning(
            "gateway.refused", kind=reason, reason=reason, why=error.message, peer=peer
        )

    def _join(
        self, kind: type[CallsConnection | DataConnection], stream: Stream, end: float
    ) -> None:
        """Serve a connection for calls or data, which opens with its session's token."""
        try:
            session = self._sessions.find(kind.token(stream, end))
            with session.connection(stream, kind.purpose):
                self._opened(stream)
                kind(stream, session, self._counters).serve()
        except KVHearthError as error:
            stream.refuse(kind.refusal(error))
            raise

    # -- life lines --------------------------------------------------------------------------------

    def _live(self, stream: Stream, end: float) -> None:
        try:
            asked = Identify.from_message(_message(stream, _IDENTIFY_BYTES_MAX, end))
            identity = self._credentials.identify(asked.secret, stream.certificate, stream.address)
            with self._sessions.limits_of(identity).connection():
                session = self._open_session(stream, asked, identity, end)
                self._opened(stream)
                over = self._hold(session, stream)
        except KVHearthError as error:
            stream.refuse(encode_frame(refused(error)))
            raise
        if over:
            self._sessions.end(session, "bye")

    def _open_session(
        self, stream: Stream, asked: Identify, identity: Identity, end: float
    ) -> RemoteSession:
        """Return the session of a new life line."""
        if asked.resume:
            session = self._sessions.find(asked.resume)
            if not session.belongs_to(identity):
                raise KVHearthError(Reason.UNKNOWN_TOKEN, "no session has this token; attach again")
            session.take_line(stream)
            stream.send([encode_frame({"kind": "resumed"})], end)
            return session
        hello = Hello.from_message(_message(stream, None, end))
        # One at a time: many would take the interpreter from those whose calls are relayed.
        with self._attaching:
            session = self._sessions.open(identity, hello)
        with contextlib.ExitStack() as undo:
            undo.callback(self._sessions.end, session, "no welcome")
            session.take_line(stream)
            answer = encode_frame(TERMS.to_message())
            answer += encode_frame(replace(session.welcome, token=session.token).to_message())
            stream.send([answer], time.monotonic() + self._handshake_s)
            undo.pop_all()
        _log.info(
            "gateway.attached",
            engine_id=hello.engine_id,
            rank=hello.rank,
            session=session.welcome.session,
            identity=identity.name,
            tenant=identity.tenant,
            peer=stream.peer,
        )
        return session

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
                    end = time.monotonic() + FRAME_S
                    if _message(stream, _BYE_BYTES_MAX, end) != {"kind": "bye"}:
                        raise KVHearthError(Reason.BAD_MESSAGE, "a life line carries only 'bye'")
                    return True
            over = True
        except OSError:
            over = session.ended or not session.daemon.alive()
        finally:
            mine = session.broken(stream)
        return mine and over

    def _tidy(self) -> None:
        """End sessions whose life line stayed broken, or whose daemon went away."""
        for session in self._sessions.all():
            if not session.daemon.alive():
                self._sessions.end(session, "daemon away")
            elif time.monotonic() > session.expires:
                self._sessions.end(session, "lost")
        old = time.monotonic() - self._handshake_s
        for stream in self._unopened():
            if stream.began < old:
                stream.end()
        self._janitor.rest(_JANITOR_S)


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
