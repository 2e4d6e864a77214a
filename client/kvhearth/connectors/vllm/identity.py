"""Identity of an engine: its contract from weights, hashes and configuration, and its LoRA
digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

from kvhearth.codec import LOSSLESS
from kvhearth.connectors.core.step_metadata import Geometry
from kvhearth.connectors.core.weights import Weights, directory_digest, name_weights
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

_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_DEFAULT_SEED = "vllm-none-hash"
_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash", "_attn_implementation")


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
    model_config: Any, load_config: Any, run: str, given: str = "", *, live: bool = False
) -> Weights:
    """Name the weights: a hub commit, or the digest of a local directory's files.

    Args:
        run: name of this run of the engine, for weights that have no other.
        given: the user's own name for the weights, or empty.
        live: True if they may be replaced while the engine runs.
    """
    name = str(model_config.model)
    load_format = str(getattr(load_config, "load_format", "auto"))
    local = Path(name).expanduser()
    if load_format == "dummy":
        return Weights("dummy", f"{PRIVATE}{run}")
    if live:
        return Weights("live" if local.is_dir() else name, f"{PRIVATE}{run}")
    stored = str(getattr(model_config, "model_weights", "") or "")
    if stored and not given:
        # The weights are in an object store: vLLM has pulled only the small files into a directory.
        log_event(
            WARNING,
            "weights.private",
            "weights in an object store have no digest, their KV is kept for this engine alone: "
            "set 'revision' in kv_connector_extra_config to share it",
        )
        return Weights("object store", f"{PRIVATE}{run}")
    revision = str(getattr(model_config, "revision", None) or "")
    return name_weights(name, revision, run, given, "kv_connector_extra_config")


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


def config_digest(model_config: Any, cache_config: Any) -> str:
    """Return the digest of everything else in the model's configuration that may change its KV."""
    parts: dict[str, Any] = {}
    hf_config = getattr(model_config, "hf_config", None)
    if hf_config is not None and hasattr(hf_config, "to_dict"):
        parts["hf"] = _without_volatile(hf_config.to_dict())
    overrides = getattr(model_config, "hf_overrides", None)
    parts["overrides"] = overrides if isinstance(overrides, dict) else repr(overrides)
    parts["quantization"] = repr(getattr(model_config, "quantization_config", None))
    parts["skipped"] = list(getattr(cache_config, "kv_cache_dtype_skip_layers", ()))
    parts["mamba"] = [
        str(getattr(cache_config, name, ""))
        for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode")
    ]
    if _is_longrope(model_config):
        # The maximum length selects one of two sets of factors, for positions of every request.
        parts["max_model_len"] = int(model_config.max_model_len)
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_longrope(model_config: Any) -> bool:
    configs = [getattr(model_config, name, None) for name in ("hf_text_config", "hf_config")]
    return any(
        _names_longrope(getattr(config, name, None))
        for config in configs
        for name in ("rope_scaling", "rope_parameters")
    )


def _names_longrope(rope: Any) -> bool:
    """Whether rope parameters, or those of any kind of layer in them, use LongRoPE."""
    if not isinstance(rope, Mapping):
        return False
    if any(rope.get(name) in ("longrope", "su") for name in ("rope_type", "type")):
        return True
    return any(_names_longrope(value) for value in rope.values())


