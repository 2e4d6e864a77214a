"""The frame of a part: its command line, its report, and its stage."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.cuda_fake import FakeCuda, FakeDevice

from kvhearth_lab.bench.gpu.stage import CudaStage, HostStage, Stage, device_problem
from kvhearth_lab.harness.client_process import end_with

RESERVE_S = 2.0
"""Seconds at the end of a part's time that are kept for its results."""
SAVE_S = 0.3


class Report:
    """Results of a part, written to a file as they come.

    Args:
        path: the file.
        seconds: time that the part has.
        rehearsal: whether the part runs without a device.

    Attributes:
        values: what the part reports: ``figures``, ``checks`` (by name, how many passed and what
            failed), and values of its own.
    """

    def __init__(self, path: Path, seconds: float, *, rehearsal: bool = False) -> None:
        self.values: dict[str, Any] = {"status": "running", "rehearsal": rehearsal}
        self.values.update(figures={}, checks={})
        self._path = path
        self._until = time.monotonic() + seconds - RESERVE_S
        self._shortened: list[str] = []
        self._saved_s = 0.0

    def left_s(self) -> float:
        """Return the seconds that are left to measure."""
        return self._until - time.monotonic()

    def put(self, **values: Any) -> None:
        """Report values under their names."""
        self.values.update(values)
        self.save(now=True)

    def figure(self, name: str, value: float) -> None:
        """Report a figure of ``kvhearth_lab.bench.gpu.figures.RUN_FIGURES``."""
        self.values["figures"][name] = value
        self.save(now=True)

    def check(self, name: str, passed: bool, detail: object = "") -> bool:
        """Count a check; keep the details of the first few that fail. Passed ones are written
        with what is reported next.
        """
        row = self.values["checks"].setdefault(name, {"passed": 0, "failed": []})
        if passed:
            row["passed"] += 1
        elif len(row["failed"]) < 5:
            row["failed"].append(str(detail)[:400] or "failed")
        self.save()
        return passed

    def failures(self) -> list[str]:
        """Return the names of the checks that failed."""
        return [name for name, row in self.values["checks"].items() if row["failed"]]

    def passed_count(self) -> int:
        """Return the number of checks that passed."""
        return sum(row["passed"] for row in self.values["checks"].values())

    def shorten(self, reason: str) -> None:
        """Say that something was left out."""
        self._shortened.append(reason)

    def end(self, problem: str) -> int:
        """Write the final status; ``problem`` is why there is no device. Return the exit code."""
        failures = self.failures()
        if failures:
            self.values.update(status="failed", reason=f"failed checks: {', '.join(failures)}")
        elif problem:
            self.values.update(status="skipped", reason=f"{problem}; rehearsed on the CPU")
        elif self._shortened:
            self.values.update(status="shortened", reason="; ".join(self._shortened))
        else:
            self.values.update(status="ok")
        self.save(now=True)
        return 1 if failures else 0

    def save(self, *, now: bool = False) -> None:
        """Write the file, at most every ``SAVE_S`` seconds unless ``now``."""
        if not now and time.monotonic() - self._saved_s < SAVE_S:
            return
        self._saved_s = time.monotonic()
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values, default=str))
        partial.replace(self._path)


Measure = Callable[[Report, Stage], None]


def run_part(measure: Measure) -> None:
    """Run a part by its command line and end the process. Without a device it is a rehearsal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    end_with(os.getppid())
    problem = device_problem()
    report = Report(arguments.out, arguments.seconds, rehearsal=bool(problem))
    report.save(now=True)
    sys.exit(attempt(measure, report, problem))


def rehearsal() -> Stage:
    """Return the CPU with a scripted device."""
    cuda = FakeCuda(device=0)
    return HostStage(FakeDevice(cuda), cuda)


def attempt(measure: Measure, report: Report, problem: str) -> int:
    """Measure, and return the exit code; an exception is a failure of the part."""
    try:
        measure(report, rehearsal() if problem else CudaStage())
    except Exception as error:  # noqa: BLE001 - a part's main: any failure is its result
        traceback.print_exc()
        report.values.update(status="failed", reason=f"{type(error).__name__}: {error}"[:600])
        report.save(now=True)
        return 1
    return report.end(problem)


def merge(report: Report, found: Mapping[str, Any]) -> None:
    """Report a benchmark's results so far; its figures go to the figures."""
    figures = found.get("figures", {})
    report.values["figures"].update(figures)
    report.put(**{name: value for name, value in found.items() if name != "figures"})
