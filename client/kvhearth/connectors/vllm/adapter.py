"""Translates vLLM's configuration, requests, KV cache and steps for ``connectors/core``.

Importing it does not require vLLM.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR
from typing import Any, ClassVar, overload

from kvhearth.codec import LOSSLESS
from kvhearth.connectors.core.engine import (
    UNBOUNDED_TOKENS,
    BlockTable,
    EngineFacts,
    RequestOptions,
    Step,
)
from kvhearth.connectors.core.scheduler import SchedulerConnector, agreed
from kvhearth.connectors.core.settings import Settings, one_of
from kvhearth.connectors.core.step_metadata import Geometry, Handshake
from kvhearth.connectors.core.worker import WorkerConnector
from kvhearth.connectors.vllm.hints import HANDOVER, HintReader
from kvhearth.connectors.vllm.identity import (
    Adapters,
    EngineGroup,
    engine_contract,
    interleave_of,
    model_name_of,
    process_group_of,
    weights_change,
)
from kvhearth.contract import Contract
from kvhearth.copiers import kernels
from kvhearth.counters import Warnings, log_event
from kvhearth.errors import KVHearthError, Reason
from kvhearth.page_layout import PagedKV
from kvhearth.wire.handshake import Run


def engine_pages(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], context_parallel: int
) -> tuple[list[EngineGroup], list[PagedKV]]:
    """Return the groups that can be cached, and their pages.

    Where vLLM places whole pages, their bytes are taken as they lie in its allocation, including
    padding, by the strides of its plan. The strides are checked against the registered tensors.

    Args:
        kv_cache_config: vLLM's KV cache configuration of this rank.
        kv_caches: registered tensors by layer name, blocks first.
        context_parallel: ranks over which a group's tokens may be spread.

    Raises:
        KVHearthError: ``bad_contract`` naming the part that cannot be cached.
    """
    groups, pages = [], []
    runs = _page_runs(kv_cache_config, kv_caches)
    for number in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[number]
        if group.host_resident:
            raise _bad(f"group {number} lives in host memory")
        names = [name for name in group.layer_names if name in runs]
        if len(names) != len(group.layer_names) or not names:
            raise _bad(f"group {number}: not all of its layers have pages")
        kv = PagedKV([run for name in names for run in runs[name]])
        if kv.page_count != kv_cache_config.num_blocks:
            raise _bad(f"group {number}: {kv.page_count} pages, not {kv_cache_config.num_blocks}")
        groups.append(_describe(number, group, len(names), kv.page_bytes, context_parallel))
        pages.append(kv)
    if not groups:
        raise _bad("no group of its KV cache can be found again by block hashes")
    return groups, pages


def _describe(
    number: int, group: Any, layers: int, page_bytes: int, context_parallel: int
) -> EngineGroup:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    spec = getattr(group.kv_cache_spec, "first_spec", group.kv_cache_spec)
    if type(spec).__name__ == "RSWASpec":
        raise _bad("KV of a window over generated tokens is no function of the prefix")
    kind = str(get_kv_cache_spec_kind(group.kv_cache_spec).value)
    if kind == "mamba" and spec.mamba_cache_mode != "align":
        raise _bad(
            f"mamba_cache_mode {spec.mamba_cache_mode!r} keeps no states to restore: use "
            "--enable-prefix-caching, which sets 'align'"
        )
    window = 0
    if kind.startswith("sliding_window"):
        window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    elif kind == "chunked_local_attention":
        window = int(spec.attention_chunk_size) + 1
    return EngineGroup(
        kv_group=number,
        kind=kind,
        block_tokens=spec.block_size * (context_parallel if spec.dcp_sharded else 1),
        window_tokens=window,
        layers=layers,
        page_bytes=page_bytes,
        dtype=str(getattr(spec, "dtype", "torch.uint8")),
    )


def _page_runs(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return, by layer, tensors whose first dimension is vLLM's block and whose blocks are
    dense.
    """
    runs: dict[str, list[Any]] = {}
    specs = _layer_specs(kv_cache_config)
    whole = _places_whole_pages(str(kv_cache_config.kv_cache_layout or ""))
    for plan in kv_cache_config.kv_cache_tensors:
        if plan.host_resident:
            continue
        for index, name in enumerate(plan.layers):
            cache = kv_caches.get(name)
            if cache is None or name not in specs:
                continue
            first = cache[0] if isinstance(cache, list | tuple) else cache
            start = plan.offset + index * plan.layer_stride
            if whole:
                page = specs[name].page_size_bytes
                count = kv_cache_config.num_blocks
                runs[name] = [_raw(first, start, count, page, plan.block_stride)]
            else:
                # A page is cut into one run a head.
                runs[name] = [first[:, head] for head in range(first.shape[1])]
    return runs


