"""Slots that a client may still be writing to: one test per rule, on real, misbehaving processes.

In all of them a *victim* holds slots that it keeps writing 0xEE to, and a *thief*, another
engine, repeatedly stores as much as the arena takes. Had the daemon handed one of the victim's
slots to the thief, the thief would find 0xEE in place of its own bytes.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.puppet import puppets

from kvhearth.copiers.host import HostCopier
from kvhearth.model import Records
from kvhearth.page_layout import PagedKV
from kvhearth.session.arena import ArenaMapping
from kvhearth_lab.harness.engine import Engine, Stored, contract_of, engine_of

PAGE = 512 << 10
SLOTS = 16
"""Slots in the 8 MiB of memory."""
SETTINGS = {
    "memory": "8MiB",
    "stock_fraction_max": 0.7,
    "held_fraction_max": 0.9,
    "drain_grace_s": 0.1,
}
ROUNDS = 3
"""How often a thief that has all it may have tries for more."""
VICTIM = contract_of(PAGE, shards=2, model="victim")
ALONE = contract_of(PAGE, model="victim")
THIEF = contract_of(PAGE, model="thief")
GARBAGE = 0xEE


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with an arena of 16 slots."""
    with running_daemon(**SETTINGS) as running:
        yield running


@pytest.fixture
def thief(daemon: Daemon) -> Iterator[Engine]:
    """An engine with one rank, attached."""
    with engine_of(daemon.url(), THIEF, "thief") as engine:
        yield engine


def slots_of(extents: Records) -> set[int]:
    """Slot numbers."""
    return set(extents["slot"].reshape(-1).tolist())


def steal(thief: Engine) -> set[int]:
    """Stores as much as one reservation gives, checks every byte, and returns the slots."""
    keys = [secrets.token_bytes(32) for _ in range(10)]
    # Nothing can be stored while the lease of the previous check is still being released.
    stored = until(lambda: _stored(thief.store(keys)), "the thief stores")
    seen = thief.check(stored.bound)
    assert (seen.bad, len(seen.right)) == ([], len(stored.bound))
    return set(stored.slots)


def _stored(stored: Stored) -> Stored | None:
    assert stored.reason in ("", "held_cap", "stock_cap")
    return stored if stored.bound else None


def must_not_get(thief: Engine, held: set[int]) -> None:
    """Checks that the thief gets none of these slots, however hard it tries."""
    taken: set[int] = set()
    rounds = itertools.count(1)

    def greedy() -> bool:
        taken.update(steal(thief))
        assert not taken & held, "a slot was reused while somebody writes to it"
        return len(taken) == SLOTS - len(held) and next(rounds) > ROUNDS

    until(greedy, "the thief gets all that it may have")


def gets(thief: Engine, wanted: set[int]) -> None:
    """Checks that the thief gets all of these slots now."""
    taken: set[int] = set()
    until(lambda: taken.update(steal(thief)) or wanted <= taken, "the slots are used again")


# -- (a) slots of a group come back only when every member is drained ------------------------------


@pytest.mark.parametrize(
    "holder", ["lives on", "lives on unmapped", "is stopped", "child maps", "child has it open"]
)
def test_slots_stay_aside_while_anybody_may_write(
    daemon: Daemon, thief: Engine, holder: str
) -> None:
    with puppets(2) as (scheduler, worker):
        scheduler.attach(daemon.url(), VICTIM)
        worker.attach(daemon.url(), VICTIM, rank=1, keep_descriptors=holder.startswith("child"))
        extents = scheduler.reserve(3)
        mine = extents[1::2]
        if holder == "child maps":
            worker.fork("map", mine, GARBAGE)
        elif holder == "child has it open":
            worker.fork("descriptor")
        else:
            worker.scribble(mine, GARBAGE)
        if holder == "is stopped":
            worker.stop()
        elif holder.startswith("lives on"):
            worker.do("hang_up")
            if holder == "lives on unmapped":
                worker.do("unmap")  # its GPU may hold pages of an unmapped mapping
        else:
            worker.kill()
        scheduler.kill()
        until(lambda: daemon.quarantined_bytes() == 6 * PAGE, "the group ends")

        must_not_get(thief, slots_of(extents))
        if holder == "is stopped":
            worker.go_on()
            must_not_get(thief, slots_of(extents))
        assert daemon.quarantined_bytes() == 6 * PAGE

        worker.kill_children()
        worker.kill()
        until(lambda: daemon.quarantined_bytes() == 0, "the slots come back")
        gets(thief, slots_of(extents))


