"""The index against a dict, with keys that collide and tables that grow and empty."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvhearth.model import PackedKeys
from kvhearth_server.core.hash_table import Buckets, hash_one, hash_words, multipliers
from kvhearth_server.core.index import Index
from kvhearth_server.core.slot_table import numbers

SLOTS = 1 << 14


def key(number: int, size: int = 32) -> bytes:
    return number.to_bytes(size, "little")


def heads_of(index: Index, keys: list[bytes], space: tuple[int, int] = (1, 0)) -> list[int]:
    return index.find(*space, keys).tolist()


def test_what_is_not_bound_is_refused() -> None:
    index = Index(SLOTS)
    index.bind(1, 0, [key(1)], np.array([8]))
    with pytest.raises(ValueError, match="bound to no key"):
        index.key(9)
    with pytest.raises(ValueError, match="bound to no key"):
        index.unbind(1, 0, np.array([8, 9]))
    with pytest.raises(ValueError, match="different lengths"):
        index.find(1, 0, [key(1), *[key(1, 20)] * 9])
    with pytest.raises(ValueError, match="20 bytes among keys of 32"):
        index.bind(1, 0, [key(3, 20)], np.array([10]))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 7), st.sampled_from([1, 3, 64, 5000]))
def test_the_index_is_a_dict(seed: int, rounds: int, spread: int) -> None:
    """Draws hashes of ``spread`` distinct values; where it is small, most of them collide."""
    chance = random.Random(seed)
    table, rows = Buckets(SLOTS), np.zeros(SLOTS, np.int64)
    model: dict[int, int] = {}
    free = list(range(SLOTS))
    chance.shuffle(free)

    def hashes(numbers: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.array([(n % spread * 0x2468ACE & 0xFFFFFFFF) | 1 for n in numbers], np.uint64)

    for _ in range(rounds):
        fresh = [n for n in chance.sample(range(3000), chance.choice([1, 2, 90])) if n not in model]
        heads = np.array([free.pop() for _ in fresh], np.int64)
        if fresh:
            rows[heads] = fresh
            table.add(hashes(fresh), heads)
            model.update(zip(fresh, heads.tolist(), strict=True))
        gone = chance.sample(sorted(model), min(len(model), chance.choice([0, 1, 60])))
        heads = np.array([model.pop(n) for n in gone], np.int64)
        table.remove(hashes(gone), heads)
        free += heads.tolist()
        table.check()
        asked = np.array(chance.choices(range(3000), k=200), np.int64)
        found = table.find(
            hashes(asked.tolist()), lambda some, at, asked=asked: rows[at] == asked[some]
        )
        assert found.tolist() == [model.get(n, -1) for n in asked.tolist()]
        assert sorted(table.heads().tolist()) == sorted(model.values())
    assert len(table) == len(model)


@settings(deadline=None)
@given(st.data())
def test_chains_are_found_as_they_lie(data: st.DataObject) -> None:
    """Looks up keys in any order, of chains laid out at random: the result is as without chains."""
    after = np.zeros(SLOTS, np.uint32)
    index, plain = Index(SLOTS, 5, after), Index(SLOTS, 5)
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    chains, slot, number = [], 0, 0
    for length in data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=6)):
        step = data.draw(st.sampled_from([1, 1, 1, 3]))
        slot += chance.randrange(1, 50)
        slots = [slot + step * place for place in range(length)]
        for _ in range(data.draw(st.integers(0, 3))):
            # A block that lies elsewhere ends the run.
            slots[chance.randrange(length)] = SLOTS - 1 - number
            number += 1
        slot += step * length
        keys = [key(chance.getrandbits(200)) for _ in range(length)]
        heads, space = np.array(slots, np.int64), (1, data.draw(st.sampled_from([0, 0, 1])))
        index.bind(*space, keys, heads)
        plain.bind(*space, keys, heads)
        after[heads[:-1]] = heads[1:] + 1
        chains.append(keys)
    every = [each for chain in chains for each in chain]
    for _ in range(8):
        chain = chance.choice(chains)
        start = chance.randrange(len(chain))
        asked = chain[start : start + chance.randrange(1, 400)]
        asked += chance.sample(every, min(len(every), chance.choice([0, 0, 7])))
        if chance.random() < 0.5:
            asked[chance.randrange(len(asked))] = key(1)
        packed = PackedKeys(b"".join(asked), 32)
        for space in ((1, 0), (1, 1)):
            expected = heads_of(plain, asked, space)
            assert heads_of(index, asked, space) == expected
            assert index.find(*space, packed).tolist() == expected
            for some in (asked, packed):
                rows = index.find_rows(*space, some)
                if rows is None:
                    assert expected[0] < 0 or expected[-1] < 0
                else:
                    assert numbers(rows).tolist() == expected


@pytest.mark.parametrize("size", [16, 20, 32])
def test_keys_that_stand_side_by_side_are_a_slice(size: int) -> None:
    index = Index(64)
    keys = [key(number, size) for number in range(60)]
    index.bind(1, 0, keys, np.arange(60) + 4)
    for some in (keys[7:20], PackedKeys(b"".join(keys[7:20]), size)):
        assert index.find_rows(1, 0, some) == slice(11, 24)
    assert index.find_rows(1, 0, keys[5:6]) == slice(9, 10)
    backwards = index.find_rows(1, 0, keys[20:7:-1])
    assert isinstance(backwards, np.ndarray)
    assert backwards.tolist() == list(range(24, 11, -1))
    # Some keys are missing; the table ends before the keys do.
    for some in ([key(99, size), keys[1]], [keys[1], key(99, size)], [*keys[50:], key(60, size)]):
        assert index.find_rows(1, 0, some) is None
    hole = index.find_rows(1, 0, [keys[1], key(99, size), keys[3]])
    assert isinstance(hole, np.ndarray)
    assert hole.tolist() == [5, -1, 7]
    assert index.find_rows(2, 0, keys) is index.find_rows(1, 0, [key(1, size - 1)]) is None
    # A slot keeps its last block's key: the caller checks whose block it is now.
    index.unbind(1, 0, np.array([12]))
    assert index.find_rows(1, 0, keys[7:20]) == slice(11, 24)
    assert heads_of(index, keys[7:9]) == [11, -1]


def test_one_key_is_bound_once() -> None:
    index = Index(SLOTS)
    assert index.bind_new(1, 0, key(1, 20), 5)
    assert not index.bind_new(1, 0, key(1, 20), 6)
    assert index.bind_new(1, 1, key(1, 20), 6)
    assert index.find_one(1, 0, key(1, 20)) == 5
    assert index.find_one(1, 1, key(1, 20)) == 6
    assert index.find_one(1, 0, key(2, 20)) == index.find_one(1, 0, key(1)) == -1
    assert index.find_one(2, 0, key(1, 20)) == -1
    index.check()
    with pytest.raises(ValueError, match="32 bytes among keys of 20"):
        index.bind_new(1, 0, key(3), 7)
    assert index.key(5) == key(1, 20)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from([1, 3, 20, 300]), max_size=60))
@example(3, [300] * 12)
def test_a_growth_is_spread_over_calls(seed: int, batches: list[int]) -> None:
    """Lookups, removals and the check are right during a growth, and no call moves many entries."""
    chance, index = random.Random(seed), Index(SLOTS, seed)
    bound: dict[bytes, int] = {}
    free = iter(range(SLOTS))
    for count in batches:
        fresh = [key(chance.getrandbits(200)) for _ in range(count)]
        heads, moved = [next(free) for _ in fresh], index.moved
        if count == 1:
            assert index.bind_new(1, 0, fresh[0], heads[0])
        else:
            index.bind(1, 0, fresh, np.array(heads))
        bound.update(zip(fresh, heads, strict=True))
        assert index.moved - moved <= 16 * (count + 64)
        if count > 3:
            gone = chance.sample(sorted(bound), chance.randrange(1, count))
            index.unbind(1, 0, np.array([bound.pop(each) for each in gone]))
            assert set(heads_of(index, gone)) == {-1}
        assert heads_of(index, list(bound)) == list(bound.values())
        index.check()
    assert index.moved > 0 or sum(batches) < 1000


def test_no_call_stands_still_while_the_index_grows() -> None:
    """Each doubling in one piece took 0.5 s at a million keys; a call moves some more keys than it
    binds, however many there are.
    """
    batch, most = 128, 0
    index, chance = Index(1 << 17, 3), np.random.default_rng(3)
    for start in range(0, 70_000, batch):
        keys, heads = PackedKeys(chance.bytes(32 * batch), 32), np.arange(start, start + batch)
        before = index.moved
        index.bind(1, 0, keys, heads)
        most = max(most, index.moved - before)
    assert 0 < most < 4 * batch
    assert index.moved > 30_000


def test_the_check_sees_what_is_wrong() -> None:
    index = Index(SLOTS)
    index.bind(1, 0, [key(n) for n in range(100)], np.arange(100))
    index._rows[4][17] += np.uint64(1)
    with pytest.raises(ValueError, match="not found"):
        index.check()
    index._rows[4][17] -= np.uint64(1)
    index.check()
    index._space[200] = 1
    with pytest.raises(ValueError, match="100 slots in the index, 101 with a key"):
        index.check()


def test_hashes_depend_on_every_byte_and_on_the_seed() -> None:
    base = np.zeros((1, 4), np.uint64)
    plain = hash_words(base, multipliers(0))
    for byte in range(32):
        changed = base.copy()
        changed.view(np.uint8)[0, byte] = 1
        assert hash_words(changed, multipliers(0)) != plain
    numbers = np.arange(4000, dtype=np.uint64).reshape(1000, 4)
    one, other = (hash_words(numbers, multipliers(seed)) for seed in (1, 2))
    assert (one != other).mean() > 0.99
    assert len(np.unique(one)) > 990


@given(st.binary(min_size=16, max_size=64), st.integers(0, 2**64 - 1))
def test_one_key_has_the_hash_that_it_has_among_many(key: bytes, seed: int) -> None:
    padded = key.ljust(-(-len(key) // 8) * 8, b"\0")
    by = multipliers(seed)
    words = np.frombuffer(padded * 3, np.uint64).reshape(3, -1)
    assert hash_words(words, by).tolist() == [hash_one(padded, by.tolist())] * 3


def test_bytes_that_look_like_a_hash_are_none() -> None:
    """A slot's number, or two adjacent halves, may have the bytes that a search looks for."""
    table = Buckets(64)
    table.add_one(0x0200_0001, 6)
    for value in (7, 0x0001_0000, 0x0000_0007, 0x0200_0001 >> 8, 0x0007_0000 | 1):
        assert table.like(value) == []
    assert table.like(0x0200_0001) == [6]
