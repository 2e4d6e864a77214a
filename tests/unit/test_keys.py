"""Keys: splitting and joining blobs, chains over tokens, and extra content in the hash."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import no_deadline, refused

from kvhearth.errors import Reason
from kvhearth.keys import chain_keys, fold_key
from kvhearth.model import PackedKeys, split_keys

widths = st.integers(16, 64)
TOKENS = list(range(100, 164))


@no_deadline
@given(data=st.data(), width=widths)
def test_a_blob_is_its_keys_in_order(data: st.DataObject, width: int) -> None:
    keys = data.draw(st.lists(st.binary(min_size=width, max_size=width), max_size=200))
    blob = b"".join(keys)
    assert split_keys(blob, width) == keys
    assert all(type(key) is bytes for key in split_keys(blob, width))
    packed = PackedKeys(blob, width)
    assert (len(packed), list(packed), packed[:], packed[1:3]) == (len(keys), keys, keys, keys[1:3])
    assert [packed[at] for at in range(-len(keys), len(keys))] == keys + keys
    for outside in (len(keys), -len(keys) - 1):
        with pytest.raises(IndexError):
            packed[outside]


def test_no_keys() -> None:
    assert split_keys(b"", 32) == []


@pytest.mark.parametrize("excess", [1, 15, 31])
def test_a_blob_that_is_not_whole_keys(excess: int) -> None:
    with refused(Reason.BAD_KEYS):
        split_keys(b"x" * (64 + excess), 32)
    with refused(Reason.BAD_KEYS):
        PackedKeys(b"x" * (64 + excess), 32)


def test_zero_bytes_at_either_end_are_part_of_a_key() -> None:
    keys = [b"\0" * 16, b"\0" * 15 + b"a", b"a" + b"\0" * 15]
    assert split_keys(b"".join(keys), 16) == keys


def test_a_key_for_each_full_block() -> None:
    assert len(chain_keys(TOKENS, 16)) == 4
    assert len(chain_keys(TOKENS[:-1], 16)) == 3
    assert chain_keys(TOKENS[:15], 16) == []
    assert chain_keys([], 16) == []
    assert {len(key) for key in chain_keys(TOKENS, 16)} == {32}


def test_a_key_stands_for_all_tokens_before_it() -> None:
    base = chain_keys(TOKENS, 16)
    assert chain_keys([*TOKENS, 1, 2], 16) == base
    for position in range(len(TOKENS)):
        changed = [*TOKENS]
        changed[position] += 1
        other = chain_keys(changed, 16)
        same = [one == two for one, two in zip(base, other, strict=True)]
        assert same == [block < position // 16 for block in range(4)]


def test_the_same_block_elsewhere_has_another_key() -> None:
    keys = chain_keys([7] * 64, 16)
    assert len(set(keys)) == 4


def test_block_sizes_seeds_and_extras_give_keys_of_their_own() -> None:
    variants = [
        chain_keys(TOKENS, 16),
        chain_keys(TOKENS, 32),
        chain_keys(TOKENS, 16, seed="1"),
        chain_keys(TOKENS, 16, extra=[b"adapter"]),
        chain_keys(TOKENS, 16, extra=[b"adapter", b"salt"]),
        chain_keys(TOKENS, 16, extra=[b"salt", b"adapter"]),
        chain_keys(TOKENS, 16, extra=[b"adaptersalt"]),
        chain_keys(TOKENS, 16, extra=[b""]),
        chain_keys(TOKENS, 16, seed="adapter"),
    ]
    every = [key for keys in variants for key in keys]
    assert len(set(every)) == len(every)


def test_an_adapters_content_counts_and_not_its_name() -> None:
    """Two adapters with one name, or one that was trained further: other content, other keys."""
    first, second = (hashlib.sha256(weights).digest() for weights in (b"one", b"two"))
    assert chain_keys(TOKENS, 16, extra=[first]) == chain_keys(TOKENS, 16, extra=[first])
    pairs = zip(
        chain_keys(TOKENS, 16, extra=[first]), chain_keys(TOKENS, 16, extra=[second]), strict=True
    )
    assert all(one != two for one, two in pairs)


@no_deadline
@given(width=widths, data=st.data())
def test_folding_keeps_the_length_and_depends_on_both(width: int, data: st.DataObject) -> None:
    key, other = (data.draw(st.binary(min_size=width, max_size=width)) for _ in range(2))
    content, change = data.draw(st.binary(max_size=40)), data.draw(st.binary(min_size=1))
    folded = fold_key(key, content)
    assert len(folded) == width
    assert folded != fold_key(key, content + change)
    assert (folded == fold_key(other, content)) == (key == other)
    assert folded != key


def test_a_byte_does_not_move_between_key_and_content() -> None:
    assert fold_key(b"a" * 16, b"a" + b"b" * 9)[:16] != fold_key(b"a" * 17, b"b" * 9)[:16]


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_a_token_that_is_none_is_not_wrapped(token: int) -> None:
    with pytest.raises(OverflowError):
        chain_keys([*TOKENS[:15], token], 16)
