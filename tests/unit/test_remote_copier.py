"""The remote copier and its data connections: breaks, refusals, stalls, the end of the session."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.arena_fake import FakeArena, summed
from support.fake_gateway import TOKEN, FakeGateway

from kvhearth.copiers.base import Copier, Done
from kvhearth.copiers.remote import RemoteCopier
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import FLAG_SUMMED
from kvhearth.page_layout import PagedKV
from kvhearth.session.remote_arena import RemoteArena, Staging
from kvhearth.transports.data import DataLines
from kvhearth.transports.tcp import Dialer
from kvhearth.url import RemoteUrl
from kvhearth.wire.remote import DataKind
from kvhearth_lab.harness import HUNG_S

PUT, GET = DataKind.PUT, DataKind.GET
BLOCK_BYTES = 4096
PAGES = 8
BOOT = "boot-1"


class Rig:
    """A copier of eight pages, its gateway, and the session's life."""

    def __init__(
        self,
        *,
        connections: int = 1,
        direct: bool = True,
        staging_bytes: int = 1 << 20,
        stall_s: float = HUNG_S,
    ) -> None:
        self.arena = FakeArena(BLOCK_BYTES)
        self.gateway = FakeGateway(self.arena)
        self.session_alive = True
        self.lines = DataLines(
            Dialer(RemoteUrl("127.0.0.1", self.gateway.port)),
            TOKEN,
            connections,
            window_bytes=1 << 20,
            connect_s=HUNG_S,
            alive=lambda: self.session_alive,
            stall_s=stall_s,
        )
        welcome = self.gateway.welcome()
        self.remote = RemoteArena(welcome, self.lines, staging_bytes, lambda: self.session_alive)
        self.pages = np.random.default_rng(1).integers(0, 256, (PAGES, BLOCK_BYTES), np.uint8)
        self.copier: Copier = RemoteCopier(PagedKV([self.pages]), self.remote, direct=direct)

    def store(self, slots: list[int]) -> Done:
        """Store pages into the slots of their numbers."""
        return self.wait(self.copier.store(BOOT, np.array(slots), self.arena.extents(slots)))

    def load(self, slots: list[int]) -> Done:
        """Load slots into the pages of their numbers."""
        return self.wait(self.copier.load(BOOT, self.arena.extents(slots), np.array(slots)))

    def wait(self, ticket: Any) -> Done:
        done = self.copier.wait(ticket, HUNG_S)
        assert done is not None
        return done

    def in_place(self, slot: int) -> bool:
        """Whether a slot has its page's bytes."""
        return bool((self.arena.slot(slot) == self.pages[slot]).all())

    def close(self) -> None:
        assert self.copier.close(HUNG_S)
        self.copier.check_books()
        self.remote.close()
        self.remote.staging.check_books()
        self.gateway.stop()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def once(*kinds: DataKind) -> Callable[[DataKind], None]:
    """Return a hook that breaks the connection once for each of these kinds, in any order."""
    left = list(kinds)

    def strike(kind: DataKind) -> None:
        with contextlib.suppress(ValueError):
            left.remove(kind)
            raise ConnectionResetError

    return strike


@pytest.mark.parametrize("moment", ["on_frame", "on_answer"])
def test_a_put_that_was_cut_is_a_miss(make_rig: Any, moment: str) -> None:
    rig = make_rig()
    setattr(rig.gateway, moment, once(PUT))
    assert rig.store([0, 1]).reasons == {"copy_failed": 2}
    assert rig.gateway.frames == [PUT], "the daemon may have given its slots to others"
    assert rig.store([0, 1]).ok.all()
    assert rig.in_place(1)


