"""LMCache's second level: keeps the objects of its multi-process daemon in KVHearth.

A namespace holds a model's objects of one layout. Group, rank, salt and chunk hash are an object's
key; the chunks of one group, rank and salt are a chain.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from logging import ERROR
from typing import Any, ClassVar

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

import kvhearth
from kvhearth.cache import Cache
from kvhearth.connectors.core.settings import CacheSettings, parse_settings
from kvhearth.connectors.core.weights import Weights, name_weights
from kvhearth.contract import TEXT_CHARS_MAX, Contract, GroupKind, GroupSpec
from kvhearth.counters import log_event
from kvhearth.errors import KVHearthError
from kvhearth.results import Lease
from kvhearth.url import UnixUrl, parse_url

OPEN_S, LOCK_S = 2.0, 60.0
"""Time in which tasks wait for a new namespace's session; age at which unreturned locks end."""
TASKS_MAX = 1024
"""Most tasks that have not ended, and most results of a kind that LMCache has not asked for."""
THREADS = {"store": 1, "lookup": 1, "load": 4}
"""Threads by kind of task. A load that waits for SSD holds up none from memory."""
Layout = tuple[int, str]
"""Bytes of an object; dtypes and shapes of its tensors."""
Lock = tuple[Cache, Lease, set[Any], float]
"""A lookup's lease, the keys that LMCache has not returned, and the monotonic time of its end."""


@dataclass(frozen=True)
class Options(CacheSettings):
    """``adapter_params``; models that are no local directories need a ``revision``."""

    PLACE: ClassVar[str] = "adapter_params"


