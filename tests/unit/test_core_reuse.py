"""Sampled reuse distances against an exact LRU cache on the same trace."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import pytest
from support.native import without_native

from kvhearth import native
from kvhearth_server.core.reuse import CHUNK, Kind, ReuseSampler, chunks

BLOCK = 64 << 10
ERROR_MAX = 0.03
"""Largest difference of a sampled hit ratio, at 2,048 of some 12,000 keys, for capacities of a
sixteenth of all keys and more.
"""
SMALL_ERROR_MAX = 0.12
"""The same for smaller capacities, which a few dozen sampled keys stand for."""
Trace = list[tuple[bool, list[bytes]]]
"""Lookups (True) and stores of chains."""


def conversations(turns: int, seed: int) -> Trace:
    """Turns of conversations over ten system prompts: some popular, many seldom continued."""
    rng = np.random.default_rng(seed)
    chains: dict[int, list[bytes]] = {}
    trace: Trace = []
    for popular in rng.zipf(1.3, turns).tolist():
        number = min(popular, 100_000) if rng.random() < 0.7 else int(rng.integers(0, 1500)) + 10**6
        chain = chains.setdefault(number, [_key(f"system {number % 10}", at) for at in range(8)])
        trace.append((True, list(chain)))
        if len(chain) < 100:
            new = [_key(f"{number}", at) for at in range(len(chain), len(chain) + 6)]
            chain += new
            trace.append((False, new))
    return trace


def _key(name: str, at: int) -> bytes:
    return hashlib.sha256(f"{name}/{at}".encode()).digest()


def exact(trace: Trace, blocks_max: int) -> float:
    """The hit ratio of an LRU cache, a chain's root used after its leaf."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    hits = asked = 0
    for looked_up, chain in trace:
        for key in reversed(chain):
            hits += looked_up and key in cache
            asked += looked_up
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > blocks_max:
                cache.popitem(last=False)
    return hits / asked


def feed(sampler: ReuseSampler, trace: Trace, *, space: int = 1, row: int = 0) -> None:
    """Pass a trace to a sampler, some calls at a time."""
    for at in range(0, len(trace), 32):
        uses = [
            (Kind(space, row if looked_up else -1, BLOCK), b"".join(chain))
            for looked_up, chain in trace[at : at + 32]
        ]
        for some in chunks([sampler.sample(uses, len(trace[at][1][0]))]):
            sampler.add(some)


