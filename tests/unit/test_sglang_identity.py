"""Identity of a SGLang server: arguments that change its contracts, names that must not."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvhearth.connectors.core.fingerprint import environment
from kvhearth.connectors.sglang.identity import (
    HARMLESS,
    pool_contract,
    server_fields,
    updated_fields,
)
from kvhearth.contract import Contract

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RUN = "run-1"
ARGS = {
    **dict.fromkeys(HARMLESS, None),
    "checkpoint_engine_wait_weights_before_ready": False,
    "custom_weight_loader": None,
    "load_format": "auto",
    "lora_paths": None,
    "model_path": "org/model",
    "quantization_param_path": None,
    "revision": COMMIT,
    "speculative_draft_model_path": None,
    "speculative_draft_model_revision": None,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(**over: Any) -> Any:
    ranks = {"pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "tp_rank": 0}
    facts = {**ranks, "tp_size": 2, "is_mla_model": False, "model_name": "served", **over}
    return SimpleNamespace(**facts)


class Mla:
    """A pool without heads, whose bytes are the same on all ranks."""

    dtype = "torch.bfloat16"
    layout = "page_first"
    page_size = 16
    start_layer = 0
    end_layer = 3
    storage_format_tag = None


class Mha(Mla):
    """A pool of a rank's heads."""

    head_num = 2


def contract(
    args: dict[str, Any] | None = None,
    *,
    version: str = "0.5.23",
    given: str = "",
    run: str = RUN,
    name: str = "kv",
    pool: Any = Mha,
    runs: tuple[int, ...] = (1024, 1024),
    **over: Any,
) -> Contract:
    found = {**ARGS, **(args or {})}
    fields = server_fields(found, version, run, given)
    return pool_contract(fields, config(**over), name, pool(), runs)


def folder(place: Path, content: str) -> str:
    place.mkdir()
    (place / "weights").write_text(content)
    return str(place)


