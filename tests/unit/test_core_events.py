"""Events: numbered without gaps, in the order of the changes, in a bounded window."""

from __future__ import annotations

import pytest
from support.core_kit import Rig, contract, full, key, keys, sums_of

from kvhearth_server.core.actions import Event, EventKind, EventLog

STORED, REMOVED = EventKind.STORED, EventKind.REMOVED


def add(log: EventLog, count: int, keys_each: int = 1) -> None:
    """Appends ``count`` events of ``keys_each`` keys each."""
    for number in range(count):
        log.append(STORED, 1, 0, keys(*range(number, number + keys_each)))


def reported(rig: Rig, cursor: int) -> list[tuple[EventKind, list[int], str]]:
    """Returns the events since the cursor: kind, keys as numbers, cause or tier."""
    return [
        (event.kind, [int.from_bytes(each) for each in event.keys], event.cause or event.tier)
        for event in rig.state.events.read(cursor).events
    ]


def test_numbers_have_no_gaps_and_go_on_while_nobody_reads() -> None:
    log = EventLog()
    assert log.next_sequence == 1
    add(log, 3)
    cursor = log.subscribe()
    assert cursor == 4
    add(log, 5)
    batch = log.read(cursor)
    assert [event.sequence for event in batch.events] == [4, 5, 6, 7, 8]
    assert (batch.next_sequence, batch.lost) == (9, 0)
    assert log.read(batch.next_sequence).events == ()
    log.unsubscribe()
    add(log, 2)
    assert log.next_sequence == 11


def test_a_reader_takes_part_by_part() -> None:
    log = EventLog()
    cursor = log.subscribe()
    add(log, 10)
    seen: list[Event] = []
    while (batch := log.read(cursor, 3)).events:
        seen.extend(batch.events)
        assert len(batch.events) <= 3
        cursor = batch.next_sequence
    assert [event.sequence for event in seen] == list(range(1, 11))
    assert [event.keys[0] for event in seen] == keys(*range(10))


def test_a_reader_that_fell_out_is_told_how_much_it_lost() -> None:
    log = EventLog(keys_max=6)
    cursor = log.subscribe()
    add(log, 10, keys_each=2)
    batch = log.read(cursor)
    assert batch.lost == 7
    assert [event.sequence for event in batch.events] == [8, 9, 10]
    assert log.read(batch.next_sequence).lost == 0
    assert log.read(9).lost == 0


def test_a_read_beyond_the_end_loses_nothing() -> None:
    log = EventLog()
    log.subscribe()
    add(log, 2)
    batch = log.read(3)
    assert (batch.events, batch.next_sequence, batch.lost) == ((), 3, 0)
    add(log, 1)
    assert [event.sequence for event in log.read(3).events] == [3]


@pytest.mark.parametrize("keys_each", [1, 3, 50])
def test_the_window_is_bounded_by_its_keys(keys_each: int) -> None:
    log = EventLog(keys_max=20)
    cursor = log.subscribe()
    for _ in range(100):
        add(log, 1, keys_each)
        kept = log.read(cursor, 1000).events
        # At least one event is kept, however many keys it has.
        assert sum(len(event.keys) for event in kept) <= max(20, keys_each)
        assert kept[-1].sequence == log.next_sequence - 1


def test_the_window_goes_with_the_last_reader() -> None:
    log = EventLog()
    cursor = log.subscribe()
    log.subscribe()
    add(log, 4)
    log.unsubscribe()
    assert len(log.read(cursor).events) == 4
    log.unsubscribe()
    again = log.subscribe()
    assert log.read(cursor).lost == 4
    assert (log.read(again).events, log.read(again).lost) == ((), 0)


# -- events from the core --------------------------------------------------------------------------


def test_a_block_is_stored_when_it_can_be_served() -> None:
    rig = Rig()
    session = rig.attach()
    cursor = rig.state.events.subscribe()
    rig.put(session, keys(0, 1))
    rig.put(session, keys(2, 3), summed=False)
    assert reported(rig, cursor) == [(STORED, [0, 1], "dram")]
    *_, action = [action for action in rig.state.take_actions() if hasattr(action, "generations")]
    rig.core.writing.summed(action.slots, action.generations, sums_of(action.slots))
    rig.check()
    assert reported(rig, cursor)[1:] == [(STORED, [2, 3], "dram")]


def test_a_key_that_is_there_already_is_not_stored_again() -> None:
    rig = Rig()
    session = rig.attach()
    cursor = rig.state.events.subscribe()
    rig.put(session, keys(0))
    rig.put(session, keys(0, 1, 1))
    assert reported(rig, cursor) == [(STORED, [0], "dram"), (STORED, [1], "dram")]


def test_a_removal_comes_before_what_takes_its_place() -> None:
    rig = Rig(1)
    session = rig.attach()
    rig.put(session, keys(*range(16)))
    cursor = rig.state.events.subscribe()
    rig.put(session, keys(100))
    (first, second) = reported(rig, cursor)
    assert first[0] is REMOVED
    assert (len(first[1]), first[2]) == (1, "space")
    assert second == (STORED, [100], "dram")
    rig.core.bump_epoch(session, 1)
    # An epoch bump makes all blocks invalid at once; each is reported only when it leaves.
    assert len(reported(rig, cursor)) == 2
    rig.put(session, keys(100))
    assert reported(rig, cursor)[-2:] == [(REMOVED, [100], "epoch"), (STORED, [100], "dram")]


def test_each_cause_has_its_word() -> None:
    rig = Rig(2, namespace_quota_bytes=24 * 4096)
    session = rig.attach(contract(full(), full(16384)))
    for first in (0, 10):
        rig.put(session, keys(*range(first, first + 10)))
    cursor = rig.state.events.subscribe()
    head = rig.head(session, key(19))
    rig.remove_bad(head, "reader")
    assert reported(rig, cursor)[-1] == (REMOVED, [19], "checksum")
    digest = next(iter(rig.state.namespaces)).digest
    rig.core.evict(digest, 18 * 4096)
    assert reported(rig, cursor)[-1][2] == "asked"
    rig.put(session, keys(0, 1), kv_group=1)
    assert {cause for _, _, cause in reported(rig, cursor)} >= {"quota", "asked", "checksum"}
    rig.check()


def test_removed_keys_of_several_groups_are_told_apart() -> None:
    rig = Rig(1)
    session = rig.attach(contract(full(), full()))
    rig.put(session, keys(1, 2), kv_group=0)
    rig.put(session, keys(3), kv_group=1)
    cursor = rig.state.events.subscribe()
    rig.core.evict(next(iter(rig.state.namespaces)).digest, 0)
    events = rig.state.events.read(cursor).events
    by_group = {event.group: sorted(event.keys) for event in events}
    assert by_group == {0: keys(1, 2), 1: keys(3)}
