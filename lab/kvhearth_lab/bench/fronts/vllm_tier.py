"""Jobs of vLLM's offloading over ``KVHearthTier`` and over vLLM's file tier, in turns.

Runs in the engine's environment: ``python -m kvhearth_lab.bench.fronts.vllm_tier``. A plain copy of
as many bytes stands beside each job. Every loaded byte is compared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import mmap
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvhearth.model import U8

_JOB_BYTES = 64 << 20
"""Size of a job, about the part of a request that a step brings; one thread of theirs does it."""
_DEADLINE_S = 120.0
_POLL_S = 0.0002
_ABSENT_CALLS, _UNMEASURED, _ABSENT_KEYS = 100, 3, 8


class Side:
    """One tier over a primary tier's memory: the first half is stored from, the second loaded to.

    Args:
        tier: vLLM's or ours.
        rows: (2 * pages, page_bytes): the primary tier's memory.
    """

    def __init__(self, tier: Any, rows: U8) -> None:
        self.tier, self.rows = tier, rows
        self._pages = len(rows) // 2
        self._jobs = 0

    def move(self, keys: list[Any], *, load: bool) -> float:
        """Store or load all pages under ``keys``; return the seconds."""
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        first_row = self._pages if load else 0
        submit = self.tier.submit_load if load else self.tier.submit_store
        out: set[int] = set()
        start = time.perf_counter()
        job_chunks = max(_JOB_BYTES // self.rows.shape[1], 1)
        for first in range(0, len(keys), job_chunks):
            some = keys[first : first + job_chunks]
            chunks = np.arange(first_row + first, first_row + first + len(some))
            self._jobs += 1
            out.add(self._jobs)
            submit(TransferJob(self._jobs, some, chunks, load, ReqContext(req_id="bench")))
        end = time.monotonic() + _DEADLINE_S
        while out:
            for job in self.tier.get_finished_jobs():
                if not job.success:
                    raise RuntimeError(f"a job of {type(self.tier).__name__} failed")
                out.discard(job.job_id)
            if time.monotonic() > end:
                raise TimeoutError(f"{type(self.tier).__name__} does not answer")
            time.sleep(_POLL_S)
        return time.perf_counter() - start

    def exists(self, keys: list[Any], request: str) -> float:
        """Look all keys up as the scheduler does, until each is answered; return the seconds."""
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

        context = ReqContext(req_id=request)
        start = time.perf_counter()
        end = time.monotonic() + _DEADLINE_S
        while True:
            found = {self.tier.lookup(key, context) for key in keys}
            if LookupResult.RETRY not in found:
                break
            if time.monotonic() > end:
                raise TimeoutError(f"{type(self.tier).__name__} does not answer")
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(_POLL_S)
        seconds = time.perf_counter() - start
        self.tier.on_request_finished(context)
        if found != {LookupResult.HIT}:
            raise RuntimeError(f"{type(self.tier).__name__} lacks stored chunks")
        return seconds

    def compare(self) -> int:
        """Compare the loaded pages with the stored ones; return the bytes."""
        half = self.rows[: self._pages]
        if not np.array_equal(half, self.rows[self._pages :]):
            raise RuntimeError(f"{type(self.tier).__name__} loaded other bytes")
        self.rows[self._pages :] = 0
        return half.nbytes


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds and return the program's answer."""
    from vllm.v1.kv_offload.tiering.fs import io

    sides = _sides(options)
    moved: dict[str, dict[str, list[float]]] = {
        "store": {"ours": [], "theirs": [], "copy": []},
        "load": {"ours": [], "theirs": [], "copy": []},
        "exists": {"ours": [], "theirs": []},
    }
    compared = 0
    random = np.random.default_rng(1)
    for number in range(options.rounds + 1):
        keys = _keys(number * options.pages, options.pages)
        # Other bytes each time: equal ones from before would hide a load that did nothing.
        pages = random.integers(0, 256, (options.pages, options.page_bytes), np.uint8)
        seconds: dict[tuple[str, str], float] = {}
        for side in sides.values():
            side.rows[: options.pages] = pages
        names = sorted(sides, reverse=bool(number % 2))
        for name in names:
            seconds["store", name] = sides[name].move(keys, load=False)
        seconds["store", "copy"] = _copy(sides["ours"].rows)
        if options.ssd:
            _evict(options.folder)
        for name in names:
            seconds["exists", name] = sides[name].exists(keys, f"{name} {number}")
            if options.ssd:
                _forget(options.folder)
            seconds["load", name] = sides[name].move(keys, load=True)
            compared += sides[name].compare()
        seconds["load", "copy"] = _copy(sides["ours"].rows)
        sides["ours"].rows[options.pages :] = 0
        for (kind, name), took in seconds.items():
            if number:  # the first round is not measured
                moved[kind][name].append(took)
        # All rounds have more blocks than the memory. The weights of ``on_reset=drop`` are of one
        # tier alone: when it has ended, its blocks are evicted first.
        sides["ours"].tier.shutdown()
        sides["ours"].tier = _ours(options, sides["ours"].rows)
        for path in options.folder.rglob("*.bin"):
            path.unlink()
    for side in sides.values():
        side.tier.shutdown()
    where = "C" if io._HAS_FSIO_C else "Python"
    return {
        "versions": {
            "vllm": importlib.metadata.version("vllm"),
            "python": sys.version.split()[0],
        },
        "settings": f"jobs of {_JOB_BYTES >> 20} MiB; file tier: 16 + 16 threads, a file a chunk, "
        f"loops in {where}, {'O_DIRECT' if sides['theirs'].tier._use_o_direct else 'page cache'}",
        "bytes": options.pages * options.page_bytes,
        "seconds": moved,
        "compared_bytes": compared,
    }


