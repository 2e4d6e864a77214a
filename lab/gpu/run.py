"""Proves the CUDA path on this machine: ``python3 lab/gpu/run.py --json FILE``.

Needs torch, numpy, grpcio, xxhash and pytest, no network and nothing installed: the sources stand
beside this file, and everything else is in the kit (``make gpu-kit``). Each part is a process with
a deadline of its own. FILE is rewritten whenever a part has something new, so that a run that is
cut off still tells. lab/gpu/README.md describes the parts and the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KIT = HERE / "kit"
WHOLE_S = 530.0
"""A run ends within nine minutes."""
END_S = 3.0
"""Time that a part gets after its own bound to write its results, before it is killed."""
POLL_S = 0.1
TAIL_CHARS = 3000
CLEAN = ("KVHEARTH_", "PYTHON")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FINE = ("ok", "skipped", "shortened")
"""Statuses of parts that found nothing wrong."""


@dataclass(frozen=True)
class Part:
    """One part of a run.

    Attributes:
        module: module whose main it is.
        seconds: its deadline.
        words: further arguments.
    """

    name: str
    module: str
    seconds: float
    words: tuple[str, ...] = ()


PLAN = (
    Part("facts", "gpu_parts.facts", 40),
    Part("correctness", "gpu_parts.correctness", 90),
    Part("registration", "gpu_parts.registration", 75),
    Part("bandwidth", "gpu_parts.bandwidth", 80),
    Part("decode", "gpu_parts.decode", 60),
    Part("ttft", "gpu_parts.ttft", 120),
    Part("faults", "gpu_parts.faults", 55),
    Part("verification", "gpu_parts.verification", 35),
    Part("suite", "gpu_parts.suite", 60),
    Part("tier", "gpu_parts.tier", 120),
)
"""Most important first: what the whole run's bound cuts off is its end."""


@dataclass
class Results:
    """Results so far, and the file that holds them."""

    path: Path | None
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    kit: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    cut: str = ""
    verdict: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        """Rewrite the file, by a rename."""
        if self.path is None:
            return
        whole = {name: value for name, value in asdict(self).items() if name != "path"}
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        partial.write_text(json.dumps(whole, indent=1, default=str) + "\n")
        partial.replace(self.path)

    def figures(self) -> dict[str, Any]:
        """Return the figures of all parts; those of rehearsals do not count."""
        found: dict[str, Any] = {}
        for part in self.parts.values():
            if not part.get("rehearsal"):
                found.update(part.get("figures", {}))
        return found

    def judge(self) -> None:
        """Compare the figures with the targets."""
        try:
            from kvhearth_lab.bench.gpu.figures import RUN_FIGURES, judged

            self.verdict = judged(self.figures(), RUN_FIGURES)
        except ImportError as error:  # a machine without the kit
            self.verdict = {"problem": f"no targets: {error}"}

    def bad(self) -> list[str]:
        """Return the parts that failed or were cut off."""
        return [name for name, part in self.parts.items() if part["status"] not in FINE]

    def summary(self) -> dict[str, Any]:
        """Return the object of the last line."""
        return {
            "file": str(self.path) if self.path else None,
            "parts": {name: part["status"] for name, part in self.parts.items()},
            "reasons": {
                name: part["reason"] for name, part in self.parts.items() if part.get("reason")
            },
            "cut": self.cut,
            "figures": self.figures(),
            "missed": self.verdict.get("missed", []),
            "not_measured": self.verdict.get("not_measured", []),
        }


class Cut(Exception):
    """A signal asked the run to end."""


def fits(wheel: str, minor: int) -> bool:
    """Whether CPython 3.``minor`` on this kind of machine takes the wheel, by its file name."""
    python, abi, machine = wheel.removesuffix(".whl").split("-")[-3:]
    if machine != "any" and not machine.endswith(platform.machine()):
        return False
    tags = python.split(".")
    if abi == "none":
        return "py3" in tags
    if abi == "abi3":
        return any(tag.startswith("cp3") and int(tag[3:]) <= minor for tag in tags)
    return f"cp3{minor}" in tags


def unpack(kit: Path, folder: Path) -> dict[str, Any]:
    """Unpack the wheels of the kit that fit this Python; return what was done."""
    wheels = sorted(path for path in kit.glob("*.whl") if fits(path.name, sys.version_info.minor))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    if not wheels:
        return {"problem": f"no wheels for Python 3.{sys.version_info.minor}: run `make gpu-kit`"}
    return {"wheels": len(wheels), "bytes": sum(wheel.stat().st_size for wheel in wheels)}


def python_path(unpacked: Path) -> list[str]:
    """Return the folders from which parts import: the sources, the tests' support, the kit."""
    sources = [ROOT / name for name in ("client", "server", "lab", "tests")]
    return [str(path) for path in (*sources, HERE, unpacked)]


