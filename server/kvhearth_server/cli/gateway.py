"""``kvhearth gateway``: serves engines on other hosts, beside a daemon that runs already."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from kvhearth_server.cli.serve import given, with_flags_of
from kvhearth_server.config.load import Settings, load_settings
from kvhearth_server.gateway.doors import Doors
from kvhearth_server.gateway.process import SETTINGS, GatewayProcess
from kvhearth_server.observability import logs

EPILOG = (
    "Example: kvhearth gateway --listen 0.0.0.0:9461 --socket-dir /run/kvhearth "
    "--tls-cert cert.pem --tls-key key.pem --tokens-file tokens.yaml"
)
LISTEN_DEFAULT = "127.0.0.1:9461"


@with_flags_of(Settings, SETTINGS)
def gateway(
    config: Path | None = None,
    **flags: object,
) -> None:
    """Serve engines on other hosts until SIGTERM or SIGINT.

    The gateway is one more client of the daemon at --socket-dir. With tokens
    or certificates, its user must be in the daemon's gateway_uids. kvhearth
    serve --listen starts and watches one itself. SIGHUP reads certificates
    and tokens again.
    """
    named = given(flags)
    settings = load_settings(named, config)
    if settings.listen_address is None:
        settings = load_settings(named | {"listen": LISTEN_DEFAULT}, config)
    logs.configure(settings.log_level, settings.log_format)
    logs.capture()
    Doors(settings)  # wrong certificates and tokens end this start, not the process's
    asyncio.run(_run(GatewayProcess(settings, lambda: None)))


async def _run(process: GatewayProcess) -> None:
    loop = asyncio.get_running_loop()
    work = loop.create_task(process.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    loop.add_signal_handler(signal.SIGHUP, process.hangup)
    try:
        await work
    except asyncio.CancelledError:
        return
