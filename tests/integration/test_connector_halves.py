"""The connectors' core on a real daemon, driven by a scripted engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support.daemon import Daemon, running_daemon, until
from support.scripted_engine import (
    BLOCK_TOKENS,
    FULL,
    PAGE_BYTES,
    ScriptedEngine,
    contract_of,
    scripted_engine,
)

from kvhearth.connectors.core.requests import ASKS_MAX, DECODE_STEPS
from kvhearth.connectors.core.scheduler import agreed
from kvhearth.connectors.core.step_metadata import Handshake
from kvhearth.contract import GroupKind, GroupSpec
from kvhearth_lab.harness import HUNG_S


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(arena=False) as found:
        yield found


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[ScriptedEngine]:
    with scripted_engine(daemon.url()) as found:
        yield found
    daemon.wait_quiet()


def test_what_one_request_stores_another_loads(engine: ScriptedEngine) -> None:
    assert engine.run("a", "stored", 160) == 0
    assert engine.run("b", "stored", 160) == 160
    assert engine.run("c", "stored", 175) == 160


def test_decoded_blocks_are_stored(engine: ScriptedEngine) -> None:
    request = engine.add("a", "decoded", 64)
    engine.admit(request)
    engine.prefill(request, 60)
    for _ in range(4):
        engine.step({"a": 1})
        request.num_computed_tokens += 1
    engine.finish(request)
    engine.settle()
    assert engine.run("b", "decoded", 64) == 64


@pytest.mark.parametrize("pipeline", [False, True], ids=["tensor", "pipeline"])
def test_a_block_is_held_until_every_rank_has_copied_it(daemon: Daemon, pipeline: bool) -> None:
    with scripted_engine(daemon.url(), ranks=2, pipeline=pipeline, engine_id="held") as engine:
        request = engine.add("a", "two ranks", 64)
        engine.admit(request)
        before = engine.pool.held
        engine.prefill(request)
        held = engine.half._block_refs.held_count
        assert engine.pool.held == before + held
        engine.finish(request)
        engine.settle()
        assert engine.pool.held == 0
        assert engine.run("b", "two ranks", 64) == 64
        assert engine.counts["store_blocks"] == 4


def test_ranks_that_hold_the_same_bytes_store_them_once(daemon: Daemon) -> None:
    with scripted_engine(daemon.url(), ranks=2, replicas=2, engine_id="replicas") as engine:
        before = daemon.counters()["stored_bytes"]
        assert engine.run("a", "replicated", 80) == 0
        assert daemon.counters()["stored_bytes"] - before == 5 * PAGE_BYTES
        assert engine.run("b", "replicated", 80) == 80


def test_the_answer_is_the_same_until_the_request_is_admitted(engine: ScriptedEngine) -> None:
    engine.run("a", "asked often", 96)
    request = engine.add("b", "asked often", 96)
    until(lambda: engine.half.matched(request, 0) is not None, "an answer")
    assert {engine.half.matched(request, 0) for _ in range(50)} == {96}
    assert engine.half.matched(request, 32) == 64
    assert engine.admit(request, local_tokens=32) == 64
    assert engine.wait_loaded(request)
    assert all(engine.holds(request, 0, at) for at in range(2, 6))
    engine.finish(request)


def test_a_request_that_ends_while_it_loads_leaves_nothing(
    daemon: Daemon, engine: ScriptedEngine
) -> None:
    engine.run("a", "aborted", 160)
    for number in range(20):
        request = engine.add(f"b{number}", "aborted", 160)
        assert engine.admit(request) == 160
        engine.finish(request)
    asked = [engine.add(f"c{number}", "aborted", 160) for number in range(20)]
    for request in asked:
        engine.finish(request)
    engine.settle()
    until(lambda: not daemon.stats().leases, "no lease is left")


def test_a_lease_does_not_grow_old_in_a_queue(daemon: Daemon) -> None:
    with scripted_engine(daemon.url(), engine_id="queue", lease_s=60) as engine:
        engine.run("a", "queued", 96)
        request = engine.add("b", "queued", 96)
        until(lambda: daemon.stats().leases, "a lease")
        state = engine.half._requests.find("b")
        assert state is not None
        for _ in range(2 * ASKS_MAX):
            until(lambda: engine.half.matched(request, 0) == 96, "an offer")
            assert state.lookup is not None
            state.lookup.answered_at -= 61
            until(lambda: engine.step({}) and not daemon.stats().leases, "it is given back")
        assert engine.admit(request) == 96
        assert engine.wait_loaded(request)
        engine.finish(request)


def test_a_request_whose_load_failed_is_not_loaded_again(engine: ScriptedEngine) -> None:
    engine.run("a", "failing", 96)
    request = engine.add("b", "failing", 96)
    assert engine.admit(request) == 96
    jobs, _ = engine.half._loads.take_due()
    jobs[0].moves[0].extents["generation"] += 1
    engine.half._loads._due = jobs
    assert not engine.wait_loaded(request)
    assert engine.half.matched(request, 0) == 0
    engine.prefill(request)
    engine.finish(request)
    engine.settle()
    assert engine.counts["load_failed"] == 1
    assert engine.run("c", "failing", 96) == 96


def test_a_request_that_skips_the_cache_asks_nothing(engine: ScriptedEngine) -> None:
    engine.run("a", "skipped", 96)
    request = engine.add("b", "skipped", 96, skips=True)
    assert engine.half.matched(request, 0) == 0
    engine.admit(request)
    engine.prefill(request)
    engine.finish(request)


@pytest.mark.parametrize(("kind", "window"), [(GroupKind.SLIDING_WINDOW, 40), (GroupKind.MAMBA, 0)])
def test_a_hybrid_loads_what_the_boundary_needs(
    daemon: Daemon, kind: GroupKind, window: int
) -> None:
    other = GroupSpec(kind, BLOCK_TOKENS, PAGE_BYTES, window_tokens=window)
    with scripted_engine(daemon.url(), groups=(FULL, other), engine_id="hybrid") as engine:
        request = engine.add("a", f"hybrid {kind}", 160)
        engine.admit(request)
        engine.compute(request)
        states = {"a": [(1, request.tables[1][8], 144)]} if kind is GroupKind.MAMBA else {}
        engine.step({"a": 160}, states)
        engine.finish(request)
        engine.settle()
        again = engine.add("b", f"hybrid {kind}", 160)
        # One block is missing: a state cannot go back one token.
        assert engine.admit(again) == 144
        assert engine.wait_loaded(again)
        assert all(engine.holds(again, 0, at) for at in range(9))
        needed = [at for at in range(9) if engine.holds(again, 1, at)]
        assert needed == ([8] if kind is GroupKind.MAMBA else [6, 7, 8])
        engine.finish(again)


def test_one_engine_prefills_and_another_decodes(daemon: Daemon) -> None:
    with (
        scripted_engine(daemon.url(), facts={"loads": False}, engine_id="p") as first,
        scripted_engine(daemon.url(), facts={"stores": False}, engine_id="d") as second,
    ):
        request = first.add("a", "handed over", 160)
        assert first.half.matched(request, 0) == 0
        first.admit(request)
        first.prefill(request)
        assert first.finish(request) == 160
        # The stores are still under way: the other engine waits for them, but not forever.
        other = second.add("b", "handed over", 160, handover_tokens=160)
        assert second.half.matched(other, 0) is None
        first.settle()
        assert second.admit(other) == 160
        assert second.wait_loaded(other)
        second.finish(other)
        lost = second.add("c", "never stored", 160, handover_tokens=160)
        assert second.admit(lost) == 0
        second.finish(lost)


def test_blocks_are_known_by_what_their_hashes_do_not_cover(engine: ScriptedEngine) -> None:
    assert engine.run("a", "folded", 96, find_key_salt=lambda: b"first") == 0
    assert engine.run("b", "folded", 96, find_key_salt=lambda: b"first") == 96
    assert engine.run("c", "folded", 96, find_key_salt=lambda: b"second") == 0
    assert engine.run("d", "folded", 96) == 0
    assert engine.run("e", "no digest", 96, find_key_salt=lambda: None) == 0
    engine.step({})
    assert engine.counts["store_blocks"] == 3 * 6


def test_a_bug_of_ours_costs_a_hit_and_not_the_engine(engine: ScriptedEngine) -> None:
    """Promised loads complete, whatever happens to stores."""
    engine.run("a", "bug", 96)
    other = engine.add("b", "another", 96)
    engine.admit(other)
    request = engine.add("c", "bug", 96)
    assert engine.admit(request) == 96
    engine.half._stores.plan = _broken  # type: ignore[method-assign]
    engine.step({"b": 96})
    assert engine.counts["troubles"] == 1
    assert engine.wait_loaded(request)
    del engine.half._stores.plan  # type: ignore[method-assign]
    engine.finish(request)
    engine.finish(other)


def _broken(*_: object) -> None:
    raise ZeroDivisionError("a bug of ours")


def test_a_daemon_that_is_killed_and_comes_back() -> None:
    with running_daemon() as daemon, scripted_engine(daemon.url()) as engine:
        assert engine.run("a", "before", 96) == 0
        loading = engine.add("b", "before", 96)
        assert engine.admit(loading) == 96
        daemon.kill()
        engine.wait_loaded(loading)
        engine.finish(loading)
        for number in range(3):
            assert engine.run(f"away{number}", f"away {number}", 96) == 0
        daemon.start()
        engine.wait_ready()
        until(lambda: engine.run("c", "before", 96) == 96, "the old blocks are found again")
        assert engine.run("d", "after", 96) == 0
        assert engine.run("e", "after", 96) == 96


def test_a_daemon_that_stands_still_is_no_hit() -> None:
    with (
        running_daemon(arena=False, shared_index=False) as daemon,
        scripted_engine(daemon.url("call_ms=300&lookup_ms=300"), lookup_wait_ms=50) as engine,
    ):
        assert engine.run("a", "still", 96) == 0
        assert daemon.process is not None
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            for number in range(5):
                assert engine.run(f"b{number}", "still", 96) == 0
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        until(lambda: engine.run("c", "still", 96) == 96, "hits again")


def test_ranks_that_differ_are_not_served(caplog: pytest.LogCaptureFixture) -> None:
    same = Handshake(contract_of((FULL,), 1, 1).to_json())
    assert agreed([same, same]) is same
    assert agreed([same, Handshake('{"a":1}')]) is None
    assert agreed([same, Handshake("", problem="no pages here")]) is None
    assert "no pages here" in caplog.text
    assert agreed([]) is None


def test_no_daemon_at_all() -> None:
    with scripted_engine("kvhearth+unix:///nowhere/kvhearth", ready=False) as engine:
        assert engine.run("a", "alone", 96) == 0
        assert engine.run("b", "alone", 96) == 0
        assert engine.tables_asked == 0


def test_a_bound_on_loads(daemon: Daemon) -> None:
    with scripted_engine(daemon.url(), engine_id="bound", max_load_tokens=64) as engine:
        engine.run("a", "bounded", 160)
        assert engine.run("b", "bounded", 160) == 64
        assert engine.run("c", "bounded", 160, load_tokens_max=33) == 32
        stored = engine.counts["store_blocks"]
        assert engine.run("d", "bounded", 160, load_tokens_max=0) == 0
        assert engine.counts["store_blocks"] == stored, "a known block is stored again"
    with scripted_engine(daemon.url(), engine_id="bound2", min_load_tokens=200) as engine:
        assert engine.run("e", "bounded", 160) == 0
    with scripted_engine(daemon.url(), engine_id="bound3", max_load_tokens=0) as engine:
        assert engine.run("f", "bounded", 160) == 0


def test_blocks_are_kept_until_their_session_goes_on(daemon: Daemon) -> None:
    before = daemon.counters().get("retained_ended{released}", 0)
    with scripted_engine(daemon.url(), engine_id="agent") as engine:
        engine.run("a", "agent", 160, retain_s=600.0, session_id="s")
        until(lambda: daemon.stats().retained_blocks == 10, "they are kept")
        assert engine.run("b", "agent", 160)
        until(lambda: daemon.counters()["retained_hit_blocks"], "a lookup of them is posted")
        engine.run("c", "agent", 160, session_id="s")
        until(lambda: not daemon.stats().retained_blocks, "they are kept no more")
        assert daemon.counters()["retained_ended{released}"] == before + 10
        engine.run("d", "agent", 165, retain_s=1e7)
        until(lambda: daemon.counters().get("retained_ended{refused}"), "months are refused")
        assert daemon.counters()["refusals{bad_ttl}"]


def test_a_bound_on_stores(daemon: Daemon) -> None:
    with scripted_engine(daemon.url(), engine_id="kept") as engine:
        engine.run("a", "unstored", 160, store_tokens_max=0)
        assert engine.counts.get("store_blocks", 0) == 0
        assert engine.run("b", "unstored", 160, store_tokens_max=64) == 0
        assert engine.run("c", "unstored", 160) == 64


def test_a_reset_drops_only_what_is_the_engines_own(daemon: Daemon) -> None:
    with scripted_engine(daemon.url(), engine_id="reset", on_reset="keep") as engine:
        engine.run("a", "reset", 96)
        assert engine.half.reset()
        assert engine.run("b", "reset", 96) == 96
    with scripted_engine(daemon.url(), engine_id="reset") as engine:
        with scripted_engine(daemon.url(), engine_id="another"):
            assert engine.half.reset()
            assert engine.run("c", "reset", 96) == 96
        until(lambda: engine.half.reset() and engine.run("d", "reset", 96) == 0, "it is alone")
        assert engine.run("e", "reset", 96) == 96


def test_after_a_reset_what_runs_stores_nothing(daemon: Daemon) -> None:
    """The request's KV comes from two sets of weights."""
    with scripted_engine(daemon.url(), engine_id="live", on_reset="drop") as engine:
        engine.run("a", "weights", 96)
        request = engine.add("b", "weights", 160)
        assert engine.admit(request) == 96
        epoch = engine.half._client.epoch
        assert not engine.half.reset(), "loads are under way"
        assert engine.half._client.epoch == epoch
        assert engine.wait_loaded(request)
        waiting = engine.add("c", "waited", 96)
        assert engine.half.reset()
        stored = engine.counts["store_blocks"]
        engine.prefill(request)
        engine.finish(request)
        engine.settle()
        engine.step({})
        assert engine.counts["store_blocks"] == stored
        assert engine.admit(waiting) == 0
        engine.prefill(waiting)
        engine.finish(waiting)
        engine.settle()
        assert engine.run("d", "waited", 96) == 96
        assert engine.run("e", "weights", 96) == 0


