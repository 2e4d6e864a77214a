"""Identity of an engine: its contract from weights, hashes and configuration, and its LoRA
digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

from kvhearth.codec import LOSSLESS
from kvhearth.connectors.core.fingerprint import (
    Fingerprint,
    environment,
    fields_of,
    fingerprint,
)
from kvhearth.connectors.core.step_metadata import Geometry
from kvhearth.connectors.core.weights import (
    Weights,
    directory_digest,
    name_weights,
    unless_unknown,
)
from kvhearth.contract import DTYPE_BYTES, PRIVATE, Contract, GroupKind, GroupSpec
from kvhearth.counters import Warnings, log_event
from kvhearth.errors import KVHearthError, Reason

KINDS = {
    "full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.SLIDING_WINDOW,
    "sliding_window_mla": GroupKind.SLIDING_WINDOW,
    # A chunk begins at most a chunk's length before the boundary.
    "chunked_local_attention": GroupKind.SLIDING_WINDOW,
    "mamba": GroupKind.MAMBA,
}
"""vLLM's kinds of KV cache groups that can be restored from blocks."""

OF_FILES = (
    "auto",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "safetensors",
)
"""vLLM's load formats that take the weights from the model's own files."""
_HARMLESS_IN = {
    "": """
        aux_output_config compilation_config device_config ec_manager_config ec_transfer_config
        instance_id kernel_config kv_events_config kv_transfer_config logging_config lora_config
        observability_config offload_config optimization_level parallel_config performance_mode
        profiler_config quant_config reasoning_config scheduler_config shutdown_timeout
        speculative_config structured_outputs_config watermark_config weight_transfer_config
        """,
    "model_config": """
        allowed_local_media_path allowed_media_domains disable_cascade_attn enable_cumem_allocator
        enable_nccl_comm_suspend enable_prompt_embeds enable_sleep_mode enable_trace_replay
        enforce_eager hf_config_path hf_token io_processor_plugin
        logits_processors logprobs_mode max_logprobs max_model_len model model_weights
        renderer_num_workers return_sampling_mask revision seed
        served_model_name skip_tokenizer_init sleep_mode_backend sleep_mode_offload_cudagraph
        sleep_preserve_parameter_names spec_target_max_model_len tokenizer_revision use_fp64_gumbel
        """,
    "model_config.multimodal_config": """
        allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings limit_per_prompt
        mm_encoder_fp8_scale_save_margin
        mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_ipc_gpu_memory_gb mm_processor_cache_gb
        mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling
        """,
    "cache_config": """
        _block_size_resolved block_size cache_hit_alignment_tokens effective_attention_block_size
        enable_prefix_caching gpu_memory_utilization hash_block_size is_attention_free
        kv_cache_layout kv_cache_max_concurrency kv_cache_memory_bytes kv_cache_size_tokens
        kv_offloading_backend kv_offloading_size num_cpu_blocks num_gpu_blocks
        num_gpu_blocks_override prefix_cache_retention_interval prefix_caching_hash_algo
        prefix_match_unit user_specified_block_size
        """,
    "engram_config": "dp_shared_memory",
    "load_config": """
        device download_dir pt_load_map_location safetensors_prefetch_block_size
        safetensors_prefetch_num_threads use_tqdm_on_load
        """,
}
HARMLESS = frozenset(
    f"{section}.{name}".removeprefix(".")
    for section, names in _HARMLESS_IN.items()
    for name in names.split()
)
"""Parts of vLLM's configuration that cannot change KV, or have a field of the contract."""

_HARMLESS_OF_ADAPTERS = (
    "default_mm_loras",
    "fully_sharded_loras",
    "max_cpu_loras",
    "max_lora_cls_labels",
    "max_lora_rank",
    "max_loras",
    "specialize_active_lora",
)

_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_DEFAULT_SEED = "vllm-none-hash"
OPTION = "kv_connector_extra_config"
TIER_OPTION = "secondary_tiers"


