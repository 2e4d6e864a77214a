"""Contract tests of ``tiers.base.Tier``, run against every tier over every disk interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drive import Drive
from support.fake_tier import FakeTier
from support.mover_double import ScriptedMover
from support.tiers import (
    LENGTH,
    NAMESPACE,
    SEGMENT_BYTES,
    Arena,
    Desk,
    family,
    key_of,
    keys_of,
    settings,
    spoil,
)

from kvhearth_server.tiers.base import (
    ADDRESS_DTYPE,
    BlockSpec,
    Corrupt,
    Done,
    Failed,
    Identity,
    LoadBatch,
    Missing,
    StoreBatch,
    Throttled,
    Tier,
)
from kvhearth_server.tiers.chain import TierChain
from kvhearth_server.tiers.remote.tier import RemoteTier
from kvhearth_server.tiers.ssd.disk.probe import NAMES, probe
from kvhearth_server.tiers.ssd.tier import SsdTier

KINDS = ["fake", "drives", "chain", "remote", *NAMES]
"""``drives`` and ``chain`` are driven by the test; ``NAMES`` use the machine's drive."""


def make_ssd(kind: str, folder: Path, arena: Arena, drive: Drive | None) -> SsdTier:
    """Make a tier of the given kind."""
    if kind in NAMES and not (verdict := probe(kind)).works:
        pytest.skip(f"{kind}: {verdict.reason}")
    outside = {"interface": kind} if drive is None else {"sum_threads": 0, "flush": True}
    names = ["one"] if kind in NAMES else ["one", "two"]
    found = settings(*(folder / name for name in names), **outside)
    environment = None if drive is None else drive.environment()
    return SsdTier(found, [arena.bytes], offers=kind == "chain", environment=environment)


def make_remote(arena: Arena) -> RemoteTier:
    """Make a remote tier over a scripted mover; only the newest epoch has a name."""
    newest: dict[tuple[bytes, int], int] = {}

    def identify(of: BlockSpec) -> Identity | None:
        place = (of.namespace, of.group)
        newest[place] = max(of.epoch, newest.get(place, 0))
        if of.epoch < newest[place]:
            return None
        return Identity("tests", of.namespace.hex(), str(of.epoch))

    tier = RemoteTier(ScriptedMover([arena.bytes]), [arena.bytes], "scripted://", bytes(16))
    tier.use_identities(identify)
    return tier


def make(kind: str, folder: Path, arena: Arena, drive: Drive | None) -> Tier:
    """Make a tier of the given kind."""
    if kind == "remote":
        return make_remote(arena)
    if kind == "fake":
        return FakeTier([arena.bytes], 8 * SEGMENT_BYTES)
    ssd = make_ssd(kind, folder, arena, drive)
    return TierChain([ssd, make_remote(arena)]) if kind == "chain" else ssd


@pytest.fixture(params=KINDS)
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    arena, drive = Arena(), Drive() if request.param in ("drives", "chain") else None
    tier = make(request.param, tmp_path, arena, drive)
    desk = Desk(tier, arena, drive)
    # Stores are refused until the first segment file exists.
    other = family(namespace=bytes(32), length=1)
    desk.store_all([0], other)
    assert tier.shared or tier.forget(other.namespace, 0, [key_of(0)]) == 1
    yield desk
    desk.drain()
    desk.events += tier.poll()
    if isinstance(tier, SsdTier):
        tier.check()
    tier.close()


def test_what_was_stored_is_loaded(desk: Desk) -> None:
    assert desk.store(range(8)).rows(Done).tolist() == list(range(8))
    assert desk.load(range(8)).rows(Done).tolist() == list(range(8))


def flip(tier: Tier, key: bytes) -> None:
    """Flip a bit of a stored block."""
    if isinstance(tier, TierChain):
        flip(tier._tiers[0], key)
    elif isinstance(tier, SsdTier):
        assert sum(spoil(place.path, key) for place in tier.settings.places) == 1
    elif isinstance(tier, RemoteTier):
        assert isinstance(tier.mover, ScriptedMover)
        [value] = [value for name, value in tier.mover.values.items() if name[1] == key]
        value.content = bytes([value.content[0] ^ 1]) + value.content[1:]
    else:
        assert isinstance(tier, FakeTier)
        tier.damage(key)


def test_a_flipped_bit_is_never_served(desk: Desk) -> None:
    desk.store_all(range(4))
    flip(desk.tier, key_of(2))
    done = desk.load(range(4))
    assert done.rows(Done).tolist() == [0, 1, 3]
    assert done.rows(Corrupt).tolist() == [2]


def test_what_was_not_stored_is_missing(desk: Desk) -> None:
    desk.store_all(range(4))
    done = desk.load([0, 77, 2, 78])
    found = [0] if desk.tier.shared else [0, 2]  # a shared tier's load ends at its first miss
    assert done.rows(Done).tolist() == found
    assert done.rows(Missing).tolist() == sorted({0, 1, 2, 3} - set(found))


