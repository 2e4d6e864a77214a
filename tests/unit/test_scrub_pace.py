"""The scrub keeps its rate, whatever it has to read and however long it slept."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from kvhearth_server.engine.scrub import Pace


class _Selector(selectors.DefaultSelector):
    """A selector that never blocks: every timeout has passed at once."""

    slept_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.slept_s += timeout or 0.0
        return super().select(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock counts the time that was slept."""

    def __init__(self) -> None:
        self.skipping = _Selector()
        super().__init__(self.skipping)

    def time(self) -> float:
        return self.skipping.slept_s


def slept(work: Coroutine[Any, Any, None]) -> float:
    """Returns the duration of ``work`` by the loop's clock."""
    loop = SkippingLoop()
    try:
        loop.run_until_complete(work)
        return loop.time()
    finally:
        loop.close()


@pytest.mark.parametrize("sizes", [[100] * 10, [1000], [1, 999], [0, 500, 0, 500]])
def test_so_many_bytes_take_so_long(sizes: list[int]) -> None:
    async def work() -> None:
        pace = Pace(100)
        for size in sizes:
            await pace.spend(size)

    assert slept(work()) == pytest.approx(10.0, rel=1e-6)
