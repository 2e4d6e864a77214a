"""Sampled reuse times against an exact LRU cache on the same lookups and stores."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest

from kvhearth_server.core.reuse import NAMED_MAX, TRACKED_MAX, Kind, ReuseTimes

BLOCK = 64 << 10
ERROR_MAX, SMALL_ERROR_MAX = 0.03, 0.12
"""Largest differences of a hit ratio at about 4,000 tracked keys of 14,000: for capacities of a
sixteenth of all keys and more, and for smaller ones, which a few dozen keys stand for.
"""
Step = tuple[bool, list[bytes]]
"""A lookup (True) or a store of a chain."""


def conversations(turns: int, seed: int) -> list[Step]:
    """Turns of conversations over ten system prompts: some popular, many seldom continued."""
    rng = np.random.default_rng(seed)
    chains: dict[int, list[bytes]] = {}
    steps: list[Step] = []
    for popular in rng.zipf(1.3, turns).tolist():
        number = min(popular, 100_000) if rng.random() < 0.7 else int(rng.integers(0, 1500)) + 10**6
        chain = chains.setdefault(number, [_key(f"system {number % 10}", at) for at in range(8)])
        steps.append((True, list(chain)))
        if len(chain) < 100:
            new = [_key(f"{number}", at) for at in range(len(chain), len(chain) + 6)]
            chain += new
            steps.append((False, new))
    return steps


def _key(name: str, at: int) -> bytes:
    return hashlib.sha256(f"{name}/{at}".encode()).digest()


def exact(steps: Sequence[Step], blocks_max: int) -> float:
    """The hit ratio of an LRU cache, a chain's root used after its leaf."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    hits = asked = 0
    for looked_up, chain in steps:
        for key in reversed(chain):
            hits += looked_up and key in cache
            asked += looked_up
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > blocks_max:
                cache.popitem(last=False)
    return hits / asked


def feed(
    times: ReuseTimes,
    steps: Sequence[Step],
    row: str = "a",
    *,
    space: int = 1,
    size: int = BLOCK,
    at: float = 0.0,
    limit: int = 1 << 60,
) -> None:
    """Pass steps on, some at a time."""
    for start in range(0, len(steps), 32):
        uses = [
            (at, Kind(space, row if looked_up else "", size, len(chain[0])), b"".join(chain))
            for looked_up, chain in steps[start : start + 32]
        ]
        times.add(uses, at, lambda: limit)


def ratios(times: ReuseTimes, sizes: Sequence[int], row: str = "a") -> list[float]:
    return times.hit_ratios(times.rows[row], sizes)


