"""One loop that accepts, for every listening socket of the daemon's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable


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
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:
            await asyncio.sleep(cannot(error))
            continue
        connection.setblocking(False)
        await made(connection)
        # Accepting does not wait while peers queue up: without this nothing else would run.
        await asyncio.sleep(0)
