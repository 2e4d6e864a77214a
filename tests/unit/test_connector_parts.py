"""Pure parts of the connectors' core: load policy, settings, geometry, reports, keys, counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvhearth.connectors.core import engine as stats
from kvhearth.connectors.core.engine import (
    Bounds,
    CostLine,
    Counters,
    EngineGroups,
    LoadPolicy,
    Verdict,
    rows,
)
from kvhearth.connectors.core.scheduler import guarded, nothing
from kvhearth.connectors.core.settings import URL_ENV, Settings, parse_settings
from kvhearth.connectors.core.step_metadata import (
    Geometry,
    Handshake,
    RankLoaded,
    RankStored,
    WorkerReport,
)
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import KVHearthError
from kvhearth.model import EXTENT_DTYPE
from kvhearth.results import GroupResult, Lease, LookupResult


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


def policy(bounds: Bounds, load_s: float, prefill_s: float) -> LoadPolicy:
    """A policy with these seconds per token; a load costs 20 ms more."""
    found = LoadPolicy(bounds)
    found.load = line(0.02, load_s)
    found.prefill = line(0.0, prefill_s)
    return found


def test_short_hits_are_recomputed_and_long_ones_loaded() -> None:
    found = policy(Bounds(), 1e-6, 1e-4)
    assert found.judge(100) is Verdict.RECOMPUTE
    assert found.judge(1000) is Verdict.LOAD


def test_a_refusal_is_tried_again_once_in_a_while() -> None:
    found = policy(Bounds(), 1e-3, 1e-6)
    verdicts = [found.judge(1000) for _ in range(640)]
    assert verdicts.count(Verdict.LOAD) == 10
    always = policy(Bounds(always=True), 1.0, 1e-6)
    assert {always.judge(1000) for _ in range(100)} == {Verdict.LOAD}


def test_bounds() -> None:
    found = LoadPolicy(Bounds(min_load_tokens=64, max_load_tokens=512))
    assert found.judge(63) is Verdict.TOO_SHORT
    assert found.judge(64) is Verdict.LOAD
    assert (found.most(), found.most(100), found.most(1000)) == (512, 100, 512)
    assert (found.most(0), LoadPolicy(Bounds(max_load_tokens=0)).most(100)) == (0, 0)


def tiered(load_s: float, promotion_s: float, prefill_s: float, **bounds: bool | int) -> LoadPolicy:
    """A policy with these seconds per token."""
    found = LoadPolicy(Bounds(**bounds))  # type: ignore[arg-type]
    found.load, found.promotion = line(0.0, load_s), line(0.0, promotion_s)
    found.prefill = line(0.0, prefill_s)
    return found


def test_a_promotion_faster_than_computing_is_waited_for() -> None:
    found = tiered(1e-6, 1e-5, 1e-4)
    assert found.prefetches(1000)
    assert found.awaits(0, 1000, 0.02)
    assert found.awaits(900, 1000, 0.005)
    assert not found.awaits(900, 1000, 0.05), "computing 100 tokens takes 10 ms"
    assert not found.awaits(1000, 1000, 0.0), "there is nothing to wait for"


def test_a_slow_tier_is_tried_again_once_in_a_while() -> None:
    slow = tiered(1e-6, 1e-3, 1e-4)
    assert sum(slow.prefetches(1000) for _ in range(640)) == 10
    assert sum(slow.awaits(0, 1000, 0.5) for _ in range(640)) == 10


def test_a_short_hit_is_not_waited_for() -> None:
    found = tiered(1e-6, 1e-6, 1e-4, min_load_tokens=64)
    assert not found.prefetches(48)
    assert not found.awaits(0, 48, 0.0001)
    assert found.awaits(0, 64, 0.0001)


FULL = GroupSpec(GroupKind.FULL, 32, 1024)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 16, 1024, window_tokens=40)
STATE = GroupSpec(GroupKind.MAMBA, 64, 1024)


def groups(*specs: GroupSpec) -> EngineGroups:
    contract = Contract("m", "r", "uint8", specs)
    return EngineGroups(contract, tuple(range(len(specs))), 16)


def test_settings_say_what_is_wrong() -> None:
    assert parse_settings(Settings, {}) == Settings()
    wrong: dict[str, Any] = {
        "ulr": "x",
        "lookup_wait_ms": "5",
        "policy": "sometimes",
        "held_percent": 0,
        "offload_prompt_only": 1,
        "lease_s": True,
        "url": "http://x",
        "codec": "fp16",
    }
    for name, value in wrong.items():
        with pytest.raises(KVHearthError, match=name if name != "url" else "http"):
            parse_settings(Settings, {name: value})
    for value in (-0.1, 2, float("nan"), True, "0.5"):
        with pytest.raises(KVHearthError, match="verify_fraction"):
            parse_settings(Settings, {"verify_fraction": value})


def test_the_url_is_the_options_else_the_environments_else_the_default() -> None:
    ours, theirs = "kvhearth+unix:///run/ours", "kvhearth+unix:///run/theirs"
    assert parse_settings(Settings, {"url": ours}, {URL_ENV: theirs}).url == ours
    assert parse_settings(Settings, {}, {URL_ENV: theirs}).url == theirs
    assert (
        parse_settings(Settings, {}, {URL_ENV: ""})
        == parse_settings(Settings, {}, {})
        == Settings()
    )
    with pytest.raises(KVHearthError, match=f"{URL_ENV}: 'unix:/run'"):
        parse_settings(Settings, {}, {URL_ENV: "unix:/run"})
    with pytest.raises(KVHearthError, match="'' is not"):
        parse_settings(Settings, {"url": ""}, {URL_ENV: theirs})


def test_geometry() -> None:
    plain = Geometry(2, 2)
    assert (plain.ranks, plain.shards) == (4, 4)
    assert [plain.shard_of(rank) for rank in range(4)] == [0, 1, 2, 3]
    shared = Geometry(4, 2, replicas=2)
    assert [shared.shard_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    parts = [shared.written_by(rank, 5).tolist() for rank in (0, 1)]
    assert sorted(parts[0] + parts[1]) == [0, 1, 2, 3, 4]
    assert plain.written_by(3, 3).tolist() == [0, 1, 2]


def test_reports_of_ranks_add_up() -> None:
    at = np.arange(2)
    one = WorkerReport([1], {5: [(0, RankStored(0, at, at == 0))]}, {5: 1}, {"a": [RankLoaded(10)]})
    two = WorkerReport([1], {5: [(0, RankStored(1, at, at == 1))]}, {5: 1}, {"a": [RankLoaded(20)]})
    one.handshakes, two.handshakes = [Handshake("{}")], [Handshake("", problem="no pages")]
    both = one.aggregate(two)
    assert both.steps == [1]
    assert both.stored_ranks == {5: 2}
    assert [outcome.rank for _, outcome in both.stores[5]] == [0, 1]
    assert [outcome.bytes for outcome in both.loads["a"]] == [10, 20]
    assert both.handshakes == one.handshakes + two.handshakes
    assert WorkerReport().empty
    assert not WorkerReport(handshakes=one.handshakes).empty


def test_keys_of_coarser_groups_are_the_last_of_their_hashes() -> None:
    hashes = [bytes([at]) * 32 for at in range(7)]
    found = groups(FULL, WINDOW, STATE).keys(hashes)
    assert found[0] == [hashes[1], hashes[3], hashes[5]]
    assert found[1] == hashes
    assert found[2] == [hashes[3]]
    folded = groups(FULL).keys(hashes, b"adapter")
    assert not set(folded[0]) & set(found[0])
    assert groups(FULL).key(0, hashes, 1, b"adapter") == folded[0][1]
    assert groups(FULL).full_blocks(0, hashes, 95) == 2
    assert groups(FULL).full_blocks(0, hashes, 1000) == 3


def test_hashes_must_divide_blocks() -> None:
    with pytest.raises(ValueError, match="24"):
        EngineGroups(Contract("m", "r", "uint8", (FULL,)), (0,), 24)


def test_what_a_load_needs() -> None:
    all_three = groups(FULL, WINDOW, STATE)
    assert (all_three.step_tokens, all_three.whole) == (64, False)
    assert all_three.needed(0, 0, 128) == range(4)
    assert all_three.needed(0, 64, 128) == range(2, 4)
    assert all_three.needed(1, 0, 128) == range(5, 8)
    assert all_three.needed(1, 112, 128) == range(7, 8)
    assert all_three.needed(2, 64, 128) == range(1, 2)


def found(leased: dict[int, list[int]], hit: int) -> LookupResult:
    results = {}
    for group, flags in leased.items():
        own = np.asarray(flags, np.bool_)
        extents = np.zeros(int(own.sum()), EXTENT_DTYPE)
        results[group] = GroupResult(own, own, own, own.astype(np.uint8), extents)
    return LookupResult(hit, Lease(1, "boot"), results)


def test_a_shorter_hit_is_no_hit_where_windows_are_not_leased() -> None:
    answer = found({0: [1, 1, 1, 1], 1: [0, 0, 0, 0, 0, 1, 1, 1]}, 128)
    pair = groups(FULL, WINDOW)
    assert pair.reach(answer, 1000) == 128
    assert pair.reach(answer, 127) == 0
    only = groups(FULL)
    assert only.reach(found({0: [1, 1, 1, 1]}, 128), 127) == 96
    assert only.reach(LookupResult(128, None, {}), 128) == 0


def test_how_far_a_hit_would_reach_if_all_were_promoted() -> None:
    tiers = np.asarray([1, 1, 2, 2, 0, 2], np.uint8)
    ready = tiers == 1
    own = GroupResult(tiers > 0, ready, ready, tiers, np.zeros(2, EXTENT_DTYPE))
    answer = LookupResult(64, Lease(1, "boot"), {0: own}, eta_us=5)
    only = groups(FULL)
    assert [only.ceiling(answer, limit) for limit in (1000, 128, 127, 31)] == [128, 128, 96, 0]
    assert only.end(100, step_back=False) == 100
    assert only.end(100, step_back=True) == 99
    assert groups(FULL, WINDOW).end(100, step_back=False) == 99


def test_where_blocks_stand_among_leased_extents() -> None:
    leased = np.asarray([0, 1, 1, 0, 1], np.bool_)
    assert rows(leased, range(1, 3)).tolist() == [0, 1]  # type: ignore[union-attr]
    assert rows(leased, range(4, 5)).tolist() == [2]  # type: ignore[union-attr]
    assert rows(leased, range(2, 2)) == slice(0, 0)
    assert rows(leased[1:], range(2)) == slice(0, 2)
    assert rows(leased, range(2, 4)) is None
    assert rows(leased, range(4, 6)) is None


def test_counts() -> None:
    counters = Counters()
    assert counters.take() == {}
    counters.add("lookups")
    counters.add("load_bytes", 5)
    counters.add("load_bytes", 6)
    counters.add("load_failed", 0)
    assert counters.take() == {"lookups": 1, "load_bytes": 11}
    assert counters.take() == {}
    merged = stats.merged({"lookups": 1, "held_blocks": 7}, {"lookups": 2, "held_blocks": 3})
    assert merged == {"lookups": 3, "held_blocks": 7}
    line = stats.summary({"load_tokens": 9, "load_bytes": 4e9, "load_seconds": 2.0})
    assert line == {"load_tokens": 9, "load_GB_per_s": 2.0}


class _Half:
    def __init__(self) -> None:
        self.troubles: list[str] = []

    def record_failure(self, name: str) -> None:
        self.troubles.append(name)

    @guarded(lambda: (0, False))
    def answers(self, fails: bool) -> tuple[int, bool]:
        if fails:
            raise ZeroDivisionError("a bug of ours")
        return 5, True

    @guarded(nothing)
    def says_nothing(self) -> None:
        raise KeyError("another")


def test_no_exception_reaches_the_engine() -> None:
    half = _Half()
    assert half.answers(False) == (5, True)
    assert half.answers(True) == (0, False)
    half.says_nothing()
    assert half.troubles == ["answers", "says_nothing"]
