"""The namespaces stored beside the SSD tier's blocks: a directory that hangs is left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvhearth_server.engine.epoch_store import FILE_NAME, EpochStore
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS

CONTENT = {"lineage": "one", "next_session": 7, "epoch_floor": 3, "namespaces": []}
PATIENCE_S = 2.0  # enough time for the directory that does not hang, even on a busy machine


def catalogue_of(*folders: Path, patience_s: float = PATIENCE_S) -> tuple[EpochStore, Counters]:
    """A catalogue over directories that exist."""
    for folder in folders:
        folder.mkdir(exist_ok=True)
    counters = Counters(COUNTERS)
    return EpochStore(folders, counters, patience_s), counters


@contextmanager
def hanging(folder: Path) -> Iterator[None]:
    """Opening the catalogue's file blocks: it is a pipe without a writer."""
    path = folder / FILE_NAME
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    try:
        yield
    finally:
        descriptor = os.open(path, os.O_RDWR)  # a blocked open gets its writer
        path.unlink()  # and one that has not begun finds nothing
        os.close(descriptor)


def test_a_directory_that_hangs_is_passed_by_and_counted(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    before, _ = catalogue_of(good, bad)
    before.write(CONTENT, [])
    before.close(20)
    with hanging(bad):
        found, counters = catalogue_of(good, bad)
        said = found.read()
        assert said is not None
        assert said["lineage"] == "one"
        assert counters.get("ssd_catalogue_failures") == 1


def test_where_the_only_one_hangs_there_is_nothing_to_take_over(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    found, counters = catalogue_of(bad, patience_s=0.0)
    with hanging(bad):
        assert found.read() is None
        assert counters.get("ssd_catalogue_failures") == 1
