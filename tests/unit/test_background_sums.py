"""The checksum task continues after a failure, with the work that it had before."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.core.actions import Sum
from kvhearth_server.engine.checksums import ChecksumWorkers
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS


class Failing(ChecksumWorkers):
    """A background task whose first checksum fails."""

    def __init__(self, engine: Any, supervisor: Supervisor) -> None:
        super().__init__(engine, supervisor, sum_threads=1)
        self.summed: list[Any] = []
        self.failures = 0

    async def _sum_one(self, action: Any) -> None:
        if not self.failures:
            self.failures += 1
            raise OSError("as the test says")
        self.summed.append(action)


def test_sums_go_on_after_a_failure() -> None:
    # Of different numbers of shards, so that they are not summed at once.
    first, second = (
        Sum(np.arange(shards)[None, :], np.zeros((1, shards), np.uint32)) for shards in (1, 2)
    )

    async def work() -> None:
        counters = Counters(COUNTERS)
        supervisor = Supervisor(counters)
        pinning = SimpleNamespace(expire=None)
        engine = SimpleNamespace(
            arena=SimpleNamespace(segments=[]),
            work=asyncio.Event(),
            to_sum=deque([first, second]),
            sessions=[],
            core=SimpleNamespace(pinning=pinning),
            call=lambda *_: None,
            now=lambda: 0.0,
        )
        background = Failing(engine, supervisor)
        background.start()
        async with asyncio.timeout(HUNG_S):
            while engine.to_sum:
                await asyncio.sleep(0)
            await background.settled()
        assert [id(one) for one in background.summed] == [id(first), id(second)]
        assert counters.get("task_failures", "sum") == 1
        await supervisor.stop()
        background.close()

    asyncio.run(work())
