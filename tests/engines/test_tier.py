"""KVHearth below vLLM's own offloading: its real spec, manager, primary tier and lookups, without
the copies from and to a GPU. Each call of ``inside`` is an engine of its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.harness import inside
from support.daemon import Daemon, running_daemon, until
from support.tiers import flip_stored

CHUNKS, CHUNK_BYTES = 12, 4 << 20
MEMORY = {"memory": "96MiB", "slab_bytes": "8MiB"}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "vocab_size": 512,
    "dtype": "float32",
}
HITS, MISSES = ["HIT"] * CHUNKS, ["MISS"] * CHUNKS


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon(**MEMORY) as daemon:
        yield daemon
        if not daemon.dead:
            daemon.wait_quiet()


@pytest.fixture
def model(tmp_path: Path) -> str:
    return weights(tmp_path / "a", "weights")


def weights(folder: Path, content: str) -> str:
    """Make a model's directory with a file without tensors; all of them have the same name."""
    model = folder / "served"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    header = json.dumps({"__metadata__": {"content": content}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return str(model)


def engine(logs: Path, function: str, model: str, daemon: Daemon, **given: Any) -> Any:
    options = {"url": daemon.url(), **given.pop("options", {})}
    return inside(logs, f"engines.inside_tier:{function}", model=model, options=options, **given)


def test_another_engine_finds_the_first_ones_blocks(
    logs: Path, daemon: Daemon, model: str, tmp_path: Path
) -> None:
    """Also after the daemon was killed; an engine with other weights does not."""
    assert engine(logs, "load", model, daemon)[0] == MISSES
    assert engine(logs, "store", model, daemon) == [True]
    assert engine(logs, "load", model, daemon) == [HITS, True]
    daemon.restart()
    same = weights(tmp_path / "b", "weights")
    assert engine(logs, "load", same, daemon) == [HITS, True]
    other = weights(tmp_path / "c", "Weights")
    assert engine(logs, "load", other, daemon)[0] == MISSES


OTHERS: list[dict[str, Any]] = [
    {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 1e4}}},
    {"kv_cache_dtype": "fp8"},
    {"attention_backend": "CPU_ATTN"},
    {"load_format": "dummy"},
    {"max_model_len": 2048},
]


def test_arguments_that_change_kv_keep_engines_of_one_model_apart(
    logs: Path, daemon: Daemon, model: str
) -> None:
    """vLLM tells a tier none of them; those that change no KV do not."""
    assert engine(logs, "store", model, daemon) == [True]
    for given in OTHERS:
        assert engine(logs, "load", model, daemon, **given)[0] == MISSES, given
    assert engine(logs, "load", model, daemon, max_num_seqs=7, seed=3) == [HITS, True]


def test_blocks_on_ssd_are_promoted_by_lookups(logs: Path, model: str, tmp_path: Path) -> None:
    options = {"ssd_dirs": [f"{tmp_path}/ssd=256MiB"], "ssd_segment_bytes": "16MiB"}
    with running_daemon(arena=False, **MEMORY, **options) as daemon:
        assert engine(logs, "store", model, daemon) == [True]
        until(lambda: daemon.counters().get("demoted_blocks", 0) >= CHUNKS, "all are on SSD")
        daemon.restart()
        until(lambda: daemon.read_back, "the log is read back")
        assert engine(logs, "load", model, daemon) == [HITS, True]


def test_blocks_come_from_a_remote(logs: Path, model: str, tmp_path: Path) -> None:
    """The daemon asks its remotes only when a lookup comes; the answer is awaited."""
    shared = {"remote": f"file://{tmp_path}/shared", "remote_write": "all"}
    (tmp_path / "shared").mkdir()
    with running_daemon(arena=False, **MEMORY, **shared) as one:
        assert engine(logs, "store", model, one) == [True]
        until(lambda: one.counters()["published_blocks"] >= CHUNKS, "blocks are published")
    with running_daemon(arena=False, **MEMORY, **shared) as other:
        assert engine(logs, "load", model, other) == [HITS, True]


def test_a_flipped_bit_is_a_miss(logs: Path, daemon: Daemon, model: str) -> None:
    assert engine(logs, "store", model, daemon) == [True]
    data = np.random.default_rng(33).integers(0, 256, (CHUNKS, CHUNK_BYTES), np.uint8)
    flip_stored(daemon.arena_dir, data[9, 4096:4160].tobytes())
    names, equal = engine(logs, "load", model, daemon)
    assert names == [*HITS[:9], "MISS", *HITS[10:]]
    assert equal


def test_a_daemon_killed_before_the_loads_is_a_miss(logs: Path, daemon: Daemon, model: str) -> None:
    assert engine(logs, "store", model, daemon) == [True]
    found = engine(logs, "lose", model, daemon, pid=daemon.pid)
    assert found == {"promised": ["HIT"], "names": MISSES, "stored": [False]}


def test_a_load_that_fails_late_leaves_a_newer_lookup(
    logs: Path, daemon: Daemon, model: str
) -> None:
    found = engine(logs, "fail_late", model, daemon)
    assert found == ["RETRY", "False", "MISS"]


@pytest.mark.parametrize(
    ("on_reset", "shared", "kept"),
    [("auto", False, False), ("auto", True, True), ("drop", False, False), ("keep", False, True)],
)
def test_a_reset_drops_blocks_and_what_older_weights_began(
    logs: Path, daemon: Daemon, model: str, on_reset: str, *, shared: bool, kept: bool
) -> None:
    """The request whose chunks are stored twice began before the reset."""
    options = {"on_reset": on_reset}
    found = engine(logs, "reset", model, daemon, options=options, shared=shared)
    assert found["stored"] == [True, kept]
    assert found["names"] == (HITS if kept else MISSES)
    assert ("reset.kept_blocks" in found["warnings"]) == kept


@pytest.mark.parametrize(
    ("algorithm", "bytes_of_hash", "known"),
    [("sha256", 32, True), ("xxhash", 16, True), ("xxhash", 16, False)],
)
def test_routers_learn_what_the_tier_has(
    logs: Path, daemon: Daemon, model: str, algorithm: str, bytes_of_hash: int, *, known: bool
) -> None:
    given: dict[str, Any] = {"algorithm": algorithm, "bytes_of_hash": bytes_of_hash, "known": known}
    assert engine(logs, "publish", model, daemon, **given) == [12, 12]


def test_a_chunk_that_moves_is_stored_before_it_is_removed(
    logs: Path, daemon: Daemon, model: str
) -> None:
    told = [[False, "REMOTE"], [True, "LOCAL"], [True, "REMOTE"]]
    assert engine(logs, "moved", model, daemon) == told


@pytest.mark.parametrize(("goes_on", "retained"), [(False, 4), (True, 0)])
def test_hints_work_as_in_the_connector(
    logs: Path, daemon: Daemon, model: str, *, goes_on: bool, retained: int
) -> None:
    """A request's chunks are kept until its session's next one; a misspelt hint is counted."""
    assert engine(logs, "retain", model, daemon, goes_on=goes_on)["hints_refused"] == 1
    assert daemon.stats().retained_blocks == retained


def test_bad_options_are_refused_by_name(logs: Path, daemon: Daemon, model: str) -> None:
    for options, said in (
        ({"on_reset": "never"}, "on_reset='never' is not one of auto, drop, keep"),
        ({"url": "http://x"}, "bad_url"),
        ({"revison": "x"}, "revison"),
    ):
        with pytest.raises(AssertionError, match=said):
            engine(logs, "store", model, daemon, options=options)
