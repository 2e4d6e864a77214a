"""Huge pages without a pool: real memory is collapsed, or stays small where the kernel refuses."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.cases import cases
from support.memory_places import tmpfs_directory

from kvhearth.prefault import Populate, Span
from kvhearth.shared_memory import MADV_COLLAPSE, Collapse, SharedMapping
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.memory.mapping import HugepagePolicy, KernelMemory, PageKind, Segment
from kvhearth_server.memory.segments import create_segment, open_segment

KERNEL = KernelMemory()
HUGE = KERNEL.thp_bytes()
SIZE = 4 * HUGE
OFF, PREFER = HugepagePolicy.OFF, HugepagePolicy.PREFER

needs_collapse = pytest.mark.skipif(
    KERNEL.collapses() != 0, reason="this kernel collapses no page of a memfd (Linux 6.1)"
)


class Refusing(KernelMemory):
    """The real kernel, which refuses to collapse with ``error``; it counts the attempts."""

    def __init__(self, error: int, times: int = 1 << 30) -> None:
        super().__init__()
        self.error, self.times, self.attempts = error, times, 0

    def memfd_thp_allowed(self) -> bool:
        return False

    def advise(self, address: int, size_bytes: int, advice: int) -> int:
        if advice == MADV_COLLAPSE:
            self.attempts += 1
            if self.attempts <= self.times:
                return self.error
        return super().advise(address, size_bytes, advice)


@pytest.fixture
def place() -> Iterator[Path]:
    """A file to be on tmpfs, where no hugetlb page is taken."""
    with tmpfs_directory() as folder:
        yield folder / "segment"


def second_mapping(segment: Segment, align_bytes: int) -> SharedMapping:
    """Map the segment once more, as a client does."""
    descriptor = segment.reopen()
    try:
        return SharedMapping(descriptor, segment.bytes, align_bytes)
    finally:
        os.close(descriptor)


def faults_of_touching(mapping: SharedMapping) -> int:
    view = np.asarray(mapping)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    view[:: mmap.PAGESIZE] += 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@needs_collapse
def test_all_of_it_is_in_huge_pages_and_takes_one_fault_each(place: Path) -> None:
    segment = create_segment(SIZE, PREFER, path=place)
    assert segment.page_kind is PageKind.THP
    assert (segment.page_bytes, segment.huge_bytes) == (HUGE, SIZE)
    assert segment.address % HUGE == 0
    assert not segment.view.any()
    assert os.fstat(segment.fd).st_blocks * 512 == SIZE
    assert len(segment.steps_down) == 1
    assert faults_of_touching(second_mapping(segment, HUGE)) <= 2 * SIZE // HUGE
    segment.close()
    small = create_segment(SIZE, OFF, path=place.with_name("small"))
    assert small.huge_bytes == 0
    if small.page_kind is PageKind.BASE and not KERNEL.memfd_thp_allowed():
        assert faults_of_touching(second_mapping(small, HUGE)) > 2 * SIZE // HUGE
    small.close()


@needs_collapse
def test_small_pages_of_an_earlier_run_are_collapsed_under_its_clients(place: Path) -> None:
    first = create_segment(SIZE, OFF, path=place)
    content = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    first.view[:] = content
    client = np.asarray(second_mapping(first, HUGE))
    first.close()
    segment = open_segment(place, PREFER)
    assert segment.huge_bytes == SIZE
    assert np.array_equal(segment.view, content)
    assert np.array_equal(client, content)
    client[5] += 1
    assert segment.view[5] == client[5] != content[5]
    segment.close()


@needs_collapse
def test_a_tail_of_small_pages_is_populated_too(place: Path) -> None:
    size = HUGE + 3 * mmap.PAGESIZE
    place.write_bytes(b"kept")
    os.truncate(place, size)
    segment = open_segment(place, PREFER)
    assert segment.huge_bytes == HUGE
    assert os.fstat(segment.fd).st_blocks * 512 == size
    assert bytes(segment.view[:5]) == b"kept\0"
    assert len(segment.steps_down) == 1, "a rest smaller than a huge page is no lack"
    segment.close()


@cases(
    ("error", "attempts", "why"),
    [
        (errno.EINVAL, 1, "Linux 6.1"),
        (errno.ENOMEM, 1, "fragmented"),
        (errno.EBUSY, 1, "control group"),
        (errno.EAGAIN, 3, "in use"),
    ],
)
def test_a_kernel_that_refuses_leaves_small_pages(
    place: Path, error: int, attempts: int, why: str
) -> None:
    kernel = Refusing(error)
    segment = create_segment(SIZE, PREFER, path=place.with_name(why), kernel=kernel)
    assert kernel.attempts == attempts
    assert segment.page_kind is PageKind.BASE
    assert (segment.page_bytes, segment.huge_bytes) == (mmap.PAGESIZE, 0)
    assert os.fstat(segment.fd).st_blocks * 512 == SIZE
    assert not segment.view.any()
    assert why in segment.steps_down[-1]
    segment.close()


@needs_collapse
def test_pages_in_use_for_a_moment_are_asked_for_again(place: Path) -> None:
    kernel = Refusing(errno.EAGAIN, times=2)
    segment = create_segment(SIZE, PREFER, path=place, kernel=kernel)
    assert (kernel.attempts, segment.huge_bytes) == (3, SIZE)
    segment.close()


def test_the_kernel_is_not_asked_for_ever() -> None:
    kernel = Refusing(errno.ENOMEM)
    collapse = Collapse(HUGE, kernel.advise)
    area = mmap.mmap(-1, 10 * mmap.PAGESIZE)
    address = int(np.frombuffer(area, np.uint8).ctypes.data)
    for _ in range(10):
        assert not collapse.fill(address, mmap.PAGESIZE)
    assert collapse.refused
    assert kernel.attempts == 3


@needs_collapse
def test_a_client_collapses_what_the_daemon_left(place: Path) -> None:
    segment = create_segment(SIZE, PREFER, path=place, kernel=Refusing(errno.ENOMEM))
    mapping = second_mapping(segment, HUGE)
    assert Populate([Span(mapping.address, SIZE, HUGE)], [mapping]).wait(HUNG_S)
    assert KERNEL.pmd_mapped_bytes(mapping.address) == SIZE
    segment.close()
