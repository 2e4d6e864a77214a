"""Pipelines with a real daemon: order, back-pressure, no lost blocks, and every way to die."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.pipelines import (
    BLOCK_TOKENS,
    DONE_S,
    PAGES,
    GateCopier,
    PipedEngine,
    new_keys,
    piped_engine,
)

from kvhearth.errors import Reason
from kvhearth.transfer import StoreDone

ARENA_BLOCKS = 256
"""Blocks of 64 KiB in ``support.daemon.SMALL``; a group may hold a quarter as reservations."""
AWAY_S = 3.0
"""Time for which stores wait for an absent daemon; calls that do not wait take far less."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon whose books must balance at the end, with nothing left that a client held."""
    with running_daemon() as daemon:
        yield daemon
        if not daemon.dead:
            daemon.wait_quiet()


@pytest.fixture(autouse=True)
def _open_gate() -> Iterator[None]:
    GateCopier.reset()
    yield
    GateCopier.reset()


def outcomes(engine: PipedEngine) -> list[StoreDone]:
    """Returns the outcomes of everything that was submitted."""
    assert engine.stores.drain(DONE_S), "stores hang"
    return engine.stores.poll()


# -- without failures --------------------------------------------------------------------------


def test_blocks_come_back_and_a_second_store_of_them_is_a_duplicate(daemon: Daemon) -> None:
    keys = new_keys(100)
    with piped_engine(daemon.url()) as engine:
        done = engine.store(keys)
        assert (done.stored, done.duplicate, done.failed, done.reason) == (100, 0, 0, "")
        loaded = engine.load(keys)
        assert loaded.hit_tokens == loaded.usable_tokens == 100 * BLOCK_TOKENS
        assert loaded.loaded[0].all()
        assert loaded.reason == ""
        again = engine.store([*keys[90:], *new_keys(2)], parent=keys[89])
        assert (again.stored, again.duplicate, again.failed) == (2, 10, 0)
        assert engine.load(new_keys(3)).reason == ""  # a miss is no failure


def test_stores_end_in_the_order_of_their_submission(daemon: Daemon) -> None:
    with piped_engine(daemon.url()) as engine:
        tickets = []
        for index in range(12):
            keys = new_keys(1 + index * 7 % 20)
            pages = engine.compute(keys, first_page=index * 20)
            tickets.append(engine.stores.submit(0, keys, pages, wait_s=DONE_S))
        assert [done.ticket for done in outcomes(engine)] == tickets
        assert engine.counter("store_failed") == engine.counter("store_dropped") == 0


def test_a_full_queue_throttles_and_holds_its_bound(daemon: Daemon) -> None:
    GateCopier.gate.clear()
    with piped_engine(daemon.url(), queue_blocks_max=40, copiers=GateCopier) as engine:
        keys = new_keys(60)
        pages = engine.compute(keys)
        taken = [engine.stores.submit(0, keys[i : i + 12], pages[i : i + 12]) for i in (0, 12, 24)]
        assert None not in taken
        started = time.monotonic()
        assert engine.stores.submit(0, keys[36:48], pages[36:48]) is None
        assert engine.stores.submit(0, keys[36:48], pages[36:48], wait_s=0.05) is None
        assert time.monotonic() - started < DONE_S
        assert engine.stores.submit(0, keys[36:40], pages[36:40]) is not None  # 40 of 40
        assert engine.stores.submit(0, keys[40:41], pages[40:41]) is None
        assert engine.counter("store_throttled") == 25
        assert engine.stores.poll() == []
        threading.Timer(0.1, GateCopier.gate.set).start()
        assert engine.stores.submit(0, keys[40:60], pages[40:60], wait_s=DONE_S) is not None
        assert sum(done.stored for done in outcomes(engine)) == 60
        assert engine.loadable(keys) == 60


