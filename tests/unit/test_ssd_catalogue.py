"""The namespaces stored beside the SSD tier's blocks: a directory that hangs is left out."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvhearth.clock import Clock
from kvhearth_server.engine.epoch_store import FILE_NAME, EpochStore
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS
from kvhearth_server.tiers.base import DirectoryError, ask_each

CONTENT = {"lineage": "one", "next_session": 7, "epoch_floor": 3, "namespaces": []}


class Patience(Clock):
    """Waits for the first threads as long as they take, and for the others not at all."""

    def __init__(self, good: int) -> None:
        self._good = good
        self.threads: list[threading.Thread] = []

    def start(self, thread: threading.Thread) -> None:
        self.threads.append(thread)
        thread.start()

    def join(self, thread: threading.Thread, seconds: float) -> None:
        if thread in self.threads[: self._good]:
            thread.join()


@contextmanager
def hanging(folder: Path, clock: Patience) -> Iterator[None]:
    """Opening the catalogue's file blocks: it is a pipe without a writer."""
    path = folder / FILE_NAME
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    try:
        yield
    finally:
        # A blocked open gets its writer, and then end-of-file; one that comes later needs another.
        while any(each.is_alive() for each in clock.threads):
            os.close(os.open(path, os.O_RDWR))
            clock.threads[-1].join(0.01)


@pytest.mark.parametrize("good", [0, 1])
def test_a_directory_that_hangs_is_passed_by_and_counted(tmp_path: Path, good: int) -> None:
    folders = [tmp_path / name for name in ("good", "bad")][1 - good :]
    for folder in folders:
        folder.mkdir()
    with closing(EpochStore(folders, Counters(COUNTERS))) as store:
        store.write(CONTENT, [])
    clock, counters = Patience(good), Counters(COUNTERS)
    with hanging(tmp_path / "bad", clock):
        said = EpochStore(folders, counters, clock).read()
        assert (said and said["lineage"]) == ("one" if good else None)
        assert counters.get("ssd_catalogue_failures") == 1


def test_an_answer_that_comes_too_late_is_undone(tmp_path: Path) -> None:
    clock, proceed, undone = Patience(1), threading.Event(), list[str]()

    def ask(path: Path) -> str:
        assert path.name == "good" or proceed.wait()
        return path.name

    good, bad = tmp_path / "good", tmp_path / "bad"
    found = ask_each([good, bad], ask, 3.0, undone.append, clock)
    proceed.set()
    for each in clock.threads:
        each.join()
    assert found[good] == "good"
    assert isinstance(found[bad], DirectoryError)
    assert "did not answer in 3 s" in str(found[bad])
    assert undone == ["bad"]
