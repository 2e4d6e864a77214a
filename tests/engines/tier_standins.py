"""``KVHearthTier`` under the names of vLLM's tiers, for vLLM's own tests of tiers.

``vllm_tier_suite.py`` copies this file beside them; ``KVHEARTH_URL`` names the daemon.
"""

from __future__ import annotations

import os
import secrets
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, Medium
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

import kvhearth
from kvhearth.connectors.vllm.tier import KVHearthTier

URL = os.environ["KVHEARTH_URL"] + "?lookup_ms=20000&call_ms=20000"
WAIT_S = 300.0
CONFIG = OffloadingConfig(
    groups=(),
    worker_kv_bytes_per_block=0,
    enable_kv_cache_events=False,
    extra_config={},
    engine_id="suite",
    model=OffloadingModelConfig("model", "float32"),
    cache=OffloadingCacheConfig(16, 1),
    parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
)


class FileSystemTierManager(KVHearthTier):
    """Our tier, with a namespace of its own in place of each folder."""

    def __init__(self, *args: Any, root_dir: str, **given: Any) -> None:
        for name in ("n_read_threads", "n_write_threads"):
            given.pop(name, None)
        super().__init__(*args, url=URL, revision=root_dir, on_reset="keep", **given)


class Chunks:
    """The chunks in the daemon; what vLLM's tests put here is stored."""

    def __init__(self, tier: KVHearthTier) -> None:
        self._tier = tier

    def __setitem__(self, key: bytes, value: bool) -> None:
        pages = kvhearth.Pages(self._tier._kv, [0])
        done = self._tier._cache.store(self._tier._names([key]), pages).result(WAIT_S)
        assert done.stored == 1, done


class ExampleSecondaryTierManager(KVHearthTier):
    """Our tier, with each call waiting for its end, as vLLM's example of a tier in memory."""

    medium = Medium.CPU

    def __init__(
        self, offloading_spec: Any, *args: Any, custom_param: int = 0, **given: Any
    ) -> None:
        silent = SimpleNamespace(enable_kv_cache_events=False)
        spec = SimpleNamespace(config=CONFIG, kv_events_config=silent)
        name = secrets.token_hex(8)
        super().__init__(spec, *args, url=URL, revision=name, on_reset="keep", **given)
        self.chunks = Chunks(self)
        self._stored: set[bytes] = set()

    @property
    def completed_jobs(self) -> list[Any]:
        """Jobs that have ended and were not asked for."""
        return list(self._jobs)

    def get_num_chunks(self) -> int:
        """Return how many of the stored chunks the daemon has."""
        return int(self._cache.lookup(self._names(self._stored)).present.sum())

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Wait for the daemon's answer."""
        found = super().lookup(key, req_context)
        if found is LookupResult.RETRY:
            self._lookup_manager.flush()
            results = self._lookup_manager._pending_results
            results.put(results.get(timeout=WAIT_S))
            found = super().lookup(key, req_context)
        return found

    def submit_store(self, job_metadata: Any) -> None:
        """Store, and wait for the end."""
        super().submit_store(job_metadata)
        self._stored.update(job_metadata.keys)
        self._wait()

    def submit_load(self, job_metadata: Any) -> None:
        """Load, and wait for the end."""
        super().submit_load(job_metadata)
        self._wait()

    def _wait(self) -> None:
        futures = [future for _, future in self._jobs.values()]
        assert not wait(futures, WAIT_S).not_done
