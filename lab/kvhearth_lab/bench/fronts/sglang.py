"""SGLang's HiCache over a daemon of ours, and over SGLang's own files, in turns.

Run by the interpreter of SGLang's environment. The host pool, the factory and the file back end are
SGLang's; the calls are those of its controller: in place for us, through a tensor a page for files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

PAGE_TOKENS, HEADS, DIM = 16, 8, 128
LAYER_BYTES = 2 * PAGE_TOKENS * HEADS * DIM * 2
"""Bytes that a page has of one layer: K and V in bfloat16."""
ABSENT_KEYS, ABSENT_WARM, ABSENT_CALLS = 8, 3, 100
BOTH = ("ours", "theirs")
MODEL = "bench"

Seconds = dict[str, dict[str, list[float]]]


class Counted(logging.Handler):
    """Counts warnings and worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a line."""
        self.count += 1


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
    """The jobs of both sides on one host pool: pages to store, and others to load into."""

    def __init__(self, url: str, page_bytes: int, pages: int) -> None:
        self.pool = host_pool(page_bytes, 2 * pages)
        self.pages = pages
        self.full, self.empty = (self.pool.alloc(pages * PAGE_TOKENS) for _ in range(2))
        bits = self.pool.kv_buffer.view(dtype=self._bits())
        bits.random_(-30000, 30000)
        self.memory = bits.numpy().reshape(2, -1)
        self.half = pages * PAGE_TOKENS * (self.memory.shape[1] // int(self.pool.size))
        self.spare = np.ones((2, self.half), self.memory.dtype)
        self.sides = {"ours": ours(url, self.pool), "theirs": backend("file", self.pool, {})}

    @staticmethod
    def _bits() -> Any:
        import torch

        return torch.int16

    def batches(self) -> list[slice]:
        """Return the slices of keys that one call of SGLang's controller takes."""
        from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE as SIZE

        return [slice(start, start + SIZE) for start in range(0, self.pages, SIZE)]

    def store(self, side: str, keys: Sequence[str]) -> None:
        """Store a job."""
        for part in self.batches():
            indices = self._indices(self.full, part)
            if side == "ours":
                good = all(self.sides[side].batch_set_v1(keys[part], indices))
            else:
                pages = [self.pool.get_data_page(index) for index in indices[::PAGE_TOKENS]]
                good = self.sides[side].batch_set(keys[part], pages)
            if not good:
                raise RuntimeError(f"{side}: a store failed")

    def load(self, side: str, keys: Sequence[str]) -> None:
        """Load a job into other pages."""
        for part in self.batches():
            indices = self._indices(self.empty, part)
            if side == "ours":
                good = all(self.sides[side].batch_get_v1(keys[part], indices))
            else:
                blank = [self.pool.get_dummy_flat_data_page() for _ in keys[part]]
                pages = self.sides[side].batch_get(keys[part], blank)
                good = all(page is not None for page in pages)
                for index, page in zip(indices[::PAGE_TOKENS], pages, strict=True):
                    self.pool.set_from_flat_data_page(index, page)
            if not good:
                raise RuntimeError(f"{side}: a load failed")

    def exists(self, side: str, keys: Sequence[str]) -> None:
        """Look all keys of a job up."""
        if self.sides[side].batch_exists(keys) != len(keys):
            raise RuntimeError(f"{side}: stored pages are not there")

    def copy(self, *, load: bool) -> None:
        """Copy as many bytes as a job has: out of the pool's pages, or into them."""
        if load:
            np.copyto(self.memory[:, self.half : 2 * self.half], self.spare)
        else:
            np.copyto(self.spare, self.memory[:, : self.half])

    def blank(self) -> None:
        """Overwrite the pages to load into."""
        self.memory[:, self.half :] = 0

    def compare(self, side: str) -> int:
        """Compare loaded pages with stored ones; return their bytes."""
        stored, loaded = self.memory[:, : self.half], self.memory[:, self.half : 2 * self.half]
        if not np.array_equal(stored, loaded):
            raise RuntimeError(f"{side}: loaded bytes differ from stored ones")
        return int(stored.nbytes)

    @staticmethod
    def _indices(indices: Any, part: slice) -> Any:
        return indices[part.start * PAGE_TOKENS : part.stop * PAGE_TOKENS]


