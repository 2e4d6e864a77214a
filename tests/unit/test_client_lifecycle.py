"""Attach, loss, re-attach, rejection and goodbye against a scripted daemon."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from support.attached import OPTIONS, attached, connected, url_of
from support.fake_daemon import FakeDaemon, extents, key, running, small_contract
from support.scripted_clock import ScriptedClock

from kvhearth.client import connect
from kvhearth.counters import Counters
from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.results import Lease
from kvhearth.session.manager import SessionManager
from kvhearth.url import parse_url
from kvhearth.wire.handshake import Hello

KEYS = {0: [key(1)]}


class Copies:
    """A drain that a test opens and closes."""

    def __init__(self) -> None:
        self.done = True
        self.asked = 0

    def drain(self, deadline_s: float) -> bool:
        self.asked += 1
        return self.done


def test_after_a_restart_it_attaches_anew_once_copies_have_drained(tmp_path: Path) -> None:
    copies = Copies()
    with connected(tmp_path) as client:
        client.add_quiesce_hook(copies.drain)
        with running(tmp_path, small_contract()) as first:
            assert client.wait_ready(10)
            old = client.arena
            assert old is not None
            copies.done = False
        assert client.lookup(KEYS).reason == Reason.DAEMON_AWAY
        assert not old.alive()
        with running(tmp_path, small_contract()) as second:
            client.clock.until(lambda: copies.asked > 1)
            assert client.abort({0: extents(1)}, boot_id=first.boot_id) == Reason.DAEMON_AWAY
            assert second.hellos == []
            # The old mapping stays while a copy may still use it.
            old.view(1)[0] = 1
            copies.done = True
            assert client.wait_ready(10)
            hello = second.hellos[0]
            assert (hello.previous_boot, hello.previous_session) == (first.boot_id, 1)
            assert hello.previous_drained
            with pytest.raises(KVHearthError):
                old.view(1)
            assert client.boot_id == second.boot_id
            assert client.arena is not None
            assert client.arena.alive()


@pytest.mark.parametrize(
    "reason", [Reason.UNKNOWN_TOKEN, Reason.GROUP_GONE, Reason.STALE_INCARNATION]
)
@pytest.mark.parametrize("rpc", ["Lookup", "Heartbeat"])
def test_a_session_that_ended_is_replaced(tmp_path: Path, reason: Reason, rpc: str) -> None:
    with attached(tmp_path) as (daemon, client):
        old = client.arena
        daemon.refuse_next(rpc, reason)
        if rpc == "Lookup":
            assert client.lookup(KEYS).reason == reason
        client.clock.until(lambda: len(daemon.hellos) == 2)
        assert client.wait_ready(10)
        assert old is not None
        assert not old.alive()
        hello = daemon.hellos[1]
        assert (hello.previous_boot, hello.previous_session) == (daemon.boot_id, 1)
        assert hello.previous_drained
        # Copies have drained: the hello reports it to the living daemon.
        client.clock.until(lambda: daemon.ended == daemon.byes == 1)
        assert client.lookup(KEYS).reason == ""


def test_another_boot_in_a_reply_ends_the_session(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.answer("Lookup", lambda _: pb.LookupResponse(boot_id="another"))
        assert client.lookup(KEYS).reason == Reason.STALE_BOOT
        client.clock.until(lambda: len(daemon.hellos) == 2)
        assert client.wait_ready(10)


@pytest.mark.parametrize("calls", ["frames", "grpc"])
def test_a_daemon_that_died_since_the_last_call_is_away_at_once(tmp_path: Path, calls: str) -> None:
    copies = Copies()
    with connected(tmp_path, f"{OPTIONS}&calls={calls}") as client:
        client.add_quiesce_hook(copies.drain)
        with running(tmp_path, small_contract()):
            assert client.wait_ready(10)
            assert client.lookup(KEYS).reason == ""
            copies.done = False
        assert client.lookup(KEYS).reason == Reason.DAEMON_AWAY
        assert client.counters()["links_lost"] == 1
        with running(tmp_path, small_contract()) as second:
            # Another boot, whose socket does not know the session.
            assert client.lookup(KEYS).reason == Reason.DAEMON_AWAY
            copies.done = True
            assert client.wait_ready(10)
            assert client.lookup(KEYS).reason == ""
            assert client.boot_id == second.boot_id
        assert client.counters()["fail_open_daemon_away"] == 2


def test_a_session_whose_line_ended_is_away_and_not_refused(tmp_path: Path) -> None:
    copies = Copies()
    with attached(tmp_path) as (daemon, client):
        client.add_quiesce_hook(copies.drain)
        copies.done = False
        assert client.lookup(KEYS).reason == ""
        daemon.tokens.clear()
        daemon.drop_lines()
        assert client.lookup(KEYS).reason == Reason.DAEMON_AWAY
        copies.done = True
        assert client.wait_ready(10)


def test_a_lease_of_a_daemon_that_died_is_released_at_no_other(tmp_path: Path) -> None:
    lease = Lease(7, "")
    with connected(tmp_path) as client:
        with running(tmp_path, small_contract()) as first:
            assert client.wait_ready(10)
            assert client.lookup(KEYS).reason == ""
            lease = Lease(7, first.boot_id)
        client.release(lease)
        with running(tmp_path, small_contract()) as second:
            client.clock.until(lambda: client.boot_id == second.boot_id)
            client.release(lease)
            client.release(Lease(8, second.boot_id))
            client.clock.until(lambda: second.requests["Release"])
            assert [list(each.lease_ids) for each in second.requests["Release"]] == [[8]]


def test_the_end_of_the_life_line_is_noticed_without_a_call(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.drop_lines()
        client.clock.until(lambda: len(daemon.hellos) == 2)
        assert client.wait_ready(10)
        assert client.counters()["links_lost"] == 1


def test_a_late_heartbeat_is_not_a_goodbye(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.refuse_next("Heartbeat", Reason.DEADLINE)
        client.clock.until(lambda: client.counters().get("heartbeat_failures"))
        assert client.wait_ready(10)
        assert len(daemon.hellos) == 1


def test_releases_wait_for_a_daemon_that_is_silent(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.refuse_next("Abort", Reason.DEADLINE)
        began = client.clock.now()
        client.abort({0: extents(2)}, boot_id=daemon.boot_id)
        client.clock.until(lambda: len(daemon.requests["Abort"]) == 2)
        assert client.clock.now() - began > 0.25, "it is sent again after a pause"
        assert client.counters()["errands_late"] == 1


@pytest.mark.parametrize(
    "reason",
    [
        Reason.CONTRACT_MISMATCH,
        Reason.BAD_CONTRACT,
        Reason.PEER_NOT_ALLOWED,
        Reason.PROTOCOL_VERSION,
    ],
)
def test_a_refusal_for_good_is_told_at_once(
    tmp_path: Path, reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path, small_contract()) as daemon:
        daemon.refuse = KVHearthError(reason, "because", field="kv_dtype")
        with connected(tmp_path) as client:
            began = client.clock.now()
            assert not client.wait_ready(20)
            assert client.clock.now() < began + 1
            assert client.refusal is not None
            assert client.refusal.reason is reason
            assert client.refusal.details == {"field": "kv_dtype"}
            assert client.lookup(KEYS).reason == reason
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "kv_dtype" in errors[0].getMessage()


def test_other_refusals_are_tried_again(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        daemon.refuse = KVHearthError(Reason.RANK_TAKEN, "wait")
        with connected(tmp_path) as client:
            client.clock.until(lambda: len(daemon.hellos) > 1)
            assert client.refusal is None
            daemon.refuse = None
            assert client.wait_ready(10)


def test_a_session_without_decisions_is_not_ready(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        daemon.refuse_next("Heartbeat", Reason.INTERNAL)
        with connected(tmp_path) as client:
            assert client.wait_ready(10)
            assert len(daemon.hellos) == 2
            assert daemon.hellos[1].previous_drained


def test_an_undrained_client_keeps_its_life_line(tmp_path: Path) -> None:
    copies = Copies()
    with attached(tmp_path) as (daemon, client):
        client.add_quiesce_hook(copies.drain)
        copies.done = False
        assert not client.close(0.05)
        assert (daemon.byes, daemon.ended) == (0, 0)
        copies.done = True
        assert client.close()
        client.clock.until(lambda: daemon.byes == 1)


def test_a_drain_that_fails_has_not_drained(tmp_path: Path) -> None:
    broken = [True]

    def drain(_: float) -> bool:
        if broken:
            raise RuntimeError("on purpose")
        return True

    with attached(tmp_path) as (_, client):
        client.add_quiesce_hook(drain)
        assert not client.close(0.05)
        broken.clear()
        assert client.close()


def test_close_while_the_daemon_is_away(tmp_path: Path) -> None:
    with connected(tmp_path) as client:
        began = client.clock.now()
        assert client.close()
        assert client.clock.now() == began


def test_the_keeper_goes_on_after_a_failure(clock: ScriptedClock, tmp_path: Path) -> None:
    counters = Counters()
    unspeakable: Any = object()
    hello = dataclasses.replace(Hello(1, "e", "{}"), engine_id=unspeakable)
    with running(tmp_path, small_contract()):
        session_manager = SessionManager(parse_url(url_of(tmp_path)), hello, counters, clock)
        session_manager.start()
        clock.until(lambda: counters.snapshot().get("keeper_failures", 0) > 1)
        session_manager.stop(5)
        assert session_manager.finish(1)


@pytest.mark.parametrize(
    ("url", "arguments", "reason"),
    [
        ("http://x", {}, Reason.BAD_URL),
        ("kvhearth+unix:///" + "x" * 200, {}, Reason.BAD_URL),
        ("kvhearth+unix:///x", {"rank": 2}, Reason.BAD_CONTRACT),
        ("kvhearth+unix:///x", {"rank": -2}, Reason.BAD_CONTRACT),
        ("kvhearth+unix:///x", {"rank": -1, "scheduler": False}, Reason.BAD_CONTRACT),
        ("kvhearth+unix:///x", {"engine_id": ""}, Reason.BAD_MESSAGE),
        ("kvhearth+unix:///x", {"engine_id": "x" * 999}, Reason.BAD_MESSAGE),
    ],
)
def test_arguments_that_cannot_be_right_raise(
    url: str, arguments: dict[str, Any], reason: Reason
) -> None:
    with pytest.raises(KVHearthError) as refusal:
        connect(url, small_contract(), **{"engine_id": "e", **arguments})
    assert refusal.value.reason is reason


def _attach_and_forget(daemon: FakeDaemon, directory: Path) -> None:
    with connected(directory) as client:
        assert client.wait_ready(10)
    assert daemon.tokens


def test_nothing_is_left_open(clock: ScriptedClock, tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        _attach_and_forget(daemon, tmp_path)
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(3):
            _attach_and_forget(daemon, tmp_path)
        clock.until(lambda: len(os.listdir("/proc/self/fd")) <= len(before) + 1)
