"""The chaos kit's own parts, without daemons: plans, reports and rejections."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.reports import ssd, stats
from support.tiers import Opened, family

from kvhearth.errors import KVHearthError
from kvhearth_lab.cli.torture import shown
from kvhearth_lab.harness.client_process import ANSWER_S
from kvhearth_lab.harness.engine import Seen
from kvhearth_lab.torture import client as worker
from kvhearth_lab.torture import damage
from kvhearth_lab.torture.decks import BOUNDARY, POINT, Coverage, Deck, Decks
from kvhearth_lab.torture.faults import TABLE
from kvhearth_lab.torture.faults.daemon import daemon_points, in_reach
from kvhearth_lab.torture.faults.remotes import REMOTES, mover_points
from kvhearth_lab.torture.oracle import IMPATIENT, claimed, failures, look_at_drive
from kvhearth_lab.torture.plan import VERSION, Plan
from kvhearth_lab.torture.report import CAUGHT, CRASH, LOST, Report, Stalls
from kvhearth_lab.torture.run import Options
from kvhearth_lab.torture.scene import PATIENCE_S, Roots, places
from kvhearth_lab.torture.world import World
from kvhearth_lab.torture.world_config import FLEETING, ROOMY, SPILLING
from kvhearth_server.cli import app
from kvhearth_server.engine.epoch_store import RESERVE_BYTES

SHARED = Path("/dev/shm")


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the machine's free space, since nothing here fills a directory."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))


def plans(tmp_path: Path, count: int, *, seed: int = 5, **more: object) -> list[Plan]:
    """Returns the first plans of a seed, without a remote, which may not be installed."""
    settings: dict[str, Any] = {"remote": False, **more}
    options = Options(seed, 600, Roots(SHARED, tmp_path), **settings)
    return list(itertools.islice(options.plans(), count))


# -- plans -----------------------------------------------------------------------------------------


def test_no_card_comes_twice_before_all_came_once() -> None:
    deck = Deck("seed", range(7))
    assert sorted(deck.deal(7)) == list(range(7))
    assert sorted(deck.deal(3) + deck.deal(4)) == list(range(7))
    again, other = Deck("seed", range(7)), Deck("other", range(7))
    assert again.deal(21)[:7] != other.deal(7)


def test_a_card_that_does_not_fit_waits_for_one_that_has_use_for_it() -> None:
    deck = Deck("seed", range(6))
    assert all(card < 3 for card in deck.deal(30, lambda card: card < 3))
    assert sorted(deck.deal(3, lambda card: card > 2)) == [3, 4, 5]
    assert deck.deal(1, lambda _: False) == []


def test_a_card_that_is_there_several_times_comes_again_when_all_came_once() -> None:
    deck = Deck("seed", "aaabcd")
    for _ in range(3):
        assert sorted(deck.deal(4)) == ["a", "b", "c", "d"]
        assert deck.deal(2) == ["a", "a"]


def test_all_faults_come_round_in_few_worlds(tmp_path: Path) -> None:
    for seed in range(20):
        done = [s.fault for plan in plans(tmp_path, 6, seed=seed) for s in plan.steps]
        possible = len(TABLE) - len(REMOTES)
        assert len(set(done)) >= min(len(done), possible) * 0.65, (seed, done)
        some = [s.fault for plan in plans(tmp_path, 2, seed=seed) for s in plan.steps]
        assert len(set(some)) >= len(some) * 0.65, (seed, some)


def test_a_run_of_minutes_aims_at_every_fault_point_and_boundary(tmp_path: Path) -> None:
    points: Counter[str] = Counter()
    boundaries: dict[int, set[int]] = {}
    for plan in plans(tmp_path, 14):
        for step in plan.steps:
            for point in step.parameters.get("points", ()):
                assert in_reach(point, plan.shape)
                points[point] += 1
            for size, dealt in step.parameters.get("sectors", {}).items():
                boundaries.setdefault(int(size), set()).update(dealt)
    remotes = {point for point in daemon_points() if point.startswith("remote.")}
    assert set(points) == set(daemon_points()) - remotes
    assert max(points.values()) <= min(points.values()) + 3, points
    assert boundaries == {size: set(range(size + 1)) for size in (16, 40, 88, 104)}


def test_worlds_with_a_remote_aim_at_every_fault_point_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    found = set[str]()
    for plan in plans(tmp_path, 14, remote=True):
        assert plan.shape.tier
        for step in plan.steps:
            if step.fault in ("kill_mover_at_point", "kill_daemon_at_point"):
                found.update(step.parameters["points"])
    remotes = {point for point in daemon_points() if point.startswith("remote.")}
    assert len(remotes) > 3
    assert len(mover_points()) > 8
    assert found >= remotes | set(mover_points())


def test_one_world_of_a_seed_is_dealt_what_it_was_dealt_in_the_run(tmp_path: Path) -> None:
    run = plans(tmp_path, 9)
    alone = plans(tmp_path, 1, first=8, worlds=1)[0]
    assert alone == run[8]
    assert any(step.parameters.get("points") for step in run[8].steps)
    anew = Decks(5).names(POINT, daemon_points()).deal(1)
    first = next(s.parameters["points"] for s in run[8].steps if s.parameters.get("points"))
    assert first[:1] != anew, "the deck goes on from world to world"


# -- reports ---------------------------------------------------------------------------------------


def test_what_was_not_reached_is_named() -> None:
    reported = Coverage()
    reported.aims |= {(POINT, "a"), (POINT, "b"), *((BOUNDARY, (2, left)) for left in range(3))}
    reported.point("a", reached=True)
    reported.point("b", reached=False)
    reported.torn(2, 1)
    reported.torn(2, 1)
    found = reported.as_json()
    assert (found["points_reached"], found["points_total"]) == (1, 2)
    assert found["points_missing"] == ["b"]
    assert found["points_times"] == {"a": [1, 0], "b": [0, 1]}
    assert (found["boundaries_reached"], found["boundaries_total"]) == (1, 3)
    assert found["boundaries_missing"] == {"2": [0, 2]}
    assert (found["torn_records"], found["torn_boundaries"]) == (2, {"2": [1, 3]})


def test_the_table_names_what_was_not_reached() -> None:
    report = Report()
    report.coverage.point("commit.after", reached=False)
    for boundary in range(17):
        report.coverage.torn(16, boundary)
    cells = [list(column.cells) for column in shown(report.as_json(1, 1.0)).columns]
    rows = {str(what): (str(count), str(text)) for what, count, _, text in zip(*cells, strict=True)}
    assert rows["points_reached"] == ("0/1", "not reached: commit.after")
    assert rows["boundaries_reached"] == ("17/17", "each was reached")
    assert "client_points_reached" not in rows


def test_a_run_that_tested_nothing_has_not_passed() -> None:
    report = Report()
    assert not report.as_json(1, 1.0)["passed"]
    report.faults["kill_daemon"] += 1
    assert not report.as_json(1, 1.0)["passed"], "no answer was compared"
    report.count({"compared": 1})
    assert report.as_json(1, 1.0)["passed"]
    report.find(LOST, "gone", {})
    assert not report.as_json(1, 1.0)["passed"]


# -- rejections ------------------------------------------------------------------------------------


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Returns the message with which ``kvhearth torture`` ends with 2 before it begins anything."""
    assert app.run(["torture", "--seed", "1", *words]) == 2
    caught = capsys.readouterr()
    assert not caught.out
    return caught.err