def test_what_may_change_kv_changes_the_contract(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    adapter = SimpleNamespace(lora_name="a", lora_path=folder(tmp_path / "lora", "1"))
    draft = {"speculative_draft_model_path": folder(tmp_path / "draft", "1")}
    found = [
        contract(),
        *(contract({name: "other"}) for name in ("kt_weight_path", "kv_cache_dtype", "dtype")),
        contract({"an_argument_of_tomorrow": True}),
        contract({"environment": {"SGLANG_FP8_IGNORED_LAYERS": "1"}}),
        contract({"mm_process_config": {"image": {"max_pixels": 1000}}}),
        contract({"model_loader_extra_config": '{"presharded_path":"/a"}'}),
        contract({"model_loader_extra_config": '{"presharded_path":"/b"}'}),
        contract({"load_format": "safetensors"}),
        contract({"revision": "f" * 40}),
        contract({"quantization_param_path": str(scales)}),
        contract({"lora_paths": [adapter]}),
        contract(draft),
        contract(version="0.5.24"),
        contract(name="swa"),
        contract(pool=Mla),
        contract(runs=(512, 1536)),
        contract(tp_rank=1),
        contract(pp_size=2),
        contract(attn_cp_rank=1, attn_cp_size=2),
    ]
    assert len({each.to_json() for each in found}) == len(found)
    assert contract(model_name="other", run="run-2") == contract()
    ports = {"port": 30001, "random_seed": 7, "hicache_size": 16, "served_model_name": "other"}
    assert contract(ports) == contract()


def test_files_are_known_by_their_content(tmp_path: Path) -> None:
    one, same, other = (
        folder(tmp_path / name, content) for name, content in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    scales = tmp_path / "scales.json"

    def with_scales(text: str) -> Contract:
        scales.write_text(text)
        return contract({"quantization_param_path": str(scales)})

    def with_adapter(path: str) -> Contract:
        return contract({"lora_paths": [SimpleNamespace(lora_name="a", lora_path=path)]})

    assert contract({"model_path": one}) == contract({"model_path": same})
    assert contract({"model_path": one}) != contract({"model_path": other})
    assert with_adapter(one) == with_adapter(same) != with_adapter(other)
    assert with_scales("1") == with_scales("1") != with_scales("2")


def test_a_path_in_a_setting_is_what_is_there(tmp_path: Path) -> None:
    """Also one in a text of JSON; what is there can change under its name."""

    def experts(name: str, content: str) -> tuple[Contract, Contract]:
        place = folder(tmp_path / name, content)
        extra = f'{{"presharded_path": "{place}"}}'
        return contract({"kt_weight_path": place}), contract({"model_loader_extra_config": extra})

    first = experts("a", "1")
    assert experts("b", "1") == first
    (tmp_path / "a/weights").write_text("2")
    assert experts("c", "2") not in (first, experts("d", "3"))
    assert contract({"kt_weight_path": str(tmp_path / "a")}) == experts("e", "2")[0]


def test_a_name_without_a_directory_is_a_file_of_the_folder_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for content in "12":
        (tmp_path / "scales.json").write_text(content)
        found.append(contract({"quantization_param_path": "scales.json"}))
    assert found[0] != found[1]
    word, path = {"attention_backend": "triton"}, {"kt_weight_path": "experts"}
    before = contract(word), contract(path)
    folder(tmp_path / "triton", "1")
    folder(tmp_path / "experts", "1")
    assert contract(word) == before[0]
    assert contract(path) != before[1]


def test_variables_that_say_where_something_is_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PORT", "HOST", "DP_RANK", "RUN_ID", "CACHE_DIR", "LOG_LEVEL", "FP8_LAYERS"):
        monkeypatch.setenv(f"KVH_TEST_{name}", "1")
    assert environment("KVH_TEST_") == {"KVH_TEST_FP8_LAYERS": "1"}


class Broken:
    """An object of an engine's that cannot say what it is."""

    def to_dict(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    "value", [print, object(), Broken(), np.zeros(2000), [print], {"a": {"b": object()}}], ids=str
)
def test_a_setting_that_cannot_be_compared_is_private_unless_named(value: Any) -> None:
    assert contract({"forward_hooks": value}).private
    assert not contract({"forward_hooks": value}, given="v1").private


@pytest.mark.parametrize("value", ["\ud800", 10**5000, "/" + "x" * 5000, b"\xff"], ids="abcd")
def test_no_value_ends_an_engine(value: Any) -> None:
    assert contract({"an_argument": value}) == contract({"an_argument": value}) != contract()


@pytest.mark.parametrize(
    "args",
    [
        {"revision": "main"},
        {"load_format": "dummy"},
        {"load_format": "remote_instance"},
        {"custom_weight_loader": ["a.b"]},
        {"speculative_draft_model_path": "org/draft", "speculative_draft_load_format": "dummy"},
        {"checkpoint_engine_wait_weights_before_ready": True},
        {"lora_paths": [SimpleNamespace(lora_name="a", lora_path="org/adapter")]},
    ],
    ids=str,
)
def test_weights_without_a_name_belong_to_one_run(args: dict[str, Any]) -> None:
    assert contract(args) == contract(args)
    assert contract(args) != contract(args, run="run-2")


def test_a_given_revision_names_weights_but_not_random_ones() -> None:
    assert not contract({"load_format": "remote"}, given="v1").private
    assert contract({"load_format": "remote"}, given="v1") != contract(
        {"load_format": "remote"}, given="v2"
    )
    assert contract({"load_format": "dummy"}, given="v1").private


def test_updated_weights_are_private_to_the_run_and_each_update_its_own() -> None:
    fields = server_fields(ARGS, "0.5.23", RUN)
    updates = [(RUN, "1", 0), (RUN, "2", 0), (RUN, "1", 1), ("run-2", "1", 0)]
    found = [
        pool_contract(updated_fields(fields, run, version, uses), config(), "kv", Mha(), (2048,))
        for run, version, uses in updates
    ]
    assert all(each.private for each in found)
    assert len({each.revision for each in found}) == len(found)


def test_ranks_share_what_is_the_same_on_all_of_them() -> None:
    def shared(name: str, pool: Any) -> bool:
        ranks = [
            contract(name=name, pool=pool, is_mla_model=True, tp_rank=rank) for rank in range(2)
        ]
        return ranks[0] == ranks[1]

    assert shared("kv", Mla)
    assert shared("indexer", Mla)
    assert not shared("mamba", Mla)
    assert not shared("draft", Mha)


@pytest.mark.parametrize("policy", ["all_pages", "trailing_pages"])
def test_restorable_prefixes_against_trying_every_length(policy: str) -> None:
    pytest.importorskip("torch")
    from kvhearth.connectors.sglang.pools import leading, needed, restorable

    chance = random.Random(7)
    for _ in range(200):
        flags = np.array([chance.random() < 0.7 for _ in range(chance.randrange(9))], np.bool_)
        keys = ["k"] * chance.randrange(4)
        transfer = SimpleNamespace(hit_policy=policy, keys=keys)
        tried = [
            all(flags[:length] if policy == "all_pages" else flags[:length][-max(len(keys), 1) :])
            for length in range(1, len(flags) + 1)
        ]
        found = restorable(flags, policy, needed(transfer, len(flags)))
        assert found.tolist() == tried, (flags, keys)
        assert leading(flags) == next((n for n, flag in enumerate(flags) if not flag), len(flags))


def test_an_unknown_policy_is_refused() -> None:
    pytest.importorskip("torch")
    from kvhearth.connectors.sglang.pools import restorable

    with pytest.raises(ValueError, match="block_groups"):
        restorable(np.ones(2, np.bool_), "block_groups", 1)
