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
from itertools import groupby
from logging import WARNING
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
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
from kvhearth.connectors.core.engine import Counters
from kvhearth.connectors.core.retainer import Keys, Retainer
from kvhearth.connectors.core.settings import CacheSettings, one_of, parse_settings
from kvhearth.connectors.vllm.events import must_step
from kvhearth.connectors.vllm.hints import HintReader
from kvhearth.connectors.vllm.identity import tier_contract, weights_change
from kvhearth.counters import log_event
from kvhearth.fail_open import parse_arguments
from kvhearth.model import Tier
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


@dataclass
class _Request:
    """What is known of a live request.

    Attributes:
        retain_s: seconds for which its chunks are wanted after its end.
        session_id: name of its dialogue, or empty.
        prompt_tokens: tokens of its prompt.
        last: key that was stored or loaded last: parent of its next one.
        outdated: whether older weights computed a part of it.
    """

    retain_s: float
    session_id: str
    prompt_tokens: int
    last: bytes | None = None
    outdated: bool = False


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
        self._lookup_manager = _Lookups(self._cache, tier_type, self._names)
        publishes = offloading_spec.kv_events_config.enable_kv_cache_events
        self._feed = BlockFeed(self._cache.client) if publishes else None
        self._jobs: dict[int, tuple[TransferJob, Transfer[Any] | None]] = {}
        self._requests: dict[str, _Request] = {}
        self._hints, self._counters = HintReader(), Counters()
        self._retainer: Retainer | None = None
        # vLLM's hashes have different lengths; where its configuration was not found, nothing tells
        # theirs before the first key.
        self._key_bytes = 0 if engine is None else self._contract.hash_bytes

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request; each chunk is stored once, when it is computed.

        A prefetch needs nothing more: each lookup promotes what it finds, and is waited for.
        """
        hints = self._hints.read(req_context.kv_transfer_params, req_context.kv_hints)
        self._counters.add("hints_refused", hints.bad_hints)
        request = _request_of(req_context)
        self._requests[req_context.req_id] = _Request(
            hints.retain_s,
            str(getattr(request, "session_id", None) or ""),
            int(getattr(request, "num_prompt_tokens", 0)),
        )
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request; none of its jobs is submitted after this. Its chunks are retained if it
        has asked so, and those of its session's last request no more.
        """
        self._lookup_manager.cleanup(req_context.req_id)
        request = self._requests.pop(req_context.req_id, None)
        if request is None or request.outdated:
            return
        if self._retainer is not None and request.session_id:
            self._retainer.resume(request.session_id, lambda: self._keys_of(req_context)[0])
        if request.retain_s:
            self._retain(req_context, request)

    def _retain(self, context: ReqContext, request: _Request) -> None:
        if self._retainer is None:
            self._retainer = Retainer(self._cache.client, self._counters, self._storing)
        keys, ends = self._keys_of(context)
        if ends:
            prompt = sum(end <= request.prompt_tokens for end in ends)
            name = request.session_id or context.req_id
            self._retainer.retain(name, keys, request.retain_s, {0: prompt})

    def _keys_of(self, context: ReqContext) -> tuple[Keys, list[int]]:
        """The names of a request's chunks in the order of their tokens, and where these end."""
        # Its public method answers for a key that one has; a tier never sees those that are found
        # above it.
        positions: dict[OffloadKey, int] = getattr(context, "_offload_key_positions", {})
        placed = sorted((end, self._name(key)) for key, end in positions.items())
        return {0: [name for _, name in placed]}, [end for end, _ in placed]

    def _storing(self, keys: Keys) -> bool:
        """Whether some of these are still being stored. On the retainer's thread."""
        wanted = {name for names in keys.values() for name in names}
        return any(
            not wanted.isdisjoint(map(self._name, job.keys))
            for job, _ in list(self._jobs.values())
            if not job.is_promotion
        )

    def _name(self, key: bytes) -> bytes:
        """Return the daemon's name of a chunk, from which ``_key`` finds vLLM's own again."""
        return key.rjust(self._contract.hash_bytes, b"\0")

    def _names(self, keys: Iterable[OffloadKey]) -> list[bytes]:
        names = list(keys)
        if names:
            self._key_bytes = len(names[0])
        return list(map(self._name, names))

    def _key(self, name: bytes) -> OffloadKey:
        return OffloadKey(name[-self._key_bytes :])

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether the daemon has a chunk; RETRY until its answer is here."""
        found = self._lookup_manager.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask the daemon for the keys of this step."""
        self._lookup_manager.flush()
        for name, count in self._counters.take().items():
            self._cache.client.count(name, int(count))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks as used."""
        self._cache.touch(self._names(keys))

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store chunks of the primary tier."""
        request = self._requests.get(job_metadata.req_context.req_id)
        if request is not None and request.outdated:
            self._jobs[job_metadata.job_id] = job_metadata, None
            return
        parent = None if request is None else request.last
        self._submit(job_metadata, self._cache.store, parent=parent)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to load chunks into the primary tier."""
        wait_s = self._settings.promotion_wait_ms / 1000
        self._submit(job_metadata, self._cache.load, wait_s=wait_s)

    def _submit(
        self, job: TransferJob, begin: Callable[..., Transfer[Any]], **options: Any
    ) -> None:
        keys, pages = self._names(job.keys), kvhearth.Pages(self._kv, job.chunk_ids)
        # A job that is not valid fails; an exception would end the engine.
        self._jobs[job.job_id] = job, parse_arguments(partial(begin, keys, **options), pages)
        if keys and (request := self._requests.get(job.req_context.req_id)) is not None:
            request.last = keys[-1]

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
        for request in self._requests.values():
            request.outdated = True

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Yield which chunks the daemon has since the last call, and which it has no more."""
        if self._feed is None or not self._key_bytes:
            return
        stored, gone = list[tuple[Locality, OffloadKey]](), list[tuple[Locality, OffloadKey]]()
        for each in self._feed.take():
            before, now = _locality(each.before), _locality(each.now)
            if now is not before:
                stored += [] if now is None else [(now, self._key(each.key))]
                gone += [] if before is None else [(before, self._key(each.key))]
        for removed, told in ((False, stored), (True, gone)):
            for locality, some in groupby(told, lambda pair: pair[0]):
                keys = [key for _, key in some]
                # vLLM keeps what it has told about a chunk until its removal.
                yield OffloadingEvent(
                    keys, self.medium, removed, locality, removal_expected=not removed
                )

    def has_pending_work(self) -> bool:
        """Whether a step has something to publish."""
        return self._feed is not None and self._key_bytes > 0 and must_step(self._feed)

    def shutdown(self) -> None:
        """End all jobs and leave the daemon.

        Raises:
            TimeoutError: a copy still runs; vLLM must keep the primary tier's memory.
        """
        self._lookup_manager.shutdown()
        for thread in (self._feed, self._retainer):
            if thread is not None:
                thread.close(DRAIN_S)
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