def test_four_times_the_arena_back_to_back_drops_nothing(daemon: Daemon) -> None:
    with piped_engine(daemon.url(), stock_blocks_max=32, batch_blocks=32) as engine:
        keys: list[bytes] = []
        pages = engine.compute(new_keys(32))  # their content does not matter here
        for _ in range(4 * ARENA_BLOCKS // 32 - 4):
            more = new_keys(32)
            parent = keys[-1] if keys else b""
            assert engine.stores.submit(0, more, pages, parent, wait_s=DONE_S) is not None
            keys += more
        assert engine.stores.drain(DONE_S)
        last = new_keys(128)
        done = [*engine.stores.poll(), engine.store(last, parent=keys[-1])]
        assert sum(one.stored for one in done) == 4 * ARENA_BLOCKS
        assert {one.reason for one in done} == {""}
        assert engine.counter("store_dropped") == engine.counter("store_failed") == 0
        loaded = engine.load(last)
        assert loaded.loaded[0].sum() * BLOCK_TOKENS == loaded.hit_tokens == loaded.usable_tokens
    assert daemon.stats().segments[0].committed_bytes <= 16 << 20


# -- a daemon that dies ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["reserve.before:4", "reserve.after:4", "commit.before:4", "commit.after:4"]
)
def test_a_daemon_that_dies_in_mid_store(fault: str) -> None:
    with stopped_daemon() as daemon:
        assert daemon.start(fault)
        with piped_engine(daemon.url(), reserve_wait_s=2.0) as engine:
            die_in_mid_store(daemon, engine)
        daemon.wait_quiet()


def test_a_daemon_that_dies_under_a_copy(daemon: Daemon) -> None:
    GateCopier.on_store = staticmethod(lambda number: daemon.kill() if number == 4 else None)
    with piped_engine(daemon.url(), reserve_wait_s=2.0, copiers=GateCopier) as engine:
        die_in_mid_store(daemon, engine)


def die_in_mid_store(daemon: Daemon, engine: PipedEngine) -> None:
    """Stores until the daemon is dead, restarts it, stores again, and checks every byte."""
    keys = new_keys(160)
    pages = engine.compute(keys)
    for start in range(0, 160, 32):
        part = slice(start, start + 32)
        parent = keys[start - 1] if start else b""
        assert engine.stores.submit(0, keys[part], pages[part], parent, wait_s=DONE_S)
    done = outcomes(engine)
    until(lambda: daemon.dead, "the daemon dies")
    assert sum(one.stored + one.duplicate + one.failed for one in done) == 160
    failed = [one for one in done if one.failed]
    assert failed
    assert all(one.reason for one in failed)
    # While the daemon is away: answers without waiting.
    until(lambda: not engine.client.session_id, "the loss is noticed")
    assert engine.load(keys[:10]).reason == Reason.DAEMON_AWAY
    assert engine.store(new_keys(4)).reason

    daemon.start()
    until(lambda: engine.client.wait_ready(0.1), "it attaches anew")
    fresh = new_keys(100)
    again = engine.store(fresh)
    assert (again.stored, again.failed, again.reason) == (100, 0, "")
    assert engine.load(fresh).usable_tokens == 100 * BLOCK_TOKENS
    # Acknowledged blocks are served unless evicted; their bytes are right (see close).
    assert engine.loadable(keys) >= 0


def test_a_daemon_that_dies_in_mid_load(daemon: Daemon) -> None:
    with piped_engine(daemon.url()) as engine:
        keys = new_keys(128)
        assert engine.store(keys).stored == 128
        pages = np.arange(PAGES, PAGES + 128)
        groups = [{0: (keys[i : i + 32], pages[i : i + 32])} for i in (0, 32, 64, 96)]
        tickets = [engine.loads.submit(groups[index % 4]) for index in range(40)]
        first = engine.loads.wait(tickets[0], DONE_S)  # type: ignore[arg-type]
        daemon.kill()
        assert engine.loads.drain(DONE_S), "loads hang"
        rest = engine.loads.poll()
        assert first is not None
        assert len(rest) == 39
        for done in rest:
            assert done.usable_tokens == 32 * BLOCK_TOKENS or done.reason
        daemon.start()
        until(lambda: engine.client.wait_ready(0.1), "it attaches anew")
        until(lambda: engine.load(keys).usable_tokens == 128 * BLOCK_TOKENS, "all is served again")
        assert engine.store(new_keys(30)).stored == 30


def test_it_survives_restarts_under_load(daemon: Daemon) -> None:
    with piped_engine(daemon.url(), reserve_wait_s=3.0) as engine:
        keys: list[bytes] = []
        failures = 0
        for _ in range(3):
            killer = threading.Timer(0.05, daemon.restart)
            killer.start()
            for _ in range(4):
                more = new_keys(48)
                failures += engine.store(more).failed
                failures += int(48 - engine.load(more).loaded[0].sum())
                keys += more
            killer.join()
            until(lambda: engine.client.wait_ready(0.1), "it attaches anew")
        fresh = new_keys(64)
        until(lambda: engine.store(fresh).stored == 64 or engine.load(fresh).usable_tokens, "works")
        engine.loadable(keys[-100:])


