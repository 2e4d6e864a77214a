"""Identity of an engine's KV bytes: settings that change the contract, and others that must not."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhearth.connectors.core import weights as digests
from kvhearth.connectors.core.step_metadata import Geometry
from kvhearth.connectors.core.weights import Weights
from kvhearth.connectors.vllm import identity
from kvhearth.connectors.vllm.identity import (
    REMEMBERED_MAX,
    Adapters,
    EngineGroup,
    engine_contract,
    model_name_of,
    process_group_of,
    tier_contract,
    weights_change,
    weights_of,
)
from kvhearth.contract import Contract, GroupKind
from kvhearth.errors import KVHearthError, Reason

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GROUP = EngineGroup(
    kv_group=0,
    kind="full_attention",
    block_tokens=16,
    window_tokens=0,
    layers=4,
    page_bytes=4 * 16 * 512,
    dtype="torch.bfloat16",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def config(**over: Any) -> Any:
    model = SimpleNamespace(
        model="org/model",
        revision=COMMIT,
        quantization=None,
        dtype="torch.bfloat16",
        hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4, "_name_or_path": "x"}),
        hf_overrides={},
        max_model_len=4096,
        model_weights="",
        quantization_config=None,
    )
    cache = SimpleNamespace(prefix_caching_hash_algo="sha256", cache_dtype="auto")
    values: dict[str, Any] = {
        "model_config": model,
        "cache_config": cache,
        "load_config": SimpleNamespace(load_format="auto"),
        "parallel_config": SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        "kv_transfer_config": SimpleNamespace(engine_id="engine-1"),
        "instance_id": "1",
        "speculative_config": None,
    }
    return SimpleNamespace(**{**values, **over})


def contract(vllm_config: Any, group: EngineGroup = GROUP, **over: Any) -> Contract:
    options: dict[str, Any] = {
        "geometry": Geometry(2, 1),
        "hash_tokens": 16,
        "packing": "BLHNC;FLASH_ATTN",
    }
    return engine_contract(vllm_config, [group], **{**options, **over})


def test_equal_configurations_are_one_contract() -> None:
    first = contract(config())
    assert not first.private
    assert first == contract(config())
    assert Contract.from_json(first.to_json()) == first
    assert (first.revision, first.hash_bytes, first.world_size) == (COMMIT, 32, 2)
    assert first.groups[0].shards == 2
    assert first.groups[0].token_bytes == 512


def test_a_codec_is_another_contract_of_smaller_blocks() -> None:
    plain = contract(config())
    for codec in ("fp8", "int4"):
        made = contract(config(), codec=codec)
        assert made == plain.with_codec(codec) != plain
        assert made.groups[0].engine_bytes == plain.groups[0].page_bytes > made.groups[0].page_bytes


def test_a_codec_is_refused_for_kv_that_is_quantised_already() -> None:
    for dtype in ("torch.float8_e4m3fn", "torch.uint8", "torch.int8"):
        group = dataclasses.replace(GROUP, dtype=dtype)
        with pytest.raises(KVHearthError, match="codec fp8 needs KV of float32, bfloat16, float16"):
            contract(config(), group, codec="fp8")


CHANGES: dict[str, Callable[[Any], None]] = {
    "model": lambda c: setattr(c.model_config, "model", "org/other"),
    "revision": lambda c: setattr(c.model_config, "revision", COMMIT[::-1]),
    "quantization": lambda c: setattr(c.model_config, "quantization", "fp8"),
    "how": lambda c: setattr(c.model_config, "quantization_config", {"bits": 4}),
    "dtype": lambda c: setattr(c.model_config, "dtype", "torch.float32"),
    "rope": lambda c: setattr(c.model_config.hf_config, "to_dict", lambda: {"rope_theta": 1e6}),
    "overrides": lambda c: setattr(c.model_config, "hf_overrides", {"rope_theta": 5e5}),
    "images": lambda c: setattr(c.model_config, "mm_processor_kwargs", {"max_pixels": 1}),
    "later": lambda c: setattr(c.cache_config, "a_setting_of_tomorrow", True),
    "loader": lambda c: setattr(c.load_config, "ignore_patterns", ["a*"]),
    "backend": lambda c: setattr(c, "attention_config", SimpleNamespace(backend="FLASHINFER")),
    "additional": lambda c: setattr(c, "additional_config", {"a": 1}),
    "generation": lambda c: setattr(
        c.model_config, "override_generation_config", {"attn_temperature_tuning": True}
    ),
    "hash": lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
    "dcp": lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
}


def test_what_changes_kv_changes_the_contract() -> None:
    found = {contract(config()).to_json(): "none"}
    for name, change in CHANGES.items():
        changed = config()
        change(changed)
        found[contract(changed).to_json()] = name
    assert list(found.values()) == ["none", *CHANGES]


def test_the_place_of_a_configuration_does_not_change_it() -> None:
    moved = config()
    moved.model_config.hf_config.to_dict = lambda: {"rope_theta": 1e4, "_name_or_path": "/other"}
    moved.kv_transfer_config.engine_id = "engine-2"
    moved.model_config.served_model_name = "other"
    moved.cache_config.num_gpu_blocks = 7
    moved.scheduler_config = SimpleNamespace(max_num_seqs=7)
    assert contract(moved) == contract(config())


def test_packing_geometry_and_hash_length_are_in_it() -> None:
    base = contract(config())
    assert contract(config(), packing="LBHNC;CPU_ATTN") != base
    assert contract(config(), hash_tokens=8) != base
    assert contract(config(), geometry=Geometry(1, 2)) != base
    replicated = contract(config(), geometry=Geometry(2, 1, replicas=2))
    assert replicated.groups[0].shards == 1


def test_the_nodes_of_an_engine_are_one_process_group() -> None:
    nodes = [
        config(
            instance_id=number,
            parallel_config=SimpleNamespace(nnodes=2, master_addr="10.0.0.1", master_port=29501),
        )
        for number in "12"
    ]
    assert {process_group_of(one) for one in nodes} == {"10.0.0.1:29501"}
    replicas = [config(instance_id=number) for number in "12"]
    assert [process_group_of(one) for one in replicas] == ["1", "2"]


def test_the_name_of_a_local_model(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "llama")
    named = config()
    assert model_name_of(named) == ""
    named.model_config.model = f"{folder}/."
    assert model_name_of(named) == "llama"
    named.model_config.model, named.model_config.model_weights = "/tmp/pulled", "s3://b/qwen/"
    assert model_name_of(named) == "qwen"


PRIVATE: dict[str, Callable[[Any], None]] = {
    "dummy": lambda c: setattr(c.load_config, "load_format", "dummy"),
    "tensorizer": lambda c: setattr(c.load_config, "load_format", "tensorizer"),
    "streamer": lambda c: setattr(c.load_config, "load_format", "runai_streamer"),
    "function": lambda c: setattr(c.model_config, "hf_overrides", lambda config: config),
    "branch": lambda c: setattr(c.model_config, "revision", "main"),
    "object store": lambda c: setattr(c.model_config, "model_weights", "s3://bucket/model"),
    "seed": lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "xxhash"),
    "draft": lambda c: setattr(
        c,
        "speculative_config",
        SimpleNamespace(
            method="eagle",
            draft_model_config=SimpleNamespace(model="org/draft", revision="main"),
        ),
    ),
    "live": lambda c: None,
}


def test_what_is_private_is_not_found_by_another_run() -> None:
    """Also if the user has fixed ``engine_id``."""
    for name, change in PRIVATE.items():
        one, live = config(), name == "live"
        change(one)
        found = contract(one, live=live)
        assert found.private, name
        assert contract(one, live=live) == found, name
        one.instance_id = "2"
        assert contract(one, live=live) != found, name


def test_weights_that_change_have_no_name_of_the_users() -> None:
    assert contract(config(), live=True, given_revision="release 7").private
    assert weights_change(config(weight_transfer_config=SimpleNamespace()), "keep")
    assert weights_change(config(weight_transfer_config=None), "drop")
    assert not weights_change(config(weight_transfer_config=None), "auto")


def test_weights_in_an_object_store_need_a_name(tmp_path: Path) -> None:
    """The directory that vLLM pulls contains only the configuration's files."""
    pulled = config()
    pulled.model_config.model = str(model_folder(tmp_path / "pulled"))
    assert not contract(pulled).private
    pulled.model_config.model_weights = "s3://bucket/model"
    assert contract(pulled).private
    assert not contract(pulled, given_revision="release 7").private


