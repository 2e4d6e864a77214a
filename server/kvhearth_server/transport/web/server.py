"""Runs uvicorn on the daemon's own loop: with our own socket, no signals, bounded idle
connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import Settings
from kvhearth_server.engine.engine import Engine
from kvhearth_server.transport.web.protocol import (
    CONNECTIONS_MAX,
    BoundedProtocol,
    Places,
    protocol_of,
)
from kvhearth_server.transport.web.routes import make_app

HEAD_BYTES_MAX = 16 << 10
_KEEP_ALIVE_S = 15
_ACCEPTS_PER_TURN = 4
"""asyncio accepts a backlog's worth of connections before the first of them is counted."""
_STOP_S = 2.0
_TICK_S = 1.0


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        KVHearthError: ``socket_unusable``: another process has it, or it is not this host's.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(CONNECTIONS_MAX)
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
    """

    def __init__(self, host: str, port: int, places: Places) -> None:
        self._places = places
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

    async def start(self, app: ASGIApp) -> None:
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
            backlog=_ACCEPTS_PER_TURN,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise KVHearthError(Reason.INTERNAL, "the HTTP server ended at its start")
            await asyncio.sleep(0)
        self._socket.listen(CONNECTIONS_MAX)

    async def stop(self) -> None:
        """Stop; requests under way have a moment to finish."""
        if self._server is not None and self._task is not None:
            self._server.end.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, _STOP_S)
        if self._socket is not None:
            self._socket.close()


class _Server(uvicorn.Server):
    """Leaves signals to the daemon, and wakes once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.end = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: SIGTERM and SIGINT belong to the daemon."""
        yield

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
        self, settings: Settings, engine: Engine, admin_token: str, connections_max: int
    ) -> None:
        address = settings.http_address
        assert address is not None, "HTTP is off"
        self._app = make_app(engine, settings, admin_token)
        places = Places(
            connections_max,
            lambda reason: engine.counters.add("refusals", 1, str(reason)),
            lambda: engine.counters.add("connections_refused", 1, "http"),
        )
        self._listener = Listener(*address, places)
        self.address = self._listener.bind()

    async def start(self) -> None:
        """Answer requests; call on the engine's loop."""
        await self._listener.start(self._app)

    async def stop(self) -> None:
        """Stop; requests under way have a moment to finish."""
        await self._listener.stop()
