"""What drives the slower tier: a turn whenever it has something to say, and now and then. It tells
the log of the tier's health, too.
"""

from __future__ import annotations

import asyncio

from kvhearth_server.engine.degraded import DegradedLog
from kvhearth_server.engine.tiering import Tiering

_TURN_S = 0.1
"""Between two turns at the latest: what is stuck, or may be tried again, is only seen in a turn."""
_FLUSH_S = 0.01


async def drive(tiering: Tiering, degraded: DegradedLog) -> None:
    """Take turns for as long as the task lives."""
    loop = asyncio.get_running_loop()
    due = asyncio.Event()
    descriptor = tiering.tier.event_fd
    tiering.wake = due.set
    loop.add_reader(descriptor, due.set)
    try:
        while True:
            degraded.look()  # before the turn: one that fails is followed by none
            try:
                async with asyncio.timeout(min(_TURN_S, max(0.0, tiering.pause_s()))):
                    await due.wait()
            except TimeoutError:
                pass
            due.clear()
            tiering.turn()
            await asyncio.sleep(0)
    finally:
        loop.remove_reader(descriptor)


async def written(tiering: Tiering) -> None:
    """Wait until everything that was offered is written or was refused."""
    while tiering.writing:
        tiering.wake()
        await asyncio.sleep(_FLUSH_S)