def _raw(tensor: Any, start: int, count: int, page: int, stride: int) -> Any:
    """Return ``count`` pages from byte ``start`` of a tensor's allocation on, shape (count,
    page).
    """
    import torch

    storage = tensor.untyped_storage()
    base = tensor.data_ptr() - storage.data_ptr()
    if base != start or storage.nbytes() < start + (count - 1) * stride + page:
        raise _bad(f"a layer lies at {base} of its allocation, vLLM's plan says {start}")
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, start, (count, page), (stride, 1))


def _layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    specs = {}
    for group in kv_cache_config.kv_cache_groups:
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            specs[name] = group.kv_cache_spec if per_layer is None else per_layer[name]
    return specs


def _places_whole_pages(layout: str) -> bool:
    """Whether a layer's page is one run: layers and blocks are the two outer dimensions."""
    return set(layout[:2]) == {"L", "B"}


def _bad(problem: str) -> KVHearthError:
    return KVHearthError(Reason.BAD_CONTRACT, problem)


_TOKENS_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class VllmSettings(Settings):
    """Options accepted in ``kv_connector_extra_config``.

    Attributes:
        layout: order of the dimensions of vLLM's KV cache that the connector demands: ``BLHNC``,
            ``none``, or ``auto``: ``BLHNC`` on CUDA unless another connector runs beside it.
    """

    PLACE: ClassVar[str] = "kv_connector_extra_config"

    layout: str = one_of("auto", "BLHNC", "none")


class VllmPages:
    """vLLM's block pool as a ``PagePool``.

    Args:
        pool: vLLM's block pool; ``blocks``, ``touch`` and ``free_blocks`` are used.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @property
    def page_count(self) -> int:
        """Number of pages."""
        return len(self._pool.blocks)

    def hold(self, pages: Sequence[int]) -> None:
        """Add a reference to each page, which keeps it from reuse."""
        self._pool.touch([self._pool.blocks[page] for page in pages])

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference of each page. Pages without one may be reused, the first one first."""
        self._pool.free_blocks([self._pool.blocks[page] for page in pages])

    def has_one_reference(self, page: int) -> bool:
        """Whether the page becomes free when one reference is dropped."""
        return bool(self._pool.blocks[page].ref_cnt == 1)


class RequestReader:
    """Reads the demands of vLLM's requests.

    Args:
        publishes: whether the engine publishes which blocks are where, with their tokens.
        lora_config: vLLM's, or None.
    """

    def __init__(self, *, publishes: bool = False, lora_config: Any = None) -> None:
        self._publishes = publishes
        self._adapters = Adapters(lora_config)
        self._hints, self._warnings = HintReader(), Warnings()

    def options_of(self, request: Any) -> RequestOptions:
        """Return a request's demands from its ``kv_transfer_params`` and its adapter."""
        params, lora = request.kv_transfer_params or {}, request.lora_request
        hints = self._hints.read(params, request.kv_hints)
        return RequestOptions(
            skips=bool(request.skip_reading_prefix_cache),
            handover_tokens=self._tokens(params, HANDOVER, 0),
            load_tokens_max=self._tokens(params, "max_load_tokens", UNBOUNDED_TOKENS),
            store_tokens_max=self._tokens(params, "max_offload_tokens", UNBOUNDED_TOKENS),
            find_key_salt=None if lora is None else lambda: self._adapters.digest(lora),
            token_ids=request.all_token_ids if self._tells_tokens(request) else None,
            session_id=str(request.session_id or ""),
            prefetch=hints.prefetch,
            retain_s=hints.retain_s,
            bad_hints=hints.bad_hints,
        )

    def _tells_tokens(self, request: Any) -> bool:
        """Whether a request's tokens are published: they are all that its block hashes cover."""
        return self._publishes and not (
            request.lora_request
            or request.mm_features
            or request.cache_salt
            or request.prompt_embeds is not None
        )

    def _tokens(self, params: Mapping[str, Any], name: str, absent: int) -> int:
        """Return a token count from outside; ``absent`` also in place of what is none."""
        value = params.get(name)
        if type(value) is int and 0 <= value <= _TOKENS_MAX:
            return value
        if value is not None:
            self._warnings.warn(
                "request.bad_tokens",
                f"a request's parameter is ignored: it must be a whole number, 0 to {_TOKENS_MAX}",
                kind=name,
                parameter=name,
                type=type(value).__name__,
            )
        return absent


