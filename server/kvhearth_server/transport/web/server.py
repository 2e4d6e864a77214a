"""Runs uvicorn on the daemon's own loop: with our own socket, no signals, bounded idle
connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import Settings
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.observability.logs import LimitedLog, get_logger
from kvhearth_server.transport.operators import Operators
from kvhearth_server.transport.web.protocol import (
    BoundedProtocol,
    Places,
    protocol_of,
)
from kvhearth_server.transport.web.routes import make_app

HEAD_BYTES_MAX = 16 << 10
_KEEP_ALIVE_S = 15
_STOP_S = 2.0
_TICK_S = 1.0
_ACCEPT_PAUSE_S = 1 / 512
"""Least time between two connections; the others wait in the kernel's queue."""
_HANDSHAKE_PAUSE_S = 1 / 64
"""The same under TLS, whose handshakes take a millisecond of the daemon's loop each."""
_HANDSHAKE_S = 5.0
_HANDSHAKES_MAX = 64
_ACCEPTED_AT_ONCE = 8
_ACCEPT_AGAIN_S = 0.05
_BACKLOG = 512
"""Connections in the kernel's queue: one second of them."""
_refusals = LimitedLog(get_logger("kvhearth.http"))


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

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


class Listener:
    """Serves an application at an address. ``bind``, then ``start``; ``stop`` ends it.

    Args:
        host, port: the address; port 0 takes any free one.
        places: how many connections may be open, and who is told of refusals.
        tls: returns the context of the next connection; None for plain HTTP.
    """

    def __init__(
        self,
        host: str,
        port: int,
        places: Places,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        self._places = places
        self._tls = tls
        self._host = host
        self._port = port
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    def bind(self) -> str:
        """Bind the address and return it as ``HOST:PORT``; with port 0 it is only known then.

        Raises:
            KVHearthError: as ``listening``.
        """
        self._socket = listening(self._host, self._port)
        host, port = self._socket.getsockname()[:2]
        return _text(host, port)

    async def start(self, app: ASGIApp, supervisor: Supervisor) -> None:
        """Answer requests from now on."""
        assert self._socket is not None, "bind first"
        config = uvicorn.Config(
            app,
            http=protocol_of(self._places),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
        self._server = _Server(config, self._tls)
        self._task = asyncio.create_task(self._server.serve([]), name="http")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise KVHearthError(Reason.INTERNAL, "the HTTP server ended at its start")
            await asyncio.sleep(0)
        supervisor.spawn("http_accept", partial(self._server.accept_forever, self._socket))

    async def stop(self) -> None:
        """Stop; requests under way have a moment to finish."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        if self._server is not None and self._task is not None:
            self._server.end.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, _STOP_S)


class _Server(uvicorn.Server):
    """Leaves signals to the daemon, and wakes once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config, tls: Callable[[], ssl.SSLContext | None]) -> None:
        super().__init__(config)
        self.end = asyncio.Event()
        self._tls = tls
        self._making = dict[asyncio.Task[Any], None]()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: SIGTERM and SIGINT belong to the daemon."""
        yield

    async def accept_forever(self, listener: socket.socket) -> None:
        """Accept connections, a few in one turn of the loop. asyncio's own servers accept a whole
        queue in one.
        """
        loop = asyncio.get_running_loop()
        next_at, context = loop.time(), None
        while listener.fileno() >= 0:
            try:
                connection, _ = await loop.sock_accept(listener)
                context = self._tls()
                self._make(loop, connection, context)
            except OSError as error:
                # Out of descriptors, most likely; a peer that has gone already costs nothing.
                _refusals.warning("http.cannot_accept", kind="accept", error=str(error))
                await asyncio.sleep(_ACCEPT_AGAIN_S)
            pause_s = _ACCEPT_PAUSE_S if context is None else _HANDSHAKE_PAUSE_S
            # A turn that took long is made up for, or a probe would wait for the whole queue.
            now = loop.time()
            next_at = max(next_at, now - _ACCEPTED_AT_ONCE * pause_s) + pause_s
            if next_at > now:
                await asyncio.sleep(next_at - now)

    def _make(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        context: ssl.SSLContext | None,
    ) -> None:
        """Serve a connection, after its handshake; the oldest handshake makes room for others."""
        timeout_s = None if context is None else _HANDSHAKE_S
        making = loop.connect_accepted_socket(
            self._protocol,
            connection,
            ssl=context,
            ssl_handshake_timeout=timeout_s,
            ssl_shutdown_timeout=timeout_s,
        )
        if len(self._making) >= _HANDSHAKES_MAX:
            next(iter(self._making)).cancel()
        task = loop.create_task(making)
        self._making[task] = None
        task.add_done_callback(self._made)

    def _made(self, task: asyncio.Task[Any]) -> None:
        self._making.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _refusals.warning("http.cannot_accept", kind="made", error=str(error))

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state={}
        )

    async def main_loop(self) -> None:
        """Run until ``end``; a tick keeps the date header right and ends slow connections."""
        loop = asyncio.get_running_loop()
        while not self.end.is_set():
            await self.on_tick(0)
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.tick(loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self.end.wait()


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class WebServer:
    """Serves the application at the address of the settings, which must name one.

    It binds the address at once, so that a daemon that cannot have it ends before it serves
    anything; it answers requests from ``start`` on.

    Raises:
        KVHearthError: ``socket_unusable``.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        operators: Operators,
        connections_max: int,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        examine: Callable[[], list[dict[str, str]]] = list,
    ) -> None:
        address = settings.http_address
        assert address is not None, "HTTP is off"
        self._app = make_app(engine, settings, operators, examine)
        places = Places(
            # As many more may be probes.
            max(1, connections_max // 2),
            lambda reason: engine.counters.add("refusals", 1, str(reason)),
            lambda: engine.counters.add("connections_refused", 1, "http"),
        )
        self._listener = Listener(*address, places, tls)
        self.address = self._listener.bind()

    async def start(self, supervisor: Supervisor) -> None:
        """Answer requests; call on the engine's loop."""
        await self._listener.start(self._app, supervisor)

    async def stop(self) -> None:
        """Stop; requests under way have a moment to finish."""
        await self._listener.stop()
