"""The calculator: bytes per token of models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases
from support.core_kit import refused

from kvhearth.errors import Reason
from kvhearth_server.cli import app
from kvhearth_server.cli.output import size
from kvhearth_server.cli.sizing import model_kv

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/golden/models.json").read_text())
LLAMA = MODELS["Llama 3.1 8B"]
BYTES_PER_TOKEN = {
    "Llama 3.1 8B": 131_072,
    "Llama 3.3 70B": 327_680,
    "Llama 3.1 405B": 516_096,
    "Mistral 7B v0.3": 131_072,
    "Mixtral 8x7B": 131_072,
    "Qwen2.5 7B": 57_344,
    "Qwen3 8B": 147_456,
    "Qwen3 32B": 262_144,
    "Qwen3 30B-A3B": 98_304,
    "Qwen3 235B-A22B": 192_512,
    "Gemma 2 9B": 344_064,
    "Gemma 3 27B": 507_904,
    "Phi-4": 204_800,
    "gpt-oss 120B": 73_728,
    "DeepSeek V3, R1": 70_272,
}


def table() -> str:
    """The table of docs/sizing.md."""
    rows = []
    for name, config in MODELS.items():
        kv = model_kv(config)
        layers = f"{kv.full_layers}"
        if kv.sliding_layers:
            layers += f", {kv.sliding_layers} of window {kv.window_tokens}"
        cells = (name, layers, kv.attention.upper(), f"{kv.bytes_per_token:,.0f}")
        row = (*cells, f"{int(2**30 / kv.bytes_per_token):,}", size(kv.context_bytes(8192)))
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def test_bytes_per_token_of_public_models() -> None:
    found = {name: model_kv(config).bytes_per_token for name, config in MODELS.items()}
    assert found == BYTES_PER_TOKEN


def test_the_table_of_the_page_is_what_the_calculator_says() -> None:
    assert table() in (ROOT / "docs" / "sizing.md").read_text(), table()


def test_windows_load_their_last_tokens() -> None:
    kv = model_kv(MODELS["gpt-oss 120B"])
    assert (kv.full_layers, kv.sliding_layers, kv.window_tokens) == (18, 18, 128)
    assert kv.context_bytes(8192) == 18 * 2048 * (8192 + 128)
    assert kv.context_bytes(100) == 36 * 2048 * 100
    gemma = model_kv(MODELS["Gemma 3 27B"])
    assert (gemma.full_layers, gemma.sliding_layers) == (10, 52)


@cases(
    ("changes", "full", "sliding", "state"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, 16, 0, 16),
        ({"sliding_window": 4096}, 32, 0, 0),
        ({"sliding_window": 4096, "model_type": "mistral"}, 0, 32, 0),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20}, 20, 12, 0),
        ({"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 20}, 32, 0, 0),
        ({"num_kv_shared_layers": 12}, 20, 0, 0),
        ({"sliding_window": 512, "layer_types": ["sliding_attention"] * 31}, 0, 32, 0),
    ],
)
def test_kinds_of_layers(changes: dict[str, Any], full: int, sliding: int, state: int) -> None:
    kv = model_kv({**LLAMA, **changes})
    assert (kv.full_layers, kv.sliding_layers, kv.state_layers) == (full, sliding, state)
    assert kv.bytes_per_token == (full + sliding) * 4096


@cases(
    ("changes", "attention", "layer_bytes"),
    [
        ({"num_key_value_heads": 32}, "mha", 16384),
        ({"num_key_value_heads": None}, "mha", 16384),
        ({"head_dim": 64}, "gqa", 2048),
        ({"head_dim": 192, "v_head_dim": 128}, "gqa", 8 * 320 * 2),
        ({"torch_dtype": "float32"}, "gqa", 8192),
        ({"torch_dtype": "float16"}, "gqa", 4096),
        ({"dtype": "bfloat16", "torch_dtype": None}, "gqa", 4096),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}, "mla", 1152 + 132),
    ],
)
def test_bytes_of_a_layer(changes: dict[str, Any], attention: str, layer_bytes: int) -> None:
    kv = model_kv({**LLAMA, **changes})
    assert (kv.attention, kv.layer_bytes) == (attention, layer_bytes)


def test_dtypes_codecs_and_ranks() -> None:
    assert model_kv(LLAMA, "fp8").bytes_per_token == 65_536
    assert model_kv(LLAMA, codec="fp8").bytes_per_token == 131_072 * 33 / 64
    assert model_kv(LLAMA, codec="int4").bytes_per_token == 131_072 * 36 / 128
    assert model_kv(LLAMA, ranks=8).bytes_per_token == 131_072
    assert model_kv(LLAMA, ranks=16).bytes_per_token == 262_144
    for wrong in ({"kv_dtype": "float7"}, {"codec": "zip"}, {"kv_dtype": "fp8", "codec": "int4"}):
        with refused(Reason.CONFIG_INVALID):
            model_kv(LLAMA, **wrong)


@cases(
    "config",
    [
        {},
        {"num_hidden_layers": "many"},
        {"num_hidden_layers": -1, "num_attention_heads": 1, "hidden_size": 1},
        {"num_hidden_layers": 4},
        {"num_hidden_layers": 4, "num_attention_heads": 0, "hidden_size": 8},
        {**LLAMA, "layer_types": ["full_attention", "telepathy"]},
    ],
)
def test_other_files_are_refused_by_field(config: dict[str, Any]) -> None:
    with refused(Reason.CONFIG_INVALID):
        model_kv(config)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["size", "--model", str(tmp_path), "--context", "1024", "--idle", "0"]
    assert app.run(words) == 0
    shown = capsys.readouterr().out
    assert re.search(r"bytes per token +131072\b", shown)
    assert "kvhearth serve --memory 32GiB" in shown  # 200 x 1024 x 128 KiB and a fifth spare
    assert app.run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["memory_gib"], found["ssd_gib"]) == (32, 0)
    assert app.run(["size", "--model", "none.json"]) == app.EXIT_CONFIG
    assert "kvhearth: error: " in capsys.readouterr().err
