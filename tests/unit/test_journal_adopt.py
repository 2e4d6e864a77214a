"""The journal's content, and the state that a new daemon adopts from it."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.cases import cases
from support.core_kit import contract, full, key, keys, shards_of, sums_of, window
from support.core_shell import Crash, FakeFile, Shell, fault_hook

from kvhearth.contract import Contract
from kvhearth.model import FLAG_SUMMED, FLAG_VERIFY, I64, U32
from kvhearth_server.core.actions import Bind, SlabSized, Summed
from kvhearth_server.core.adoption import DropCause, adopt
from kvhearth_server.core.commit import CommitItem
from kvhearth_server.core.core import Core
from kvhearth_server.core.lookup import KeysItem
from kvhearth_server.core.namespaces import Namespaces
from kvhearth_server.core.reservations import SlotsItem
from kvhearth_server.core.slot_table import Geometry, SlotTable, State
from kvhearth_server.core.state import Limits
from kvhearth_server.engine.sessions import Session
from kvhearth_server.memory.journal import (
    HEADER_BYTES,
    HEADER_DTYPE,
    READERS,
    STATE_WORDS,
    Journal,
    identity_check,
    journal_bytes,
    mix,
    owner_check,
    read_journal,
    sum_check,
)

SLAB_BYTES = 64 * 1024
GEOMETRY = Geometry.of([("t0", 4 * SLAB_BYTES), ("t1", 2 * SLAB_BYTES)], SLAB_BYTES, 4096)
LIMITS = Limits(held_fraction_max=1.0, stock_fraction_max=1.0)
TWO_SHARDS = contract(full(shards=2), window(20, 9000))


class Desk:
    """A shell with one attached engine."""

    def __init__(self, made: Contract | None = None, tenant: str = "t0") -> None:
        self.shell = Shell(GEOMETRY, LIMITS)
        self.made, self.tenant = made or contract(), tenant
        self.requests = itertools.count(1)
        self.attach()

    def attach(self) -> None:
        """Attaches all ranks; the scheduler is rank 0."""
        attached = [
            self.shell.attach(self.made, self.tenant, rank=rank, scheduler=rank == 0)
            for rank in range(self.made.world_size)
        ]
        self.records = [one.session for one in attached]
        self.session = self.records[0].number

    @property
    def core(self) -> Core:
        """The running engine's core."""
        return self.shell.engine.core

    @property
    def journal(self) -> Journal:
        """The running engine's journal."""
        journal = self.shell.engine.journal
        assert journal is not None
        return journal

    @property
    def headers(self) -> np.ndarray:
        """All headers of the journal."""
        return self.journal.headers

    @property
    def epoch(self) -> int:
        """The epoch of the engine's namespace."""
        state = self.core.state
        return state.namespaces.get(state.group_of(self.session).namespace).epoch

    def take(self, count: int, kv_group: int = 0) -> tuple[I64, U32]:
        """Reserves blocks."""
        reserved = self.shell.engine.call(
            self.core.writing.reserve,
            self.session,
            next(self.requests),
            self.epoch,
            [(kv_group, count)],
        )
        (part,) = reserved.handed
        return part.slots, part.generations

    def put(
        self, named: list[bytes], kv_group: int = 0, *, summed: bool = True, parent: bytes = b""
    ) -> I64:
        """Stores blocks; returns their slots."""
        slots, generations = self.take(len(named), kv_group)
        sums = sums_of(slots) if summed else None
        item = CommitItem(kv_group, named, slots, generations, sums, parent)
        self.shell.engine.call(self.core.writing.commit, self.session, self.epoch, [item])
        return slots

    def restart(self) -> Core:
        """Kills and starts the daemon."""
        core = self.shell.restart().core
        core.check_books()
        return core

    def drain(self, ghosts: list[Session] | None = None) -> None:
        """Marks sessions of before the restart, by default all of them, as certainly ended."""
        for ghost in list(self.shell.engine.sessions) if ghosts is None else ghosts:
            self.shell.engine.drained(ghost)
        self.core.check_books()

    def set_aside(self, slots: I64, generations: U32) -> None:
        """Aborts a reservation to whose slots copies may still be under way."""
        item = SlotsItem(slots.reshape(-1), generations.reshape(-1))
        self.shell.engine.call(self.core.writing.abort, self.session, [item], [], in_doubt=True)

    def remove(self, slot: int) -> None:
        """Removes a block as a bad one."""
        generation = int(self.core.state.table.generation[slot])
        remove = self.core.reading.remove_bad
        self.shell.engine.call(remove, np.array([slot]), np.array([generation]))

    def found(self, kv_group: int = 0, number: int = 1) -> dict[bytes, int]:
        """Key to head slot."""
        for each, group, heads in self.core.state.index.items():
            if (each, group) == (number, kv_group):
                return heads
        return {}

    def dropped(self) -> dict[str, int]:
        """Slots that were not adopted, by reason."""
        snapshot = self.shell.engine.counters.snapshot()
        head = "adoption_dropped{"
        return {name[len(head) : -1]: n for name, n in snapshot.items() if name.startswith(head)}


