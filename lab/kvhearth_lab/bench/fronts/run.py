"""Runs ``kvhearth bench fronts``: for each engine a program in the engine's environment.

The program builds the engine's real classes twice, over a daemon of ours and over the engine's own
file back end, and runs the same jobs through both in turns. It compares every loaded byte.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import kvhearth
from kvhearth.errors import KVHearthError, Reason
from kvhearth.version import __version__
from kvhearth_lab.bench.daemon import Served, broken, served
from kvhearth_lab.bench.fronts.figures import FRONTS, MEDIA, PAGES, Front, Sizes, figures_of
from kvhearth_lab.bench.peers.adapter import (
    Adapter,
    PeerFailed,
    interpreters,
    parse_answer,
    parse_count,
    seconds_of,
)
from kvhearth_lab.bench.report import Result, machine, missed, p50, ratio_of

SILENCE_S = 300.0
"""Longest time until a program's next line."""
MEMORY_BYTES_MIN = 512 << 20
SSD_BYTES_MIN = 512 << 20
_EVICT, _DONE = b"evict", b"done\n"
_CHECKOUT = (Path(__file__).parents[3], Path(kvhearth.__file__).parents[1])

Note = Callable[[str], None]


class Program(Adapter):
    """The process of one engine's program.

    Args:
        python: interpreter of the engine's environment.
        name: the program's module.
        folder: folder for its log and its files; a short path.
        options: further words of the command line.
    """

    def __init__(self, python: Path, name: str, folder: Path, *options: str) -> None:
        files = folder / "files"
        files.mkdir()
        command = [str(python), "-m", name, "--folder", str(files), *options]
        path = os.pathsep.join(map(str, _CHECKOUT))
        super().__init__(command, folder, {"PYTHONPATH": path})

    def result(self, evict: Callable[[], None] | None = None) -> dict[str, Any]:
        """Return the object in its last line.

        Args:
            evict: moves all blocks to SSD, whenever the program asks for it.

        Raises:
            PeerFailed: it failed, or was silent for ``SILENCE_S``.
        """
        while not (line := self.line("the next round", SILENCE_S)).startswith(b"{"):
            if line == _EVICT and evict is not None:
                evict()
                self.tell(_DONE)
        self.wait_end(SILENCE_S)
        return parse_answer(line)


def run(
    folder: Path,
    sizes: Sizes,
    pythons: Mapping[str, Path | None],
    note: Note,
    fronts: Sequence[Front] = FRONTS,
) -> dict[str, Any]:
    """Measure all engines that are there and return the object that the verb prints.

    Args:
        folder: on the drive of the SSD tier and of the engines' files.
        sizes: sizes of the run.
        pythons: interpreters of the engines' environments, by the flag's name.
        note: receives a line for a person at each step.
        fronts: the engines.

    Raises:
        KVHearthError: ``config_invalid``: no files can be made in ``folder``; ``internal``: our
            daemon does not work.
    """
    start = time.monotonic()
    usable, skipped = interpreters(pythons)
    result, engines = Result(), dict[str, Any]()
    result.values = {
        "version": __version__,
        "machine": machine(),
        "sizes": {"job_bytes": sizes.job_bytes, "rounds": sizes.rounds, "pages": [*PAGES.values()]},
    }
    for front in fronts:
        if front.option not in usable:
            note(f"{front.prefix}: skipped: {skipped[front.option]}")
            continue
        bench = _Bench(front, usable[front.option], folder, sizes, result)
        for part, measure in bench.parts().items():
            note(f"{front.prefix}: {part}")
            try:
                measure()
            except PeerFailed as failed:
                skipped[f"{front.prefix}, {part}"] = str(failed)
                note(f"{front.prefix}: {part}: skipped: {failed}")
        engines[front.prefix] = bench.found
    seconds = round(time.monotonic() - start, 1)
    values = {**result.values, "seconds": seconds, "engines": engines, "skipped": skipped}
    figures = [figure for front in fronts for figure in figures_of(front)]
    return {**values, "spread": result.spread, "missed": missed(values, figures)}