def test_a_producer_stores_what_is_not_there_yet(daemon: Daemon) -> None:
    with scripted_engine(daemon.url(), facts={"loads": False}, engine_id="once") as engine:
        for name in ("a", "b"):
            request = engine.add(name, "produced", 96, find_key_salt=lambda: b"first")
            state = engine.half._requests.find(name)
            assert state is not None
            assert state.lookup is not None
            assert state.lookup.wait(HUNG_S) is not None
            engine.admit(request)
            engine.prefill(request)
            engine.finish(request)
            engine.settle()
        engine.step({})
        assert engine.counts["store_blocks"] == 6
    daemon.wait_quiet()


GROUP_SETS = {
    "one group": (FULL,),
    "window": (
        FULL,
        GroupSpec(GroupKind.SLIDING_WINDOW, 2 * BLOCK_TOKENS, PAGE_BYTES, window_tokens=40),
    ),
    "states": (
        GroupSpec(GroupKind.FULL, 2 * BLOCK_TOKENS, PAGE_BYTES),
        GroupSpec(GroupKind.MAMBA, 2 * BLOCK_TOKENS, PAGE_BYTES),
    ),
}


@pytest.mark.parametrize("groups", GROUP_SETS.values(), ids=GROUP_SETS)
def test_block_tables_are_asked_for_at_boundaries_only(
    daemon: Daemon, groups: tuple[GroupSpec, ...]
) -> None:
    """An engine may make a new list of all blocks for each query: vLLM takes 1 to 19 ms a step for
    64 long requests, if it is queried for each of them in every step.
    """
    steps = 8 * BLOCK_TOKENS
    with scripted_engine(daemon.url(), groups=groups, engine_id=f"tables{len(groups)}") as engine:
        request = engine.add("a", f"tables {groups}", 32 + steps)
        engine.admit(request)
        engine.prefill(request, 32)
        before = engine.tables_asked
        for _ in range(steps):
            engine.step({"a": 1})
            request.num_computed_tokens += 1
        boundaries = {
            tokens for spec in groups for tokens in range(32, 32 + steps + 1, spec.block_tokens)
        }
        assert 0 < engine.tables_asked - before < len(boundaries)
        engine.finish(request)
        engine.settle()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_nobody_steps_holds_no_block_at_its_end(daemon: Daemon, ranks: int) -> None:
    """After the last request of an engine in the caller's process there is no further step."""
    name, facts = f"unstepped {ranks}", {"stepped": False}
    with scripted_engine(daemon.url(), engine_id=name, ranks=ranks, facts=facts) as engine:
        others = [engine.add(name, f"unstepped {name}", 160) for name in "ab"]
        for request in others:
            engine.admit(request)
            engine.compute(request)
        engine.step({"a": 160, "b": 100})
        for request, tokens in zip(others, (160, 100), strict=True):
            request.num_computed_tokens = tokens
            engine.finish(request)
        assert engine.pool.held == 0
        assert engine.half._stores.drain(HUNG_S)
        assert engine.run("c", "unstepped a", 160) == 160
        assert engine.run("d", "unstepped b", 160) == 96


