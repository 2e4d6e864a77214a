"""The SSD tier's status: figures, and findings in a word."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drive import Drive
from support.tiers import LENGTH, PAGE, SEGMENT_BYTES, Arena, Opened, family, settings

from kvhearth_server.tiers.base import DirectoryError, Done, Kind
from kvhearth_server.tiers.figures import PROBLEMS
from kvhearth_server.tiers.ssd import files as ssd_files
from kvhearth_server.tiers.ssd.settings import (
    SsdDirectorySpec,
    SsdSettings,
    directory_overhead_bytes,
    segment_cost_bytes,
)
from kvhearth_server.tiers.ssd.tier import SsdTier


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Opened]:
    with Opened(tmp_path / "one", segments=6) as desk:
        yield desk


def findings(desk: Opened) -> list[tuple[str, str]]:
    """Words and sentences of the only directory."""
    (found,) = desk.tier.figures().directories
    assert found.reasons == list(desk.tier.problems().values())
    assert set(found.problems) <= set(PROBLEMS)
    return list(zip(found.problems, found.reasons, strict=True))


def test_figures(desk: Opened, tmp_path: Path) -> None:
    desk.store_all(range(10))
    assert desk.loaded(range(4)) == [0, 1, 2, 3]
    desk.rest()
    now = desk.tier.figures()
    assert (now.blocks, now.live_bytes) == (10, 10 * LENGTH)
    (place,) = now.directories
    assert place.path == str(tmp_path / "one")
    assert place.file_bytes == sum(place.segments.values()) * SEGMENT_BYTES <= place.capacity_bytes
    assert place.segments["open"] >= 1
    assert not now.recovering
    assert now.count("stored_blocks") == 10
    assert now.count("loaded_blocks") == 4
    assert now.count("written_bytes") > now.count("stored_bytes")
    assert (now.queued_reads, now.queued_writes, now.running_requests) == (0, 0, 0)
    assert now.budget_left_bytes is None
    assert now.reasons == findings(desk) == []


def test_each_byte_of_a_file_is_written_once_at_most_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    for reserved, prewrite, zeros in (
        (True, False, 0),
        (True, True, 1),
        (False, False, 1),
        (False, True, 1),
    ):
        if not reserved:
            monkeypatch.setattr(ssd_files, "reserve", refuses)
        folder = tmp_path / f"{reserved} {prewrite}"
        with Opened(folder, segments=6, prewrite=prewrite) as desk:
            desk.store_all(range(10))
            desk.rest()
            made = desk.tier.figures().directories[0].file_bytes
            assert made >= 2 * SEGMENT_BYTES
            assert desk.counts["written_bytes"] // made == zeros, folder.name


def test_a_budget_that_has_no_whole_file_prewrites_none(tmp_path: Path) -> None:
    bound = {"bytes_per_day": 240 * SEGMENT_BYTES - 240, "prewrite": True}
    with Opened(tmp_path / "one", **bound) as desk:
        desk.idle()
        assert desk.tier.figures().directories[0].segments["open"] > 0
        assert desk.counts["written_bytes"] <= 2 * PAGE
        assert len(desk.store(range(2)).rows(Done)) == 2


def test_a_load_that_is_no_use_leaves_blocks_as_cold_as_they_were(desk: Opened) -> None:
    desk.store_all(range(2))
    of = family()
    for number, is_use in ((0, True), (1, False)):
        batch = desk.load_batch([number], of)
        quiet = type(batch)(of, batch.keys, batch.places, is_use=is_use)
        assert desk.wait(desk.tier.submit_load(quiet)).rows(Done).tolist() == [0]
    index = desk.tier.index
    entries = index.find(of.namespace, of.group, desk.load_batch(range(2), of).keys)
    assert index.heads(np.asarray(entries))["hits"].tolist() == [1, 0]


# -- findings --------------------------------------------------------------------------------------


def test_what_is_wrong_is_told_by_kind(tmp_path: Path) -> None:
    good = settings(tmp_path / "good").places[0]
    bad = SsdDirectorySpec(tmp_path / "absent", good.capacity_bytes)
    drive, both = Drive(), SsdSettings((good, bad), segment_bytes=SEGMENT_BYTES, sum_threads=0)
    tier = SsdTier(both, [Arena().bytes], environment=drive.environment())
    fine, unusable = tier.figures().directories
    assert fine.problems == []
    assert (unusable.path, unusable.file_bytes) == (str(bad.path), 0)
    assert unusable.problems == ["unusable"]
    assert "give a directory that exists" in unusable.reasons[0]
    kind = Kind(str(bad.path), "unusable")
    assert tier.problems() == {kind: unusable.reasons[0]}
    tier.log.directories[0].health.read_failed("io")
    tier.executor.broken = "EIO"
    assert [*tier.problems()] == [kind, Kind(str(good.path), "io", "reads"), Kind("", "interface")]
    tier.close()
    with pytest.raises(DirectoryError, match="give a directory that exists"):
        SsdTier(SsdSettings((bad,)), [Arena().bytes])


def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    (drive := Drive()).files.direct = False
    with Opened(tmp_path / "one", drive=drive) as desk:
        desk.store_all(range(2))
        assert desk.loaded(range(2)) == [0, 1]
        ((word, sentence),) = findings(desk)
        assert (word, "no direct I/O" in sentence) == ("buffered", True)


def test_words_are_few(desk: Opened) -> None:
    health = desk.tier.log.directories[0].health
    for reason in ("io", "no_space", "read_only", "short", "what is this"):
        health.write_failed(reason, now=0.0)
        health.read_failed(reason)
        found = health.problems(0.0)
        assert len(found) == 2
        assert {kind.word for kind in found} <= set(PROBLEMS)
        health.write_done()
        health.read_done()
        assert health.problems(1e9) == {}


@pytest.mark.parametrize(
    ("code", "word", "reported"),
    [
        (errno.ENOSPC, "no_space", "no space left on its file system for another segment"),
        (errno.EDQUOT, "no_space", "no quota left on its file system"),
        (errno.EMFILE, "no_descriptors", "the daemon has no descriptor left"),
        (errno.ENFILE, "no_descriptors", "the machine has no descriptor left"),
        (0, "no_space", "its capacity is reached by files in it that are not the log's"),
    ],
)
def test_why_there_is_no_other_segment(tmp_path: Path, code: int, word: str, reported: str) -> None:
    folder, drive, left = tmp_path / "one", Drive(), [code] * 3

    def makes() -> None:
        if code and not left:
            raise OSError(code, "refused")
        left[:] = left[1:]

    drive.files.makes = makes
    with Opened(folder, drive=drive) as desk:
        if not code:
            (folder / "backup.tar").write_bytes(bytes(6 * SEGMENT_BYTES))
        desk.store_all(range(200))
        ((shown, sentence),) = findings(desk)
        assert shown == word
        assert f"{folder}: {reported}" in sentence
        assert desk.loaded(range(190, 200)) == list(range(190, 200)), "what there is is used"
        (folder / "backup.tar").unlink(missing_ok=True)
    assert not code or len(list(folder.glob("*.segment*"))) == 3


def test_the_namespaces_have_room_of_their_own(tmp_path: Path) -> None:
    (folder := tmp_path / "one").mkdir()
    for name in ("namespaces", "namespaces.new"):
        (folder / name).write_bytes(bytes(4 * SEGMENT_BYTES))
    with Opened(folder) as desk:
        desk.store_all(range(200))
        desk.rest()
        (found,) = desk.tier.figures().directories
        assert found.file_bytes == 8 * SEGMENT_BYTES
        assert findings(desk) == []


def test_a_capacity_that_was_raised_beyond_what_its_files_can_take(tmp_path: Path) -> None:
    folder, size = tmp_path / "one", 64 << 10
    with Opened(folder, segment_bytes=size):
        pass
    most = segment_cost_bytes(size) * 1024 + directory_overhead_bytes()
    for capacity, told in (
        (most, []),
        (1 << 30, ["only 64 MiB of 1024 MiB are used: its log began with files of 0.06 MiB"]),
    ):
        raised = SsdSettings((SsdDirectorySpec(folder, capacity),), sum_threads=0)
        tier = SsdTier(raised, [Arena().bytes], environment=Drive().environment())
        found = tier.problems()
        assert [kind.word for kind in found] == ["capped"] * len(told)
        for part, sentence in zip(told, found.values(), strict=True):
            assert part in sentence
        tier.close()
