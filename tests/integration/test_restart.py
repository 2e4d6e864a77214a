"""State that a restart keeps or drops, on real processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.raw_door import new_keys
from support.served import back, served
from support.ssd_kit import SSD, saved

from kvhearth.model import FLAG_VERIFY
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of

PAGE = 64 << 10
CONTRACT = contract_of(PAGE)
DRAIN_S = 3.0
"""Time by which a daemon has ended that waits for its clients no longer than that."""


# -- warm and cold ---------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["kill -9", "SIGTERM"])
@pytest.mark.parametrize("arena", [True, False], ids=["arena directory", "anonymous"])
def test_a_restart_is_warm_with_an_arena_directory_and_cold_without(arena: bool, end: str) -> None:
    with (
        running_daemon(arena=arena, command=arena and end == "kill -9") as daemon,
        engine_of(daemon.url(), CONTRACT) as engine,
    ):
        keys = new_keys(40)
        assert engine.store(keys).bound == keys
        boot_id = engine.client.boot_id
        if end == "SIGTERM":
            assert daemon.terminate() == 0
        daemon.restart()
        back(engine, boot_id)
        assert served(engine, keys) == (40 if arena else 0)
        assert daemon.stats().blocks == (40 if arena else 0)
        more = new_keys(8)
        assert engine.store(more).bound == more
        assert served(engine, more) == 8


def give_to_group(volume: Path, group: int) -> None:
    """Do what a kubelet does to a volume of a pod with ``fsGroup: group``."""
    for place in (volume, *volume.rglob("*")):
        if not place.is_symlink():
            os.chown(place, -1, group)
            place.chmod(place.stat().st_mode | (0o2770 if place.is_dir() else 0o660))


def test_a_pods_next_start_finds_its_volumes_given_to_the_group(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    with stopped_daemon(**{**SSD, "ssd_dirs": [f"{ssd}=256MiB"]}) as daemon:
        ssd.mkdir()
        assert daemon.arena_dir is not None
        volumes = (daemon.folder, daemon.arena_dir, ssd)
        keys = new_keys(20)
        for start in range(2):
            for volume in volumes:
                give_to_group(volume, os.getegid())
            assert daemon.start()
            with engine_of(daemon.url(), CONTRACT) as engine:
                if start == 0:
                    assert engine.store(keys).bound == keys
                    saved(daemon, len(keys))
                assert served(engine, keys) == len(keys)
            until(lambda: daemon.read_back, "the SSD log is recovered")
            assert daemon.stats().ssd.blocks == len(keys)
            daemon.kill()
        assert daemon.socket_dir.stat().st_mode & 0o7777 == 0o2770


def test_bumped_weights_stay_bumped() -> None:
    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        old, new = new_keys(4), new_keys(4)
        assert engine.store(old).bound == old
        before = engine.client.epoch
        assert engine.client.bump_epoch() == before + 1
        assert engine.store(new).bound == new
        boot_id = engine.client.boot_id
        daemon.restart()
        back(engine, boot_id)
        assert (served(engine, old), served(engine, new)) == (0, 4)


def test_an_engine_with_bumped_weights_goes_on_after_a_cold_start() -> None:
    with running_daemon(arena=False) as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(4)
        assert engine.client.bump_epoch() > 0
        assert engine.store(keys).bound == keys
        boot_id = engine.client.boot_id
        daemon.restart()
        back(engine, boot_id)
        assert served(engine, keys) == 0
        assert engine.store(keys).bound == keys
        assert served(engine, keys) == 4


def test_what_was_given_back_does_not_come_back() -> None:
    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(30)
        assert engine.store(keys).bound == keys
        taken = engine.reserve(8)
        engine.client.abort(taken.groups, boot_id=taken.boot_id)
        until(lambda: daemon.counters()["aborted_slots"] == 8, "the abort arrives")
        digest = daemon.operator().namespaces().namespaces[0].namespace
        assert daemon.operator().evict(digest, 10 * PAGE, None).evicted_blocks == 20
        left = engine.check(keys)
        boot_id = engine.client.boot_id
        daemon.restart()
        assert (daemon.quarantined_bytes(), daemon.stats().blocks) == (0, 10)
        back(engine, boot_id)
        again = engine.check(keys)
        assert (again.bad, again.right) == ([], left.right)


# -- bytes that changed unnoticed ------------------------------------------------------------------


def damage(daemon: Daemon, offset: int) -> None:
    """Flips one bit of the arena."""
    assert daemon.arena_dir is not None
    with (daemon.arena_dir / "segment-0").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def offset_of(engine: Engine, key: bytes) -> int:
    """Returns a block's offset."""
    found = engine.client.lookup({0: [key]})
    engine.client.release(found.lease)
    return int(found.groups[0].extents[0]["offset"])


