"""Adapter of vLLM's filesystem tier (``kv_offload/tiering/fs``), which keeps one file a block.

It writes a file under another name and renames it. Its threads use direct I/O, and the loop over a
job's blocks is in C where its wheel has it. Nothing is verified on load; neither it nor the bench
flushes.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvhearth_lab.bench.peers.adapters.harness import Config, FilePeer

_JOB_BLOCKS = 16
"""Blocks of a job, as many as ours has in a batch; one thread executes a job."""
_DEADLINE_S = 60.0
_POLL_S = 0.0002


class Peer(FilePeer):
    """See ``harness.Peer``."""

    def __init__(self) -> None:
        super().__init__()
        self._tiers: dict[str, Any] = {}
        self._keys: list[bytes] = []
        self._stores = self._jobs = 0

    def start(self, config: Config) -> Mapping[str, Any]:
        os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm.v1.kv_offload.tiering.fs import io
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        kind = self.prepare(config)
        for name, blocks in (("source", self.source), ("target", self.target)):
            self._tiers[name] = FileSystemTierManager(_spec(), blocks.data, "fs", str(self.folder))
        where = "C" if io._HAS_FSIO_C else "Python"
        direct = "O_DIRECT" if self._tiers["source"]._use_o_direct else "page cache"
        return {
            "versions": {
                "vllm": importlib.metadata.version("vllm"),
                "python": sys.version.split()[0],
            },
            "settings": f"fs tier, 16 + 16 threads, jobs of {_JOB_BLOCKS} blocks in {where}, "
            f"{direct}, a file a block, not verified",
            "pages": kind,
            "leftovers": [],
        }

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.shutdown()

    def store(self) -> float:
        from vllm.v1.kv_offload.base import make_offload_key

        self._stores += 1
        names = (b"%032d" % (self._stores * 1_000_000 + page) for page in self.pages)
        self._keys = [make_offload_key(name, 0) for name in names]
        return self._move("source", promotion=False)

    def load(self) -> float:
        return self._move("target", promotion=True)

    def _move(self, name: str, *, promotion: bool) -> float:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        tier, start = self._tiers[name], time.perf_counter()
        submit = tier.submit_load if promotion else tier.submit_store
        out: set[int] = set()
        for first in range(0, len(self.pages), _JOB_BLOCKS):
            span = slice(first, first + _JOB_BLOCKS)
            self._jobs += 1
            out.add(self._jobs)
            chunks = np.array(self.pages[span])
            context = ReqContext(req_id=str(self._jobs))
            submit(TransferJob(self._jobs, self._keys[span], chunks, promotion, context))
        end = time.monotonic() + _DEADLINE_S
        while out:
            for each in tier.get_finished_jobs():
                if not each.success:
                    raise RuntimeError("a job failed")
                out.discard(each.job_id)
            if time.monotonic() > end:
                raise TimeoutError("the tier does not answer")
            time.sleep(_POLL_S)
        return time.perf_counter() - start


def _spec() -> Any:
    """Return the part of an engine's settings that the tier reads."""
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
    )
    config = SimpleNamespace(
        groups=(),
        model=SimpleNamespace(name="bench", dtype="uint8"),
        cache=SimpleNamespace(tokens_per_hash=16),
        parallel=parallel,
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=None,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
