"""A single-process engine on pipelines, whose pages' bytes follow from their keys."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvhearth import connect
from kvhearth.copiers.host import HostCopier
from kvhearth.page_layout import PagedKV
from kvhearth.transfer import LoadDone, LoadPipeline, StoreDone, StorePipeline
from support.engine import content, contract_of
from support.threads import left_since, own_threads

PAGE_BYTES = 64 * 1024
BLOCK_TOKENS = 16
PAGES = 512
CONTRACT = contract_of(PAGE_BYTES)
DONE_S = 20.0


def new_keys(count: int) -> list[bytes]:
    """Return random keys that no cache has."""
    return [secrets.token_bytes(32) for _ in range(count)]


class GateCopier(HostCopier):
    """Begins no store while the gate is shut; reports each store's number before it begins."""

    gate = threading.Event()
    on_store: Callable[[int], None] = staticmethod(lambda number: None)
    stores = 0

    @classmethod
    def reset(cls) -> None:
        """Open the gate and forget all stores."""
        cls.gate.set()
        cls.on_store = staticmethod(lambda number: None)
        cls.stores = 0

    def store(self, *arguments: Any, **options: Any) -> Any:
        cls = type(self)
        cls.stores += 1
        cls.on_store(cls.stores)
        assert cls.gate.wait(DONE_S)
        return super().store(*arguments, **options)


class PipedEngine:
    """Computes pages, stores them, loads them elsewhere, and compares every byte.

    Pages below ``PAGES`` are written by ``compute`` and read by stores; loads go to others.
    """

    def __init__(self, url: str, **store: Any) -> None:
        self._others = own_threads()
        self.client = client = connect(url, CONTRACT, engine_id="e")
        self.pages = np.zeros((2 * PAGES, PAGE_BYTES), np.uint8)
        kv = {0: PagedKV([self.pages])}
        options = {"queue_blocks_max": 256, "stock_blocks_max": 16, "batch_blocks": 16, **store}
        self.stores = StorePipeline(client, kv, **options)
        self.loads = LoadPipeline(client, kv)
        self.wrong: list[str] = []

    def compute(self, keys: Sequence[bytes], first_page: int = 0) -> np.ndarray[Any, Any]:
        """Fill and return the pages of ``keys``."""
        for page, key in enumerate(keys, first_page):
            self.pages[page] = content(key, 0, 0, PAGE_BYTES)
        return np.arange(first_page, first_page + len(keys))

    def store(self, keys: Sequence[bytes], parent: bytes = b"") -> StoreDone:
        """Compute, store and wait."""
        ticket = self.stores.submit(0, keys, self.compute(keys), parent, wait_s=DONE_S)
        assert ticket is not None, "the queue stays full"
        done = self.stores.wait(ticket, DONE_S)
        assert done is not None, "a store hangs"
        return done

    def load(self, keys: Sequence[bytes]) -> LoadDone:
        """Load ``keys`` (``PAGES`` at most) into pages of their own and compare the loaded
        bytes.
        """
        pages = np.arange(PAGES, PAGES + len(keys))
        self.pages[pages] = 0
        done = self.loads.load_now({0: (keys, pages)}, deadline_s=DONE_S)
        assert done is not None, "a load hangs"
        for page, key, loaded in zip(pages, keys, done.loaded[0], strict=True):
            if loaded and not np.array_equal(self.pages[page], content(key, 0, 0, PAGE_BYTES)):
                self.wrong.append(f"page {page} does not hold {key.hex()}")
        return done

    def loadable(self, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys`` load correctly, one by one."""
        return sum(int(self.load([key]).loaded[0][0]) for key in keys)

    def counter(self, name: str) -> int:
        """Return one of the client's counters."""
        return self.client.counters().get(name, 0)

    def close(self) -> None:
        """Close everything; fails if a wrong byte was served or a request was lost."""
        assert self.stores.close(DONE_S)
        assert self.loads.close(DONE_S)
        self.stores.poll()
        self.stores.check_books()
        self.loads.check_books()
        assert self.client.close(DONE_S)
        assert self.wrong == []
        assert left_since(self._others) == []


@contextlib.contextmanager
def piped_engine(url: str, *, ready: bool = True, **store: Any) -> Iterator[PipedEngine]:
    """Yield an engine, and close it at the end."""
    engine = PipedEngine(url, **store)
    try:
        assert not ready or engine.client.wait_ready(DONE_S)
        yield engine
    except BaseException:
        print(engine.client.counters())
        raise
    finally:
        GateCopier.gate.set()
        engine.close()
