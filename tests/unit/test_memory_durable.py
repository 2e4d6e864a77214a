"""The small durable value: writes torn at every point, and a flip in every byte."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cases import cases
from support.memory_places import HUGE, tmpfs_directory

from kvhearth import failpoints
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.memory.durable_file import HEADER_BYTES, DurableBlob, blob_bytes, peek
from kvhearth_server.memory.mapping import HugepagePolicy
from kvhearth_server.memory.segments import create_segment, open_segment

CAPACITY = 10_000


class Killed(BaseException):
    """The death of a writer, whose mapped pages stay as it left them."""


@pytest.fixture
def place() -> Iterator[Path]:
    with tmpfs_directory() as folder:
        yield folder


@pytest.fixture
def path(place: Path) -> Path:
    return new_file(place / "catalogue")


def new_file(path: Path) -> Path:
    """Make a file for a value."""
    size = blob_bytes(CAPACITY, HUGE)
    create_segment(size, HugepagePolicy.PREFER, path=path).close()
    return path


def killed_at(path: Path, fault: str, value: bytes) -> None:
    """Write a value, and die at a fault point."""

    def hit(name: str) -> None:
        if name == fault:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, opened(path) as blob:
        patch.setattr(failpoints, "hit", hit)
        with pytest.raises(Killed):
            blob.write(value)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[DurableBlob]:
    segment = open_segment(path)
    try:
        yield DurableBlob(segment)
    finally:
        segment.close()


def test_values_come_back_also_after_reopening(path: Path) -> None:
    assert peek(path) is None
    with opened(path) as blob:
        for value in (b"one", b"", b"three" * 1000, bytes(CAPACITY)):
            blob.write(value)
            assert peek(path) == value
    with opened(path):
        assert peek(path) == bytes(CAPACITY)


@cases(
    ("fault", "left"),
    [("durable.payload_written", b"old"), ("durable.header_written", b"new")],
)
def test_a_kill_leaves_the_old_or_the_new_value(place: Path, fault: str, left: bytes) -> None:
    path = new_file(place / fault)
    with opened(path) as blob:
        blob.write(b"older")
        blob.write(b"old")
    killed_at(path, fault, b"new")
    assert peek(path) == left
    with opened(path) as blob:
        blob.write(b"next")
    assert peek(path) == b"next"


def test_a_kill_in_the_first_write_leaves_nothing(path: Path) -> None:
    killed_at(path, "durable.payload_written", b"new")
    assert peek(path) is None


def test_any_flipped_bit_falls_back_to_the_value_before(path: Path) -> None:
    with opened(path) as blob:
        blob.write(b"value one")  # first half
        blob.write(b"value two")  # second half
        view, start = blob.segment.view, blob.segment.bytes // 2
        for position in range(start, start + HEADER_BYTES + len(b"value two")):
            view[position] ^= 1 << (position % 8)
            assert peek(path) == b"value one", position
            view[position] ^= 1 << (position % 8)
        view[[0, start]] ^= 1
    assert peek(path) is None
    with opened(path) as blob:
        blob.write(b"again")
    assert peek(path) == b"again"


def test_a_write_after_a_flip_spares_the_half_that_is_whole(path: Path) -> None:
    with opened(path) as blob:
        blob.write(b"one")
        blob.write(b"two")
        blob.segment.view[blob.segment.bytes // 2 + HEADER_BYTES] ^= 1
    killed_at(path, "durable.payload_written", b"three")
    assert peek(path) == b"one"


def test_too_large_a_value_is_refused_and_changes_nothing(path: Path) -> None:
    with opened(path) as blob:
        most = blob.capacity_bytes
        blob.write(b"kept")
        with pytest.raises(KVHearthError, match=f"at most {most} bytes") as caught:
            blob.write(bytes(most + 1))
        assert caught.value.reason is Reason.ARENA_UNUSABLE
    assert peek(path) == b"kept"


def test_an_absent_an_empty_and_a_foreign_file_count_as_nothing(tmp_path: Path) -> None:
    assert peek(tmp_path / "absent") is None
    (tmp_path / "empty").touch()
    assert peek(tmp_path / "empty") is None
    noise = b"".join(zlib.crc32(bytes([i])).to_bytes(4, "little") for i in range(256)) * 64
    (tmp_path / "foreign").write_bytes(noise)
    assert peek(tmp_path / "foreign") is None
