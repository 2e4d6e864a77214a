"""Jobs of vLLM's offloading over ``KVHearthTier`` and over vLLM's file tier, in turns.

Runs in the engine's environment: ``python -m kvhearth_lab.bench.fronts.vllm_tier``. A plain copy of
as many bytes stands beside each job. Every loaded byte is compared.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvhearth.model import U8
from kvhearth_lab.bench.fronts.program import ABSENT_KEYS, main

_JOB_BYTES = 64 << 20
"""Size of a job, about the part of a request that a step brings; one thread of theirs does it."""
_DEADLINE_S = 120.0
_POLL_S = 0.0002


class Jobs:
    """See ``program.Jobs``. Both tiers are over one memory, as vLLM's primary tier has: its first
    half is stored from, the second loaded to.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self.pages, self.bytes = options.pages, options.pages * options.page_bytes
        self.rows = _memory(options)
        full = self.rows[: self.pages]
        full[:] = np.random.default_rng(1).integers(0, 256, full.shape, np.uint8)
        self.spare = np.ones_like(full)
        files = FileSystemTierManager(_spec(), self.rows.data, "fs", str(options.folder))
        self.sides: dict[str, Any] = {"ours": _ours(options, self.rows), "theirs": files}
        self._jobs = 0

    def store(self, side: str, name: str) -> None:
        self._move(side, name, load=False)

    def load(self, side: str, name: str) -> None:
        self._move(side, name, load=True)

    def _move(self, side: str, name: str, *, load: bool) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        tier, keys = self.sides[side], _keys(name, self.pages)
        submit, first_row = (tier.submit_load, self.pages) if load else (tier.submit_store, 0)
        out: set[int] = set()
        job_chunks = max(_JOB_BYTES // self.rows.shape[1], 1)
        for first in range(0, self.pages, job_chunks):
            some = keys[first : first + job_chunks]
            chunks = np.arange(first_row + first, first_row + first + len(some))
            self._jobs += 1
            out.add(self._jobs)
            submit(TransferJob(self._jobs, some, chunks, load, ReqContext(req_id="bench")))
        end = time.monotonic() + _DEADLINE_S
        while out:
            for job in tier.get_finished_jobs():
                if not job.success:
                    raise RuntimeError(f"{side}: a job failed")
                out.discard(job.job_id)
            if time.monotonic() > end:
                raise TimeoutError(f"{side}: the tier does not answer")
            time.sleep(_POLL_S)

    def exists(self, side: str, name: str) -> None:
        answers = _looked_up(self.sides[side], _keys(name, self.pages), name)
        if answers != {"HIT"}:
            raise RuntimeError(f"{side}: stored chunks are {answers}")

    def blank(self) -> None:
        self.rows[self.pages :] = 0

    def compare(self) -> bool:
        return np.array_equal(self.rows[: self.pages], self.rows[self.pages :])

    def copy(self, *, load: bool) -> None:
        full, empty = self.rows[: self.pages], self.rows[self.pages :]
        np.copyto(*((empty, self.spare) if load else (self.spare, full)))

    def facts(self) -> dict[str, Any]:
        from vllm.v1.kv_offload.tiering.fs import io

        direct = "O_DIRECT" if self.sides["theirs"]._use_o_direct else "page cache"
        return {
            "versions": {"vllm": importlib.metadata.version("vllm")},
            "settings": f"jobs of {_JOB_BYTES >> 20} MiB; file tier: 16 + 16 threads, a file a "
            f"chunk, loops in {'C' if io._HAS_FSIO_C else 'Python'}, {direct}",
        }

    def close(self) -> None:
        for tier in self.sides.values():
            tier.shutdown()


def _looked_up(tier: Any, keys: list[Any], request: str) -> set[str]:
    """Look keys up as the scheduler does, until each is answered; return the answers."""
    from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

    context, end = ReqContext(req_id=request), time.monotonic() + _DEADLINE_S
    while "RETRY" in (found := {tier.lookup(key, context).name for key in keys}):
        if time.monotonic() > end:
            raise TimeoutError(f"{type(tier).__name__} does not answer")
        tier.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(_POLL_S)
    tier.on_request_finished(context)
    return found


@contextmanager
def absent(options: argparse.Namespace) -> Iterator[Callable[[int], float]]:
    """See ``program.Absent``. The time is that of the scheduler's step which asks."""
    from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

    tier = _ours(options, _memory(options))

    def look_up(number: int) -> float:
        context = ReqContext(req_id=f"asks {number}")
        keys = _keys(f"absent {number}", ABSENT_KEYS)
        start = time.perf_counter()
        for key in keys:
            tier.lookup(key, context)
        tier.on_schedule_end(ScheduleEndContext((), ()))
        seconds = time.perf_counter() - start
        tier.on_request_finished(context)
        if (found := _looked_up(tier, keys, f"sees {number}")) != {"MISS"}:
            raise RuntimeError(f"without a daemon lookups say {found}")
        return seconds

    yield look_up
    tier.shutdown()


def _ours(options: argparse.Namespace, rows: U8) -> Any:
    from kvhearth.connectors.vllm.tier import KVHearthTier

    # A busy machine must not turn a hit into a miss.
    url = f"{options.url}{'&' if '?' in options.url else '?'}lookup_ms=20000"
    return KVHearthTier(_spec(), rows.data, "KVHearthTier", url=url, on_reset="drop")


def _memory(options: argparse.Namespace) -> U8:
    """Return memory as the primary tier's: shared, of 4 KiB pages, all there before the first job.

    Returns:
        (2 * pages, page_bytes)
    """
    memory = mmap.mmap(-1, 2 * options.pages * options.page_bytes)
    rows: U8 = np.frombuffer(memory, np.uint8).reshape(2 * options.pages, options.page_bytes)
    rows[:] = 1
    return rows


def _spec() -> Any:
    """Return the part of an engine's settings that the tiers read."""
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig

    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
    )
    config = SimpleNamespace(
        groups=(),
        engine_id="bench",
        model=SimpleNamespace(name="bench", dtype="uint8"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=None,
    )
    silent = OffloadingKVEventsConfig(False, False)
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=silent)


def _keys(name: str, count: int) -> list[Any]:
    """Return keys that no other name has."""
    from vllm.v1.kv_offload.base import make_offload_key

    hashes = (hashlib.sha256(f"{name}.{index}".encode()).digest() for index in range(count))
    return [make_offload_key(each, 0) for each in hashes]


if __name__ == "__main__":
    os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    main(Jobs, absent)