def test_a_reader_finds_a_damaged_block_and_tells() -> None:
    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(20)
        assert engine.store(keys).bound == keys
        place, boot_id = offset_of(engine, keys[7]), engine.client.boot_id
        daemon.kill()
        damage(daemon, place)
        daemon.start()
        back(engine, boot_id)
        found = engine.client.lookup({0: keys})
        engine.client.release(found.lease)
        assert (found.groups[0].extents["flags"] & FLAG_VERIFY).all(), "readers are told to verify"
        seen = engine.check(keys)
        assert dict(seen.failed) == {"checksum_mismatch": 1}
        assert (seen.absent, len(seen.right)) == ([], 19)
        until(
            lambda: daemon.counters().get("checksum_failures{reader}") == 1, "the reader's report"
        )
        again = engine.check(keys)
        assert (again.bad, again.absent, len(again.right)) == ([], [keys[7]], 19)


def test_a_missing_file_starts_cold() -> None:
    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(10)
        for name in ("catalogue", "journal", "segment-0"):
            assert engine.store(keys).bound == keys
            boot_id = engine.client.boot_id
            daemon.kill()
            assert daemon.arena_dir is not None
            (daemon.arena_dir / name).unlink()
            daemon.start()
            back(engine, boot_id)
            assert served(engine, keys) == 0, name


# -- committed without a checksum ------------------------------------------------------------------


def test_what_was_not_summed_is_summed_after_a_crash_before_it_is_served() -> None:
    with stopped_daemon() as daemon:
        daemon.start("sum.computed:1")
        with engine_of(daemon.url(), CONTRACT) as engine:
            keys = new_keys(20)
            assert engine.store(keys, sums=False).bound == keys
            boot_id = engine.client.boot_id
            until(lambda: daemon.dead, "the daemon dies with the sums in its hands")
            # Its successor dies at the same point: the state must survive that, too.
            daemon.start("sum.computed:1")
            until(lambda: daemon.dead, "the daemon dies again")
            daemon.start()
            back(engine, boot_id)
            until(lambda: served(engine, keys) == 20, "all is summed and served")
            counters = daemon.counters()
            assert (counters["adopted_blocks"], counters["summed_blocks"]) == (20, 20)


# -- a daemon that was killed ----------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["frames", "grpc"])
def test_the_next_lookup_after_a_kill_is_away_at_once(calls: str) -> None:
    options = f"lookup_ms=30000&calls={calls}"
    with running_daemon() as daemon, engine_of(daemon.url(options), CONTRACT) as engine:
        keys = new_keys(20)
        for _ in range(3):
            until(lambda: engine.store(keys).bound == keys, "it stores")
            found = engine.client.lookup({0: keys})
            assert found.groups[0].ready.all()
            daemon.kill()
            # Not "deadline", which would be half a minute later.
            assert engine.client.lookup({0: keys}).reason == "daemon_away"
            engine.client.release(found.lease)
            daemon.start()
            # Another boot listens at the same path; an engine attached to it looks up again.
            assert engine.client.lookup({0: keys}).reason in ("daemon_away", "")
            back(engine, found.boot_id)
            assert engine.client.lookup({0: keys}).reason == ""


# -- a stopped daemon ------------------------------------------------------------------------------


