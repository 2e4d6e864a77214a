"""``KVHearthConnector``: vLLM's connector interface, one class a role, over ``connectors/core``."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Iterable
from logging import ERROR
from typing import Any
from weakref import WeakValueDictionary

import vllm.envs
from prometheus_client import Counter, Gauge
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvhearth.connectors.core import engine as stats
from kvhearth.connectors.core.scheduler import SchedulerConnector, guarded, nothing
from kvhearth.connectors.core.settings import parse_settings
from kvhearth.connectors.core.step_metadata import Handshake, StepMeta, WorkerReport
from kvhearth.connectors.core.worker import WorkerConnector
from kvhearth.connectors.vllm.adapter import (
    VllmSettings,
    hash_tokens_of,
    make_scheduler,
    make_worker,
    step_of,
    table_of,
)
from kvhearth.connectors.vllm.events import GroupReach, clears_all, kv_events, must_step, reaches_of
from kvhearth.connectors.vllm.hints import HANDOVER
from kvhearth.connectors.vllm.identity import run_of
from kvhearth.counters import LOGGER, log_event


class HearthStats(KVConnectorStats):
    """Counters and gauges of ``stats`` by name, in ``data``."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Clear all values."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sum of both."""
        return HearthStats(data=stats.merged(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return the values for the log line."""
        return dict(stats.summary(self.data))

    def is_empty(self) -> bool:
        """Whether there are no values."""
        return not self.data


class HearthProm(KVConnectorPromMetrics):
    """The ``vllm:kvhearth_*`` metrics in the engine's ``/metrics``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._by_engine(metric_types[Counter], name, text)
            for name, text in stats.COUNTERS.items()
        }
        self._gauges = {
            # Each report of an engine goes to one of its API servers: the last one counts.
            name: self._by_engine(metric_types[Gauge], name, text, multiprocess_mode="mostrecent")
            for name, text in stats.GAUGES.items()
        }

    def _by_engine(self, kind: Any, name: str, text: str, **how: str) -> dict[int, Any]:
        name = f"vllm:kvhearth_{name}"
        metric = kind(name=name, documentation=text, labelnames=self._labelnames, **how)
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts since the last call."""
        for name, value in transfer_stats_data.items():
            if name in self._counters and value > 0:
                self._counters[name][engine_idx].inc(value)
            elif name in self._gauges:
                self._gauges[name][engine_idx].set(value)


BLOCKS_OUTERMOST = "BLHNC"
HANDSHAKE_STEPS_MAX = 64
"""Number of steps within which workers must report their handshakes; an idle engine runs them at
once.
"""

KVConnectorMetadata.register(StepMeta)
KVConnectorWorkerMetadata.register(WorkerReport)
KVConnectorHandshakeMetadata.register(Handshake)


_workers: WeakValueDictionary[str, WorkerConnector] = WeakValueDictionary()
"""Workers of this process, by engine id."""


class KVHearthConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps vLLM's KV blocks in a KVHearth daemon.

    vLLM makes one in the scheduler's process, which becomes a ``SchedulerRole``, and one in each
    worker's, a ``WorkerRole``.

    Args:
        vllm_config, role, kv_cache_config: vLLM's arguments.

    Raises:
        KVHearthError: ``config_invalid`` or ``bad_url`` for invalid options. Nothing else is
            raised, then or later; without a daemon the engine runs without a cache.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init_subclass__(cls) -> None:
        # MultiConnector looks its members up in vLLM's registry by the names of their classes.
        cls.__name__ = "KVHearthConnector"

    def __new__(
        cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any
    ) -> KVHearthConnector:
        """Return an object of the role's class."""
        return object.__new__(WorkerRole if role is KVConnectorRole.WORKER else SchedulerRole)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        transfer = vllm_config.kv_transfer_config
        self._settings = parse_settings(VllmSettings, transfer.kv_connector_extra_config)
        self._run = run_of(vllm_config)

    def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing: a call of the other role, or one about a layer. Blocks are copied whole."""

    wait_for_layer_load = save_kv_layer = start_load_kv = wait_for_save = _nothing
    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = _nothing
    request_finished_all_groups = _nothing

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that the user's ``layout`` demands.

        ``auto`` demands blocks outermost, because a device copies each such block at once. It
        demands nothing on the CPU, whose attention has a layout of its own, nor under
        ``MultiConnector``, where two different demands end the engine.
        """
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = parse_settings(VllmSettings, given)
        if settings.layout == "auto":
            device = getattr(vllm_config.device_config, "device_type", "")
            alone = device == "cuda" and not _asked_by_multi_connector()
            return BLOCKS_OUTERMOST if alone else None
        return None if settings.layout == "none" else settings.layout

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HearthStats:
        """Build a stats object from another process's data."""
        return HearthStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HearthProm:
        """Build the connector's part of the engine's ``/metrics``."""
        return HearthProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class SchedulerRole(KVHearthConnector):
    """The connector in the scheduler's process. Its half starts with the workers' handshakes."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_pool: Any = None
        self._reaches: dict[int, GroupReach] = {}
        self._scheduler: SchedulerConnector | None = None
        self._handshake_steps = 0
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            log_event(
                ERROR,
                "settings.load_failure_policy",
                "a load that fails ends its request with an error: set kv_load_failure_policy to "
                "'recompute'",
                policy=policy,
            )

    def record_failure(self, name: str) -> None:
        """Count a call that proceeded without the cache."""
        if self._scheduler is not None:
            self._scheduler.record_failure(name)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not kept is a later miss, never a wrong answer."""
        return False

    @guarded(nothing)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Start the scheduler's half from the workers' handshakes, keyed by (pipeline rank, tensor
        rank).

        Under ``MultiConnector`` the handshakes are those of one sibling, if any. Ours then come
        with the workers' first report.
        """
        ours = [one for one in metadata.values() if isinstance(one, Handshake)]
        if ours:
            self._engage(ours)
        else:
            self._handshake_steps = HANDSHAKE_STEPS_MAX

    def _engage(self, handshakes: list[Handshake]) -> None:
        if self._scheduler is not None:
            return
        self._handshake_steps = 0
        self._reaches = reaches_of(self._kv_cache_config)
        self._scheduler = make_scheduler(
            self._settings,
            self._vllm_config,
            hash_tokens_of(self._vllm_config, self._kv_cache_config),
            handshakes,
            self._block_pool,
            # A loop of vLLM's own steps the engine while it has no request, so that stores end.
            stepped=bool(vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING),
            worker=_workers.get(self._run),
        )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Set vLLM's block pool, in which stores hold blocks."""
        self._block_pool = gpu_block_pool

    @guarded(nothing)
    def on_new_request(self, request: Any) -> None:
        """Send the request's lookup to the daemon at once."""
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of tokens that can be loaded, always asynchronously; (None, False)
        while it is not known.
        """
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Return the tokens that a load brings, by the daemon's tier that they came from."""
        if self._scheduler is None:
            return {}
        tokens = self._scheduler.sources(request.request_id, num_external_tokens)
        tiers = zip((CacheHitSource.HOST, CacheHitSource.DISK), tokens, strict=True)
        return {source: count for source, count in tiers if count}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load the offered tokens of a request that was admitted."""
        if not self._allocated(request, blocks, num_external_tokens) and num_external_tokens:
            # vLLM waits for this load: report it as failed.
            self._lose(request.request_id)

    @guarded(lambda: False)
    def _allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> bool:
        if self._scheduler is not None:
            table = table_of(blocks) if num_external_tokens else ()
            self._scheduler.allocated(request, table, num_external_tokens)
        return True

    @guarded(nothing)
    def _lose(self, request_id: str) -> None:
        if self._scheduler is not None:
            self._scheduler.lose(request_id)

    @guarded(StepMeta)
    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        """Return the workers' jobs of this step."""
        if self._scheduler is not None:
            if self._scheduler.feed is not None and clears_all(self._block_pool):
                self._scheduler.feed.tell_again()
            return self._scheduler.plan_step(step_of(scheduler_output, self._kv_cache_manager))
        if self._handshake_steps:
            self._handshake_steps -= 1
            if not self._handshake_steps:
                self._engage([])
        return StepMeta()

    @guarded(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' results."""
        report = connector_output.kv_connector_worker_meta
        if self._handshake_steps and isinstance(report, WorkerReport) and report.handshakes:
            self._engage(report.handshakes)
        if self._scheduler is not None:
            self._scheduler.step_done(
                report if isinstance(report, WorkerReport) else None,
                set(connector_output.finished_recving or ()),
                set(connector_output.failed_recving or ()),
                connector_output.invalid_block_ids or (),
            )

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request. Its blocks may be freed: those that are being copied are
        held.
        """
        tokens = self._scheduler and self._scheduler.finished(request, block_ids)
        hands_over = self._vllm_config.kv_transfer_config.kv_role == "kv_producer"
        return False, None if tokens is None or not hands_over else {HANDOVER: tokens}

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Variant of ``request_finished_all_groups`` for an engine without the hybrid cache
        manager.
        """
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return where blocks are in the daemon, and no more, since the last call."""
        if self._scheduler is None or self._scheduler.feed is None:
            return ()
        return kv_events(self._scheduler.feed.take(), self._scheduler.groups, self._reaches)

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must step, so that stores or the workers' handshakes are
        reported.
        """
        if self._scheduler is None:
            return self._handshake_steps > 0
        feed = self._scheduler.feed
        return self._scheduler.has_work or (feed is not None and must_step(feed))

    @guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Whether blocks will become free without preempting."""
        return self._scheduler is not None and self._scheduler.frees_soon

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Drop unused leases, and drop the namespace's blocks if they are this engine's alone."""
        return True if self._scheduler is None else self._scheduler.reset()

    @guarded(nothing)
    def get_kv_connector_stats(self) -> HearthStats | None:
        """Return the counters since the last call; None if nothing happened."""
        counts = {} if self._scheduler is None else self._scheduler.take_counts()
        return HearthStats(data=counts) if counts else None

    @guarded(nothing)
    def shutdown(self) -> None:
        """Let copies end and release all resources."""
        if self._scheduler is not None:
            self._scheduler.shutdown()


class WorkerRole(KVHearthConnector):
    """The connector in a worker's process. Its half attaches with the rank's tensors."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._worker = self._make_worker({})

    def _make_worker(self, kv_caches: dict[str, Any]) -> WorkerConnector:
        config, pages = self._vllm_config, self._kv_cache_config
        return make_worker(self._settings, config, pages, kv_caches, _own_rank())

    def record_failure(self, name: str) -> None:
        """Count a call that proceeded without the cache."""
        self._worker.counters.add("troubles")

    @guarded(nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Attach in the background as the rank that holds these tensors, by layer."""
        self._worker = _workers[self._run] = self._make_worker(kv_caches)

    @guarded(nothing)
    def get_handshake_metadata(self) -> Handshake | None:
        """Return this rank's handshake for the scheduler.

        None under ``MultiConnector``, which passes one child's handshake to all of them; the first
        report then brings ours.
        """
        is_ours = get_kv_transfer_group() is self
        return self._worker.handshake() if is_ours else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads. vLLM's runners differ in whether there are attention metadata
        here, so that the step's own metadata tell if it has tokens.
        """
        if not self._start_loads():
            self._worker.lose_loads(self._meta())

    @guarded(lambda: False)
    def _start_loads(self) -> bool:
        self._worker.start_loads(self._meta())
        return True

    def wait_for_save(self) -> None:
        """Begin this step's stores without waiting for them, since the scheduler holds the
        blocks.
        """
        if not self._start_stores():
            self._worker.lose_stores(self._meta())

    @guarded(lambda: False)
    def _start_stores(self) -> bool:
        self._worker.start_stores(self._meta())
        return True

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the loads that ended; failed ones are among the finished."""
        loaded, failed = self._results()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    @guarded(lambda: (set(), set()))
    def _results(self) -> tuple[set[str], set[str]]:
        return self._worker.results()

    @guarded(nothing)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return the report of ended copies for the scheduler."""
        return self._worker.report()

    def _meta(self) -> StepMeta:
        meta = self._connector_metadata
        return meta if isinstance(meta, StepMeta) else StepMeta()

    @guarded(nothing)
    def get_kv_connector_stats(self) -> HearthStats | None:
        """Return the counters since the last call; None if nothing happened."""
        counts = self._worker.counters.take()
        return HearthStats(data=counts) if counts else None

    @guarded(nothing)
    def shutdown(self) -> None:
        """Let copies end and release all resources."""
        self._worker.shutdown()


def _asked_by_multi_connector() -> bool:
    """Whether ``MultiConnector`` is calling, found by a walk up the stack: the configuration that
    it hands to a child looks like that of a lone connector.
    """
    asking = MultiConnector.get_required_kvcache_layout.__func__.__code__
    return any(frame.f_code is asking for frame, _ in traceback.walk_stack(inspect.currentframe()))


def _log_with_vllm() -> None:
    """Send our log to vLLM's handlers, unless the user has set handlers of their own."""
    if not LOGGER.handlers:
        theirs = logging.getLogger("vllm")
        for handler in theirs.handlers:
            LOGGER.addHandler(handler)
        LOGGER.setLevel(theirs.level)
        LOGGER.propagate = not theirs.handlers


def _own_rank() -> int:
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
    from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size

    size = int(get_tensor_model_parallel_world_size())
    return int(get_pp_group().rank_in_group) * size + int(get_tensor_model_parallel_rank())