def test_a_step_of_many_requests_is_one_job_and_one_commit(daemon: Daemon) -> None:
    """Each request's block follows its own one, also where one of them ends in the same step."""
    with scripted_engine(daemon.url(), engine_id="one job") as engine:
        requests = [engine.add(f"r{at}", f"one job {at}", 6 * BLOCK_TOKENS) for at in range(5)]
        for request in requests:
            engine.admit(request)
            engine.prefill(request, 2 * BLOCK_TOKENS)
            engine.settle()
        before = daemon.stats().counters["commits"]
        jobs = []
        for _ in range(BLOCK_TOKENS + DECODE_STEPS):
            running = {
                each.request_id: 1 for each in requests if each.request_id in engine.requests
            }
            jobs += engine.step(running).stores
            for request in requests:
                request.num_computed_tokens += request.request_id in running
            if len(running) == len(requests):
                engine.finish(requests[0])
        engine.settle()
        assert [len(job.moves[0].pages) for job in jobs] == [4]
        assert daemon.stats().counters["commits"] - before == 1
        for request in requests[1:]:
            engine.finish(request)
        for at in range(1, 5):
            assert engine.run(f"again{at}", f"one job {at}", 6 * BLOCK_TOKENS) == 3 * BLOCK_TOKENS


def test_blocks_of_a_request_that_was_aborted_in_its_step_are_held(daemon: Daemon) -> None:
    """They are chosen when it ends, and copied with the next step's."""
    with scripted_engine(daemon.url(), engine_id="aborted in its step") as engine:
        first = engine.add("a", "aborted in its step", 2 * BLOCK_TOKENS)
        other = engine.add("b", "beside the aborted one", 2 * BLOCK_TOKENS)
        for request in (first, other):
            engine.admit(request)
            engine.compute(request)
        engine.half._stores.begin, begin = lambda: False, engine.half._stores.begin  # type: ignore[method-assign]
        engine.half._stores._page_room = 0
        engine.step({"a": 2 * BLOCK_TOKENS, "b": 1})  # no room for any block
        engine.half._stores.begin = begin  # type: ignore[method-assign]
        first.num_computed_tokens, other.num_computed_tokens = 2 * BLOCK_TOKENS, 1
        engine.finish(first)
        assert engine.half.has_work
        assert engine.half._block_refs.held_count == 2
        (job,) = engine.step({"b": 2 * BLOCK_TOKENS - 1}).stores
        other.num_computed_tokens = 2 * BLOCK_TOKENS
        assert len(job.moves[0].pages) == 4
        engine.finish(other)
        engine.settle()
        for name in ("aborted in its step", "beside the aborted one"):
            assert engine.run(f"again {name}", name, 2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
