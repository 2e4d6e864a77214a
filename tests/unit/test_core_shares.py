"""Shares of tenants: nobody takes what is kept for others, and one alone takes everything."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import Rig, contract, keys, no_deadline, refused

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.value_types import parse_shares
from kvhearth_server.core.namespaces import CONTRACT_BYTES_MAX
from kvhearth_server.core.shares import (
    Account,
    Part,
    Share,
    TenantShares,
    parts_of,
    problems_of,
)

MANY = 1000
"""More than any bound of these tests."""


def rows(*texts: str) -> tuple[TenantShares, ...]:
    """Return rows of shares, as an operator writes them."""
    return tuple(map(parse_shares, texts))


def two_tenants(*shares: str, **limits: object) -> Rig:
    """Return a core with the tenants a and b."""
    return Rig(tenants=("a", "b"), shares=rows(*shares), **limits)


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


# -- accounts --------------------------------------------------------------------------------------

small = st.integers(0, 40)
parts = st.tuples(st.integers(0, 50), st.integers(50, 100)).map(
    lambda pair: Part(pair[0] / 100, pair[1] / 100)
)


@no_deadline
@given(
    total=small,
    later=small,
    allotted=st.fixed_dictionaries({"a": parts, "b": parts}),
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60),
)
def test_an_account_agrees_with_a_count(
    total: int, later: int, allotted: dict[str, Part], steps: list[tuple[str, bool]]
) -> None:
    account = Account(Share.SESSIONS, total)
    account.allot(total, allotted)
    used = dict.fromkeys("abc", 0)
    for number, (tenant, more) in enumerate(steps):
        if number == 30:
            account.allot(later, allotted)
        floors = {each: account.floor(each) for each in "abc"}
        kept = sum(max(0, floors[each] - used[each]) for each in "abc" if each != tenant)
        room = min(account.cap(tenant), account.total - kept - sum(used.values()) + used[tenant])
        assert account.room(tenant) == room - used[tenant]
        if more and account.room(tenant) > 0:
            used[tenant] += 1
            account.add(tenant, 1)
        elif not more and used[tenant]:
            used[tenant] -= 1
            account.add(tenant, -1)
    assert {each: account.used(each) for each in "abc"} == used
    assert account.used_total == sum(used.values())


def test_without_rows_half_is_kept_in_equal_parts() -> None:
    assert parts_of((), ("a",))["a", Share.SSD] == Part(0.0)
    assert parts_of((), ("a", "b"))["b", Share.SSD] == Part(0.25)
    assert parts_of((), ("a", "b"))["b", Share.RESERVED] == Part(0.0)


def test_a_tenants_row_goes_before_the_default_row() -> None:
    found = parts_of(rows("default=sessions:10,ssd:5", "b=sessions:20-40"), ("a", "b"))
    assert found["a", Share.SESSIONS] == Part(0.1)
    assert found["b", Share.SESSIONS] == Part(0.2, 0.4)
    assert found["b", Share.SSD] == Part(0.05)
    assert found["b", Share.LEASES] == Part(0.25)


def test_problems_are_told() -> None:
    assert problems_of(rows("b=ssd:60", "default=ssd:30"), ("a", "b")) == []
    assert "c is no tenant" in problems_of(rows("c=ssd:1"), ("a", "b"))[0]
    assert "a is there twice" in problems_of(rows("a=ssd:1", "a=ssd:2"), ("a", "b"))[0]
    (text,) = problems_of(rows("default=ssd:40"), ("a", "b", "c"))
    assert text == "the floors of ssd are 120% together; at most 100%"


@pytest.mark.parametrize("text", ["b=sessions:20-60,ssd:30,reserved:0-50", "default=leases:12.5"])
def test_a_row_reads_as_it_is_written(text: str) -> None:
    assert str(parse_shares(text)) == text


# -- sessions and namespaces -----------------------------------------------------------------------


def test_one_tenant_alone_takes_everything() -> None:
    rig = Rig(sessions_max=20, namespaces_max=30)
    sessions, error = attach_until_refused(rig, "t")
    assert (len(sessions), error.reason) == (20, Reason.TOO_MANY_SESSIONS)


def test_the_sessions_of_one_tenant_leave_the_floor_of_the_other() -> None:
    rig = two_tenants(sessions_max=20)
    sessions, error = attach_until_refused(rig, "a")
    assert (len(sessions), error.reason) == (15, Reason.SHARE_EXCEEDED)
    assert error.details == {"share": "sessions", "tenant": "a"}
    others, error = attach_until_refused(rig, "b", first=100)
    assert (len(others), error.reason) == (5, Reason.TOO_MANY_SESSIONS)
    rig.leave(sessions[0])
    rig.attach(tenant="b", engine_id="late")  # above its floor, what is free is everybody's
    assert rig.state.shares.refused["a", Share.SESSIONS] == 1


def test_a_lost_process_gives_its_place_back_at_once() -> None:
    rig = two_tenants(sessions_max=4)
    sessions, _ = attach_until_refused(rig, "a")
    rig.leave(sessions[0], finished=False)
    rig.core.membership.leave(sessions[0], finished=False)
    rig.attach(tenant="a", engine_id="again")


def test_a_cap_holds_though_nobody_else_is_there() -> None:
    rig = two_tenants("a=sessions:0-10,namespaces:0-50", sessions_max=40, namespaces_max=8)
    sessions, error = attach_until_refused(rig, "a")
    assert (len(sessions), error.reason) == (4, Reason.SHARE_EXCEEDED)


def test_the_namespaces_of_one_tenant_leave_the_floor_of_the_other() -> None:
    rig = two_tenants(namespaces_max=20)
    sessions, error = attach_until_refused(rig, "a")
    assert (len(sessions), error.details["share"]) == (15, "namespaces")
    others, error = attach_until_refused(rig, "b", first=100)
    assert (len(others), error.reason) == (5, Reason.TOO_MANY_NAMESPACES)


def test_the_contracts_of_one_tenant_leave_the_floor_of_the_other() -> None:
    """Some 90 contracts of 45 KiB locked everybody else out."""
    rig = two_tenants()

    def fat(number: int) -> Contract:
        names = ("model", "revision", "layout", "model_dtype", "quantization", "rope_digest")
        return contract(draft_model=f"{number}", **dict.fromkeys(names, "\U0001f525" * 640))

    taken, error = 0, None
    for number in range(MANY):
        try:
            rig.attach(fat(number), tenant="a", engine_id=f"e{number}")
        except KVHearthError as refusal:
            error = refusal
            break
        taken += len(fat(number).to_json())
    assert error is not None
    assert error.details["share"] == "contract_bytes"
    assert 0.7 * CONTRACT_BYTES_MAX < taken <= 0.75 * CONTRACT_BYTES_MAX
    for number in range(20):
        rig.attach(fat(MANY + number), tenant="b", engine_id=f"e{number}")


def test_nobodys_empty_namespaces_go_for_another_tenant_while_within_the_floor() -> None:
    """A forgotten namespace loses its copies on SSD: churn of one tenant's must not cost others."""
    rig = two_tenants(namespaces_max=8)
    (kept,) = [rig.attach(tenant="b")]
    digest = rig.state.namespaces.get(rig.group(kept).namespace).digest
    rig.leave(kept)
    for number in range(40):
        rig.leave(rig.attach(numbered(number), tenant="a", engine_id=f"e{number}"))
    assert rig.state.namespaces.find(digest) is not None
    assert rig.state.shares.accounts[Share.NAMESPACES].used("a") == 6