def absent(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of lookups without a daemon, and the number of lines in the log."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvhearth").addHandler(handler)
    tier = _ours(options, _memory(options))
    took: list[float] = []
    for number in range(_UNMEASURED + _ABSENT_CALLS):
        context = ReqContext(req_id=str(number))
        keys = _keys(number * _ABSENT_KEYS, _ABSENT_KEYS)
        start = time.perf_counter()
        for key in keys:
            tier.lookup(key, context)
        tier.on_schedule_end(ScheduleEndContext((), ()))
        took.append(time.perf_counter() - start)
        end = time.monotonic() + _DEADLINE_S
        while (found := {tier.lookup(key, context) for key in keys}) != {LookupResult.MISS}:
            if LookupResult.HIT in found or time.monotonic() > end:
                raise RuntimeError(f"without a daemon lookups say {found}")
            tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(_POLL_S)
        tier.on_request_finished(context)
    tier.shutdown()
    return {"absent_s": took[_UNMEASURED:], "logged": len(lines)}


def _sides(options: argparse.Namespace) -> dict[str, Side]:
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    ours, theirs = _memory(options), _memory(options)
    files = FileSystemTierManager(_spec(), theirs.data, "fs", str(options.folder))
    return {"ours": Side(_ours(options, ours), ours), "theirs": Side(files, theirs)}


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
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)


def _keys(first: int, count: int) -> list[Any]:
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(b"%032d" % number, 0) for number in range(first, first + count)]


def _copy(rows: U8) -> float:
    """Copy one half of the memory to the other; return the seconds."""
    half = len(rows) // 2
    start = time.perf_counter()
    np.copyto(rows[half:], rows[:half])
    return time.perf_counter() - start


def _evict(folder: Path) -> None:
    """Have the caller move all of our blocks to SSD, and flush the files."""
    for path in folder.rglob("*.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _say("evict")
    if not sys.stdin.readline():
        raise EOFError("the caller has gone")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _forget(folder: Path) -> None:
    """Drop the flushed files from the page cache."""
    for path in folder.rglob("*.bin"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Parse the command line, run, and print the answer as the last line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("--page-bytes", "--pages", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--ssd", action="store_true")
    parser.add_argument("--absent", action="store_true")
    options = parser.parse_args()
    os.environ.update(
        VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_LOGGING_STREAM="ext://sys.stderr"
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    _say(json.dumps((absent if options.absent else run)(options)))


if __name__ == "__main__":
    main()
