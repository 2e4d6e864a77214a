"""The native module: its build, its loader, its copies and its checksums."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.native import without_native

from kvhearth import native
from kvhearth.model import EXTENT_DTYPE, checksum_of, sum_extents
from kvhearth.native import build
from kvhearth.native.blocks import BlockMover, address_of, block_mover, sums_at

CHUNK = 1024
"""Bytes between two scrambles of the checksum's lanes."""
BLOCK = 2 << 20


def _compiler_missing() -> str:
    try:
        build.compiler()
    except build.BuildError as error:
        return str(error)
    return ""


NEEDS_COMPILER = pytest.mark.skipif(bool(_compiler_missing()), reason=_compiler_missing())
NEEDS_NATIVE = pytest.mark.skipif(bool(native.available()), reason=str(native.available()))


@NEEDS_COMPILER
def test_the_module_is_in_use_where_there_is_a_compiler() -> None:
    assert native.available() is None, f"make setup builds it: {native.available()}"


def test_the_environment_turns_it_off() -> None:
    with without_native():
        assert native.available() == "turned off by KVHEARTH_NATIVE=0"
        assert native.library() is None
        assert block_mover([(0, 0, 1)]) is None


@NEEDS_COMPILER
class TestBuild:
    @pytest.fixture(scope="class")
    @staticmethod
    def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return build.build(tmp_path_factory.mktemp("native") / "module.so")

    def test_a_library_is_loaded_with_the_digest_of_its_sources(self, built: Path) -> None:
        assert native.load(built, build.sources_digest()).kvh_abi() == build.ABI
        assert native.load(built, "").kvh_abi() == build.ABI
        assert list(built.parent.iterdir()) == [built]

    def test_a_stale_library_is_not_loaded(self, built: Path) -> None:
        with pytest.raises(native.Unavailable, match="compiled from other sources; run: python -m"):
            native.load(built, "0" * 32)

    def test_a_library_of_another_interface_is_not_loaded(
        self, built: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(build, "ABI", build.ABI + 1)
        with pytest.raises(native.Unavailable, match="of interface"):
            native.load(built, build.sources_digest())

    @pytest.mark.realtime("compiles")
    def test_a_compiler_that_fails_leaves_the_old_library(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = tmp_path / "old.so"
        old.write_text("old")
        monkeypatch.setenv("CC", "false")
        with pytest.raises(build.BuildError, match="failed"):
            build.build(old)
        assert old.read_text() == "old"
        assert list(tmp_path.iterdir()) == [old]


def test_missing_and_broken_libraries_are_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(native.Unavailable, match="not built"):
        native.load(tmp_path / "absent.so", "")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with pytest.raises(native.Unavailable, match="cannot be loaded"):
        native.load(broken, "")


def test_without_a_compiler_the_build_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    for options, code in (([], 0), (["--strict"], 1)):
        monkeypatch.setattr(sys, "argv", ["build", *options])
        assert build.main() == code
        assert "no C compiler: no-such-compiler not found" in capsys.readouterr().err


def _levels() -> list[int]:
    loaded = native.library()
    return [] if loaded is None else list(range(BlockMover(loaded, [(0, 0, 1)]).level + 1))


def _mover(parts: list[tuple[int, int, int]], level: int | None = None) -> BlockMover:
    loaded = native.library()
    assert loaded is not None
    return BlockMover(loaded, parts, level)


LEVELS = pytest.mark.parametrize("level", _levels() or [0])
DATA = np.random.default_rng(16).integers(0, 256, BLOCK + 4096, np.uint8)


def _sum(level: int, start: int, size: int) -> bytes:
    addresses = np.array([address_of(DATA) + start], np.int64)
    return _mover([(0, 0, size)], level).sum(addresses).tobytes()


def _digest(data: Any) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(data))


@NEEDS_NATIVE
class TestChecksums:
    @LEVELS
    def test_every_length_up_to_four_pages(self, level: int) -> None:
        wrong = [
            size
            for size in range(4097)
            if _sum(level, size % 67, size) != _digest(DATA[size % 67 : size % 67 + size])
        ]
        assert wrong == []

    @LEVELS
    @given(
        chunks=st.integers(0, BLOCK // CHUNK), rest=st.integers(-65, 65), start=st.integers(0, 99)
    )
    def test_lengths_around_chunks(self, level: int, chunks: int, rest: int, start: int) -> None:
        size = max(chunks * CHUNK + rest, 0)
        assert _sum(level, start, size) == _digest(DATA[start : start + size])

    @LEVELS
    def test_a_whole_block(self, level: int) -> None:
        assert _sum(level, 0, BLOCK) == _digest(DATA[:BLOCK])

    def test_runs_of_several_lengths(self) -> None:
        sizes = np.array([5, 4096, 5, 0, 70_000], np.int64)
        starts = np.array([1, 100, 7, 9, 3], np.int64)
        found = sums_at(address_of(DATA) + starts, sizes)
        assert found is not None
        for row, start, size in zip(found, starts, sizes, strict=True):
            assert row.tobytes() == _digest(DATA[start : start + size])


@pytest.mark.usefixtures("native")
def test_sums_of_extents() -> None:
    views = [DATA[:8192].copy(), DATA[8192:40_000].copy()]
    extents = np.zeros(4, EXTENT_DTYPE)
    extents["segment"] = [0, 1, 1, 0]
    extents["offset"] = [0, 3, 4096, 8000]
    extents["length"] = [4096, 20_000, 240, 192]
    for row, each in zip(sum_extents(views, extents), extents, strict=True):
        view = views[each["segment"]][each["offset"] :][: each["length"]]
        assert row.tobytes() == checksum_of(view.tobytes())
    assert sum_extents(views, extents[:0]).shape == (0, 16)


class Rig:
    """Pages of several parts and slots, both at chosen alignments, with guards around each run."""

    def __init__(self, lengths: list[int], count: int, skew: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.lengths, self.count = lengths, count
        self.gap = 32 + skew
        self.tensors = [
            random.integers(0, 256, (count, length + self.gap), np.uint8) for length in lengths
        ]
        self.slot_bytes = sum(lengths) + self.gap
        self.memory = np.zeros((count + 1) * self.slot_bytes + 64, np.uint8)
        self.first = -address_of(self.memory) % 64 + skew
        self.parts = [
            (address_of(tensor) + skew // 2, tensor.strides[0], length)
            for tensor, length in zip(self.tensors, lengths, strict=True)
        ]
        self.skew = skew

    def page(self, number: int) -> bytes:
        """Return a page's bytes, in the order of its parts."""
        start = self.skew // 2
        return b"".join(
            tensor[number, start : start + length].tobytes()
            for tensor, length in zip(self.tensors, self.lengths, strict=True)
        )

    def slot(self, number: int) -> bytes:
        """Return a slot's bytes."""
        start = self.first + number * self.slot_bytes
        return self.memory[start : start + sum(self.lengths)].tobytes()

    def slots(self, numbers: list[int]) -> Any:
        """Return the addresses of slots."""
        base = address_of(self.memory) + self.first
        return np.array([base + number * self.slot_bytes for number in numbers], np.int64)


@NEEDS_NATIVE
class TestCopies:
    @LEVELS
    @given(
        lengths=st.lists(
            st.one_of(st.integers(0, 300), st.integers(900, 9000), st.just(300_000)), max_size=4
        ),
        skew=st.integers(0, 80),
        summed=st.booleans(),
        seed=st.integers(0, 9),
    )
    def test_pages_go_to_slots_and_back(
        self, level: int, lengths: list[int], skew: int, summed: bool, seed: int
    ) -> None:
        rig = Rig(lengths, 3, skew, seed)
        mover = _mover(rig.parts, level)
        pages, before = np.array([2, 0]), [tensor.copy() for tensor in rig.tensors]
        moved, sums = mover.move(pages, rig.slots([0, 1]), to_slots=True, sums=summed)
        assert moved.all()
        assert [rig.slot(0), rig.slot(1)] == [rig.page(2), rig.page(0)]
        used = rig.first + 2 * rig.slot_bytes
        gaps = rig.memory[rig.first : used].reshape(2, -1)[:, sum(lengths) :]
        assert not rig.memory[: rig.first].any()
        assert not gaps.any()
        assert not rig.memory[used:].any()
        for tensor in rig.tensors:
            tensor[[0, 2]] ^= 0xFF
        guards = [tensor.copy() for tensor in rig.tensors]
        _, back = mover.move(pages, rig.slots([0, 1]), to_slots=False, sums=summed)
        start = skew // 2
        for tensor, old, guard, length in zip(rig.tensors, before, guards, lengths, strict=True):
            inside = slice(start, start + length)
            assert (tensor[:, inside] == old[:, inside]).all()
            tensor[:, inside] = guard[:, inside]
            assert (tensor == guard).all()
        if summed:
            assert sums is not None
            assert back is not None
            for number, row in enumerate(sums):
                assert row.tobytes() == _digest(np.frombuffer(rig.slot(number), np.uint8))
            assert (back == sums).all()
        else:
            assert sums is None

    @LEVELS
    @pytest.mark.parametrize("lengths", [[BLOCK], [32 << 10] * 64, [600] * 1500], ids=str)
    def test_one_page(self, level: int, lengths: list[int]) -> None:
        rig = Rig(lengths, 2, 0, 1)
        mover = _mover(rig.parts, level)
        (slot,) = rig.slots([1]).tolist()
        assert mover.move_one(1, slot, to_slot=True, sums=True) == _digest(
            np.frombuffer(rig.page(1), np.uint8)
        )
        assert rig.slot(1) == rig.page(1)
        before = rig.page(1)
        for tensor in rig.tensors:
            tensor[:] = 0
        assert mover.move_one(1, slot, to_slot=False, sums=False) is None
        assert rig.page(1) == before
        assert not any(rig.page(0))

    def test_a_slot_that_left_use_is_neither_written_nor_summed(self) -> None:
        rig = Rig([5000], 3, 0, 2)
        generations, wanted = np.array([7, 9, 8, 8], np.uint32), np.array([7, 8, 8], np.uint32)
        live = generations, np.array([0, 1, 3], np.int64), wanted
        moved, sums = _mover(rig.parts).move(
            np.arange(3), rig.slots([0, 1, 2]), to_slots=True, sums=True, live=live
        )
        assert moved.tolist() == [True, False, True]
        assert sums is not None
        assert not sums[1].any()
        assert not any(rig.slot(1))
        assert (rig.slot(0), rig.slot(2)) == (rig.page(0), rig.page(2))
