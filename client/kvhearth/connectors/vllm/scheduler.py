"""The scheduler's half: decides about lookups, loads and stores, on one thread of vLLM's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from kvhearth.client import connect
from kvhearth.connectors.vllm.block_refs import BlockHolds
from kvhearth.connectors.vllm.context import Context
from kvhearth.connectors.vllm.counters import Tally
from kvhearth.connectors.vllm.fail_open import guarded, nothing
from kvhearth.connectors.vllm.groups import EngineGroups
from kvhearth.connectors.vllm.identity import weights_change
from kvhearth.connectors.vllm.load_policy import Bounds, LoadPolicy
from kvhearth.connectors.vllm.load_tracker import Loads
from kvhearth.connectors.vllm.requests import HANDOVER, Requests
from kvhearth.connectors.vllm.settings import Settings
from kvhearth.connectors.vllm.step_metadata import (
    STEP_TOKENS_MIN,
    Geometry,
    Handshake,
    StepMeta,
    WorkerReport,
)
from kvhearth.connectors.vllm.store_tracker import Stores
from kvhearth.connectors.vllm.worker import WorkerConnector
from kvhearth.contract import Contract
from kvhearth.counters import LOGGER

STEPS_MAX = 64
BLOCK_FREES_S = 1.0
"""Age of a store, in seconds, beyond which the scheduler preempts instead of waiting for it."""
STORE_S = 60.0
"""Age of a store, in seconds, beyond which it does not keep an idle engine stepping: its copies
hang.
"""
CLOSE_S = 5.0


def engage(
    settings: Settings,
    vllm_config: Any,
    hash_tokens: int,
    handshakes: Sequence[Handshake],
    block_pool: Any,
) -> SchedulerConnector | None:
    """Build the half that fits the workers' handshakes; None, with an error in the log, if this
    engine cannot be served.

    Args:
        settings: the user's options.
        vllm_config: vLLM's configuration.
        hash_tokens: tokens that one block hash covers.
        handshakes: handshakes of all ranks.
        block_pool: vLLM's block pool.
    """
    problem = next((one.problem for one in handshakes if one.problem), "")
    problem = problem or _cannot_continue(vllm_config)
    if not problem and len({one.contract for one in handshakes}) > 1:
        problem = "the ranks' pages differ, such as pipeline stages of unequal layers"
    if problem or not handshakes:
        LOGGER.error("this engine runs without KVHearth: %s", problem or "no worker answered")
        return None
    if handshakes[0].private:
        LOGGER.warning(
            "KVHearth keeps this engine's blocks for this engine alone: its weights or its block "
            "hashes have no identity that another one could have (docs/engines.md)"
        )
    return SchedulerConnector(settings, vllm_config, hash_tokens, handshakes[0], block_pool)


def _cannot_continue(vllm_config: Any) -> str:
    """Return why this engine must not continue a prefill from KV that it did not compute, or empty.

    vLLM disables chunks and prefix caching for such models and backends, yet still asks a
    connector. It would ignore the loaded KV, and the answer would be wrong.
    """
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        return (
            "chunked prefill is off, as vLLM has it where an attention backend cannot go on from "
            "cached KV (MLA on most CPUs, attention that is not causal)"
        )
    if not vllm_config.model_config.is_prefix_caching_supported:
        return "vLLM supports no prefix caching for this model"
    return ""


class SchedulerConnector:
    """Cache decisions of one engine.

    Args:
        settings: the user's options.
        vllm_config: vLLM's configuration.
        hash_tokens: tokens that one block hash covers.
        offer: any worker's handshake; they are all equal.
        block_pool: vLLM's block pool.
    """

    def __init__(
        self,
        settings: Settings,
        vllm_config: Any,
        hash_tokens: int,
        offer: Handshake,
        block_pool: Any,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        contract = Contract.from_json(offer.contract)
        geometry = Geometry(contract.tensor_parallel, contract.pipeline_parallel, offer.replicas)
        self.tally = Tally()
        self._settings = settings
        self._produces, self._consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._hands_over = transfer.kv_role == "kv_producer"
        live = weights_change(vllm_config, settings.on_reset)
        self._new_weights_on_reset = live and settings.on_reset != "keep"
        self._step = 0
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=STEPS_MAX)
        self._stepped_at = 0.0
        self._closed = False
        self._holds = BlockHolds(block_pool, settings.held_percent)
        self._policy = LoadPolicy(
            Bounds(
                settings.min_load_tokens,
                settings.max_load_tokens,
                # A decoding engine is configured to leave prefills to others.
                always=settings.policy == "always" or transfer.kv_role == "kv_consumer",
            )
        )
        self._groups = EngineGroups(contract, offer.kv_groups, hash_tokens)
        speculative = vllm_config.speculative_config
        eagle = speculative is not None and speculative.use_eagle_block_drop()
        self._client = connect(
            settings.url,
            contract,
            engine_id=str(transfer.engine_id),
            scheduler=True,
            rank=-1,
            map_arena=False,
        )
        context = Context(settings, self._client, self._groups, geometry, self._policy, self.tally)
        self._loads = Loads(context)
        self._requests = Requests(
            context,
            self._loads,
            self._groups.step_tokens if eagle else 0,
            consumes=self._consumes,
        )
        budget = int(vllm_config.scheduler_config.max_num_batched_tokens)
        stock_tokens = settings.stock_tokens or 2 * budget
        self._stores = Stores(context, self._holds, stock_tokens)
        self._unstepped = False
        self._worker: WorkerConnector | None = None

    def serve_unstepped(self, worker: WorkerConnector | None) -> None:
        """Let no block be held after the last request: this engine runs in the caller's own
        process, which steps it only while there are requests.

        Args:
            worker: the only rank, through which stores end when the last request does. None if
                ranks are in other processes: they end their stores within each step.
        """
        self._unstepped, self._worker = True, worker

    # -- requests ----------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """Handle the arrival of a request."""
        self._requests.new(request)

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """See ``Requests.matched``."""
        return self._requests.matched(request, computed_tokens) if self._consumes else (0, False)

    def allocated(self, request: Any, block_ids: Any, external_tokens: int) -> None:
        """See ``Requests.allocated``."""
        self._requests.allocated(request, block_ids, external_tokens)

    def sources(self, request_id: str, tokens: int) -> tuple[int, int]:
        """Split the ``tokens`` of a request's last load into (from DRAM, from SSD)."""
        state = self._requests.find(request_id)
        ssd = 0 if state is None else min(state.sources[1], tokens)
        return tokens - ssd, ssd

    def lose(self, request_id: str) -> None:
        """Report as failed a promised load that cannot begin."""
        state = self._requests.find(request_id)
        if state is not None:
            state.loading = True
        self._loads.lose(request_id)

    def finished(self, request: Any, block_ids: Any) -> dict[str, Any] | None:
        """Handle the end of a request whose blocks are about to be freed. Returns the parameters
        for the client.
        """
        told = self._finished(request, block_ids)
        if self._worker is not None and not self._requests.count:
            self._finish_stores(self._worker)
        return told

    @property
    def _steps_finish(self) -> bool:
        return self._unstepped and self._worker is None

    def _finish_stores(self, worker: WorkerConnector) -> None:
        """End all stores: a reset of vLLM's prefix cache, and sleep, need all blocks."""
        meta = StepMeta(self._step, stores=self._stores.take_due())
        ended, report = worker.finish_stores(meta)
        self.step_done(report, set(), set())
        if ended:
            # The copies of stores that are still open have ended, too; a step's output that vLLM
            # has not processed yet reports them.
            self._holds.release_all()
        else:
            LOGGER.warning("stores did not end in time: some of the engine's blocks stay held")

    def _finished(self, request: Any, block_ids: Any) -> dict[str, Any] | None:
        state = self._requests.finished(request.request_id)
        if state is None or state.loading:
            return None
        tokens = min(
            int(request.num_computed_tokens), state.dispatched_tokens, int(request.num_tokens)
        )
        if self._produces:
            state.progress.hashes = request.block_hashes
            if not self._steps_finish or self._requests.count:
                self._stores.plan(state.progress, lambda: block_ids, tokens)
            self.tally.add("store_skipped", self._stores.left_blocks(state.progress, tokens))
        return {HANDOVER: min(tokens, state.progress.tokens_max)} if self._hands_over else None

    # -- steps -------------------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepMeta:
        """Return the workers' jobs of this step."""
        self._step += 1
        meta = StepMeta(self._step, int(output.total_num_scheduled_tokens))
        self._requests.begin_step()
        # First, and apart from the stores: vLLM waits for promised loads.
        meta.loads, meta.lost = self._loads.take_due()
        if self._produces:
            self._plan_stores(output)
        meta.stores, meta.finish = self._stores.take_due(), self._steps_finish
        if meta.tokens >= STEP_TOKENS_MIN:
            self._steps.append((self._step, meta.tokens, time.monotonic()))
        return meta

    @guarded(nothing)
    def _plan_stores(self, output: Any) -> None:
        tables = output.kv_connector_block_state
        states = tables.boundary_state_offloads if tables is not None else {}
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.for_stores(request_id)
            if state is None or state.loading or tables is None:
                continue
            request, progress = state.request, state.progress
            state.dispatched_tokens = request.num_computed_tokens + scheduled
            tokens = min(state.dispatched_tokens, request.num_tokens)
            offered = states.get(request_id, ())
            if min(tokens, progress.tokens_max) < progress.due_tokens and not offered:
                continue
            progress.hashes = request.block_hashes
            find_block_ids = partial(tables.get_block_ids, request_id)
            self._stores.plan(progress, find_block_ids, tokens, offered)

    def step_done(
        self,
        report: WorkerReport | None,
        loaded: set[str],
        failed: set[str],
        invalid: Collection[int] = (),
    ) -> None:
        """Process the workers' results.

        Args:
            report: results of our copies.
            loaded, failed: requests whose loads ended, and those of them that failed, of every
                connector.
            invalid: vLLM's blocks that another connector failed to load.
        """
        if invalid:
            self._stores.void()
        if report is not None:
            for request_id, outcomes in report.loads.items():
                self._loads.reported(request_id, outcomes)
        for request_id in loaded:
            self._loads.finish(request_id, failed=request_id in failed)
            state = self._requests.find(request_id)
            if state is not None and state.loading:
                state.loading = False
                state.given_up |= request_id in failed
        if report is not None:
            self._stores.reported(report)
            self._time_steps(report.steps)

    def _time_steps(self, numbers: list[int]) -> None:
        """Learn from steps that had one prefill or more. Steps may overlap: each is timed from the
        end of the one before.
        """
        now = time.monotonic()
        while self._steps and numbers and self._steps[0][0] <= numbers[-1]:
            number, tokens, begun_at = self._steps.popleft()
            if number in numbers:
                self._policy.prefill.observe(tokens, now - max(begun_at, self._stepped_at))
                self._stepped_at = now

    def trouble(self, name: str) -> None:
        """Count a call that proceeded without the cache; see ``guarded``."""
        self.tally.add("troubles")

    # -- the rest ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether steps are needed although no request runs: stores report through steps."""
        return self._stores.open_count > 0 and self._stores.oldest_s < STORE_S

    @property
    def frees_soon(self) -> bool:
        """Whether waiting for stores frees blocks without a preemption."""
        if not self._stores.open_count:
            return False
        return self._stores.oldest_s < BLOCK_FREES_S and self._holds.would_free

    def take_counts(self) -> dict[str, float]:
        """Return counters since the last call and gauges, empty if nothing happened."""
        counts = self.tally.take()
        if counts:
            for name, value in counts.items():
                self._client.count(name, int(value))
            counts["held_blocks"] = self._holds.held_count
            counts["attached"] = float(bool(self._client.session_id))
        return counts

    def reset(self) -> bool:
        """Drop the namespace's blocks if it is this engine's alone, or if the settings demand it.

        False if blocks that should have been dropped were not: loads are under way, or the daemon
        does not answer.
        """
        if self._settings.on_reset != "keep" and self._loads.count:
            LOGGER.warning("reset refused: %d loads are under way", self._loads.count)
            return False
        self._requests.forget()
        if self._new_weights_on_reset:
            if self._client.bump_epoch() < 0:
                return False
            self._requests.outdate()
            return True
        if self._settings.on_reset == "auto" and self._client.drop_if_alone():
            self._requests.outdate()
            return True
        LOGGER.warning(
            "reset: blocks in the KVHearth daemon are kept, since other engines share them or it "
            "was told so; set on_reset=drop in kv_connector_extra_config if new weights were loaded"
        )
        return True

    def shutdown(self) -> None:
        """Commit finished stores and release all resources."""
        if self._closed:
            return
        self._closed = True
        self._stores.close(CLOSE_S)
        self._requests.close(CLOSE_S)
        self._loads.close()
        self._client.close(CLOSE_S)
