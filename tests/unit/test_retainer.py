"""Blocks kept after their request's end: pinned once stored, until their session goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from support.scripted_clock import ScriptedClock, scripted_clock

from kvhearth.client import KVClient
from kvhearth.connectors.core.engine import Counters
from kvhearth.connectors.core.retainer import QUEUE_MAX, STORED_S, Keys, Retainer
from kvhearth.errors import Reason
from kvhearth.results import Pin
from kvhearth_lab.harness import HUNG_S

KEYS = {0: [b"a", b"b"]}


class Rig:
    """A retainer of a scripted client."""

    def __init__(self, clock: ScriptedClock) -> None:
        self.clock = clock
        self.storing, self.reason = False, ""
        self.pins: list[tuple[Keys, float]] = []
        self.unpinned: list[int] = []
        self.while_pinning: Callable[[], object] = lambda: None
        self.counters = Counters()
        self.retainer = Retainer(cast(KVClient, self), self.counters, lambda _: self.storing)

    def pin(self, keys: Any, seconds: float, session: str) -> Pin:
        """Pin all, or nothing for a reason."""
        self.pins.append((keys, seconds))
        self.while_pinning()
        flags = {group: np.full(len(some), not self.reason) for group, some in keys.items()}
        return Pin((len(self.pins),), "boot", flags, self.reason)  # type: ignore[arg-type]

    def unpin(self, pin: Pin) -> None:
        """End a pin."""
        self.unpinned += pin.ids

    def count(self, name: str) -> None:
        """Count a crash."""
        raise AssertionError(name)

    def counted(self) -> dict[str, float]:
        """Let what is due be done; return what was counted."""
        self.clock.pass_time(1.5)
        return self.counters.take()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with scripted_clock() as clock:
        rig = Rig(clock)
        yield rig
        assert rig.retainer.close(HUNG_S)


def test_blocks_are_kept_until_the_session_goes_on(rig: Rig) -> None:
    rig.retainer.retain("s", KEYS, 600.0)
    assert rig.counted() == {"retained_blocks": 2}
    assert rig.pins == [(KEYS, 600.0)]
    rig.retainer.resume("another")
    rig.retainer.resume("s")
    assert rig.counted() == {"retain_resumed": 1}
    assert rig.unpinned == [1]
    rig.retainer.resume("s")
    assert rig.counted() == {}


def test_a_later_wish_of_a_branch_takes_the_place_of_the_first(rig: Rig) -> None:
    rig.retainer.retain("s", KEYS, 600.0)
    rig.retainer.retain("s", {0: [b"a", b"b", b"c"]}, 60.0)
    assert rig.counted() == {"retained_blocks": 5}
    assert rig.unpinned == [1]


def test_an_expired_pin_is_forgotten(rig: Rig) -> None:
    rig.retainer.retain("s", KEYS, 5.0)
    rig.counted()
    rig.clock.pass_time(5.0)
    rig.retainer.resume("s")
    assert rig.counted() == {}
    assert rig.unpinned == []


def test_a_session_that_goes_on_ends_a_wish_that_waits(rig: Rig) -> None:
    rig.storing = True
    rig.retainer.retain("s", KEYS, 600.0)
    rig.counted()
    rig.retainer.resume("s")
    rig.storing = False
    assert rig.counted() == {"retain_resumed": 1}
    assert rig.pins == []


def test_a_session_that_goes_on_while_its_pin_is_made_ends_the_pin(rig: Rig) -> None:
    rig.while_pinning = lambda: rig.retainer.resume("s")
    rig.retainer.retain("s", KEYS, 600.0)
    assert rig.counted() == {"retained_blocks": 2, "retain_resumed": 1}
    assert rig.unpinned == [1]


def test_parallel_branches_of_a_session_keep_theirs(rig: Rig) -> None:
    """Sub-agents have the name of their session, and a part of its dialogue."""
    stem = [b"a", b"b"]
    for branch in (b"x", b"y", b"z"):
        rig.retainer.retain("s", {0: [*stem, branch], 1: [branch]}, 600.0, {0: 2})
    rig.counted()
    for keys in ({0: [b"a"]}, {0: [b"a", b"other", b"more"]}, {}):
        rig.retainer.resume("s", lambda keys=keys: keys)  # type: ignore[misc]
    assert (rig.counted(), rig.unpinned) == ({}, []), "other branches begin"
    rig.retainer.resume("s", lambda: {0: [*stem, b"y", b"more"]})
    assert (rig.counted(), rig.unpinned) == ({"retain_resumed": 1}, [2])
    # A template may leave out what the model thought: of the prompt the last answer is told.
    rig.retainer.resume("s", lambda: {0: [*stem, b"w", b"more"]})
    assert (rig.counted(), rig.unpinned) == ({"retain_resumed": 1}, [2, 3])
    rig.retainer.resume("s")
    assert (rig.counted(), rig.unpinned) == ({"retain_resumed": 1}, [2, 3, 1])


def test_stores_are_waited_for_so_long(rig: Rig) -> None:
    rig.storing = True
    rig.retainer.retain("s", KEYS, 600.0)
    assert (rig.counted(), rig.pins) == ({}, [])
    rig.storing = False
    assert rig.counted() == {"retained_blocks": 2}
    rig.storing = True
    rig.retainer.retain("t", KEYS, 600.0)
    rig.clock.pass_time(STORED_S)
    assert rig.counted() == {"retained_blocks": 2}


def test_what_is_refused_is_counted(rig: Rig) -> None:
    rig.reason = Reason.HELD_CAP
    rig.retainer.retain("s", KEYS, 600.0)
    assert rig.counted() == {"retain_refused": 2}
    rig.retainer.resume("s")
    assert rig.counted() == {}
    rig.storing = True
    for number in range(QUEUE_MAX + 1):
        rig.retainer.retain(f"s{number}", KEYS, 600.0)
    assert rig.counted() == {"retain_refused": 2}