def test_slots_come_back_only_after_the_grace() -> None:
    with (
        running_daemon(**{**SETTINGS, "drain_grace_s": 1.0}) as daemon,
        puppets(1) as (victim,),
    ):
        victim.attach(daemon.url(), ALONE)
        victim.reserve(4)
        lived = time.monotonic()
        victim.kill()
        released = "released_quarantine_slots"
        until(lambda: daemon.counters()[released] == 4, "the slots come back")
        assert time.monotonic() - lived >= 1.0
        assert daemon.counters()["quarantined_slots"] == 4
        assert daemon.quarantined_bytes() == 0


# -- (b) a scheduler that dies first frees nothing -------------------------------------------------


@pytest.mark.parametrize("end", ["kill -9", "goodbye"])
def test_a_scheduler_that_ends_first_frees_nothing(daemon: Daemon, thief: Engine, end: str) -> None:
    with puppets(2) as (scheduler, worker):
        scheduler.attach(daemon.url(), VICTIM)
        worker.attach(daemon.url(), VICTIM, rank=1)
        extents = scheduler.reserve(3)
        worker.scribble(extents[1::2], GARBAGE)
        if end == "goodbye":
            scheduler.do("goodbye")
        scheduler.kill()
        until(lambda: daemon.quarantined_bytes() == 6 * PAGE, "the group ends")
        assert "victim/1:attached" in daemon.members()
        must_not_get(thief, slots_of(extents))
        # Its attach socket stays open; only the end of its copies counts.
        worker.do("rest")
        must_not_get(thief, slots_of(extents))
        worker.do("goodbye")
        until(lambda: daemon.quarantined_bytes() == 0, "the slots come back")
        gets(thief, slots_of(extents))


# -- (c) the lock on its own file description ------------------------------------------------------