def environment(paths: Sequence[str]) -> dict[str, str]:
    """Return the variables of parts: this process's without settings of the operator's."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(CLEAN)}
    given = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "NUMPY_MADVISE_HUGEPAGE": "0",
        "HF_HUB_OFFLINE": "1",
    }
    return {**kept, **given}


def tell(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)


class Runner:
    """Runs parts one after another.

    Args:
        results: takes what they report.
        variables: environment of the parts.
        whole_s: seconds of the whole run.
    """

    def __init__(self, results: Results, variables: dict[str, str], whole_s: float) -> None:
        self._results = results
        self._variables = variables
        self._until = time.monotonic() + whole_s
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, plan: Sequence[Part]) -> None:
        """Run the parts; those for which no time is left are listed with that reason."""
        for number, part in enumerate(plan, 1):
            left_s = self._until - time.monotonic()
            seconds = min(part.seconds, left_s - END_S)
            if seconds <= END_S:
                self._put(part, {"status": "cut", "reason": "no time was left for it"})
                continue
            tell(f"[{number}/{len(plan)}] {part.name}: at most {seconds:.0f} s")
            self._one(part, seconds)
            done = self._results.parts[part.name]
            reason = f" ({done['reason']})" if done.get("reason") else ""
            tell(f"    {done['status']} after {done['seconds']} s{reason}")

    def _put(self, part: Part, result: dict[str, Any]) -> None:
        self._results.parts[part.name] = result
        self._results.save()

    def _one(self, part: Part, seconds: float) -> None:
        began_s = time.monotonic()
        self._put(part, {"status": "running"})
        with tempfile.TemporaryDirectory(prefix="kvh-part-") as folder:
            out, log = Path(folder) / "result.json", Path(folder) / "log"
            command = [sys.executable, "-m", part.module, "--out", str(out)]
            command += ["--seconds", f"{seconds:.1f}", *part.words]
            with log.open("wb") as errors:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    env=self._variables,
                    cwd=folder,
                    start_new_session=True,
                )
            try:
                late = self._watch(part, out, began_s + seconds + END_S)
            except Cut:
                self._finish(part, out, log, began_s, "the run was ended")
                raise
            self._finish(part, out, log, began_s, "killed at its deadline" if late else "")
            self._child = None

    def _watch(self, part: Part, out: Path, until: float) -> bool:
        """Wait for the end of the child, and pass its results on meanwhile; True if it is late."""
        assert self._child is not None
        seen = 0
        while self._child.poll() is None:
            if time.monotonic() > until:
                return True
            stamp = out.stat().st_mtime_ns if out.exists() else 0
            if stamp != seen:
                seen = stamp
                self._put(part, {**_read(out), "status": "running"})
            time.sleep(POLL_S)
        return False

    def _finish(self, part: Part, out: Path, log: Path, began_s: float, killed: str) -> None:
        assert self._child is not None
        self.kill()
        result = _read(out)
        code = self._child.returncode
        if killed:
            result.update(status="cut", reason=killed)
        elif code or result.get("status") in (None, "running"):
            result["status"] = "failed"
            result.setdefault("reason", f"the process ended with {code}")
        result["seconds"] = round(time.monotonic() - began_s, 1)
        if result["status"] not in FINE:
            result["log"] = log.read_text(errors="replace")[-TAIL_CHARS:]
            tell(result["log"])
        self._put(part, result)

    def kill(self) -> None:
        """Kill the part that runs, and all processes that it started."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def plan_of(arguments: argparse.Namespace) -> list[Part]:
    """Return the parts to run.

    Raises:
        SystemExit: an unknown part.
    """
    plan: Sequence[Part] = PLAN
    if arguments.plan:
        plan = [Part(*row) for row in json.loads(Path(arguments.plan).read_text())]
    plan = [replace(part, seconds=part.seconds * arguments.stretch) for part in plan]
    wanted = arguments.parts.split(",") if arguments.parts else [part.name for part in plan]
    unknown = set(wanted) - {part.name for part in plan}
    if unknown:
        names = ", ".join(part.name for part in plan)
        raise SystemExit(f"run.py: unknown part {', '.join(sorted(unknown))}; known: {names}")
    return [part for part in plan if part.name in wanted]


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--parts", default="", metavar="NAME,NAME", help="run only these parts")
    parser.add_argument("--seconds", type=float, default=WHOLE_S, help="bound of the whole run")
    stretch = "multiply all deadlines: for a busy machine, and where minutes do not matter"
    parser.add_argument("--stretch", type=float, default=1.0, metavar="FACTOR", help=stretch)
    parser.add_argument("--kit", type=Path, default=KIT, metavar="DIR", help="folder of wheels")
    parser.add_argument(
        "--plan", metavar="FILE", help="other parts: a JSON list of [name, module, seconds, words]"
    )
    return parser.parse_args(words)


def print_table(results: Results) -> None:
    """Print the figures beside their targets."""
    for row in results.verdict.get("table", ()):
        value = "-" if row["value"] is None else f"{row['value']:g}"
        word = {True: "ok", False: "MISSED", None: ""}[row["ok"]]
        tell(f"{row['name']:26} {value:>12} {row['target']:>9} {word:6} {row['what']}")


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts. Return 0 if nothing failed, 1 if a part failed or was cut off, 128 more than
    the signal that ended the run, 2 for wrong usage. A missed target is no failure.
    """
    arguments = arguments_of(words)
    plan = plan_of(arguments)
    results = Results(arguments.json)
    code = 0

    def end(number: int, _: FrameType | None) -> None:
        nonlocal code
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        code = 128 + number
        raise Cut(signal.Signals(number).name)

    for each in SIGNALS:
        signal.signal(each, end)
    with tempfile.TemporaryDirectory(prefix="kvh-kit-") as unpacked:
        results.kit = unpack(arguments.kit, Path(unpacked))
        paths = python_path(Path(unpacked))
        sys.path[:0] = paths
        whole_s = arguments.seconds * arguments.stretch
        runner = Runner(results, environment(paths), whole_s)
        try:
            runner.run(plan)
        except Cut as cut:
            runner.kill()
            results.cut = f"ended by {cut}"
        results.judge()
    results.save()
    print_table(results)
    print(json.dumps(results.summary(), default=str))
    return code or (1 if results.bad() else 0)


if __name__ == "__main__":
    sys.exit(main())
