"""Shares of the SSD tier: a tenant's flood takes neither blocks nor write budget below the others'
floors.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import no_deadline
from support.tiers import DEADLINE_S, Arena, Desk, family, keys_of, settings

from kvhearth_server.tiers.base import BlockSpec, Done, TierShares
from kvhearth_server.tiers.ssd.tier import SsdTier
from kvhearth_server.tiers.ssd.write_limits import DAY_S, WriteBudget

SEGMENTS = 64
SEGMENT_BLOCKS = 15
OURS = 200
"""Blocks of tenant b, some 21 % of the tier."""
FLOOD = 3 * SEGMENTS * SEGMENT_BLOCKS
HALVES = {"a": 0.25, "b": 0.25}


def space(tenant: str) -> bytes:
    return hashlib.sha256(tenant.encode()).digest()


def of(tenant: str, **changes: Any) -> BlockSpec:
    return family(namespace=space(tenant), **changes)


def shares(floors: dict[str, float], epoch: int = 1) -> TierShares:
    tenants = {(space(each), 1): each for each in "abc"} | {(space("b"), epoch): "b"}
    tenants = {name: each for name, each in tenants.items() if each != "b" or name[1] == epoch}
    return TierShares(lambda name, epoch: tenants.get((name, epoch), ""), floors, floors)


def opened(folder: Path, floors: dict[str, float], **changes: Any) -> Desk:
    arena = Arena()
    tier = SsdTier(settings(folder, segments=SEGMENTS, **changes), [arena.bytes])
    tier.use_shares(shares(floors))
    desk = Desk(tier, arena)
    desk.settle()
    return desk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A tier whose tenants a and b are left a quarter each."""
    made = opened(tmp_path / "one", HALVES)
    yield made
    close(made)


def close(desk: Desk) -> None:
    tier = desk.tier
    assert isinstance(tier, SsdTier)
    assert tier.drain(DEADLINE_S)
    tier.check()
    tier.close()


def present(desk: Desk, tenant: str, numbers: range) -> int:
    return int(desk.tier.look_up(of(tenant), keys_of(numbers)).present.sum())


def test_a_flood_leaves_what_is_within_the_floor(desk: Desk) -> None:
    """200 blocks of one tenant were pushed off the drive by another tenant's stores."""
    desk.store_all(range(OURS), of("b"))
    desk.store_all(range(FLOOD), of("a"))
    assert present(desk, "b", range(OURS)) == OURS
    assert len(desk.load(list(range(0, OURS, 5)), of("b")).rows(Done)) == OURS // 5
    assert present(desk, "a", range(FLOOD)) > SEGMENTS * SEGMENT_BLOCKS // 2


def test_a_flood_leaves_blocks_that_lie_between_its_own(desk: Desk) -> None:
    for start in range(0, OURS, 8):
        desk.store_all(range(start, start + 8), of("b"))
        desk.store_all(range(start * 4, start * 4 + 24), of("a"))
    desk.store_all(range(10_000, 10_000 + FLOOD), of("a"))
    assert present(desk, "b", range(OURS)) == OURS


def test_without_shares_the_flood_takes_everything(tmp_path: Path) -> None:
    desk = opened(tmp_path / "one", {"a": 0.25})
    desk.store_all(range(OURS), of("b"))
    desk.store_all(range(FLOOD), of("a"))
    assert present(desk, "b", range(OURS)) == 0
    close(desk)


def test_a_tenant_over_its_floor_falls_to_it_and_no_further(desk: Desk) -> None:
    count = SEGMENTS * SEGMENT_BLOCKS * 3 // 5
    desk.store_all(range(count), of("b"))
    desk.store_all(range(FLOOD), of("a"))
    use = desk.tier.tenants_use(["a", "b"])["b"]
    left = present(desk, "b", range(count))
    assert 0.9 * use.floor_bytes <= use.bytes <= 1.3 * use.floor_bytes
    assert OURS < left < count
    assert use.bytes == left * 4 * 4096


def test_both_tenants_flood_in_turns(desk: Desk) -> None:
    for start in range(0, FLOOD, 64):
        desk.store_all(range(start, start + 48), of("a"))
        desk.store_all(range(start, start + 16), of("b"))
    uses = desk.tier.tenants_use(["a", "b"])
    assert all(use.bytes >= 0.9 * use.floor_bytes for use in uses.values())


