"""The remote tier over a scripted mover: what it asks, merges, refuses and gives up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.drive import Drive
from support.mover_double import ScriptedMover
from support.tiers import Arena, Desk, family, key_of, keys_of

from kvhearth_server.tiers.base import (
    Corrupt,
    Done,
    Failed,
    Identity,
    Known,
    LoadBatch,
    Missing,
    StoreBatch,
    Throttled,
)
from kvhearth_server.tiers.remote.existence import NEGATIVE_S, POSITIVE_S
from kvhearth_server.tiers.remote.limits import Limits
from kvhearth_server.tiers.remote.mover import Delete, Exists, Put
from kvhearth_server.tiers.remote.tier import RemoteTier

OF = family()


class Rig(Desk):
    """A desk whose tier is remote, with its mover and clock."""

    def __init__(self, **options: object) -> None:
        drive = Drive()
        self.clock = drive.clock
        arena = Arena()
        self.mover = ScriptedMover([arena.bytes])
        self.remote = RemoteTier(
            self.mover,
            [arena.bytes],
            "scripted://",
            bytes(16),
            clock=self.clock,
            **options,  # type: ignore[arg-type]
        )
        self.remote.use_identities(lambda of: Identity("t", of.namespace.hex(), ""))
        super().__init__(self.remote, arena, drive)

    def ask(self, numbers: range) -> Known:
        """Ask about a chain."""
        return self.remote.ask(OF, keys_of(numbers))

    def known(self, numbers: range) -> tuple[int, int]:
        """Ask until all is known; return the present blocks and the lookups."""
        for lookups in range(1, 20):
            facts = self.ask(numbers)
            if facts.asking is None:
                return int(facts.present.sum()), lookups
            self.remote.poll()
        raise AssertionError("never known")

    def forget(self) -> None:
        """Let the existence cache forget everything."""
        self.clock.now += POSITIVE_S + 1

    def put_all(self, numbers: range) -> None:
        """Store blocks and forget that they are there."""
        for start in range(numbers.start, numbers.stop, 64):
            part = range(start, min(start + 64, numbers.stop))
            assert len(self.store(part).rows(Done)) == len(part)
        self.forget()
        self.mover.requests.clear()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.remote.close()


@pytest.mark.parametrize("there", [0, 1, 8, 57, 58, 300, 511, 512])
def test_the_end_of_a_chain_of_512_takes_three_calls_of_eight_keys(rig: Rig, there: int) -> None:
    rig.put_all(range(there))
    assert rig.known(range(512))[0] == there
    assert rig.mover.calls <= 3
    assert sum(len(each.keys) for each in rig.mover.requests) <= 24
    before = rig.mover.calls
    assert rig.known(range(512)) == (there, 1)
    assert rig.mover.calls == before, "answered from the cache"


def test_lookups_of_one_chain_ask_once(rig: Rig) -> None:
    rig.put_all(range(20))
    rig.mover.held = True
    for _ in range(10):
        facts = rig.ask(range(100))
        assert not facts.present.any()
        assert facts.asking is not None
        assert facts.asking.all()
        rig.ask(range(80))
    assert rig.mover.calls == 1
    rig.mover.held = False
    assert rig.known(range(100))[0] == 20


def test_a_longer_chain_asks_only_about_what_is_new(rig: Rig) -> None:
    rig.put_all(range(30))
    assert rig.known(range(30))[0] == 30
    rig.mover.requests.clear()
    facts = rig.ask(range(40))
    assert facts.present.tolist() == [True] * 30 + [False] * 10
    assert facts.asking is not None
    assert facts.asking.tolist() == [False] * 30 + [True] * 10
    assert {key for each in rig.mover.requests for key in each.keys} <= set(keys_of(range(30, 40)))


def test_knowledge_ends(rig: Rig) -> None:
    rig.put_all(range(2))
    assert rig.known(range(4))[0] == 2
    rig.clock.now += NEGATIVE_S + 0.1
    facts = rig.ask(range(4))
    assert facts.present.tolist() == [True, True, False, False]
    assert facts.asking is not None
    assert facts.asking.tolist() == [False, False, True, True]
    rig.idle()
    rig.forget()
    facts = rig.ask(range(4))
    assert facts.asking is not None
    assert facts.asking.all()


def test_a_stored_block_is_known_and_a_failed_read_is_at_once_absent(rig: Rig) -> None:
    rig.store(range(4))
    rig.mover.requests.clear()
    assert rig.ask(range(4)).present.all()
    assert rig.mover.calls == 0
    rig.mover.values.clear()
    assert len(rig.load(range(4)).rows(Missing)) == 4
    facts = rig.ask(range(4))
    assert facts.asking is None
    assert not facts.present[0]


def test_a_hole_shows_when_it_is_read(rig: Rig) -> None:
    rig.put_all(range(16))
    rig.mover.drop(*next(name for name in rig.mover.values if name[1] == key_of(4)))
    assert rig.known(range(16))[0] == 16
    done = rig.load(range(16))
    assert done.rows(Done).tolist() == [0, 1, 2, 3]
    assert done.rows(Missing).tolist() == list(range(4, 16))
    assert rig.ask(range(16)).present[:5].tolist() == [True] * 4 + [False]


def test_a_chain_whose_first_read_failed_is_whole_again_soon(rig: Rig) -> None:
    rig.put_all(range(8))
    assert rig.known(range(8))[0] == 8
    rig.mover.failure = Failed("unreachable")  # type: ignore[arg-type]
    rig.load(range(8))
    assert not rig.ask(range(8)).present.any()
    rig.mover.failure = None
    rig.clock.now += NEGATIVE_S + 1
    assert rig.ask(range(8)).present.all(), "the others are known to be there for longer"


def test_wrong_bytes_are_deleted_and_absent(rig: Rig) -> None:
    rig.put_all(range(4))
    value = next(value for name, value in rig.mover.values.items() if name[1] == key_of(2))
    value.content = bytes(len(value.content))
    done = rig.load(range(4))
    assert [outcome for outcome, _ in done.parts if isinstance(outcome, Corrupt)] == [
        Corrupt("remote")
    ]
    rig.idle()
    deleted = [each for each in rig.mover.requests if isinstance(each, Delete)]
    assert [each.keys for each in deleted] == [[key_of(2)]]
    assert not rig.remote.breaker.is_open, "wrong bytes are no failure of transport"
    assert len(rig.mover.values) == 3


def test_loads_begin_only_if_somebody_waits_as_long(rig: Rig) -> None:
    rig.put_all(range(4))
    batch = rig.load_batch(range(4), OF)
    late = LoadBatch(OF, batch.keys, batch.places, wait_s=0.0001)
    assert rig.wait(rig.remote.submit_load(late)).parts[0][0] == Failed("timeout")
    assert not rig.mover.requests
    soon = LoadBatch(OF, batch.keys, batch.places, wait_s=5.0)
    assert len(rig.wait(rig.remote.submit_load(soon)).rows(Done)) == 4


@pytest.mark.parametrize("failure", ["timeout", "unreachable", "denied", "io"])
def test_failures_open_the_breaker_and_it_closes_by_itself(rig: Rig, failure: str) -> None:
    rig.put_all(range(4))
    rig.mover.failure = Failed(failure)  # type: ignore[arg-type]
    for number in range(5):
        assert not rig.remote.breaker.is_open
        rig.wait(rig.remote.submit_load(rig.load_batch([number], OF)))
    assert rig.remote.breaker.is_open
    assert [kind.word for kind in rig.remote.problems()] == ["open"]
    rig.mover.requests.clear()
    assert rig.remote.submit_load(rig.load_batch([1], OF)) == Throttled("open", 1.0)
    assert rig.remote.submit_store(rig.store_batch([9], OF)) == Throttled("open", 1.0)
    facts = rig.ask(range(100))
    assert not facts.present.any()
    assert facts.asking is None
    rig.remote.poll()
    assert not rig.mover.requests, "an open breaker sends nothing"
    for _ in range(4):
        rig.clock.now += 30.0
        rig.remote.poll()
        rig.remote.poll()
    assert len(rig.mover.requests) == 4, "one probe at a time"
    rig.mover.failure = None
    rig.clock.now += 30.0
    rig.remote.poll()
    rig.remote.poll()
    assert not rig.remote.breaker.is_open
    assert rig.remote.problems() == {}
    assert rig.load([0]).rows(Done).tolist() == [0]


def test_misses_and_cached_answers_leave_the_breaker_alone(rig: Rig) -> None:
    for number in range(40):
        rig.load([number])
        rig.ask(range(number, number + 3))
    assert not rig.remote.breaker.is_open
    rig.mover.failure = Failed("timeout")  # type: ignore[arg-type]
    for number in range(100, 105):
        rig.wait(rig.remote.submit_load(rig.load_batch([number], OF)))
        rig.ask(range(3))
    assert rig.remote.breaker.is_open


def test_a_mover_that_is_down_costs_lookups_nothing(rig: Rig) -> None:
    rig.store(range(4))
    rig.mover.up, rig.mover.problem = False, "no such bucket; create it"
    rig.remote.poll()
    facts = rig.ask(range(4))
    assert not facts.present.any()
    assert facts.asking is None
    assert rig.remote.problems() == {}, "it may be starting"
    rig.clock.now += 3.0
    (reason,) = rig.remote.problems().values()
    assert "no such bucket; create it" in reason


def test_a_mover_that_refuses_leaves_blocks_absent_for_a_moment(rig: Rig) -> None:
    rig.mover.refusal = Throttled("queue")  # type: ignore[arg-type]
    assert rig.remote.submit_store(rig.store_batch([1], OF)) == Throttled("queue")
    facts = rig.ask(range(4))
    assert facts.asking is None
    assert rig.remote.counts["stores_refused_queue"] == 1


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(bytes_per_s=15_000), "rate"),
        (Limits(requests_per_s=2), "rate"),
        (Limits(bytes_per_day=24 * 15_000), "quota"),
    ],
)
def test_stores_are_bounded(limits: Limits, reason: str) -> None:
    rig = Rig(limits=limits)
    taken = 0
    while not isinstance(
        answer := rig.remote.submit_store(rig.store_batch([taken], OF)), Throttled
    ):
        rig.idle()
        taken += 1
    assert (taken, answer.reason) == (2, reason)
    assert answer.retry_after_s > 0
    rig.clock.now += answer.retry_after_s
    assert not isinstance(rig.remote.submit_store(rig.store_batch([taken], OF)), Throttled)
    rig.idle()
    rig.remote.close()


def test_what_the_remote_has_is_not_sent_again(rig: Rig) -> None:
    rig.store(range(4))
    rig.mover.requests.clear()
    assert len(rig.store(range(6)).rows(Done)) == 6
    ask, put = rig.mover.requests
    assert isinstance(put, Put)
    assert ask.keys == put.keys == keys_of([4, 5])
    rig.forget()
    rig.mover.drop(*next(name for name in rig.mover.values if name[1] == key_of(2)))
    rig.mover.requests.clear()
    assert len(rig.store(range(6)).rows(Done)) == 6
    ask, put = rig.mover.requests
    assert ask.keys == keys_of(range(6)), "of whose state nothing is known"
    assert put.keys == [key_of(2)]
    assert rig.remote.counts["stores_present"] == 4 + 5
    assert rig.store(range(6)).rows(Done).tolist() == [*range(6)]
    assert len(rig.mover.requests) == 2, "now it is known"
    batch = rig.store_batch([7], OF)
    with_parent = StoreBatch(
        OF,
        batch.keys,
        batch.places,
        batch.checksums,
        batch.sequences,
        batch.parents,
        parent_keys=[key_of(6)],
    )
    rig.wait(rig.remote.submit_store(with_parent))
    assert rig.load([7]).parent_keys == [key_of(6)]


def test_a_remote_that_cannot_be_asked_gets_nothing(rig: Rig) -> None:
    rig.mover.failure = Failed("timeout")  # type: ignore[arg-type]
    assert rig.store(range(3)).parts[0][0] == Failed("timeout")  # type: ignore[arg-type]
    rig.mover.failure = None
    ticket = rig.remote.submit_store(rig.store_batch(range(3), OF))
    rig.mover.refusal = Throttled("queue")  # type: ignore[arg-type]
    assert rig.wait(ticket).parts[0][0] == Throttled("queue")  # type: ignore[arg-type]
    assert not rig.mover.values
    assert rig.remote.counts["stores_refused_queue"] == 3


def test_values_of_another_length_are_replaced_by_a_store_and_removed_by_a_lookup(
    rig: Rig,
) -> None:
    rig.put_all(range(3))
    for value in rig.mover.values.values():
        value.length -= 1
    assert rig.store([0]).rows(Done).tolist() == [0]
    rig.forget()
    assert rig.known(range(3))[0] == 1
    rig.idle()
    assert {name[1] for name in rig.mover.values} == {key_of(0)}


def test_a_good_probe_of_the_helpers_closes_the_breaker(rig: Rig) -> None:
    rig.mover.good_probes = 1
    rig.remote.poll()
    rig.mover.failure = Failed("denied")  # type: ignore[arg-type]
    for number in range(5):
        rig.store([number])
    rig.remote.poll()
    assert rig.remote.breaker.is_open
    rig.mover.failure = None
    rig.mover.good_probes = 2
    rig.remote.poll()
    assert rig.remote.serving
    assert len(rig.store([9]).rows(Done)) == 1


def test_figures(rig: Rig) -> None:
    rig.store(range(4))
    rig.mover.requests.clear()
    rig.forget()
    rig.load(range(4))
    now = rig.remote.remote_figures()
    assert (now.count("stored_blocks"), now.count("loaded_blocks")) == (4, 4)
    assert now.cache_entries == 4
    assert all(type(each) is not Exists for each in rig.mover.requests)
