"""Adapter of LMCache's second-level ``fs_native`` store, which keeps one file a block.

C++ threads write and read directly (``use_odirect``, off by default; without it the page cache
serves reads). Nothing is verified on load; neither it nor the bench flushes.
"""

from __future__ import annotations

import importlib.metadata
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvhearth_lab.bench.peers.adapters.harness import U8, Config, FilePeer

_WORKERS = 4
"""LMCache's default."""
_DEADLINE_S = 60.0


class Peer(FilePeer):
    """See ``harness.Peer``."""

    def __init__(self) -> None:
        super().__init__()
        self._adapter: Any = None
        self._keys: list[Any] = []
        self._objects: dict[str, list[Any]] = {}
        self._stores = 0

    def start(self, config: Config) -> Mapping[str, Any]:
        os.environ.update(LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1")
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
        import torch
        from lmcache.v1.distributed.l2_adapters import fs_native_l2_adapter as fs

        kind = self.prepare(config)
        made = fs.FSNativeL2AdapterConfig(str(self.folder), num_workers=_WORKERS, use_odirect=True)
        self._adapter = fs._create_fs_native_l2_adapter(made)
        for name, blocks in (("source", self.source), ("target", self.target)):
            self._objects[name] = [self._object(blocks[page]) for page in self.pages]
        return {
            "versions": {
                "lmcache": importlib.metadata.version("lmcache"),
                "torch": torch.__version__,
                "python": sys.version.split()[0],
            },
            "settings": f"fs_native, {_WORKERS} workers, O_DIRECT, a file a block, not verified",
            "pages": kind,
            "leftovers": [],
        }

    def close(self) -> None:
        if self._adapter is not None:
            self._adapter.close()

    def store(self) -> float:
        from lmcache.v1.distributed.api import ObjectKey

        self._stores += 1
        self._keys = [
            ObjectKey(b"%032d" % (self._stores * 1_000_000 + page), "bench", 0)
            for page in self.pages
        ]
        start = time.perf_counter()
        task = self._adapter.submit_store_task(self._keys, self._objects["source"])
        done = self._wait(self._adapter.get_store_event_fd(), self._stored, task)
        seconds = time.perf_counter() - start
        if not done.is_successful():
            raise RuntimeError("a store failed")
        return seconds

    def _stored(self, task: int) -> Any:
        return self._adapter.pop_completed_store_tasks().get(task)

    def load(self) -> float:
        start = time.perf_counter()
        task = self._adapter.submit_load_task(self._keys, self._objects["target"])
        fd = self._adapter.get_load_event_fd()
        found = self._wait(fd, self._adapter.query_load_result, task)
        seconds = time.perf_counter() - start
        if not all(found.test(row) for row in range(len(self._keys))):
            raise RuntimeError("a load failed")
        return seconds

    @staticmethod
    def _wait(fd: int, ask: Callable[[int], Any], task: int) -> Any:
        end = time.monotonic() + _DEADLINE_S
        while (answer := ask(task)) is None:
            if time.monotonic() > end:
                raise TimeoutError("the adapter does not answer")
            if select.select([fd], [], [], 1.0)[0]:
                os.read(fd, 8)
        return answer

    @staticmethod
    def _object(block: U8) -> Any:
        import torch
        from lmcache.v1.memory_management import (
            MemoryFormat,
            MemoryObjMetadata,
            TensorMemoryObj,
        )

        tensor = torch.from_numpy(block.view(np.uint8))
        meta = MemoryObjMetadata(
            tensor.shape, torch.uint8, tensor.data_ptr(), len(block), 1, fmt=MemoryFormat.KV_2LTD
        )
        return TensorMemoryObj(tensor, meta, None)