class KVHearthL2Adapter(L2AdapterInterface):
    """An adapter of the type ``plugin``; see docs/engines.md. Thread-safe.

    No call waits or raises because of the daemon: what it lacks is a miss, what it does not take a
    store that failed. It bounds and evicts its blocks itself: ``delete`` does nothing, and
    ``get_usage`` counts nothing.

    Raises:
        KVHearthError: ``config_invalid`` or ``bad_url``.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        self._options = parse_settings(Options, params)
        named = {"run": secrets.token_hex(8), "given": self._options.revision}
        named |= {"revision": "", "option": Options.PLACE}
        self._name_weights = functools.cache(partial(name_weights, **named))
        self._caches: dict[tuple[str, Layout], tuple[Future[Cache], float]] = {}
        self._layouts: dict[tuple[str, int], Layout] = {}
        self._locks: list[Lock] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._room = threading.Semaphore(TASKS_MAX)
        self._results: dict[str, dict[int, Any]] = {kind: {} for kind in THREADS}
        self._notifiers = {kind: create_event_notifier() for kind in THREADS}
        self._opener = ThreadPoolExecutor(1, "kvhearth-open")
        self._threads = {
            kind: ThreadPoolExecutor(n, f"kvhearth-{kind}") for kind, n in THREADS.items()
        }

    def get_store_event_fd(self) -> int:
        return int(self._notifiers["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._notifiers["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._notifiers["load"].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit("store", partial(self._store, keys, objects), L2StoreResult(False, 0))

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        work, miss = partial(self._look_up, keys, group_layout_descs), Bitmap(len(keys))
        return self._submit("lookup", work, miss)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit("load", partial(self._load, keys, objects), Bitmap(len(keys)))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            done, self._results["store"] = self._results["store"], {}
        return done

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        with self._lock:
            return self._results["lookup"].pop(task_id, None)

    def query_load_result(self, task_id: int) -> Any:
        with self._lock:
            return self._results["load"].pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        self._end_locks(set(keys))

    def get_memory_tags(self) -> Any:
        # LMCache 0.5.7 asks for them.
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        local = isinstance(parse_url(self._options.url), UnixUrl)
        residency = MemoryResidency.LOCAL if local else MemoryResidency.REMOTE
        return MemoryTags(MemorySegment.STORAGE, residency)

    def get_usage(self) -> Any:
        return AdapterUsage(total_bytes_used=0, total_capacity_bytes=0)

    def report_status(self) -> dict[str, Any]:
        done = [each for each, _ in [*self._caches.values()] if each.done()]
        caches = [each.result() for each in done if not each.exception()]
        attached = sum(cache.client.session_id != "" for cache in caches)
        return {"is_healthy": True, "url": self._options.url, "attached": attached}

    def close(self) -> None:
        """End the tasks and leave the daemon; no object is copied afterwards."""
        for threads in (self._opener, *self._threads.values()):
            threads.shutdown(wait=False, cancel_futures=True)
        for opening, _ in list(self._caches.values()):
            opening.add_done_callback(_leave)
        for threads in self._threads.values():
            threads.shutdown()
        for notifier in self._notifiers.values():
            notifier.close()

    def _submit(self, kind: str, work: Callable[[], Any], miss: object) -> int:
        number = next(self._numbers)
        if not self._room.acquire(blocking=False):
            self._publish(kind, number, miss)
            return number

        def ended(task: Future[Any]) -> None:
            self._room.release()
            if not task.cancelled() and (error := task.exception()):
                log_event(ERROR, "call.crashed", "a task failed", call=kind, error=repr(error))
            failed = task.cancelled() or task.exception()
            self._publish(kind, number, miss if failed else task.result())

        self._threads[kind].submit(work).add_done_callback(ended)
        return number

    def _publish(self, kind: str, number: int, result: object) -> None:
        with self._lock:
            results = self._results[kind]
            results[number] = result
            if len(results) > TASKS_MAX:
                del results[next(iter(results))]
        self._notifiers[kind].notify()

    def _store(self, keys: list[Any], objects: list[Any]) -> Any:
        once = dict(zip(keys, objects, strict=True))
        keys, objects, stored = list(once), list(once.values()), list[int]()
        for rows, done in self._transfer(Cache.store, keys, objects):
            stored += [] if done.failed else rows
        sizes = [int(objects[at].get_size()) for at in stored]
        self._notify_keys_stored([keys[at] for at in stored], sizes)
        return L2StoreResult(len(stored) == len(keys), sum(sizes))

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        loaded = Bitmap(len(keys))
        begin = partial(Cache.load, wait_s=self._options.promotion_wait_ms / 1000)
        for rows, done in self._transfer(begin, keys, objects):
            good = np.array(rows)[done.loaded].tolist()
            for at in good:
                loaded.set(at)
            self._notify_keys_accessed([keys[at] for at in good])
        return loaded

    def _transfer(
        self, begin: Callable[..., Any], keys: list[Any], objects: list[Any]
    ) -> list[tuple[list[int], Any]]:
        """Store or load chains, and return the positions of each with its result."""
        begun = []
        for cache, names, rows in self._chains(keys, list(map(_layout_of, objects))):
            pages = [np.frombuffer(objects[at].byte_array, np.uint8) for at in rows]
            begun.append((rows, begin(cache, names, pages)))
        return [(rows, each.result()) for rows, each in begun]

    def _look_up(self, keys: list[Any], descs: Mapping[int, Any]) -> Any:
        found = Bitmap(len(keys))
        known = {at: _layout(tuple(each.shapes), tuple(each.dtypes)) for at, each in descs.items()}
        layouts = [known.get(key.object_group_id) for key in keys]
        for cache, names, rows in self._chains(keys, layouts):
            answer = cache.client.lookup({0: names})
            presence, rows_of = answer.groups[0], np.array(rows)
            for at in rows_of[presence.present].tolist():
                found.set(at)
            if answer.lease is not None:
                held = {keys[at] for at in rows_of[presence.leased].tolist()}
                with self._lock:
                    self._locks.append((cache, answer.lease, held, time.monotonic() + LOCK_S))
        return found

    def _end_locks(self, returned: set[Any]) -> None:
        """Release the leases of locks that are returned now or too old."""
        now = time.monotonic()
        with self._lock:
            for _, _, held, _ in self._locks:
                mine = held & returned
                held.difference_update(mine)
                returned = returned - mine
            ended = [each for each in self._locks if not each[2] or each[3] <= now]
            self._locks = [each for each in self._locks if each not in ended]
        for cache, lease, _, _ in ended:
            cache.client.release(lease)

    def _chains(
        self, keys: list[Any], layouts: list[Layout | None]
    ) -> Iterator[tuple[Cache, list[bytes], list[int]]]:
        """Yield cache, names and positions of the chains whose caches are attached in time."""
        chains: dict[tuple[Any, ...], list[int]] = {}
        for at, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            part = (key.model_name, key.object_group_id, layout, key.kv_rank, key.cache_salt)
            chains.setdefault(part, []).append(at)
        for (model, group, layout, rank, salt), rows in chains.items():
            if cache := self._cache(model, group, layout):
                start = f"{group}:{rank}:{len(salt)}:{salt}:".encode()
                names = [hashlib.sha256(start + keys[at].chunk_hash).digest() for at in rows]
                yield cache, names, rows

    def _cache(self, model: str, group: int, layout: Layout | None) -> Cache | None:
        with self._lock:
            layout = layout or self._layouts.get((model, group))
            if layout is None:
                return None
            self._layouts[model, group] = layout
            if (model, layout) not in self._caches:
                opening = self._opener.submit(self._open, model, layout)
                self._caches[model, layout] = opening, time.monotonic() + OPEN_S
            cache, until = self._caches[model, layout]
        try:
            opened = cache.result(max(until - time.monotonic(), 0.0))
        except (CancelledError, TimeoutError, KVHearthError):
            return None
        return opened if opened.client.session_id else None

    def _open(self, model: str, layout: Layout) -> Cache:
        """Name the weights, which may read a directory's files for minutes, and attach."""
        weights, name = self._name_weights(model), f"lmcache-{secrets.token_hex(8)}"
        try:
            return kvhearth.open(self._options.url, _contract(weights, layout), name=name)
        except KVHearthError as error:
            log_event(
                ERROR, "session.refused", "objects are not kept", reason=error.reason, error=error
            )
            raise


def _leave(opening: Future[Cache]) -> None:
    while not (opening.cancelled() or opening.exception() or opening.result().close()):
        pass  # LMCache frees the memory of the copies next


def _layout_of(object_: Any) -> Layout | None:
    meta = object_.metadata
    shapes, dtypes = meta.shapes or [meta.shape], meta.dtypes or [meta.dtype]
    return _layout(tuple(shapes), tuple(dtypes), object_.get_size())


@functools.lru_cache(256)
def _layout(shapes: tuple[Any, ...], dtypes: tuple[Any, ...], size: int = 0) -> Layout | None:
    """Return a layout; None for no tensors, which LMCache's benchmark describes."""
    tensors = list(zip(dtypes, map(tuple, shapes), strict=True))
    size = size or sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensors)
    return (size, str(tensors)) if tensors else None


def _contract(weights: Weights, layout: Layout) -> Contract:
    """Return the contract: the weights, LMCache's version and what it tells of its objects."""
    digest = hashlib.sha256(layout[1].encode()).hexdigest()
    text = f"lmcache {version('lmcache')} {digest} {layout[1]}"[:TEXT_CHARS_MAX]
    # LMCache does not tell the length of a chunk: its default serves the daemon's counts of tokens.
    groups = (GroupSpec(GroupKind.FULL, 256, layout[0]),)
    return Contract(weights.model, weights.revision, "uint8", groups, text)