def test_without_a_daemon_everything_has_an_outcome_and_a_reason() -> None:
    with (
        stopped_daemon(arena=False) as daemon,
        piped_engine(daemon.url(), ready=False, reserve_wait_s=AWAY_S) as engine,
    ):
        keys = new_keys(32)
        pages = engine.compute(keys)
        started = time.monotonic()
        for _ in range(8):
            assert engine.stores.submit(0, keys, pages) is not None
        assert engine.stores.submit(0, keys, pages) is None  # 256 of 256
        loaded = engine.load(keys)
        assert (loaded.reason, loaded.usable_tokens) == (Reason.DAEMON_AWAY, 0)
        assert not loaded.loaded[0].any()
        assert time.monotonic() - started < AWAY_S
        done = outcomes(engine)
        assert [(one.failed, one.reason) for one in done] == [(32, "daemon_away")] * 8
        # The daemon has been silent for long enough: later stores do not wait for it.
        until(lambda: time.monotonic() - started > AWAY_S, "so long")
        started = time.monotonic()
        assert engine.store(keys).reason == Reason.DAEMON_AWAY
        assert time.monotonic() - started < AWAY_S
        assert engine.counter("store_dropped") == 9 * 32


# -- blocks that fail --------------------------------------------------------------------------


def test_a_block_whose_copy_fails_gives_its_slot_back(daemon: Daemon) -> None:
    with piped_engine(daemon.url()) as engine:
        keys = new_keys(10)
        pages = engine.compute(keys)
        pages[4] = 99_999
        ticket = engine.stores.submit(0, keys, pages)
        assert ticket is not None
        done = engine.stores.wait(ticket, DONE_S)
        assert done is not None
        assert (done.stored, done.failed, done.reason) == (9, 1, "bad_page")
        assert engine.load(keys).usable_tokens == 4 * BLOCK_TOKENS
        assert engine.loadable(keys) == 9


def test_bytes_that_rot_are_a_shorter_hit_and_are_reported(daemon: Daemon) -> None:
    with piped_engine(daemon.url()) as engine:
        keys = new_keys(10)
        assert engine.store(keys).stored == 10
        found = engine.client.lookup({0: keys})
        extent = found.groups[0].extents[6]
        arena = engine.client.arena
        assert arena is not None
        arena.view(int(extent["segment"]))[int(extent["offset"]) + 77] ^= 1
        del arena
        engine.client.release(found.lease)
        done = engine.load(keys)
        assert done.hit_tokens == 10 * BLOCK_TOKENS
        assert done.usable_tokens == 6 * BLOCK_TOKENS
        assert done.reason == "checksum_mismatch"
        assert done.loaded[0].tolist() == [True] * 6 + [False] + [True] * 3
        until(lambda: engine.load(keys).hit_tokens == 6 * BLOCK_TOKENS, "the daemon removes it")


def test_arguments_that_cannot_be_right_are_outcomes(daemon: Daemon) -> None:
    with piped_engine(daemon.url()) as engine:
        keys = new_keys(3)
        for arguments, reason in [
            ((0, keys, [0, 1]), "bad_extents"),
            ((0, keys, [0.5, 1.5, 2.5]), "bad_extents"),
            ((1, keys, [0, 1, 2]), "bad_group"),
            ((0, [b"short"] * 3, [0, 1, 2]), "bad_keys"),
            ((0, keys, [0, 1, 2], b"short"), "bad_keys"),
            ((0, new_keys(300), list(range(300))), "too_many_keys"),
        ]:
            ticket = engine.stores.submit(*arguments)  # type: ignore[arg-type]
            assert ticket is not None
            done = engine.stores.wait(ticket, DONE_S)
            assert done is not None
            assert (done.failed, done.reason) == (len(arguments[1]), reason)
        bad = engine.loads.load_now({0: (keys, [0, 1])})
        assert bad is not None
        assert (bad.reason, bad.loaded[0].tolist()) == ("bad_extents", [False] * 3)
        empty = engine.store([])
        assert (empty.stored, empty.failed, empty.reason) == (0, 0, "")


def test_a_thread_that_fails_goes_on(daemon: Daemon) -> None:
    def explode(number: int) -> None:
        if number == 2:
            raise RuntimeError("scripted")

    GateCopier.on_store = staticmethod(explode)
    with piped_engine(daemon.url(), copiers=GateCopier) as engine:
        keys = new_keys(48)  # three batches
        done = engine.store(keys)
        assert (done.stored, done.failed, done.reason) == (16, 32, "internal")
        assert engine.counter("store_crashes") == 1
        assert engine.store(new_keys(20)).stored == 20


# -- weights that change -----------------------------------------------------------------------


