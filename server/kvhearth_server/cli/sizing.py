"""``kvhearth size``: how much memory and SSD a model needs, by its Hugging Face ``config.json``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from kvhearth.contract import DTYPE_BYTES
from kvhearth_server.cli.output import AsJson, facts, say, wrong

_SPARE, _GIB = 0.2, 1 << 30  # leases, reservations and slack take the spare part
_DTYPES = {**DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
_CODECS = {"": 1.0, "fp8": 33 / 64, "int4": 36 / 128}
"""Part of a 16-bit block's bytes that is left at rest: codes, and scales or steps and lows."""
_FULL, _SLIDING, _STATE = "full_attention", "sliding_attention", "linear_attention"
_KINDS = {"attention": _FULL, "hybrid": _FULL, "chunked_attention": _SLIDING, "conv": _STATE}
_KINDS |= {each: each for each in (_FULL, _SLIDING, _STATE)}
_KINDS |= dict.fromkeys(("mamba", "mamba2", "recurrent"), _STATE)
_WINDOWED = ("mistral", "mixtral", "phi3", "starcoder2", "olmo3")
"""Models whose layers all have the window that the configuration names."""


@dataclass(frozen=True)
class ModelKv:
    """KV cache of a model: layers by kind (those with a state have no KV of each token), bytes of a
    token in one layer and in all of them. ``window_tokens`` is 0 without sliding layers.
    """

    attention: str
    kv_dtype: str
    full_layers: int
    sliding_layers: int
    state_layers: int
    window_tokens: int
    layer_bytes: float
    bytes_per_token: float

    def context_bytes(self, tokens: int) -> int:
        """Return the bytes that a hit of so many tokens loads: windows need their last tokens."""
        seen = min(tokens, self.window_tokens or tokens)
        layers = self.full_layers * tokens + self.sliding_layers * seen
        return math.ceil(layers * self.layer_bytes)


def model_kv(
    config: Mapping[str, Any], kv_dtype: str = "auto", codec: str = "", ranks: int = 1
) -> ModelKv:
    """Return the KV cache of a model; with more ranks than KV heads, heads are there several times.

    Raises:
        KVHearthError: ``config_invalid`` naming the field that is missing or unknown.
    """
    nested = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
    text = next((each for each in nested if isinstance(each, Mapping)), config)
    said = (each.get(name) for each in (text, config) for name in ("dtype", "torch_dtype"))
    usual = next((str(name) for name in said if name), "bfloat16").removeprefix("torch.")
    dtype = usual if kv_dtype == "auto" else kv_dtype
    known = dtype in _DTYPES and codec in _CODECS and (not codec or _DTYPES[dtype] == 2)
    _require(known, f"no codec {codec!r} of a cache of {dtype!r}; dtypes: {', '.join(_DTYPES)}")
    attention, elements, extra = _layer(text, ranks)
    layer_bytes = elements * _DTYPES[dtype] * _CODECS[codec] + extra
    kinds = _kinds(text)
    full, sliding = kinds.count(_FULL), kinds.count(_SLIDING)
    window = _number(text, "sliding_window", "attention_chunk_size", default=0) if sliding else 0
    counts = full, sliding, kinds.count(_STATE)
    return ModelKv(attention, dtype, *counts, window, layer_bytes, (full + sliding) * layer_bytes)


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise wrong(f"config.json: {text}")


def _number(text: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    value = next((text[name] for name in names if text.get(name) is not None), default)
    _require(type(value) is int and value >= 0, f"{names[0]} is {value!r}, not a number")
    return int(value or 0)


def _layer(text: Mapping[str, Any], ranks: int) -> tuple[str, int, int]:
    """Return the kind of attention, the elements of a token in one layer, and further bytes."""
    if text.get("kv_lora_rank"):
        # One latent and one rotary part for all heads; a sparse indexer keeps FP8 keys beside it.
        elements = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim", default=0)
        index = _number(text, "index_head_dim", default=0)
        return "mla", elements, index + 4 if index else 0
    heads = _number(text, "num_attention_heads", "n_head")
    kv_heads = _number(text, "num_key_value_heads", "num_kv_heads", default=heads)
    width = _number(text, "hidden_size", "n_embd", default=0)
    dim = _number(text, "head_dim", default=width // heads if heads else 0)
    _require(dim > 0, "there is neither head_dim nor hidden_size and num_attention_heads")
    kind = "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else "gqa"
    return kind, max(kv_heads, ranks) * (dim + _number(text, "v_head_dim", default=dim)), 0


def _kinds(text: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer that has a cache of its own."""
    count, model = _number(text, "num_hidden_layers", "n_layer"), text.get("model_type")
    window = _number(text, "sliding_window", default=0)
    every = _number(text, "sliding_window_pattern", default=2 if model == "gemma2" else 0)
    said = text.get("use_sliding_window", model in _WINDOWED)
    words = text.get("layer_types") or text.get("layers_block_type") or [_FULL]
    if len(words) == 1 and window and (every or said):
        first, every = _number(text, "max_window_layers", default=0), every or count + 1
        words = [_SLIDING if at >= first and (at + 1) % every else _FULL for at in range(count)]
    _require(not {*words} - _KINDS.keys(), f"unknown kinds of layers: {sorted({*words})}")
    shared = _number(text, "num_kv_shared_layers", default=0)
    return [_KINDS[words[at % len(words)]] for at in range(count - shared)]


def sized(
    model: Annotated[Path, typer.Option(help="The model's config.json, or its directory.")],
    kv_dtype: Annotated[str, typer.Option(help="Dtype of the KV cache.")] = "auto",
    codec: Annotated[str, typer.Option(help="Codec at rest: fp8 or int4.")] = "",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks of the engine.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a conversation.")] = 8192,
    conversations: Annotated[int, typer.Option(min=1, help="Those that go on in minutes.")] = 200,
    idle: Annotated[int, typer.Option(min=0, help="Those that go on within days.")] = 2000,
    as_json: AsJson = False,
) -> None:
    """Compute bytes per token of a model, and memory and SSD for conversations.

    Once a daemon has real load, kvhearth mrc tells more than any calculation.
    """
    file = model / "config.json" if os.path.isdir(model) else model
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise wrong(f"--model: {file}: {error}") from None
    _require(isinstance(config, dict), f"{file} is no JSON object")
    kv = model_kv(config, kv_dtype, codec, tensor_parallel)
    # Stores write every token's KV, also of windows that a hit does not load.
    one = context * kv.bytes_per_token / (1 - _SPARE) / _GIB
    memory, ssd = math.ceil(conversations * one), math.ceil((conversations + idle) * one)
    sizes = {"memory_gib": memory, "ssd_gib": ssd if idle else 0}
    found = asdict(kv) | {"context_bytes": kv.context_bytes(context)} | sizes
    shown = facts((name.replace("_", " "), value) for name, value in found.items())
    more = f" --ssd-dir /var/lib/kvhearth={ssd}GiB" if idle else ""
    text = Group(shown, f"\nkvhearth serve --memory {memory}GiB{more}")
    say(found, text, as_json=as_json)
