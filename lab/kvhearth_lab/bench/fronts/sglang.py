"""SGLang's HiCache over a daemon of ours, and over SGLang's own files, in turns.

Run by the interpreter of SGLang's environment. The host pool, the factory and the file back end are
SGLang's; the calls are those of its controller: in place for us, through a tensor a page for files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvhearth_lab.bench.fronts.program import ABSENT_KEYS, main

PAGE_TOKENS, HEADS, DIM = 16, 8, 128
LAYER_BYTES = 2 * PAGE_TOKENS * HEADS * DIM * 2
"""Bytes that a page has of one layer: K and V in bfloat16."""
MODEL = "bench"


def host_pool(page_bytes: int, pages: int) -> Any:
    """Return SGLang's host pool of at least ``pages`` pages, whose device pool is never used."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    layers = page_bytes // LAYER_BYTES
    device = tuple(torch.zeros(1, HEADS, DIM, dtype=torch.bfloat16) for _ in range(layers))
    places = torch.tensor([each.data_ptr() for each in device], dtype=torch.uint64)
    buffers = KVBuffers(
        k=device, v=device, k_data_ptrs=places, v_data_ptrs=places, layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE_TOKENS,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        PAGE_TOKENS,
        "page_first",
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=pages * PAGE_TOKENS,
        start_layer=0,
        end_layer=layers - 1,
    )


def backend(kind: str, pool: Any, extra: dict[str, Any]) -> Any:
    """Return a back end of SGLang's factory."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=MODEL,
        extra_config=extra,
    )
    made = StorageBackendFactory.create_backend(kind, config, pool)
    made.register_mem_pool_host(pool)
    return made


def ours(url: str, pool: Any) -> Any:
    """Return our back end."""
    return backend(
        "dynamic",
        pool,
        {
            "backend_name": "kvhearth",
            "module_path": "kvhearth.connectors.sglang",
            "class_name": "KVHearthHiCache",
            "interface_v1": 1,
            "url": url,
            "revision": MODEL,
        },
    )


def keys_of(name: str, count: int) -> list[str]:
    """Return page hashes that no other name has."""
    return [hashlib.sha256(f"{name}.{index}".encode()).hexdigest() for index in range(count)]


class Jobs:
    """See ``program.Jobs``; all on one host pool."""

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(options.folder)
        _install()
        self.pages = options.pages
        self.bytes = options.pages * options.page_bytes
        self.pool = host_pool(options.page_bytes, 2 * self.pages)
        self.full, self.empty = (self.pool.alloc(self.pages * PAGE_TOKENS) for _ in range(2))
        bits = self.pool.kv_buffer.view(dtype=self._bits())
        bits.random_(-30000, 30000)
        self.memory = bits.numpy().reshape(2, -1)
        self.half = self.pages * PAGE_TOKENS * (self.memory.shape[1] // int(self.pool.size))
        self.spare = np.ones((2, self.half), self.memory.dtype)
        self.sides = {
            "ours": ours(options.url, self.pool),
            "theirs": backend("file", self.pool, {}),
        }

    @staticmethod
    def _bits() -> Any:
        import torch

        return torch.int16

    def batches(self) -> list[slice]:
        """Return the slices of keys that one call of SGLang's controller takes."""
        from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE as SIZE

        return [slice(start, start + SIZE) for start in range(0, self.pages, SIZE)]

    def store(self, side: str, name: str) -> None:
        for keys, part in self._batches(name):
            indices = self._indices(self.full, part)
            if side == "ours":
                good = all(self.sides[side].batch_set_v1(keys, indices))
            else:
                pages = [self.pool.get_data_page(index) for index in indices[::PAGE_TOKENS]]
                good = self.sides[side].batch_set(keys, pages)
            if not good:
                raise RuntimeError(f"{side}: a store failed")

    def load(self, side: str, name: str) -> None:
        for keys, part in self._batches(name):
            indices = self._indices(self.empty, part)
            if side == "ours":
                good = all(self.sides[side].batch_get_v1(keys, indices))
            else:
                blank = [self.pool.get_dummy_flat_data_page() for _ in keys]
                pages = self.sides[side].batch_get(keys, blank)
                good = all(page is not None for page in pages)
                for index, page in zip(indices[::PAGE_TOKENS], pages, strict=True):
                    self.pool.set_from_flat_data_page(index, page)
            if not good:
                raise RuntimeError(f"{side}: a load failed")

    def exists(self, side: str, name: str) -> None:
        if self.sides[side].batch_exists(keys_of(name, self.pages)) != self.pages:
            raise RuntimeError(f"{side}: stored pages are not there")

    def copy(self, *, load: bool) -> None:
        if load:
            np.copyto(self.memory[:, self.half : 2 * self.half], self.spare)
        else:
            np.copyto(self.spare, self.memory[:, : self.half])

    def blank(self) -> None:
        self.memory[:, self.half :] = 0

    def compare(self) -> bool:
        stored, loaded = self.memory[:, : self.half], self.memory[:, self.half : 2 * self.half]
        return np.array_equal(stored, loaded)

    def facts(self) -> dict[str, Any]:
        from sglang.version import __version__ as version

        return {
            "versions": {"sglang": version},
            "settings": "page_first, unpinned host pool; batches of 128 pages; file back end, raw",
        }

    def close(self) -> None:
        self.sides["ours"].close()

    def _batches(self, name: str) -> Iterator[tuple[Sequence[str], slice]]:
        """Yield the keys that one call of SGLang's controller takes, and their places."""
        from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE as SIZE

        keys = keys_of(name, self.pages)
        for start in range(0, self.pages, SIZE):
            part = slice(start, start + SIZE)
            yield keys[part], part

    @staticmethod
    def _indices(indices: Any, part: slice) -> Any:
        return indices[part.start * PAGE_TOKENS : part.stop * PAGE_TOKENS]


@contextmanager
def absent(options: argparse.Namespace) -> Iterator[Callable[[int], float]]:
    """See ``program.Absent``."""
    _install()
    store = ours(options.url, host_pool(options.page_bytes, options.pages))

    def look_up(number: int) -> float:
        keys = keys_of(f"absent {number}", ABSENT_KEYS)
        begun = time.perf_counter()
        found = store.batch_exists(keys)
        seconds = time.perf_counter() - begun
        if found:
            raise RuntimeError(f"{found} pages without a daemon")
        return seconds

    yield look_up
    store.close()


def _install() -> None:
    """Give SGLang the arguments of a server."""
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args(model_path=MODEL, load_format="auto").install()


if __name__ == "__main__":
    main(Jobs, absent)