@dataclass(frozen=True)
class EngineGroup:
    """Description of one of vLLM's groups on this rank.

    Attributes:
        kv_group: vLLM's number.
        kind: one of ``KINDS``.
        block_tokens: tokens of a block, over all context-parallel ranks.
        window_tokens: reach of a window or a chunk, else 0.
        layers: number of layers on this rank.
        page_bytes: size of this rank's shard, all layers.
        dtype: torch's name of the cache's dtype.
    """

    kv_group: int
    kind: str
    block_tokens: int
    window_tokens: int
    layers: int
    page_bytes: int
    dtype: str


def weights_change(vllm_config: Any, on_reset: str) -> bool:
    """Whether the weights may be replaced in the running engine. The name of files on disk or in a
    hub then does not identify them.
    """
    return on_reset == "drop" or getattr(vllm_config, "weight_transfer_config", None) is not None


def run_of(vllm_config: Any) -> str:
    """Return the name of this run of the engine, equal on all its ranks.

    vLLM makes a new ``instance_id`` for each run and sends it to the ranks with the configuration.
    ``engine_id`` may be the user's, and the same in each run.
    """
    return f"{vllm_config.kv_transfer_config.engine_id}/{vllm_config.instance_id}"


def process_group_of(vllm_config: Any) -> str:
    """Return the name of the processes that run as this engine, equal on all its ranks.

    Each node of several has a configuration, with an ``instance_id`` of its own; they have one
    rendezvous.
    """
    parallel = vllm_config.parallel_config
    if getattr(parallel, "nnodes", 1) > 1:
        return f"{parallel.master_addr}:{parallel.master_port}"
    return str(vllm_config.instance_id)


def model_name_of(vllm_config: Any) -> str:
    """Return the last name of a local model's path, or of its place in an object store; "" for one
    of a hub, which its contract names.
    """
    model = vllm_config.model_config
    stored = str(getattr(model, "model_weights", "") or "")
    local = Path(stored or str(model.model)).expanduser()
    return local.resolve().name if stored or local.is_dir() else ""


def weights_of(
    model_config: Any,
    load_config: Any,
    run: str,
    given: str = "",
    *,
    live: bool = False,
    option: str = OPTION,
) -> Weights:
    """Name the weights: a hub commit, or the digest of a local directory's files.

    Args:
        run: name of this run of the engine, for weights that have no other.
        given: the user's own name for the weights, or empty.
        live: True if they may be replaced while the engine runs.
        option: where the user gives a name.
    """
    name = str(model_config.model)
    load_format = str(getattr(load_config, "load_format", "auto"))
    if load_format == "dummy":
        return Weights("dummy", f"{PRIVATE}{run}")
    if live:
        return Weights("live" if Path(name).expanduser().exists() else name, f"{PRIVATE}{run}")
    elsewhere = ""
    if str(getattr(model_config, "model_weights", "") or ""):
        # vLLM has pulled only the small files into a directory.
        elsewhere = "weights in an object store"
    elif load_format not in OF_FILES:
        elsewhere = f"weights of the load format {load_format}"
    told = getattr(model_config, "revision", None) or ""
    # vLLM finds the commit of a branch, or of none, once at its start, and loads that.
    revision = str(getattr(told, "resolved", told))
    return name_weights(name, revision, run, given, option, elsewhere=elsewhere)


def hashing_of(algorithm: str, hash_tokens: int, run: str) -> tuple[str, int, str]:
    """Return how block hashes are chained: (algorithm, bytes of a hash, seed).

    The seed is represented by its digest: with a weak hash it is a secret.
    """
    weak = algorithm.startswith("xxhash")
    seed = os.environ.get("PYTHONHASHSEED")
    if weak and seed is None:
        log_event(
            WARNING,
            "hashes.private",
            "this hash without PYTHONHASHSEED is seeded anew in each process: blocks will not be "
            "found again after a restart; use --prefix-caching-hash-algo sha256",
            algorithm=algorithm,
        )
        text = f"{PRIVATE}{run}"
    else:
        text = hashlib.sha256((_DEFAULT_SEED if seed is None else seed).encode()).hexdigest()
    return f"vllm-{algorithm}/{hash_tokens}", 16 if weak else 32, text


