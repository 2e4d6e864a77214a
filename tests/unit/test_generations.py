"""Generations: one array for the daemon, and for each segment's clients only its own."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvhearth.model import U32
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.memory.arena import Generations

MIB = 1 << 20
PAGED = Geometry.of([("a", 64 * MIB), ("b", 32 * MIB), ("c", 32 * MIB)], 32 * MIB, 16 << 10)
"""Slabs whose generations fill two pages."""
UNPAGED = Geometry.of([("a", 4 * MIB), ("b", 2 * MIB)], 2 * MIB, 16 << 10)


@pytest.fixture(params=[PAGED, UNPAGED], ids=["whole pages", "parts of pages"])
def generations(request: pytest.FixtureRequest) -> Iterator[Generations]:
    made = Generations(request.param)
    yield made
    made.close()


def seen(generations: Generations, segment: int) -> U32:
    """Returns a copy of all that a client of a segment can read."""
    fd = generations.reopen(segment)
    try:
        with mmap.mmap(fd, generations.count * 4, prot=mmap.PROT_READ) as mapped:
            return np.frombuffer(mapped[:], np.uint32).copy()
    finally:
        os.close(fd)


def test_each_slot_has_its_place_for_the_clients_of_its_segment(generations: Generations) -> None:
    generations.array[:] = np.arange(1, generations.count + 1)
    geometry = PAGED if generations.count == PAGED.slot_count else UNPAGED
    for index, segment in enumerate(geometry.segments):
        start = segment.first_slab * geometry.stride
        own = slice(start, start + segment.slabs * geometry.stride)
        assert (seen(generations, index)[own] == generations.array[own]).all()


def test_clients_see_no_generations_of_other_segments() -> None:
    generations = Generations(PAGED)
    generations.array[:] = 7
    for index, segment in enumerate(PAGED.segments):
        found = seen(generations, index).reshape(-1, PAGED.stride)
        own = np.zeros(len(found), np.bool_)
        own[segment.first_slab : segment.first_slab + segment.slabs] = True
        assert (found[own] == 7).all()
        assert not found[~own].any()
    generations.close()


def test_nobody_else_can_write_or_resize_them(generations: Generations) -> None:
    fd = generations.reopen(1)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"\1", 0)
    finally:
        os.close(fd)