def test_blocks_of_old_weights_and_of_nobody_are_not_kept(tmp_path: Path) -> None:
    desk = opened(tmp_path / "one", HALVES)
    desk.tier.use_shares(shares(HALVES, epoch=2))
    desk.store_all(range(64), of("b"))
    desk.store_all(range(64, 128), of("b", epoch=2))
    desk.store_all(range(64), of("gone"))
    desk.store_all(range(FLOOD), of("a"))
    # A few may lie in a segment that is kept for others.
    assert present(desk, "b", range(64)) < SEGMENT_BLOCKS
    assert present(desk, "gone", range(64)) < SEGMENT_BLOCKS
    kept = desk.tier.look_up(of("b", epoch=2), keys_of(range(64, 128))).present
    assert kept.all()
    close(desk)


def test_what_is_kept_outlives_a_restart(tmp_path: Path) -> None:
    desk = opened(tmp_path / "one", HALVES)
    desk.store_all(range(OURS), of("b"))
    desk.store_all(range(FLOOD // 2), of("a"))
    close(desk)
    desk = opened(tmp_path / "one", HALVES)
    assert present(desk, "b", range(OURS)) == OURS
    desk.store_all(range(FLOOD, FLOOD + FLOOD // 2), of("a"))
    assert present(desk, "b", range(OURS)) == OURS
    close(desk)


def test_without_a_floor_a_tenant_loses_blocks(desk: Desk) -> None:
    desk.store_all(range(OURS), of("b"))
    desk.tier.use_shares(shares({"a": 0.25, "b": 0.0}))
    desk.store_all(range(FLOOD), of("a"))
    assert present(desk, "b", range(OURS)) < OURS * 3 // 4


# -- the write budget ------------------------------------------------------------------------------

RATE = 24_000
"""Bytes a day: the bucket holds 1,000."""


def filled(floors: dict[str, float]) -> WriteBudget:
    budget = WriteBudget(RATE, 0.0)
    budget.allot(floors, None, 0.0)
    return budget


def test_a_tenant_leaves_the_others_reserve() -> None:
    budget, now = filled({"a": 0.25, "b": 0.25}), DAY_S
    assert budget.take(10, 1000, now, "a") == 75
    assert budget.take(10, 1000, now, "a") == 0
    assert budget.take(10, 1000, now, "b") == 25
    assert budget.left(now) == 0


def test_a_reserve_fills_again_beside_a_flood() -> None:
    budget = filled({"a": 0.25, "b": 0.25})
    taken, now = {"a": 0, "b": 0}, DAY_S
    for _ in range(24 * 60):
        now += 60
        taken["a"] += budget.take(10, 1000, now, "a")
        taken["b"] += budget.take(10, 1000, now, "b") if now % 3600 == 0 else 0
    whole = taken["a"] + taken["b"]
    assert whole <= RATE // 10 + 101
    assert 0.2 * RATE / 10 <= taken["b"] <= 0.3 * RATE / 10


def test_a_new_rate_holds_at_once() -> None:
    budget = filled({"a": 0.25, "b": 0.25})
    budget.allot({"a": 0.25, "b": 0.25}, 240, DAY_S)
    assert budget.take(1, 1000, DAY_S, "a") == 8
    budget.allot({}, 0, DAY_S)
    assert budget.unbounded
    budget.allot({}, RATE, 2 * DAY_S)
    assert budget.take(10, 1000, 2 * DAY_S, "a") == 10  # a tenth, as after a start


@no_deadline
@given(
    floors=st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 0.3]), max_size=3),
    steps=st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", ""]), st.integers(1, 300), st.integers(0, 9000)),
        max_size=40,
    ),
)
def test_reserves_never_add_to_the_budget(
    floors: dict[str, float], steps: list[tuple[str, int, int]]
) -> None:
    budget, now, spent, largest = filled(floors), 0.0, 0, 0
    for tenant, size, passed in steps:
        now += passed
        spent += size * budget.take(size, 3, now, tenant)
        largest = max(largest, size)
        for each in floors:
            left, whole = budget.reserve(each, now)
            assert 0 <= left <= whole
    assert spent <= RATE / 24 / 10 + now * RATE / DAY_S + largest


def test_blocks_of_a_tenant_are_refused_when_only_reserves_are_left(tmp_path: Path) -> None:
    desk = opened(tmp_path / "one", HALVES, bytes_per_day=24 * (64 << 20))
    number, end = 0, time.monotonic() + DEADLINE_S
    while not desk.tier.counts["stores_refused_budget"]:
        assert time.monotonic() < end, "nothing is refused"
        desk.store(range(number, number + 32), of("a"))
        number += 32
    refused = desk.tier.counts["stores_refused_budget"]
    desk.store_all(range(32), of("b"))
    assert desk.tier.counts["stores_refused_budget"] == refused
    close(desk)
