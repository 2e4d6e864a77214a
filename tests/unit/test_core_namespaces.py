"""Engines that differ in anything that changes KV bytes never share blocks: miss or rejection."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.core_kit import Rig, contract, full, items, keys, mamba, refused, window

from kvhearth.contract import Contract, namespace_digest
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core import namespaces as namespaces_module
from kvhearth_server.core.namespaces import Namespaces
from kvhearth_server.core.reservations import SlotsItem

PAGE = 4096
BASE = contract(full(), window(20), tensor_parallel=2)
CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model": "m2"},
    "revision": {"revision": "r2"},
    "quantization": {"quantization": "awq"},
    "model dtype": {"model_dtype": "float16"},
    "kv dtype": {"kv_dtype": "int8"},
    "layout": {"layout": "NLHC"},
    "hash algorithm": {"hash_algorithm": "xxh3"},
    "hash seed": {"hash_seed": "1"},
    "pipeline parallel": {"tensor_parallel": 1, "pipeline_parallel": 2},
    "tensor parallel": {"tensor_parallel": 4},
    "context parallel": {"decode_context_parallel": 2},
    "rope": {"rope_digest": "yarn"},
    "draft": {"draft_model": "d"},
    "block size": {"groups": (full(block_tokens=32), window(20))},
    "page size": {"groups": (full(PAGE - 1), window(20))},
    "window": {"groups": (full(), window(21))},
    "kind": {"groups": (full(), mamba())},
    "shards": {"groups": (full(shards=2), window(20))},
    "layers": {"groups": (dataclasses.replace(full(), layers=2), window(20))},
    "order of groups": {"groups": (window(20), full())},
    "one group less": {"groups": (full(),)},
    "one group more": {"groups": (full(), window(20), full())},
}


def changed(name: str) -> Contract:
    """Returns the base contract with one change."""
    return dataclasses.replace(BASE, **CHANGES[name])


def test_a_rank_under_another_contract_is_refused_by_the_fields_name() -> None:
    rig = Rig(8)
    rig.join(BASE)
    for name, change in CHANGES.items():
        made = changed(name)
        with pytest.raises(KVHearthError) as caught:
            rig.join(made, scheduler=False, rank=1 % made.world_size)
        assert caught.value.reason is Reason.CONTRACT_MISMATCH, name
        fields = {field.partition("[")[0] for field in caught.value.details["fields"].split(",")}
        assert fields == set(change), name


def test_the_same_contract_shares_across_engines_and_restarts_of_them() -> None:
    rig = Rig(8)
    session = rig.attach(BASE)
    rig.put(session, keys(0, 1))
    other = rig.attach(Contract.from_json(BASE.to_json()), engine_id="other")
    assert rig.lookup(other, keys(0, 1)).hit_tokens == 32
    rig.leave(session)
    again = rig.attach(BASE)
    assert rig.group(again).incarnation == 2
    assert rig.lookup(again, keys(0, 1)).hit_tokens == 32


def test_tenants_never_meet_even_under_one_contract() -> None:
    rig = Rig(4, tenants=("t", "u"))
    mine = rig.attach(BASE)
    slots, generations = rig.take(mine, 1)
    rig.commit(mine, rig.item(keys(0), slots, generations))
    theirs = rig.attach(BASE, tenant="u")
    assert rig.lookup(theirs, keys(0), lease_id=1).hit_tokens == 0
    named = SlotsItem(slots.reshape(-1), generations.reshape(-1))
    assert rig.core.reading.suspects(theirs, [named]) == []
    (suspects,) = rig.core.reading.suspects(mine, [named])
    assert suspects.tolist() == slots.tolist()
    assert rig.group(theirs).namespace != rig.group(mine).namespace
    assert rig.group(theirs).segment != rig.group(mine).segment
    rig.put(theirs, keys(0))
    extents = [
        rig.lookup(session, keys(0), lease_id=2).groups[0].extents for session in (mine, theirs)
    ]
    assert [int(one["segment"][0]) for one in extents] == [0, 1]


# -- epochs ----------------------------------------------------------------------------------------


def test_an_epoch_makes_older_blocks_invisible_and_refuses_old_callers() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0, 1))
    slots, generations = rig.take(session, 1)
    assert rig.core.bump_epoch(session, 1) == 2
    found = rig.lookup(session, keys(0, 1), lease_id=1)
    assert (found.hit_tokens, found.lease_id) == (0, 0)
    assert not found.groups[0].present.any()
    late = rig.item(keys(5), slots, generations)
    for call in (
        lambda: rig.core.reading.lookup(session, 1, items(keys(0)), 0),
        lambda: rig.core.reading.touch(session, 1, items(keys(0))),
        lambda: rig.core.writing.reserve(session, 99, 1, [(0, 1)]),
        lambda: rig.core.writing.commit(session, 1, [late]),
        lambda: rig.core.pinning.pin(session, 1, 1, items(keys(0)), ttl_s=1.0, now=0.0),
        lambda: rig.core.bump_epoch(session, 1),
    ):
        with pytest.raises(KVHearthError) as caught:
            call()
        assert caught.value.reason is Reason.STALE_EPOCH
        assert caught.value.details == {"epoch": "2"}
    rig.check()


def test_an_epoch_may_be_bumped_only_by_who_is_alone() -> None:
    rig = Rig()
    one = rig.attach(engine_id="one")
    other = rig.attach(engine_id="other")
    with pytest.raises(KVHearthError) as caught:
        rig.core.bump_epoch(one, 1, only_alone=True)
    assert caught.value.reason is Reason.NAMESPACE_SHARED
    rig.leave(other)
    assert rig.core.bump_epoch(one, 1, only_alone=True) == 2
    rig.check()


# -- the catalogue ---------------------------------------------------------------------------------


def test_the_digest_binds_tenant_and_contract() -> None:
    digests = {namespace_digest("t", changed(name)) for name in CHANGES}
    digests |= {namespace_digest(tenant, BASE) for tenant in ("t", "u", "")}
    assert len(digests) == len(CHANGES) + 3
    assert all(len(digest) == 32 for digest in digests)


def test_numbers_come_again_only_when_all_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces_module, "NUMBER_MAX", 5)
    spaces = Namespaces(count_max=4)
    busy = spaces.obtain("t", contract(revision="busy"))
    busy.blocks = 1
    for turn in range(20):
        made = spaces.obtain("t", contract(revision=f"r{turn}"))
        assert 1 <= made.number <= 5
        assert made.number != busy.number
        assert spaces.get(made.number) is made
        assert spaces.find(made.digest) is made


def test_a_forgotten_namespace_comes_back_without_its_old_epoch() -> None:
    """Otherwise an engine that kept running with old weights would find its epoch current again."""
    spaces = Namespaces(count_max=1)
    made = spaces.obtain("t", BASE)
    for expected in (1, 2):
        spaces.bump(made, expected)
    spaces.obtain("t", contract(revision="other"))
    assert spaces.obtain("t", BASE).epoch > 3


def test_the_policies_of_a_forgotten_namespace_go_with_it() -> None:
    rig = Rig(namespaces_max=2)
    for number in range(12):
        made = contract(full(), full(9000), revision=f"r{number}")
        session = rig.attach(made, engine_id=f"e{number}")
        for kv_group in (0, 1):
            rig.put(session, keys(number), kv_group=kv_group)
        assert len(rig.state.policies) <= 2 * 2
        space = rig.space(session)
        with pytest.raises(ValueError, match="have 2 members"):
            rig.state.policies.drop(space.number)
        rig.core.evict(space.digest, 0)
        rig.leave(session)
    assert len(rig.state.namespaces) == 2


def test_a_restored_namespace_is_found_and_its_number_passed_over() -> None:
    spaces = Namespaces(count_max=8)
    made = spaces.restore(7, "t", BASE, 3, 0, "", "")
    assert spaces.obtain("t", BASE) is made
    assert (made.number, made.epoch) == (7, 3)
    assert spaces.obtain("t", contract(revision="other")).number == 8


def test_explain_puts_the_nearest_first() -> None:
    spaces = Namespaces(count_max=16)
    for name in ("draft", "pipeline parallel", "one group more"):
        spaces.obtain("t", changed(name))
    spaces.obtain("u", BASE)
    pairs = spaces.explain("t", BASE)
    assert [len(differing) for _, differing in pairs] == sorted(len(d) for _, d in pairs)
    assert pairs[0][1] == [("draft_model", "", "d")]
    assert all(space.tenant == "t" for space, _ in pairs)
    assert len(spaces.explain("t", BASE, count_max=2)) == 2


# -- private runs ----------------------------------------------------------------------------------


def ended_run(rig: Rig, number: int, blocks: int, page_bytes: int = PAGE) -> Contract:
    """Let a private run store blocks and end."""
    made = contract(full(page_bytes), revision=f"private:run-{number}")
    session = rig.attach(made, engine_id=f"run-{number}")
    rig.put(session, keys(*range(1000 * number, 1000 * number + blocks)))
    rig.leave(session)
    return made


def names(rig: Rig) -> list[str]:
    """Return the revisions of all namespaces, in the order of their numbers."""
    return [space.contract.revision for space in rig.state.namespaces]


@pytest.mark.parametrize("page_bytes", [PAGE, 2 * PAGE])
def test_blocks_of_an_ended_private_run_are_the_first_victims(page_bytes: int) -> None:
    rig = Rig(4)
    session = rig.attach()
    rig.put(session, keys(*range(16)))
    ended_run(rig, 1, 32 * PAGE // page_bytes, page_bytes)
    assert names(rig) == ["r", "private:run-1"]
    for number in range(100, 148):
        rig.put(session, keys(number))
    assert all(rig.present(session, keys(*range(16), *range(100, 148))))
    assert names(rig) == ["r"], "its entry goes with its blocks"


def test_a_private_run_whose_sessions_may_still_write_has_not_ended() -> None:
    rig = Rig(4)
    made = contract(revision="private:run")
    session = rig.attach(made)
    rig.put(session, keys(1, 2))
    rig.take(session, 1)
    rig.leave(session, finished=False)
    assert not rig.state.namespaces.ended
    rig.core.membership.drained(session)
    assert len(rig.state.namespaces.ended) == 1


def test_a_private_run_that_returns_has_its_blocks_again() -> None:
    rig = Rig(4)
    other = rig.attach(engine_id="other")
    rig.put(other, keys(*range(16)))
    made = ended_run(rig, 1, 32)
    session = rig.attach(made, engine_id="run-1")
    assert all(rig.present(session, keys(*range(1000, 1032))))
    rig.put(other, keys(*range(100, 124)))
    assert all(rig.present(session, keys(*range(1000, 1032)))), "it is as warm as any"
    assert not all(rig.present(other, keys(*range(16))))


def test_a_full_table_gives_up_the_run_that_ended_first() -> None:
    rig = Rig(4, namespaces_max=3)
    session = rig.attach()
    rig.put(session, keys(1))
    for number in range(1, 12):
        ended_run(rig, number, 2)
    assert names(rig) == ["r", "private:run-10", "private:run-11"]
    assert rig.present(session, keys(1)) == [True]
    for number in (1, 2):
        rig.attach(contract(revision=f"new-{number}"), engine_id=f"new-{number}")
    with refused(Reason.TOO_MANY_NAMESPACES):
        rig.attach(contract(revision="new-3"), engine_id="new-3")


def test_what_makes_a_contract_private() -> None:
    named = {"revision": "private:1", "hash_seed": "private:1", "draft_model": "eagle:m:private:1"}
    for field, value in named.items():
        assert dataclasses.replace(BASE, **{field: value}).private
    assert not BASE.private
