"""``KVHearthHiCache``: a storage back end of SGLang's HiCache over ``kvhearth.open``.

SGLang's threads copy between the GPU and its host pools; here pages of a host pool go to the daemon
and come back, in place. Each host pool of each rank has a namespace of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from logging import WARNING
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.version import __version__ as SGLANG_VERSION

import kvhearth
from kvhearth.cache import Cache
from kvhearth.connectors.core.scheduler import guarded
from kvhearth.connectors.core.settings import parse_settings
from kvhearth.connectors.sglang.identity import (
    HiCacheSettings,
    keys_of,
    own_options,
    pool_contract,
    server_fields,
    updated_fields,
)
from kvhearth.connectors.sglang.pools import HostPool, host_pool, leading, needed, restorable
from kvhearth.connectors.sglang.server import (
    arguments,
    check_hashes,
    run_name,
    watch_updates,
    weights_at_start,
    weights_in_force,
)
from kvhearth.counters import log_event
from kvhearth.model import Bools
from kvhearth.transfer.lanes import Transfer

ATTACH_S = 2.0
STORE_WAIT_S = 1.0
"""SGLang gives its threads 10 s to end: a batch must not wait for a full daemon so long."""
CLOSE_S = 5.0
METRICS_MAX = 4096
KV = str(PoolName.KV)

ResultT = TypeVar("ResultT")


class KVHearthHiCache(HiCacheStorage):
    """Pages of SGLang's host pools, kept in a KVHearth daemon. Made by SGLang's factory.

    Keys are SGLang's page hashes. Where the daemon is away, full or slow, nothing is found and
    nothing stored; no method raises once the pools are registered. Weights that are updated in
    place have namespaces of their own, which end with this run, and nothing is stored from pages
    that older weights may have computed: the host pool must have been cleared since.

    Args:
        config: the rank, and the options of ``HiCacheSettings`` in ``extra_config``.
        kwargs: not used.

    Raises:
        KVHearthError: ``config_invalid`` or ``bad_url`` for options, ``bad_contract`` for a pool
            that cannot be stored.
    """

    def __init__(self, config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        self._settings = parse_settings(HiCacheSettings, own_options(config.extra_config or {}))
        self._config = config
        self._run = run_name(config.tp_size)
        check_hashes()
        watch_updates()
        given = self._settings.revision
        self._fields = server_fields(arguments(), SGLANG_VERSION, self._run, given)
        self._lock = threading.Lock()
        self._pools: dict[str, HostPool] = {}
        self._caches: dict[str, Cache] = {}
        self._left: list[Cache] = []
        self._metrics = StorageMetrics()
        self._versions = [weights_at_start()]
        self._computed_by = self._versions[0]

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Keep the pages of the pool that has the KV."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)
        clear = mem_pool_host.clear

        def cleared() -> None:
            clear()
            self._computed_by = weights_in_force()

        mem_pool_host.clear = cleared

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Keep the pages of a further pool, such as recurrent states."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) not in self._pools:
            self._register(str(host_pool_name), host_pool)

    @guarded(lambda: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many pages from the first one can be loaded; promotes those on SSD."""
        return leading(self._present(KV, keys, prefetch=True))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Load pages in place; return which hold their keys' bytes."""
        return self._load(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages; return whether all are kept, for each."""
        return self._store(KV, keys, host_indices)

    @guarded(PoolTransferResult.empty)
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        """Return the lengths of prefixes that all pools allow, in pages."""
        pages = leading(self._present(KV, keys, prefetch=True))
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        allowed: Bools = np.ones(pages, np.bool_)
        for item in (pool_transfers or []) if pages else []:
            flags = self._present(str(item.name), keys[:pages])
            able = restorable(flags, item.hit_policy, needed(item, pages))
            if able.any():
                hits[item.name] = int(np.flatnonzero(able)[-1]) + 1
            allowed &= able
        lengths = (np.flatnonzero(allowed) + 1).tolist()
        final = lengths[-1] if lengths else 0
        for item in (pool_transfers or []) if final else []:
            self._present(str(item.name), keys[:final][-needed(item, final) :], prefetch=True)
        return PoolTransferResult(final, hits, lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        """Load pages of several pools, as ``batch_get_v1``."""
        return {
            item.name: self._load(str(item.name), item.keys or [], item.host_indices)
            for item in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        """Store pages of several pools, as ``batch_set_v1``."""
        return {
            item.name: self._store(str(item.name), item.keys or [], item.host_indices)
            for item in transfers
        }

    def exists(self, key: str) -> bool:
        """Return whether a page can be loaded."""
        return bool(self.batch_exists([key]))

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Load a page into a tensor of its size, which is returned."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors of their size."""
        loaded = self._load(KV, keys, target_locations)
        pairs = zip(target_locations or [None] * len(keys), loaded, strict=True)
        return [target if good else None for target, good in pairs]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a page from a tensor."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages from tensors."""
        return all(self._store(KV, keys, values))

    @guarded(lambda: None)
    def clear(self) -> None:
        """Drop the blocks of all pools, unless another server or rank shares them."""
        for name, cache in self._current().items():
            if not cache.client.drop_if_alone():
                log_event(WARNING, "reset.kept_blocks", "others share these blocks", pool=name)

    def get_stats(self) -> StorageMetrics:
        """Return pages and GiB/s of each batch since the last call."""
        with self._lock:
            found, self._metrics = self._metrics, StorageMetrics()
        return found

    @guarded(lambda: None)
    def close(self) -> None:
        """Leave the daemon. Idempotent."""
        with self._lock:
            caches, self._caches = [*self._left, *self._caches.values()], {}
            self._left = [cache for cache in caches if not cache.close(CLOSE_S)]
        vars(getattr(self, "mem_pool_host", self)).pop("clear", None)

    def record_failure(self, name: str) -> None:
        """Count a call that failed."""
        for cache in list(self._caches.values())[:1]:
            cache.client.count("troubles")

    # -- the caches --------------------------------------------------------------------------------

    def _register(self, name: str, pool: Any) -> None:
        self._pools[name] = host_pool(name, pool)
        self._caches[name] = self._open(name, self._fields, ATTACH_S)

    def _open(self, name: str, fields: dict[str, str], wait_s: float) -> Cache:
        held = self._pools[name]
        contract = pool_contract(fields, self._config, name, held.pool, held.runs)
        engine, url = f"sglang-{name}-{os.getpid()}-{os.urandom(4).hex()}", self._settings.url
        bounds = {"wait_s": wait_s, "store_wait_s": STORE_WAIT_S}
        return kvhearth.open(url, contract, name=engine, **bounds)

    def _current(self) -> dict[str, Cache]:
        """Return the caches of the weights that are in force."""
        version = weights_in_force()
        if version == self._versions[-1]:
            return self._caches
        with self._lock:
            if version != self._versions[-1] and self._caches:
                self._left += self._caches.values()
                uses = self._versions.count(version)
                fields = updated_fields(self._fields, self._run, version, uses)
                self._caches = {name: self._open(name, fields, 0.0) for name in self._pools}
                self._versions.append(version)
                text = "weights updated in place: KV is kept for this run alone, after a flush"
                log_event(WARNING, "connector.private", text, weights=version)
            self._left = [cache for cache in self._left if not cache.close(0.0)]
            return self._caches

    def _present(self, name: str, keys: Sequence[str], *, prefetch: bool = False) -> Bools:
        return self._current()[name].lookup(keys_of(keys), prefetch=prefetch).present

    def _load(self, name: str, keys: list[str], places: Any) -> list[bool]:
        loaded: list[bool] | None = self._loaded(name, keys, places)
        return loaded or [False] * len(keys)

    @guarded(lambda: None)
    def _loaded(self, name: str, keys: list[str], places: Any) -> list[bool] | None:
        cache, wait_s = self._current()[name], self._settings.promotion_wait_ms / 1e3
        pages = self._pools[name].pages(places, len(keys))
        done = self._result(cache.load(keys_of(keys), pages, wait_s=wait_s), wait_s + CLOSE_S)
        if done is None:
            return None
        self._measure("prefetch", len(keys), done.bytes, done.copy_s)
        return [bool(flag) for flag in done.loaded]

    def _store(self, name: str, keys: list[str], places: Any) -> list[bool]:
        return [bool(self._stored(name, keys, places))] * len(keys)

    @guarded(lambda: False)
    def _stored(self, name: str, keys: list[str], places: Any) -> bool:
        cache = self._current()[name]
        if self._computed_by != self._versions[-1]:
            return False
        pages = self._pools[name].pages(places, len(keys))
        done = self._result(cache.store(keys_of(keys), pages), CLOSE_S)
        if done is None or done.failed:
            return False
        self._measure("backup", len(keys), done.bytes, done.copy_s)
        return True

    @staticmethod
    def _result(future: Transfer[ResultT], wait_s: float) -> ResultT | None:
        """Return a transfer's result, or None if it was given up before any copy began."""
        try:
            return future.result(wait_s)
        except TimeoutError:
            # Only the end of copies that have begun frees the pages, and copies in memory end.
            return None if future.cancel() else future.result()

    def _measure(self, kind: str, pages: int, size: int, seconds: float) -> None:
        if not self._config.enable_storage_metrics or not seconds:
            return
        with self._lock:
            counts = getattr(self._metrics, f"{kind}_pgs")
            if len(counts) < METRICS_MAX:
                counts.append(pages)
                getattr(self._metrics, f"{kind}_bandwidth").append(size / seconds / (1 << 30))
