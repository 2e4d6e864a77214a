"""Events: numbered without gaps, in the order of the changes, in a bounded window."""

from __future__ import annotations

import pytest
from support.core_kit import Rig, contract, full, key, keys

from kvhearth_server.core.actions import EventKind, EventLog

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
    for _ in range(30):
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


def test_each_cause_has_its_word() -> None:
    rig = Rig(2, namespace_quota_bytes=24 * 4096)
    session = rig.attach(contract(full(), full(16384)))
    for first in (0, 10):
        rig.put(session, keys(*range(first, first + 10)))
    cursor = rig.state.events.subscribe()
    head = rig.head(session, key(19))
    rig.remove_bad(head)
    assert reported(rig, cursor)[-1] == (REMOVED, [19], "checksum")
    rig.core.evict(rig.space(session).digest, 18 * 4096)
    assert reported(rig, cursor)[-1][2] == "asked"
    rig.put(session, keys(0, 1), kv_group=1)
    assert {cause for _, _, cause in reported(rig, cursor)} >= {"quota", "asked", "checksum"}
    assert reported(rig, cursor)[-1] == (STORED, [0, 1], "dram")
