"""Runs a suite in fixed shards and looks twice at what failed.

Usage: ``python tests/suites.py SUITE [pytest's arguments]``. The number of shards is ``TEST_JOBS``;
by default 2, or 1 where ``/dev/shm`` has no room for two daemons (docker's 64 MiB).

- The files of a suite are divided by ``tests/weights.json`` (seconds a file), not by who is free:
  the same files share a process, in the same order, in every run on every machine. A file that the
  table lacks weighs a second; ``--measure`` writes the suite's part of the table anew.
- Files that change the machine run after the shards, in a process of their own.
- Each test that failed runs once more, alone in a fresh process. If it passes then, it is printed
  as ``FLAKY name``, and more than three of those fail the run; else as ``FAILED name``.
- Nothing bounds how long a test takes, since machines differ. The slowest files are told at the
  end: a file whose ratio to its weight is well above the whole suite's has become slower.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
WEIGHTS = TESTS / "weights.json"
FLAKY_MAX = 3
ENDED_S = 10.0
SLOW_SHOWN = 10
ROOM_BYTES = 256 << 20
"""A daemon of a test takes up to 60 MiB of `/dev/shm`, a file of tests one or two daemons."""
LOOKED_AT_MAX = 20
"""Most tests that get a second look: with more, the change is broken, not the tests."""

REAL_PROCESSES = (
    "integration/test_client_processes.py",
    "integration/test_connector_halves.py",
    "integration/test_gateway.py",
    "integration/test_late_writers.py",
    "integration/test_memory_dirlock.py",
    "integration/test_memory_segments.py",
    "integration/test_remote_tier.py",
    "integration/test_restart.py",
    "integration/test_shared_index.py",
    "integration/test_shared_table.py",
    "integration/test_ssd_epochs.py",
    "integration/test_ssd_tier.py",
)
"""Files with real processes that every run has; each of the others finds little beside them."""
NOT_IN_EVERY_RUN = (
    # live daemons under Hypothesis
    "property/test_connector_machine.py",
    "property/test_fuzz_http.py",
    "property/test_fuzz_remote.py",
    "property/test_fuzz_replies.py",
    # real servers
    "contract/test_remote_driver_contract.py",
    # generated files and house rules: `make check` has them
    "golden/test_generated.py",
    "unit/test_tidy.py",
    # random files; the table of refusals is in every run
    "property/test_fuzz_config.py",
    # tools and documents
    "unit/test_cli_help.py",
    "unit/test_kernels.py",
    "unit/test_progress.py",
    "unit/test_sizing.py",
    "unit/test_troubleshooting.py",
)
ALONE = ("integration/test_preflight.py",)
"""Files that change the machine, such as its pool of huge pages: nothing else runs beside them."""
PURE = ("contract", "golden", "property", "unit")


def files_of(suite: str) -> list[str]:
    """Return the files of a suite, relative to ``tests`` or from ``lab`` on, in the order of their
    names.
    """
    found = {
        f"{folder}/{path.name}": folder
        for folder in (*PURE, "integration", "sim")
        for path in (TESTS / folder).glob("test_*.py")
    }
    default = {name for name, folder in found.items() if folder in PURE} - set(NOT_IN_EVERY_RUN)
    default |= set(REAL_PROCESSES)
    unit = {name for name, folder in found.items() if folder == "unit"} - {"unit/test_tidy.py"}
    suites = {
        "default": default,
        "system": set(found) - default,
        "slow": {name for name in found if "mark.slow" in (TESTS / name).read_text()},
        "floors": unit | {"integration/test_floors.py"},
        "lab": {f"lab/tests/{path.name}" for path in TESTS.parent.glob("lab/tests/test_*.py")},
    }
    return sorted(suites[suite])


def path_of(name: str) -> str:
    """Return the path of a file of a suite, or of a test in it, for pytest."""
    return name if name.startswith(("tests/", "lab/")) else f"tests/{name}"


def shards_of(files: list[str], weights: dict[str, float], count: int) -> list[list[str]]:
    """Divide files into ``count`` parts of about equal weight."""
    parts: list[list[str]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for name in sorted(files, key=lambda name: (-weights.get(name, 1.0), name)):
        least = loads.index(min(loads))
        parts[least].append(name)
        loads[least] += weights.get(name, 1.0)
    return [sorted(part) for part in parts]


class Recorder:
    """A plugin of pytest: the outcome of each test, and the seconds of each file."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.split("::")[0].removeprefix("tests/")] += report.duration
        if not report.passed or report.when == "call":
            self.outcomes[report.nodeid] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = report.outcome

    def names(self, outcome: str) -> list[str]:
        return [name for name, each in self.outcomes.items() if each == outcome]


def run_shard(result: str, words: list[str]) -> int:
    """Run pytest in this process and write what became of its tests to the file ``result``."""
    recorder = Recorder()
    code = pytest.main(words, plugins=[recorder])
    Path(result).write_text(json.dumps(vars(recorder)))
    return int(code)


