"""The part that the programs of all engines share: command line, rounds, and dialogue.

A program runs in its engine's environment. Its last line is one JSON object. With ``--ssd`` it says
``evict`` after each store of ours, and waits for a line: our blocks are on SSD only then.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

SIDES = ("ours", "theirs")
ABSENT_KEYS = 8
_ABSENT_WARM, _ABSENT_CALLS = 3, 100

Seconds = dict[str, dict[str, list[float]]]


class Jobs(Protocol):
    """Jobs of equal size, each under a name of its own, through an engine's classes: over a daemon
    of ours and over the engine's own files. A method raises RuntimeError for a job that fails.

    Attributes:
        bytes: bytes of a job.
    """

    bytes: int

    def store(self, side: str, name: str) -> None:
        """Store the pages."""

    def exists(self, side: str, name: str) -> None:
        """Look all keys of a stored job up."""

    def blank(self) -> None:
        """Overwrite the pages to load into."""

    def load(self, side: str, name: str) -> None:
        """Load a stored job into other pages."""

    def compare(self) -> bool:
        """Whether the loaded pages equal the stored ones."""

    def copy(self, *, load: bool) -> None:
        """Copy as many bytes plainly: out of the pages, or into them."""

    def facts(self) -> dict[str, Any]:
        """Return the versions, and the settings for a person."""

    def close(self) -> None:
        """End both sides."""


Make = Callable[[argparse.Namespace], Jobs]
Absent = Callable[[argparse.Namespace], AbstractContextManager[Callable[[int], float]]]
"""Opens an engine's classes over no daemon; yields a function that looks ``ABSENT_KEYS`` keys of a
number up and returns the seconds.
"""


class _Counted(logging.Handler):
    """Counts warnings and worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def main(make: Make, absent: Absent) -> None:
    """Run a program. What the engine prints goes to standard error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("--page-bytes", "--pages", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--ssd", action="store_true")
    parser.add_argument("--absent", action="store_true")
    options = parser.parse_args()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        found = _without_daemon(options, absent) if options.absent else _run(options, make, answer)
        print(json.dumps(found), file=answer, flush=True)


def _run(options: argparse.Namespace, make: Make, answer: TextIO) -> dict[str, Any]:
    """Return the seconds of all rounds but the first, which is not measured."""
    jobs = make(options)
    seconds: Seconds = {}
    for number in range(options.rounds + 1):
        if number <= 1:
            seconds = {kind: {side: [] for side in SIDES} for kind in ("store", "exists", "load")}
            seconds["store"]["copy"], seconds["load"]["copy"] = [], []
        for side in SIDES[:: 1 if number % 2 else -1]:
            _turn(jobs, side, f"{number}.{side}", seconds, options, answer)
        for path in _files(options.folder):
            path.unlink()
        for kind in ("store", "load"):
            with _timed(seconds[kind]["copy"]):
                jobs.copy(load=kind == "load")
    jobs.close()
    compared = options.rounds * len(SIDES) * jobs.bytes
    return {**jobs.facts(), "bytes": jobs.bytes, "seconds": seconds, "compared_bytes": compared}


def _turn(
    jobs: Jobs,
    side: str,
    name: str,
    seconds: Seconds,
    options: argparse.Namespace,
    answer: TextIO,
) -> None:
    """Run one job through one side."""
    with _timed(seconds["store"][side]):
        jobs.store(side, name)
    if options.ssd and side == "ours":
        print("evict", file=answer, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("the caller has gone")
    elif options.ssd:
        _drop_cache(options.folder)
    with _timed(seconds["exists"][side]):
        jobs.exists(side, name)
    jobs.blank()
    with _timed(seconds["load"][side]):
        jobs.load(side, name)
    if not jobs.compare():
        raise RuntimeError(f"{side}: loaded bytes differ from stored ones")


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - begun)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _drop_cache(folder: Path) -> None:
    """Let the files of a folder be read from their drive."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _without_daemon(options: argparse.Namespace, absent: Absent) -> dict[str, Any]:
    """Return the seconds of lookups while no daemon runs, and the warnings of all of them."""
    counted = _Counted()
    logging.getLogger("kvhearth").addHandler(counted)
    with absent(options) as look_up:
        seconds = [look_up(number) for number in range(_ABSENT_WARM + _ABSENT_CALLS)]
    return {"absent_s": seconds[_ABSENT_WARM:], "logged": counted.count}