# -- round trips ---------------------------------------------------------


def test_everything_comes_back() -> None:
    desk = Desk(TWO_SHARDS)
    slots = desk.put(keys(0, 1, 2))
    more = desk.put(keys(3, 4), parent=key(2))
    wide = desk.put(keys(0, 9), kv_group=1)
    before = {group: dict(desk.found(group)) for group in (0, 1)}
    core = desk.restart()
    table = core.state.table
    assert {group: desk.found(group) for group in (0, 1)} == before
    for block in [*slots, *more, *wide]:
        assert shards_of(table, int(block[0])) == block.tolist()
    every = np.concatenate([slots.reshape(-1), more.reshape(-1), wide.reshape(-1)])
    assert (table.state[every] == State.SUMMED).all()
    assert (table.flags[every] == FLAG_VERIFY).all()
    assert table.checksum[every].tobytes() == sums_of(every).tobytes()
    assert desk.dropped() == {}
    desk.attach()
    items = [KeysItem(0, keys(0, 1, 2, 3, 4))]
    found = core.reading.lookup(desk.session, desk.epoch, items, 5)
    assert found.hit_tokens == 80
    assert (found.groups[0].extents["flags"] == FLAG_SUMMED | FLAG_VERIFY).all()


def test_chains_come_back_so_that_leaves_still_go_first() -> None:
    desk = Desk()
    desk.put(keys(0, 1))
    for number in (10, 20, 30):
        desk.put(keys(number, number + 1), parent=key(1))
    chains, heads = desk.core.state.chains, desk.found()
    before = {k: chains.parent_of(h) for k, h in heads.items()}
    core = desk.restart()
    assert {k: core.state.chains.parent_of(h) for k, h in desk.found().items()} == before
    assert core.state.chains.leaf(heads[key(0)]) == heads[key(31)]
    assert core.evict(next(iter(core.state.namespaces)).digest, 2 * 4096) == 6
    assert sorted(desk.found()) == keys(0, 1)


def test_the_cold_end_is_what_came_first() -> None:
    desk = Desk()
    for number in range(6):
        desk.put(keys(number))
    core = desk.restart()
    core.evict(next(iter(core.state.namespaces)).digest, 3 * 4096)
    assert sorted(desk.found()) == keys(3, 4, 5)


def test_what_was_not_summed_is_summed_before_it_is_served() -> None:
    desk = Desk(TWO_SHARDS)
    slots = desk.put(keys(0, 1), summed=False)
    core = desk.restart()
    assert (core.state.table.state[slots] == State.COMMITTED).all()
    (action,) = desk.shell.engine.to_sum
    assert action.slots.tolist() == slots.tolist()
    done = desk.shell.engine.call(
        core.writing.summed, action.slots, action.generations, sums_of(action.slots)
    )
    assert done == 2
    assert not core.state.table.flags[slots].any()
    core = desk.restart()
    assert (core.state.table.state[slots] == State.SUMMED).all()


