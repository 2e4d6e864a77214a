"""Requests that may fill a block: those that a walk over all of a step's requests would find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.connectors.core.engine import Step
from kvhearth.connectors.core.requests import DECODE_STEPS, DueRequests

BLOCK = 8


@dataclass
class FakeRequest:
    """A request's name."""

    request_id: str


@dataclass(eq=False)
class FakeState:
    """The part of a request's state that the search reads, and a model of its progress."""

    request: FakeRequest
    loading: bool = False
    due_step: int = 0
    tokens: int = 0
    stored: int = 0


def due_requests(every: int) -> Any:
    """The search, for requests of the test's own kind."""
    return DueRequests(every)


def state(name: str) -> FakeState:
    """A request without tokens."""
    return FakeState(FakeRequest(name))


NAMES = [str(number) for number in range(6)]
STEPS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(NAMES), st.sampled_from([1, 1, 1, 1, 3, 20]), max_size=6),
        st.booleans(),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(steps=STEPS, all_ones=st.booleans())
def test_every_full_block_is_found_in_its_step(
    steps: list[tuple[dict[str, int], bool]], all_ones: bool
) -> None:
    """Blocks are stored in the step that fills them, or in the first one with room after it."""
    due, states = due_requests(1), {name: state(name) for name in NAMES}
    for one in states.values():
        due.watch(one)
    for scheduled, room in steps:
        tokens = {name: 1 if all_ones else count for name, count in scheduled.items()}
        step = Step(sum(tokens.values()), tokens)
        found = due.take(step, lambda name: states[name], room.__bool__)
        for one in found:
            ahead = one.tokens + tokens[one.request.request_id]
            if room:
                one.stored = ahead // BLOCK
            due.put(one, (one.stored + 1) * BLOCK - ahead)
        for name, count in tokens.items():
            states[name].tokens += count
            if room:
                assert states[name].stored == states[name].tokens // BLOCK, name


def test_a_decode_step_examines_only_requests_that_fill_a_block() -> None:
    due, states = due_requests(1), {str(number): state(str(number)) for number in range(4 * BLOCK)}
    for number, one in enumerate(states.values()):
        one.tokens = number
        due.watch(one)
    examined = []
    for _ in range(2 * BLOCK):
        scheduled = dict.fromkeys(states, 1)
        found = due.take(Step(len(scheduled), scheduled), lambda _: None, lambda: True)
        examined.append(len(found))
        for one in found:
            lacking = BLOCK - (one.tokens + 1) % BLOCK
            due.put(one, lacking)
        for one in states.values():
            one.tokens += 1
    assert examined[0] == len(states)
    assert set(examined[1:]) == {4}


@pytest.mark.parametrize("every", [1, 3, 8])
def test_requests_share_a_step_soon_after_their_own(every: int) -> None:
    due, states = due_requests(every), [state(str(number)) for number in range(8)]
    scheduled = {one.request.request_id: 1 for one in states}
    for one in states:
        due.watch(one)
    step = Step(len(scheduled), scheduled)
    due.take(step, lambda _: None, lambda: True)
    for number, one in enumerate(states):
        due.put(one, 2 + number)
    found_at = {}
    for number in range(2, 2 + 8 + every):
        for one in due.take(step, lambda _: None, lambda: True):
            found_at.setdefault(one.request.request_id, number)
            due.put(one, 99)
    for number in range(8):
        own = 1 + 2 + number
        assert own <= found_at[str(number)] < own + every
        assert found_at[str(number)] % every == 0


def test_a_request_that_is_gone_or_never_due_is_not_examined() -> None:
    due, gone, never = due_requests(1), state("gone"), state("never")
    for one in (gone, never):
        due.watch(one)
    step = Step(2, {"gone": 1, "never": 1})
    assert len(due.take(step, lambda _: None, lambda: True)) == 2
    due.forget(gone)
    due.put(never, None)
    for _ in range(3):
        assert due.take(step, lambda _: None, lambda: True) == []


def test_a_request_that_waits_for_its_load_is_examined_after_it() -> None:
    due, one = due_requests(DECODE_STEPS), state("one")
    due.watch(one)
    one.loading = True
    assert due.take(Step(1, {"one": 1}), lambda _: None, lambda: True) == []
    assert due.take(Step(0, {}), lambda _: None, lambda: True) == []
    one.loading = False
    assert due.take(Step(1, {"one": 1}), lambda _: None, lambda: True) == [one]
