"""One loop that accepts, for every listening socket of the daemon's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

_AT_ONCE = 16
"""Connections accepted in one cycle of the loop: with one, those of a burst would wait long for
each other, and with all, nothing else would run.
"""


async def accept_forever(
    listener: socket.socket,
    made: Callable[[socket.socket], Awaitable[None]],
    cannot: Callable[[OSError], float],
) -> None:
    """Give each connection to ``made``, for as long as the task lives.

    Args:
        listener: a listening socket that does not block.
        made: takes over a connection.
        cannot: hears of a failure, out of descriptors most likely; returns the pause after it, in
            seconds.
    """
    loop, accepted = asyncio.get_running_loop(), 0
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:
            await asyncio.sleep(cannot(error))
            continue
        connection.setblocking(False)
        await made(connection)
        accepted += 1
        if accepted % _AT_ONCE == 0:
            await asyncio.sleep(0)
