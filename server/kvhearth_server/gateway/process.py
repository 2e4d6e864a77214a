"""The gateway's process: started, watched and started again by the process that listens for it.

The child's first line of stdin has its settings, and the end of stdin ends it; so it never outlives
its parent. It writes a line to stdout once it serves. Network data is parsed in children only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import Settings
from kvhearth_server.observability.logs import get_logger

SETTINGS = (
    *("socket_dir", "tenants", "listen", "tls_cert", "tls_key", "client_ca", "tokens_file"),
    *("insecure", "attach_timeout_s", "log_level", "log_format"),
)
"""Settings of a gateway."""
_PASSED = frozenset((*SETTINGS, "memory", "slab_bytes", "slot_bytes_min"))
"""Settings that a child gets: those of memory, by which the tenants' are checked, too."""
_BACKLOG = 256
_TAKEN_S = 3.0
_TAKEN_PAUSE_S = 0.05
_PAUSE_FIRST_S = 0.1
_PAUSE_MAX_S = 5.0
_STEADY_S = 10.0
_END_S = 10.0
_log = get_logger("kvhearth.gateway")


class GatewayProcess:
    """The gateway of one address.

    Args:
        settings: with ``listen``.
        restarted: called after each end of the process that was not asked for.

    Raises:
        KVHearthError: ``socket_unusable``.
    """

    def __init__(self, settings: Settings, restarted: Callable[[], None]) -> None:
        address = settings.listen_address
        assert address is not None
        self._settings = settings
        self._restarted = restarted
        self._listener = listen(*address)
        self._running: asyncio.subprocess.Process | None = None
        self._serving = False

    @property
    def port(self) -> int:
        """Its port."""
        port: int = self._listener.getsockname()[1]
        return port

    def describe(self) -> str:
        """Return the state in a sentence."""
        host = self._settings.listen.rpartition(":")[0]
        verb = "serves" if self._serving else "does not serve"
        return f"gateway: its process {verb} {host}:{self.port}"

    def hangup(self) -> None:
        """Have the process read its certificates and tokens again."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                self._running.send_signal(signal.SIGHUP)

    async def run(self) -> None:
        """Run the process until this is cancelled; then end it."""
        pause_s = _PAUSE_FIRST_S
        while True:
            began = time.monotonic()
            try:
                code = await self._live()
            except OSError as error:  # out of descriptors or processes
                _log.error("gateway.cannot_start", error=str(error), again_in_s=pause_s)
            else:
                self._restarted()
                if time.monotonic() - began > _STEADY_S:
                    pause_s = _PAUSE_FIRST_S
                _log.error("gateway.ended", code=code, again_in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _live(self) -> int:
        """Run the process once; return its exit status."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvhearth_server.gateway"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[self._listener.fileno()],
        )
        self._running = process
        try:
            await self._begin(process)
            return await process.wait()
        finally:
            self._serving, self._running = False, None
            await _end(process)

    async def _begin(self, process: asyncio.subprocess.Process) -> None:
        message: dict[str, Any] = {
            "settings": self._settings.model_dump(mode="json", include=set(_PASSED)),
            "listener": self._listener.fileno(),
        }
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            await process.stdin.drain()
            if await process.stdout.readline():
                self._serving = True
                _log.info("gateway.serving", port=self.port, pid=process.pid)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process that may still run: by the end of its stdin, at last by a signal."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        KVHearthError: ``socket_unusable``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(listener, host, port)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise KVHearthError(
            Reason.SOCKET_UNUSABLE,
            f"cannot listen on {host}:{port} ({error.strerror or error}); give a free port of an "
            "address of this machine",
        ) from None
    listener.setblocking(False)
    return listener


def _bind(listener: socket.socket, host: str, port: int) -> None:
    """Bind; wait a little for a port that is taken, most likely by the gateway of a daemon that was
    killed a moment ago.
    """
    end = time.monotonic() + _TAKEN_S
    while True:
        try:
            listener.bind((host, port))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise
            time.sleep(_TAKEN_PAUSE_S)