def test_every_row_has_exactly_one_outcome(desk: Desk) -> None:
    desk.store_all(range(10))
    rows = np.concatenate([rows for _, rows in desk.load(range(5, 25)).parts])
    assert sorted(rows.tolist()) == list(range(20))


def test_lengths_and_shards(desk: Desk) -> None:
    shapes = [(1, 1), (4096, 1), (4097, 2), (16384, 1), (LENGTH, 5), (100, 20)]
    for group, (length, shards) in enumerate(shapes):
        of = family(group=group, length=length, shards=shards)
        desk.store_all(range(3), of)
        assert len(desk.load(range(3), of).rows(Done)) == 3, of


def test_keys_of_any_width(desk: Desk) -> None:
    for width in (1, 16, 64):
        of = family(group=width)
        batch = desk.store_batch(range(3), of)
        keys = [bytes([row + 1]) * width for row in range(3)]
        store = StoreBatch(of, keys, batch.places, batch.checksums, batch.sequences, batch.parents)
        assert len(desk.wait(desk.tier.submit_store(store)).rows(Done)) == 3
        load = desk.load_batch(range(3), of)
        done = desk.wait(desk.tier.submit_load(LoadBatch(of, keys, load.places)))
        assert len(done.rows(Done)) == 3


def test_families_do_not_mix(desk: Desk) -> None:
    desk.store_all(range(2))
    for other in (
        family(namespace=bytes(32)),
        family(group=1),
        family(epoch=2),
        family(length=LENGTH - 1),
        family(shards=2),
    ):
        assert len(desk.load(range(2), other).rows(Missing)) == 2, other
        there = desk.tier.look_up(other, keys_of(range(2))).present
        assert desk.tier.shared or not there.any()


def test_a_younger_epoch_takes_the_key(desk: Desk) -> None:
    desk.store_all([1])
    desk.store_all([1], family(epoch=2))
    assert len(desk.load([1]).rows(Missing)) == 1
    assert len(desk.load([1], family(epoch=2)).rows(Done)) == 1


def test_facts(desk: Desk) -> None:
    of = family(shards=2)
    batch = desk.store_batch(range(3), of)
    desk.store_all(range(3), of)
    facts = desk.tier.look_up(of, [key_of(2), key_of(9), key_of(0)])
    if desk.tier.shared:  # it may have any; its facts come with the bytes
        assert facts.present.all()
        done = desk.load([2, 0, 9], of)
        assert done.facts is not None
        assert done.facts.present.tolist() == [True, True, False]
        assert (done.facts.checksums[0] == batch.checksums[2]).all()
        assert done.parent_keys == [b"", b"", b""]
        return
    assert facts.present.tolist() == [True, False, True]
    assert (facts.checksums[0] == batch.checksums[2]).all()
    assert facts.sequences.tolist() == [3, 0, 1]
    assert facts.parents.tolist() == [2, 0, 0]


def test_storing_again_is_done_and_costs_nothing(desk: Desk) -> None:
    desk.store_all(range(4))
    before = desk.tier.counts["stored_bytes"]
    assert len(desk.store(range(4)).rows(Done)) == 4
    assert desk.tier.counts["stored_bytes"] == before
    assert desk.tier.counts["stores_present"] == 4


def test_a_slot_that_is_not_what_its_checksum_says_is_not_stored(desk: Desk) -> None:
    batch = desk.store_batch(range(4), family())
    desk.arena.view(2, LENGTH)[77] ^= 1
    done = desk.wait(desk.tier.submit_store(batch))
    assert done.rows(Corrupt).tolist() == [2]
    assert [o for o, _ in done.parts if isinstance(o, Corrupt)] == [Corrupt("source")]
    missing = [2, 3] if desk.tier.shared else [2]
    assert desk.load(range(4)).rows(Missing).tolist() == missing


def test_forget(desk: Desk) -> None:
    desk.store_all(range(4))
    if desk.tier.shared:  # other daemons use the blocks, too
        assert desk.tier.forget(NAMESPACE, 0, keys_of([1, 3, 9])) == 0
        assert len(desk.load(range(4)).rows(Done)) == 4
        return
    assert desk.tier.forget(NAMESPACE, 0, keys_of([1, 3, 9])) == 2
    assert desk.load(range(4)).rows(Missing).tolist() == [1, 3]
    desk.store_all([1])
    assert len(desk.load([1]).rows(Done)) == 1


def test_room_is_made_by_evicting_and_evictions_are_told(desk: Desk) -> None:
    if desk.tier.shared:
        pytest.skip("a shared tier makes room by itself, and tells nobody")
    desk.store_all(range(600))
    reported = {key for each in desk.tier.take_evicted() for key in each.keys}
    present = desk.tier.look_up(family(), keys_of(range(600))).present
    assert 0 < present.sum() < 600
    gone = {key_of(number) for number in np.flatnonzero(~present).tolist()}
    assert gone == reported
    assert desk.tier.take_evicted() == []
    found = np.flatnonzero(present).tolist()
    for start in range(0, len(found), 64):
        part = found[start : start + 64]
        assert len(desk.load(part).rows(Done)) == len(part)