def drop_cache(folder: Path) -> None:
    """Let the files of a folder be read from their drive."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def timed(seconds: list[float], work: Callable[[], object]) -> None:
    """Do work and append its time."""
    begun = time.perf_counter()
    work()
    seconds.append(time.perf_counter() - begun)


def one_round(
    jobs: Jobs, turn: int, evict: Callable[[], None] | None, folder: Path, seconds: Seconds
) -> int:
    """Run one job through both sides; return the bytes that were compared."""
    compared = 0
    for side in BOTH if turn % 2 else BOTH[::-1]:
        keys = keys_of(f"{turn}.{side}", jobs.pages)
        timed(seconds["store"][side], lambda: jobs.store(side, keys))  # noqa: B023
        if evict is not None and side == "ours":
            evict()
        elif evict is not None:
            drop_cache(folder)
        timed(seconds["exists"][side], lambda: jobs.exists(side, keys))  # noqa: B023
        jobs.blank()
        timed(seconds["load"][side], lambda: jobs.load(side, keys))  # noqa: B023
        compared += jobs.compare(side)
    jobs.sides["theirs"].clear()
    timed(seconds["store"]["copy"], lambda: jobs.copy(load=False))
    timed(seconds["load"]["copy"], lambda: jobs.copy(load=True))
    return compared


def compare_both(options: argparse.Namespace, answer: TextIO) -> dict[str, Any]:
    """Return the seconds of all measured rounds."""
    from sglang.version import __version__ as version

    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(options.folder)
    jobs = Jobs(options.url, options.page_bytes, options.pages)

    def evict() -> None:
        print("evict", file=answer, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("the caller has gone")

    compared = 0
    for turn in range(options.rounds + 1):
        if turn <= 1:  # the first round is not measured
            seconds: Seconds = {
                kind: {side: [] for side in (*BOTH, *extra)}
                for kind, extra in (("store", ["copy"]), ("load", ["copy"]), ("exists", []))
            }
        compared += one_round(jobs, turn, evict if options.ssd else None, options.folder, seconds)
    jobs.sides["ours"].close()
    return {
        "versions": {"sglang": version},
        "settings": "page_first, unpinned host pool; batches of 128 pages; file back end, raw",
        "bytes": options.pages * options.page_bytes,
        "seconds": seconds,
        "compared_bytes": compared,
    }


def without_daemon(options: argparse.Namespace) -> dict[str, Any]:
    """Return the times of calls while no daemon runs, and the warnings of all of them."""
    counted = Counted()
    logging.getLogger("kvhearth").addHandler(counted)
    store = ours(options.url, host_pool(options.page_bytes, options.pages))
    seconds: list[float] = []
    for call in range(ABSENT_WARM + ABSENT_CALLS):
        keys = keys_of(f"absent {call}", ABSENT_KEYS)
        begun = time.perf_counter()
        found = store.batch_exists(keys)
        seconds.append(time.perf_counter() - begun)
        if found:
            raise RuntimeError(f"{found} pages without a daemon")
    store.close()
    return {"absent_s": seconds[ABSENT_WARM:], "logged": counted.count}


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("--page-bytes", "--pages", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--ssd", action="store_true")
    parser.add_argument("--absent", action="store_true")
    options = parser.parse_args(words)
    if options.page_bytes % LAYER_BYTES or not options.page_bytes:
        parser.error(f"--page-bytes must be a multiple of {LAYER_BYTES}")
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Run and print one JSON object as the last line; SGLang's own lines go to standard error."""
    options = parsed(words)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        from sglang.srt.runtime_context import get_context

        get_context().override_server_args(model_path=MODEL, load_format="auto").install()
        found = without_daemon(options) if options.absent else compare_both(options, answer)
        print(json.dumps(found), file=answer, flush=True)


if __name__ == "__main__":
    main()
