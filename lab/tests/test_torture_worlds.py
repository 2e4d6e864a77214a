"""The chaos kit: it finds planted faults, and its parts work as described."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvhearth.session.link import attach
from kvhearth.url import parse_url
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.handshake import Hello
from kvhearth.wire.remote import Purpose
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import contract_of
from kvhearth_lab.torture import checks, damage
from kvhearth_lab.torture.checks import capacity, check, nothing_is_left
from kvhearth_lab.torture.faults import TABLE
from kvhearth_lab.torture.oracle import Oracle
from kvhearth_lab.torture.plan import Plan
from kvhearth_lab.torture.report import (
    AFTER_S,
    CAUGHT,
    CRASH,
    LEAK,
    LOST,
    OVER,
    STALL,
    WRONG,
    Metronome,
    Report,
    Stalls,
)
from kvhearth_lab.torture.scene import (
    PATIENCE_S,
    WORLD_ENVIRONMENT_NAME,
    CapacityWatch,
    Roots,
    places,
)
from kvhearth_lab.torture.world import World
from kvhearth_lab.torture.world_config import (
    FLEETING,
    PRESSED,
    ROOMY,
    SLAB_BYTES,
    SLOT_BYTES_MIN,
    SPILLING,
    Shape,
)
from kvhearth_server.core.slot_table import Geometry, State
from kvhearth_server.memory.journal import (
    HEADER_BYTES,
    HEADER_DTYPE,
    STATE_WORDS,
    journal_path,
    sum_check,
)

ARENA_ROOT = Path(os.environ.get("KVHEARTH_TEST_ARENA_ROOT", "/dev/shm"))
MIB = 1 << 20
PAGE_BYTES = 16384


# -- planted faults are found ----------------------------------------------------------------------


@contextlib.contextmanager
def a_world(
    tmp_path: Path,
    kind: str,
    *,
    memory: int = 64 * MIB,
    ssd: int = 0,
    clients: tuple[tuple[int, bool], ...] = ((0, True), (1, False)),
    blocks: int = 200,
    remote: tuple[int, ...] = (),
) -> Iterator[tuple[World, Report]]:
    """A world with a daemon and clients at work, without faults."""
    if not os.access(ARENA_ROOT, os.W_OK):
        pytest.skip(f"needs a writable tmpfs at {ARENA_ROOT}")
    shape = Shape(
        kind=kind,
        memory_bytes=memory,
        ssd_bytes=ssd,
        segment_bytes=MIB,
        models=((PAGE_BYTES, 1), (4096, 1)),
        clients=clients,
        blocks_max=4000 if kind == PRESSED else blocks,
        flush=False,
        interface="auto",
        skewed=False,
        remote=remote,
    )
    report, stalls = Report(), Stalls()
    metronome = Metronome(stalls.late)
    metronome.start()
    with places(Roots(ARENA_ROOT, tmp_path), []) as where:
        world = World(Plan(0, 1, shape, ()), where, report, stalls)
        try:
            world.start_daemon()
            world.start_clients()
            until_sealed(world, 20)
            # A gateway waits 10 s for a remote client that vanished.
            world.patience_s = PATIENCE_S if remote else 3.0
            yield world, report
        finally:
            for client in world.clients:
                client.kill()
            world.daemon.kill()
            world.network.stop()
            metronome.stop(1)


def reported(world: World) -> str:
    """Returns the known state of clients and daemon."""
    each = [
        f"{one.name}: {len(world.oracle.known(one.model))} blocks, alive {one.alive}, "
        f"at {one.doing}, {one.log_tail(8)}"
        for one in world.clients
    ]
    return "\n".join([*each, world.daemon.complaints()])


def until_sealed(world: World, blocks: int) -> None:
    """Waits until so many blocks of each model have been acknowledged."""
    end = time.monotonic() + HUNG_S
    while late := [c for c in world.clients if len(world.oracle.known(c.model)) < blocks]:
        # Only these clients: otherwise the first one would use up the world's blocks.
        for client in late:
            world.go(client, blocks)
        time.sleep(0.05)
        assert time.monotonic() < end, "clients store nothing: " + reported(world)


def found_of(report: Report) -> dict[str, int]:
    """Returns the findings by kind."""
    return {kind: count for kind, count in report.found.items() if count}


def forge(world: World) -> None:
    """Gives a block other bytes and a matching checksum, as only a broken daemon could."""
    block = damage.in_arena(world.arena_dir, world.shape.memory_bytes)[0]
    wrong = os.urandom(block.length)
    with block.path.open("r+b") as segment:
        segment.seek(block.offset)
        segment.write(wrong)
    with journal_path(world.arena_dir).open("r+b") as journal:
        journal.seek(block.header_at)
        row = np.frombuffer(bytearray(journal.read(HEADER_BYTES)), HEADER_DTYPE, 1)
        row["checksum"] = np.frombuffer(xxhash.xxh3_128_digest(wrong), "V16")
        row["sum_check"] = sum_check(row)
        journal.seek(block.header_at)
        journal.write(row.tobytes())


@pytest.mark.slow
def test_wrong_bytes_are_found(tmp_path: Path) -> None:
    with a_world(tmp_path, ROOMY) as (world, report):
        check(world)
        assert found_of(report) == {}
        with world.paused():
            world.kill_daemon()
            forge(world)
            world.start_daemon()
        check(world)
        assert found_of(report) == {WRONG: report.found[WRONG], LOST: 1}
        assert "served other bytes" in report.texts[0]["text"]


@pytest.mark.slow
def test_lost_blocks_of_a_drive_are_found(tmp_path: Path) -> None:
    with a_world(tmp_path, FLEETING, ssd=48 * MIB) as (world, report):
        with world.paused():
            sealed = sum(len(world.oracle.known(c.model)) for c in world.clients)
            end = time.monotonic() + HUNG_S
            while len(damage.keys_on_disk(world.ssd_dir)) < sealed and time.monotonic() < end:
                time.sleep(0.05)
            world.kill_daemon()
            gone = 0
            for path in damage.segment_files(world.ssd_dir):
                gone += len({record.key for record in damage.on_disk(world.ssd_dir)})
                path.unlink()
            world.start_daemon()
        check(world)
        assert gone
        assert report.found[LOST] == sealed


@pytest.mark.slow
def test_blocks_that_are_not_written_back_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "DRIVE_S", 5.0)
    with a_world(tmp_path, SPILLING, ssd=48 * MIB) as (world, report):
        checks.copy_state(world)
        assert found_of(report) == {}, report.texts
        world.orders(errors={"write": errno.EIO})
        time.sleep(0.1)
        until_sealed(world, 15 + max(len(world.oracle.known(model)) for model in world.models))
        monkeypatch.setattr(checks, "DRIVE_S", 0.5)
        checks.copy_state(world)
        world.orders()
        assert report.found[LOST]
        assert "not on the drive" in report.texts[0]["text"]


@pytest.mark.slow
def test_slots_of_a_stopped_client_that_are_given_away_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"client": 0, "passages": 1}
    clients = ((0, True), (0, False), (1, False))
    with a_world(tmp_path, ROOMY, clients=clients, blocks=2000) as (world, report):
        while not report.figures["clients_stopped_in_a_copy"]:  # may come too late
            TABLE["stop_client_copying"].run(world, how)
        check(world)
        assert found_of(report) == {}, report.texts
        kill = world.kill_daemon

        def kill_and_forget() -> None:
            kill()
            forget_reserved(world)

        monkeypatch.setattr(world, "kill_daemon", kill_and_forget)
        # It is up to chance whether other clients get these slots.
        for number in range(15):
            TABLE["stop_client_copying"].run(world, {**how, "client": number})
            check(world)
            if report.found[CAUGHT]:
                break
        assert report.found[CAUGHT], reported(world)


def forget_reserved(world: World) -> None:
    """Marks slots as free in a dead daemon's journal although clients may still write to them."""
    geometry = Geometry.of([("default", world.shape.memory_bytes)], SLAB_BYTES, SLOT_BYTES_MIN)
    start = geometry.slab_count * 8
    with journal_path(world.arena_dir).open("r+b") as journal:
        journal.seek(start)
        data = bytearray(journal.read(geometry.slot_count * HEADER_BYTES))
        rows = np.frombuffer(data, HEADER_DTYPE)
        rows["state"][rows["state"] == STATE_WORDS[State.RESERVED]] = STATE_WORDS[State.FREE]
        journal.seek(start)
        journal.write(data)


