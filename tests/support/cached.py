"""A single-process engine on the simple API, whose pages' bytes follow from their keys."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvhearth import Cache, LoadResult, PagedKV, Pages, StoreResult, Transfer, connect
from kvhearth.copiers.host import HostCopier
from kvhearth.model import U8, Bools
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import content, contract_of

PAGE_BYTES = 64 * 1024
BLOCK_TOKENS = 16
CONTRACT = contract_of(PAGE_BYTES)
POOL_PAGES = 600


def computed(keys: Sequence[bytes]) -> U8:
    """Return the blocks of ``keys``, shape (n, PAGE_BYTES)."""
    blocks = [content(key, 0, 0, PAGE_BYTES) for key in keys]
    return np.array(blocks, np.uint8).reshape(-1, PAGE_BYTES)


def wrong_bytes(keys: Sequence[bytes], blocks: Sequence[U8] | U8, loaded: Bools) -> list[str]:
    """Return the keys whose blocks are reported as loaded and have other bytes."""
    pairs = zip(keys, blocks, loaded, strict=True)
    return [
        key.hex()
        for key, block, flag in pairs
        if flag and not np.array_equal(block, content(key, 0, 0, PAGE_BYTES))
    ]


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

    def store_now(self, *arguments: Any) -> Any:
        """Wait for the gate, then store."""
        cls = GateCopier
        cls.stores += 1
        cls.on_store(cls.stores)
        assert cls.gate.wait(HUNG_S)
        return super().store_now(*arguments)


class CachedEngine:
    """Computes blocks, stores them, loads them elsewhere, and compares every byte.

    Each further transfer uses another kind of pages: an array, a list, a pool.
    """

    def __init__(self, url: str, *, engine_id: str = "e", **options: Any) -> None:
        self.client = client = connect(url, CONTRACT, engine_id=engine_id)
        self.cache = Cache(
            client, **{"queue_blocks_max": 256, "batch_bytes": 16 * PAGE_BYTES, **options}
        )
        self._pool = np.zeros((POOL_PAGES, PAGE_BYTES), np.uint8)
        self._kv = PagedKV([self._pool])
        self._turn = 0
        self._begun: list[Transfer[Any]] = []
        self.wrong: list[str] = []

    def begin_store(
        self, keys: Sequence[bytes], parent: bytes | None = None
    ) -> Transfer[StoreResult]:
        """Compute and begin to store."""
        future = self.cache.store(keys, computed(keys), parent=parent)
        self._begun.append(future)
        return future

    def begin_load(self, keys: Sequence[bytes], wait_s: float = 0.0) -> Transfer[LoadResult]:
        """Begin to load into pages of their own; the loaded bytes are compared at the end."""
        self._turn += 1
        blocks: Any = np.zeros((len(keys), PAGE_BYTES), np.uint8)
        pages: Any = blocks
        if self._turn % 3 == 1:
            pages = blocks = list(blocks)
        elif self._turn % 3 == 2 and len(keys) <= POOL_PAGES:
            blocks = np.zeros((len(keys), PAGE_BYTES), np.uint8)
            pages = Pages(PagedKV([blocks]), np.arange(len(keys)))
        future = self.cache.load(keys, pages, wait_s=wait_s)
        self._begun.append(future)

        def compare(done: Any) -> None:
            if not done.cancelled():
                self.wrong += wrong_bytes(keys, blocks, done.result().loaded)

        future.add_done_callback(compare)
        return future

    def store(self, keys: Sequence[bytes], parent: bytes | None = None) -> StoreResult:
        """Compute, store and wait; a third of the stores are of a pool's pages."""
        self._turn += 1
        if self._turn % 3 or len(keys) > POOL_PAGES:
            return self.begin_store(keys, parent).result(HUNG_S)
        numbers = np.random.default_rng(self._turn).permutation(POOL_PAGES)[: len(keys)]
        self._pool[numbers] = computed(keys)
        return self.cache.store(keys, Pages(self._kv, numbers), parent=parent).result(HUNG_S)

    def load(self, keys: Sequence[bytes], wait_s: float = 0.0) -> LoadResult:
        """Load ``keys`` and compare the loaded bytes."""
        return self.begin_load(keys, wait_s).result(HUNG_S)

    def loadable(self, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys`` load correctly, one by one."""
        return sum(int(self.load([key]).loaded[0]) for key in keys)

    def counter(self, name: str) -> int:
        """Return one of the client's counters."""
        return self.client.counters().get(name, 0)

    def close(self) -> None:
        """Close everything; fails if a wrong byte was served or a transfer has no outcome."""
        assert self.cache.close(HUNG_S)
        assert all(future.done() for future in self._begun)
        assert self.wrong == []


@contextlib.contextmanager
def cached_engine(url: str, *, ready: bool = True, **options: Any) -> Iterator[CachedEngine]:
    """Yield an engine, and close it at the end."""
    engine = CachedEngine(url, **options)
    try:
        assert not ready or engine.client.wait_ready(HUNG_S)
        yield engine
    except BaseException:
        print(engine.client.counters())
        raise
    finally:
        GateCopier.gate.set()
        engine.close()