def test_a_log_without_a_step_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    assert "no world with a step" in refusal(capsys, "--replay", str(empty))
    idle = plans(tmp_path, 1)[0]
    line = {"world": 0, "version": VERSION, "seed": 1, "shape": idle.shape.as_json()}
    empty.write_text(json.dumps(line) + "\n")
    assert "no world with a step" in refusal(capsys, "--replay", str(empty))


def test_faults_that_cannot_happen_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--dir", str(tmp_path), "--faults", "torn_records,kill_client", "--no-ssd")
    assert "torn_records cannot happen" in refusal(capsys, *words)
    fleeting = next(p for p in plans(tmp_path, 4) if p.shape.kind == FLEETING)
    one = {"first": fleeting.number, "worlds": 1}
    with pytest.raises(KVHearthError, match="flip_arena cannot happen"):
        plans(tmp_path, 1, faults=("flip_arena",), **one)
    assert plans(tmp_path, 1, faults=("flip_arena", "kill_client"), **one)[0].steps
    for name in TABLE.keys() - {each.name for each in REMOTES}:
        assert plans(tmp_path, 1, faults=(name,)), name


def test_places_that_cannot_be_used_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ("--dir", str(tmp_path))
    text = refusal(capsys, *here, "--log", str(tmp_path / "absent" / "log"))
    assert "--log" in text
    assert "cannot be written" in text
    assert "--dir /proc is no directory" in refusal(capsys, "--dir", "/proc")
    assert "--arena-root /proc is no directory" in refusal(capsys, *here, "--arena-root", "/proc")
    disk = Path.home()  # not on tmpfs, other than perhaps the temporary directory
    if disk.stat().st_dev != SHARED.stat().st_dev and os.access(disk, os.W_OK):
        text = refusal(capsys, *here, "--arena-root", str(disk))
        assert "neither on tmpfs nor on hugetlbfs" in text
    assert list(tmp_path.iterdir()) == []


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "needed"), [("--arena-root", 300), ("--dir", 400)])
def test_too_little_room_is_told_before_a_world_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, needed: int
) -> None:
    roots = Roots(SHARED, tmp_path)
    small = {"--arena-root": SHARED, "--dir": tmp_path}[option]

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=(needed << 20) - 1 if path == small else 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(KVHearthError, match=f"{option} .* are free, .* are needed"):
        roots.check()
    if option == "--dir":
        roots.check(ssd=False)


