"""The small durable value: writes torn at every point, and a flip in every byte."""

from __future__ import annotations

import contextlib
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.memory_places import HUGE, Child, mounted, need_hugepages, tmpfs_directory

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.memory.durable_file import HEADER_BYTES, DurableBlob, blob_bytes, peek
from kvhearth_server.memory.mapping import HugepagePolicy
from kvhearth_server.memory.segments import create_segment, open_segment

CAPACITY = 10_000
WRITER = """
from pathlib import Path
from kvhearth_server.memory.durable_file import DurableBlob
from kvhearth_server.memory.segments import open_segment
DurableBlob(open_segment(Path(arguments[0]))).write(arguments[1].encode())
"""


@pytest.fixture(params=["tmpfs", "hugetlbfs"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file for a value on each kind of file system."""
    with contextlib.ExitStack() as stack:
        if request.param == "tmpfs":
            place = stack.enter_context(tmpfs_directory())
        else:
            need_hugepages(1)
            place = stack.enter_context(mounted("hugetlbfs", "pagesize=2M", tmp_path / "huge"))
        size = blob_bytes(CAPACITY, HUGE)
        create_segment(size, HugepagePolicy.PREFER, path=place / "catalogue").close()
        yield place / "catalogue"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[DurableBlob]:
    segment = open_segment(path)
    try:
        yield DurableBlob(segment)
    finally:
        segment.close()


def changed(path: Path, position: int) -> None:
    """Flip a bit of a byte of the file."""
    with opened(path) as blob:
        blob.segment.view[position] ^= 1 << (position % 8)


def test_values_come_back_also_after_reopening(path: Path) -> None:
    assert peek(path) is None
    with opened(path) as blob:
        for value in (b"one", b"", b"three" * 1000, bytes(CAPACITY)):
            blob.write(value)
            assert peek(path) == value
    with opened(path):
        assert peek(path) == bytes(CAPACITY)


@pytest.mark.parametrize(
    ("fault", "left"),
    [("durable.payload_written", b"old"), ("durable.header_written", b"new")],
)
def test_a_kill_leaves_the_old_or_the_new_value(path: Path, fault: str, left: bytes) -> None:
    with opened(path) as blob:
        blob.write(b"older")
        blob.write(b"old")
    with Child(WRITER, str(path), "new", fault=fault) as child:
        assert child.process.wait(20) == -signal.SIGKILL
    assert peek(path) == left
    with opened(path) as blob:
        blob.write(b"next")
    assert peek(path) == b"next"


def test_a_kill_in_the_first_write_leaves_nothing(path: Path) -> None:
    with Child(WRITER, str(path), "new", fault="durable.payload_written") as child:
        assert child.process.wait(20) == -signal.SIGKILL
    assert peek(path) is None


def test_any_flipped_bit_falls_back_to_the_value_before(path: Path) -> None:
    with opened(path) as blob:
        blob.write(b"value one")  # first half
        blob.write(b"value two")  # second half
        start = blob.segment.bytes // 2
    for position in range(start, start + HEADER_BYTES + len(b"value two")):
        changed(path, position)
        assert peek(path) == b"value one", position
        changed(path, position)
    changed(path, start)
    changed(path, 0)
    assert peek(path) is None
    with opened(path) as blob:
        blob.write(b"again")
    assert peek(path) == b"again"


def test_a_write_after_a_flip_spares_the_half_that_is_whole(path: Path) -> None:
    with opened(path) as blob:
        blob.write(b"one")
        blob.write(b"two")
        start = blob.segment.bytes // 2
    changed(path, start + HEADER_BYTES)
    with Child(WRITER, str(path), "three", fault="durable.payload_written") as child:
        assert child.process.wait(20) == -signal.SIGKILL
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
