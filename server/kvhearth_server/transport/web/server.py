"""HTTP as the daemon starts and stops it."""

from __future__ import annotations

from kvhearth_server.config import Settings
from kvhearth_server.engine.engine import Engine
from kvhearth_server.transport.web.app import make_app
from kvhearth_server.transport.web.listener import Listener


class WebServer:
    """The application at the address of the settings, which must name one.

    The address is taken at once, so that a daemon that cannot have it ends before it serves
    anything; requests are answered from ``start`` on.

    Raises:
        KVHearthError: ``socket_unusable``.
    """

    def __init__(self, settings: Settings, engine: Engine, admin_token: str) -> None:
        address = settings.http_address
        assert address is not None, "HTTP is off"
        self._app = make_app(engine, settings, admin_token)
        self._listener = Listener(
            *address, lambda reason: engine.counters.add("refusals", 1, str(reason))
        )
        self.address = self._listener.bind()

    async def start(self) -> None:
        """Answer requests; call on the engine's loop."""
        await self._listener.start(self._app)

    async def stop(self) -> None:
        """End; requests under way have a moment."""
        await self._listener.stop()