def test_a_tied_process_ends_with_its_parent_even_when_it_is_stopped() -> None:
    child = (
        "import os, sys, time; from kvhearth_lab.harness.client_process import end_with; "
        "end_with(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())]); time.sleep(60)"
    )
    words = [sys.executable, "-c", parent]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        process.kill()
        assert process.stdout.read() == ""  # end-of-file once its last holder has ended
    # A child that asks only after its parent's end ends at once.
    done = subprocess.run([sys.executable, "-c", child, "1"], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_block_clean_up(number: signal.Signals) -> None:
    code = (
        "import os, signal\n"
        "from kvhearth_lab.cli import cleaned_up\n"
        # The parent of the test run may ignore the signal (nohup).
        f"signal.signal({int(number)}, signal.SIG_DFL)\n"
        "with cleaned_up():\n"
        "    try:\n"
        f"        os.kill(os.getpid(), {int(number)}); signal.pause()\n"
        "    finally:\n"
        f"        os.kill(os.getpid(), {int(number)}); print('clean')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout) == (128 + number, "clean\n"), done.stderr


def test_a_daemon_that_ends_by_itself_on_its_way_to_a_point_is_a_crash() -> None:
    report = Report()
    daemon = SimpleNamespace(
        dead=True, exit_code=-signal.SIGSEGV, complaints=lambda: "what it said"
    )
    world = SimpleNamespace(
        report=report,
        daemon=daemon,
        where={},
        kill_daemon=lambda: None,
        start_daemon=lambda fault="": True,
        store_more=lambda more=0: None,
        traffic=lambda seconds: None,
    )
    wanted = {"points": ["commit.after"], "passages": [1]}
    TABLE["kill_daemon_at_point"].run(world, wanted)  # type: ignore[arg-type]
    assert report.found[CRASH]
    assert report.coverage.as_json()["points_reached"] == 0
    daemon.exit_code = -signal.SIGKILL
    TABLE["kill_daemon_at_point"].run(world, wanted)  # type: ignore[arg-type]
    assert report.coverage.as_json()["points_reached"] == 1


def test_points_that_a_world_cannot_reach_are_no_aim(tmp_path: Path) -> None:
    shapes = [plan.shape for plan in plans(tmp_path, 12, ssd=False)]
    aims = {name for s in shapes for _, name in TABLE["kill_daemon_at_point"].aims(s)}
    assert "commit.after" in aims
    assert not any(str(name).startswith(("ssd.", "demote.", "promote.")) for name in aims)
    assert all(shape.kind != ROOMY or in_reach("journal.slab", shape) for shape in shapes)


def test_one_key_of_two_namespaces_is_two_blocks_of_a_drive(tmp_path: Path) -> None:
    """After a cold start that could not trust the epochs, namespaces have new names."""
    with Opened(tmp_path / "one") as desk:
        desk.store_all(range(3))
        desk.store_all(range(2), family(namespace=b"other".ljust(32)))
        desk.store_all([1], family(group=1))
        desk.rest()
        assert len(damage.names_on_disk(tmp_path / "one")) == desk.tier.blocks == 6
    assert len(damage.keys_on_disk(tmp_path / "one")) == 3


def test_a_segment_in_the_room_of_the_namespaces_is_too_much(tmp_path: Path) -> None:
    (tmp_path / "namespaces").write_bytes(bytes(8192))
    (tmp_path / "00000001.segment").write_bytes(os.urandom(1 << 20))
    taken = damage.taken_bytes(tmp_path)
    assert taken < 2 << 20
    assert damage.claimed_bytes(tmp_path) == taken - 8192 + RESERVE_BYTES


def test_suspects_take_no_time_from_what_must_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slept(seconds: float) -> None:
        now[0] += seconds

    def check(numbers: list[int], *, prefetch: bool) -> Seen:
        slept(0.02)
        ready = numbers[0] < 1000 and now[0] > 20
        return Seen(right=numbers) if ready else Seen(lower_tier=numbers)

    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept))
    one: Any = worker.Worker.__new__(worker.Worker)
    one._engine = SimpleNamespace(check=check, wait_ready=lambda _: True, epoch=1)
    one._note = one._say = lambda *_, **__: None
    one._tell = lambda: None
    command = {"numbers": [1, 2], "suspects": [*range(1000, 1700)], "deadline_s": PATIENCE_S}
    assert one._check(command)["left"] == []
    assert now[0] < ANSWER_S + PATIENCE_S, "its answer is not waited for so long"


