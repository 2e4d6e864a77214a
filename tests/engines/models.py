"""Tiny models on disk: seeded random weights whose far-away KV changes the output.

    python tests/engines/models.py FOLDER NAME

Run with the interpreter of the engines' environment. Nothing is downloaded. Untrained weights
give near-uniform attention, and then a wrong KV block hardly moves the output; with a gain on the
query and key projections attention picks single tokens, wherever they stand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
)

VOCABULARY = 512
SEED = 20
QUERY_KEY_GAIN = 2.0
HEAD_GAIN = 3.0
COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "dtype": "bfloat16",
}


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int) -> PreTrainedConfig:
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        intermediate_size=inner,
        **COMMON,
    )


def _sliding() -> PreTrainedConfig:
    """Two groups of layers: full attention, and a window of 256 tokens."""
    return Gemma3TextConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=688,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=64,
        **COMMON,
    )


def _mla() -> PreTrainedConfig:
    """Multi-head latent attention, dense layers only."""
    return DeepseekV2Config(
        num_hidden_layers=3,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=688,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        **COMMON,
    )


def _mamba() -> PreTrainedConfig:
    """Mamba-2 layers with one attention layer among them."""
    return GraniteMoeHybridConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=688,
        shared_intermediate_size=688,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        position_embedding_type="rope",
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=64,
        mamba_d_conv=4,
        mamba_expand=2,
        **COMMON,
    )


def _gated_delta() -> PreTrainedConfig:
    """Gated delta-rule layers with one attention layer among them."""
    return Qwen3NextConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=688,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        mlp_only_layers=[0, 1, 2],
        **COMMON,
    )


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "tiny": lambda: _llama(4, 256, 4, 2, 688),
    "other": lambda: _llama(4, 256, 4, 2, 688),
    "mid": lambda: _llama(8, 1024, 16, 4, 2816),
    "sliding": _sliding,
    "mla": _mla,
    "mamba": _mamba,
    "gated-delta": _gated_delta,
}
"""Models by name. ``other`` has the shape of ``tiny`` and other weights."""
GAINS = {
    "q_proj.weight": QUERY_KEY_GAIN,
    "k_proj.weight": QUERY_KEY_GAIN,
    "kv_a_proj_with_mqa.weight": QUERY_KEY_GAIN,
    "lm_head.weight": HEAD_GAIN,
}


def _fill(model: torch.nn.Module, seed: int) -> None:
    """Fill in fan-in scaled normal weights and the gains; vectors keep their initial values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() != 2:
                continue
            gain = next((g for end, g in GAINS.items() if name.endswith(end)), 1.0)
            scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            weight.copy_(drawn * (scale * gain))


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; ids 0-255 are the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "<bos>", "<eos>", "<pad>"]
    names += [f"<unused{each}>" for each in range(len(names), VOCABULARY)]
    bare = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


def make(folder: Path, name: str) -> None:
    """Write the model ``name`` and its tokenizer to ``folder``."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(MODELS[name]())
    _fill(model, SEED + sorted(MODELS).index(name))
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