def test_hit_ratios_are_near_those_of_an_exact_cache() -> None:
    steps = conversations(4000, 1)
    blocks = len({key for _, chain in steps for key in chain})
    sizes = [blocks * part // 64 for part in (1, 2, 4, 8, 16, 32, 48, 64)]
    truth = [exact(steps, size) for size in sizes]
    times = ReuseTimes()
    feed(times, steps)
    assert TRACKED_MAX // 4 < len(times) <= TRACKED_MAX < blocks
    assert times.rate <= 0.5
    found = ratios(times, [size * BLOCK for size in sizes])
    errors = np.abs(np.array(found) - truth)
    assert errors[2:].max() < ERROR_MAX
    assert errors[:2].max() < SMALL_ERROR_MAX
    assert found == sorted(found)


def test_namespaces_share_the_memory_and_have_hit_ratios_of_their_own() -> None:
    loop = [_key("loop", at) for at in range(400)]
    times = ReuseTimes()
    for _ in range(20):
        feed(times, [(True, loop[:100])], "a", space=1)
        feed(times, [(True, loop[:300])], "b", space=2)
    # Either loop comes round again after all 400 blocks of both.
    for row in "ab":
        found = ratios(times, [50 * BLOCK, 350 * BLOCK, 440 * BLOCK], row)
        np.testing.assert_allclose(found, [0, 0, 0.95], atol=0.001)
    assert [times.rows[row][0] for row in "ab"] == [2000, 6000]


def test_namespaces_beyond_the_named_ones_share_a_row() -> None:
    times = ReuseTimes()
    for number in range(NAMED_MAX + 3):
        feed(times, [(True, [_key("a", 0)])], f"n{number}", space=number)
    assert len(times.rows) == NAMED_MAX + 1
    assert times.rows["other"][0] == 3


def test_stores_are_uses_and_count_in_no_ratio() -> None:
    times = ReuseTimes()
    chains = [[_key(f"c{number}", at) for at in range(10)] for number in range(50)]
    feed(times, [(False, chain) for chain in chains])
    assert not times.rows
    feed(times, [(True, chain) for chain in chains])
    assert times.rows["a"][0] == 500
    np.testing.assert_allclose(ratios(times, [450 * BLOCK, 550 * BLOCK]), [0, 1])


def test_blocks_count_by_their_bytes() -> None:
    times = ReuseTimes()
    for _ in range(100):
        feed(times, [(True, [_key("small", 0)])], size=1 << 20)
        feed(times, [(True, [_key("large", 0)])], size=3 << 20)
    np.testing.assert_allclose(ratios(times, [3 << 20, 5 << 20]), [0, 0.99])


def test_keys_of_any_width_are_told_apart() -> None:
    for width in (8, 16, 20, 33, 64):
        keys = [hashlib.shake_256(bytes([n % 256, n // 256])).digest(width) for n in range(1000)]
        times = ReuseTimes()
        feed(times, [(True, keys), (True, keys)])
        assert len(times) == 1000
        np.testing.assert_allclose(ratios(times, [900 * BLOCK, 1100 * BLOCK]), [0, 0.5])


def test_keys_that_count_upwards_are_sampled_evenly() -> None:
    times = ReuseTimes()
    for start in range(0, 100_000, 1000):
        feed(times, [(True, [n.to_bytes(32, "big") for n in range(start, start + 1000)])])
    assert 0.7 < len(times) / (times.rate * 100_000) < 1.3


def test_a_use_of_no_key_is_none() -> None:
    times, one = ReuseTimes(), Kind(1, "a", BLOCK, 32)
    times.add([(0.0, one, b"")], 0.0, lambda: 1 << 60)
    assert (len(times), times.rows) == (0, {})
    times.add([(0.0, one, b""), (0.0, one, _key("b", 0))], 0.0, lambda: 1 << 60)
    assert (len(times), times.rows["a"][0]) == (1, 1)


def test_a_large_batch_is_sampled_less() -> None:
    times, keys = ReuseTimes(), [_key("a", at) for at in range(20_000)]
    feed(times, [(True, keys)])
    assert 0 < len(times) <= 2048
    assert times.rows["a"][0] == 20_000
    # The counts stand for all keys.
    assert times.rows["a"][1:].sum() == pytest.approx(20_000, rel=0.1)


def test_old_keys_beyond_the_largest_capacity_of_interest_are_dropped() -> None:
    times = ReuseTimes()
    for start in range(0, 50_000, 500):
        chain = [_key("once", at) for at in range(start, start + 500)]
        feed(times, [(True, chain)], limit=500 * BLOCK)
    assert times.rate == 1
    assert len(times) <= TRACKED_MAX


def test_older_lookups_fade_and_the_sample_grows_again() -> None:
    times, hot = ReuseTimes(), [_key("hot", at) for at in range(100)]
    feed(times, [(True, [_key("many", at) for at in range(20_000)])], "gone")
    rate = times.rate
    feed(times, [(True, hot)] * 20)
    assert ratios(times, [1 << 40])[0] == pytest.approx(0.95, abs=0.05)
    feed(times, [(True, [_key("new", at) for at in range(100)])], at=6 * 3600.0)
    assert ratios(times, [1 << 40])[0] < 0.3
    assert times.rate == 2 * rate
    feed(times, [(True, hot)], at=24 * 3600.0)
    feed(times, [(True, hot)], at=25 * 3600.0)
    assert list(times.rows) == ["a"]