def _request_of(context: ReqContext) -> Any:
    """Return the request that is arriving: vLLM gives it to its connector, but a part of it only to
    its tiers.
    """
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        request = frame.f_locals.get("request")
        if getattr(request, "request_id", None) == context.req_id:
            return request
    return None


def _locality(tier: Tier) -> Locality | None:
    """Return where a block is, as seen from this engine; None for nowhere."""
    if not tier:
        return None
    return Locality.REMOTE if tier is Tier.REMOTE else Locality.LOCAL


def _device() -> str:
    """Return what vLLM chooses an attention backend by, if nobody names one: a tier sees none."""
    if current_platform.is_cpu():
        return f"cpu/{torch.backends.cpu.get_cpu_capability()}"
    return f"{current_platform.device_type}/{current_platform.get_device_capability()}"


class _Lookups(AsyncLookupManager):
    """Asks the daemon on vLLM's thread for lookups."""

    def __init__(
        self, cache: Cache, tier_type: str, names: Callable[[Iterable[OffloadKey]], list[bytes]]
    ) -> None:
        self._cache, self._names = cache, names
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        """Return which chunks the daemon has, and begin to promote those on slower tiers."""
        clock = self._cache.client.clock
        wait = PromotionWait(clock.now() + REMOTE_S)
        while True:
            found = self._cache.lookup(self._names(keys), prefetch=True)
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