def test_blocks_of_old_weights_are_not_kept_under_the_new_epoch(daemon: Daemon) -> None:
    GateCopier.gate.clear()
    with piped_engine(daemon.url(), copiers=GateCopier) as engine:
        keys = new_keys(64)  # the first batches are under way, the last have not begun
        ticket = engine.stores.submit(0, keys, engine.compute(keys))
        assert ticket is not None
        until(lambda: GateCopier.stores, "the first batch begins")
        assert engine.client.bump_epoch() > 0
        GateCopier.gate.set()
        done = engine.stores.wait(ticket, DONE_S)
        assert done is not None
        assert (done.stored, done.failed, done.reason) == (0, 64, Reason.STALE_EPOCH)
        assert engine.load(keys).hit_tokens == 0
        assert engine.store(keys).stored == 64
        assert engine.load(keys).usable_tokens == 64 * BLOCK_TOKENS


def test_a_load_that_began_with_old_weights_is_a_miss(daemon: Daemon) -> None:
    with piped_engine(daemon.url()) as engine:
        keys = new_keys(200)
        assert engine.store(keys[:150]).stored == 150
        ticket = engine.loads.submit({0: (keys, np.arange(PAGES, PAGES + 200))})
        assert engine.client.bump_epoch() > 0
        assert ticket is not None
        done = engine.loads.wait(ticket, DONE_S)
        assert done is not None
        if done.reason:  # otherwise it would have ended before the bump
            assert (done.reason, done.usable_tokens) == (Reason.STALE_EPOCH, 0)
            assert not done.loaded[0].any()


# -- the end -----------------------------------------------------------------------------------


def test_close_fails_what_has_not_begun(daemon: Daemon) -> None:
    GateCopier.gate.clear()
    with piped_engine(daemon.url(), copiers=GateCopier) as engine:
        keys = new_keys(64)
        assert engine.stores.submit(0, keys, engine.compute(keys)) is not None
        until(lambda: GateCopier.stores, "the first batch begins")
        assert not engine.stores.close(0.1)
        GateCopier.gate.set()
        assert engine.stores.close(DONE_S)
        (done,) = engine.stores.poll()
        assert done.reason == Reason.CLOSED
        assert done.stored + done.failed == 64
        assert done.stored in (16, 32)
        late = engine.store(new_keys(1))
        assert (late.failed, late.reason) == (1, Reason.CLOSED)


def test_a_process_that_just_ends_is_cleaned_up_after(daemon: Daemon) -> None:
    script = """
        import secrets, sys
        import numpy as np
        from support.engine import contract_of
        from kvhearth import connect
        from kvhearth.page_layout import PagedKV
        from kvhearth.transfer import LoadPipeline, StorePipeline
        client = connect(sys.argv[1], contract_of(65536), engine_id="e")
        assert client.wait_ready(20)
        kv = {0: PagedKV([np.zeros((64, 65536), np.uint8)])}
        stores = StorePipeline(client, kv, queue_blocks_max=640, stock_blocks_max=32)
        loads = LoadPipeline(client, kv)
        for _ in range(10):
            keys = [secrets.token_bytes(32) for _ in range(64)]
            assert stores.submit(0, keys, range(64)) and loads.submit({0: (keys, range(64))})
        print("ends")
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), daemon.url()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_a_client_that_closes_first_ends_the_stores(daemon: Daemon) -> None:
    with piped_engine(daemon.url(), reserve_wait_s=0.3) as engine:
        keys = new_keys(64)
        assert engine.stores.submit(0, keys, engine.compute(keys)) is not None
        assert engine.client.close(DONE_S)
        (done,) = outcomes(engine)
        assert done.stored + done.duplicate + done.failed == 64
        assert engine.load(keys).reason == Reason.CLOSED


def test_a_forked_child_is_told_nothing_and_does_not_hang(daemon: Daemon) -> None:
    with piped_engine(daemon.url()) as engine:
        assert engine.store(new_keys(4)).stored == 4
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert engine.stores.submit(0, new_keys(1), [0]) is None
                assert engine.loads.submit({0: (new_keys(1), [0])}) is None
                assert engine.stores.poll() == engine.loads.poll() == []
                assert engine.stores.drain(5)
                assert engine.stores.close()
                assert engine.loads.close()
                status = 0
            finally:
                os._exit(status)
        end = time.monotonic() + DONE_S
        pid, status = 0, 1
        while not pid and time.monotonic() < end:
            pid, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not pid:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert (pid, status) == (child, 0)
        assert engine.store(new_keys(4)).stored == 4
