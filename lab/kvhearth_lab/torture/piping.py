"""The engine's work through the client's pipelines, as in an engine of one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvhearth.page_layout import PagedKV
from kvhearth.transfer import LoadPipeline, StorePipeline
from kvhearth_lab.harness.engine import PAGES, Engine, Seen, content, hung, key_of

_DONE_S = 20.0
_RESERVE_S = 0.4


class Pipes:
    """Pipelines beside an engine of one rank, with their own pages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._size = engine.contract.groups[0].page_bytes
        self._pages = np.zeros((2 * PAGES, self._size), np.uint8)
        kv = {0: PagedKV([self._pages])}
        client = engine.client
        self._stores = StorePipeline(
            client,
            kv,
            queue_blocks_max=4 * PAGES,
            stock_blocks_max=8,
            batch_blocks=8,
            reserve_wait_s=_RESERVE_S,
        )
        self._loads = LoadPipeline(client, kv)

    def store(self, numbers: Sequence[int], parent: int) -> tuple[list[int], str]:
        """Variant of ``Engine.store`` that reports all of the blocks as stored, or none."""
        engine, epoch = self._engine, self._engine.epoch
        keys = engine.keys(numbers)
        for page, key in enumerate(keys):
            self._pages[page] = content(key, 0, epoch, self._size)
        before = b"" if parent < 0 else key_of(engine.model, parent)
        with engine.clock.timed("pipe_store"):
            ticket = self._stores.submit(0, keys, np.arange(len(keys)), before, wait_s=_DONE_S)
            if ticket is None:
                raise hung("the store pipeline's queue stays full")
            done = self._stores.wait(ticket, _DONE_S)
        if done is None:
            raise hung("a store")
        whole = not done.failed and epoch == engine.epoch >= 0
        return (list(numbers) if whole else []), done.reason

    def load(self, numbers: Sequence[int]) -> Seen:
        """Load a chain and compare the blocks reported as loaded."""
        engine, seen = self._engine, Seen()
        pages = np.arange(PAGES, PAGES + len(numbers))
        keys, epoch = engine.keys(numbers), engine.epoch
        self._pages[pages] = 0
        with engine.clock.timed("pipe_load"):
            done = self._loads.load_now({0: (keys, pages)}, prefetch=True, deadline_s=_DONE_S)
        if done is None:
            raise hung("a load")
        if done.reason:
            seen.failed[done.reason] += 1
        loaded = done.loaded[0].tolist()
        for number, page, key, flag in zip(numbers, pages.tolist(), keys, loaded, strict=True):
            if not flag or epoch != engine.epoch:
                continue
            if np.array_equal(self._pages[page], content(key, 0, epoch, self._size)):
                seen.right.append(number)
            else:
                seen.wrong.append(
                    f"{engine.model} block {number} epoch {epoch}: loaded other bytes"
                )
        return seen

    def close(self) -> bool:
        """Close both pipelines; False if copies do not drain."""
        ended = self._stores.close(_DONE_S) and self._loads.close(_DONE_S)
        if ended:
            self._stores.poll()
            self._stores.check_books()
            self._loads.check_books()
        return ended
