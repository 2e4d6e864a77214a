"""Serves HTTP with uvicorn's protocol: on a unix socket of the daemon's user, and at an address."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.observability.logs import LimitedLog, get_logger
from kvhearth_server.ownership import listening
from kvhearth_server.transport.accepting import accept_forever

HEAD_BYTES_MAX = 16 << 10
STUCK_S = 20.0
"""Time after which a connection ends whose peer sends no whole request, or reads no answer."""
LOCAL = "kvhearth.local"
"""Key in a request's scope: it came by the socket that only the daemon's user can open."""
_LOCAL_MAX = 32
"""Connections that may be open to the unix socket."""
_KEEP_ALIVE_S = 15
_HANDSHAKE_S = 5.0
_TICK_S = 1.0
_ACCEPT_AGAIN_S = 0.05
_BACKLOG = 1024
"""Connections that wait to be accepted; the kernel lets those beyond it wait a second."""
_troubles = LimitedLog(get_logger("kvhearth.http"))


def _cannot_accept(error: OSError) -> float:
    _troubles.warning("http.cannot_accept", kind="accept", error=str(error))
    return _ACCEPT_AGAIN_S


def at_address(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 takes any free one.

    Raises:
        KVHearthError: ``socket_unusable``: another process has it, or it is not this host's.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(_BACKLOG)
        found.setblocking(False)
    except OSError as error:
        found.close()
        raise KVHearthError(
            Reason.SOCKET_UNUSABLE,
            f"cannot serve HTTP on {_text(host, port)}: {error.strerror}; "
            "choose another --http HOST:PORT, or --http off",
        ) from None
    return found


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Connection(H11Protocol):
    """uvicorn's connection, whose request has no answer any more once bytes follow that are no
    HTTP.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.began = time.monotonic()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything at once: uvicorn's timer for a peer that reset the connection would
        keep it so long that it is excluded from collections of garbage, which are rare.
        """
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, unless another answer has begun; then end."""
        _troubles.warning("http.bad_bytes", kind="bytes", error=msg)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        waits = self.cycle is None or self.cycle.response_complete
        return bool(waits and not self.transport.is_closing())

    @property
    def waiting(self) -> bool:
        """Whether the next bytes are its peer's: of a request's head or its body."""
        return self.idle or bool(self.cycle.more_body and not self.transport.is_closing())


class Listener:
    """Accepts connections from a listening socket, and has uvicorn answer their requests.

    uvicorn bounds neither how many are open nor how long one waits for its peer.

    Args:
        connections_max: connections that may be open; the next one ends that which has been open
            longest of those that wait for their peer, or else is closed.
        crowded: called when that happens.
        tls: returns the context of the next connection; None for plain HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        connections_max: int,
        crowded: Callable[[], None],
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        self._connections_max, self._crowded, self._tls = connections_max, crowded, tls
        self._config = uvicorn.Config(
            app,
            http=H11Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
        self._config.load()
        self._uvicorn = uvicorn.Server(self._config)
        self._uvicorn.lifespan = self._config.lifespan_class(self._config)
        self._making = set[asyncio.Task[Any]]()
        self._stuck = dict[tuple[Any, ...], float]()

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections, for as long as the task lives."""
        await accept_forever(listener, self._accepted, _cannot_accept)

    async def _accepted(self, connection: socket.socket) -> None:
        loop, state, context = asyncio.get_running_loop(), self._uvicorn.server_state, self._tls()
        if len(state.connections) + len(self._making) >= self._connections_max:
            self._crowded()
            waiting = filter(attrgetter("waiting"), state.connections)
            oldest = min(waiting, key=attrgetter("began"), default=None)
            if oldest is None:
                connection.close()
                return
            oldest.transport.abort()
            await asyncio.sleep(0)  # its descriptor is free
        making = loop.connect_accepted_socket(
            partial(_Connection, self._config, state, {}),
            connection,
            ssl=context,
            ssl_handshake_timeout=None if context is None else _HANDSHAKE_S,
        )
        task = loop.create_task(making)
        self._making.add(task)
        task.add_done_callback(self._made)

    def _made(self, task: asyncio.Task[Any]) -> None:
        self._making.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _troubles.warning("http.cannot_accept", kind="made", error=str(error))

    async def tick(self) -> None:
        """Keep the date header right, and end connections whose peer does nothing; call once a
        second.
        """
        await self._uvicorn.on_tick(0)
        now, before, self._stuck = time.monotonic(), self._stuck, {}
        connections: set[Any] = self._uvicorn.server_state.connections
        for each in connections:
            if each.idle or each.flow.write_paused:
                place = each, each.cycle, each.transport.get_write_buffer_size()
                since = self._stuck[place] = before.get(place, now)
                if now - since > STUCK_S:
                    each.transport.abort()

    async def stop(self) -> None:
        """Close all connections; requests under way have a moment to finish."""
        for task in self._making:
            task.cancel()
        self._uvicorn.servers = []
        await self._uvicorn.shutdown()


def _unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Tell what asyncio's callbacks raise; some bytes that are no HTTP end in such an error of
    uvicorn's.
    """
    if isinstance(context.get("protocol"), H11Protocol):
        error = str(context.get("exception"))
        _troubles.warning("http.bad_bytes", kind="bytes", error=error)
    else:
        loop.default_exception_handler(context)


class WebServer:
    """Serves the application at a path, and at the address of the settings if they name one.

    It binds the address at once, so that a daemon that cannot have it ends before it serves
    anything; it answers requests from ``start`` and ``open`` on.

    Raises:
        KVHearthError: ``socket_unusable``.
    """

    def __init__(
        self,
        app: ASGIApp,
        address: tuple[str, int] | None,
        connections_max: int,
        crowded: Callable[[], None],
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        async def local(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, LOCAL: True}, receive, send)

        self._local = Listener(local, _LOCAL_MAX, crowded)
        self._remote = Listener(app, connections_max, crowded, tls)
        self._bound = None if address is None else at_address(*address)
        self._at_path: socket.socket | None = None
        self.address = "off" if self._bound is None else _text(*self._bound.getsockname()[:2])

    def open(self, supervisor: Supervisor, path: Path) -> None:
        """Answer requests of the daemon's user from now on, instead of at the path before.

        Raises:
            OSError: the path cannot be bound.
        """
        listener, former = listening(path, _BACKLOG, owner_only=True), self._at_path
        if former is not None:
            asyncio.get_running_loop().remove_reader(former)
            former.close()
        self._at_path = listener
        supervisor.spawn("http_path", partial(self._local.accept, listener), replaces=True)

    def start(self, supervisor: Supervisor) -> None:
        """Answer requests at the address, too; call on the engine's loop."""
        supervisor.spawn("http_tick", self._tick)
        if self._bound is not None:
            supervisor.spawn("http_accept", partial(self._remote.accept, self._bound))

    async def _tick(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_unhandled)
        while True:
            await self._local.tick()
            await self._remote.tick()
            await asyncio.sleep(_TICK_S)

    async def stop(self) -> None:
        """Stop; requests under way have a moment to finish."""
        for listener in (self._at_path, self._bound):
            if listener is not None:
                asyncio.get_running_loop().remove_reader(listener)
                listener.close()
        await asyncio.gather(self._local.stop(), self._remote.stop())