def test_a_daemon_that_stands_still_hangs_nobody_and_leaks_nothing() -> None:
    """Late answers to calls given up must be undone: leases, reservations, pins."""
    options = "lookup_ms=400&call_ms=600&heartbeat_ms=200"
    with (
        running_daemon(shared_index=False) as daemon,
        engine_of(daemon.url(options), CONTRACT) as engine,
    ):
        keys = new_keys(20)
        until(lambda: engine.store(keys).bound == keys, "it stores")
        session = engine.client.session_id
        assert daemon.process is not None
        for _ in range(2):
            daemon.process.send_signal(signal.SIGSTOP)
            for call in (
                lambda: engine.client.lookup({0: keys}),
                lambda: engine.reserve(8),
                lambda: engine.pin(keys, 60),
                lambda: engine.client.lookup({0: keys}),
            ):
                assert call().reason in ("deadline", "daemon_away")
            daemon.process.send_signal(signal.SIGCONT)
            until(lambda: served(engine, keys) == 20, "it goes on")
            until(_nothing_held(daemon), "what was answered too late comes back")
        assert engine.client.session_id == session, "it was not dead: the session goes on"


def _nothing_held(daemon: Daemon) -> Callable[[], bool]:
    def nothing_held() -> bool:
        found = daemon.stats()
        (part,) = found.segments
        return not (found.leases or found.pins or part.reserved_bytes or part.held_bytes)

    return nothing_held


# -- the end by SIGTERM ----------------------------------------------------------------------------


def test_sigterm_while_clients_store() -> None:
    with (
        running_daemon(command=True, memory="32MiB", drain_timeout_s=DRAIN_S) as daemon,
        engine_of(daemon.url(), CONTRACT, "a") as first,
        engine_of(daemon.url(), CONTRACT, "b") as second,
    ):
        stop = threading.Event()
        bound: list[list[bytes]] = [[], []]

        def work(engine: Engine, mine: list[bytes]) -> None:
            while not stop.is_set() and len(mine) < 200:
                mine += engine.store(new_keys(4), sums=len(mine) % 8 == 0).bound

        threads = [
            threading.Thread(target=work, args=pair)
            for pair in zip((first, second), bound, strict=True)
        ]
        for thread in threads:
            thread.start()
        until(lambda: all(bound), "both store")
        boot_id = first.client.boot_id
        assert daemon.terminate() == 0
        stop.set()
        for thread in threads:
            thread.join()
        assert not list(daemon.socket_dir.iterdir()), "sockets and token are removed"
        daemon.start()
        for engine, mine in zip((first, second), bound, strict=True):
            back(engine, boot_id)
            until(lambda e=engine, m=mine: served(e, m) == len(m), "all that was acknowledged")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_by_a_signal_with_clients_that_hang(number: signal.Signals) -> None:
    """A client that never answers must not keep the daemon from ending."""
    with (
        running_daemon(drain_timeout_s=DRAIN_S) as daemon,
        engine_of(daemon.url(), CONTRACT) as engine,
    ):
        engine.reserve(4)
        engine.client.lookup({0: new_keys(2)})
        assert daemon.process is not None
        os.kill(daemon.process.pid, number)
        assert daemon.process.wait(HUNG_S) == 0


def test_it_sums_what_is_committed_before_it_ends() -> None:
    with running_daemon(drain_timeout_s=HUNG_S) as daemon:
        keys = new_keys(60)
        with engine_of(daemon.url(), CONTRACT) as engine:
            assert engine.store(keys, sums=False).bound == keys
            assert daemon.terminate() == 0
        daemon.start()
        assert daemon.counters()["summed_blocks"] == 0
        with engine_of(daemon.url(), CONTRACT) as engine:
            assert served(engine, keys) == 60


def test_a_directory_of_another_kind_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with stopped_daemon() as daemon:
        own, daemon.arena_dir = daemon.arena_dir, missing
        assert daemon.launch().wait(HUNG_S) == 3
        assert str(missing) in daemon.log_text()
        daemon.arena_dir = own
