"""vLLM's own offloading with KVHearth below it: everything but the copies from and to a GPU.

Runs in the engines' environment, as ``inside``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.request import Request

from kvhearth.connectors.core.block_feed import BlockChange
from kvhearth.connectors.vllm import tier
from kvhearth.model import Tier

CHUNKS = 12
CHUNK_BYTES = 4 << 20
PRIMARY_CHUNKS = 16
WAIT_S = 300.0
KEYS = [make_offload_key(bytes([number + 1]) * 32, 0) for number in range(CHUNKS)]


def chunks() -> np.ndarray:
    """Return the chunks' bytes, of shape (CHUNKS, CHUNK_BYTES)."""
    return np.random.default_rng(33).integers(0, 256, (CHUNKS, CHUNK_BYTES), np.uint8)


TOKENS, HEADS, DIM = 32, 8, 2048
"""A block of one layer of float32 keys and values takes ``CHUNK_BYTES``."""


class Engine:
    """The scheduler's half of an engine with ``TieringOffloadingSpec``, made by vLLM's connector.

    Args:
        model: directory of the model.
        options: entry of ``secondary_tiers``, but its ``type``.
        events: whether it publishes which blocks are where.
        given: arguments of the engine.
    """

    def __init__(
        self, model: str, options: dict[str, Any], *, events: bool = False, **given: Any
    ) -> None:
        load_general_plugins()
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": PRIMARY_CHUNKS * CHUNK_BYTES,
            "secondary_tiers": [{"type": "KVHearthTier", **options}],
        }
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )
        config = AsyncEngineArgs(
            model=model,
            block_size=TOKENS,
            skip_tokenizer_init=True,
            kv_transfer_config=transfer,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=events, publisher="null"),
            **given,
        ).create_engine_config()
        spec = FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32
        )
        blocks = KVCacheConfig(
            num_blocks=PRIMARY_CHUNKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        connector = OffloadingConnector(config, KVConnectorRole.SCHEDULER, blocks)
        self.scheduler = connector.scheduler
        self.manager = self.scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        primary = self.manager.primary_tier
        self.mapped = primary._mmap_region.mmap_obj
        self.rows = np.asarray(primary.get_kv_memoryview()).view(np.uint8)
        self.events: list[Any] = []
        self._stored: list[bool] = []
        self._jobs_of = self.tier.get_finished_jobs
        self.tier.get_finished_jobs = self._finished
        self.request = ReqContext("request")
        self.manager.on_new_request(self.request)

    def step(self) -> None:
        """End a step of the scheduler, which takes the events, too."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.events += self.manager.take_events()

    def steps_until(self, condition: Callable[[], Any], what: str) -> None:
        """Run steps until ``condition()``."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, what
            self.step()
            time.sleep(0.002)

    def store(self, keys: Sequence[OffloadKey] = KEYS, request: Any = None) -> list[bool]:
        """Store chunks as a GPU's worker would, and wait; return the jobs' results."""
        request = request or self.request
        self._stored.clear()
        out = self.manager.prepare_store(keys, request)
        for key, row in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            self.rows[row] = chunks()[keys.index(key)]
        self.manager.complete_store(keys, request)
        self.steps_until(lambda: not self.manager.has_pending_work(), "stores end")
        return list(self._stored)

    def serve(self, name: str, prompt_chunks: int, **params: Any) -> None:
        """Run a request of the session ``agent`` whose prompt fills so many chunks, and end it."""
        request = Request(
            name,
            list(range(TOKENS * prompt_chunks)),
            SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}),
            None,
            session_id="agent",
            block_hasher=get_request_block_hasher(TOKENS, sha256),
        )
        self.scheduler.on_new_request(request)
        state = self.scheduler._req_status[name]
        state.update_offload_keys()
        self.store(state.group_states[0].offload_keys, state.req_context)
        self.manager.on_request_finished(state.req_context)

    def _finished(self) -> list[Any]:
        jobs = list(self._jobs_of())
        self._stored += [job.success for job in jobs]
        return jobs

    def looked_up(self) -> list[str]:
        """Look the chunks up, step by step, until each is in the primary tier or a miss."""
        names: list[str] = []

        def settled() -> bool:
            names[:] = [self.manager.lookup(key, self.request).name for key in KEYS]
            return not {"RETRY", "HIT_PENDING"} & set(names)

        self.steps_until(settled, "lookups end")
        return names

    def equal(self, names: list[str]) -> bool:
        """Return whether the chunks that were found are those that were stored."""
        found = [number for number, name in enumerate(names) if name == LookupResult.HIT.name]
        keys = [KEYS[number] for number in found]
        rows = self.manager.prepare_load(keys, self.request).chunk_ids
        equal = np.array_equal(self.rows[rows], chunks()[found])
        self.manager.complete_load(keys, self.request)
        return equal

    def close(self) -> None:
        """Shut down; the primary tier's memory must be free then."""
        self.manager.on_request_finished(self.request)
        self.step()
        del self.rows
        self.manager.shutdown()
        assert self.mapped.closed, "something still views the primary tier"


@contextlib.contextmanager
def running(model: str, options: dict[str, Any], **given: Any) -> Iterator[Engine]:
    """An engine that is shut down at the end."""
    engine = Engine(model, options, **given)
    yield engine
    engine.close()