def test_a_block_of_which_only_one_shard_was_summed_is_summed_again() -> None:
    desk = Desk(TWO_SHARDS)
    slots = desk.put(keys(0), summed=False)
    desk.core.state.table.checksum[slots] = sums_of(slots).view("V16")[..., 0]
    desk.journal.summed(Summed(slots[0, :1]))
    core = desk.restart()
    assert (core.state.table.state[slots] == State.COMMITTED).all()
    assert len(desk.shell.engine.to_sum) == 1


def test_sequences_go_on_where_they_were() -> None:
    desk = Desk()
    desk.put(keys(0, 1, 2))
    before = desk.core.state.sequence
    core = desk.restart()
    assert core.state.sequence == before
    desk.attach()
    slots = desk.put(keys(3))
    assert int(desk.headers["sequence"][slots[0, 0]]) == before + 1


def test_slabs_keep_their_sizes_and_free_slots_stay_free() -> None:
    desk = Desk(TWO_SHARDS)
    desk.put(keys(0))
    desk.put(keys(0), kv_group=1)
    sizes = desk.core.state.table.slab_slot_bytes.tolist()
    core = desk.restart()
    assert core.state.table.slab_slot_bytes.tolist() == sizes
    desk.attach()
    assert len(desk.put(keys(*range(100, 131)))) == 31


def test_both_tenants_come_back_in_their_own_segments() -> None:
    desk = Desk()
    desk.put(keys(0))
    desk.tenant = "t1"
    desk.attach()
    desk.put(keys(0, 1))
    core = desk.restart()
    assert [books.committed for books in core.state.books] == [4096, 8192]
    assert len(desk.found(number=1)) == 1
    assert len(desk.found(number=2)) == 2


# -- slots that may still be written to ------------------------------------------


def test_reserved_slots_wait_until_every_member_is_drained() -> None:
    desk = Desk(TWO_SHARDS)
    slots, _ = desk.take(3)
    core = desk.restart()
    table = core.state.table
    assert (table.state[slots] == State.QUARANTINED).all()
    first, second = [desk.shell.engine.sessions.find(r.number) for r in desk.records]
    assert first is not None
    assert second is not None
    desk.shell.engine.drained(first)
    assert (table.state[slots] == State.QUARANTINED).all()
    core.check_books()
    desk.shell.engine.drained(second)
    assert (table.state[slots] == State.FREE).all()
    core.check_books()
    assert (desk.headers["state"][slots] == STATE_WORDS[State.FREE]).all()


def test_what_was_aside_stays_aside_over_two_restarts() -> None:
    desk = Desk()
    slots, generations = desk.take(2)
    desk.set_aside(slots, generations)
    for _ in range(2):
        core = desk.restart()
        assert (core.state.table.state[slots] == State.QUARANTINED).all()
    desk.drain()
    assert (core.state.table.state[slots] == State.FREE).all()


def test_what_readers_kept_from_reuse_is_free_after_a_restart() -> None:
    desk = Desk()
    (slot,) = desk.put(keys(0)).reshape(-1).tolist()
    desk.core.reading.lookup(desk.session, desk.epoch, [KeysItem(0, keys(0))], 7)
    desk.remove(slot)
    assert desk.core.state.table.state[slot] == State.QUARANTINED
    core = desk.restart()
    assert core.state.table.state[slot] == State.FREE
    assert desk.dropped() == {"readers": 1}


@cases("still_mapped", [True, False])
def test_an_unknown_owner_is_waited_for_as_long_as_anybody_maps_the_arena(
    still_mapped: bool,
) -> None:
    desk = Desk()
    slots, _ = desk.take(2)
    desk.headers["owner"][slots] = 4711
    desk.headers["owner_check"][slots] = owner_check(np.array([4711], np.uint32))
    if not still_mapped:
        desk.shell.arena.segments[0].held.clear()
    core = desk.restart()
    expected = State.QUARANTINED if still_mapped else State.FREE
    assert (core.state.table.state[slots] == expected).all()
    desk.drain()
    assert (core.state.table.state[slots] == State.FREE).all()


