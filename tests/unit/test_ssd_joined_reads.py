"""Records that lie side by side are read together, with the same outcomes as single reads."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from support.drive import Page, pages_of, size_of
from support.tiers import (
    LENGTH,
    PAGE,
    Opened,
    family,
    flip,
    key_of,
    payload_page,
    payloads,
    spoil,
)

from kvhearth_server.tiers.base import Corrupt, Done, Failed, Missing, Throttled
from kvhearth_server.tiers.ssd.disk.queues import Request
from kvhearth_server.tiers.ssd.format import record_pages

COUNT = 24
JOINED_MAX = 32
"""Upper bound on records in one request: each but the first takes two pieces."""
RECORD = record_pages(LENGTH) * PAGE
Open = Callable[..., Opened]


def shuffled(numbers: Sequence[int]) -> list[int]:
    """The numbers in a scrambled order."""
    return random.Random(1).sample(list(numbers), len(numbers))


ORDERS: list[list[int]] = [
    list(range(COUNT)),
    list(range(COUNT))[::-1],
    shuffled(range(COUNT)),
    [*range(8), *range(9, 16), 20, 21, 23],
    list(range(0, COUNT, 2)),
    [7],
    [*range(COUNT), *range(COUNT)],
    [number for number in range(COUNT) for _ in range(2)],
    [5, 6, 1000, 7, 8, 1001],
]


def ascending(numbers: Sequence[int]) -> int:
    """Counts how often a number does not follow the one before."""
    there = [number for number in numbers if number < COUNT]
    return 1 + sum(after != before + 1 for before, after in pairwise(there))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """What opens a tier; half of a depth of two is one: one request may have all records."""
    with ExitStack() as ends:

        def make(*names: str, **changes: object) -> Opened:
            wide = {"depth": 2, "segments": 16, "segment_bytes": 1 << 20, **changes}
            folders = [tmp_path / name for name in names or ("one",)]
            return ends.enter_context(Opened(*folders, **wide))

        yield make


@pytest.fixture
def desk(opened: Open) -> Opened:
    """Blocks 0 to 23 side by side in one segment."""
    desk = opened()
    desk.store_all(range(COUNT))
    desk.rest()
    return desk


# -- joined reads ----------------------------------------------------------------------------------


def test_bytes_are_right_in_any_order(desk: Opened) -> None:
    for order in ORDERS:
        desk.reads.clear()
        before = desk.counts["loaded_blocks"], desk.counts["loaded_bytes"]
        done = desk.load(order)
        there = [row for row, number in enumerate(order) if number < COUNT]
        assert done.rows(Done).tolist() == there
        assert len(done.rows(Missing)) == len(order) - len(there)
        assert len(desk.reads) == ascending(order), order
        assert desk.counts["loaded_blocks"] == before[0] + len(there)
        assert desk.counts["loaded_bytes"] == before[1] + len(there) * LENGTH


def test_nothing_is_written_but_slots_asked_for(desk: Opened) -> None:
    batch = desk.load_batch(range(COUNT), family())
    before = desk.arena.bytes.copy()
    assert len(desk.wait(desk.tier.submit_load(batch)).rows(Done)) == COUNT
    changed = (desk.arena.bytes != before).nonzero()[0]
    slots = changed // desk.arena.slot_bytes
    assert set(slots.tolist()) == {desk.arena.slots + row for row in range(COUNT)}
    assert int((changed % desk.arena.slot_bytes).max()) < RECORD - PAGE


BOUNDS: list[tuple[dict[str, int], int]] = [
    ({"request_bytes": 1}, COUNT),
    ({"request_bytes": RECORD}, COUNT),
    ({"request_bytes": 2 * RECORD - 1}, COUNT),
    ({"request_bytes": 2 * RECORD}, 12),
    ({"request_bytes": 5 * RECORD}, 5),
    ({"request_bytes": COUNT * RECORD}, 1),
    # Half of the drive's depth is used, however few requests would do.
    ({"depth": 1}, 1),
    ({"depth": 8}, 4),
    ({"depth": 16}, 8),
    ({"depth": 32}, COUNT),
    ({"depth": 64}, COUNT),
]


def test_requests_are_small_enough_and_enough_for_the_drive(opened: Open) -> None:
    for number, (bounds, requests) in enumerate(BOUNDS):
        desk = opened(str(number), **bounds)
        desk.store_all(range(COUNT))
        assert desk.loaded(range(COUNT)) == list(range(COUNT))
        assert len(desk.reads) == requests, bounds


def test_headers_that_nobody_wants_have_pages_of_their_own(desk: Opened) -> None:
    """A file system that verifies its reads does so in the destination memory."""
    desk.drive.queue.holds = lambda _: True
    for _ in range(3):
        desk.begin(range(COUNT))
    desk.idle()
    assert len(desk.reads) == 2
    pieces = [piece for each in desk.reads for piece in each.pieces]
    slots, end = desk.arena.bytes.ctypes.data, desk.arena.bytes.nbytes
    headers = [address for address, _ in pieces if not 0 <= address - slots < end]
    assert len(headers) == 2 * (COUNT - 1) == len(set(headers))


def test_without_pages_for_headers_records_are_read_alone(desk: Opened) -> None:
    unread = desk.tier.transfers.unread
    spare = unread.lend(unread.free - 5)
    ticket = desk.begin(range(COUNT))
    assert unread.free == 0
    assert len(desk.wait(ticket).rows(Done)) == COUNT
    assert sorted(len(each.pieces) for each in desk.reads) == [1] * (COUNT - 6) + [11]
    unread.give(spare)


@pytest.mark.parametrize("names", [("one",), ("one", "two")])
def test_blocks_of_several_files(opened: Open, names: tuple[str, ...]) -> None:
    desk = opened(*names, segment_bytes=256 << 10)
    odd = family(length=5000)
    numbers = range(60)
    desk.store_all(numbers, odd)
    for order in (list(numbers), list(numbers)[::-1], shuffled(numbers)):
        desk.reads.clear()
        assert desk.loaded(order, odd) == order
        files = {each.fd for each in desk.reads}
        assert len(files) >= 3
        if order == list(numbers) and len(names) == 1:
            assert len(desk.reads) <= len(files) + len(numbers) // JOINED_MAX


def test_blocks_of_several_shards(opened: Open) -> None:
    numbers = list(range(20))
    for shards in (1, 2, 3):
        for length in (1, PAGE - 1, PAGE, 5000, 3 * PAGE):
            desk = opened(f"{shards} {length}")
            of = family(length=length, shards=shards)
            desk.store_all(numbers, of)
            assert desk.loaded(numbers, of) == numbers
            assert len(desk.reads) == -(-shards * len(numbers) // JOINED_MAX)
            for order in (numbers[::-1], shuffled(numbers), [3, 4, 4, 5, 9]):
                assert desk.loaded(order, of) == order
            blocks = 3 * 20 + 5
            assert desk.counts["loaded_bytes"] == blocks * shards * length
            assert desk.counts["loaded_blocks"] == blocks, "once, however many shards it has"


# -- failing reads, wrong bytes --------------------------------------------------------------------


def bad_page(page: Page, result: int = -errno.EIO) -> Callable[[Request], int]:
    """Returns the fate of requests while one page cannot be read."""
    return lambda request: result if page in pages_of(request) else size_of(request)


def test_a_failure_that_does_not_last_costs_nobody_anything(desk: Opened) -> None:
    ends = [-errno.EIO]
    desk.drive.queue.fate = lambda each: ends.pop() if ends else size_of(each)
    assert desk.loaded(range(8)) == list(range(8))
    assert desk.counts["read_errors"] == 0
    assert desk.counts["loaded_blocks"] == 8


def test_one_of_several_joined_reads_fails(opened: Open) -> None:
    desk = opened(depth=8)
    desk.store_all(range(COUNT))
    desk.drive.queue.fate = bad_page(payload_page(desk.folders[0], key_of(8)))
    assert desk.load(range(COUNT)).rows(Failed).tolist() == [8]
    assert len(desk.reads) == 4 + 6


def test_a_flipped_bit_between_payloads_is_nobodys(desk: Opened) -> None:
    ((path, page),) = payloads(desk.folders[0], key_of(4))
    flip(path, page * PAGE - 1)  # in its header's page
    ((path, page),) = payloads(desk.folders[0], key_of(5))
    flip(path, page * PAGE + LENGTH)  # in its padding
    assert desk.loaded(range(8)) == list(range(8))
    assert desk.counts["corrupt_blocks"] == 0


def test_a_flipped_bit_beside_a_bad_page(opened: Open) -> None:
    for shard in (0, 1):
        desk = opened(str(shard))
        of = family(shards=2)
        desk.store_all(range(8), of)
        desk.drive.queue.fate = bad_page(payload_page(desk.folders[0], key_of(5), shard))
        assert spoil(desk.folders[0], key_of(2), shard) == 1
        done = desk.load(range(8), of)
        assert done.rows(Corrupt).tolist() == [2]
        assert done.rows(Failed).tolist() == [5]
        assert len(done.rows(Done)) == 6
        assert (desk.counts["corrupt_blocks"], desk.counts["loaded_blocks"]) == (1, 6)


# -- cancelled -------------------------------------------------------------------------------------


def assert_cancelled(desk: Opened, ticket: int, reads: int) -> None:
    """Checks that a load of blocks 0 to 7 has ended, and that they can be loaded again."""
    done = desk.wait(ticket)
    assert [(o, len(rows)) for o, rows in done.parts] == [(Failed("cancelled"), 8)]
    assert len(desk.reads) == reads, "nobody waits for another try"
    assert desk.counts["read_errors"] == 0
    desk.drive.queue.well()
    assert desk.loaded(range(8)) == list(range(8))


def test_cancelled_before_it_begins(desk: Opened) -> None:
    desk.drive.queue.shut = True
    ticket = desk.begin(range(8))
    desk.idle()
    desk.tier.cancel(ticket)
    desk.drive.queue.release()
    assert_cancelled(desk, ticket, 0)


@pytest.mark.parametrize("result", [None, -errno.EIO, 0], ids=["good", "EIO", "short"])
def test_cancelled_while_a_joined_read_is_out(desk: Opened, result: int | None) -> None:
    queue = desk.drive.queue
    queue.holds = lambda _: True
    if result is not None:
        queue.fate = lambda _: result
    ticket = desk.begin(range(8))
    desk.idle()
    assert queue.in_flight == 1
    desk.tier.cancel(ticket)
    queue.release()
    assert_cancelled(desk, ticket, 1)


def test_cancelled_before_its_records_are_read_singly(desk: Opened) -> None:
    queue = desk.drive.queue

    def fails(_: Request) -> int:
        queue.shut = True
        return -errno.EIO

    queue.fate = fails
    ticket = desk.begin(range(8))
    desk.idle()
    assert desk.tier.figures().queued_reads == 8
    desk.tier.cancel(ticket)
    queue.well()
    assert_cancelled(desk, ticket, 1)


def test_cancelled_while_its_records_are_read_singly(desk: Opened) -> None:
    page, queue = payload_page(desk.folders[0], key_of(5)), desk.drive.queue
    queue.fate = bad_page(page)
    queue.holds = lambda each: page in pages_of(each) and size_of(each) < RECORD
    ticket = desk.begin(range(8))
    desk.idle()
    assert desk.counts["loaded_blocks"] == 7
    desk.tier.cancel(ticket)
    queue.well()
    done = desk.wait(ticket)
    assert done.rows(Done).tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert [(o, rows.tolist()) for o, rows in done.parts if o != Done()] == [
        (Failed("cancelled"), [5])
    ]
    assert desk.present(range(8)) == list(range(8))


def test_what_never_began_is_not_read_again_alone(opened: Open) -> None:
    desk = opened(request_bytes=4 * RECORD)
    desk.store_all(range(60))
    desk.rest()
    desk.drive.queue.broken = OSError(errno.EBADF, "gone")
    # Fifteen requests, the first two of which go to the kernel.
    desk.begin(range(60))
    desk.until(lambda: desk.counts["read_errors"])
    assert desk.counts["read_errors"] == 13 * 4
    refusal = desk.tier.submit_load(desk.load_batch([0], family()))
    assert refusal == Throttled("degraded")
    desk.abandon()
