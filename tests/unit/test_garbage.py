"""Collections leave out objects that outlived one; an idle moment is used for all of them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.engine.supervisor import collect_when_idle, spare_survivors


@pytest.fixture
def spared() -> Iterator[None]:
    before = list(gc.callbacks)
    spare_survivors()
    yield
    gc.callbacks[:] = before
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as it was


class Node:
    def __init__(self) -> None:
        self.me = self


@pytest.mark.usefixtures("spared")
def test_survivors_are_collected_no_more() -> None:
    frozen = gc.get_freeze_count()
    kept = [Node() for _ in range(1000)]
    gc.collect(1)
    assert gc.get_freeze_count() >= frozen + len(kept)


@pytest.mark.usefixtures("spared")
def test_an_idle_moment_frees_what_became_garbage() -> None:
    node = Node()
    alive = weakref.ref(node)
    gc.collect(1)
    del node
    gc.collect()
    assert alive() is not None, "it is frozen"

    async def run() -> None:
        calls = iter([1, 2, 2, *[2] * 1000])
        work = collect_when_idle(lambda: next(calls), every_s=0.0, idle_s=0.0)
        task = asyncio.ensure_future(work)
        async with asyncio.timeout(HUNG_S):
            while alive() is not None:
                await asyncio.sleep(0)
        task.cancel()

    asyncio.run(run())