@pytest.mark.parametrize("share", ["namespaces", "contract_bytes"])
def test_who_is_at_its_cap_makes_nobody_else_lose_a_namespace(share: str) -> None:
    rig = two_tenants(f"a={share}:0-1", f"b={share}:0", namespaces_max=400)
    for number in range(5):
        rig.leave(rig.attach(numbered(100 + number), tenant="b", engine_id=f"e{number}"))
    _, error = attach_until_refused(rig, "a")
    assert error.details["share"] == share
    assert rig.state.shares.accounts[Share.NAMESPACES].used("b") == 5


def test_a_tenant_over_its_floor_makes_room_for_one_below() -> None:
    rig = two_tenants(namespaces_max=8)
    for number in range(6):
        rig.leave(rig.attach(numbered(number), tenant="a", engine_id=f"e{number}"))
    for number in range(6):
        rig.attach(numbered(100 + number), tenant="b", engine_id=f"e{number}")
    used = rig.state.shares.accounts[Share.NAMESPACES]
    assert (used.used("a"), used.used("b")) == (2, 6)


# -- leases and reserved slots ---------------------------------------------------------------------


def test_leases_of_one_tenant_end_at_its_share() -> None:
    rig = two_tenants("a=leases:0-50", sessions_max=4, leases_max=10)
    sessions = [rig.attach(tenant="a", engine_id=f"e{n}") for n in range(2)]
    other = rig.attach(tenant="b")
    rig.put(sessions[0], keys(1, 2))
    rig.put(other, keys(1, 2))
    for number in range(20):
        rig.lookup(sessions[number % 2], keys(1), lease_id=1 + number)
    for named in (keys(1), keys(1, 2)):
        with refused(Reason.TOO_MANY_LEASES):
            rig.lookup(sessions[0], named, lease_id=99)
    for number in range(10):
        assert rig.lookup(other, keys(1, 2), lease_id=1 + number).lease_id


def test_a_share_of_leases_is_told_by_its_name() -> None:
    rig = two_tenants("a=leases:0-25", sessions_max=4, leases_max=10)
    session = rig.attach(tenant="a")
    second = rig.attach(tenant="a", engine_id="second")
    rig.put(session, keys(1, 2))
    for number in range(10):
        rig.lookup(session, keys(1), lease_id=1 + number)
    for named in (keys(1), keys(1, 2)):
        with refused(Reason.SHARE_EXCEEDED):
            rig.lookup(second, named, lease_id=99)
    rig.core.reading.release(session, [3])
    assert rig.lookup(second, keys(1), lease_id=99).lease_id == 99


def reserved_by(rig: Rig, engines: int, count: int) -> list[int]:
    """Let engines of one tenant reserve as much as they get. Return the blocks of each."""
    found = []
    for number in range(engines):
        session = rig.attach(engine_id=f"e{number}")
        try:
            reserved = rig.reserve(session, count)
        except KVHearthError as error:
            if error.reason is not Reason.SHARE_EXCEEDED:
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


def test_a_cap_of_reserved_slots_holds_for_all_engines_together() -> None:
    rig = Rig(16, stock_fraction_max=0.5, held_fraction_max=0.8, shares=rows("t=reserved:0-50"))
    assert sum(reserved_by(rig, 6, 256)) <= 0.4 * 256


# -- changed while serving -------------------------------------------------------------------------


def test_shares_change_while_serving() -> None:
    rig = two_tenants(sessions_max=20)
    sessions, _ = attach_until_refused(rig, "a")
    limits = rig.state.limits
    rig.state.use(dataclasses.replace(limits, shares=rows("a=sessions:0-10"), sessions_max=40))
    rig.check()
    with refused(Reason.SHARE_EXCEEDED):
        rig.attach(tenant="a", engine_id="late")
    for session in sessions[:12]:
        rig.leave(session)
    rig.attach(tenant="a", engine_id="late")
    others, _ = attach_until_refused(rig, "b", first=100)
    assert len(others) == 36
