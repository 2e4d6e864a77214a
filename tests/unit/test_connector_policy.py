"""Load or recompute: the linear costs and the decisions."""

from __future__ import annotations

import pytest

from kvhearth.connectors.core.load_policy import Bounds, CostLine, LoadPolicy, Verdict


def line(
    fixed_s: float, per_token_s: float, sizes: tuple[int, ...] = (100, 1000, 4000)
) -> CostLine:
    found = CostLine()
    for _ in range(4):
        for tokens in sizes:
            found.observe(tokens, fixed_s + per_token_s * tokens)
    return found


def test_a_line_finds_what_it_was_fed() -> None:
    found = line(0.01, 1e-5)
    assert found.seconds(0) == pytest.approx(0.01, rel=1e-3)
    assert found.seconds(8000) == pytest.approx(0.09, rel=1e-3)
    assert found.tokens_per_s == pytest.approx(1e5, rel=1e-3)


def test_measurements_of_one_size_are_all_slope() -> None:
    found = line(0.01, 1e-5, sizes=(1000,))
    assert found.seconds(1000) == pytest.approx(0.02)
    assert found.seconds(0) == pytest.approx(0.0, abs=1e-12)


def test_a_line_never_falls_and_never_begins_below_nothing() -> None:
    found = CostLine()
    for tokens, seconds in ((100, 1.0), (1000, 0.5), (2000, 0.1)):
        found.observe(tokens, seconds)
    assert 0 <= found.seconds(0) <= found.seconds(10) <= found.seconds(100_000)
    steep = CostLine()
    for tokens, seconds in ((1000, 0.0), (2000, 1.0)):
        steep.observe(tokens, seconds)
    assert steep.seconds(0) >= 0.0


def test_old_measurements_fade() -> None:
    found = line(0.0, 1e-3)
    for _ in range(400):
        found.observe(1000, 0.01)
    assert found.seconds(1000) == pytest.approx(0.01, rel=0.05)


def policy(bounds: Bounds, load_s: float, prefill_s: float) -> LoadPolicy:
    """A policy with these seconds per token; a load costs 20 ms more."""
    found = LoadPolicy(bounds)
    found.load = line(0.02, load_s)
    found.prefill = line(0.0, prefill_s)
    return found


def test_nothing_measured_is_loaded() -> None:
    assert LoadPolicy(Bounds()).judge(16) is Verdict.LOAD


def test_short_hits_are_recomputed_and_long_ones_loaded() -> None:
    found = policy(Bounds(), 1e-6, 1e-4)
    assert found.judge(100) is Verdict.RECOMPUTE
    assert found.judge(1000) is Verdict.LOAD


def test_a_refusal_is_tried_again_once_in_a_while() -> None:
    found = policy(Bounds(), 1e-3, 1e-6)
    verdicts = [found.judge(1000) for _ in range(640)]
    assert verdicts.count(Verdict.LOAD) == 10


def test_always_means_always() -> None:
    found = policy(Bounds(always=True), 1.0, 1e-6)
    assert {found.judge(1000) for _ in range(100)} == {Verdict.LOAD}


def test_bounds() -> None:
    found = LoadPolicy(Bounds(min_load_tokens=64, max_load_tokens=512))
    assert found.judge(63) is Verdict.TOO_SHORT
    assert found.judge(64) is Verdict.LOAD
    assert (found.most(), found.most(100), found.most(1000)) == (512, 100, 512)
    assert LoadPolicy(Bounds()).most(0) == 0


def tiered(load_s: float, promotion_s: float, prefill_s: float, **bounds: bool | int) -> LoadPolicy:
    """A policy with these seconds per token."""
    found = LoadPolicy(Bounds(**bounds))  # type: ignore[arg-type]
    found.load, found.promotion = line(0.0, load_s), line(0.0, promotion_s)
    found.prefill = line(0.0, prefill_s)
    return found


def test_what_climbs_faster_than_it_is_computed_is_waited_for() -> None:
    found = tiered(1e-6, 1e-5, 1e-4)
    assert found.prefetches(1000)
    assert found.awaits(0, 1000, 0.02)
    assert found.awaits(900, 1000, 0.005)
    assert not found.awaits(900, 1000, 0.05), "computing 100 tokens takes 10 ms"
    assert not found.awaits(1000, 1000, 0.0), "there is nothing to wait for"


def test_what_was_measured_counts_where_the_estimate_is_too_good() -> None:
    slow = tiered(1e-6, 1e-3, 1e-4)
    assert not slow.prefetches(1000)
    assert not slow.awaits(0, 1000, 0.001)
    assert LoadPolicy(Bounds()).awaits(0, 1000, 100.0), "nothing is known"
    assert tiered(1e-6, 1e-3, 1e-4, always=True).awaits(0, 1000, 100.0)
    assert tiered(1e-6, 1e-3, 1e-4, always=True).prefetches(1000)


def test_a_slow_tier_is_tried_again_once_in_a_while() -> None:
    slow = tiered(1e-6, 1e-3, 1e-4)
    assert sum(slow.prefetches(1000) for _ in range(640)) == 10
    assert sum(slow.awaits(0, 1000, 0.5) for _ in range(640)) == 10


def test_a_short_hit_is_not_waited_for() -> None:
    found = tiered(1e-6, 1e-6, 1e-4, min_load_tokens=64)
    assert not found.prefetches(48)
    assert not found.awaits(0, 48, 0.0001)
    assert found.awaits(0, 64, 0.0001)
