"""Keeps background tasks alive: logs and counts a failure, then starts the task again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

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

    def spawn(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work()`` again whenever it fails; a plain return ends it."""
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
