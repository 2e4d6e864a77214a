"""HTTP connections: how many are open at once, how fast requests begin, how slow a peer may be, and
errors before routing.

Errors that uvicorn would answer by itself, in plain text and uncounted, are problem documents here
and counted like every other refusal.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.rlimit import HTTP_MAX
from kvhearth_server.transport.web.problems import problem_of

CONNECTIONS_MAX = HTTP_MAX // 2
"""Connections that may have a request; as many more may ask whether the daemon lives."""
REQUEST_PAUSE_S = 1 / 256
"""Average time between the starts of two requests: half of what the slowest probe may wait for is
enough for a request of each connection.
"""
PROBE_PAUSE_S = REQUEST_PAUSE_S / 2
"""The same for probes, which cost less; behind those of all connections one waits for 0.5 s."""
BURST_S = 16 * REQUEST_PAUSE_S
"""Requests that may start at once, as their time."""
IDLE_S = 0.1
"""Time after which a connection without a request counts as idle."""
HEAD_S = 10.0
"""Time allowed for a request's line and headers, from its first byte."""
READ_S = 10.0
"""Time allowed for a peer to read its waiting bytes."""

REFUSED = "refused"
"""Key in a request's state: the connection has already refused it."""


@dataclass(frozen=True)
class Places:
    """Bounds of a listener's connections.

    Args:
        connections_max: connections open at once.
        refused: called with the reason of each refusal that the application does not see.
        crowded: called when a connection ends for want of a place.
    """

    connections_max: int
    refused: Callable[[Reason], None]
    crowded: Callable[[], None]


_PROBES = (b"GET /livez", b"GET /readyz", b"GET /healthz")
_LINE_BYTES = 16


class Turnstile:
    """Lets requests begin one after another: at most one in a turn of the loop, so that engines'
    calls wait for one request and not for one of each connection.

    The others wait in their connections, probes first, and else the oldest first. A connection has
    at most one request here, so the queue is bounded by ``CONNECTIONS_MAX``.
    """

    def __init__(self) -> None:
        self._probes: deque[BoundedProtocol] = deque()
        self._others: deque[BoundedProtocol] = deque()
        self._closed = False
        self._next_at = 0.0

    def admit(self, one: BoundedProtocol, *, probe: bool) -> bool:
        """Return whether the request of a connection may begin now; else ``one.begin`` is called
        when it may.
        """
        if self._closed:
            (self._probes if probe else self._others).append(one)
            return False
        self._close(one.loop, probe=probe)
        return True

    def newest(self) -> BoundedProtocol | None:
        """Return the connection that waits since the shortest time, probes left out, or None."""
        while self._others and not self._others[-1].queued:
            self._others.pop()
        return self._others[-1] if self._others else None

    def _close(self, loop: asyncio.AbstractEventLoop, *, probe: bool) -> None:
        """Let nobody else through in this turn of the loop, nor sooner than the rate allows."""
        self._closed = True
        now = loop.time()
        pause_s = PROBE_PAUSE_S if probe else REQUEST_PAUSE_S
        self._next_at = max(self._next_at, now - BURST_S) + pause_s
        if self._next_at > now:
            loop.call_at(self._next_at, self._open, loop)
        else:
            loop.call_soon(self._open, loop)

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._closed = False
        while self._probes or self._others:
            probe = bool(self._probes)
            one = (self._probes or self._others).popleft()
            if one.queued:
                self._close(loop, probe=probe)
                one.begin()
                return