@pytest.mark.slow
def test_a_daemon_dies_at_the_points_that_were_dealt(tmp_path: Path) -> None:
    wanted = ["ssd.head_written", "ssd.segment_removed", "demote.done", "no.such_point"]
    with a_world(tmp_path, ROOMY, ssd=64 * MIB) as (world, report):
        TABLE["kill_daemon_at_point"].run(world, {"points": wanted, "passages": [3, 1, 2, 1]})
        check(world)
        found = report.coverage.as_json()
        assert found["points_missing"] == ["no.such_point"]
        assert found["points_times"]["ssd.head_written"] == [1, 0]
        assert found_of(report) == {}, report.texts


@pytest.mark.slow
def test_a_stall_is_found_unless_it_is_explained(tmp_path: Path) -> None:
    with a_world(tmp_path, ROOMY) as (world, report):
        with world.window("announced"):
            stop_daemon(world)
        check(world)
        assert not report.found[STALL], report.texts
        # On a machine that is always late, even an unannounced stall is explained.
        for _ in range(6):
            stop_daemon(world)
            world.traffic(0.3)
            check(world)
            if report.found[STALL]:
                break
        assert report.found[STALL], report.texts
        assert report.longest_stall_s > 1


def stop_daemon(world: World) -> None:
    """Stops the daemon for longer than a stall may last."""
    world.daemon.stop()
    time.sleep(2.5)
    world.daemon.go_on()


