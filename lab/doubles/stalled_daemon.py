"""A watched daemon with a handler that repeatedly burns 50 ms of processor time."""

from __future__ import annotations

import asyncio
import sys
import time

from kvhearth_lab.bench.stalls.watched_daemon import main

BURNT_S = 0.05
_PAUSE_S = 0.002


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        loop.call_soon(burn_now_and_then, loop)
        return loop


def burn_now_and_then(loop: asyncio.AbstractEventLoop) -> None:
    """Stall the loop, and schedule the next stall."""
    began = time.thread_time()
    while time.thread_time() - began < BURNT_S:
        pass
    loop.call_later(_PAUSE_S, burn_now_and_then, loop)


if __name__ == "__main__":
    asyncio.set_event_loop_policy(_Policy())
    sys.exit(main(*sys.argv[1:]))
