"""The SSD tier's status: figures, findings in a word, and blocks not taken."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.daemon import until
from support.memory_places import mounted
from support.tiers import LENGTH, SEGMENT_BYTES, Arena, Desk, NoDirect, family, settings

from kvhearth_server.tiers.base import Done, Throttled
from kvhearth_server.tiers.figures import PROBLEMS, DirectoryFigures
from kvhearth_server.tiers.ssd import files
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.settings import (
    SsdDirectorySpec,
    SsdSettings,
    directory_overhead_bytes,
    segment_cost_bytes,
)
from kvhearth_server.tiers.ssd.tier import Environment, SsdTier
from kvhearth_server.tiers.ssd.write_limits import SeenTwice


def a_tier(reported: SsdSettings, **more: object) -> Desk:
    """A tier that has read back its log."""
    arena = Arena()
    outside = {name: more.pop(name) for name in ("files", "queue", "clock") if name in more}
    environment = Environment(**outside)  # type: ignore[arg-type]
    desk = Desk(SsdTier(reported, [arena.bytes], environment=environment, **more), arena)  # type: ignore[arg-type]
    desk.settle()
    return desk


def ended(desk: Desk) -> None:
    """Closes the tier; the books must balance."""
    tier = desk.tier
    assert tier.drain(20.0)
    desk.events += tier.poll()
    tier.check()  # type: ignore[attr-defined]
    tier.close()


def findings(directory: DirectoryFigures) -> list[tuple[str, str]]:
    """Words and sentences."""
    return list(zip(directory.problems, directory.reasons, strict=True))


def not_slow(desk: Desk) -> list[tuple[str, str]]:
    """Findings of the only directory, without those that depend on this machine's drive."""
    (found,) = figures(desk).directories
    return [each for each in findings(found) if each[0] != "slow"]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    # High bounds, since a slow drive of this machine would be reported, too.
    desk = a_tier(settings(tmp_path / "one", segments=6, slow_s=600.0, stuck_s=600.0))
    yield desk
    ended(desk)


def figures(desk: Desk):  # type: ignore[no-untyped-def]
    return desk.tier.figures()  # type: ignore[attr-defined]


def test_figures(desk: Desk, tmp_path: Path) -> None:
    desk.store_all(range(10))
    assert desk.load(range(4)).rows(Done).tolist() == [0, 1, 2, 3]
    desk.rest()
    now = figures(desk)
    assert (now.blocks, now.live_bytes) == (10, 10 * LENGTH)
    (place,) = now.directories
    assert place.path == str(tmp_path / "one")
    assert place.file_bytes == sum(place.segments.values()) * (256 << 10) <= place.capacity_bytes
    assert place.segments["open"] >= 1
    assert place.reasons == []
    assert not now.recovering
    assert now.count("stored_blocks") == 10
    assert now.count("loaded_blocks") == 4
    assert now.count("written_bytes") > now.count("stored_bytes")
    assert (now.queued_reads, now.queued_writes, now.running_requests) == (0, 0, 0)
    assert now.budget_left_bytes is None
    assert now.reasons == []


def test_what_admission_and_budget_keep_out_is_counted(tmp_path: Path) -> None:
    reported = settings(tmp_path / "one", bytes_per_day=24 * 10 * 16384)
    desk = a_tier(reported, admission=SeenTwice())
    until(lambda: figures(desk).directories[0].segments["open"] > 0 or desk.pump(0.01), "a place")
    assert len(desk.store(range(6)).rows(Throttled)) == 6
    done = desk.store(range(6))
    kept_out = len(done.rows(Throttled))
    now = figures(desk)
    assert now.count("stores_refused_admission") == 6
    assert now.count("stores_refused_budget") == kept_out > 0
    assert now.budget_left_bytes <= 0
    ended(desk)


