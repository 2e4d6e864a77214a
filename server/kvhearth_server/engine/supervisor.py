"""Background work of the loop: supervised tasks, and garbage collections that do not stop it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.logs import get_logger

_PAUSE_FIRST_S = 0.05
_PAUSE_MAX_S = 5.0
_log = get_logger("kvhearth.supervisor")


class Supervisor:
    """Runs named coroutines until ``stop``."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def spawn(
        self, name: str, work: Callable[[], Awaitable[None]], *, replaces: bool = False
    ) -> None:
        """Run ``work()`` again whenever it fails; a plain return ends it.

        Args:
            name: of no other work, unless this one takes its place.
            replaces: end the work that has this name.
        """
        if (former := self._tasks.get(name)) is not None:
            if not replaces:
                raise ValueError(f"{name} runs already")
            former.cancel()
        self._tasks[name] = asyncio.get_running_loop().create_task(
            self._watch(name, work), name=name
        )

    async def _watch(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        pause_s = _PAUSE_FIRST_S
        while True:
            try:
                await work()
                return
            except Exception:  # noqa: BLE001 - the supervisor's whole purpose
                self._counters.add("task_failures", 1, name)
                _log.exception("task.failed", task=name, again_in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def stop(self) -> None:
        """Cancel all tasks and wait for them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()


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
