"""LMCache's second level over a daemon of ours, and over LMCache's ``fs_native`` files, in turns.

Run by the interpreter of LMCache's environment. Both adapters come from LMCache's factory and copy
objects of one pool, which begin at its alignment. ``fs_native`` has its default of threads, and
opens files directly, so that it reads the drive.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvhearth_lab.bench.fronts.program import ABSENT_KEYS, SIDES, main

ALIGN_BYTES = 4096
ANSWER_S = 120.0
MODEL = "bench"
SPECS: dict[str, dict[str, Any]] = {
    "ours": {
        "type": "plugin",
        "module_path": "kvhearth.connectors.lmcache",
        "class_name": "KVHearthL2Adapter",
    },
    "theirs": {"type": "fs_native", "use_odirect": True},
}


class Side:
    """An adapter, driven as LMCache's controllers drive it: submit, wait for the descriptor, ask.

    Args:
        spec: as of ``--l2-adapter``.
        pool: the memory of all objects, uint8.
    """

    def __init__(self, spec: dict[str, Any], pool: Any) -> None:
        from lmcache.v1.distributed.internal_api import L1MemoryDesc
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

        words = argparse.Namespace(l2_adapter=[json.dumps(spec)])
        (config,) = parse_args_to_l2_adapters_config(words).adapters
        memory = L1MemoryDesc(pool.data_ptr(), pool.numel(), ALIGN_BYTES)
        self.adapter = create_l2_adapter(config, memory)

    def store(self, keys: list[Any], objects: list[Any]) -> None:
        """Store objects; raises RuntimeError unless all are."""
        adapter = self.adapter
        task, done = adapter.submit_store_task(keys, objects), dict[int, Any]()
        while task not in done:
            self._wait(adapter.get_store_event_fd())
            done |= adapter.pop_completed_store_tasks()
        if not done[task].is_successful():
            raise RuntimeError(f"{type(adapter).__name__}: a store failed")

    def lookup(self, keys: list[Any], layout: Any) -> int:
        """Look up and lock objects, and return the locks; the number of those that are there."""
        adapter = self.adapter
        task = adapter.submit_lookup_and_lock_task(keys, {0: layout})
        descriptor = adapter.get_lookup_and_lock_event_fd()
        found = self._result(descriptor, adapter.query_lookup_and_lock_result, task)
        there = [key for at, key in enumerate(keys) if found.test(at)]
        adapter.submit_unlock(there)
        return len(there)

    def load(self, keys: list[Any], objects: list[Any]) -> None:
        """Load objects; raises RuntimeError unless all are."""
        adapter = self.adapter
        task = adapter.submit_load_task(keys, objects)
        loaded = self._result(adapter.get_load_event_fd(), adapter.query_load_result, task)
        if not all(loaded.test(at) for at in range(len(keys))):
            raise RuntimeError(f"{type(adapter).__name__}: a load failed")

    def _result(self, descriptor: int, ask: Callable[[int], Any], task: int) -> Any:
        while (found := ask(task)) is None:
            self._wait(descriptor)
        return found

    @staticmethod
    def _wait(descriptor: int) -> None:
        from lmcache.v1.platform import consume_fd

        if not select.select([descriptor], [], [], ANSWER_S)[0]:
            raise TimeoutError("the adapter does not answer")
        consume_fd(descriptor)


class Pool:
    """A pool with objects to store and others to load into."""

    def __init__(self, page_bytes: int, pages: int) -> None:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc

        self.bytes = pages * page_bytes
        raw = torch.ones(2 * self.bytes + ALIGN_BYTES, dtype=torch.uint8)
        begin = -raw.data_ptr() % ALIGN_BYTES
        self.pool = raw[begin : begin + 2 * self.bytes]
        self.full, self.empty = self.pool.numpy().reshape(2, -1)
        self.full[:] = np.random.default_rng(1).integers(0, 256, self.bytes, np.uint8)
        self.spare = np.ones(self.bytes, np.uint8)
        # A layer's K and V of 16 tokens, in elements of two bytes.
        self.shape = torch.Size([2, 1, 16, page_bytes // 64])
        self.layout = MemoryLayoutDesc([self.shape], [torch.bfloat16])
        objects = [self._object(at * page_bytes, page_bytes) for at in range(2 * pages)]
        self.sources, self.targets = objects[:pages], objects[pages:]

    def _object(self, start: int, size: int) -> Any:
        import torch
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        meta = MemoryObjMetadata(
            self.shape,
            torch.bfloat16,
            start,
            size,
            1,
            fmt=MemoryFormat.KV_2LTD,
            shapes=[self.shape],
            dtypes=[torch.bfloat16],
        )
        return TensorMemoryObj(self.pool[start : start + size], meta, None)


def keys_of(name: str, count: int) -> list[Any]:
    """Return keys that no other name has."""
    from lmcache.v1.distributed.api import ObjectKey

    return [ObjectKey(f"{name}.{index}".encode().ljust(32), MODEL, 0) for index in range(count)]


class Jobs:
    """See ``program.Jobs``."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.pool = Pool(options.page_bytes, options.pages)
        self.bytes = self.pool.bytes
        given = {"ours": _params(options), "theirs": {"base_path": str(options.folder)}}
        self.sides = {side: Side({**SPECS[side], **given[side]}, self.pool.pool) for side in SIDES}

    def store(self, side: str, name: str) -> None:
        self.sides[side].store(self._keys(name), self.pool.sources)

    def exists(self, side: str, name: str) -> None:
        found = self.sides[side].lookup(self._keys(name), self.pool.layout)
        if found != len(self.pool.sources):
            raise RuntimeError(f"{side}: {found} stored objects are there")

    def blank(self) -> None:
        self.pool.empty[:] = 0

    def load(self, side: str, name: str) -> None:
        self.sides[side].load(self._keys(name), self.pool.targets)

    def compare(self) -> bool:
        return np.array_equal(self.pool.empty, self.pool.full)

    def copy(self, *, load: bool) -> None:
        pool = self.pool
        np.copyto(*((pool.empty, pool.spare) if load else (pool.spare, pool.full)))

    def facts(self) -> dict[str, Any]:
        return {
            "versions": {"lmcache": importlib.metadata.version("lmcache")},
            "settings": "one pool, objects of one rank; fs_native with O_DIRECT, not verified",
        }

    def close(self) -> None:
        for side in self.sides.values():
            side.adapter.close()

    def _keys(self, name: str) -> list[Any]:
        return keys_of(name, len(self.pool.sources))


@contextmanager
def absent(options: argparse.Namespace) -> Iterator[Callable[[int], float]]:
    """See ``program.Absent``."""
    pool = Pool(options.page_bytes, 1)
    side = Side({**SPECS["ours"], **_params(options)}, pool.pool)

    def look_up(number: int) -> float:
        keys = keys_of(f"absent {number}", ABSENT_KEYS)
        begun = time.perf_counter()
        found = side.lookup(keys, pool.layout)
        seconds = time.perf_counter() - begun
        if found:
            raise RuntimeError(f"{found} objects without a daemon")
        return seconds

    yield look_up
    side.adapter.close()


def _params(options: argparse.Namespace) -> dict[str, Any]:
    return {"adapter_params": {"url": options.url, "revision": MODEL}}


if __name__ == "__main__":
    os.environ.update(LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1")
    main(Jobs, absent)
