"""Quotas of the SSD tier: a tenant that needs room loses its own blocks, and no other tenant's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiers import DEADLINE_S, Arena, Desk, family, keys_of, settings

from kvhearth_server.tiers.base import BlockSpec, Counts, Done
from kvhearth_server.tiers.ssd.tier import SsdTier
from kvhearth_server.tiers.ssd.write_limits import DAY_S, WriteBudget

SEGMENTS = 64
SEGMENT_BLOCKS = 15
OURS = 200
"""Blocks of tenant b, some 21 % of the tier."""
FLOOD = 3 * SEGMENTS * SEGMENT_BLOCKS
HALVES = {"a": 0.5, "b": 0.5}


def space(tenant: str) -> bytes:
    return hashlib.sha256(tenant.encode()).digest()


def of(tenant: str, **changes: Any) -> BlockSpec:
    return family(namespace=space(tenant), **changes)


def opened(folder: Path, quotas: dict[str, float], **changes: Any) -> Desk:
    arena = Arena()
    tier = SsdTier(settings(folder, segments=SEGMENTS, quotas=quotas, **changes), [arena.bytes])
    tenants = {space(each): each for each in "abc"}
    tier.use_owners(lambda name, epoch: tenants.get(name, "") if epoch == 1 else "")
    desk = Desk(tier, arena)
    desk.settle()
    return desk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A tier whose tenants a and b have a half each."""
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


def use(desk: Desk, tenant: str) -> tuple[int, int]:
    """Return the segment files of a tenant, and its quota, in bytes."""
    assert isinstance(desk.tier, SsdTier)
    (found,) = [each for each in desk.tier.figures().tenants if each.tenant == tenant]
    return found.used_bytes, found.quota_bytes


def test_a_flood_leaves_the_blocks_of_the_other(desk: Desk) -> None:
    """200 blocks of one tenant were pushed off the drive by another tenant's stores."""
    for start in range(0, OURS, 8):
        desk.store_all(range(start, start + 8), of("b"))
        desk.store_all(range(start * 4, start * 4 + 24), of("a"))
    desk.store_all(range(10_000, 10_000 + FLOOD), of("a"))
    assert present(desk, "b", range(OURS)) == OURS
    assert len(desk.load(list(range(0, OURS, 5)), of("b")).rows(Done)) == OURS // 5
    used, quota = use(desk, "a")
    assert used == quota
    assert present(desk, "a", range(10_000, 10_000 + FLOOD)) > SEGMENTS * SEGMENT_BLOCKS * 0.4


def test_quotas_hold_after_a_restart(tmp_path: Path) -> None:
    desk = opened(tmp_path / "one", HALVES)
    desk.store_all(range(OURS), of("b"))
    desk.store_all(range(FLOOD // 2), of("a"))
    close(desk)
    desk = opened(tmp_path / "one", HALVES)
    assert present(desk, "b", range(OURS)) == OURS
    desk.store_all(range(FLOOD, FLOOD + FLOOD // 2), of("a"))
    assert present(desk, "b", range(OURS)) == OURS
    close(desk)


def test_a_lower_quota_takes_the_coldest_blocks(tmp_path: Path) -> None:
    desk = opened(tmp_path / "one", HALVES)
    desk.store_all(range(OURS), of("b"))
    close(desk)
    desk = opened(tmp_path / "one", {"a": 0.875, "b": 0.125})
    desk.store_all(range(FLOOD), of("a"))
    used, quota = use(desk, "b")
    assert used <= quota == 8 * desk.tier.log.directories[0].segment_bytes  # type: ignore[attr-defined]
    assert present(desk, "b", range(OURS - 45, OURS)) == 45
    assert present(desk, "b", range(45)) == 0
    close(desk)


def test_the_room_of_a_tenant_that_is_gone_goes_to_the_others(tmp_path: Path) -> None:
    desk = opened(tmp_path / "one", HALVES)
    desk.store_all(range(FLOOD // 4), of("b"))
    close(desk)
    desk = opened(tmp_path / "one", {"a": 0.5, "c": 0.5})
    desk.store_all(range(FLOOD), of("a"))
    desk.store_all(range(FLOOD), of("c"))
    assert present(desk, "b", range(FLOOD // 4)) == 0
    for tenant in "ac":
        used, quota = use(desk, tenant)
        assert used == quota
    close(desk)


def test_one_tenant_has_the_segments_of_all_before_it(tmp_path: Path) -> None:
    desk = opened(tmp_path / "one", HALVES)
    desk.store_all(range(OURS), of("b"))
    close(desk)
    desk = opened(tmp_path / "one", {"b": 1.0})
    assert present(desk, "b", range(OURS)) == OURS
    close(desk)


def test_blocks_of_nobody_are_not_written(desk: Desk) -> None:
    done = desk.store(range(4), of("gone"))
    assert not len(done.rows(Done))


# -- the write budget ------------------------------------------------------------------------------


def test_a_new_rate_holds_at_once() -> None:
    rate = 24_000  # the bucket holds 1,000
    budget = WriteBudget(rate, Counts(), 0.0)
    budget.use(240, DAY_S)
    assert budget.take(1, 1000, DAY_S) == 10
    budget.use(0, DAY_S)
    assert budget.unbounded
    budget.use(rate, 2 * DAY_S)
    assert budget.take(10, 1000, 2 * DAY_S) == 10  # a tenth, as after a start
