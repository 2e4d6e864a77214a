"""Quotas of the SSD tier: a tenant that needs room loses its own blocks, and no other tenant's."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from support.tiers import SEGMENT_BYTES, Opened, family

from kvhearth_server.tiers.base import BlockSpec, Counts, Done
from kvhearth_server.tiers.ssd.write_limits import DAY_S, WriteBudget

SEGMENTS = 64
SEGMENT_BLOCKS = 15
OURS = 200
"""Blocks of tenant b, some 21 % of the tier."""
FLOOD = 2 * SEGMENTS * SEGMENT_BLOCKS
HALVES = {"a": 0.5, "b": 0.5}


def space(tenant: str) -> bytes:
    return hashlib.sha256(tenant.encode()).digest()


def of(tenant: str, **changes: Any) -> BlockSpec:
    return family(namespace=space(tenant), **changes)


def opened(folder: Path, quotas: dict[str, float]) -> Opened:
    desk = Opened(folder, segments=SEGMENTS, quotas=quotas)
    tenants = {space(each): each for each in "abc"}
    desk.tier.use_owners(lambda name, epoch: tenants.get(name, "") if epoch == 1 else "")
    return desk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A drive on which tenant b stored all its blocks, within half of it."""
    with opened(tmp_path / "one", HALVES) as desk:
        desk.store_all(range(OURS), of("b"))
    return tmp_path / "one"


def count(desk: Opened, tenant: str, numbers: range) -> int:
    return len(desk.present(numbers, of(tenant)))


def use(desk: Opened, tenant: str) -> tuple[int, int]:
    """Return the segment files of a tenant, and its quota, in bytes."""
    (found,) = [each for each in desk.tier.figures().tenants if each.tenant == tenant]
    return found.used_bytes, found.quota_bytes


def flood(desk: Opened, tenant: str, count: int) -> None:
    """Store blocks of a tenant, which never has more than its quota."""
    for start in range(10_000, 10_000 + count, 96):
        desk.store_all(range(start, start + 96), of(tenant))
        used, quota = use(desk, tenant)
        assert used <= quota


def test_a_flood_leaves_the_blocks_of_the_other(folder: Path) -> None:
    """200 blocks of one tenant were pushed off the drive by another tenant's stores."""
    with opened(folder, HALVES) as desk:
        for start in range(OURS, OURS + 40, 8):
            desk.store_all(range(start, start + 8), of("b"))
            desk.store_all(range(start * 4, start * 4 + 24), of("a"))
        flood(desk, "a", FLOOD)
        assert count(desk, "b", range(OURS + 40)) == OURS + 40
        assert len(desk.load(range(0, OURS, 5), of("b")).rows(Done)) == OURS // 5
        used, quota = use(desk, "a")
        assert used == quota
        there = count(desk, "a", range(10_000, 10_000 + FLOOD))
        assert there > SEGMENTS * SEGMENT_BLOCKS * 0.4


def test_a_lower_quota_takes_the_coldest_blocks(folder: Path) -> None:
    with opened(folder, {"a": 0.875, "b": 0.125}) as desk:
        flood(desk, "a", FLOOD)
        used, quota = use(desk, "b")
        assert used <= quota == 8 * SEGMENT_BYTES
        assert count(desk, "b", range(OURS - 45, OURS)) == 45
        assert count(desk, "b", range(45)) == 0


def test_the_room_of_a_tenant_that_is_gone_goes_to_the_others(folder: Path) -> None:
    with opened(folder, {"a": 0.125, "c": 0.5}) as desk:
        for tenant in "ac":
            flood(desk, tenant, FLOOD // 2 + 100)
        assert count(desk, "b", range(OURS)) == 0
        for tenant in "ac":
            used, quota = use(desk, tenant)
            assert used == quota


def test_one_tenant_has_the_segments_of_all_before_it(folder: Path) -> None:
    with opened(folder, {"b": 1.0}) as desk:
        assert count(desk, "b", range(OURS)) == OURS


def test_blocks_of_nobody_are_not_written(folder: Path) -> None:
    with opened(folder, HALVES) as desk:
        assert not len(desk.store(range(4), of("gone")).rows(Done))


def test_a_new_rate_holds_at_once() -> None:
    rate = 24_000  # the bucket holds 1,000
    budget = WriteBudget(rate, Counts(), 0.0)
    budget.use(240, DAY_S)
    assert budget.take(1, 1000, DAY_S) == 10
    budget.use(0, DAY_S)
    assert budget.unbounded
    budget.use(rate, 2 * DAY_S)
    assert budget.take(10, 1000, 2 * DAY_S) == 10  # a tenth, as after a start
