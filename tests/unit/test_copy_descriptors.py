"""Descriptors of copies, compared with a plain loop over blocks and fragments."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from support.arena_fake import FakeArena
from support.cases import cases

from kvhearth.copiers import CopyKind
from kvhearth.copiers.batch import Batch, HeldArena
from kvhearth.copiers.descriptors import Descriptors, Portion
from kvhearth.page_layout import PagedKV

PAGES = 64
BOOT = "boot-1"


def _kv(layout: str) -> PagedKV:
    if layout == "single":
        return PagedKV([np.zeros((PAGES, 48), np.uint8)])
    if layout == "stacked":
        return PagedKV(list(np.zeros((3, PAGES, 16), np.uint8)))
    return PagedKV([np.zeros((PAGES, size), np.uint8) for size in (8, 24, 16)])


def _planned(
    kv: PagedKV,
    pages: list[int],
    slots: list[int],
    *,
    gap: int = 0,
    segments: int = 1,
    **sizes: Any,
) -> tuple[list[Portion], FakeArena]:
    arena = FakeArena(kv.page_bytes + gap, PAGES, segments=segments)
    held = HeldArena(arena)
    extents = arena.extents(slots, kv.page_bytes)
    batch = Batch(kv, held, BOOT, np.array(pages), extents)
    options = {"piece_bytes": 1 << 30, "portion_bytes": 1 << 20, **sizes}
    planner = Descriptors(kv, held, **options)
    return planner.portions(CopyKind.STORE, batch, np.arange(len(pages))), arena


def _bytes_of(portions: list[Portion]) -> list[tuple[int, int]]:
    """Return (source, target) of every byte."""
    return sorted(
        (source + at, target + at)
        for portion in portions
        for source, target, size in zip(*(each.tolist() for each in portion.copies), strict=True)
        for at in range(size)
    )


def _wanted(kv: PagedKV, arena: FakeArena, pages: list[int], slots: list[int]) -> Any:
    return sorted(
        (part.address + page * part.stride_bytes + at, begin + part.start_bytes + at)
        for page, slot in zip(pages, slots, strict=True)
        for begin in [int(arena.slot(slot).ctypes.data)]
        for part in kv.parts
        for at in range(part.run_bytes)
    )


@cases("seed", range(12))
@cases("layout", ["single", "stacked", "ragged"])
def test_every_byte_is_copied_once(layout: str, seed: int) -> None:
    draw, kv = random.Random(seed), _kv(layout)
    count = draw.randrange(1, 24)
    pages, slots = draw.sample(range(PAGES), count), draw.sample(range(2 * PAGES), count)
    if draw.random() < 0.5:
        first = draw.randrange(PAGES - count)
        pages, slots = list(range(first, first + count)), list(range(first, first + count))
    piece, portion = draw.choice([1 << 30, 96, 50]), draw.choice([1 << 20, 100, 48, 7])
    portions, arena = _planned(
        kv, pages, slots, gap=draw.choice([0, 16]), segments=2,
        piece_bytes=piece, portion_bytes=portion, copies_max=draw.choice([2048, 3]),
    )  # fmt: skip
    assert _bytes_of(portions) == _wanted(kv, arena, pages, slots)
    touched: set[int] = set()
    for each in portions:
        assert each.size_bytes == each.copies.sizes.sum() <= portion
        for target, size in zip(
            each.copies.targets.tolist(), each.copies.sizes.tolist(), strict=True
        ):
            segment = next(
                segment
                for segment in (0, 1)
                if 0 <= target - arena.address(segment) < arena.segments[segment]
            )
            offset = target - arena.address(segment)
            assert offset // piece == (offset + size - 1) // piece
            slot = segment * PAGES + offset // arena.slot_bytes
            assert slots.index(slot) in each.positions.tolist()
        touched |= set(each.positions.tolist())
    assert touched == set(range(count))


def _sizes(portions: list[Portion]) -> list[list[int]]:
    return [portion.copies.sizes.tolist() for portion in portions]


def test_neighbours_on_both_sides_become_one_copy_in_any_order() -> None:
    portions, _ = _planned(_kv("single"), [7, 5, 6, 20], [12, 10, 11, 13])
    assert _sizes(portions) == [[3 * 48, 48]]
    assert portions[0].positions.tolist() == [1, 2, 0, 3]


def test_neighbours_on_one_side_stay_apart() -> None:
    assert _sizes(_planned(_kv("single"), [1, 2, 3], [5, 7, 9])[0]) == [[48] * 3]
    assert _sizes(_planned(_kv("single"), [9, 5, 1], [5, 6, 7])[0]) == [[48] * 3]
    assert _sizes(_planned(_kv("single"), [1, 2], [5, 6], gap=16)[0]) == [[48] * 2]
    assert _sizes(_planned(_kv("stacked"), [1, 2], [5, 6])[0]) == [[16] * 6]


def test_portions_are_bounded_in_bytes_and_copies() -> None:
    pages, slots = [0, 2, 4, 6, 8], [1, 3, 5, 7, 9]
    assert _sizes(_planned(_kv("single"), pages, slots, portion_bytes=100)[0]) == [
        [48, 48],
        [48, 48],
        [48],
    ]
    found = _sizes(_planned(_kv("single"), pages, slots, copies_max=3)[0])
    assert found == [[48] * 3, [48] * 2]


def test_a_block_larger_than_a_portion_is_cut() -> None:
    portions, _ = _planned(_kv("single"), [3], [0], portion_bytes=20)
    assert _sizes(portions) == [[20], [20], [8]]
    assert [portion.positions.tolist() for portion in portions] == [[0]] * 3


def test_no_blocks_are_no_portions() -> None:
    assert _planned(_kv("single"), [], [])[0] == []