def test_files_that_are_prewritten_are_counted(tmp_path: Path) -> None:
    plain, prewritten = tmp_path / "plain", tmp_path / "prewritten"
    written = []
    for folder in (plain, prewritten):
        desk = a_tier(settings(folder, segments=6, prewrite=folder == prewritten))
        desk.store_all(range(10))
        desk.rest()
        files = figures(desk).directories[0].file_bytes
        assert files >= 2 * SEGMENT_BYTES
        written.append(figures(desk).count("written_bytes") // files)
        if folder == prewritten:
            counts = desk.tier.counts
            assert counts["written_bytes"] > 5 * counts["stored_bytes"]
        ended(desk)
    assert written == [0, 1]


@pytest.mark.parametrize("prewrite", [False, True])
def test_files_that_cannot_be_reserved_are_written_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, prewrite: bool
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(files, "reserve", refuses)
    desk = a_tier(settings(tmp_path / "one", segments=6, prewrite=prewrite))
    desk.store_all(range(10))
    desk.rest()
    made = figures(desk).directories[0].file_bytes
    assert made >= 2 * SEGMENT_BYTES
    assert figures(desk).count("written_bytes") // made == 1
    ended(desk)


def test_nor_is_it_hidden_by_the_library_where_there_is_no_direct_io(tmp_path: Path) -> None:
    with mounted("ramfs", "mode=700", tmp_path / "ram") as folder:
        desk = a_tier(settings(folder, segments=6))
        desk.store_all(range(10))
        desk.rest()
        made = figures(desk).directories[0].file_bytes
        assert figures(desk).count("written_bytes") // made == 1
        ended(desk)


def test_a_budget_that_has_no_whole_file_prewrites_none(tmp_path: Path) -> None:
    reported = settings(tmp_path / "one", bytes_per_day=240 * SEGMENT_BYTES - 240, prewrite=True)
    desk = a_tier(reported, clock=lambda: 1000.0)
    until(lambda: figures(desk).directories[0].segments["open"] > 0 or desk.pump(0.01), "a place")
    assert figures(desk).count("written_bytes") <= 2 * 4096
    assert len(desk.store(range(2)).rows(Done)) == 2
    ended(desk)


def test_a_batch_that_finds_the_queue_full_is_counted(tmp_path: Path) -> None:
    desk = a_tier(settings(tmp_path / "one", queue_reads=2))
    desk.store_all(range(4))
    answer = desk.tier.submit_load(desk.load_batch(range(4), family()))
    assert isinstance(answer, Throttled)
    assert figures(desk).count("loads_refused_queue") == 4
    ended(desk)


def test_a_load_that_is_no_use_leaves_blocks_as_cold_as_they_were(desk: Desk) -> None:
    desk.store_all(range(2))
    of = family()
    for number, is_use in ((0, True), (1, False)):
        batch = desk.load_batch([number], of)
        quiet = type(batch)(of, batch.keys, batch.places, is_use=is_use)
        ticket = desk.tier.submit_load(quiet)
        assert desk.wait(ticket).rows(Done).tolist() == [0]
    index = desk.tier.index  # type: ignore[attr-defined]
    entries = index.find(of.namespace, of.group, desk.load_batch(range(2), of).keys)
    assert index.heads(np.asarray(entries))["hits"].tolist() == [1, 0]


# -- findings --------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_used_is_shown(tmp_path: Path) -> None:
    reported = settings(tmp_path / "good")
    bad = SsdDirectorySpec(tmp_path / "absent", reported.places[0].capacity_bytes)
    desk = a_tier(SsdSettings((*reported.places, bad), segment_bytes=reported.segment_bytes))
    good, unusable = figures(desk).directories
    assert findings(good) == []
    assert (unusable.path, unusable.file_bytes) == (str(bad.path), 0)
    ((word, sentence),) = findings(unusable)
    assert word == "unusable"
    assert str(bad.path) in sentence
    assert list(desk.tier.problems().values()) == [sentence]
    ended(desk)


@pytest.mark.parametrize(("files", "words"), [(Files(), []), (NoDirect(), ["buffered"])])
def test_findings_have_a_word(tmp_path: Path, files: Files, words: list[str]) -> None:
    reported = settings(tmp_path / "one", slow_s=600.0, stuck_s=600.0)
    desk = a_tier(reported, files=files)
    desk.store_all(range(2))
    (found,) = figures(desk).directories
    assert found.problems == words
    assert set(words) <= set(PROBLEMS)
    assert found.reasons == list(desk.tier.problems().values())
    ended(desk)


@pytest.mark.parametrize("reason", ["io", "no_space", "read_only", "short", "what is this"])
def test_words_are_few(desk: Desk, reason: str) -> None:
    health = desk.tier.log.directories[0].health  # type: ignore[attr-defined]
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
        (errno.ENOSPC, "no_space", "no space left on its file system"),
        (errno.EDQUOT, "no_space", "no quota left on its file system"),
        (errno.EMFILE, "no_descriptors", "the daemon has no descriptor left"),
        (errno.ENFILE, "no_descriptors", "the machine has no descriptor left"),
        (0, "no_space", "its capacity is reached by files in it that are not the log's"),
    ],
)
def test_why_there_is_no_other_segment(tmp_path: Path, code: int, word: str, reported: str) -> None:
    class Refusing(Files):
        left = 3

        def allocate(self, fd: int, size_bytes: int) -> int:
            self.left -= 1
            if self.left < 0 and code:
                raise OSError(code, "refused")
            return super().allocate(fd, size_bytes)

    folder = tmp_path / "one"
    arena = Arena()
    tier = SsdTier(settings(folder), [arena.bytes], environment=Environment(files=Refusing()))
    desk = Desk(tier, arena)
    desk.settle()
    if not code:
        (folder / "backup.tar").write_bytes(bytes(6 * SEGMENT_BYTES))
    desk.store_all(range(200))  # the existing segments are reused
    ((shown, sentence),) = not_slow(desk)
    assert shown == word
    assert f"{folder}: {reported}" in sentence
    tier.close()


def test_the_namespaces_have_room_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    for name in ("namespaces", "namespaces.new"):
        (folder / name).write_bytes(bytes(4 * SEGMENT_BYTES))
    desk = a_tier(settings(folder))
    desk.store_all(range(200))
    desk.rest()
    (found,) = figures(desk).directories
    assert found.file_bytes == 8 * SEGMENT_BYTES
    assert "no_space" not in found.problems
    ended(desk)


def test_a_capacity_that_was_raised_beyond_what_its_files_can_take(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    a_tier(settings(folder, segment_bytes=64 << 10)).tier.close()
    raised = SsdDirectorySpec(
        folder, segment_cost_bytes(64 << 10) * 1024 + directory_overhead_bytes()
    )
    desk = a_tier(SsdSettings((raised,)))
    assert not_slow(desk) == []
    desk.tier.close()
    raised = SsdDirectorySpec(folder, 1 << 30)
    desk = a_tier(SsdSettings((raised,)))
    reported = "only 64 MiB of 1024 MiB are used: its log began with files of 0.06 MiB"
    (finding,) = not_slow(desk)
    assert finding[0] == "capped"
    assert reported in finding[1]
    desk.tier.close()