class Shard:
    """One process of a run; its lines appear with the shard's number before them."""

    def __init__(self, number: int, folder: str, words: list[str]) -> None:
        self._result = Path(folder, f"{number}.json")
        self._number = number
        command = [sys.executable, __file__, "--shard", str(self._result), *words]
        self._process = subprocess.Popen(
            command,
            cwd=TESTS.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"{self._number} {line}", end="", flush=True)

    def end(self) -> Recorder:
        """Wait for the process; a process that died is a failure of its own."""
        code, recorder = self._process.wait(), Recorder()
        self._thread.join(ENDED_S)  # a process that a test left behind may hold the pipe
        if self._result.exists():
            found = json.loads(self._result.read_text())
            recorder.outcomes, recorder.seconds = found["outcomes"], Counter(found["seconds"])
        known = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if not known and not recorder.names("failed"):
            recorder.outcomes[f"shard {self._number} (exit code {code})"] = "failed"
        return recorder


def slowest(seconds: Counter[str], weights: dict[str, float]) -> list[str]:
    """Return a table of the files that took longest, beside what they took when measured."""
    known = {name: weights[name] for name in seconds if name in weights}
    rows = [(seconds[name], weights.get(name), name) for name, _ in seconds.most_common(SLOW_SHOWN)]
    rows.append((sum(seconds[name] for name in known), sum(known.values()), "all that are weighed"))
    lines = ["seconds  weight   ratio"]
    for taken, weight, name in rows:
        told = (
            f"{weight:7.1f} {taken / max(weight, 0.1):7.1f}"
            if weight is not None
            else f"{'new':>15}"
        )
        lines.append(f"{taken:7.1f} {told}  {name}")
    return lines


def second_look(failed: list[str], words: list[str]) -> tuple[list[str], list[str]]:
    """Run each test alone; return those that pass now and those that fail again."""
    flaky, twice = [], []
    for name in failed:
        if "::" not in name or len(failed) > LOOKED_AT_MAX:
            twice.append(name)
            continue
        print(f"== once more, alone: {name}", flush=True)
        command = [sys.executable, "-m", "pytest", path_of(name), *words]
        ended = subprocess.run(command, cwd=TESTS.parent, check=False)
        (twice if ended.returncode else flaky).append(name)
    return flaky, twice


def run_suite(suite: str, words: list[str], *, measure: bool) -> int:
    """Run a suite and print what became of it."""
    begin = time.monotonic()
    table = json.loads(WEIGHTS.read_text()) if WEIGHTS.exists() else {}
    roomy = shutil.disk_usage("/dev/shm").free >= ROOM_BYTES
    jobs = max(1, int(os.environ.get("TEST_JOBS") or 1 + roomy))
    files = files_of(suite)
    together = [name for name in files if name not in ALONE]
    parts = shards_of(together, table.get(suite, {}), jobs)
    alone = [path_of(name) for name in files if name in ALONE]
    with tempfile.TemporaryDirectory(prefix="kvh-tests-") as folder:
        paths = [[path_of(name) for name in part] for part in parts]
        shards = [Shard(number, folder, [*words, *part]) for number, part in enumerate(paths, 1)]
        found = [shard.end() for shard in shards]
        if alone:
            found.append(Shard(jobs + 1, folder, [*words, *alone]).end())
    seconds = sum((one.seconds for one in found), Counter())
    if measure:
        table[suite] = {name: round(seconds[name], 1) for name in sorted(seconds)}
        WEIGHTS.write_text(json.dumps(table, indent=1) + "\n")
    flaky, failed = second_look([name for one in found for name in one.names("failed")], words)
    if len(flaky) > FLAKY_MAX:
        print(f"more than {FLAKY_MAX} tests passed only in a process of their own")
    for kind, names in (("FLAKY", flaky), ("FAILED", failed)):
        for name in names:
            print(kind, name)
    print(*slowest(seconds, table.get(suite, {})), sep="\n")
    passed = sum(len(one.names("passed")) for one in found) + len(flaky)
    skipped = sum(len(one.names("skipped")) for one in found)
    print(f"{suite}: {time.monotonic() - begin:.0f} s, {len(flaky)} flaky")
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped", flush=True)
    return int(bool(failed) or len(flaky) > FLAKY_MAX or not passed)


def main() -> int:
    """Run a suite, or one shard of it in this process (the program's own use)."""
    if sys.argv[1:2] == ["--shard"]:
        return run_shard(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("suite", choices=("default", "system", "slow", "floors", "lab"))
    parser.add_argument("--measure", action="store_true", help="write the suite's weights anew")
    given, words = parser.parse_known_args()
    return run_suite(given.suite, words, measure=given.measure)


if __name__ == "__main__":
    sys.exit(main())
