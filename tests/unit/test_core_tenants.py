"""Shares: a tenant, a namespace or an engine that takes all it can get leaves the others theirs."""

from __future__ import annotations

import pytest
from support.core_kit import Rig, contract, full, keys, refused

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.namespaces import CONTRACT_BYTES_MAX

PAGE = 4096
QUOTA = 20
MANY = 1000
"""More than any bound of these tests."""


def two_tenants(**limits: object) -> Rig:
    """Return a core with the tenants a and b."""
    return Rig(tenants=("a", "b"), **limits)


def numbered(number: int) -> Contract:
    return contract(revision=f"r{number}")


def attach_until_refused(
    rig: Rig, tenant: str, *, first: int = 0
) -> tuple[list[int], KVHearthError]:
    """Attach one engine after another, each with a contract of its own, until one is refused."""
    sessions: list[int] = []
    for number in range(first, first + MANY):
        try:
            sessions.append(rig.attach(numbered(number), tenant=tenant, engine_id=f"e{number}"))
        except KVHearthError as error:
            return sessions, error
    raise AssertionError(f"nothing bounds tenant {tenant}")


def test_one_tenant_alone_takes_everything() -> None:
    rig = Rig(sessions_max=20, namespaces_max=30)
    sessions, error = attach_until_refused(rig, "t")
    assert (len(sessions), error.reason) == (20, Reason.TOO_MANY_SESSIONS)


def test_a_flood_evicts_the_floods_own_blocks() -> None:
    rig = two_tenants()
    ours, theirs = rig.attach(tenant="b"), rig.attach(tenant="a")
    rig.put(ours, keys(1, 2, 3))
    for number in range(0, 640, 32):
        assert rig.put(theirs, keys(*range(number, number + 32))).all()
    assert rig.lookup(ours, keys(1, 2, 3), lease_id=1).hit_tokens == 3 * 16
    assert rig.lookup(theirs, keys(0), lease_id=1).hit_tokens == 0


@pytest.mark.parametrize("bound", ["sessions", "namespaces"])
def test_tenants_have_sessions_and_namespaces_in_equal_parts(bound: str) -> None:
    rig = two_tenants(**{f"{bound}_max": 20})
    sessions, error = attach_until_refused(rig, "a")
    assert (len(sessions), error.reason) == (10, Reason(f"too_many_{bound}"))
    others, _ = attach_until_refused(rig, "b", first=100)
    assert len(others) == 10
    # A lost process gives its place back at once.
    rig.leave(sessions[0], finished=bound == "namespaces")
    rig.attach(tenant="a", engine_id="again")


def test_the_contracts_of_one_tenant_leave_the_other_its_part() -> None:
    """Some 90 contracts of 45 KiB locked everybody else out."""
    rig = two_tenants()
    names = ("model", "revision", "layout", "model_dtype", "quantization", "rope_digest")
    large = dict.fromkeys(names, "\U0001f525" * 640)

    def attach(number: int, tenant: str) -> int:
        made = contract(draft_model=f"{number}", **large)
        rig.attach(made, tenant=tenant, engine_id=f"e{number}")
        return len(made.to_json())

    taken = 0
    with refused(Reason.TOO_MANY_NAMESPACES):
        for number in range(MANY):
            taken += attach(number, "a")
    assert 0.45 * CONTRACT_BYTES_MAX < taken <= 0.5 * CONTRACT_BYTES_MAX
    for number in range(20):
        attach(MANY + number, "b")


def test_nobodys_empty_namespaces_go_for_another_tenant() -> None:
    """A forgotten namespace loses its copies on SSD: churn of one tenant's must not cost others."""
    rig = two_tenants(namespaces_max=8)
    kept = rig.attach(tenant="b")
    digest = rig.space(kept).digest
    rig.leave(kept)
    for number in range(40):
        rig.leave(rig.attach(numbered(number), tenant="a", engine_id=f"e{number}"))
    assert rig.state.namespaces.find(digest) is not None
    assert sum(space.tenant == "a" for space in rig.state.namespaces) == 4


# -- engines of one tenant -------------------------------------------------------------------------


def reserved_by(rig: Rig, engines: int, count: int) -> list[int]:
    """Let engines of one tenant reserve as much as they get. Return the blocks of each."""
    found = []
    for number in range(engines):
        session = rig.attach(engine_id=f"e{number}")
        try:
            reserved = rig.reserve(session, count)
        except KVHearthError as error:
            if error.reason is not Reason.STOCK_CAP:
                raise
            found.append(0)
            continue
        found.append(sum(len(part.slots) for part in reserved.handed))
    return found


def test_engines_that_hold_stock_leave_room_for_the_next_and_for_readers() -> None:
    """Four engines held 25 % each of 80 %, and everybody else was told held_cap."""
    rig = Rig(16, stock_fraction_max=0.25, held_fraction_max=0.8)
    reader = rig.attach(engine_id="reader")
    rig.put(reader, keys(1, 2, 3))
    found = reserved_by(rig, 7, 100)
    assert found[:2] == [64, 64]  # the first two have their whole stock
    assert all(found), found
    assert found == sorted(found, reverse=True)
    assert rig.lookup(reader, keys(1), lease_id=1).lease_id == 1


def test_an_engine_without_others_has_the_bounds_that_it_had() -> None:
    rig = Rig(16, stock_fraction_max=0.75, held_fraction_max=0.8)
    assert reserved_by(rig, 1, 256) == [192]


# -- quotas of namespaces --------------------------------------------------------------------------


def with_quota(blocks: int = QUOTA) -> Rig:
    """Four slabs of 16 slots, and a quota of ``blocks`` for every namespace."""
    return Rig(4, namespace_quota_bytes=blocks * PAGE)


def test_a_namespace_at_its_quota_evicts_its_own_blocks_only() -> None:
    rig = with_quota()
    mine, theirs = rig.attach(), rig.attach(contract(revision="other"), engine_id="other")
    named = keys(*range(QUOTA))
    for half in (named[: QUOTA // 2], named[QUOTA // 2 :]):  # half of it may be reserved at once
        rig.put(theirs, half)
    for number in range(60):
        rig.put(mine, keys(number))
        assert rig.space(mine).used_bytes <= QUOTA * PAGE
    assert sum(rig.present(mine, keys(*range(60)))) == QUOTA
    assert all(rig.present(theirs, named))
    assert rig.lookup(theirs, named, lease_id=1).hit_tokens == QUOTA * 16
    with refused(Reason.QUOTA_EXCEEDED):
        rig.reserve(theirs, 1)


def test_a_block_of_more_than_the_quota_evicts_nothing() -> None:
    rig = with_quota(3)
    session = rig.attach(contract(full(), full(4 * PAGE)))
    rig.put(session, keys(0))
    with refused(Reason.QUOTA_EXCEEDED):
        rig.reserve(session, 1, kv_group=1)
    assert rig.present(session, keys(0)) == [True]


def test_all_engines_of_a_namespace_share_its_quota() -> None:
    rig = with_quota()
    one, other = rig.attach(), rig.attach(engine_id="other")
    rig.take(one, 7)
    reserved = rig.reserve(other, 10)
    assert (reserved.short, len(reserved.handed[0].slots)) == (Reason.QUOTA_EXCEEDED, 3)