@pytest.mark.slow
def test_a_leak_an_unexpected_end_and_too_much_space_are_found(tmp_path: Path) -> None:
    with a_world(tmp_path, PRESSED, memory=16 * MIB, ssd=16 * MIB) as (world, report):
        watch = CapacityWatch(world.ssd_dir)
        (world.ssd_dir / "ballast").write_bytes(os.urandom(17 * MIB))
        capacity(world, watch)
        assert report.found[OVER] > MIB
        world.clients[0].process.send_signal(signal.SIGKILL)
        world.clients[0].process.wait()
        check(world)
        assert report.found[CRASH] == 1
        contract = contract_of(PAGE_BYTES, model=world.model_name(0)).to_json()
        hello = Hello(PROTOCOL_VERSION, "leak", contract, map_arena=False)

        kept = attach(parse_url(world.daemon.url()), hello)
        nothing_is_left(world)
        kept.close()
        reported = " ".join(line["text"] for line in report.texts if line["kind"] == LEAK)
        assert "1 sessions" in reported, reported


@pytest.mark.slow
def test_bytes_that_a_network_changes_are_found(tmp_path: Path) -> None:
    with a_world(tmp_path, ROOMY, remote=(0, 1)) as (world, report):

        def garble(purpose: Purpose, data: bytes) -> bytes:
            if purpose is not Purpose.DATA or len(data) < PAGE_BYTES // 2:
                return data
            return data[:-100] + bytes([data[-100] ^ 4]) + data[-99:]

        for index in range(2):
            world.replace(world.clients[index], kill=False, direct=False)
            world.network.relays[index].garble = garble
        end = time.monotonic() + HUNG_S
        while not report.found[CAUGHT] and time.monotonic() < end:
            world.traffic(0.1)
        assert "only a checksum stopped" in report.texts[0]["text"]
        assert not report.found[WRONG]


