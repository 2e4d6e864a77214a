"""``python -m kvhearth_server.tiers.remote.helper``: the helper process of one remote."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import socket
import sys
from typing import Any

from kvhearth_server.child import begin
from kvhearth_server.observability import logs
from kvhearth_server.tiers.remote.helper.drivers.base import Driver, Refused
from kvhearth_server.tiers.remote.mover import encode
from kvhearth_server.tiers.remote.url import RemoteUrl, parse_remote

SWITCH_S = 0.0005
_SERVERS = ("valkey", "valkeys", "mooncake")


def open_driver(url: RemoteUrl) -> Driver:
    """Open the remote that a URL names, by the library of its scheme. Records need one, too.

    Raises:
        Refused: its library is not installed, or it cannot be opened as the URL says.
    """
    try:
        importlib.import_module("cryptography")
        if url.scheme in ("valkey", "valkeys"):
            from kvhearth_server.tiers.remote.helper.drivers.valkey import ValkeyDriver

            return ValkeyDriver(url)
        if url.scheme == "mooncake":
            from kvhearth_server.tiers.remote.helper.drivers.mooncake import MooncakeDriver

            return MooncakeDriver(url)
        from kvhearth_server.tiers.remote.helper.drivers.objects import ObjectDriver

        return ObjectDriver(url)
    except ImportError as error:
        extra = url.scheme.rstrip("s") if url.scheme in _SERVERS else "s3"
        raise Refused(
            f"{url.place} needs a package that cannot be imported ({error}): "
            f"pip install 'kvhearth[{extra}]'"
        ) from None


async def serve(message: dict[str, Any]) -> None:
    """Serve the daemon that sent ``message``."""
    connection = socket.socket(fileno=message["connection"])
    try:
        driver = open_driver(parse_remote(message["url"]))
    except Refused as error:
        connection.sendall(encode({"kind": "state", "problem": str(error), "value_bytes_max": 0}))
        return
    from kvhearth_server.tiers.remote.helper.moves import Memory
    from kvhearth_server.tiers.remote.helper.service import Service

    memory = Memory(message["regions"], message["staging_bytes"])
    driver.attach(memory.staging)
    await Service(connection, driver, memory, bytes.fromhex(message["fleet_key"])).run()


def main() -> int:
    """Run a child of ``process.Mover``; return the exit status."""
    message = begin()
    if message is None:
        return 0  # the parent died
    logs.configure(message["log_level"], message["log_format"])
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    try:
        asyncio.run(serve(message))
    except (ConnectionError, BrokenPipeError):
        return 0  # the parent died
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