def test_the_length_counts_as_it_was_asked_for() -> None:
    """LongRoPE and Llama 4 compute otherwise from a length on."""
    one, other, fitted, refitted = config(), config(), config(), config()
    other.model_config.max_model_len = 131072
    assert contract(other) != contract(one)
    for each, length in ((fitted, 5000), (refitted, 6000)):
        each.model_config.original_max_model_len = -1
        each.model_config.max_model_len = length
    assert contract(fitted) == contract(refitted) != contract(one)


def test_a_revision_that_is_no_commit_is_private() -> None:
    branch = config()
    branch.model_config.revision = "main"
    assert contract(branch).private
    assert not contract(branch, given_revision="release 7").private


class Resolved(str):
    """A revision as vLLM keeps it: what was asked for, and the commit that it found."""

    resolved = COMMIT


def test_the_commit_that_vllm_found_names_a_model_of_a_hub() -> None:
    """Its draft model's too."""
    found, told = config(), config()
    found.model_config.revision = Resolved("main")
    for one, revision in ((found, Resolved("main")), (told, COMMIT)):
        draft = SimpleNamespace(model="org/draft", revision=revision)
        one.speculative_config = SimpleNamespace(method="eagle", draft_model_config=draft)
    assert not contract(found).private
    assert contract(found) == contract(told)


