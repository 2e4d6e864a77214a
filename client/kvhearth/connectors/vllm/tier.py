"""KVHearth as a secondary tier of vLLM's own offloading (``TieringOffloadingSpec``).

vLLM copies KV between the GPU and its host memory, the primary tier. What is stored there comes
here, too, and what has fallen out of it is looked up here. Blocks are rows of the primary tier: the
only copy is between a row and a slot in the daemon's memory.
"""

from __future__ import annotations

import inspect
import secrets
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from logging import WARNING
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.version import __version__

import kvhearth
from kvhearth.cache import Cache
from kvhearth.connectors.core.block_feed import BlockFeed
from kvhearth.connectors.core.settings import CacheSettings, one_of, parse_settings
from kvhearth.connectors.vllm.events import OWNERSHIP, must_step
from kvhearth.connectors.vllm.identity import tier_contract, weights_change
from kvhearth.counters import log_event
from kvhearth.fail_open import parse_arguments
from kvhearth.results import PromotionWait
from kvhearth.transfer.lanes import Transfer

DRAIN_S = 60.0
"""Longest wait for the jobs under way at a reset of vLLM's cache."""
REMOTE_S = 0.25
"""Longest time that a lookup waits for the answers of the daemon's remotes."""


@dataclass(frozen=True)
class TierSettings(CacheSettings):
    """Options of an entry of ``secondary_tiers``.

    Attributes:
        on_reset: effect of a reset of vLLM's cache on the blocks in the daemon: ``drop`` all of the
            namespace, ``keep`` them, or ``auto``: drop them if no other engine is attached to it.
    """

    PLACE: ClassVar[str] = "secondary_tiers"

    on_reset: str = one_of("auto", "drop", "keep")


class KVHearthTier(SecondaryTierManager):
    """Chunks of vLLM's primary tier, kept in a KVHearth daemon.

    vLLM's factory makes it from an entry of ``secondary_tiers``. vLLM calls it in the scheduler
    process, one method at a time. No method but ``drain_jobs`` and ``shutdown`` waits for the
    daemon.

    Args:
        offloading_spec: vLLM's; its ``config`` describes the engine.
        primary_kv_view: memory of the primary tier, one chunk a row.
        tier_type: name of the tier in vLLM's metrics.
        backpressure_detector: vLLM's, or None.
        options: those of ``TierSettings``.

    Raises:
        KVHearthError: ``config_invalid``, ``bad_url`` or ``bad_contract`` for wrong options.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = parse_settings(TierSettings, options)
        self._kv = kvhearth.PagedKV([np.asarray(primary_kv_view).view(np.uint8)])
        config, engine = offloading_spec.config, _engine_config()
        on_reset = self._settings.on_reset
        self._contract = tier_contract(
            config,
            self._kv.page_bytes,
            version=__version__,
            run=f"{config.engine_id}/{secrets.token_hex(8)}",
            given_revision=self._settings.revision,
            live=on_reset == "drop" if engine is None else weights_change(engine, on_reset),
            vllm_config=engine,
            device=_device(),
        )
        self._cache = kvhearth.open(self._settings.url, self._contract)
        self._lookup_manager = _Lookups(self._cache, tier_type)
        publishes = offloading_spec.kv_events_config.enable_kv_cache_events
        self._feed = BlockFeed(self._cache.client) if publishes else None
        self._jobs: dict[int, tuple[TransferJob, Transfer[Any] | None]] = {}
        # The last key of each live request that was stored or loaded: parent of its next one.
        self._requests: dict[str, bytes | None] = {}
        self._outdated: set[str] = set()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request; each chunk is stored once, when it is computed."""
        self._requests[req_context.req_id] = None
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request; none of its jobs is submitted after this."""
        self._lookup_manager.cleanup(req_context.req_id)
        self._requests.pop(req_context.req_id, None)
        self._outdated.discard(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether the daemon has a chunk; RETRY until its answer is here."""
        found = self._lookup_manager.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask the daemon for the keys of this step."""
        self._lookup_manager.flush()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks as used."""
        self._cache.touch(keys)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store chunks of the primary tier."""
        request = job_metadata.req_context.req_id
        if request in self._outdated:  # older weights computed a part of it
            self._jobs[job_metadata.job_id] = job_metadata, None
            return
        self._submit(job_metadata, self._cache.store, parent=self._requests.get(request))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to load chunks into the primary tier."""
        wait_s = self._settings.promotion_wait_ms / 1000
        self._submit(job_metadata, self._cache.load, wait_s=wait_s)

    def _submit(
        self, job: TransferJob, begin: Callable[..., Transfer[Any]], **options: Any
    ) -> None:
        keys, pages = list(job.keys), kvhearth.Pages(self._kv, job.chunk_ids)
        # A job that is not valid fails; an exception would end the engine.
        self._jobs[job.job_id] = job, parse_arguments(partial(begin, keys, **options), pages)
        if keys and job.req_context.req_id in self._requests:
            self._requests[job.req_context.req_id] = keys[-1]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call.

        Keys of failed loads become misses: vLLM would load them again and again.
        """
        ended = [
            number for number, (_, future) in self._jobs.items() if future is None or future.done()
        ]
        return [self._finish(*self._jobs.pop(number)) for number in ended]

    def _finish(self, job: TransferJob, future: Transfer[Any] | None) -> JobResult:
        done = None if future is None else future.result(0)
        took = (0.0, 0) if done is None else (done.copy_s, done.bytes)
        if not job.is_promotion:
            return JobResult(job.job_id, done is not None and not done.failed, None, *took)
        flags = [] if done is None else done.loaded.tolist()
        good = tuple(key for key, loaded in zip(job.keys, flags, strict=False) if loaded)
        failed = set(job.keys).difference(good)
        self._lookup_manager.mark_miss(failed)
        return JobResult(job.job_id, not failed, good or None, *took)

    def drain_jobs(self) -> None:
        """Wait until no job touches the primary tier; vLLM resets its cache then.

        Raises:
            TimeoutError: a job still runs after a minute; vLLM must not reuse its chunks.
        """
        futures = [future for _, future in self._jobs.values() if future is not None]
        if wait(futures, DRAIN_S).not_done:
            raise TimeoutError("KVHearth's copies from and to the primary tier have not ended")
        client = self._cache.client
        if self._settings.on_reset == "drop":
            client.bump_epoch()
        elif self._settings.on_reset == "keep" or not client.drop_if_alone():
            log_event(
                WARNING,
                "reset.kept_blocks",
                "blocks in the KVHearth daemon are kept, since other engines share them or it was "
                "told so; set on_reset=drop if new weights were loaded",
                set_in="secondary_tiers",
            )
            return
        self._outdated.update(self._requests)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Yield which chunks the daemon has since the last call, and which it has no more."""
        if self._feed is None:
            return
        changes = self._feed.take()
        for removed in (True, False):
            keys = [
                OffloadKey(each.key)
                for each in changes
                if bool(each.before) == removed != bool(each.now)
            ]
            if keys:
                yield OffloadingEvent(keys, self.medium, removed, ownership=OWNERSHIP)

    def has_pending_work(self) -> bool:
        """Whether a step has something to publish."""
        return self._feed is not None and must_step(self._feed)

    def shutdown(self) -> None:
        """End all jobs and leave the daemon.

        Raises:
            TimeoutError: a copy still runs; vLLM must keep the primary tier's memory.
        """
        self._lookup_manager.shutdown()
        if self._feed is not None:
            self._feed.close(DRAIN_S)
        if not self._cache.close():
            raise TimeoutError("KVHearth's copies from and to the primary tier have not ended")
        # vLLM unmaps the primary tier next, which fails while anything views it.
        self.__dict__.pop("_kv", None)

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of ``config_info``, for vLLM's metric of its configuration."""
        return ("kvhearth_model", "kvhearth_revision")

    def config_info(self) -> dict[str, str]:
        """Return the identity of the weights, by which engines share blocks."""
        values = (self._contract.model, self._contract.revision)
        return dict(zip(self.config_info_keys({}), values, strict=True))