@pytest.mark.parametrize("moment", ["on_frame", "on_answer"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_get_is_asked_again(make_rig: Any, moment: str, direct: bool) -> None:
    rig = make_rig(direct=direct)
    rig.store([3, 4])
    wanted = rig.pages[3].copy()
    rig.pages[3] = 0
    setattr(rig.gateway, moment, once(GET))
    assert rig.load([3, 4]).ok.all()
    assert rig.gateway.frames == [PUT, GET, GET]
    assert (rig.pages[3] == wanted).all()


def test_many_batches_survive_breaks(make_rig: Any) -> None:
    rig = make_rig(connections=3)
    strikes = iter(range(10**6))

    def strike(kind: DataKind) -> None:
        if next(strikes) % 9 == 4:
            raise ConnectionResetError

    rig.gateway.on_answer = strike
    tickets = [
        rig.copier.store(BOOT, np.array([slot]), rig.arena.extents([slot]))
        for slot in [*range(PAGES)] * 5
    ]
    failed = [ticket for ticket in tickets if not rig.wait(ticket).ok.all()]
    assert len(failed) < len(tickets), "a break ends what is under way, and nothing else"
    rig.gateway.on_answer = lambda kind: None
    assert rig.store([*range(PAGES)]).ok.all()
    assert all(rig.in_place(slot) for slot in range(PAGES))


def test_a_gateway_that_always_breaks_ends_the_batch(make_rig: Any) -> None:
    rig = make_rig()

    def strike(kind: DataKind) -> None:
        raise ConnectionResetError

    rig.gateway.on_frame = strike
    assert rig.load([0]).reasons == {"copy_failed": 1}
    assert rig.gateway.frames == [GET, GET]


def test_a_refusal_ends_the_batch_and_not_the_next(make_rig: Any) -> None:
    rig = make_rig()
    rig.gateway.refusal = Reason.HELD_CAP
    assert rig.store([0, 1]).reasons == {"copy_failed": 2}
    assert rig.store([0, 1]).ok.all()


def test_a_silent_gateway_is_given_up(make_rig: Any) -> None:
    rig = make_rig(stall_s=0.1)
    go = threading.Event()
    rig.gateway.on_frame = lambda kind: go.wait(HUNG_S) and None
    try:
        assert rig.load([0]).reasons == {"copy_failed": 1}
    finally:
        go.set()


def test_the_end_of_the_session_ends_the_wait_for_a_silent_gateway(make_rig: Any) -> None:
    rig = make_rig()
    came, go = threading.Event(), threading.Event()

    def stall(kind: DataKind) -> None:
        came.set()
        go.wait(HUNG_S)

    rig.gateway.on_frame = stall
    try:
        ticket = rig.copier.load(BOOT, rig.arena.extents([0, 1]), np.array([0, 1]))
        assert came.wait(HUNG_S)
        rig.session_alive = False
        rig.lines.interrupt()
        assert rig.wait(ticket).reasons == {"stale_boot": 2}
        assert rig.store([0]).reasons == {"stale_boot": 1}
    finally:
        go.set()


def test_nobody_listens(make_rig: Any) -> None:
    rig = make_rig()
    rig.gateway.stop()
    assert rig.store([0]).reasons == {"copy_failed": 1}


@pytest.mark.parametrize("connections", [1, 3])
def test_little_staging_memory_is_shared_by_all_portions(make_rig: Any, connections: int) -> None:
    rig = make_rig(direct=False, staging_bytes=2 * BLOCK_BYTES, connections=connections)
    slots = [*range(PAGES)]
    assert rig.store(slots).ok.all()
    kept = rig.pages.copy()
    rig.pages[:] = 0
    assert rig.load(slots).ok.all()
    assert (rig.pages == kept).all()
    assert rig.gateway.frames == [PUT] * PAGES + [GET] * PAGES


def test_staging_memory_must_hold_two_blocks(make_rig: Any) -> None:
    rig = make_rig()
    welcome, few_bytes = rig.gateway.welcome(), 2 * BLOCK_BYTES - 1
    remote = RemoteArena(welcome, rig.lines, few_bytes, lambda: rig.session_alive)
    with pytest.raises(KVHearthError, match="staging="):
        RemoteCopier(PagedKV([rig.pages]), remote, direct=False)
    remote.close()


def test_wrong_bytes_of_the_network_are_found(make_rig: Any) -> None:
    rig = make_rig()
    sums = rig.store([0, 1]).checksums
    extents = summed(rig.arena.extents([0, 1]), sums, FLAG_SUMMED)
    # After the gateway's own look at the slot: as a bit that flips on the way.
    rig.arena.slot(1)[7] ^= 1
    done = rig.wait(rig.copier.load(BOOT, extents, np.array([0, 1])))
    assert done.ok.tolist() == [True, False]
    assert done.reasons == {"checksum_mismatch": 1}


def test_a_forked_child_leaves_the_connections_alone(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.store([0])
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        assert rig.copier.poll() == []
        with pytest.raises(KVHearthError, match="closed"):
            rig.copier.store(BOOT, np.array([1]), rig.arena.extents([1]))
        rig.remote.close()
    assert rig.store([1]).ok.all()
    assert rig.gateway.frames == [PUT, PUT]


def test_spaces_of_staging_memory_are_joined_again() -> None:
    freed: list[int] = []
    staging = Staging(BOOT, 4 * 4096, lambda: True, lambda: freed.append(1))
    spaces = [staging.take(4000) for _ in range(4)]
    assert staging.take(1) is None
    for index in (2, 0, 3, 1):
        space = spaces[index]
        assert space is not None
        staging.give_back(space)
    assert staging.take(4 * 4096) == (0, 4 * 4096)
    assert len(freed) == 4
