"""The catalogue's writer: changes during a write share the next one; nothing is promised early."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import pytest

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.engine.recovery import CatalogueWriter


class Store:
    """A value, and a file that takes as long as ``open`` is clear."""

    def __init__(self) -> None:
        self.value = 0
        self.written: list[int] = []
        self.begun, self.open = threading.Event(), threading.Event()
        self.error: KVHearthError | None = None

    def prepare(self) -> Callable[[], None]:
        value = self.value

        def write() -> None:
            self.begun.set()
            assert self.open.wait(20)
            if self.error:
                raise self.error
            self.written.append(value)

        return write


async def _begun(store: Store) -> None:
    while not store.begun.is_set():
        await asyncio.sleep(0.001)


def test_changes_during_a_write_share_the_next_one() -> None:
    store = Store()

    async def main() -> None:
        writer = CatalogueWriter(store.prepare)
        task = asyncio.create_task(writer.run())
        await asyncio.sleep(0)
        waiters = []
        for store.value in range(1, 51):
            writer.changed()
            waiters.append(asyncio.create_task(writer.written()))
            await _begun(store)
        assert not any(waiter.done() for waiter in waiters)
        store.open.set()
        await asyncio.wait_for(asyncio.gather(*waiters), 20)
        assert store.written == [1, 50]
        await _ended(task)

    asyncio.run(main())


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_the_last_change_is_written_at_the_end() -> None:
    store = Store()

    async def main() -> None:
        writer = CatalogueWriter(store.prepare)
        task = asyncio.create_task(writer.run())
        await asyncio.sleep(0)
        store.value = 1
        writer.changed()
        await _begun(store)
        store.value = 2
        writer.changed()
        store.open.set()
        await _ended(task)
        assert store.written[-1] == 2
        await writer.written()

    asyncio.run(main())


def test_who_waits_hears_of_a_failure() -> None:
    store = Store()
    store.open.set()
    store.error = KVHearthError(Reason.ARENA_UNUSABLE, "no room")

    async def main() -> None:
        writer = CatalogueWriter(store.prepare)
        task = asyncio.create_task(writer.run())
        await asyncio.sleep(0)
        writer.changed()
        with pytest.raises(KVHearthError, match="no room"):
            await writer.written()
        store.error = None
        writer.changed()
        await writer.written()
        await _ended(task)

    asyncio.run(main())