@cases("bit", range(32))
@cases("state", [State.RESERVED, State.SUMMED, State.FREE])
def test_a_damaged_state_word_keeps_the_slot_from_use(state: State, bit: int) -> None:
    desk = Desk()
    if state is State.SUMMED:
        slots = desk.put(keys(0))
    else:
        slots, _ = desk.take(1)
        if state is State.FREE:
            desk.shell.engine.leave(desk.records[0], finished=True)
            desk.attach()
    slot = int(slots[0, 0])
    assert desk.headers["state"][slot] == STATE_WORDS[state]
    desk.headers["state"][slot] ^= np.uint32(1 << bit)
    core = desk.restart()
    assert core.state.table.state[slot] == State.QUARANTINED
    assert desk.found() == {}
    desk.drain()
    assert core.state.table.state[slot] == State.FREE
    assert desk.headers["state"][slot] == 0


# -- owners of reserved slots ------------------------------------------

ENGINES = 4
"""Groups 1 to 4: flipping one bit turns some of their numbers into another one's."""


def held_by_the_first(*, quarantined: bool) -> tuple[Desk, int]:
    """Several attached engines, and a slot that the first of them holds."""
    desk = Desk()
    for number in range(1, ENGINES):
        desk.shell.attach(desk.made, desk.tenant, engine_id=f"e{number}")
    slots, generations = desk.take(1)
    if quarantined:
        desk.set_aside(slots, generations)
    return desk, int(slots[0, 0])


@cases("quarantined", [False, True])
@cases("name", ["owner", "owner_check"])
@cases("bit", range(32))
def test_a_slot_with_a_damaged_owner_waits_for_everybody(
    name: str, bit: int, quarantined: bool
) -> None:
    desk, slot = held_by_the_first(quarantined=quarantined)
    desk.headers[name][slot] ^= np.uint32(1 << bit)
    desk.restart()
    assert desk.dropped() == {"owner": 1}
    ghosts = list(desk.shell.engine.sessions)
    assert len(ghosts) == 2 * ENGINES, "each once for its group, once for the slot of nobody"
    # All that were attached have drained, and all but one of those for which the slot waits.
    desk.drain(ghosts[:-1])
    assert desk.core.state.table.state[slot] == State.QUARANTINED
    desk.drain(ghosts[-1:])
    assert desk.core.state.table.state[slot] == State.FREE


def test_a_sound_owner_is_waited_for_alone() -> None:
    desk, slot = held_by_the_first(quarantined=False)
    desk.restart()
    ghosts = list(desk.shell.engine.sessions)
    assert len(ghosts) == ENGINES
    desk.drain([each for each in ghosts if each.number != desk.session])
    assert desk.core.state.table.state[slot] == State.QUARANTINED
    desk.drain([each for each in ghosts if each.number == desk.session])
    assert desk.core.state.table.state[slot] == State.FREE


def test_checks_of_neighbouring_numbers_and_of_a_new_file_differ() -> None:
    numbers = np.append(np.arange(1 << 16, dtype=np.uint32), np.uint32(READERS))
    checks = owner_check(numbers)
    assert checks[0] != 0
    for bit in range(32):
        assert (owner_check(numbers ^ np.uint32(1 << bit)) != checks).all()


def test_the_owner_is_no_part_of_the_identity() -> None:
    """The owner changes while the identity stays: a block is removed under a reader's lease."""
    desk, slot = held_by_the_first(quarantined=False)
    fields = HEADER_DTYPE.fields
    assert fields is not None
    assert fields["owner"][1] == fields["identity_check"][1] - 4
    assert desk.headers["owner"][slot] == desk.records[0].group
    assert desk.headers["owner_check"][slot] == owner_check(desk.headers["owner"][[slot]])[0]


