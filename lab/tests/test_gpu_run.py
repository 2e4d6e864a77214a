"""``lab/gpu/run.py`` without a device: it says so, and keeps its results however it is ended."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import until

from kvhearth_lab.harness import HUNG_S

pytest.importorskip("torch")

from doubles.cuda_stage import ScriptedCudaStage
from gpu_parts import decode, faults
from gpu_parts.common import Report
from run import KIT, PLAN

from kvhearth_lab.bench.gpu.figures import RUN_FIGURES
from kvhearth_lab.bench.gpu.stage import device_problem

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "lab" / "gpu" / "run.py"
BUSY = "3"
"""Factor of deadlines, which are those of an idle machine."""
BARE = (
    *("torch", "torchgen", "functorch", "numpy", "numpy.libs", "grpc", "xxhash", "pytest"),
    *("_pytest", "pluggy", "iniconfig", "packaging", "filelock", "fsspec", "jinja2", "markupsafe"),
    *("mpmath", "networkx", "sympy", "typing_extensions.py", "triton", "isympy.py", "py.py"),
)
"""Packages of a bare CUDA machine: torch, numpy, grpcio, xxhash, pytest and what they need."""
WITHOUT_DEVICE = pytest.mark.skipif(not device_problem(), reason="there is a device: use it")


def command(python: str | Path, *words: str) -> list[str]:
    return [str(python), str(RUN), *words]


def finished(words: list[str]) -> tuple[int, dict[str, Any], str]:
    """Run; return the exit code, the object of the last line, and the progress."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def told(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def plan_of(folder: Path, *behaviours: str, seconds: float = 60.0) -> Path:
    rows = [
        [f"{number}-{behaviour}", "doubles.part_double", seconds, [behaviour]]
        for number, behaviour in enumerate(behaviours)
    ]
    path = folder / "plan.json"
    path.write_text(json.dumps(rows))
    return path


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody waited for counts."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run whose second part hangs, once it does."""
    out = tmp_path / "out.json"
    words = command(sys.executable, "--json", str(out), "--kit", str(tmp_path))
    words += ["--plan", str(plan_of(tmp_path, "end", "hang", "end"))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        until(lambda: out.exists() and "pids" in hanging(out), "the second part hangs")
        yield process, out
        process.kill()


def hanging(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = told(path)["parts"].get("1-hang", {})
    return found


@pytest.mark.slow
@WITHOUT_DEVICE
def test_without_a_device_each_part_says_why_it_skips(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = command(sys.executable, "--json", str(out), "--stretch", BUSY)
    code, summary, progress = finished(words)
    assert summary["parts"] == {part.name: "skipped" for part in PLAN}, progress
    assert code == 0
    whole = told(out)
    for name, part in whole["parts"].items():
        assert part["reason"].startswith("no CUDA device: "), name
        assert part["rehearsal"], name
        assert sum(row["passed"] for row in part["checks"].values()) > 0, name
    host = whole["parts"]["facts"]["host"]
    assert {"page_bytes", "memlock", "numa_nodes", "packages", "hugetlb"} <= set(host)
    # Figures of a rehearsal mean nothing, and do not count.
    assert summary["figures"] == {}
    assert summary["missed"] == []
    wanted = [each.name for each in RUN_FIGURES if each.sign]
    assert summary["not_measured"] == wanted


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter like a bare CUDA machine's: no pip, no kvhearth, few packages."""
    if not list(KIT.glob("*.whl")):
        pytest.skip("the kit was not made: run `make gpu-kit`")
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    there = Path(spec.origin).parents[1]
    site = next(folder.glob("lib/python3*/site-packages"))
    for name in BARE:
        if (there / name).exists():
            (site / name).symlink_to(there / name)
    for metadata in there.glob("*.dist-info"):
        if metadata.name.split("-")[0] in ("torch", "numpy", "grpcio", "xxhash", "pytest"):
            (site / metadata.name).symlink_to(metadata)
    return folder / "bin" / "python"


@WITHOUT_DEVICE
def test_a_bare_machine_needs_only_the_kit(bare: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    parts = "facts,decode,ttft"
    words = command(bare, "--json", str(out), "--parts", parts, "--stretch", BUSY)
    code, summary, progress = finished(words)
    assert summary["parts"] == dict.fromkeys(parts.split(","), "skipped"), progress
    assert code == 0
    assert told(out)["kit"]["wheels"] > 20
    facts = told(out)["parts"]["facts"]
    assert facts["checks"]["host copier loads"]["passed"] == 1
    assert facts["host"]["packages"]["transformers"] == "not installed"


def test_a_part_that_hangs_or_dies_takes_nothing_with_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    rows = json.loads(plan_of(tmp_path, "end", "hang", "crash", "raise", "end").read_text())
    rows[1][2] = 12.0
    (tmp_path / "plan.json").write_text(json.dumps(rows))
    words = command(sys.executable, "--json", str(out), "--plan", str(tmp_path / "plan.json"))
    code, summary, progress = finished([*words, "--kit", str(tmp_path)])
    assert code == 1
    wanted = {"0-end": "skipped", "1-hang": "cut", "2-crash": "failed", "3-raise": "failed"}
    assert summary["parts"] == {**wanted, "4-end": "skipped"}, progress
    parts = told(out)["parts"]
    assert parts["1-hang"]["reason"] == "killed at its deadline"
    assert all(gone(pid) for pid in parts["1-hang"]["pids"])
    assert parts["2-crash"]["reason"] == f"the process ended with -{int(signal.SIGSEGV)}"
    assert parts["3-raise"]["reason"] == "ValueError: planted"
    # Values that came before the end are kept.
    assert all(part["before"] == 1 for part in parts.values())


def test_a_run_that_is_killed_still_tells(started: Any) -> None:
    process, out = started
    process.kill()
    process.wait(HUNG_S)
    parts = told(out)["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "0-end": "skipped",
        "1-hang": "running",
    }
    part, child = parts["1-hang"]["pids"]
    until(lambda: gone(part), "the part ends with the run")
    os.kill(child, signal.SIGKILL)  # it was started without a tie to its parent


# -- parts with daemons, on a scripted GPU ---------------------------------------------------------


@pytest.mark.parametrize("part", [decode, faults])
def test_a_part_with_a_daemon_passes_on_a_scripted_gpu(part: Any, tmp_path: Path) -> None:
    report = Report(tmp_path / "result.json", 100)
    part.measure(report, ScriptedCudaStage())
    assert report.failures() == [], report.values["checks"]
    figures = set(report.values["figures"])
    names = {each.name for each in RUN_FIGURES}
    assert figures
    assert figures <= names | {"decode_idle_p99_ratio"}
