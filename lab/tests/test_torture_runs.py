"""Runs of the chaos kit: a run finds nothing, and a seed determines all choices.

``KVHEARTH_SEED`` repeats a run's choices (not its timing), ``KVHEARTH_SOAK_S`` is its length.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvhearth.errors import KVHearthError
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.remote_server import installed
from kvhearth_lab.torture.faults import TABLE
from kvhearth_lab.torture.faults.daemon import client_points, daemon_points
from kvhearth_lab.torture.plan import StepLog
from kvhearth_lab.torture.report import KINDS
from kvhearth_lab.torture.run import Options
from kvhearth_lab.torture.scene import Roots
from kvhearth_lab.torture.world_config import FLEETING, PRESSED, ROOMY, SHARED, SPILLING

ARENA_ROOT = Path(os.environ.get("KVHEARTH_TEST_ARENA_ROOT", "/dev/shm"))
SOAK_S = float(os.environ.get("KVHEARTH_SOAK_S", "60"))


def run_kit(tmp_path: Path, seconds: float, *words: str) -> tuple[dict[str, object], str]:
    """Runs ``kvhearth torture`` with a seed; returns its JSON object and its stderr."""
    seed = os.environ.get("KVHEARTH_SEED") or str(secrets.randbelow(1 << 32))
    print(f"\nKVHEARTH_SEED={seed}")
    command = [sys.executable, "-m", "kvhearth_server.cli.app", "torture", "--json"]
    command += ["--seed", seed, "--seconds", str(seconds), "--dir", str(tmp_path)]
    command += ["--arena-root", str(ARENA_ROOT), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode == 0) == found["passed"], done.stderr
    return found, done.stderr


# -- a run -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 200)
def test_faults_find_nothing(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    found, reported = run_kit(tmp_path, SOAK_S, "--log", str(log))
    assert found["passed"], reported
    wanted = {"seed", "seconds", "faults", "operations", "longest_stall_s", *KINDS}
    wanted |= {"points_reached", "points_total", "boundaries_reached", "boundaries_total"}
    assert wanted <= found.keys()
    assert found["compared_blocks"]
    assert list(tmp_path.iterdir()) == [log], "directories are left"
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum("fault" in line for line in steps) == found["faults"]
    # The number of worlds depends on the machine; the deck only guarantees that they differ.
    names, faults = found["faults_by_name"], found["faults"]
    assert isinstance(names, dict)
    assert isinstance(faults, int)
    assert faults >= 4
    assert len(names) >= min(faults, len(TABLE)) / 2


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    roots = Roots(ARENA_ROOT, tmp_path)
    with pytest.raises(KVHearthError, match=r"no such, thing; known: kill_daemon"):
        Options(1, 1, roots, faults=("such", "thing")).plans()
    with pytest.raises(KVHearthError, match=r"--dir .* is no directory"):
        Roots(ARENA_ROOT, tmp_path / "absent").check()
    odd = tmp_path / "odd"
    odd.write_text('{"world": 0, "version": 0, "seed": 1, "shape": {}}\n')
    with pytest.raises(KVHearthError, match="another version"):
        list(Options(1, 1, roots, replay=odd).plans())


def test_a_seed_and_a_log_repeat_the_choices(tmp_path: Path) -> None:
    roots = Roots(ARENA_ROOT, tmp_path)
    log = StepLog(tmp_path / "log")
    first = []
    remote = None if installed() else False
    for plan in itertools.islice(Options(5, 1, roots, remote=remote).plans(), 6):
        steps = list(plan.steps)
        first.append((plan.number, plan.shape, steps))
        log.world(plan)
        for number, step in enumerate(steps):
            log.step(plan.number, number, step, 0.0)
    log.close()
    again = Options(5, 1, roots, replay=tmp_path / "log").plans()
    assert [(p.number, p.shape, list(p.steps)) for p in again] == first
    alone = next(iter(Options(5, 1, roots, first=4).plans()))
    assert (alone.number, alone.shape, list(alone.steps)) == first[4]
    wanted = {ROOMY, SPILLING, FLEETING, PRESSED, *([SHARED] if installed() else [])}
    assert {shape.kind for _, shape, _ in first} == wanted


def test_all_fault_points_are_known() -> None:
    wanted = {"commit.after", "journal.bind_half", "durable.payload_written", "ssd.after_write"}
    assert wanted <= set(daemon_points())
    assert set(client_points()) == {
        "copier.store_copying",
        *(f"copier.{kind}_{what}" for kind in ("store", "load") for what in ("block", "done")),
    }


@pytest.mark.slow
def test_an_end_by_signal_leaves_nothing(tmp_path: Path) -> None:
    if not os.access(ARENA_ROOT, os.W_OK):
        pytest.skip(f"needs a writable tmpfs at {ARENA_ROOT}")
    arenas = Path(tempfile.mkdtemp(prefix="kvh-", dir=ARENA_ROOT))
    command = [sys.executable, "-m", "kvhearth_server.cli.app", "torture", "--seconds", "300"]
    drive = Path(tempfile.mkdtemp(prefix="kvh-"))  # a short path, since it holds sockets
    command += ["--dir", str(drive), "--arena-root", str(arenas), "--faults", "restart_daemon"]
    log = tmp_path / "steps"
    try:
        for number, status in ((signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
            log.unlink(missing_ok=True)
            with subprocess.Popen([*command, "--log", str(log)]) as process:
                until_step(log)
                mine = children_of(process.pid)
                process.send_signal(number)
                assert process.wait(HUNG_S) == status
            assert len(mine) >= 3, "a daemon and clients were there"
            end = time.monotonic() + HUNG_S
            while any(map(alive, mine)):
                time.sleep(0.05)
                assert time.monotonic() < end, "processes are left"
            if number == signal.SIGTERM:
                assert list(arenas.iterdir()) == []
                assert list(drive.iterdir()) == []
    finally:
        shutil.rmtree(arenas)
        shutil.rmtree(drive)


def until_step(log: Path) -> None:
    """Waits until a run has begun its first step."""
    end = time.monotonic() + HUNG_S
    while not log.exists() or '"fault"' not in log.read_text():
        time.sleep(0.05)
        assert time.monotonic() < end, "no step begins"


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Returns the processes that its main thread started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