def test_a_namespace_is_forgotten_in_portions(desk: Desk) -> None:
    other = family(namespace=bytes(32))
    desk.store_all(range(10))
    desk.store_all(range(4), other)
    if desk.tier.shared:
        assert desk.tier.forget_namespace(NAMESPACE, 4) is None
        return
    gone: list[bytes] = []
    while (each := desk.tier.forget_namespace(NAMESPACE, 4)) is not None:
        assert (each.namespace, each.group, each.cause) == (NAMESPACE, 0, "asked")
        assert len(each.keys) <= 4
        gone += each.keys
    assert sorted(gone) == sorted(keys_of(range(10)))
    assert not desk.tier.look_up(family(), keys_of(range(10))).present.any()
    assert desk.tier.look_up(other, keys_of(range(4))).present.all()


def test_what_is_there_all_the_while_is_listed(desk: Desk) -> None:
    desk.store_all(range(40))
    desk.store_all(range(40, 44), family(namespace=bytes(32)))
    desk.store_all(range(44, 48), family(group=1))
    listed, place, turn = list[bytes](), 0, 0
    while place >= 0:
        some, place = desk.tier.list_keys(NAMESPACE, 0, place, 3)
        listed += some
        desk.tier.forget(NAMESPACE, 0, keys_of([20 + turn]))
        desk.store_all([50 + turn])
        turn += 1
    if desk.tier.shared:
        assert not listed
        return
    assert len(set(listed)) == len(listed)
    stays = set(keys_of([*range(20), *range(20 + turn, 40)]))
    assert stays <= set(listed) <= set(keys_of([*range(40), *range(50, 50 + turn)]))


def test_many_batches_at_once(desk: Desk) -> None:
    of = family(length=4096)
    batch = desk.store_batch(range(64), of)
    tickets = []
    for start in range(0, 64, 8):
        span = slice(start, start + 8)
        part = StoreBatch(
            of,
            batch.keys[span],
            batch.places[span],
            batch.checksums[span],
            batch.sequences[span],
            batch.parents[span],
        )
        tickets.append(desk.tier.submit_store(part))
    for ticket in tickets:
        desk.wait(ticket)
    desk.store_all(range(64), of)
    assert len(desk.load(range(64), of).rows(Done)) == 64


def test_the_event_descriptor_announces_completions(desk: Desk) -> None:
    desk.store_all(range(2))
    ticket = desk.tier.submit_load(desk.load_batch(range(2), family()))
    done = []
    while not done:
        assert desk.announced(), "never announced"
        done = [each for each in desk.tier.poll() if each.final]
    assert [each.ticket for each in done] == [ticket]


def test_a_cancelled_load_still_ends(desk: Desk) -> None:
    desk.store_all(range(32))
    ticket = desk.tier.submit_load(desk.load_batch(range(32), family()))
    assert not isinstance(ticket, Throttled)
    desk.tier.cancel(ticket)
    done = desk.wait(ticket)
    failed = [o for o, _ in done.parts if isinstance(o, Failed)]
    assert failed in ([], [Failed("cancelled")])
    assert len(done.rows(Done)) + len(done.rows(Failed)) == 32
    assert len(desk.load(range(32)).rows(Done)) == 32


def test_rules_for_callers(desk: Desk) -> None:
    of = family()
    good = desk.load_batch(range(2), of)
    places = good.places.copy()
    places["offset"][1] += 512
    with pytest.raises(ValueError, match="multiple"):
        desk.tier.submit_load(LoadBatch(of, good.keys, places))
    places["offset"][1] = len(desk.arena.bytes) - 4096
    with pytest.raises(ValueError, match="room"):
        desk.tier.submit_load(LoadBatch(of, good.keys, places))
    places["offset"][1] = 1 << 62
    with pytest.raises(ValueError, match="room"):
        desk.tier.submit_load(LoadBatch(of, good.keys, places))
    places = good.places.copy()
    places["region"][0] = 9
    with pytest.raises(ValueError, match="regions"):
        desk.tier.submit_load(LoadBatch(of, good.keys, places))
    many = desk.tier.batch_blocks_max + 1
    with pytest.raises(ValueError, match="at most"):
        desk.tier.submit_load(LoadBatch(of, [b"k"] * many, np.zeros((many, 1), ADDRESS_DTYPE)))
    with pytest.raises(ValueError, match="key"):
        LoadBatch(of, [b"", b"k"], good.places)
    with pytest.raises(ValueError, match="namespace"):
        family(namespace=b"short")


def test_nothing_is_taken_after_draining(desk: Desk) -> None:
    desk.store_all(range(2))
    desk.drain()
    assert desk.tier.submit_store(desk.store_batch([5], family())) == Throttled("draining")
    assert desk.tier.submit_load(desk.load_batch([1], family())) == Throttled("draining")
