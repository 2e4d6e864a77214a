"""The connector's scheduler half against a model of the content of each engine page.

Requests arrive, are admitted from the engine's own cache, from the daemon or by a second connector
(which loads at once or later, and may fail), are computed in chunks, speculate, are preempted,
finish or are aborted. Every stored block must be right: each text is loaded at the end, block by
block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.daemon import running_daemon
from support.scripted_engine import BLOCK_TOKENS, ScriptedEngine, scripted_engine
from support.scripted_world import STOCK_BLOCKS, World

SETTINGS = settings(
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TOKENS_MAX = 6 * BLOCK_TOKENS
TEXTS = 3
SYNC = st.sampled_from(["", "", "", "", "loads", "fails"])
CHUNKS = st.sampled_from([1, 5, BLOCK_TOKENS, 40, TOKENS_MAX])


class ConnectorMachine(RuleBasedStateMachine):
    """The machine's rules; the test sets ``engine``."""

    engine: ScriptedEngine
    numbers = count()
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(sibling_first=st.booleans(), lag=st.integers(0, 1))
    def begin(self, sibling_first: bool, lag: int) -> None:
        """Starts with texts that are in no cache."""
        self.world = World(self.engine, sibling_first=sibling_first, lag=lag)
        number = next(self.numbers)
        self.texts = [f"machine {number} {each}" for each in range(TEXTS)]

    def _names(self, *statuses: str) -> list[str]:
        return [name for name, one in self.world.live.items() if one.status in statuses]

    @rule(text=st.integers(0, TEXTS - 1), blocks=st.integers(0, 7))
    def sibling_stores(self, text: int, blocks: int) -> None:
        self.world.sibling_has[self.texts[text]] = blocks * BLOCK_TOKENS

    @rule(
        text=st.integers(0, TEXTS - 1),
        tokens=st.integers(1, TOKENS_MAX),
        generated=st.integers(1, 20),
        chunk=CHUNKS,
        sync=SYNC,
    )
    def add(self, text: int, tokens: int, generated: int, chunk: int, sync: str) -> None:
        if len(self.world.live) < 4:
            name = f"r{next(self.numbers)}"
            self.world.add(name, self.texts[text], tokens, generated)
            self._admit(name, chunk, sync)

    @rule(data=st.data(), chunk=CHUNKS, sync=SYNC)
    def admit(self, data: st.DataObject, chunk: int, sync: str) -> None:
        names = self._names("waiting")
        if names:
            self._admit(data.draw(st.sampled_from(names)), chunk, sync)

    def _admit(self, name: str, chunk: int, sync: str) -> None:
        if self.world.admit(name, chunk, fails=sync == "fails", sync=bool(sync)):
            one = self.world.live.get(name)
            self.seen[one.status if one else "ended at once"] += 1

    @rule(
        data=st.data(),
        failure=st.sampled_from(["", "", "request", "blocks"]),
        blocks=st.integers(0, 4),
    )
    def sibling_done(self, data: st.DataObject, failure: str, blocks: int) -> None:
        names = self._names("sibling", "ended-sibling")
        if names:
            self.world.sibling_done(data.draw(st.sampled_from(names)), failure, blocks)

    @rule(data=st.data())
    def ours_done(self, data: st.DataObject) -> None:
        names = self._names("ours", "ended-ours")
        if names:
            self.world.ours_done(data.draw(st.sampled_from(names)))

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        names = self._names("loaded")
        if names:
            self.world.resume(data.draw(st.sampled_from(names)))

    @rule(
        chunk=CHUNKS,
        some=st.integers(1, 4),
        drafts=st.integers(0, 3),
        accepted=st.integers(0, 3),
    )
    def step(self, chunk: int, some: int, drafts: int, accepted: int) -> None:
        names = self._names("running")[:some]
        self.world.step(dict.fromkeys(names, chunk), drafts, accepted)

    @rule(data=st.data(), reset=st.booleans())
    def preempt(self, data: st.DataObject, reset: bool) -> None:
        names = self._names("running")
        if names:
            self.seen["preempted"] += 1
            self.world.preempt(data.draw(st.sampled_from(names)))
        if reset:
            self.world.reset()

    @rule()
    def reset(self) -> None:
        self.world.reset()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = self._names("waiting", "sibling", "ours", "loaded", "running")
        if names:
            name = data.draw(st.sampled_from(names))
            self.seen[f"aborted {self.world.live[name].status}"] += 1
            self.world.abort(name)

    @invariant()
    def books_balance(self) -> None:
        self.engine.half._block_refs.check_books()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.seen["loaded at the end"] += self.world.close(self.texts, 10 * BLOCK_TOKENS)
            self.seen["stored for the sibling"] += self.world.sibling_stored


_ROUNDS_MAX = 3


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with (
        running_daemon() as daemon,
        scripted_engine(
            daemon.url(), blocks=64, pool_tokens=STOCK_BLOCKS * BLOCK_TOKENS, held_percent=100
        ) as found,
    ):
        yield found


@pytest.mark.realtime("a live daemon")
def test_what_is_stored_was_written(engine: ScriptedEngine) -> None:
    machine = type("Machine", (ConnectorMachine,), {"engine": engine, "seen": Counter()})
    kinds = ("sibling", "stored for the sibling", "ours", "preempted", "loaded at the end")
    seen = machine.seen
    # The choices of 150 examples resemble each other: a run in some hundred lacks a kind.
    for _ in range(_ROUNDS_MAX):
        run_state_machine_as_test(
            machine, settings=settings(SETTINGS, max_examples=150, stateful_step_count=50)
        )
        if all(seen[kind] for kind in kinds):
            return
    pytest.fail(f"not every kind was there: {seen}")