def lock_is_held(daemon: Daemon, index: int = 0) -> bool:
    """Whether any process holds client byte ``index`` of segment 0, as seen by a third process."""
    assert daemon.arena_dir is not None
    layout = struct.Struct("hhqqi4x")
    question = layout.pack(fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
    descriptor = os.open(daemon.arena_dir / "segment-0", os.O_RDWR)
    try:
        answer = fcntl.fcntl(descriptor, 36, question)  # F_OFD_GETLK
    finally:
        os.close(descriptor)
    return bool(layout.unpack(answer)[0] != fcntl.F_UNLCK)


@pytest.mark.parametrize("kind", ["plain", "descriptor", "map"])
def test_the_lock_lasts_as_long_as_somebody_can_write(daemon: Daemon, kind: str) -> None:
    with puppets(1) as (victim,):
        victim.attach(daemon.url(), ALONE, keep_descriptors=True)
        extents = victim.reserve(1)
        assert lock_is_held(daemon)
        if kind != "plain":
            victim.fork(kind, extents, GARBAGE)
        victim.do("close_descriptors")
        assert lock_is_held(daemon), "closing the descriptor dropped the lock of the mapping"
        if kind == "plain":
            victim.fork(kind)
        daemon.kill()
        assert lock_is_held(daemon), "the lock ended with the daemon"
        victim.kill()
        if kind == "plain":
            # It forked after closing the descriptors, and the child does not inherit the mapping.
            assert not lock_is_held(daemon)
        else:
            assert lock_is_held(daemon), "the lock ended although a child can write"
            victim.kill_children()
            until(lambda: not lock_is_held(daemon), "the lock ends with the last holder")


# -- (d) goodbyes, and ends that are none ----------------------------------------------------------


def test_a_client_says_goodbye_only_after_its_copies(daemon: Daemon, thief: Engine) -> None:
    copying = threading.Event()
    victim = Engine(daemon.url(), ALONE, "victim")
    try:
        victim.wait_ready()
        victim.client.add_quiesce_hook(lambda _: not copying.is_set())
        extents = victim.reserve(4).groups[0].reshape(-1)
        arena = victim.client.arena
        assert arena is not None
        copying.set()
        assert not victim.client.close(0.1)
        _fill(arena, extents)
        assert "victim/0:attached" in daemon.members()
        must_not_get(thief, slots_of(extents))
        copying.clear()
        del arena
    finally:
        copying.clear()
        victim.close()
    until(lambda: "victim/0:attached" not in daemon.members(), "the goodbye arrives")
    gets(thief, slots_of(extents))


def test_a_copy_in_the_callers_thread_is_a_copy(daemon: Daemon) -> None:
    """The manager's thread requests a drain while the engine's thread is in ``store_now``."""
    with engine_of(daemon.url(), ALONE, "victim") as victim:
        taken = victim.reserve(1)
        arena = victim.client.arena
        assert arena is not None
        answers = []
        watched = Watched(arena, lambda: answers.append(copier.drain(0)))
        copier = HostCopier(PagedKV([np.zeros((1, PAGE), np.uint8)]), watched)
        assert copier.store_now(taken.boot_id, np.arange(1), taken.groups[0][:, 0]).ok.all()
        assert answers == [False], "drained while it copies: the daemon would reuse the slot"
        assert copier.drain(0)
        copier.close()
        victim.client.abort(taken.groups, boot_id=taken.boot_id)
        del arena, watched


def test_a_lost_daemon_is_no_goodbye(daemon: Daemon) -> None:
    copying = threading.Event()
    with engine_of(daemon.url(), ALONE, "victim") as victim:
        victim.client.add_quiesce_hook(lambda _: not copying.is_set())
        extents = victim.reserve(4).groups[0].reshape(-1)
        arena = victim.client.arena
        assert arena is not None
        copying.set()
        daemon.restart()
        with engine_of(daemon.url(), THIEF, "thief") as thief:
            _fill(arena, extents)
            must_not_get(thief, slots_of(extents))
            assert victim.client.boot_id == "", "it attached before its copies were done"
            copying.clear()
            del arena
            victim.wait_ready()
            until(lambda: daemon.quarantined_bytes() == 0, "the slots come back")
            gets(thief, slots_of(extents))


def test_silence_is_no_goodbye(daemon: Daemon, thief: Engine) -> None:
    with puppets(1) as (victim,):
        victim.attach(daemon.url(), ALONE)
        extents = victim.reserve(4)
        victim.stop()
        must_not_get(thief, slots_of(extents))
        victim.go_on()
        victim.write(extents, GARBAGE)
        assert victim.commit([secrets.token_bytes(32) for _ in range(4)], extents) == 4


# -- (e) reserved slots stay quarantined after a restart -------------------------------------------


@pytest.mark.parametrize("end", ["unmaps", "is killed", "says so"])
def test_a_successor_puts_aside_what_was_reserved(daemon: Daemon, end: str) -> None:
    with puppets(1) as (victim,):
        victim.attach(daemon.url(), ALONE)
        extents = victim.reserve(4)
        victim.scribble(extents, GARBAGE)
        for _ in range(2):
            daemon.restart()
            assert daemon.quarantined_bytes() == 4 * PAGE
        assert not victim.do("alive")
        with engine_of(daemon.url(), THIEF, "thief") as thief:
            must_not_get(thief, slots_of(extents))
            old = {"previous_session": victim.session, "previous_boot": victim.boot_id}
            if end == "unmaps":
                victim.do("unmap")
            elif end == "is killed":
                victim.kill()
            else:
                victim.attach(daemon.url(), ALONE, **old, previous_drained=False)
                must_not_get(thief, slots_of(extents))
                victim.do("goodbye")
                victim.do("rest")
                victim.attach(daemon.url(), ALONE, **old, previous_drained=True)
            until(lambda: daemon.quarantined_bytes() == 0, "the slots come back")
            gets(thief, slots_of(extents))


@pytest.mark.parametrize("arena", [True, False], ids=["arena directory", "anonymous"])
def test_only_a_session_of_the_same_boot_is_declared_done(arena: bool) -> None:
    """A cold start reuses session numbers: "my session 1 is done" from another boot says nothing
    about session 1 of this boot.
    """
    with stopped_daemon(arena=arena, **SETTINGS) as daemon, puppets(2) as (other, victim):
        daemon.start()
        other.attach(daemon.url(), ALONE, engine_id="other")
        daemon.kill()
        if arena:
            assert daemon.arena_dir is not None
            (daemon.arena_dir / "catalogue").unlink()
        daemon.start()
        victim.attach(daemon.url(), ALONE)
        assert victim.session == other.session
        extents = victim.reserve(4)
        victim.scribble(extents, GARBAGE)
        victim.do("hang_up")
        until(lambda: daemon.quarantined_bytes() == 4 * PAGE, "the group ends")
        other.attach(
            daemon.url(),
            ALONE,
            engine_id="other",
            previous_session=other.session,
            previous_boot=other.boot_id,
            previous_drained=True,
        )
        assert daemon.quarantined_bytes() == 4 * PAGE
        with engine_of(daemon.url(), THIEF, "thief") as thief:
            must_not_get(thief, slots_of(extents))


# -- (f) (g) (j) readers ---------------------------------------------------------------------------


class Watched:
    """An arena in which a test can act after a copier has checked that the daemon lives."""

    def __init__(self, arena: ArenaMapping, then: Any) -> None:
        self.arena = arena
        self.then = then
        self.boot_id, self.segments = arena.boot_id, arena.segments
        self.view, self.address = arena.view, arena.address
        self.generations, self.unpopulated = arena.generations, arena.unpopulated

    def alive(self) -> bool:
        """The answer from before the change."""
        answer = self.arena.alive()
        then, self.then = self.then, lambda: None
        then()
        return answer


def test_a_load_over_a_restart_fails(daemon: Daemon) -> None:
    with engine_of(daemon.url(), ALONE, "reader") as reader:
        keys = [secrets.token_bytes(32) for _ in range(4)]
        assert reader.store(keys).bound == keys
        found = reader.client.lookup({0: keys})
        extents = found.groups[0].extents.copy()
        extents["flags"] = 0  # without checksums only the attach socket shows the restart

        def restart_and_reuse() -> None:
            daemon.restart()
            with engine_of(daemon.url(), THIEF, "thief") as thief:
                gets(thief, slots_of(extents))

        arena = reader.client.arena
        assert arena is not None
        watched = Watched(arena, restart_and_reuse)
        done, pages = _load(watched, found.boot_id, extents)
        reader.scheduler.fill(keys, reader.client.epoch)
        right = (pages[:4] == reader.scheduler.pages[:4]).all(axis=1)
        assert not right.any(), "the slots were not reused: this test shows nothing"
        assert not done.ok.any(), "wrong bytes are called right"
        assert done.reasons == {"stale_boot": 4}
        del arena, watched


def test_a_load_of_evicted_blocks_fails(daemon: Daemon, thief: Engine) -> None:
    with engine_of(daemon.url(), ALONE, "reader") as reader:
        keys = [secrets.token_bytes(32) for _ in range(4)]
        assert reader.store(keys).bound == keys
        found = reader.client.lookup({0: keys})
        extents = found.groups[0].extents.copy()
        extents["flags"] = 0
        reader.client.release(found.lease)  # a bug in the engine: it continues to load
        until(lambda: daemon.stats().leases == 0, "the lease ends")
        arena = reader.client.arena
        assert arena is not None
        watched = Watched(arena, lambda: gets(thief, slots_of(extents)))
        done, _ = _load(watched, found.boot_id, extents)
        assert not done.ok.any()
        assert done.reasons == {"stale_generation": 4}
        reader.scheduler.fill(keys, reader.client.epoch)
        for page, one in enumerate(extents):
            start, end = int(one["offset"]), int(one["offset"]) + PAGE
            assert (arena.view(0)[start:end] != reader.scheduler.pages[page]).any()
        del arena, watched


def test_a_worker_refuses_another_boots_extents(daemon: Daemon) -> None:
    with engine_of(daemon.url(), ALONE, "reader") as reader:
        keys = [secrets.token_bytes(32) for _ in range(4)]
        assert reader.store(keys).bound == keys
        old = reader.client.lookup({0: keys})
        daemon.restart()
        until(lambda: reader.ready and reader.client.boot_id != old.boot_id, "it attaches again")
        new = reader.client.lookup({0: keys})
        copier, pages = reader.scheduler.copier(), reader.scheduler.pages
        assert copier is not None
        pages[:] = 7
        # Use old extents in a new arena, and extents of an unknown boot.
        for boot_id, extents in (
            (old.boot_id, old.groups[0].extents),
            (secrets.token_hex(16), new.groups[0].extents),
        ):
            done = copier.load_now(boot_id, extents, np.arange(4))
            assert done.reasons == {"stale_boot": 4}
        assert (pages == 7).all()
        taken = reader.reserve(2)
        done = copier.store_now(old.boot_id, np.arange(2), taken.groups[0].reshape(-1))
        assert done.reasons == {"stale_boot": 2}
        assert reader.client.abort(taken.groups, boot_id=old.boot_id) == "stale_boot"
        assert reader.client.abort(taken.groups, boot_id=taken.boot_id) == ""
        seen = reader.check(keys)
        assert (seen.bad, len(seen.right)) == ([], 4)
        reader.client.release(new.lease)


# -- the core with a rule switched off -------------------------------------------------------------


def _fill(arena: ArenaMapping, extents: Records) -> None:
    for one in extents:
        start = int(one["offset"])
        arena.view(int(one["segment"]))[start : start + int(one["length"])] = GARBAGE


def _load(arena: Watched, boot_id: str, extents: Records) -> tuple[Any, Any]:
    """Loads into fresh pages with a separate copier, which compares no checksums."""
    pages = np.zeros((len(extents), PAGE), np.uint8)
    copier = HostCopier(PagedKV([pages]), arena, verify=False)
    try:
        return copier.load_now(boot_id, extents, np.arange(len(extents))), pages
    finally:
        copier.close()