@given(
    st.lists(st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3), min_size=5, max_size=9)
)
def test_few_rows_have_the_check_that_they_have_among_many(rows: list[list[int]]) -> None:
    words = np.array(rows, np.uint64)
    seeds = mix(words, np.uint64(7))
    many = mix(words, seeds)
    for first in range(len(rows)):
        few = slice(first, first + 2)
        assert mix(words[few], np.uint64(7)).tolist() == seeds[few].tolist()
        assert mix(words[few], seeds[few]).tolist() == many[few].tolist()


# -- damage ---------------------------------------------------------


def test_a_flipped_bit_anywhere_in_a_block_header_drops_that_block_only() -> None:
    """Flips every bit except those of the owner, which does not matter for a committed block."""
    desk = Desk(contract(full(shards=2)))
    slots = desk.put(keys(0, 1))
    slot = int(slots[0, 1])
    clean = desk.headers[slot].copy()
    raw = desk.headers.view(np.uint8).reshape(-1, HEADER_BYTES)[slot]
    other = {HEADER_DTYPE.fields[n][1] // 4 for n in ("owner", "owner_check", "state")}  # type: ignore[index]
    bits = [bit for bit in range(8 * HEADER_BYTES) if bit // 32 not in other]
    assert len(bits) == 8 * (HEADER_BYTES - 12)
    for bit in bits:
        raw[bit // 8] ^= 1 << (bit % 8)
        found = read_journal(desk.journal, GEOMETRY, desk.core.state.namespaces)
        (part,) = found.blocks
        assert part.keys == keys(1), f"bit {bit} of {HEADER_DTYPE.names}"
        assert found.causes[DropCause.HEADER] + found.causes[DropCause.CONTRACT] == 1
        assert found.causes[DropCause.INCOMPLETE] == 1
        assert found.sequence <= desk.core.state.sequence, f"bit {bit}"
        desk.headers[slot] = clean


def test_commits_go_on_after_a_sequence_was_damaged() -> None:
    desk = Desk()
    slots = desk.put(keys(0, 1))
    desk.headers["sequence"][slots[0, 0]] |= np.uint64(1 << 63)
    desk.restart()
    desk.attach()
    desk.put(keys(2))
    desk.restart()
    assert sorted(desk.found()) == keys(1, 2)


def test_a_header_in_another_place_than_its_own_segment_is_dropped() -> None:
    desk = Desk()
    slots = desk.put(keys(0))
    desk.tenant = "t1"
    desk.attach()
    other = desk.put(keys(5))
    desk.headers[int(other[0, 0])] = desk.headers[int(slots[0, 0])]
    desk.restart()
    assert sorted(desk.found(number=1)) == keys(0)
    assert desk.found(number=2) == {}
    assert desk.dropped() == {"contract": 1}


def test_blocks_of_an_older_epoch_are_dropped() -> None:
    desk = Desk()
    desk.put(keys(0, 1))
    epoch = desk.shell.engine.call(desk.core.bump_epoch, desk.session, desk.epoch)
    desk.put(keys(1, 2))
    core = desk.restart()
    assert sorted(desk.found()) == keys(1, 2)
    assert desk.dropped() == {"epoch": 1}
    assert next(iter(core.state.namespaces)).epoch == epoch


def test_of_two_blocks_under_one_key_the_newer_is_taken() -> None:
    desk = Desk()
    old = int(desk.put(keys(0))[0, 0])
    header = desk.headers[old].copy()
    desk.remove(old)
    desk.take(1)
    new = int(desk.put(keys(0))[0, 0])
    assert new != old
    desk.headers[old] = header  # as if the daemon had died before it marked the slot
    desk.restart()
    assert desk.found() == {key(0): new}
    assert desk.dropped() == {"duplicate": 1}
    assert desk.core.state.table.state[old] == State.FREE


def test_shards_of_two_commits_do_not_make_a_block() -> None:
    desk = Desk(contract(full(shards=2)))
    first, second = desk.put(keys(0)), desk.put(keys(1))
    # The header of one shard was written to another block's slot.
    desk.headers[first[0, 1]] = desk.headers[second[0, 1]]
    core = desk.restart()
    assert desk.found() == {}
    assert desk.dropped() == {"incomplete": 4}
    assert core.state.books[0].committed == 0


def test_shards_with_different_keys_do_not_make_a_block() -> None:
    desk = Desk(contract(full(shards=2)))
    slots = desk.put(keys(0, 1))
    other = desk.headers[slots[0, 1] : slots[0, 1] + 1].copy()
    other["key"] = np.frombuffer(key(9).ljust(64, b"\0"), "V64")
    other["identity_check"] = identity_check(other)
    other["sum_check"] = sum_check(other)
    desk.headers[slots[0, 1]] = other[0]
    desk.restart()
    assert sorted(desk.found()) == keys(1)


def damaged_slab(bit: int) -> Desk:
    """A slab with blocks and reserved slots whose word has a flipped bit."""
    desk = Desk()
    desk.put(keys(*range(12)), summed=False)
    desk.take(4)
    desk.put(keys(100))
    desk.journal.slab_words[0] ^= np.uint64(1 << bit)
    return desk


def assert_kept_from_use(desk: Desk) -> None:
    table, rows = desk.core.state.table, desk.core.state.pools[0].slots_in(0)
    assert sorted(desk.found()) == keys(100)
    assert table.total_bytes(np.arange(rows.start, rows.stop)) == SLAB_BYTES
    assert (table.state[rows] == State.QUARANTINED).all()


@cases("bit", range(64))
def test_a_damaged_slab_word_keeps_the_slab_from_use(bit: int) -> None:
    desk = damaged_slab(bit)
    desk.restart()
    assert_kept_from_use(desk)


def test_a_damaged_slab_is_used_again_when_nobody_writes() -> None:
    desk = damaged_slab(bit=3)
    for _ in range(2):
        desk.restart()
    assert_kept_from_use(desk)
    desk.drain()
    before = desk.found()[key(100)]
    desk.attach()
    desk.put(keys(*range(200, 263)))
    desk.restart()
    assert sorted(desk.found()) == sorted(keys(100, *range(200, 263)))
    assert desk.found()[key(100)] == before


# -- torn in the middle ---------------------------------------------------------


class Fuse:
    """Kills the daemon at the n-th fault point that it passes."""

    def __init__(self, points: int) -> None:
        self.points = points
        self.blown = False

    def __call__(self, name: str) -> None:
        self.blown = self.points == 0
        if self.blown:
            raise Crash(name)
        self.points -= 1


@cases("summed", [True, False])
@cases("points", range(6))
def test_a_daemon_that_dies_in_a_commit(points: int, summed: bool) -> None:
    desk = Desk(contract(full(shards=2)))
    for old in desk.put(keys(50, 51, 52, 53, 54, 55)).reshape(-1).tolist():
        desk.remove(old)  # its header stays
    desk.put(keys(0, 1))
    slots, generations = desk.take(4)
    sums = sums_of(slots) if summed else None
    # One key is present already, so that the commit also frees slots.
    item = CommitItem(0, keys(1, 2, 3, 4), slots, generations, sums, b"")
    fuse = Fuse(points)
    with contextlib.suppress(Crash), fault_hook(fuse):
        desk.shell.engine.call(desk.core.writing.commit, desk.session, desk.epoch, [item])
    core = desk.restart()
    found = desk.found()
    assert set(keys(0, 1)) <= set(found) <= set(keys(0, 1, 2, 3, 4))
    assert fuse.blown or set(found) == set(keys(0, 1, 2, 3, 4))
    table = core.state.table
    kept = {slot for head in found.values() for slot in shards_of(table, head)}
    for slot in slots.reshape(-1).tolist():
        # A slot belongs to a block, may still be written by the dead daemon's clients, or is free.
        expected = (State.QUARANTINED, State.FREE)
        assert slot in kept or table.state[slot] in expected
    for head in found.values():
        assert len(shards_of(table, head)) == 2


@cases("points", range(4))
def test_a_daemon_that_dies_while_it_writes_checksums(points: int) -> None:
    desk = Desk(contract(full(shards=2)))
    slots = desk.put(keys(0, 1), summed=False)
    (action,) = desk.shell.engine.to_sum
    fuse = Fuse(points)
    with contextlib.suppress(Crash), fault_hook(fuse):
        desk.shell.engine.call(
            desk.core.writing.summed, action.slots, action.generations, sums_of(slots)
        )
    core = desk.restart()
    assert sorted(desk.found()) == keys(0, 1)
    done = core.state.table.state[slots] == State.SUMMED
    assert done.all() or not done.any()
    assert done.all() or fuse.blown
    if done.all():
        assert core.state.table.checksum[slots].tobytes() == sums_of(slots).tobytes()


@cases("points", range(5))
def test_a_daemon_that_dies_while_it_keeps_a_slab_from_use(points: int) -> None:
    desk = damaged_slab(bit=3)
    with contextlib.suppress(Crash), fault_hook(Fuse(points)):
        desk.restart()
    desk.restart()
    assert_kept_from_use(desk)


@cases("points", range(8))
def test_a_daemon_that_dies_while_it_adopts(points: int) -> None:
    desk = Desk(contract(full(shards=2)))
    desk.put(keys(0, 1))
    slots = desk.put(keys(2), summed=False)
    held, _ = desk.take(2)
    desk.headers["key_bytes"][slots[0, 0]] = 1
    desk.take(8)
    desk.journal.slab_words[1] = 77
    try:
        with fault_hook(Fuse(points)):
            desk.restart()
    except Crash:
        desk.restart()
    assert sorted(desk.found()) == keys(0, 1)
    table = desk.core.state.table
    assert (table.state[held] == State.QUARANTINED).all()
    assert table.slab_slot_bytes[1] == SLAB_BYTES
    assert table.state[table.geometry.stride] == State.QUARANTINED


# -- many slots --------------------------------------------------------


@cases("kept_in", [1, 2])
def test_many_slots(kept_in: int) -> None:
    """A million slots in ``lab/heart.py`` have a bound in time."""
    slab_bytes, count = 1 << 20, 1 << 14
    geometry = Geometry.of([("t", count * 4096)], slab_bytes, 4096)
    namespaces = Namespaces(8)
    number = namespaces.obtain("t", contract()).number
    table = SlotTable(geometry, np.zeros(geometry.slot_count, np.uint32))
    journal = Journal(FakeFile(journal_bytes(geometry, 1)), geometry, table)  # type: ignore[arg-type]
    for slab in range(geometry.slab_count):
        journal.slab(SlabSized(slab, 4096))
    noise = np.random.default_rng(1).bytes(32 * count)
    slots = np.arange(0, count, kept_in, dtype=np.int64)
    for part in np.array_split(slots, 64):
        named = [noise[32 * slot : 32 * slot + 32] for slot in part.tolist()]
        parents = np.concatenate([[-1], part[:-1]])
        journal.bind(
            Bind(part[:, None], part + 1, parents, 4096, named, number, 0, 1, State.SUMMED)
        )
    core = Core(geometry, Limits())
    core.state.namespaces = namespaces
    found = read_journal(journal, geometry, namespaces)
    offered: list[I64] = []
    core.state.writeback_queue.watcher = SimpleNamespace(offered=offered.append)  # type: ignore[assignment]
    adopt(core.state, found, {})
    assert np.concatenate(offered).tolist() == slots.tolist(), "they are to be saved, oldest first"
    assert len(core.state.index) == len(slots)
    assert not found.causes
    chains = core.state.chains
    assert chains.parent_of(int(slots[5])) == int(slots[4])
    head = int(slots[-1])
    assert core.state.index.key(head) == noise[32 * head : 32 * head + 32]
    core.state.take_actions()
    assert core.evictor.make_room(0, 4096, count - len(slots) + 3) == count - len(slots) + 3