def test_what_is_wrong_on_a_drive_does_not_explain_what_readers_find(tmp_path: Path) -> None:
    report, [plan] = Report(), plans(tmp_path, 1)
    heard: dict[str, object] = {"caught": "a checksum stopped it"}
    client: Any = SimpleNamespace(name="e0", model="m")
    with places(Roots(tmp_path, tmp_path), []) as where:
        world = World(plan, where, report, Stalls())
        assert not world.explains_checksum("checksum_failures{ssd}")
        world.damaged.add(damage.DRIVE)
        assert world.explains_checksum("checksum_failures{ssd}")
        assert not world.explains_checksum("checksum_failures{reader}")
        world._heard(client, heard)
        world.damaged.add(damage.ARENA)
        world._heard(client, heard)
    assert report.found[CAUGHT] == 1


def test_what_a_daemon_says_of_its_drive_is_compared_once_it_stands_still(tmp_path: Path) -> None:
    report, plan = Report(), next(p for p in plans(tmp_path, 4) if p.shape.kind == FLEETING)
    reported, later = (
        stats(boot_id="a", counters={"checksum_failures{ssd}": 2}, ssd=ssd(blocks=3))
        for _ in range(2)
    )
    assert reported.ssd is not None
    assert later.ssd is not None
    answers = iter([reported, later, reported, later, reported])
    with places(Roots(tmp_path, tmp_path), []) as where:
        world = World(plan, where, report, Stalls())
        world.daemon.stats = lambda: next(answers)  # type: ignore[method-assign]
        later.ssd.counters["segments_reclaimed"] = 1
        look_at_drive(world)
        assert report.found == {CAUGHT: 1}, "what was let go meanwhile may be overwritten"
        reported.ssd.counters["segments_reclaimed"] = 1
        look_at_drive(world)
        assert report.found == {CAUGHT: 1, LOST: 3}, "what it counted is told once"
        assert claimed(world) == 3
        world.damaged.add(damage.DRIVE)
        look_at_drive(world)
        assert claimed(world) == 0
    assert report.found == {CAUGHT: 1, LOST: 3}


def test_a_slow_drive_excuses_nothing(tmp_path: Path) -> None:
    [plan] = plans(tmp_path, 1)
    assert plan.shape.kind == SPILLING
    report, how = Report(), {"for_s": 0.1, "kill": False, "orders": {"delay_s": 1.5}}
    with places(Roots(tmp_path, tmp_path), []) as where:
        world = World(plan, where, report, Stalls())
        said = stats(counters={IMPATIENT: 3})
        TABLE["slow_drive"].run(world, how)
        assert world.oracle.keeps
        assert not world.drive_is_suspect
        failures(world, said)
        assert report.found == {LOST: 3}, "a daemon must wait for a drive that makes progress"
        world.drive_faulted()
        said.counters[IMPATIENT] = 5
        failures(world, said)
    assert report.found == {LOST: 3}
    assert report.figures["bursts_to_a_slow_drive"] == 1