@dataclass
class _Bench:
    """One engine's measurement.

    Attributes:
        result: receives its figures.
        found: versions, settings, and GB/s of each run.
    """

    front: Front
    python: Path
    folder: Path
    sizes: Sizes
    result: Result
    found: dict[str, Any] = field(default_factory=lambda: {"runs": {}})

    def parts(self) -> dict[str, Callable[[], None]]:
        """Return its parts, by their names for a person."""
        parts: dict[str, Callable[[], None]] = {"no daemon": self._absent}
        for medium, place in MEDIA.items():
            for size, page_bytes in PAGES.items():
                name = f"{page_bytes >> 10} KiB pages {place}"
                parts[name] = partial(self._turns, medium, size)
        return parts

    def _absent(self) -> None:
        """Measure the engine's calls while there is no daemon."""
        with _own(self.folder) as own:
            url, sizes = f"kvhearth+unix://{own}/none", (PAGES[""], 8, 1)
            with self._started(own, url, sizes, "--absent") as program:
                found = program.result()
        samples = found.get("absent_s")
        if not isinstance(samples, list) or not samples:
            raise PeerFailed("its program answers no absent_s")
        times = [seconds_of({"absent_s": each}, "absent_s") * 1e3 for each in samples]
        self.result.put(f"{self.front.prefix}_absent_ms", times)
        self.result.values[f"{self.front.prefix}_absent_logged"] = parse_count(found, "logged")

    def _turns(self, medium: str, size: str) -> None:
        """Measure its jobs of one size of pages, over ours and over its own files."""
        page_bytes, options = PAGES[size], ["--ssd"] if medium else []
        sizes = page_bytes, self.sizes.job_bytes // page_bytes, self.sizes.rounds
        with _own(self.folder) as own, self._daemon(own, bool(medium)) as daemon:
            with self._started(own, daemon.client_url, sizes, *options) as program:
                found = program.result(daemon.leave_to_ssd if medium else None)
            if errors := daemon.book_errors():
                raise broken(f"the books do not balance: {errors}")
        self.found |= {name: found[name] for name in ("versions", "settings") if name in found}
        self.found["runs"][f"{page_bytes >> 10}KiB{medium}"] = _described(found)
        _put(self.result, self.front, found, medium + size)

    @contextlib.contextmanager
    def _daemon(self, own: Path, ssd: bool) -> Iterator[Served]:
        # All rounds: blocks that were loaded once are kept longer than those of the next round.
        memory = max(MEMORY_BYTES_MIN, 2 * self.sizes.job_bytes + self.sizes.round_bytes)
        size = max(SSD_BYTES_MIN, 2 * self.sizes.round_bytes)
        below = [f"{own}/ssd={size}"] if ssd else []
        with served(memory=memory, ssd_dirs=below) as daemon:
            daemon.ready()
            yield daemon

    @contextlib.contextmanager
    def _started(
        self, own: Path, url: str, sizes: tuple[int, int, int], *options: str
    ) -> Iterator[Program]:
        """Run the program with these bytes of a page, pages, and rounds."""
        names = ("--page-bytes", "--pages", "--rounds")
        flags = [text for pair in zip(names, map(str, sizes), strict=True) for text in pair]
        program = Program(self.python, self.front.program, own, "--url", url, *flags, *options)
        try:
            yield program
        finally:
            program.end()


@contextlib.contextmanager
def _own(folder: Path) -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(dir=folder.resolve(), prefix="kvhearth-bench-")
    except OSError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--dir {folder}: {error.strerror}") from None
    with made as own:
        yield Path(own)


def _times(found: Mapping[str, Any], job: str, side: str) -> list[float]:
    """Return one side's seconds of a job, by round.

    Raises:
        PeerFailed: the program reports none.
    """
    samples = found.get("seconds", {}).get(job, {}).get(side)
    if not isinstance(samples, list) or not samples:
        raise PeerFailed(f"its program answers no seconds of {job} {side}")
    return [seconds_of({"seconds": each}) for each in samples]


def _described(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return one run's GB/s by job and side, and the bytes that were compared."""
    job_bytes = parse_count(found, "bytes")
    gbs = {
        job: {
            side: round(job_bytes / p50(_times(found, job, side)) / 1e9, 2)
            for side in ("ours", "theirs", "copy")
        }
        for job in ("store", "load")
    }
    compared = parse_count(found, "compared_bytes")
    if not compared:
        raise PeerFailed("its program compared no bytes")
    return {"job_bytes": job_bytes, "gbs": gbs, "compared_bytes": compared}


def _put(result: Result, front: Front, found: Mapping[str, Any], suffix: str) -> None:
    """Record the figures of one run."""
    for job, word in (("store", front.store), ("load", front.load)):
        theirs, ours = _times(found, job, "theirs"), _times(found, job, "ours")
        if len(theirs) != len(ours):
            raise PeerFailed(f"its program measured {len(ours)} and {len(theirs)} {job}s")
        result.put(f"{front.prefix}_{word}_vs_{front.peer}{suffix}", ratio_of(theirs, ours))
    if not suffix:
        plain, ours = _times(found, "load", "copy"), _times(found, "load", "ours")
        result.put(f"{front.prefix}_load_vs_copy", ratio_of(plain, ours))
        if "exists" in found["seconds"]:
            times = [each * 1e3 for each in _times(found, "exists", "ours")]
            result.put(f"{front.prefix}_exists_ms", times)
