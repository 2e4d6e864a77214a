"""The contract: its canonical form, rejections that name the field, and differences by name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import cases
from support.core_kit import no_deadline

from kvhearth.contract import (
    CONTRACT_JSON_BYTES_MAX,
    DTYPE_BYTES,
    Contract,
    GroupKind,
    GroupSpec,
    differences,
    namespace_digest,
)
from kvhearth.errors import KVHearthError, Reason

FULL = GroupSpec(GroupKind.FULL, 16, 65536, layers=8, token_bytes=512, shards=2)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 16, 65536, 8, 512, 2, window_tokens=1024)
MAMBA = GroupSpec(GroupKind.MAMBA, 512, 4096, layers=4)
BASE = Contract(
    model="org/model",
    revision="abc",
    kv_dtype="bfloat16",
    groups=(FULL, WINDOW, MAMBA),
    tensor_parallel=2,
)


def raw() -> dict[str, Any]:
    """The base contract as plain JSON values."""
    values: dict[str, Any] = json.loads(BASE.to_json())
    return values


def refusal(text: str) -> str:
    """Returns the field for which a text is rejected."""
    with pytest.raises(KVHearthError) as caught:
        Contract.from_json(text)
    assert caught.value.reason is Reason.BAD_CONTRACT
    field = caught.value.details["field"]
    assert not field or field in caught.value.message
    return field


def refused_field(**changes: Any) -> str:
    """Returns the field for which the changed base contract is rejected; None removes a field."""
    values = {**raw(), **changes}
    return refusal(json.dumps({k: v for k, v in values.items() if v is not None}))


def refused_group(index: int = 0, **changes: Any) -> str:
    """Returns the field for which a contract with a change to one group is rejected."""
    values = raw()
    group = {**values["groups"][index], **changes}
    values["groups"][index] = {k: v for k, v in group.items() if v is not None}
    return refusal(json.dumps(values))


# -- the canonical form ----------------------------------------------------------------------------

printable = st.characters(codec="utf-8").filter(str.isprintable)
names = st.text(printable, min_size=1, max_size=20)
contracts = st.builds(
    lambda model, revision, seed, kv_dtype, hash_bytes, ranks, tokens: dataclasses.replace(
        BASE,
        model=model,
        revision=revision,
        hash_seed=seed,
        kv_dtype=kv_dtype,
        hash_bytes=hash_bytes,
        tensor_parallel=ranks,
        groups=(dataclasses.replace(FULL, token_bytes=0, block_tokens=tokens), MAMBA),
    ),
    names,
    names,
    st.text(printable, max_size=5),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.integers(16, 64),
    st.integers(2, 256),
    st.integers(1, 1 << 20),
)


@no_deadline
@given(made=contracts)
def test_the_text_comes_back_as_the_same_contract(made: Contract) -> None:
    text = made.to_json()
    assert text.isascii()
    assert Contract.from_json(text) == made
    assert Contract.from_json(text).to_json() == text
    # Order and white space of the input do not affect the canonical form.
    loose = json.dumps(dict(reversed(json.loads(text).items())), indent=2)
    assert Contract.from_json(loose).to_json() == text


@no_deadline
@given(one=contracts, other=contracts)
def test_two_contracts_are_one_namespace_exactly_if_equal(one: Contract, other: Contract) -> None:
    assert (one == other) == (namespace_digest("t", one) == namespace_digest("t", other))
    assert (one == other) == (differences(one, other) == [])
    assert namespace_digest("t", one) != namespace_digest("u", one)


def test_every_field_counts() -> None:
    changed = {
        "model": "x",
        "revision": "x",
        "kv_dtype": "float16",
        "groups": (FULL,),
        "layout": "x",
        "model_dtype": "x",
        "quantization": "x",
        "hash_bytes": 16,
        "hash_algorithm": "x",
        "hash_seed": "x",
        "tensor_parallel": 4,
        "pipeline_parallel": 2,
        "decode_context_parallel": 2,
        "rope_digest": "x",
        "draft_model": "x",
        "codec": "fp8",
    }
    fields = {field.name for field in dataclasses.fields(Contract)} - {"version"}
    assert set(changed) == fields, "a new field: say here what changes it"
    made = [
        BASE.with_codec(value) if name == "codec" else dataclasses.replace(BASE, **{name: value})
        for name, value in changed.items()
    ]
    digests = {namespace_digest("t", one) for one in made}
    assert len(digests | {namespace_digest("t", BASE)}) == len(fields) + 1


def test_a_contract_without_a_codec_has_the_text_of_versions_before_codecs() -> None:
    assert "codec" not in BASE.to_json()
    assert "source_bytes" not in BASE.to_json()
    assert Contract.from_json(json.dumps({**raw(), "codec": "none"})).to_json() == BASE.to_json()


@cases(("codec", "page_bytes"), [("fp8", 32768 + 1024), ("int4", 16384 + 1024 + 1024)])
def test_a_codec_makes_blocks_smaller_and_another_namespace(codec: str, page_bytes: int) -> None:
    made = BASE.with_codec(codec)
    assert [group.page_bytes for group in made.groups] == [page_bytes, page_bytes, 4096]
    assert [group.engine_bytes for group in made.groups] == [65536, 65536, 4096]
    assert Contract.from_json(made.to_json()) == made
    assert namespace_digest("t", made) != namespace_digest("t", BASE)
    assert made.with_codec("none") == BASE
    assert made.with_codec("int4") == BASE.with_codec("int4")
    assert (made.encoding(2), BASE.encoding(0)) == (None, None)


def test_blocks_that_a_codec_cannot_encode_are_refused() -> None:
    for contract, codec in [
        (dataclasses.replace(BASE, kv_dtype="fp8_e4m3"), "fp8"),
        (dataclasses.replace(BASE, groups=(dataclasses.replace(FULL, page_bytes=65540),)), "int4"),
        (dataclasses.replace(BASE, groups=(MAMBA,)), "fp8"),
        (BASE, "int5"),
    ]:
        with pytest.raises(KVHearthError) as caught:
            contract.with_codec(codec)
        assert (caught.value.reason, caught.value.details["field"]) == (
            Reason.BAD_CONTRACT,
            "codec",
        )


def test_sizes_that_are_not_the_codecs_are_refused() -> None:
    encoded = json.loads(BASE.with_codec("fp8").to_json())
    first = encoded["groups"][0]
    assert refused_field(codec="int5") == "codec"
    assert refused_field(codec="fp8") == "groups[0].source_bytes"
    assert refused_group(0, source_bytes=65536) == "groups[0].source_bytes"
    for field, value in [
        ("page_bytes", first["page_bytes"] + 16),
        ("source_bytes", first["source_bytes"] + 2),
        ("source_bytes", first["source_bytes"] * 4),
        ("source_bytes", -64),
        ("source_bytes", 1 << 40),
    ]:
        groups = [{**first, field: value}, *encoded["groups"][1:]]
        assert refusal(json.dumps({**encoded, "groups": groups})).startswith("groups[0].")


def test_omitted_fields_have_their_defaults() -> None:
    values = raw()
    for name in ("layout", "quantization", "hash_bytes", "version"):
        del values[name]
    assert Contract.from_json(json.dumps(values)) == BASE


# -- rejections ------------------------------------------------------------------------------------


@cases("text", ["", "{", "null", "[]", "1", '"x"', "[" * 100_000, "NaN", "1" * 5000, "\ud800"])
def test_a_text_that_is_no_contract(text: str) -> None:
    assert refusal(text) == ""


def test_a_text_that_is_too_long() -> None:
    assert refusal(json.dumps({**raw(), "model": "x" * CONTRACT_JSON_BYTES_MAX})) == ""


REFUSED: dict[str, list[object]] = {
    "model": [None, 1, ["x"], "", "x" * 1025],
    "revision": [None, True, ""],
    "kv_dtype": [None, "float17", ""],
    "groups": [None, "x", {}, [], [raw()["groups"][2]] * 17],
    "tensor_parallel": ["2", 2.0, True, 0, 257],
    "pipeline_parallel": [-1],
    "decode_context_parallel": [1 << 70],
    "hash_bytes": [[32], 15, 65],
    "hash_seed": ["x" * 1025, "\ud800"],
    "version": ["1", 2],
    "draft_model": ["a\nb"],
    "layout": ["\x1b[31m"],
    "flavour": ["x"],
}
"""Values of fields that are refused; None removes the field."""
REFUSED_OF_A_GROUP: dict[str, list[object]] = {
    "kind": [None, "half", 1],
    "block_tokens": [None, 0, (1 << 20) + 1],
    "page_bytes": [None, 0, (1 << 30) + 1],
    "layers": [0, 4097],
    "shards": [0, 3],
    "token_bytes": [-2, 513],
    "window_tokens": [1, -1],
    "flavour": ["x"],
}


@cases("name", REFUSED)
def test_a_field_is_refused_by_its_name(name: str) -> None:
    fields = [refused_field(**{name: value}) for value in REFUSED[name]]
    assert fields == [name] * len(fields)


@cases("name", REFUSED_OF_A_GROUP)
def test_a_groups_field_is_refused_by_its_name(name: str) -> None:
    fields = [refused_group(0, **{name: value}) for value in REFUSED_OF_A_GROUP[name]]
    assert fields == [f"groups[0].{name}"] * len(fields)


def test_a_long_name_of_an_unknown_field_is_cut() -> None:
    assert len(refused_field(**{"x" * 5000: 1})) == 1024


def test_too_many_ranks_together() -> None:
    assert refused_field(tensor_parallel=128, pipeline_parallel=4) == "tensor_parallel"


@cases("tokens", [0, -5, 1 << 70])
def test_a_window_must_be_one(tokens: int) -> None:
    assert refused_group(1, window_tokens=tokens) == "groups[1].window_tokens"


@cases(
    "lie",
    [
        {"page_bytes": 65535},
        {"page_bytes": 2 * 65536 + 1},
        {"layers": 9},
        {"layers": 3},
        {"block_tokens": 17},
        {"token_bytes": 514},
        {"token_bytes": 100},
    ],
)
def test_sizes_that_contradict_each_other(lie: dict[str, int]) -> None:
    """A page holds all its tokens and layers, and is less than twice their size."""
    assert refused_group(0, **lie) == "groups[0].page_bytes"


def test_padding_up_to_twice_the_content_is_no_lie() -> None:
    values = raw()
    values["groups"][0]["page_bytes"] = 2 * 65536
    assert Contract.from_json(json.dumps(values)).groups[0].page_bytes == 2 * 65536


def test_elements_are_whole() -> None:
    assert refused_field(kv_dtype="float32", groups=[{**raw()["groups"][0], "token_bytes": 510}])


def test_the_arguments_of_an_engine_are_checked_alike() -> None:
    with pytest.raises(KVHearthError, match="shards"):
        dataclasses.replace(BASE, tensor_parallel=1)
    with pytest.raises(KVHearthError, match="revision"):
        dataclasses.replace(BASE, revision="")


# -- differences -----------------------------------------------------------------------------------


def test_differences_name_each_field_with_both_values() -> None:
    other = dataclasses.replace(
        BASE,
        kv_dtype="float16",
        hash_seed="7",
        groups=(FULL, dataclasses.replace(WINDOW, window_tokens=2048)),
    )
    found = differences(other, BASE)
    assert [name for name, _, _ in found] == sorted(name for name, _, _ in found)
    by_name = {name: (asked, stored) for name, asked, stored in found}
    assert by_name["kv_dtype"] == ("float16", "bfloat16")
    assert by_name["hash_seed"] == ("7", "")
    assert by_name["groups[1].window_tokens"] == ("2048", "1024")
    assert by_name["groups[2].kind"] == ("absent", "mamba")
    assert not any(name.startswith("groups[0]") for name in by_name)
    assert differences(BASE, BASE) == []


def test_the_longest_world_and_its_size() -> None:
    assert dataclasses.replace(BASE, tensor_parallel=8, pipeline_parallel=4).world_size == 32
