"""HTTP connections: how many are open at once, how slow a peer may be, and errors before routing.

Errors that uvicorn would answer by itself, in plain text and uncounted, are problem documents here
and counted like every other refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.rlimit import HTTP_MAX
from kvhearth_server.transport.web.problems import problem_of

CONNECTIONS_MAX = HTTP_MAX
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


class BoundedProtocol(H11Protocol):
    """One connection; ``tick`` must be called about once a second.

    A peer that exceeds ``connections_max`` ends the connection that has waited longest for a
    request. It is itself refused only if all connections have a request under way.
    """

    def __init__(self, *args: Any, places: Places, **named: Any) -> None:
        super().__init__(*args, **named)
        self._places = places
        self._refused = places.refused
        self._waiting_since = self.loop.time()
        self._begun = False
        self._served = False
        self._unread_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a peer that connects."""
        super().connection_made(transport)
        if self._open_count() > self._places.connections_max:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the peer."""
        if self.waiting and not self._begun:
            self._begun = True
            if self._served:
                self._waiting_since = self.loop.time()
        super().data_received(data)
        self._begun = self._begun and self.waiting

    def on_response_complete(self) -> None:
        """Note that the peer has its answer; any bytes that it has sent since are the next
        request.
        """
        self._served = True
        self._waiting_since = self.loop.time()
        super().on_response_complete()
        self._begun = self.waiting and bool(self.conn.trailing_data[0])

    @property
    def waiting(self) -> bool:
        """Whether no request is under way."""
        return self.conn.their_state is h11.IDLE and not self.transport.is_closing()

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
        if not self._begun:
            self._refused(Reason.DEADLINE)
            self.transport.abort()
            return
        message = (
            f"the request's headers were not here within {HEAD_S:.0f} s, or others needed a place"
        )
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

    def _make_room(self) -> None:
        self._places.crowded()
        waiting = [one for one in self._open() if one is not self and one.waiting]
        if waiting:
            min(waiting, key=lambda one: one.waiting_since).give_up()
            return
        most = self._places.connections_max
        message = f"all {most} connections have a request under way; try again"
        self._refuse(KVHearthError(Reason.DAEMON_AWAY, message), HTTPStatus.SERVICE_UNAVAILABLE)

    def _open(self) -> list[BoundedProtocol]:
        return [
            one
            for one in self.connections
            if isinstance(one, BoundedProtocol) and not one.transport.is_closing()
        ]

    def _open_count(self) -> int:
        return len(self._open())


def protocol_of(places: Places) -> type[H11Protocol]:
    """Return the class of connections that have ``places``."""

    class Protocol(BoundedProtocol):
        """Connection bound to its counter: uvicorn makes the connections and passes its own
        arguments.
        """

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, places=places, **named)

    return Protocol