class BlockIds(Sequence[int]):
    """Ids of vLLM's blocks, read when they are accessed: a long request has hundreds.

    Args:
        blocks: the blocks, in a list that may grow.
    """

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> BlockIds: ...
    def __getitem__(self, index: int | slice) -> int | BlockIds:
        if isinstance(index, slice):
            return BlockIds(self._blocks[index])
        return int(self._blocks[index].block_id)

    def __iter__(self) -> Iterator[int]:
        return map(_block_id, self._blocks)


_block_id: Callable[[Any], int] = operator.attrgetter("block_id")


def table_of(blocks: Any) -> BlockTable:
    """Return the block table of vLLM's ``KVCacheBlocks``."""
    return tuple(map(BlockIds, blocks.blocks))


def step_of(output: Any, cache_manager: Any) -> Step:
    """Return the step of vLLM's scheduler output.

    Args:
        output: vLLM's ``SchedulerOutput``.
        cache_manager: vLLM's ``KVCacheManager``, which has the requests' blocks; its output would
            make a list of all of a request's.
    """
    state, tokens = output.kv_connector_block_state, int(output.total_num_scheduled_tokens)
    if state is None:
        return Step(tokens)
    return Step(
        tokens,
        output.num_scheduled_tokens,
        lambda request_id: table_of(cache_manager.get_blocks(request_id)),
        state.boundary_state_offloads,
    )


def make_scheduler(
    settings: VllmSettings,
    vllm_config: Any,
    hash_tokens: int,
    handshakes: Sequence[Handshake],
    block_pool: Any,
    *,
    stepped: bool = True,
    worker: WorkerConnector | None = None,
) -> SchedulerConnector | None:
    """Build the half that fits the workers' handshakes; None, with an error in the log, if this
    engine cannot be served.

    Args:
        settings: the user's options.
        vllm_config: vLLM's configuration.
        hash_tokens: tokens that one block hash covers.
        handshakes: handshakes of all ranks.
        block_pool: vLLM's block pool.
        stepped: whether a loop of vLLM steps the engine while it has no request.
        worker: the only rank, if it is in this process.
    """
    offer = agreed(handshakes, _cannot_continue(vllm_config))
    if offer is None:
        return None
    transfer, speculative = vllm_config.kv_transfer_config, vllm_config.speculative_config
    facts = EngineFacts(
        str(transfer.engine_id),
        hash_tokens,
        int(vllm_config.scheduler_config.max_num_batched_tokens),
        RequestReader(
            publishes=publishes(vllm_config), lora_config=getattr(vllm_config, "lora_config", None)
        ).options_of,
        stores=transfer.is_kv_producer,
        loads=transfer.is_kv_consumer,
        drops_block=speculative is not None and speculative.use_eagle_block_drop(),
        live_weights=weights_change(vllm_config, settings.on_reset),
        stepped=stepped,
        publishes=publishes(vllm_config),
        run=Run(process_group_of(vllm_config), model_name_of(vllm_config)),
    )
    return SchedulerConnector(settings, facts, offer, VllmPages(block_pool), worker)