def config_digest(
    model_config: Any, cache_config: Any, others: Mapping[str, Any] | None = None
) -> Fingerprint:
    """Return the digest of all of a model's configuration but what cannot change its KV.

    Args:
        others: further sections of vLLM's configuration, by name.
    """
    sections = {"model_config": model_config, "cache_config": cache_config, **(others or {})}
    settings: dict[str, Any] = {
        name: fields_of(section) if hasattr(section, "__dict__") else section
        for name, section in sections.items()
    }
    # Some models compute otherwise from a length on. A length that vLLM is to choose is the
    # model's own while it is built, and is cut to the free memory afterwards.
    asked = getattr(model_config, "original_max_model_len", None)
    settings["length"] = asked if asked == -1 else getattr(model_config, "max_model_len", None)
    return fingerprint(settings, HARMLESS)


def _environment() -> dict[str, str]:
    """Return vLLM's variables that are set, but those that change nothing that it computes."""
    vllm = sys.modules.get("vllm.envs")
    found = environment("VLLM_")
    return {name: found[name] for name in found if vllm is None or name in vllm.compile_factors()}


def _sections(vllm_config: Any) -> dict[str, Any]:
    """Return the sections of vLLM's configuration that have no field of the contract."""
    own = ("model_config", "cache_config")
    return {name: section for name, section in fields_of(vllm_config).items() if name not in own}


def draft_of(vllm_config: Any, run: str, given: str = "") -> str:
    """Return the identity of a draft model whose KV is stored too; empty without one.

    Args:
        run: name of this run of the engine, for weights that have no other.
        given: the user's own name for the weights, or empty.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    method = str(getattr(speculative, "method", "") or "")
    if speculative is None or draft is None or method in ("ngram", "suffix"):
        return ""
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    weights = weights_of(draft, load, run, given)
    found = config_digest(draft, vllm_config.cache_config, {"load_config": load})
    # vLLM makes a draft's configuration by a function of its own; what it made counts.
    unknown = set(found.unknown) - {"model_config.hf_overrides"}
    weights = unless_unknown(weights, unknown, run, given, OPTION)
    return f"{method}:{weights.model}:{weights.revision}:{found.digest}"


def engine_contract(
    vllm_config: Any,
    groups: list[EngineGroup],
    *,
    geometry: Geometry,
    hash_tokens: int,
    packing: str,
    given_revision: str = "",
    live: bool = False,
    codec: str = LOSSLESS,
) -> Contract:
    """Return the contract.

    Args:
        vllm_config: vLLM's configuration.
        groups: groups that can be restored, in vLLM's order.
        geometry: mapping of ranks to shards.
        hash_tokens: tokens that one block hash covers.
        packing: layout, attention backend and instruction set: how bytes lie inside a page.
        given_revision: the user's own name of the weights, or empty.
        live: True if the weights may be replaced while the engine runs.
        codec: how blocks are encoded at rest.

    Raises:
        KVHearthError: ``bad_contract`` naming the part of this engine that cannot be cached.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    run = run_of(vllm_config)
    algorithm, hash_bytes, seed = hashing_of(str(cache.prefix_caching_hash_algo), hash_tokens, run)
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise KVHearthError(Reason.BAD_CONTRACT, "prefill context parallelism is not supported")
    contract = Contract(
        **_model_fields(vllm_config, run, given_revision, live=live),
        kv_dtype=_kv_dtype(groups),
        layout=packing,
        hash_bytes=hash_bytes,
        hash_algorithm=algorithm,
        hash_seed=seed,
        tensor_parallel=geometry.tensor_parallel,
        pipeline_parallel=geometry.pipeline_parallel,
        decode_context_parallel=int(getattr(parallel, "decode_context_parallel_size", 1)),
        groups=tuple(_spec(group, geometry.shards) for group in groups),
    )
    return contract.with_codec(codec)


