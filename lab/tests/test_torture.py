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

from kvhearth.errors import KVHearthError
from kvhearth_lab.harness.client_process import ANSWER_S
from kvhearth_lab.harness.engine import Seen
from kvhearth_lab.torture import client as worker
from kvhearth_lab.torture.decks import BOUNDARY, POINT, Coverage, Deck
from kvhearth_lab.torture.faults import TABLE
from kvhearth_lab.torture.faults.daemon import daemon_points, in_reach
from kvhearth_lab.torture.faults.remotes import REMOTES
from kvhearth_lab.torture.plan import VERSION, Plan
from kvhearth_lab.torture.report import CRASH, LOST, Report
from kvhearth_lab.torture.run import Options
from kvhearth_lab.torture.scene import PATIENCE_S, Roots
from kvhearth_lab.torture.world_config import FLEETING
from kvhearth_server.cli import app

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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
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