@pytest.mark.slow
def test_what_ends_by_itself_and_what_outlives_its_daemon_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "END_S", 1.0)
    with a_world(tmp_path, ROOMY, remote=(0, 1)) as (world, report):
        with world.without_gateway("gateway ends"):
            (pid,) = world.daemon.gateways()
            os.kill(pid, signal.SIGTERM)
            while pid in world.daemon.gateways():
                world.traffic(0.02)
        check(world)
        assert found_of(report) == {CRASH: 1}, report.texts
        assert "a gateway process ended by itself" in report.texts[0]["text"]
        with world.paused():
            world.terminate_daemon()
            checks.no_process_is_left(world)
            assert not report.found[LEAK], report.texts
            marked = {WORLD_ENVIRONMENT_NAME: str(world.places.folder)}
            with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, env=marked) as left:
                checks.no_process_is_left(world)
                left.communicate(b"\n")
        assert report.found[LEAK] == 1
        assert str(left.pid) in report.texts[-1]["text"]


# -- its parts -------------------------------------------------------------------------------------


def test_what_the_oracle_expects() -> None:
    oracle = Oracle(keeps=True)
    oracle.tried("m", 0, [1, 2, 3])
    oracle.bound("m", 0, [1, 2])
    assert oracle.sealed("m") == (0, [1, 2])
    assert oracle.excuse("m", [2, 9], "flip") == 1
    assert oracle.excused == {"flip": 1}
    oracle.bound("m", 0, [2])  # stored again: expected again
    assert oracle.sealed("m") == (0, [1, 2])
    oracle.bumped("m", 1)
    oracle.tried("m", 1, [])
    assert (oracle.sealed("m"), oracle.vanished) == ((1, []), 0)
    oracle.bound("m", 1, [5])
    oracle.bound("m", 0, [6])  # of the old weights, reported late
    oracle.tried("m", 7, [])  # a bump that no operator requested
    assert (oracle.sealed("m"), oracle.vanished) == ((7, []), 1)
    assert Oracle(keeps=False).sealed("m") == (-1, [])


def test_what_windows_explain() -> None:
    stalls = Stalls()
    stalls.late(10.0, 11.0)
    stalls.late(10.5, 12.0)
    stalls.late(20.0, 21.0, "one")
    assert stalls.explained_s(9.0, 14.0, "one") == pytest.approx(2.0 + AFTER_S)
    assert stalls.explained_s(11.5, 11.75, "two") == pytest.approx(0.25)
    assert stalls.explained_s(20.0, 21.0, "two") == 0.0
    assert stalls.explained_s(20.0, 21.0, "one") == pytest.approx(1.0)
    assert stalls.late_s == pytest.approx(2.5)
    stalls.open("gateway away", "one")
    now = time.monotonic()
    assert stalls.explained_s(now, now + 1.0, "one") == pytest.approx(1.0)
    assert stalls.explained_s(now, now + 1.0, "two") == 0.0


def test_a_block_that_is_hit_before_the_word_of_its_commit_is_excused() -> None:
    oracle = Oracle(keeps=True)
    oracle.tried("m", 1, [5, 6])
    assert oracle.within_reach("m") == [5, 6]
    assert oracle.excuse("m", [5], "flip") == 0
    oracle.bound("m", 1, [5, 6])
    assert oracle.sealed("m") == (1, [6])
    oracle.tried("m", 1, [5])
    oracle.bound("m", 1, [5])
    assert oracle.sealed("m") == (1, [6, 5])


def test_a_damaged_block_that_is_acknowledged_again_is_not_expected() -> None:
    oracle = Oracle(keeps=True)
    oracle.tried("m", 1, [5, 6])
    oracle.bound("m", 1, [5, 6])
    assert oracle.spoil("m", [5], "flip") == 1
    oracle.tried("m", 1, [5, 6])
    oracle.bound("m", 1, [5, 6])  # the daemon took it for a duplicate
    assert oracle.sealed("m") == (1, [6])
    oracle.bumped("m", 2)
    oracle.tried("m", 2, [5])
    oracle.bound("m", 2, [5])
    assert oracle.sealed("m") == (2, [5])
