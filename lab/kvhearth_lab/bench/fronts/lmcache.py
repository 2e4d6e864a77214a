"""LMCache's second level over a daemon of ours, and over LMCache's ``fs_native`` files, in turns.

Run by the interpreter of LMCache's environment. Both adapters come from LMCache's factory and copy
objects of one pool, which begin at its alignment. ``fs_native`` has its default of threads, and
opens files directly, so that it reads the drive.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

ALIGN_BYTES = 4096
ABSENT_KEYS, ABSENT_WARM, ABSENT_CALLS = 8, 3, 100
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

Seconds = dict[str, dict[str, list[float]]]


class Counted(logging.Handler):
    """Counts warnings and worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a line."""
        self.count += 1


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


class Jobs:
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


def timed(seconds: list[float], work: Callable[[], object]) -> None:
    """Do work and append its time."""
    begun = time.perf_counter()
    work()
    seconds.append(time.perf_counter() - begun)


def drop_cache(folder: Path) -> None:
    """Let the files of a folder be read from their drive."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def one_round(
    jobs: Jobs, sides: dict[str, Side], name: str, move: Callable[[str], None], seconds: Seconds
) -> int:
    """Run one job through both sides; return the bytes that were compared.

    Args:
        name: of the keys.
        move: moves what a side has stored to its drive.
        seconds: receives the times.
    """
    count = len(jobs.sources)
    for side, driven in sides.items():
        keys = keys_of(f"{name}.{side}", count)
        timed(seconds["store"][side], functools.partial(driven.store, keys, jobs.sources))
        move(side)
        found = list[int]()
        timed(seconds["exists"][side], lambda: found.append(driven.lookup(keys, jobs.layout)))  # noqa: B023
        if found != [count]:
            raise RuntimeError(f"{side}: {found} of {count} stored objects are there")
        jobs.empty[:] = 0
        timed(seconds["load"][side], functools.partial(driven.load, keys, jobs.targets))
        if not np.array_equal(jobs.empty, jobs.full):
            raise RuntimeError(f"{side}: loaded bytes differ from stored ones")
    timed(seconds["store"]["copy"], lambda: np.copyto(jobs.spare, jobs.full))
    timed(seconds["load"]["copy"], lambda: np.copyto(jobs.empty, jobs.spare))
    return len(sides) * jobs.bytes


def compare_both(options: argparse.Namespace, answer: TextIO) -> dict[str, Any]:
    """Return the seconds of all measured rounds."""
    jobs = Jobs(options.page_bytes, options.pages)
    given: dict[str, dict[str, Any]] = {
        "ours": {"adapter_params": {"url": options.url, "revision": MODEL}},
        "theirs": {"base_path": str(options.folder)},
    }
    sides = {side: Side({**SPECS[side], **given[side]}, jobs.pool) for side in SPECS}

    def move(side: str) -> None:
        if options.ssd and side == "theirs":
            drop_cache(options.folder)
        elif options.ssd:
            print("evict", file=answer, flush=True)
            if not sys.stdin.readline():
                raise SystemExit("the caller has gone")

    compared = 0
    for turn in range(options.rounds + 1):
        if turn <= 1:  # the first round is not measured
            seconds: Seconds = {
                "store": {"ours": [], "theirs": [], "copy": []},
                "load": {"ours": [], "theirs": [], "copy": []},
                "exists": {"ours": [], "theirs": []},
            }
        order = dict(list(sides.items())[:: 1 if turn % 2 else -1])
        compared += one_round(jobs, order, str(turn), move, seconds)
        for path in options.folder.rglob("*.data"):
            path.unlink()
    for side in sides.values():
        side.adapter.close()
    return {
        "versions": {"lmcache": importlib.metadata.version("lmcache")},
        "settings": "one pool, objects of one rank; fs_native with O_DIRECT, not verified",
        "bytes": jobs.bytes,
        "seconds": seconds,
        "compared_bytes": compared,
    }


def without_daemon(options: argparse.Namespace) -> dict[str, Any]:
    """Return the times of calls while no daemon runs, and the warnings of all of them."""
    counted = Counted()
    logging.getLogger("kvhearth").addHandler(counted)
    jobs = Jobs(options.page_bytes, 1)
    params = {"adapter_params": {"url": options.url, "revision": MODEL}}
    side, seconds = Side({**SPECS["ours"], **params}, jobs.pool), list[float]()
    for call in range(ABSENT_WARM + ABSENT_CALLS):
        keys = keys_of(f"absent {call}", ABSENT_KEYS)
        begun = time.perf_counter()
        found = side.lookup(keys, jobs.layout)
        seconds.append(time.perf_counter() - begun)
        if found:
            raise RuntimeError(f"{found} objects without a daemon")
    side.adapter.close()
    return {"absent_s": seconds[ABSENT_WARM:], "logged": counted.count}


def main(words: Sequence[str] | None = None) -> None:
    """Run and print one JSON object as the last line; LMCache's own lines go to standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("--page-bytes", "--pages", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--ssd", action="store_true")
    parser.add_argument("--absent", action="store_true")
    options = parser.parse_args(words)
    os.environ.update(LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1")
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        found = without_daemon(options) if options.absent else compare_both(options, answer)
        print(json.dumps(found), file=answer, flush=True)


if __name__ == "__main__":
    main()
