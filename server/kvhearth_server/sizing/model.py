"""Bytes of a model's KV cache, from its Hugging Face ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvhearth.contract import DTYPE_BYTES
from kvhearth.errors import KVHearthError, Reason

_FULL, _SLIDING, _STATE = "full", "sliding", "state"
_LAYER_WORDS = {
    "full_attention": _FULL,
    "attention": _FULL,
    "hybrid": _FULL,
    "sliding_attention": _SLIDING,
    "chunked_attention": _SLIDING,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "mamba2": _STATE,
    "recurrent": _STATE,
    "conv": _STATE,
}
_PATTERN_WORDS = {"*": _FULL, "M": _STATE}
_DTYPES = {"fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "int8": 1.0}
_DTYPES |= {name: float(size) for name, size in DTYPE_BYTES.items()}
_CODECS = {"": 1.0, "fp8": 33 / 64, "int4": 36 / 128}
"""Part of a 16-bit block's bytes that is left at rest: codes, and scales or steps and lows."""
_INDEXER_SCALE_BYTES = 4
_ALTERNATING = ("gemma2",)
_WINDOWED_UNLESS_SAID = ("mistral", "mixtral", "phi3", "starcoder2", "olmo3")


@dataclass(frozen=True)
class ModelKv:
    """KV cache of a model.

    Attributes:
        model_type: as the configuration says.
        attention: ``gqa``, ``mha``, ``mqa`` or ``mla``.
        kv_dtype: of the cached values; ``codec`` of KVHearth at rest, or empty.
        full_layers, sliding_layers, state_layers: layers by kind of attention; only the first two
            have KV of each token.
        window_tokens: sliding window; 0 without one.
        layer_bytes: of one token in one layer, all KV heads together.
        bytes_per_token: of all layers with KV; what a store writes.
    """

    model_type: str
    attention: str
    kv_dtype: str
    codec: str
    full_layers: int
    sliding_layers: int
    state_layers: int
    window_tokens: int
    layer_bytes: float
    bytes_per_token: float

    def context_bytes(self, tokens: int) -> int:
        """Return the bytes that a hit of so many tokens loads: windows need their last tokens."""
        seen = min(tokens, self.window_tokens) if self.window_tokens else tokens
        total = self.full_layers * tokens + self.sliding_layers * seen
        return math.ceil(total * self.layer_bytes)

    @property
    def tokens_per_gib(self) -> int:
        """Tokens whose KV fits into 1 GiB."""
        return int(2**30 / self.bytes_per_token) if self.bytes_per_token else 0


def model_kv(
    config: Mapping[str, Any], kv_dtype: str = "auto", codec: str = "", tensor_parallel: int = 1
) -> ModelKv:
    """Return the KV cache of a model.

    Args:
        config: content of ``config.json``; of a multimodal model the part of its text model counts.
        kv_dtype: of the cache; ``auto``: the configuration's.
        codec: of KVHearth at rest: ``fp8`` or ``int4``, for caches of 16 bits.
        tensor_parallel: ranks; with more of them than KV heads, heads are there several times.

    Raises:
        KVHearthError: ``config_invalid`` naming the field that is missing or unknown.
    """
    text = _text_part(config)
    kinds = _layer_kinds(text)
    dtype = _kv_dtype(config, text) if kv_dtype == "auto" else kv_dtype
    if dtype not in _DTYPES:
        raise _invalid(f"no KV dtype {dtype!r}; choose one of {', '.join(sorted(_DTYPES))}")
    if codec not in _CODECS:
        raise _invalid(f"no codec {codec!r}; choose fp8 or int4")
    if codec and _DTYPES[dtype] != 2:
        raise _invalid(f"the codec {codec} encodes caches of 16 bits, this one has {dtype}")
    attention, elements, extra = _layer(text, tensor_parallel)
    layer_bytes = elements * _DTYPES[dtype] * _CODECS[codec] + extra
    full, sliding = kinds.count(_FULL), kinds.count(_SLIDING)
    return ModelKv(
        str(text.get("model_type", config.get("model_type", "unknown"))),
        attention,
        dtype,
        codec,
        full,
        sliding,
        kinds.count(_STATE),
        _window(text) if sliding else 0,
        layer_bytes,
        (full + sliding) * layer_bytes,
    )


def _invalid(text: str) -> KVHearthError:
    return KVHearthError(Reason.CONFIG_INVALID, f"config.json: {text}")


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text model, which multimodal ones nest."""
    for name in ("text_config", "llm_config", "language_config"):
        nested = config.get(name)
        if isinstance(nested, Mapping) and _layers_field(nested):
            return nested
    return config


def _layers_field(text: Mapping[str, Any]) -> str:
    return next((name for name in ("num_hidden_layers", "n_layer", "n_layers") if name in text), "")


def _number(text: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of these fields that is there: a number of at least 0."""
    for name in names:
        value = text.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _invalid(f"{name} is {value!r}, not a number")
        return value
    if default is None:
        raise _invalid(f"there is no {names[0]}; is this a model's config.json?")
    return default