def draft_of(vllm_config: Any, run: str) -> str:
    """Return the identity of a draft model whose KV is stored too; empty without one."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    method = str(getattr(speculative, "method", "") or "")
    if speculative is None or draft is None or method in ("ngram", "suffix"):
        return ""
    weights = weights_of(draft, getattr(vllm_config, "load_config", None), run)
    return f"{method}:{weights.model}:{weights.revision}"


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
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    run = run_of(vllm_config)
    weights = weights_of(model, vllm_config.load_config, run, given_revision, live=live)
    algorithm, hash_bytes, seed = hashing_of(str(cache.prefix_caching_hash_algo), hash_tokens, run)
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise KVHearthError(Reason.BAD_CONTRACT, "prefill context parallelism is not supported")
    contract = Contract(
        model=weights.model,
        revision=weights.revision,
        quantization=str(model.quantization or "none"),
        model_dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=_kv_dtype(groups),
        layout=packing,
        hash_bytes=hash_bytes,
        hash_algorithm=algorithm,
        hash_seed=seed,
        tensor_parallel=geometry.tensor_parallel,
        pipeline_parallel=geometry.pipeline_parallel,
        decode_context_parallel=int(getattr(parallel, "decode_context_parallel_size", 1)),
        groups=tuple(_spec(group, geometry.shards) for group in groups),
        rope_digest=config_digest(model, cache),
        draft_model=draft_of(vllm_config, run),
    )
    return contract.with_codec(codec)


_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".safetensors")


def tier_contract(
    config: Any, page_bytes: int, *, version: str, run: str, given_revision: str, live: bool
) -> Contract:
    """Return the contract of chunks in the host memory of vLLM's own offloading.

    vLLM tells a tier neither the weights' revision nor how it quantizes them: only the files of a
    local model, or the user's own name, identify them. A directory without weights has been filled
    from an object store; its digest would be that of the configuration alone.

    Args:
        config: vLLM's ``OffloadingConfig``.
        page_bytes: size of a chunk over all workers of the host.
        version: vLLM's.
        run: name of this run of the engine, for weights that have no other.
        given_revision: the user's own name of the weights, or empty.
        live: True if the weights may be replaced while the engine runs.

    Raises:
        KVHearthError: ``bad_contract`` naming the part that is not valid.
    """
    name, parallel = str(config.model.name), config.parallel
    local = Path(name).expanduser()
    known = not local.is_dir() or any(path.suffix in _WEIGHTS for path in local.iterdir())
    if live:
        weights = Weights("live" if local.is_dir() else name, f"{PRIVATE}{run}")
    elif known or given_revision:
        weights = name_weights(name, "", run, given_revision, "secondary_tiers")
    else:
        log_event(
            WARNING,
            "weights.private",
            "the model's directory has no weights, its KV is kept for this engine alone: set "
            "'revision' in secondary_tiers to share it",
            model=name,
        )
        weights = Weights("object store", f"{PRIVATE}{run}")
    parts: dict[str, Any] = {
        "groups": [(group.tokens_per_block, *group.layer_names) for group in config.groups],
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
    }
    alike = config.canonical_layout and parallel.is_parallelism_agnostic
    if not (alike or config.replicated_layout):
        # Each worker's part of a chunk follows the other's, in layouts that no other number has.
        parts["workers"] = [
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        ]
    text = json.dumps(parts, sort_keys=True)
    minor = ".".join(version.split(".")[:2])
    tokens, blocks = config.cache.tokens_per_hash, config.cache.blocks_per_chunk
    return Contract(
        model=weights.model,
        revision=weights.revision,
        quantization="untold",
        model_dtype=str(config.model.dtype),
        kv_dtype="uint8",
        layout=f"vllm-{minor}/{config.kv_cache_layout}/{hashlib.sha256(text.encode()).hexdigest()}",
        hash_bytes=36,
        hash_algorithm=f"vllm-offload/{tokens}",
        groups=(GroupSpec(GroupKind.FULL, tokens * blocks, page_bytes),),
    )


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


def _without_volatile(config: Mapping[str, Any]) -> dict[str, Any]:
    clean: dict[str, Any] = {}
    for name, value in config.items():
        if name not in _VOLATILE:
            clean[str(name)] = _without_volatile(value) if isinstance(value, Mapping) else value
    return clean


REMEMBERED_MAX = 4096


class Adapters:
    """Digests of adapters as they were when first seen. vLLM loads an adapter's files once, so
    files changed later are not the ones it computes with. Thread-safe.
    """

    def __init__(self) -> None:
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
            taken = adapter_digest(path)
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
