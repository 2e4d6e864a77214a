"""The journal names a reserved slot's owner, and a flipped bit never names another engine."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.cases import cases
from support.core_kit import contract
from support.core_shell import Shell

from kvhearth_server.core.reservations import SlotsItem
from kvhearth_server.core.slot_table import Geometry, State
from kvhearth_server.core.state import Limits
from kvhearth_server.engine.sessions import Session
from kvhearth_server.memory.journal import HEADER_DTYPE, READERS, mix, owner_check

GEOMETRY = Geometry.of([("t", 2 * 64 * 1024)], 64 * 1024, 4096)
ENGINES = 4
"""Groups 1 to 4: flipping one bit turns some of their numbers into another one's."""


class Desk:
    """Several attached engines, the first of which holds a slot."""

    def __init__(self, *, quarantined: bool) -> None:
        self.shell = Shell(GEOMETRY, Limits())
        self.sessions = [
            self.shell.attach(contract(), "t", engine_id=f"e{number}").session
            for number in range(ENGINES)
        ]
        engine = self.shell.engine
        writing, epoch = engine.core.writing, next(iter(engine.core.state.namespaces)).epoch
        mine = self.sessions[0].number
        (part,) = engine.call(writing.reserve, mine, 1, epoch, [(0, 1)]).handed
        if quarantined:
            item = SlotsItem(part.slots.reshape(-1), part.generations.reshape(-1))
            engine.call(writing.abort, mine, [item], [], in_doubt=True)
        self.slot = int(part.slots[0, 0])

    def flip(self, name: str, bit: int) -> None:
        """Flips one bit of a field of the slot's header."""
        journal = self.shell.engine.journal
        assert journal is not None
        journal.headers[name][self.slot] ^= np.uint32(1 << bit)

    def restart(self) -> None:
        """Kills and starts the daemon."""
        self.shell.restart().core.check_books()

    def state(self) -> State:
        """State of the slot."""
        return State(int(self.shell.engine.core.state.table.state[self.slot]))

    def drain(self, who: list[Session]) -> None:
        """Marks these sessions as certainly ended."""
        for ghost in who:
            self.shell.engine.drained(ghost)
        self.shell.engine.core.check_books()


@cases("quarantined", [False, True])
@cases("name", ["owner", "owner_check"])
@cases("bit", range(32))
def test_a_slot_with_a_damaged_owner_waits_for_everybody(
    name: str, bit: int, quarantined: bool
) -> None:
    desk = Desk(quarantined=quarantined)
    desk.flip(name, bit)
    desk.restart()
    counters = desk.shell.engine.counters.snapshot()
    assert counters["adoption_dropped{owner}"] == 1
    ghosts = list(desk.shell.engine.sessions)
    assert len(ghosts) == 2 * ENGINES, "each once for its group, once for the slot of nobody"
    # Drain all that were attached, and all but one of those for which the slot waits.
    desk.drain(ghosts[:-1])
    assert desk.state() is State.QUARANTINED
    desk.drain(ghosts[-1:])
    assert desk.state() is State.FREE


def test_a_sound_owner_is_waited_for_alone() -> None:
    desk = Desk(quarantined=False)
    desk.restart()
    ghosts = {ghost.number: ghost for ghost in desk.shell.engine.sessions}
    assert len(ghosts) == ENGINES
    mine = ghosts.pop(desk.sessions[0].number)
    desk.drain(list(ghosts.values()))
    assert desk.state() is State.QUARANTINED
    desk.drain([mine])
    assert desk.state() is State.FREE


def test_checks_of_neighbouring_numbers_and_of_a_new_file_differ() -> None:
    numbers = np.append(np.arange(1 << 16, dtype=np.uint32), np.uint32(READERS))
    checks = owner_check(numbers)
    assert checks[0] != 0
    for bit in range(32):
        flipped = numbers ^ np.uint32(1 << bit)
        assert (owner_check(flipped) != checks).all()


def test_the_owner_is_no_part_of_the_identity() -> None:
    """The owner changes while the identity stays: a block is removed under a reader's lease."""
    desk = Desk(quarantined=False)
    engine = desk.shell.engine
    assert engine.journal is not None
    headers = engine.journal.headers
    fields = HEADER_DTYPE.fields
    assert fields is not None
    assert fields["owner"][1] == fields["identity_check"][1] - 4
    assert headers["owner"][desk.slot] == desk.sessions[0].group
    assert headers["owner_check"][desk.slot] == owner_check(headers["owner"][[desk.slot]])[0]


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
