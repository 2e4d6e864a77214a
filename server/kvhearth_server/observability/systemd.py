"""Reports the daemon's state to systemd (sd_notify): one datagram to the socket that it names."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from kvhearth_server.observability.logs import get_logger

READY = "READY=1"
STOPPING = "STOPPING=1"
WATCHDOG = "WATCHDOG=1"

_log = get_logger("kvhearth.notify")


def notify(state: str) -> bool:
    """Send a state to ``$NOTIFY_SOCKET``; return False if there is none or nobody receives it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address[0] == "@":  # Linux's abstract names begin with a zero
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto(state.encode(), address)
    except OSError as error:
        _log.warning("systemd.not_notified", state=state, error=str(error))
        return False
    return True


def watchdog_s() -> float:
    """Return the interval at which systemd expects a sign of life, halved as it advises; 0 for
    never.

    A variable that was meant for another process (``WATCHDOG_PID``) does not count.
    """
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", "")
    if not limit_us.isdecimal() or pid not in ("", str(os.getpid())):
        return 0.0
    return int(limit_us) / 2e6


async def keep_watchdog(pause_s: float, lives: Callable[[], bool]) -> None:
    """Report that we live until cancelled; runs on the loop, so a loop that hangs falls silent."""
    while True:
        if lives():
            notify(WATCHDOG)
        await asyncio.sleep(pause_s)