def publishes(vllm_config: Any) -> bool:
    """Whether vLLM publishes which blocks are where (``--kv-events-config``)."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


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


def make_worker(
    settings: VllmSettings,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    rank: int,
) -> WorkerConnector:
    """Build the half of the rank that holds these tensors.

    Args:
        settings: the user's options.
        vllm_config, kv_cache_config: vLLM's configuration of this rank.
        kv_caches: the rank's tensors by layer; empty before vLLM has registered them.
        rank: index among tensor x pipeline parallel ranks.
    """
    offer, pages = Handshake("", problem="the worker registered no KV cache"), list[PagedKV]()
    if kv_caches:
        try:
            offer, pages = describe(settings, vllm_config, kv_cache_config, kv_caches)
        except KVHearthError as error:
            log_event(ERROR, "connector.off", "this engine runs without KVHearth", error=error)
            offer = Handshake("", problem=str(error))
    return WorkerConnector(
        settings,
        offer,
        pages,
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        rank=rank,
        run=Run(process_group_of(vllm_config), model_name_of(vllm_config)),
    )


def describe(
    settings: VllmSettings, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]
) -> tuple[Handshake, list[PagedKV]]:
    """Return a rank's description, and its pages by the contract's group.

    Raises:
        KVHearthError: ``bad_contract`` naming the part of this engine that cannot be cached.
    """
    parallel = vllm_config.parallel_config
    context = int(getattr(parallel, "decode_context_parallel_size", 1))
    groups, pages = engine_pages(kv_cache_config, kv_caches, context)
    replicas = int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)
    contract = engine_contract(
        vllm_config,
        groups,
        geometry=Geometry(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, replicas),
        hash_tokens=hash_tokens_of(vllm_config, kv_cache_config),
        packing=packing_of(vllm_config, kv_cache_config),
        given_revision=settings.revision,
        live=weights_change(vllm_config, settings.on_reset),
        codec=settings.codec,
    )
    check_codec(contract, pages)
    kv_groups = tuple(group.kv_group for group in groups)
    return Handshake(contract.to_json(), replicas, kv_groups), pages


def check_codec(contract: Contract, pages: Sequence[PagedKV]) -> None:
    """Refuse a codec for pages that cannot be encoded in this process.

    Raises:
        KVHearthError: ``bad_contract``.
    """
    if contract.codec == LOSSLESS or all(one.device == "cpu" for one in pages):
        return
    if reason := kernels.available():
        raise _bad(f"codec {contract.codec} for pages on {pages[0].device}: {reason}")


def hash_tokens_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the number of tokens that one of vLLM's block hashes covers."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    given = getattr(kv_cache_config, "hash_block_size", None)
    return int(given or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def packing_of(vllm_config: Any, kv_cache_config: Any) -> str:
    """Describe how bytes lie inside a page: layout, attention backends, instruction set, vLLM's
    version.
    """
    import torch
    import vllm

    layers = vllm_config.compilation_config.static_forward_context
    names = set()
    for number in kv_cache_config.prefix_cacheable_group_ids:
        for name in kv_cache_config.kv_cache_groups[number].layer_names:
            layer = layers.get(name)
            backend = getattr(layer, "attn_backend", None)
            if backend is None and hasattr(layer, "get_attn_backend"):
                backend = layer.get_attn_backend()
            word = backend.get_name() if backend is not None else type(layer).__name__
            names.add(f"{word}/{getattr(layer, 'isa', '')}")
    device = str(vllm_config.device_config.device_type)
    if device == "cpu":
        device += "/" + str(torch.backends.cpu.get_cpu_capability())
    version = ".".join(str(vllm.__version__).split(".")[:2])
    parts = [
        str(kv_cache_config.kv_cache_layout or "default"),
        "+".join(sorted(names)),
        f"kv={vllm_config.cache_config.cache_dtype}",
        device,
        f"vllm-{version}",
    ]
    parallel = vllm_config.parallel_config
    if int(getattr(parallel, "decode_context_parallel_size", 1)) > 1:
        parts.append(f"interleave={interleave_of(vllm_config)}")
    return ";".join(parts)[:1000]
