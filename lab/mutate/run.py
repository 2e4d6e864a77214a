"""Plants defects of the product, one at a time, and tells which tests notice, and how soon.

Usage: ``make mutate``, with ``MUTATE_ARGS='--only NAME,NAME'`` for some of them. ``defects.toml``
beside this file lists the defects, each with the tests of its area. A defect is planted in a copy
of the working tree. A test counts if it fails there and passes on the tree without the defect.
Exit code 1 if a defect survives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "testing.md"
HEADING = "## Planted defects"
WHOLE_S = 3600.0
"""Bound on the tests of one defect; a defect that makes them hang is noticed by it."""
TEST_S = 60
NOTICED_MAX = 4
"""Failures after which a run ends: more tell nothing new."""
COPIED = ("client", "server", "lab", "proto", "tests", "deploy", "docs", "pyproject.toml")
PACKAGES = ("client", "server", "lab")


class MutateError(Exception):
    """A defect that cannot be planted, or one that the list does not have."""


@dataclass(frozen=True)
class Defect:
    """One change of the product that makes it wrong.

    Attributes:
        name: its name in the table.
        says: what goes wrong.
        file: module, relative to the root.
        old: text that occurs once in it.
        new: replacement.
        tests: patterns of test files, relative to ``tests``.
    """

    name: str
    says: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """Return a module's text with the defect.

        Raises:
            MutateError: the text does not have ``old`` exactly once.
        """
        if text.count(self.old) != 1:
            found = text.count(self.old)
            raise MutateError(f"{self.name}: `old` occurs {found} times in {self.file}, not once")
        return text.replace(self.old, self.new)

    def files(self) -> list[str]:
        """Return the paths of the test files, relative to the root.

        Raises:
            MutateError: a pattern finds no file.
        """
        found: list[str] = []
        for pattern in self.tests:
            paths = sorted((ROOT / "tests").glob(pattern))
            if not paths:
                raise MutateError(f"{self.name}: no test file is named {pattern}")
            found += [str(path.relative_to(ROOT)) for path in paths]
        return list(dict.fromkeys(found))


@dataclass
class Noticed:
    """Result of one defect.

    Attributes:
        tests: names of the tests that failed, in the order of their failures.
        first_s: seconds until the first of them, None if none failed.
        seconds: seconds of the run.
        how: what ended the run if that was not pytest, such as ``hangs``.
    """

    tests: list[str] = field(default_factory=list)
    first_s: float | None = None
    seconds: float = 0.0
    how: str = ""

    @property
    def survived(self) -> bool:
        """Whether no test noticed."""
        return not self.tests and not self.how


def defects() -> list[Defect]:
    """Read the list."""
    with (HERE / "defects.toml").open("rb") as file:
        entries = tomllib.load(file)["defect"]
    return [Defect(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


class _Recorder:
    """A plugin of pytest that writes each failure to a file as it comes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._begin = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid)

    def _write(self, name: str) -> None:
        with Path(self._path).open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, time.monotonic() - self._begin]) + "\n")


