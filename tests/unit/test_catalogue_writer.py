"""The catalogue's writer: changes during a write share the next one; nothing is promised early."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.harness import HUNG_S
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
            assert self.open.wait(HUNG_S)
            if self.error:
                raise self.error
            self.written.append(value)

        return write


@contextlib.asynccontextmanager
async def writing(store: Store) -> AsyncIterator[CatalogueWriter]:
    """A writer that runs; its task is cancelled at the end, as at the daemon's."""
    writer = CatalogueWriter(store.prepare)
    task = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    yield writer
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def begun(store: Store) -> None:
    """Wait until a write is under way."""
    assert await asyncio.to_thread(store.begun.wait, 20)


def test_changes_during_a_write_share_the_next_one() -> None:
    store = Store()

    async def main() -> None:
        async with writing(store) as writer:
            waiters = []
            for store.value in range(1, 51):
                writer.changed()
                waiters.append(asyncio.create_task(writer.written()))
                await begun(store)
            assert not any(waiter.done() for waiter in waiters)
            store.open.set()
            await asyncio.wait_for(asyncio.gather(*waiters), 20)
            assert store.written == [1, 50]

    asyncio.run(main())


def test_the_last_change_is_written_at_the_end() -> None:
    store = Store()

    async def main() -> None:
        async with writing(store) as writer:
            store.value = 1
            writer.changed()
            await begun(store)
            store.value = 2
            writer.changed()
            store.open.set()
        assert store.written[-1] == 2
        await writer.written()

    asyncio.run(main())


def test_whoever_waits_hears_of_a_failure() -> None:
    store = Store()
    store.open.set()
    store.error = KVHearthError(Reason.ARENA_UNUSABLE, "no room")

    async def main() -> None:
        async with writing(store) as writer:
            writer.changed()
            with pytest.raises(KVHearthError, match="no room"):
                await writer.written()
            store.error = None
            writer.changed()
            await writer.written()

    asyncio.run(main())