def _layer(text: Mapping[str, Any], tensor_parallel: int) -> tuple[str, int, int]:
    """Return the kind of attention, the elements of a token in one layer, and further bytes."""
    if text.get("kv_lora_rank"):
        # One latent and one rotary part for all heads; a sparse indexer keeps FP8 keys beside it.
        elements = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim", default=0)
        index = _number(text, "index_head_dim", default=0)
        return "mla", elements, index + _INDEXER_SCALE_BYTES if index else 0
    heads = _number(text, "num_attention_heads", "n_head", "n_heads")
    one = 1 if text.get("multi_query") and not text.get("new_decoder_architecture") else None
    kv_heads = one or _number(
        text, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num",
        default=heads,
    )  # fmt: skip
    size = _number(text, "head_dim", "kv_channels", default=0)
    if not size:
        if not heads:
            raise _invalid("there is neither head_dim nor num_attention_heads")
        size = _number(text, "hidden_size", "n_embd", "d_model") // heads
    value_size = _number(text, "v_head_dim", default=0) or size
    kind = "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else "gqa"
    return kind, max(kv_heads, tensor_parallel) * (size + value_size), 0


def _layer_kinds(text: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer that has a cache of its own."""
    count = _number(text, "num_hidden_layers", "n_layer", "n_layers")
    kinds = _listed(text) or _by_period(text, count)
    if len(kinds) < count:
        kinds = [kinds[at % len(kinds)] for at in range(count)]
    shared = _number(text, "num_kv_shared_layers", default=0)
    kinds = kinds[: count - shared] if shared else kinds[:count]
    return [kind for kind in kinds if kind]


def _listed(text: Mapping[str, Any]) -> list[str]:
    """Return the kinds that a list or a pattern names; empty if there is none."""
    for name in ("layer_types", "layers_block_type"):
        words = text.get(name)
        if isinstance(words, list) and words:
            unknown = sorted({str(word) for word in words} - _LAYER_WORDS.keys())
            if unknown:
                raise _invalid(f"{name} has {', '.join(unknown)}, which this program does not know")
            return [_LAYER_WORDS[word] for word in words]
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return [_PATTERN_WORDS.get(letter, "") for letter in pattern]
    return []


def _by_period(text: Mapping[str, Any], count: int) -> list[str]:
    """Return the kinds that periods, windows or indices tell."""
    indices = text.get("attn_layer_indices")
    if isinstance(indices, list):
        return [_FULL if at in indices else _STATE for at in range(count)]
    if period := _number(text, "attn_layer_period", default=0):
        offset = _number(text, "attn_layer_offset", default=0)
        return [_FULL if at % period == offset else _STATE for at in range(count)]
    if period := _number(text, "full_attention_interval", default=0):
        return _every(period, count, _STATE)
    if not _window(text):
        return [_FULL] * count
    if period := _number(text, "sliding_window_pattern", "_sliding_window_pattern", default=0):
        return _every(period, count, _SLIDING)
    model = text.get("model_type")
    if model in _ALTERNATING:
        return [_FULL if at % 2 else _SLIDING for at in range(count)]
    if text.get("use_sliding_window"):
        first = _number(text, "max_window_layers", default=0)
        return [_SLIDING if at >= first else _FULL for at in range(count)]
    everywhere = model in _WINDOWED_UNLESS_SAID and "use_sliding_window" not in text
    return [_SLIDING if everywhere else _FULL] * count


def _every(period: int, count: int, other: str) -> list[str]:
    """Return one full layer after ``period - 1`` others, again and again."""
    return [_FULL if (at + 1) % period == 0 else other for at in range(count)]


def _window(text: Mapping[str, Any]) -> int:
    if text.get("use_sliding_window") is False:
        return 0
    return _number(text, "sliding_window", "attention_chunk_size", default=0)


def _kv_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Return the dtype that an engine chooses by itself."""
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        scheme = quantized.get("kv_cache_scheme")
        if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
            return "fp8"
        if "fp8" in str(quantized.get("kv_cache_quant_algo", "")).lower():
            return "fp8"
    names: Iterable[Any] = (
        part.get(n) for part in (text, config) for n in ("dtype", "torch_dtype")
    )
    found = next((str(name) for name in names if name), "bfloat16").removeprefix("torch.")
    return "bfloat16" if found == "auto" else found
