"""The calls socket: CacheService calls as frames (``wire.frames``), handled where they are
read.

A call whose work needs no waiting costs no task: its reply is written before the next event. A
connection with many calls answers some, and the others after the loop's next cycle. Unfinished
frames and unread replies of all connections have one budget.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from types import CoroutineType
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.wire import frames
from kvhearth.wire.frames import encode_status
from kvhearth_server.config.rlimit import CALLS_PER_SESSION_MAX, DoorShares
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.sessions import Closed, Session
from kvhearth_server.engine.supervisor import Supervisor, give_back_memory
from kvhearth_server.observability.logs import LimitedLog, get_logger
from kvhearth_server.ownership import listening
from kvhearth_server.transport.accepting import accept_forever
from kvhearth_server.transport.dispatch import Dispatcher, failure
from kvhearth_server.transport.kept import Kept
from kvhearth_server.transport.messages import TooManyParts

KEPT_BYTES_MAX = 24 << 20
"""Unfinished frames and unread replies of all connections together."""
_GIVE_BACK_S = 0.2
_UNOPENED_MAX = 64
_BACKLOG = 128
_TOKEN_BYTES_MAX = 256
_REPLIES_WAITING_BYTES_MAX = 1 << 20
_READ_BYTES = 64 * 1024
_WORK_S = 0.0005
"""Time of one cycle of the loop that a connection's calls take; a call that has begun goes on."""
_ACCEPT_PAUSE_S = 0.05
_log = get_logger("kvhearth.calls")
_troubles = LimitedLog(_log)


def _cannot_accept(error: OSError) -> float:
    _troubles.warning("calls.cannot_accept", kind="accept", error=str(error))
    return _ACCEPT_PAUSE_S


def _give_back_later() -> None:
    asyncio.get_running_loop().call_later(_GIVE_BACK_S, give_back_memory)


