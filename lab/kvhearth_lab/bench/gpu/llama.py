"""Llama models with seeded weights: transformers' own, or plain torch where it is not installed.

Both compute a prompt into a list of (K, V) by layer, each of shape (1, KV heads, tokens, head
dimension), and one more token on top of such a list.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

KV = list[tuple[Any, Any]]
CHUNK_TOKENS = 32768
"""Tokens that one forward pass computes. Attention over earlier chunks needs a mask, and with it a
slower kernel: a prompt should fit into one.
"""


@dataclass(frozen=True)
class Geometry:
    """Dimensions of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    rope_theta: float = 500_000.0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV in values of 2 bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


LLAMA_8B = Geometry(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128256,
    positions=1 << 17,
)
TINY = Geometry(
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocabulary=512,
    positions=2048,
)


class Model(Protocol):
    """A model that computes tokens on top of given KV."""

    name: str

    def forward(self, tokens: Any, kv: KV | None) -> tuple[Any, KV]:
        """Compute tokens, shape (1, n), on top of ``kv``.

        Returns:
            The logits of the last token, shape (vocabulary,), in float32, and the KV of all tokens.
        """


def make_model(torch: Any, geometry: Geometry, device: str, *, plain: bool = False) -> Model:
    """Return a model with seeded weights in bfloat16; equal for equal arguments.

    Args:
        plain: use plain torch although transformers is installed.
    """
    torch.manual_seed(17)
    if not plain and importlib.util.find_spec("transformers") is not None:
        return _Transformers(torch, geometry, device)
    return _Plain(torch, geometry, device)


def prefill(torch: Any, model: Model, tokens: Any) -> KV:
    """Return the KV of a prompt, computed in chunks."""
    kv: KV | None = None
    with torch.inference_mode():
        for start in range(0, tokens.shape[1], CHUNK_TOKENS):
            _, kv = model.forward(tokens[:, start : start + CHUNK_TOKENS], kv)
    assert kv is not None, "a prompt has at least one token"
    return kv


class _Transformers:
    """``LlamaForCausalLM`` of transformers."""

    name = "transformers"

    def __init__(self, torch: Any, geometry: Geometry, device: str) -> None:
        transformers: Any = importlib.import_module("transformers")
        self._torch = torch
        self._cache_class = transformers.DynamicCache
        config = transformers.LlamaConfig(
            hidden_size=geometry.hidden,
            intermediate_size=geometry.intermediate,
            num_hidden_layers=geometry.layers,
            num_attention_heads=geometry.heads,
            num_key_value_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            vocab_size=geometry.vocabulary,
            max_position_embeddings=geometry.positions,
            attn_implementation="sdpa",
            initializer_range=geometry.hidden**-0.5,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                self._model = transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
        self._layers = geometry.layers

    def forward(self, tokens: Any, kv: KV | None) -> tuple[Any, KV]:
        torch, cache = self._torch, self._cache_class()
        for layer, (keys, values) in enumerate(kv or []):
            cache.update(keys, values, layer)
        begin = 0 if not kv else int(kv[0][0].shape[2])
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)[None]
        with torch.inference_mode():
            # By position: transformers renamed the cache's argument (past_key_values, cache).
            out = self._model.model(tokens, None, positions, cache, use_cache=True)
            logits = self._model.lm_head(out.last_hidden_state[:, -1])
        return logits[0].float(), [_layer_of(cache, n) for n in range(self._layers)]


def _layer_of(cache: Any, layer: int) -> tuple[Any, Any]:
    """Return a layer's KV of transformers' cache, whose form differs by version."""
    if hasattr(cache, "layers"):
        return cache.layers[layer].keys, cache.layers[layer].values
    return cache.key_cache[layer], cache.value_cache[layer]


class _Plain:
    """The same geometry by torch alone."""

    name = "plain torch"

    def __init__(self, torch: Any, geometry: Geometry, device: str) -> None:
        self._torch = torch
        self._geometry = geometry
        wide, head = geometry.hidden, geometry.head_dim

        def weight(*shape: int) -> Any:
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return made.normal_(std=shape[-1] ** -0.5)

        self._embed = weight(geometry.vocabulary, wide)
        self._head = weight(geometry.vocabulary, wide)
        self._layers = [
            {
                "q": weight(geometry.heads * head, wide),
                "k": weight(geometry.kv_heads * head, wide),
                "v": weight(geometry.kv_heads * head, wide),
                "o": weight(wide, geometry.heads * head),
                "gate": weight(geometry.intermediate, wide),
                "up": weight(geometry.intermediate, wide),
                "down": weight(wide, geometry.intermediate),
            }
            for _ in range(geometry.layers)
        ]
        exponents = torch.arange(0, head, 2, dtype=torch.float32, device=device) / head
        self._frequencies = geometry.rope_theta**-exponents

    def forward(self, tokens: Any, kv: KV | None) -> tuple[Any, KV]:
        torch = self._torch
        with torch.inference_mode():
            begin = 0 if not kv else int(kv[0][0].shape[2])
            hidden = torch.nn.functional.embedding(tokens, self._embed)
            angles = self._angles(begin, tokens.shape[1])
            filled: KV = []
            for number, weights in enumerate(self._layers):
                before = None if not kv else kv[number]
                attended, layer_kv = self._attend(self._norm(hidden), weights, angles, before)
                filled.append(layer_kv)
                hidden = hidden + attended
                inner = self._norm(hidden)
                gate = torch.nn.functional.silu(inner @ weights["gate"].T)
                hidden = hidden + (gate * (inner @ weights["up"].T)) @ weights["down"].T
            logits = self._norm(hidden[:, -1]) @ self._head.T
        return logits[0].float(), filled

    def _norm(self, hidden: Any) -> Any:
        wide = hidden.float()
        scale = self._torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(hidden.dtype)

    def _angles(self, begin: int, count: int) -> tuple[Any, Any]:
        torch = self._torch
        positions = torch.arange(begin, begin + count, device=self._embed.device)
        angles = positions.float()[:, None] * self._frequencies[None]
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)

    def _attend(
        self, hidden: Any, weights: dict[str, Any], angles: tuple[Any, Any], before: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        """Return the attention of new tokens, and the layer's KV with theirs."""
        torch, geometry = self._torch, self._geometry
        count = hidden.shape[1]

        def heads(name: str, number: int) -> Any:
            cut = (hidden @ weights[name].T).view(1, count, number, geometry.head_dim)
            return cut.transpose(1, 2)

        query = _rotated(torch, heads("q", geometry.heads), angles)
        keys = _rotated(torch, heads("k", geometry.kv_heads), angles)
        values = heads("v", geometry.kv_heads)
        if before is not None:
            keys = torch.cat((before[0], keys), 2)
            values = torch.cat((before[1], values), 2)
        repeats = geometry.heads // geometry.kv_heads
        mask, causal = None, before is None and count > 1
        if before is not None and count > 1:
            total = keys.shape[2]
            mask = torch.ones(count, total, dtype=torch.bool, device=keys.device)
            mask = mask.tril(total - count)
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            keys.repeat_interleave(repeats, 1),
            values.repeat_interleave(repeats, 1),
            attn_mask=mask,
            is_causal=causal,
        )
        flat = out.transpose(1, 2).reshape(1, count, geometry.heads * geometry.head_dim)
        return flat @ weights["o"].T, (keys, values)


def _rotated(torch: Any, heads: Any, angles: tuple[Any, Any]) -> Any:
    """Rotate heads, shape (1, heads, tokens, head dimension), by their positions."""
    cosine, sine = angles
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), -1)
    return heads * cosine + turned * sine
