"""Keeps collections of cyclic garbage short: a full one would stop the loop for tens of ms. Gives
free memory back.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable, Mapping
from typing import Any

EVERY_S = 600.0
LATEST_S = 24 * 3600.0
IDLE_S = 1.0


def spare_survivors() -> None:
    """Exclude objects that exist, and those that outlive a collection, from later collections."""
    if _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)
    gc.freeze()


def _freeze(phase: str, collection: Mapping[str, Any]) -> None:
    if phase == "stop" and collection["generation"]:
        gc.freeze()


async def collect_when_idle(
    calls: Callable[[], int],
    *,
    every_s: float = EVERY_S,
    idle_s: float = IDLE_S,
    latest_s: float = LATEST_S,
) -> None:
    """Collect garbage among all objects from time to time, while no engine calls.

    Args:
        calls: a number that changes with every call.
        every_s: pause between two collections.
        idle_s: time without a call that counts as idle.
        latest_s: longest time to wait for an idle moment.
    """
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(every_s)
        end = loop.time() + latest_s
        before = None
        while before != (before := calls()) and loop.time() < end:
            await asyncio.sleep(idle_s)
        gc.unfreeze()
        gc.collect()


def give_back_memory() -> None:
    """Give the C library's free memory back to the kernel, where the library can (glibc): it keeps
    the pages of many small buffers after they are freed.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
