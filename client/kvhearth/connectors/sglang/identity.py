"""Identity of a SGLang server's KV: its contracts, from the arguments it runs with and its pools.

The served model name is no part of it: two models under one name find nothing of each other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any, ClassVar

from kvhearth.connectors.core.settings import CacheSettings
from kvhearth.connectors.core.weights import Weights, directory_digest, name_weights
from kvhearth.contract import DTYPE_BYTES, PRIVATE, Contract, GroupKind, GroupSpec
from kvhearth.counters import log_event
from kvhearth.transfer.memory import dtype_name

SGLANG_OWN = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
"""Entries of the configuration that SGLang reads itself."""
OF_FILES = (
    "auto",
    "bitsandbytes",
    "expert_pack",
    "fastsafetensors",
    "gguf",
    "instanttensor",
    "layered",
    "mistral",
    "npcache",
    "presharded",
    "pt",
    "safetensors",
    "sharded_state",
)
"""SGLang's load formats that take the weights from the model's own files."""
ARGUMENTS = (
    "attention_backend",
    "context_length",
    "decode_attention_backend",
    "dtype",
    "enable_deepseek_v4_fp4_indexer",
    "enable_int8_mamba_checkpoint",
    "json_model_override_args",
    "kv_cache_dtype",
    "load_format",
    "mamba_ssm_dtype",
    "model_impl",
    "modelopt_quant",
    "page_size",
    "prefill_attention_backend",
    "qsa_indexer_dtype",
    "quantization",
    "quantize_and_serve",
    "speculative_algorithm",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
    "swa_full_tokens_ratio",
)
"""SGLang's arguments that may change KV bytes and have no field of the contract to themselves."""
_RANK_OWN = ("mamba",)
_HASHES = "sglang-sha256"

Argument = Callable[[str], Any]
"""Returns the value that one of SGLang's arguments has in the running server."""


@dataclass(frozen=True)
class HiCacheSettings(CacheSettings):
    """Options in SGLang's ``--hicache-storage-backend-extra-config``."""

    PLACE: ClassVar[str] = "hicache-storage-backend-extra-config"


def own_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the configuration that are not SGLang's."""
    return {name: value for name, value in given.items() if name not in SGLANG_OWN}


def server_fields(argument: Argument, version: str, run: str, given: str = "") -> dict[str, str]:
    """Return the fields of ``Contract`` that all pools of a server share.

    Args:
        argument: SGLang's arguments as they are in force.
        version: SGLang's version.
        run: name of this run of the server, for weights that have no other.
        given: the user's own name for the weights, or empty.
    """
    weights = _weights(argument, run, given)
    parts = {name: argument(name) for name in ARGUMENTS}
    scales = Path(str(argument("quantization_param_path") or ""))
    if scales.is_file():
        parts["scales"] = hashlib.sha256(scales.read_bytes()).hexdigest()
    parts["adapters"] = [_adapter(item, run) for item in argument("lora_paths") or ()]
    parts["version"] = version
    text = json.dumps(parts, sort_keys=True, default=str)
    return {
        "model": weights.model,
        "revision": weights.revision,
        "quantization": str(argument("quantization") or "none"),
        "model_dtype": str(argument("dtype")),
        "rope_digest": hashlib.sha256(text.encode()).hexdigest(),
        "draft_model": _draft(argument, run),
    }


def updated_fields(fields: dict[str, str], run: str, version: str, uses: int) -> dict[str, str]:
    """Return the fields after an update of the weights in place: they belong to this run alone.

    Raising the epoch of the shared namespace instead would void the blocks of other servers, whose
    weights are the old ones, and a server that starts with these would take over the new epoch.

    Args:
        version: SGLang's name of the new weights.
        uses: how often this run had weights of that name before.
    """
    mark = hashlib.sha256(f"{run}/{uses}/{version}".encode()).hexdigest()
    return {**fields, "revision": f"{PRIVATE}{mark}"}


def pool_contract(
    fields: Mapping[str, Any], config: Any, name: str, pool: Any, runs: Sequence[int]
) -> Contract:
    """Return the contract of one host pool on this rank.

    Args:
        fields: as of ``server_fields``.
        config: SGLang's ``HiCacheStorageConfig``.
        name: the pool's name, such as ``kv``.
        pool: the pool, for its dtype, layout and geometry.
        runs: bytes of the runs of memory that make a page, in the order of the block.
    """
    sizes = "+".join(f"{len(list(same))}x{size}" for size, same in itertools.groupby(runs))
    where = [
        "sglang",
        name,
        type(pool).__name__,
        str(pool.layout),
        str(pool.storage_format_tag or "plain"),
        f"layers{getattr(pool, 'start_layer', 0)}-{getattr(pool, 'end_layer', 0)}",
        _shard(config, name, pool),
        sizes,
    ]
    dtype = dtype_name(pool)
    return Contract(
        **fields,
        kv_dtype=dtype if dtype in DTYPE_BYTES else "uint8",
        groups=(GroupSpec(GroupKind.FULL, int(pool.page_size), sum(runs)),),
        layout="/".join(where),
        hash_bytes=32,
        hash_algorithm=_HASHES,
    )


def _shard(config: Any, name: str, pool: Any) -> str:
    """Name the part of a block that this rank holds; all ranks hold the same bytes of MLA."""
    parts = [
        f"pp{config.pp_rank}of{config.pp_size}",
        f"cp{config.attn_cp_rank}of{config.attn_cp_size}",
    ]
    if not config.is_mla_model or name in _RANK_OWN or hasattr(pool, "head_num"):
        parts.append(f"tp{config.tp_rank}of{config.tp_size}")
    return ",".join(parts)


def _weights(argument: Argument, run: str, given: str) -> Weights:
    load_format, path = str(argument("load_format")), str(argument("model_path"))
    foreign = load_format not in OF_FILES or bool(argument("custom_weight_loader"))
    if load_format == "dummy" or argument("checkpoint_engine_wait_weights_before_ready"):
        return Weights("none", f"{PRIVATE}{run}")
    if foreign and not given:
        log_event(
            WARNING,
            "weights.private",
            "weights of this load format have no digest, their KV is kept for this server alone: "
            "set 'revision' in hicache-storage-backend-extra-config to share it",
            load_format=load_format,
        )
        return Weights(load_format, f"{PRIVATE}{run}")
    return name_weights(path, str(argument("revision") or ""), run, given, HiCacheSettings.PLACE)


def _draft(argument: Argument, run: str) -> str:
    """Return the identity of a draft model whose KV is stored too; empty without one."""
    path = argument("speculative_draft_model_path")
    if not path:
        return ""
    revision = str(argument("speculative_draft_model_revision") or "")
    weights = name_weights(str(path), revision, run, "", HiCacheSettings.PLACE)
    return f"{argument('speculative_algorithm')}:{weights.model}:{weights.revision}"


def _adapter(item: Any, run: str) -> list[str]:
    """Name an adapter of ``--lora-paths``: SGLang's page hashes know it by name and path only."""
    folder = Path(str(item.lora_path)).expanduser()
    try:
        if folder.is_dir():
            return [str(item.lora_name), directory_digest(folder)]
        problem = "no local directory, its files have no digest"
    except OSError as error:
        problem = str(error)
    log_event(
        WARNING,
        "adapter.private",
        "an adapter has no digest: the KV of this server is kept for this run alone",
        error=f"{folder}: {problem}",
    )
    return [str(item.lora_name), run]


def keys_of(hashes: Iterable[str]) -> list[bytes]:
    """Return the keys of SGLang's page hashes, 64 hex digits each."""
    return [bytes.fromhex(text) for text in hashes]