def store(model: str, options: dict[str, Any]) -> list[bool]:
    """Return the results of an engine's stores."""
    with running(model, options) as engine:
        return engine.store()


def load(model: str, options: dict[str, Any], **given: Any) -> tuple[list[str], bool]:
    """Return what an engine finds, and whether its bytes are those that were stored."""
    with running(model, options, **given) as engine:
        names = engine.looked_up()
        return names, engine.equal(names)


def lose(model: str, options: dict[str, Any], pid: int) -> dict[str, Any]:
    """Kill the daemon once its answers are here, before the loads begin; then go on."""
    with running(model, options) as engine:
        tier = engine.tier
        for key in KEYS:
            tier.lookup(key, engine.request)
        tier.on_schedule_end(ScheduleEndContext((), ()))
        answers = tier._lookup_manager._pending_results
        answers.put(answers.get(timeout=WAIT_S))
        promised = {tier.lookup(key, engine.request).name for key in KEYS}
        os.kill(pid, signal.SIGKILL)
        names = engine.looked_up()
        return {"promised": list(promised), "names": names, "stored": engine.store()}


def fail_late(model: str, options: dict[str, Any]) -> list[str]:
    """Let a load fail whose request has ended, while another request asks for the key."""
    with running(model, options) as engine:
        tier, key, second = engine.tier, KEYS[0], ReqContext("second")
        job = TransferJob(1, [key], np.array([0]), is_promotion=True, req_context=engine.request)
        tier.submit_load(job)
        names = [tier.lookup(key, second).name]
        tier.on_schedule_end(ScheduleEndContext((), ()))
        tier._jobs[1][1].result(WAIT_S)
        names += [str(job.success) for job in engine._jobs_of()]
        answers = tier._lookup_manager._pending_results
        answers.put(answers.get(timeout=WAIT_S))
        names.append(tier.lookup(key, second).name)
        tier.on_request_finished(second)
        return names


def reset(model: str, options: dict[str, Any], *, shared: bool) -> dict[str, Any]:
    """Reset vLLM's cache between two stores of a request, and look its chunks up.

    Args:
        shared: another engine is attached to the namespace.
    """
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage().partition(":")[0])
    logging.getLogger("kvhearth").addHandler(handler)
    with contextlib.ExitStack() as stack:
        if shared:
            stack.enter_context(running(model, options))
        engine = stack.enter_context(running(model, options))
        stored = engine.store()
        forget(engine)
        stored += engine.store()
        forget(engine)
        return {"stored": stored, "names": engine.looked_up(), "warnings": warnings}


def publish(
    model: str, options: dict[str, Any], *, algorithm: str, bytes_of_hash: int, known: bool
) -> list[int]:
    """Store the chunks, then drop the namespace; return how many the tier tells as stored and as
    removed, by vLLM's own keys.

    Args:
        known: the tier finds vLLM's configuration.
    """

    def told(*, removed: bool) -> int:
        ours = [event for event in engine.events if event.medium is Medium.STORAGE]
        assert {(event.ownership, event.locality) for event in ours} <= {(None, Locality.LOCAL)}
        return sum(len(set(event.keys) & set(KEYS)) for event in ours if event.removed == removed)

    KEYS[:] = [key[-bytes_of_hash - 4 :] for key in KEYS]
    if not known:
        tier._engine_config = lambda: None
    engine = Engine(model, options, events=True, prefix_caching_hash_algo=algorithm)
    engine.store()
    engine.steps_until(lambda: told(removed=False) == CHUNKS, "stores are told")
    engine.manager.reset_cache()
    engine.steps_until(lambda: told(removed=True) == CHUNKS, "removals are told")
    engine.close()
    return [told(removed=False), told(removed=True)]


def moved(model: str, options: dict[str, Any]) -> list[tuple[bool, str]]:
    """Return the events, removed or not and where, of a chunk that goes from SSD to a remote, of
    one that leaves memory for SSD, and of one that leaves a remote.
    """
    moves = [(Tier.SSD, Tier.REMOTE), (Tier.DRAM, Tier.SSD), (Tier.REMOTE, Tier.NOWHERE)]
    changes = [
        BlockChange(0, key, before, now) for key, (before, now) in zip(KEYS, moves, strict=False)
    ]
    with running(model, options, events=True) as engine:
        engine.tier._feed.take = lambda: [changes.pop(0)] if changes else []
        told = []
        while changes:
            key = changes[0].key
            for event in engine.tier.take_events():
                assert event.keys == [key]
                told.append((event.removed, event.locality.value))
        return told


def retain(model: str, options: dict[str, Any], *, goes_on: bool) -> dict[str, int]:
    """Serve a request that asks to have its four chunks kept, and maybe the next of its session;
    return the client's counters.
    """
    init_none_hash(sha256)
    with running(model, options) as engine:
        engine.serve("first", 4, kvhearth_retain_s=600, kvhearth_retain=600)
        if goes_on:
            engine.serve("next", 6)
        retainer = engine.tier._retainer
        engine.steps_until(lambda: not (retainer._wishes or retainer._over), "pins are settled")
        return engine.tier._cache.client.counters()


def forget(engine: Engine) -> None:
    """Reset as vLLM does for new weights; 0.33 holds promotions until its workers are done."""
    engine.manager.reset_cache()
    if hasattr(engine.manager, "on_reset_flushed"):
        engine.manager.on_reset_flushed()