def test_a_local_file_has_no_commit(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    one = config()
    one.model_config.model = str(path)
    assert contract(one).private
    assert not contract(one, given_revision="release 7").private


def test_a_weak_hash_needs_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = config()
    weak.cache_config.prefix_caching_hash_algo = "xxhash"
    found = contract(weak)
    assert (found.private, found.hash_bytes) == (True, 16)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    seeded = contract(weak)
    assert not seeded.private
    assert "7" != seeded.hash_seed != found.hash_seed


def test_a_draft_model_is_part_of_it() -> None:
    draft = SimpleNamespace(model="org/draft", revision=COMMIT)
    with_draft = config(
        speculative_config=SimpleNamespace(method="eagle", draft_model_config=draft)
    )
    found = contract(with_draft)
    assert found.draft_model.startswith(f"eagle:org/draft:{COMMIT}:")
    draft.hf_overrides = {"rope_theta": 1}
    assert contract(with_draft) != found
    # vLLM's own, which has done its work on the draft's configuration
    draft.hf_overrides = lambda config: config
    assert not contract(with_draft).private
    ngram = config(speculative_config=SimpleNamespace(method="ngram", draft_model_config=draft))
    assert contract(ngram) == contract(config())


def test_kinds_of_groups() -> None:
    for kind, window, expected in (
        ("mla_attention", 0, GroupKind.FULL),
        ("sliding_window", 256, GroupKind.SLIDING_WINDOW),
        ("chunked_local_attention", 8193, GroupKind.SLIDING_WINDOW),
        ("mamba", 0, GroupKind.MAMBA),
    ):
        group = dataclasses.replace(GROUP, kind=kind, window_tokens=window)
        spec = contract(config(), group).groups[0]
        assert (spec.kind, spec.window_tokens) == (expected, window)
    with pytest.raises(KVHearthError, match="cross_attention") as caught:
        contract(config(), dataclasses.replace(GROUP, kind="cross_attention"))
    assert caught.value.reason is Reason.BAD_CONTRACT


def local(folder: Path) -> Weights:
    model = SimpleNamespace(model=str(folder), revision=None)
    return weights_of(model, SimpleNamespace(load_format="auto"), "engine-1")


def model_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    return folder


def test_a_local_directory_is_its_files(tmp_path: Path) -> None:
    first, second = model_folder(tmp_path / "a"), model_folder(tmp_path / "b")
    assert local(first) == local(second)
    with (second / "model.safetensors").open("r+b") as file:
        file.seek(1000)
        file.write(b"?")
    assert local(first) != local(second)
    (first / "more.json").write_text("{}")
    assert local(first).revision != local(model_folder(tmp_path / "c")).revision


def test_links_to_directories_are_what_they_lead_to(tmp_path: Path) -> None:
    """Wherever they stand; a link that leads back ends there."""
    first, second = model_folder(tmp_path / "a"), model_folder(tmp_path / "b")
    (second / "model.safetensors").write_bytes(b"other")
    model = tmp_path / "model"
    (model / "deep").mkdir(parents=True)
    found = []
    for place in (first, second):
        for link in (model / "weights", model / "deep" / "weights"):
            link.unlink(missing_ok=True)
            link.symlink_to(place)
            found.append(local(model))
    assert len(set(found)) == len(found)
    (model / "deep" / "back").symlink_to(model)
    assert local(model) == found[-1]


def test_a_directory_without_end_has_no_digest(tmp_path: Path) -> None:
    for number in range(13):
        (tmp_path / str(number)).mkdir()
        for side in "ab":
            (tmp_path / str(number) / side).symlink_to(tmp_path / str(number + 1))
    with pytest.raises(OSError, match="more than 4096"):
        digests.directory_digest(tmp_path / "0")


def test_a_large_file_is_read_once_and_anew_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_KEPT_FROM_BYTES", 1)
    folder = model_folder(tmp_path / "a")
    first = local(folder)
    reads: list[Path] = []
    read = digests._read
    monkeypatch.setattr(digests, "_read", lambda path: reads.append(path) or read(path))
    assert local(folder) == first
    monkeypatch.setattr(digests, "_known", {})  # another process
    assert local(folder) == first
    assert reads == []
    target = folder / "model.safetensors"
    target.write_bytes(b"other")
    os.utime(target, ns=(1, 1))
    assert local(folder) != first
    assert reads == [target]


def test_a_large_file_is_read_once_without_a_place_to_remember_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_KEPT_FROM_BYTES", 1)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = model_folder(tmp_path / "a")
    first = local(folder)
    monkeypatch.setattr(digests, "_read", lambda path: pytest.fail(f"{path} is read again"))
    assert local(folder) == first


def test_a_spoilt_memory_of_digests_is_no_trouble(tmp_path: Path) -> None:
    store = tmp_path / "cache" / "kvhearth" / "digests.json"
    store.parent.mkdir(parents=True)
    store.write_text('["?"]')
    assert local(model_folder(tmp_path / "a")).revision


def test_an_adapter_is_its_files(tmp_path: Path) -> None:
    first, second = model_folder(tmp_path / "a"), model_folder(tmp_path / "b")
    assert identity.adapter_digest(str(first)) == identity.adapter_digest(str(second))
    (second / "config.json").write_text('{"r": 8}')
    assert identity.adapter_digest(str(first)) != identity.adapter_digest(str(second))


def test_how_an_adapter_is_read_is_part_of_it(tmp_path: Path) -> None:
    path = str(model_folder(tmp_path / "a"))
    read = [
        Adapters(SimpleNamespace(target_modules=modules, max_loras=number)).digest(lora(path))
        for modules, number in ((None, 1), (None, 2), (["o_proj"], 1))
    ]
    assert read[0] == read[1] != read[2]


def test_an_adapter_without_files_has_no_digest(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="org/adapter"):
        identity.adapter_digest("org/adapter")
    assert Adapters().digest(lora("org/adapter")) is None
    assert "org/adapter" in caplog.text


def lora(path: str, number: int = 1, *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_path=path, lora_int_id=number, load_inplace=load_inplace)


def test_an_adapter_is_what_it_was_when_vllm_loaded_it(tmp_path: Path) -> None:
    adapters, path = Adapters(), str(model_folder(tmp_path / "a"))
    first = adapters.digest(lora(path))
    (tmp_path / "a" / "config.json").write_text('{"r": 8}')
    assert adapters.digest(lora(path)) == first
    second = adapters.digest(lora(path, 2))
    assert second not in (first, None)
    assert adapters.digest(lora(path, load_inplace=True)) == second
    assert adapters.digest(lora(path)) == second


def test_the_memory_of_adapters_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhearth.connectors.vllm.identity.adapter_digest", lambda _: b"x")
    adapters = Adapters()
    for number in range(REMEMBERED_MAX + 10):
        adapters.digest(lora(str(tmp_path), number))
    assert len(adapters._digests) == REMEMBERED_MAX


# -- chunks of vLLM's own offloading -----------------------------------------------------------


def offloading(model: str = "org/model", **over: Any) -> Any:
    """What vLLM tells a tier about the engine."""
    parallel = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    parallel |= {"is_parallelism_agnostic": False, **over.pop("parallel", {})}
    values = {
        "model": SimpleNamespace(name=model, dtype="bfloat16"),
        "groups": (SimpleNamespace(tokens_per_block=16, layer_names=("layer.0", "layer.1")),),
        "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=4),
        "parallel": SimpleNamespace(**parallel),
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "LBHNC",
        **over,
    }
    return SimpleNamespace(**values)


def chunks(told: Any, page_bytes: int = 1 << 20, **over: Any) -> Contract:
    facts = {
        "version": "0.33.0",
        "run": "run",
        "given_revision": "",
        "live": False,
        "vllm_config": config(),
        **over,
    }
    return tier_contract(told, page_bytes, **facts)


def test_what_changes_kv_changes_a_tiers_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier is not told of it; vLLM's own configuration says so."""
    found = {chunks(offloading()).to_json(): "none"}
    names = [name for name in CHANGES if name != "dcp"]
    for name in names:
        changed = config()
        CHANGES[name](changed)
        found[chunks(offloading(), vllm_config=changed).to_json()] = name
    spread = config()
    spread.parallel_config.cp_kv_cache_interleave_size = 16
    found[chunks(offloading(), vllm_config=spread).to_json()] = "interleave"
    found[chunks(offloading(), device="cuda/9.0").to_json()] = "device"
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    found[chunks(offloading()).to_json()] = "environment"
    assert list(found.values()) == ["none", *names, "interleave", "device", "environment"]


def test_an_engine_with_adapters_shares_no_chunks_unless_named() -> None:
    """vLLM's hashes know them by path, and a tier has no request to look at."""
    engine = config(lora_config=SimpleNamespace())
    assert chunks(offloading(), vllm_config=engine).private
    assert not chunks(offloading(), vllm_config=engine, given_revision="r1").private
    assert not contract(engine).private


@pytest.mark.parametrize("known", [True, False])
def test_chunks_of_weights_without_a_name_are_private(*, known: bool) -> None:
    """Where vLLM's configuration was not found, those of every engine are."""
    engine = config() if known else None
    if engine:
        engine.model_config.revision = "main"
    for given, live, private in (("", False, True), ("r1", False, False), ("r1", True, True)):
        facts = {"given_revision": given, "live": live, "vllm_config": engine}
        found = chunks(offloading(), **facts)
        assert found.private == private
        assert (chunks(offloading(), run="other", **facts) == found) != private


def test_each_part_of_a_chunk_is_in_its_contract() -> None:
    known = chunks(offloading())
    group = SimpleNamespace(tokens_per_block=16, layer_names=("layer.0",))
    others = [
        chunks(offloading(groups=(group,))),
        chunks(offloading(cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=2))),
        chunks(offloading(cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2))),
        chunks(offloading(kv_cache_layout="BLHNC")),
        chunks(offloading(canonical_layout=True)),
        chunks(offloading(parallel={"tp_size": 2, "is_parallelism_agnostic": True})),
        chunks(offloading(parallel={"dcp_size": 2})),
        chunks(offloading(), page_bytes=2 << 20),
        chunks(offloading(), version="0.32.0"),
    ]
    assert len({known.to_json(), *(other.to_json() for other in others)}) == len(others) + 1
    assert chunks(offloading(), version="0.33.7") == known


@pytest.mark.parametrize(
    "over",
    [
        {"replicated_layout": True},
        {"canonical_layout": True, "parallel": {"is_parallelism_agnostic": True}},
    ],
)
def test_workers_that_hold_the_same_bytes_share_chunks(over: dict[str, Any]) -> None:
    """A chunk in one copy for all workers, or in vLLM's format that no geometry changes."""
    parallel = over.pop("parallel", {})
    one, two = (
        chunks(offloading(**over, parallel={**parallel, "tp_size": size})) for size in (1, 2)
    )
    assert one == two