class CallsServer:
    """Serves one listening socket; every connection belongs to one session.

    A connection that does not open with a token in time is closed. If too many are
    unopened, the oldest is closed. Once a quarter of the door's share of descriptors is taken, a
    session opens no more than its fair part of another half.
    """

    def __init__(
        self, engine: Engine, dispatcher: Dispatcher, shares: DoorShares, *, timeout_s: float
    ) -> None:
        self.engine = engine
        self.dispatcher = dispatcher
        self.timeout_s = timeout_s
        self._shares = shares
        self._unopened_max = max(1, min(_UNOPENED_MAX, shares.calls // 4))
        self._listener: socket.socket | None = None
        self._connections: set[_Connection] = set()
        self._unopened: dict[_Connection, None] = {}
        self.kept = Kept[_Connection](KEPT_BYTES_MAX, _give_back_later)
        self.inbox = memoryview(bytearray(_READ_BYTES))
        """Read buffer of all connections; each takes its bytes out before the next one reads."""

    def start(self, supervisor: Supervisor, path: Path) -> None:
        """Listen on the socket, or anew if it was removed.

        The socket's mode lets every user connect who can reach its directory; the token decides.
        """
        former, self._listener = self._listener, listening(path, _BACKLOG)
        if former is not None:
            former.close()
        work = partial(accept_forever, self._listener, self._accepted, _cannot_accept)
        supervisor.spawn("calls", work, replaces=True)

    def stop(self) -> None:
        """Close the socket and all connections."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.abort()

    async def _accepted(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: _Connection(self), connection)

    def made(self, connection: _Connection) -> None:
        """Add a connection, which has to open in time."""
        self._connections.add(connection)
        self._unopened[connection] = None
        if len(self._unopened) > self._unopened_max:
            oldest = next(iter(self._unopened))
            # Delete it now, not when it is lost: many may come before that.
            del self._unopened[oldest]
            oldest.close_for(Closed.LATE_TOKEN)
            self.engine.counters.add("connections_refused", 1, "calls")

    def open(self, connection: _Connection, token: str) -> Session:
        """Open a connection with its token.

        Raises:
            KVHearthError: ``unknown_token``, ``too_many_sessions``.
        """
        session = self.dispatcher.admit(token)
        opened = len(self._connections) - len(self._unopened)
        crowded = opened >= self._shares.calls // 4
        most = self._shares.calls_fair if crowded else CALLS_PER_SESSION_MAX
        if len(session.connections) >= most:
            self.engine.counters.add("connections_refused", 1, "calls")
            raise KVHearthError(
                Reason.TOO_MANY_SESSIONS,
                f"the session has {most} connections for calls; close some",
            )
        session.connections.add(connection)
        self._unopened.pop(connection, None)
        return session

    def lost(self, connection: _Connection, session: Session | None) -> None:
        """Remove a connection that ended."""
        self._connections.discard(connection)
        self._unopened.pop(connection, None)
        self.kept.note(connection)
        if session is not None:
            session.connections.discard(connection)


class _Connection(asyncio.BufferedProtocol):
    """One peer: receives frames and answers each in order.

    Attributes:
        full: True while the peer takes no more replies; nothing more is answered meanwhile.
    """

    def __init__(self, server: CallsServer) -> None:
        self.full = False
        self._server = server
        self._engine = server.engine
        self._dispatcher = server.dispatcher
        self._calls: Mapping[int, tuple[str, int]] = {}
        self._buffer = bytearray()
        self._token = ""
        self._session: Session | None = None
        self._goes_on = False
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        most = _REPLIES_WAITING_BYTES_MAX
        transport.set_write_buffer_limits(high=most, low=most // 4)
        self._deadline = self._loop.call_later(self._server.timeout_s, self._late)
        self._server.made(self)

    def connection_lost(self, _: Exception | None) -> None:
        for timer in (self._deadline, self._patience):
            if timer is not None:
                timer.cancel()
        self._buffer.clear()
        self._server.lost(self, self._session)

    def get_buffer(self, _: int) -> memoryview:
        return self._server.inbox

    def buffer_updated(self, count: int) -> None:
        data = self._server.inbox[:count]
        if not self._answered_alone(data):
            self._buffer += data
            self.keep()
            self._work()

    def pause_writing(self) -> None:
        self.full = True
        self._read_on(False)
        self._flush_in_time()

    def resume_writing(self) -> None:
        self.full = False
        if self._patience is not None:
            self._patience.cancel()
        self._work()

    @property
    def owner(self) -> int:
        """Number of its session; 0 before it is opened."""
        return 0 if self._session is None else self._session.number

    @property
    def closing(self) -> bool:
        """Whether nothing more is read and nothing more can be written."""
        return self._transport.is_closing()

    @property
    def kept_bytes(self) -> int:
        """Bytes of unfinished frames and unread replies."""
        return len(self._buffer) + self._transport.get_write_buffer_size()

    def keep(self) -> None:
        """Note that the number of kept bytes has changed."""
        self._server.kept.note(self)

    def _read_on(self, reading: bool) -> None:
        """Set whether to read from the peer, or to leave its bytes in the socket."""
        if self.closing:
            return
        if reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _answered_alone(self, data: memoryview) -> bool:
        """Fast path: answer one complete, valid call when nothing else waits, as is nearly always
        true.

        Returns False, with nothing done, if ``_work`` must handle the data.
        """
        header = frames.HEADER
        if self._buffer or len(data) < header.size:
            return False
        if self._task is not None or self.full or self.closing:
            return False
        size, kind, number = header.unpack_from(data)
        call = self._calls.get(kind)
        if call is None or len(data) != header.size + size or size > call[1]:
            return False
        self._answer(call[0], number, bytes(data[header.size :]))
        return True

    def abort(self) -> None:
        """End now."""
        self._transport.abort()
        self._buffer.clear()

    def close_for(self, why: Closed) -> None:
        """End now, for a reason that is counted."""
        if not self.closing:
            self._engine.counters.add("calls_closed", 1, why)
        self.abort()

    def end_for_memory(self) -> None:
        """End now: all connections keep too much."""
        self.close_for(Closed.MEMORY)

    def _flush_in_time(self) -> None:
        """Abort the connection if the peer does not read its replies in time; they must not be kept
        for as long as it lives.
        """
        self._patience = self._loop.call_later(
            self._server.timeout_s, self.close_for, Closed.UNREAD
        )

    def _late(self) -> None:
        """Refuse a peer whose token or whose frame is not whole in time."""
        what, why = "frame", Closed.LATE_FRAME
        if self._session is None:
            what, why = "token", Closed.LATE_TOKEN
        if not self.closing and not self._whole():
            message = f"no whole {what} within {self._server.timeout_s} s"
            self._refuse_and_close(KVHearthError(Reason.DEADLINE, message), why)

    def _work(self) -> None:
        """Answer calls that have arrived whole, for ``_WORK_S``; then let the loop go round."""
        end = time.perf_counter() + _WORK_S
        while self._may_answer():
            if time.perf_counter() > end:
                self._go_on_later()
                break
            if not self._answer_next():
                if self._task is None and not self.full:
                    self._read_on(True)
                self._wait_for_rest()
                break
        self.keep()

    def _go_on_later(self) -> None:
        """Read and answer nothing more in this cycle of the loop."""
        self._read_on(False)
        if not self._goes_on:
            self._goes_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self._work()

    def _may_answer(self) -> bool:
        """Return False while a call is under way, replies pile up, or nothing follows."""
        return self._task is None and not self.full and not self.closing

    def _answer_next(self) -> bool:
        """Answer one frame; return False if none is complete, a call is under way, or replies pile
        up.
        """
        header = frames.HEADER
        if self._task is not None or self.full or self.closing:
            return False
        if len(self._buffer) < header.size:
            return False
        size, kind, number = header.unpack_from(self._buffer)
        try:
            self._check_kind(kind)
        except KVHearthError as error:
            self._refuse_and_close(error, Closed.PROTOCOL)
            return False
        try:
            frames.check_size(size, self._calls[kind][1] if self._session else _TOKEN_BYTES_MAX)
        except KVHearthError as error:
            self._refuse_and_close(error, Closed.TOO_LARGE)
            return False
        end = header.size + size
        if len(self._buffer) < end:
            return False
        body = bytes(memoryview(self._buffer)[header.size : end])
        del self._buffer[:end]
        self._stop_deadline()
        if self._session is None:
            self._open(body)
        else:
            self._answer(frames.NAMES[kind], number, body)
        return True

    def _whole(self) -> bool:
        """Return whether a frame has arrived whole and waits for its turn."""
        size = frames.HEADER.size
        if len(self._buffer) >= size:
            size += frames.HEADER.unpack_from(self._buffer)[0]
        return len(self._buffer) >= size

    def _wait_for_rest(self) -> None:
        """Give an unfinished frame its time, from its first byte on; a peer without a session has
        the time of its token.
        """
        if self._buffer and self._deadline is None:
            self._deadline = self._loop.call_later(self._server.timeout_s, self._late)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _check_kind(self, kind: int) -> None:
        if (kind == frames.OPEN) is not (self._session is None):
            raise KVHearthError(Reason.BAD_MESSAGE, "a connection opens once, with its token")
        if self._session is not None and kind not in frames.NAMES:
            raise KVHearthError(Reason.PROTOCOL_VERSION, f"no call has the number {kind}")

    def _open(self, token: bytes) -> None:
        try:
            self._token = token.decode("ascii", "replace")
            session = self._server.open(self, self._token)
            self._session = session
            self._calls = self._dispatcher.body_bounds(session)
        except KVHearthError as error:
            self._refuse_and_close(error, Closed.BAD_OPENING)
            return
        self._reply(frames.DONE, 0, b"")

    def _answer(self, name: str, number: int, body: bytes) -> None:
        try:
            self._answer_first(name, number, body)
        finally:
            self._engine.run_deferred()

    def _answer_first(self, name: str, number: int, body: bytes) -> None:
        """Answer, or begin to."""
        began = time.perf_counter()
        try:
            # Check before parsing, and for every call: the session may have ended.
            session = self._session
            if session is None or session.gone:
                session = self._dispatcher.admit(self._token)
            reply = self._dispatcher.decide_deferred(
                name, self._dispatcher.parse(name, body), session
            )
        except Exception as error:  # noqa: BLE001 - a call's main: one call's bug is not the others'
            self._refuse(name, number, began, error)
            return
        if isinstance(reply, CoroutineType):
            self._read_on(False)
            self._task = self._loop.create_task(self._finish(name, number, began, reply))
            return
        self._done(name, number, began, reply)

    async def _finish(
        self, name: str, number: int, began: float, work: Coroutine[Any, Any, Any]
    ) -> None:
        try:
            reply = await work
        except Exception as error:  # noqa: BLE001 - as in _answer
            self._refuse(name, number, began, error)
        else:
            self._done(name, number, began, reply)
        self._task = None
        self._go_on_later()  # not here: this turn has done enough

    def _done(self, name: str, number: int, began: float, reply: Any) -> None:
        self._reply(frames.DONE, number, reply.SerializeToString())
        self._engine.timings.observe(name, "OK", time.perf_counter() - began)

    def _refuse(self, name: str, number: int, began: float, error: Exception) -> None:
        refusal = failure(self._engine, error)
        self._reply(frames.REFUSED, number, encode_status(refusal))
        code = refusal.status.code.name
        self._engine.timings.observe(name, code, time.perf_counter() - began)
        if isinstance(error, TooManyParts):
            self._close_after(Closed.TOO_MANY_PARTS)

    def _refuse_and_close(self, error: KVHearthError, why: Closed) -> None:
        """Send an error after which the stream is unusable, and close it."""
        if error.reason is Reason.BAD_MESSAGE:
            self._engine.counters.add("attach_frames_bad")
        self._reply(frames.REFUSED, 0, encode_status(failure(self._engine, error)))
        self._close_after(why)

    def _close_after(self, why: Closed) -> None:
        """Close the connection, for a reason that is counted, once the peer has its replies."""
        if self.closing:
            return
        self._engine.counters.add("calls_closed", 1, why)
        self._buffer.clear()
        self._transport.close()
        self.keep()
        self._flush_in_time()

    def _reply(self, kind: int, number: int, body: bytes) -> None:
        if self.closing:
            return
        self._transport.write(frames.HEADER.pack(len(body), kind, number) + body)
        if self._transport.get_write_buffer_size():
            self.keep()