def _engine_config() -> VllmConfig | None:
    """Return the configuration of the engine that is making its tiers, or None.

    vLLM gives it to its connector, which makes the tiers, but not to them.
    """
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        for value in frame.f_locals.values():
            if isinstance(value, VllmConfig) and value.kv_transfer_config is not None:
                return value
    return get_current_vllm_config_or_none()


def _device() -> str:
    """Return what vLLM chooses an attention backend by, if nobody names one: a tier sees none."""
    if current_platform.is_cpu():
        return f"cpu/{torch.backends.cpu.get_cpu_capability()}"
    return f"{current_platform.device_type}/{current_platform.get_device_capability()}"


class _Lookups(AsyncLookupManager):
    """Asks the daemon on vLLM's thread for lookups."""

    def __init__(self, cache: Cache, tier_type: str) -> None:
        self._cache = cache
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        """Return which chunks the daemon has, and begin to promote those on slower tiers."""
        clock = self._cache.client.clock
        wait = PromotionWait(clock.now() + REMOTE_S)
        while True:
            found = self._cache.lookup(keys, prefetch=True)
            now = clock.now()
            # An estimate with nothing to promote: the daemon is asking its remotes.
            promoting = bool((found.present & ~found.ready).any())
            if promoting or not wait.answered(round(found.eta_s * 1e6), now):
                present: list[bool] = found.present.tolist()
                return present
            time.sleep(wait.due_at - now)

    def mark_miss(self, keys: Collection[OffloadKey]) -> None:
        """Make answers misses. Keys that a later request is asking for again get their own answer:
        vLLM 0.32 would stop at it.
        """
        states = self._lookup_state
        super().mark_miss([key for key in keys if key in states and states[key].result is not None])