def _model_fields(
    vllm_config: Any,
    run: str,
    given_revision: str,
    *,
    live: bool,
    option: str = OPTION,
    unknown: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the fields of ``Contract`` that say what computes KV.

    Args:
        unknown: settings that cannot be compared with those of another run.
    """
    model = vllm_config.model_config
    load = vllm_config.load_config
    weights = weights_of(model, load, run, given_revision, live=live, option=option)
    others = {**_sections(vllm_config), "environment": _environment()}
    found = config_digest(model, vllm_config.cache_config, others)
    unknown += found.unknown
    weights = unless_unknown(weights, unknown, run, given_revision, option)
    return {
        "model": weights.model,
        "revision": weights.revision,
        "quantization": str(model.quantization or "none"),
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "rope_digest": found.digest,
        "draft_model": draft_of(vllm_config, run, given_revision),
    }


def tier_contract(
    config: Any,
    page_bytes: int,
    *,
    version: str,
    run: str,
    given_revision: str,
    live: bool,
    vllm_config: Any = None,
    device: str = "",
) -> Contract:
    """Return the contract of chunks in the host memory of vLLM's own offloading.

    What vLLM tells a tier does not say what computes KV: not the weights' revision, the
    quantization, or overrides of the model's configuration. vLLM's own configuration does.

    Args:
        config: vLLM's ``OffloadingConfig``.
        page_bytes: size of a chunk over all workers of the host.
        version: vLLM's.
        run: name of this run of the engine, for weights that have no other.
        given_revision: the user's own name of the weights, or empty.
        live: True if the weights may be replaced while the engine runs.
        vllm_config: vLLM's configuration, or None if it could not be found.
        device: what selects the attention backend, which a tier cannot see.

    Raises:
        KVHearthError: ``bad_contract`` naming the part that is not valid.
    """
    tokens, blocks = config.cache.tokens_per_hash, config.cache.blocks_per_chunk
    algorithm, hash_bytes, seed = f"vllm-offload/{tokens}", 32, ""
    if vllm_config is None:
        fields = _untold_fields(config.model, run, "" if live else given_revision)
    else:
        # A tier has no request, and vLLM's hashes know an adapter by its path alone.
        adapters = ("lora_config",) if getattr(vllm_config, "lora_config", None) else ()
        fields = _model_fields(
            vllm_config, run, given_revision, live=live, option=TIER_OPTION, unknown=adapters
        )
        hashes = str(vllm_config.cache_config.prefix_caching_hash_algo)
        chained, hash_bytes, seed = hashing_of(hashes, tokens, run)
        algorithm = f"{chained}/offload"
    parts = json.dumps(_chunk_parts(config, vllm_config, device), sort_keys=True)
    minor = ".".join(version.split(".")[:2])
    digest = hashlib.sha256(parts.encode()).hexdigest()
    return Contract(
        **fields,
        kv_dtype="uint8",
        layout=f"vllm-{minor}/{config.kv_cache_layout}/{digest}",
        hash_bytes=hash_bytes + 4,  # and the number of the KV group
        hash_algorithm=algorithm,
        hash_seed=seed,
        groups=(GroupSpec(GroupKind.FULL, tokens * blocks, page_bytes),),
    )


def _chunk_parts(config: Any, vllm_config: Any, device: str) -> dict[str, Any]:
    """Return what a chunk consists of."""
    parallel = config.parallel
    parts: dict[str, Any] = {
        "groups": [(group.tokens_per_block, *group.layer_names) for group in config.groups],
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
        "device": device,
    }
    alike = config.canonical_layout and parallel.is_parallelism_agnostic
    if not (alike or config.replicated_layout):
        # Each worker's part of a chunk follows the other's, in layouts that no other number has.
        parts["workers"] = [
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
            interleave_of(vllm_config),
        ]
    return parts


def _untold_fields(model: Any, run: str, given: str) -> dict[str, Any]:
    """Return what a tier is told of the model: it does not say what computes KV."""
    unknown = "weights of an engine whose configuration was not found"
    weights = name_weights(str(model.name), "", run, given, TIER_OPTION, elsewhere=unknown)
    return {
        "model": weights.model,
        "revision": weights.revision,
        "quantization": "untold",
        "model_dtype": str(model.dtype),
    }


def interleave_of(vllm_config: Any) -> int:
    """Return how many tokens in a row one context-parallel rank holds."""
    parallel = getattr(vllm_config, "parallel_config", None)
    return int(getattr(parallel, "cp_kv_cache_interleave_size", 1))


def adapter_digest(path: str) -> bytes:
    """Return the digest of a LoRA adapter's files, which vLLM's hashes know only by path.

    Raises:
        OSError: the files cannot be read, or ``path`` is no directory, such as a name in a hub.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise NotADirectoryError(f"{path} is no local directory, its files have no digest")
    return bytes.fromhex(directory_digest(folder))


def _spec(group: EngineGroup, shards: int) -> GroupSpec:
    kind = KINDS.get(group.kind)
    if kind is None:
        raise KVHearthError(
            Reason.BAD_CONTRACT, f"KV of kind {group.kind} cannot be restored from blocks"
        )
    token_bytes, rest = divmod(group.page_bytes, group.layers * group.block_tokens)
    if rest or kind is GroupKind.MAMBA or token_bytes % DTYPE_BYTES[_dtype_name(group.dtype)]:
        token_bytes = 0
    return GroupSpec(
        kind=kind,
        block_tokens=group.block_tokens,
        page_bytes=group.page_bytes,
        layers=group.layers,
        token_bytes=token_bytes,
        shards=shards,
        window_tokens=group.window_tokens if kind is GroupKind.SLIDING_WINDOW else 0,
    )


def _kv_dtype(groups: list[EngineGroup]) -> str:
    names = {_dtype_name(group.dtype) for group in groups if group.kind != "mamba"}
    return names.pop() if len(names) == 1 else "uint8"


def _dtype_name(dtype: str) -> str:
    name = dtype.removeprefix("torch.")
    name = _DTYPES.get(name, name)
    return name if name in DTYPE_BYTES else "uint8"


REMEMBERED_MAX = 4096


class Adapters:
    """Digests of adapters as they were when first seen. vLLM loads an adapter's files once, so
    files changed later are not the ones it computes with. Thread-safe.

    Args:
        lora_config: vLLM's, which says how the files are read, or None.
    """

    def __init__(self, lora_config: Any = None) -> None:
        settings = {} if lora_config is None else fields_of(lora_config)
        self._read_by = fingerprint(settings, _HARMLESS_OF_ADAPTERS).digest.encode()
        self._lock = threading.Lock()
        self._digests: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._warnings = Warnings()

    def digest(self, lora_request: Any) -> bytes | None:
        """Return the digest of a request's adapter; None, with a warning in the log, if it has
        none.

        Args:
            lora_request: vLLM's request; with its ``load_inplace`` the files are read again.
        """
        path = str(lora_request.lora_path)
        key = (int(lora_request.lora_int_id), path)
        anew = bool(getattr(lora_request, "load_inplace", False))
        with self._lock:
            found = self._digests.get(key)
            if found is not None and not anew:
                self._digests.move_to_end(key)
                return found
        try:
            taken = hashlib.sha256(self._read_by + adapter_digest(path)).digest()
        except OSError as error:
            with self._lock:
                self._digests.pop(key, None)
            self._warnings.warn("adapter.private", "KV of an adapter is not kept", error=error)
            return None
        with self._lock:
            if not anew:
                taken = self._digests.setdefault(key, taken)
            self._digests[key] = taken
            self._digests.move_to_end(key)
            if len(self._digests) > REMEMBERED_MAX:
                self._digests.popitem(last=False)
        return taken