class Tree:
    """A copy of the working tree."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "*.xz", "kit", ".hypothesis")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=ignored)
            else:
                shutil.copy2(ROOT / name, folder / name)

    @contextlib.contextmanager
    def planted(self, defect: Defect) -> Iterator[None]:
        """Plant a defect, and remove it at the end."""
        path = self._folder / defect.file
        text = path.read_text(encoding="utf-8")
        path.write_text(defect.planted(text), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")

    def run(self, words: list[str]) -> Noticed:
        """Run tests of the copy in a process of their own."""
        begin, result = time.monotonic(), Noticed()
        record = self._folder / "failures"
        record.unlink(missing_ok=True)
        paths = os.pathsep.join(str(self._folder / name) for name in PACKAGES)
        process = subprocess.Popen(
            [sys.executable, str(HERE / "run.py"), "--record", str(record), *words],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(WHOLE_S)
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                result.how = f"ends with exit code {code}"
        except subprocess.TimeoutExpired:
            result.how = "hangs"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        for name, seconds in map(json.loads, lines):
            result.first_s = seconds if result.first_s is None else result.first_s
            result.tests.append(name)
        result.tests = list(dict.fromkeys(result.tests))
        result.seconds = time.monotonic() - begin
        return result


def look(tree: Tree, defect: Defect) -> Noticed:
    """Plant a defect and run its tests."""
    words = ["-m", "not slow and not gpu", f"--maxfail={NOTICED_MAX}", f"--timeout={TEST_S}"]
    with tree.planted(defect):
        found = tree.run([*words, *defect.files()])
    if found.tests:
        # A test that fails, or takes too long, without the defect, too, has noticed nothing.
        also = set(tree.run([*words, *found.tests]).tests)
        found.tests = [name for name in found.tests if name not in also]
    return found


def look_at(chosen: list[Defect], jobs: int) -> dict[str, Noticed]:
    """Look at all defects, ``jobs`` at once, and tell each result as it comes."""
    found: dict[str, Noticed] = {}
    trees: SimpleQueue[Tree] = SimpleQueue()

    def one(defect: Defect) -> None:
        tree = trees.get()
        try:
            found[defect.name] = result = look(tree, defect)
        finally:
            trees.put(tree)
        print(f"[{len(found)}/{len(chosen)}] {defect.name}: {told(result)}", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="kvh-mutate-") as folder:
        for number in range(jobs):
            trees.put(Tree(Path(folder, str(number))))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, chosen))
    return {defect.name: found[defect.name] for defect in chosen}


def told(result: Noticed) -> str:
    """Describe a result in a few words."""
    if result.survived:
        return f"SURVIVED {result.seconds:.0f} s of tests"
    if not result.tests:
        return result.how
    more = len(result.tests) - 1
    first = re.sub(r"^tests/|\[.*", "", result.tests[0])
    return f"{first}{f' and {more} more' if more else ''}, after {result.first_s:.0f} s"


def table(chosen: list[Defect], found: dict[str, Noticed]) -> str:
    """Render the results as Markdown."""
    lines = ["| planted | noticed first by | tests | after s |", "| --- | --- | --- | --- |"]
    for defect in chosen:
        result = found[defect.name]
        tests = re.sub(r"^tests/|\[.*", "", result.tests[0]) if result.tests else result.how
        who = f"`{tests}`" if result.tests else tests or "nobody"
        count = f"{len(result.tests)}{'+' if len(result.tests) >= NOTICED_MAX else ''}"
        when = "" if result.first_s is None else f"{result.first_s:.0f}"
        lines.append(f"| {defect.says} | {who} | {count} | {when} |")
    return "\n".join(lines)


def write(text: str) -> None:
    """Replace the table on the page."""
    page = PAGE.read_text(encoding="utf-8")
    begin = page.index("\n| planted", page.index(HEADING)) + 1
    end = page.find("\n\n", begin)
    rest = page[end:] if end >= 0 else "\n"
    PAGE.write_text(page[:begin] + text + rest, encoding="utf-8")


def main() -> int:
    """Plant the defects, and print who noticed."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", help="names of defects, with commas between them")
    parser.add_argument("--jobs", type=int, default=2, help="defects at once (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--write", action="store_true", help="write the table to docs/testing.md")
    given = parser.parse_args()
    chosen = defects()
    try:
        if given.only:
            names = given.only.split(",")
            if unknown := set(names) - {each.name for each in chosen}:
                raise MutateError(f"there is no defect {', '.join(sorted(unknown))}")
            chosen = [each for each in chosen if each.name in names]
        for each in chosen:
            each.planted((ROOT / each.file).read_text(encoding="utf-8"))
            each.files()
    except MutateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = look_at(chosen, max(1, min(given.jobs, len(chosen))))
    survivors = [name for name, result in found.items() if result.survived]
    print(table(chosen, found))
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed", *survivors)
    if given.write and not given.only:
        write(table(chosen, found))
    if given.json:
        print(json.dumps({name: asdict(result) for name, result in found.items()}))
    return int(bool(survivors))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        sys.exit(pytest.main(sys.argv[3:], plugins=[_Recorder(sys.argv[2])]))
    sys.exit(main())