class BoundedProtocol(H11Protocol):
    """One connection; ``tick`` must be called about once a second.

    A peer that exceeds ``connections_max`` ends another connection that has no whole request, or
    whose request came last and waits for its turn. If all others have a request under way, only a
    probe of it is answered.
    """

    def __init__(self, *args: Any, places: Places, turnstile: Turnstile, **named: Any) -> None:
        super().__init__(*args, **named)
        self._places = places
        self._refused = places.refused
        self._turnstile = turnstile
        self._admitted = self._queued = self._probes_only = False
        self._waiting_since = self.loop.time()
        self._begun = False
        self._served = False
        self._unread_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a peer that connects."""
        super().connection_made(transport)
        count, most = self._open_count(), self._places.connections_max
        self._probes_only = count > most and not self._make_room()
        if self._probes_only and count > 2 * most and not self._replace():
            self.refuse_busy()

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the peer."""
        if self.waiting and not self._begun:
            self._begun = True
            if self._served:
                self._waiting_since = self.loop.time()
        super().data_received(data)
        self._begun = self._begun and self.waiting

    def handle_events(self) -> None:
        """Handle the bytes received, once a request that they begin is admitted."""
        if self._queued:
            return
        if self.waiting and not self._admitted:
            line = bytes(self.conn.trailing_data[0][:_LINE_BYTES])
            if not line:
                return
            probe = line.startswith(_PROBES)
            if self._probes_only and not probe:
                self.refuse_busy()
                return
            if not self._turnstile.admit(self, probe=probe):
                self._queued = True
                self.flow.pause_reading()
                return
            self._admitted = True
        super().handle_events()

    def begin(self) -> None:
        """Begin the request that waits for its turn."""
        self._queued, self._admitted = False, True
        self.flow.resume_reading()
        super().handle_events()

    @property
    def queued(self) -> bool:
        """Whether a request waits for its turn."""
        return self._queued and not self.transport.is_closing()

    def on_response_complete(self) -> None:
        """Note that the peer has its answer; any bytes that it has sent since are the next
        request.
        """
        self._served = True
        self._admitted = False
        self._waiting_since = self.loop.time()
        super().on_response_complete()
        self._begun = self.waiting and bool(self.conn.trailing_data[0])

    @property
    def waiting(self) -> bool:
        """Whether no request is under way."""
        return self.conn.their_state is h11.IDLE and not self.transport.is_closing()

    @property
    def unfinished(self) -> bool:
        """Whether the peer has not sent a whole request, or none."""
        body = self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing()
        return body or (self.waiting and not self._queued)

    @property
    def waiting_since(self) -> float:
        """Time, by the loop's clock, since which the connection waits; for a request that has
        begun, the time of its first byte.
        """
        return self._waiting_since

    def tick(self, now: float) -> None:
        """End requests and replies that have taken too long; ``now`` is by the loop's clock."""
        if not self.transport.get_write_buffer_size():
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = now
        elif now - self._unread_since > READ_S:
            self._refused(Reason.DEADLINE)
            self.transport.abort()
            return
        # The keep-alive time applies between two requests, until the next one begins.
        idle = self._served and not self._begun
        if self.waiting and not idle and now - self._waiting_since > HEAD_S:
            self.give_up()

    def give_up(self) -> None:
        """End a connection that waits for a request; tell a peer that has sent a part of one."""
        if self.waiting and not self._begun:
            self._refused(Reason.DEADLINE)
            self.transport.abort()
            return
        message = f"the request was not here within {HEAD_S:.0f} s, or others needed its place"
        self._refuse(KVHearthError(Reason.DEADLINE, message), HTTPStatus.REQUEST_TIMEOUT)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP."""
        self._refuse(KVHearthError(Reason.BAD_MESSAGE, msg), HTTPStatus.BAD_REQUEST)

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing: the request is answered as if it had not asked for an upgrade."""

    def _refuse(self, error: KVHearthError, status: HTTPStatus) -> None:
        self._refused(error.reason)
        cycle: RequestResponseCycle | None = self.cycle  # declared without the None it starts with
        if cycle is not None and not cycle.response_complete:
            # The connection refuses the body: the application must neither answer nor count it
            # again.
            cycle.scope["state"][REFUSED] = cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = problem_of(error, status=status, headers={"connection": "close"})
            head = h11.Response(
                status_code=status, headers=response.raw_headers, reason=status.phrase.encode()
            )
            # The answer to HEAD has no body; h11 raises if one is sent.
            body = [] if self._is_head(cycle) else [h11.Data(data=bytes(response.body))]
            for event in (head, *body, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _is_head(self, cycle: RequestResponseCycle | None) -> bool:
        """Whether the request under way is a HEAD; between two requests the cycle is an old one."""
        if cycle is None or self.conn.our_state is not h11.SEND_RESPONSE:
            return False
        return bool(cycle.scope["method"] == "HEAD")

    def _make_room(self) -> bool:
        """End the connection that has said the least: the longest idle one, else the newest request
        that waits for its turn, else the oldest with half a body; return False if there is none.

        A connection that has just been made is not idle yet: its request is on its way.
        """
        self._places.crowded()
        others = [one for one in self._open() if one is not self and one.unfinished]
        oldest = min(others, key=lambda one: (not one.waiting, one.waiting_since), default=None)
        if oldest and self.loop.time() - oldest.waiting_since > IDLE_S and oldest.waiting:
            oldest.give_up()
        elif newest := self._turnstile.newest():
            newest.refuse_busy()
        elif oldest and self.loop.time() - oldest.waiting_since > IDLE_S:
            oldest.give_up()
        else:
            return False
        return True

    def _replace(self) -> bool:
        """End the oldest connection that has not said anything yet; False if there is none."""
        others = [one for one in self._open() if one is not self and one.waiting and not one._begun]
        if not others:
            return False
        min(others, key=lambda one: one.waiting_since).give_up()
        return True

    def refuse_busy(self) -> None:
        """Refuse a request because there are too many."""
        message = f"{self._places.connections_max} connections have a request under way; try again"
        error = KVHearthError(Reason.DAEMON_AWAY, message)
        self._refuse(error, HTTPStatus.SERVICE_UNAVAILABLE)

    def _open(self) -> list[BoundedProtocol]:
        return [
            one
            for one in self.connections
            if isinstance(one, BoundedProtocol) and not one.transport.is_closing()
        ]

    def _open_count(self) -> int:
        return len(self._open())


def protocol_of(places: Places) -> type[H11Protocol]:
    """Return the class of connections that have ``places`` and share a turnstile."""
    turnstile = Turnstile()

    class Protocol(BoundedProtocol):
        """Connection bound to its counter: uvicorn makes the connections and passes its own
        arguments.
        """

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, places=places, turnstile=turnstile, **named)

    return Protocol