TRACE = conversations(4000, 1)
KEYS = len({key for _, chain in TRACE for key in chain})
SIZES = [KEYS * part // 64 for part in (1, 2, 4, 8, 16, 32, 48, 64)]


@pytest.fixture(scope="module")
def truth() -> list[float]:
    return [exact(TRACE, size) for size in SIZES]


def test_without_sampling_the_distances_are_exact(truth: list[float]) -> None:
    sampler = ReuseSampler(1 << 20, 1)
    feed(sampler, TRACE)
    assert sampler.rate == 1
    assert len(sampler) == KEYS
    # The rest is the width of the buckets.
    found = sampler.hit_ratios(0, [size * BLOCK for size in SIZES])
    assert np.abs(found - truth).max() < 0.005


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_of_bounded_size_is_near_the_exact_curve(seed: int, truth: list[float]) -> None:
    sampler = ReuseSampler(2048, 1, seed=seed)
    feed(sampler, TRACE)
    assert len(sampler) <= 2048
    assert sampler.rate < 0.3
    found = sampler.hit_ratios(0, [size * BLOCK for size in SIZES])
    error = np.abs(found - truth)
    assert error[2:].max() < ERROR_MAX
    assert error[:2].max() < SMALL_ERROR_MAX
    assert (np.diff(found) >= 0).all()


def test_namespaces_share_the_memory_and_have_hit_ratios_of_their_own() -> None:
    loop = [_key("loop", at) for at in range(400)]
    sampler = ReuseSampler(1 << 16, 2)
    for _ in range(20):
        feed(sampler, [(True, loop[:100])], space=1, row=0)
        feed(sampler, [(True, loop[:300])], space=2, row=1)
    sizes = [50 * BLOCK, 350 * BLOCK, 420 * BLOCK]
    # Either loop comes round again after all 400 blocks of both.
    np.testing.assert_allclose(sampler.hit_ratios(0, sizes), [0, 0, 0.95], atol=0.001)
    np.testing.assert_allclose(sampler.hit_ratios(1, sizes), [0, 0, 0.95], atol=0.001)
    np.testing.assert_allclose(sampler.hit_ratios([0, 1], sizes), [0, 0, 0.95], atol=0.001)
    assert sampler.asked.tolist() == [2000, 6000]


def test_stores_move_blocks_to_the_front_and_count_in_no_ratio() -> None:
    sampler = ReuseSampler(1 << 16, 1)
    chains = [[_key(f"c{number}", at) for at in range(10)] for number in range(50)]
    for chain in chains:
        feed(sampler, [(False, chain)])
    assert sampler.hit_ratios(0, [1 << 40]).tolist() == [0]
    feed(sampler, [(True, chain) for chain in chains])
    assert sampler.asked.tolist() == [500]
    assert sampler.hit_ratios(0, [450 * BLOCK, 550 * BLOCK]).tolist() == [0, 1]


def test_blocks_count_by_their_bytes() -> None:
    sampler = ReuseSampler(1 << 16, 1)
    small, large = [_key("small", 0)], [_key("large", 0)]
    for _ in range(100):
        for chain, size in ((small, 1 << 20), (large, 3 << 20)):
            sampler.add(sampler.sample([(Kind(1, 0, size), b"".join(chain))], 32))
    ratios = sampler.hit_ratios(0, [3 << 20, 5 << 20])
    np.testing.assert_allclose(ratios, [0, 0.99])


@pytest.mark.parametrize("width", [16, 20, 33, 64])
def test_keys_of_any_width_are_told_apart(width: int) -> None:
    keys = [hashlib.shake_256(bytes([n % 256, n // 256])).digest(width) for n in range(1000)]
    sampler = ReuseSampler(1 << 16, 1)
    feed(sampler, [(True, keys), (True, keys)])
    assert len(sampler) == 1000
    np.testing.assert_allclose(sampler.hit_ratios(0, [900 * BLOCK, 1100 * BLOCK]), [0, 0.5])


def test_keys_that_count_upwards_are_sampled_evenly() -> None:
    sampler = ReuseSampler(1024, 1)
    for start in range(0, 100_000, 1000):
        keys = [number.to_bytes(32, "big") for number in range(start, start + 1000)]
        feed(sampler, [(True, keys)])
    assert 0.7 < len(sampler) / (sampler.rate * 100_000) < 1.3


def test_old_keys_beyond_the_largest_capacity_of_interest_are_dropped() -> None:
    sampler = ReuseSampler(4096, 1, limit_bytes=500 * BLOCK)
    for start in range(0, 50_000, 500):
        feed(sampler, [(True, [_key("once", at) for at in range(start, start + 500)])])
    assert sampler.rate == 1
    assert len(sampler) <= 4096


def test_older_lookups_fade() -> None:
    sampler = ReuseSampler(1 << 16, 1)
    hot = [_key("hot", at) for at in range(100)]
    feed(sampler, [(True, hot)] * 20)
    before = sampler.hit_ratios(0, [1 << 40]).item()
    sampler.decay(1 / 64)
    feed(sampler, [(True, [_key("new", at) for at in range(100)])] * 1)
    after = sampler.hit_ratios(0, [1 << 40]).item()
    assert before == pytest.approx(0.95)
    assert after < 0.3
    sampler.clear(0)
    assert sampler.hit_ratios(0, [1 << 40]).tolist() == [0]


def test_a_lower_rate_drops_what_was_sampled_before_it() -> None:
    sampler = ReuseSampler(1 << 16, 1)
    keys = b"".join(_key("a", at) for at in range(2000))
    portions = [*chunks([sampler.sample([(Kind(1, 0, BLOCK), keys)], 32)])]
    assert len(portions) == -(-2000 // CHUNK)
    for some in portions[:4]:
        sampler.add(some)
    sampler.lower_rate(100)
    for some in portions[4:]:
        sampler.add(some)
    assert len(sampler) < 250


@pytest.mark.skipif(bool(native.available()), reason=str(native.available()))
@pytest.mark.parametrize("key_bytes", [8, 16, 20, 32, 33])
@pytest.mark.parametrize("rate", [1.0, 0.3, 0.001])
def test_the_native_module_samples_what_numpy_does(key_bytes: int, rate: float) -> None:
    rng = np.random.default_rng(key_bytes)
    counts = [1, 7, 8, 9, 64, 5000]
    uses = [(Kind(at, at % 2, BLOCK), rng.bytes(key_bytes * n)) for at, n in enumerate(counts)]
    with without_native():
        plain = ReuseSampler(1 << 20, 2, seed=3)
    quick = ReuseSampler(1 << 20, 2, seed=3)
    for sampler in (plain, quick):
        sampler.sample(uses, key_bytes)
        for some in chunks([sampler.sample(uses, key_bytes)]):
            sampler.add(some)
        sampler.lower_rate(max(1, int(rate * sum(counts)) - 1))
    expected, owners = plain.sample_owned(uses, key_bytes)
    found, found_owners = quick.sample_owned(uses, key_bytes)
    assert len(expected)
    assert owners.tolist() == found_owners.tolist()
    assert expected.hashes.tolist() == found.hashes.tolist()
    assert expected.names.tolist() == found.names.tolist()
    assert expected.rows.tolist() == found.rows.tolist()
    assert plain.asked.tolist() == quick.asked.tolist()
