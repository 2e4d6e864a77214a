"""Populates the arena beside the calls, and tells how far it is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvhearth_server.engine.engine import Engine
from kvhearth_server.observability.logs import get_logger

_TELL_S = 5.0
_log = get_logger("kvhearth.arena")


async def populate(engine: Engine) -> None:
    """Take the rest of the arena's memory; what cannot be had is given up, for as long as the
    daemon runs.
    """
    populator, loop = engine.arena.populator, asyncio.get_running_loop()

    def tell(change: Callable[[list[int]], None], slabs: list[int]) -> None:
        loop.call_soon_threadsafe(engine.call, change, slabs)

    core, nodes, began, stopped = engine.core, populator.nodes, time.monotonic(), threading.Event()
    tells = partial(tell, core.offer), partial(tell, core.withhold)
    pool = ThreadPoolExecutor(len(nodes), "kvhearth-populate")
    try:
        left = {loop.run_in_executor(pool, populator.run, node, stopped, *tells) for node in nodes}
        while left:
            ended, left = await asyncio.wait(left, timeout=_TELL_S)
            for each in ended:
                each.result()
            if left:
                _log.info("arena.populating", **_bytes(engine))
        await loop.run_in_executor(pool, _settle, engine)
    finally:
        stopped.set()
        pool.shutdown()  # its threads end after the pieces under way
    if reason := "; ".join(populator.given_up.values()):
        engine.notices["memory"] = reason
        _log.warning("arena.given_up", reason=reason)
    seconds = round(time.monotonic() - began, 3)
    _log.info("arena.populated", seconds=seconds, **_bytes(engine))


def _bytes(engine: Engine) -> dict[str, int]:
    segments = engine.arena.segments
    populated = map(engine.arena.populator.populated_in, range(len(segments)))
    return {
        "populated_bytes": sum(populated),
        "memory_bytes": sum(segment.bytes for segment in segments),
        "huge_bytes": sum(segment.huge_bytes for segment in segments),
    }


def _settle(engine: Engine) -> None:
    noted = [len(segment.steps_down) for segment in engine.arena.segments]
    engine.arena.populator.settle()
    for segment, count in zip(engine.arena.segments, noted, strict=True):
        for note in segment.steps_down[count:]:
            _log.warning("arena.note", note=note)
