"""The small durable value: writes torn at every point, and a flip in every byte."""

from __future__ import annotations

import contextlib
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.memory_places import Child, mounted, need_hugepages, tmpfs_directory

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.memory.durable_file import HEADER_BYTES, DurableBlob, peek

CAPACITY = 10_000
WRITER = """
from pathlib import Path
from kvhearth_server.memory.durable_file import DurableBlob
DurableBlob(Path(arguments[0]), 10_000).write(arguments[1].encode())
"""


@pytest.fixture(params=["tmpfs", "hugetlbfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on each kind of file system."""
    with contextlib.ExitStack() as stack:
        if request.param == "tmpfs":
            yield stack.enter_context(tmpfs_directory())
        else:
            need_hugepages(4)
            yield stack.enter_context(mounted("hugetlbfs", "pagesize=2M", tmp_path / "huge"))


@contextlib.contextmanager
def opened(path: Path, capacity_bytes: int = CAPACITY) -> Iterator[DurableBlob]:
    blob = DurableBlob(path, capacity_bytes)
    try:
        yield blob
    finally:
        blob.close()


def value_at(path: Path) -> bytes | None:
    with opened(path) as blob:
        return peek(blob.path)


def test_values_come_back_also_after_reopening(place: Path) -> None:
    path = place / "catalogue"
    with opened(path) as blob:
        assert peek(blob.path) is None
        for value in (b"one", b"", b"three" * 1000, bytes(CAPACITY)):
            blob.write(value)
            assert peek(blob.path) == value
    assert value_at(path) == bytes(CAPACITY)
    assert [entry.name for entry in place.iterdir()] == ["catalogue"]


@pytest.mark.parametrize(
    ("fault", "left"),
    [("durable.payload_written", b"old"), ("durable.header_written", b"new")],
)
def test_a_kill_leaves_the_old_or_the_new_value(place: Path, fault: str, left: bytes) -> None:
    path = place / "catalogue"
    with opened(path) as blob:
        blob.write(b"older")
        blob.write(b"old")
    with Child(WRITER, str(path), "new", fault=fault) as child:
        assert child.process.wait(20) == -signal.SIGKILL
    with opened(path) as blob:
        assert peek(blob.path) == left
        blob.write(b"next")
        assert peek(blob.path) == b"next"
    assert value_at(path) == b"next"


def test_a_kill_in_the_first_write_leaves_nothing(place: Path) -> None:
    path = place / "catalogue"
    with Child(WRITER, str(path), "new", fault="durable.payload_written") as child:
        assert child.process.wait(20) == -signal.SIGKILL
    assert value_at(path) is None


def test_any_flipped_bit_falls_back_to_the_value_before(tmp_path: Path) -> None:
    path = tmp_path / "catalogue"
    with opened(path) as blob:
        blob.write(b"value one")  # first half
        blob.write(b"value two")  # second half
    whole = path.read_bytes()
    start = len(whole) // 2
    for position in range(HEADER_BYTES + len(b"value two")):
        torn = bytearray(whole)
        torn[start + position] ^= 1 << (position % 8)
        path.write_bytes(torn)
        with opened(path) as blob:
            assert peek(blob.path) == b"value one", position
    torn[0] ^= 1
    path.write_bytes(torn)
    with opened(path) as blob:
        assert peek(blob.path) is None
        blob.write(b"again")
        assert peek(blob.path) == b"again"


def test_a_write_after_a_flip_spares_the_half_that_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "catalogue"
    with opened(path) as blob:
        blob.write(b"one")
        blob.write(b"two")
    torn = bytearray(path.read_bytes())
    torn[len(torn) // 2 + HEADER_BYTES] ^= 0x80
    path.write_bytes(torn)
    with Child(WRITER, str(path), "three", fault="durable.payload_written") as child:
        assert child.process.wait(20) == -signal.SIGKILL
    assert value_at(path) == b"one"


def test_too_large_a_value_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "catalogue") as blob:
        blob.write(b"kept")
        with pytest.raises(KVHearthError, match=f"at most {CAPACITY} bytes") as caught:
            blob.write(bytes(CAPACITY + 1))
        assert caught.value.reason is Reason.ARENA_UNUSABLE
        assert peek(blob.path) == b"kept"


def test_an_empty_and_a_foreign_file_count_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert value_at(tmp_path / "empty") is None
    noise = b"".join(zlib.crc32(bytes([i])).to_bytes(4, "little") for i in range(256)) * 64
    (tmp_path / "foreign").write_bytes(noise)
    assert value_at(tmp_path / "foreign") is None


def test_what_a_killed_maker_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "catalogue.new").write_bytes(b"half made")
    with opened(tmp_path / "catalogue") as blob:
        blob.write(b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["catalogue"]


def test_unusable_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KVHearthError) as caught:
        DurableBlob(tmp_path / "absent" / "catalogue", CAPACITY)
    assert caught.value.reason is Reason.ARENA_UNUSABLE
    (tmp_path / "file").touch()
    with pytest.raises(KVHearthError) as caught:
        DurableBlob(tmp_path / "file" / "catalogue", CAPACITY)
    assert caught.value.reason is Reason.ARENA_UNUSABLE


def test_a_full_file_system_is_an_answer(tmp_path: Path) -> None:
    with mounted("tmpfs", "size=64k", tmp_path / "small") as path:
        with pytest.raises(KVHearthError) as caught:
            DurableBlob(path / "catalogue", 1 << 20)
        assert caught.value.reason is Reason.MEMORY_UNAVAILABLE
        assert list(path.iterdir()) == []
