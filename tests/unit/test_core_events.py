"""Events: numbered without gaps, in the order of the changes, in a bounded window by namespace."""

from __future__ import annotations

import pytest
from support.core_kit import Rig, contract, full, key, keys, refused
from support.follower import Follower

from kvhearth.errors import Reason
from kvhearth.model import Tier
from kvhearth_server.core.events import EVENT_KEYS_MAX, EventKind, EventLogs
from kvhearth_server.core.short_keys import ShortKeys, short_key

STORED, REMOVED = EventKind.STORED, EventKind.REMOVED


@pytest.fixture
def rig() -> Rig:
    return Rig(2, namespace_quota_bytes=24 * 4096)


@pytest.mark.parametrize("keys_each", [1, 3, 50])
def test_the_window_is_bounded_by_its_keys(rig: Rig, keys_each: int) -> None:
    logs = EventLogs(1, keys_max=20)
    log = logs.open(rig.space(rig.attach()), 0.0)
    for number in range(30):
        logs.append(STORED, 1, 0, keys(*range(number, number + keys_each)), tier=Tier.DRAM)
        kept = log.read(log.oldest, 1000)
        # At least one event is kept, however many keys it has.
        assert sum(len(event.keys) for event in kept) <= max(20, keys_each)
        assert log.next == log.oldest + len(kept) == number + 2


def test_tenants_and_their_namespaces_share_the_bound(rig: Rig) -> None:
    spaces = [
        rig.space(rig.attach(contract(full(), revision=str(each)), engine_id=str(each)))
        for each in range(2)
    ]
    logs = EventLogs(2, keys_max=80)
    first = logs.open(spaces[0], 0.0)
    for many in (40, 20):
        logs.append(STORED, 1, 0, keys(*range(90)))
        for each in range(90):
            logs.append(STORED, 1, 0, [key(each)])
        assert len(first.read(first.oldest, 1000)) == many
        logs.open(spaces[1], 0.0)


def test_an_event_has_a_bounded_number_of_keys(rig: Rig) -> None:
    logs = EventLogs()
    log = logs.open(rig.space(rig.attach()), 0.0)
    logs.append(REMOVED, 1, 0, keys(*range(EVENT_KEYS_MAX + 1)))
    assert [len(event.keys) for event in log.read(1, 9999)] == [EVENT_KEYS_MAX, 1]


def test_nothing_is_kept_while_nobody_reads(rig: Rig) -> None:
    session = rig.attach()
    reader = Follower(rig, session)
    rig.put(session, keys(1))
    assert 1 not in rig.state.events
    reader.news()
    rig.state.events.end_unread(0.0)
    assert 1 in rig.state.events
    rig.state.events.end_unread(0.1)
    assert 1 not in rig.state.events
    rig.put(session, keys(2))
    told = reader.read()
    assert (told.lost, told.cursor.place) == (1, rig.geometry.slot_count)
    assert [event.keys for event in told.events] == [tuple(keys(1, 2))]


def test_a_cursor_that_nobody_was_given_is_refused(rig: Rig) -> None:
    session = rig.attach()
    reader = Follower(rig, session)
    reader.news()
    right = reader.cursor
    assert right is not None
    for wrong in (right._replace(number=right.number + 1), right._replace(place=-2)):
        reader.cursor = wrong
        with refused(Reason.BAD_MESSAGE):
            reader.read()
    with refused(Reason.STALE_EPOCH):
        rig.core.following.read(session, 7, None, 10, 0.0)


def test_short_keys_follow_what_is_there(rig: Rig) -> None:
    session = rig.attach()
    space = rig.space(session)
    found = ShortKeys(rig.state, rig.core.following, keys_max=3)
    shorts = [short_key(each) for each in keys(*range(4))]

    def known() -> list[bool]:
        while found.read(space, 0.0):
            pass
        named = found.find(space, 0, shorts)
        return [name == each for name, each in zip(named, keys(*range(4)), strict=True)]

    rig.put(session, keys(0, 1))
    assert known() == [True, True, False, False]
    rig.put(session, keys(2, 3))
    assert known() == [True, True, True, False], "there is room for three"
    rig.remove_bad(rig.head(session, key(0)))
    assert known() == [False, True, True, False]
    assert found.find(space, 1, shorts[1:2]) != keys(1), "of another group"
    found.end_unread()
    assert found._known
    rig.state.events.end_unread(1.0)
    found.end_unread()
    assert not found._known
    assert known() == [False, True, True, True]


def test_each_cause_has_its_word(rig: Rig) -> None:
    session = rig.attach(contract(full(), full(16384)))
    for first in (0, 10):
        rig.put(session, keys(*range(first, first + 10)))
    reader = Follower(rig, session)
    reader.news()
    rig.remove_bad(rig.head(session, key(19)))
    (event,) = reader.news()
    assert (event.kind, event.keys, event.cause) == (REMOVED, (key(19),), "checksum")
    rig.core.evict(rig.space(session).digest, 18 * 4096)
    assert {event.cause for event in reader.news()} == {"asked"}
    rig.put(session, keys(0, 1), kv_group=1)
    *removed, stored = reader.news()
    assert "quota" in {event.cause for event in removed}
    assert (stored.kind, stored.keys, stored.tier) == (STORED, tuple(keys(0, 1)), Tier.DRAM)
