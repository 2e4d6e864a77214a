"""Records that lie side by side are read together, with the same outcomes as single reads."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from support.read_rig import Page, ReadRig, pages_of, size_of
from support.tiers import LENGTH, PAGE, family

from kvhearth_server.tiers.base import Corrupt, Done, Failed, Missing, Throttled
from kvhearth_server.tiers.ssd.disk.probe import NAMES, probe
from kvhearth_server.tiers.ssd.disk.queues import Request
from kvhearth_server.tiers.ssd.format import record_pages

COUNT = 24
JOINED_MAX = 32
"""Upper bound on records in one request: each but the first takes two pieces."""
RECORD = record_pages(LENGTH) * PAGE


def shuffled(numbers: Sequence[int]) -> list[int]:
    """The numbers in a scrambled order."""
    return random.Random(1).sample(list(numbers), len(numbers))


ORDERS: dict[str, list[int]] = {
    "in order": list(range(COUNT)),
    "reversed": list(range(COUNT))[::-1],
    "shuffled": shuffled(range(COUNT)),
    "gaps": [*range(8), *range(9, 16), 20, 21, 23],
    "each second": list(range(0, COUNT, 2)),
    "one": [7],
    "all twice": [*range(COUNT), *range(COUNT)],
    "each twice": [number for number in range(COUNT) for _ in range(2)],
    "not all there": [5, 6, 1000, 7, 8, 1001],
}


def ascending(numbers: Sequence[int]) -> int:
    """Counts how often a number does not follow the one before."""
    there = [number for number in numbers if number < COUNT]
    return 1 + sum(after != before + 1 for before, after in pairwise(there))


@pytest.fixture
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReadRig]:
    """Blocks 0 to 23 side by side in one segment, on the best interface or on the requested one."""
    interface: str = getattr(request, "param", "")
    if interface and not (verdict := probe(interface)).works:
        pytest.skip(f"{interface}: {verdict.reason}")
    rig = ReadRig(tmp_path / "one", interface=interface)
    rig.desk.store_all(range(COUNT))
    rig.desk.rest()
    yield rig
    rig.close()


each_interface = pytest.mark.parametrize("rig", NAMES, indirect=True)


# -- joined reads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@each_interface
def test_bytes_are_right_in_any_order(rig: ReadRig, order: list[int]) -> None:
    done = rig.desk.load(order)
    there = [row for row, number in enumerate(order) if number < COUNT]
    assert done.rows(Done).tolist() == there
    assert len(done.rows(Missing)) == len(order) - len(there)
    assert len(rig.drive.reads) == ascending(order)
    assert rig.tier.counts["loaded_blocks"] == len(there)
    assert rig.tier.counts["loaded_bytes"] == len(there) * LENGTH


@each_interface
def test_nothing_is_written_but_slots_asked_for(rig: ReadRig) -> None:
    batch = rig.desk.load_batch(range(COUNT), family())
    before = rig.arena.bytes.copy()
    done = rig.desk.wait(rig.tier.submit_load(batch))
    assert len(done.rows(Done)) == COUNT
    padded = RECORD - PAGE
    changed = (rig.arena.bytes != before).nonzero()[0]
    slots = changed // rig.arena.slot_bytes
    assert set(slots.tolist()) == {rig.arena.slots + row for row in range(COUNT)}
    assert int((changed % rig.arena.slot_bytes).max()) < padded


@pytest.mark.parametrize(
    ("room", "requests"),
    [
        (1, COUNT),
        (RECORD, COUNT),
        (2 * RECORD - 1, COUNT),
        (2 * RECORD, 12),
        (5 * RECORD, 5),
        (COUNT * RECORD, 1),
    ],
)
def test_a_request_is_no_larger_than_it_may_be(tmp_path: Path, room: int, requests: int) -> None:
    rig = ReadRig(tmp_path / "one", request_bytes=room)
    rig.desk.store_all(range(COUNT))
    assert len(rig.desk.load(range(COUNT)).rows(Done)) == COUNT
    assert len(rig.drive.reads) == requests
    rig.close()


def test_headers_that_nobody_wants_have_pages_of_their_own(rig: ReadRig) -> None:
    """A file system that verifies its reads does so in the destination memory."""
    rig.drive.holds = lambda _: True
    for _ in range(3):
        rig.begin(range(COUNT))
    while len(rig.drive.reads) < 2:
        rig.desk.pump(0.01)
    pieces = [piece for each in rig.drive.reads[:2] for piece in each.pieces]
    slots, end = rig.arena.bytes.ctypes.data, rig.arena.bytes.nbytes
    headers = [address for address, _ in pieces if not 0 <= address - slots < end]
    assert len(headers) == 2 * (COUNT - 1) == len(set(headers))


def test_without_pages_for_headers_records_are_read_alone(rig: ReadRig) -> None:
    rig.drive.shut = True
    transfers = rig.tier.transfers
    spare = transfers.unread.lend(transfers.unread.free - 5)
    ticket = rig.begin(range(COUNT))
    assert transfers.unread.free == 0
    rig.drive.release()
    assert len(rig.desk.wait(ticket).rows(Done)) == COUNT
    assert sorted(len(each.pieces) for each in rig.drive.reads) == [1] * (COUNT - 6) + [11]
    transfers.unread.give(spare)


@pytest.mark.parametrize(
    ("depth", "requests"), [(1, 1), (2, 1), (8, 4), (16, 8), (32, COUNT), (48, COUNT), (64, COUNT)]
)
def test_the_drive_has_enough_requests_at_once(tmp_path: Path, depth: int, requests: int) -> None:
    rig = ReadRig(tmp_path / "one", depth=depth)
    rig.desk.store_all(range(COUNT))
    assert len(rig.desk.load(range(COUNT)).rows(Done)) == COUNT
    assert len(rig.drive.reads) == requests
    rig.close()


def test_blocks_of_several_segments(tmp_path: Path) -> None:
    rig = ReadRig(tmp_path / "one", segment_bytes=256 << 10)
    odd = family(length=5000)
    numbers = range(60)
    rig.desk.store_all(numbers, odd)
    for order in (list(numbers), list(numbers)[::-1], shuffled(numbers)):
        rig.drive.reads.clear()
        assert len(rig.desk.load(order, odd).rows(Done)) == len(order)
        files = {each.fd for each in rig.drive.reads}
        assert len(files) >= 3
        if order == list(numbers):
            assert len(rig.drive.reads) <= len(files) + len(numbers) // JOINED_MAX
    rig.close()


def test_blocks_of_two_directories(tmp_path: Path) -> None:
    rig = ReadRig(tmp_path / "one", tmp_path / "two")
    numbers = range(96)
    rig.desk.store_all(numbers)
    for order in (list(numbers), shuffled(numbers)):
        assert len(rig.desk.load(order).rows(Done)) == len(order)
        assert len({each.fd for each in rig.drive.reads}) >= 2
    rig.close()


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, 5000, 3 * PAGE])
def test_blocks_of_several_shards(tmp_path: Path, shards: int, length: int) -> None:
    rig = ReadRig(tmp_path / "one")
    of = family(length=length, shards=shards)
    numbers = list(range(20))
    rig.desk.store_all(numbers, of)
    assert len(rig.desk.load(numbers, of).rows(Done)) == len(numbers)
    assert len(rig.drive.reads) == -(-shards * len(numbers) // JOINED_MAX)
    for order in (numbers[::-1], shuffled(numbers), [3, 4, 4, 5, 9]):
        assert len(rig.desk.load(order, of).rows(Done)) == len(order)
    assert rig.tier.counts["loaded_bytes"] == (3 * 20 + 5) * shards * length
    rig.close()


# -- failing reads ---------------------------------------------------------------------------------


def bad_page(page: Page, end: Callable[[int], int]) -> Callable[[Request, int], int]:
    """Returns the fate of reads while one page cannot be read."""
    return lambda request, result: end(result) if page in pages_of(request) else result


def test_a_failure_that_does_not_last_costs_nobody_anything(rig: ReadRig) -> None:
    ends = [-errno.EIO]
    rig.drive.fate = lambda _, result: ends.pop() if ends else result
    assert len(rig.desk.load(range(8)).rows(Done)) == 8
    assert rig.tier.counts["read_errors"] == 0
    assert rig.tier.counts["loaded_blocks"] == 8


def test_one_of_several_joined_reads_fails(tmp_path: Path) -> None:
    rig = ReadRig(tmp_path / "one", depth=8)
    rig.desk.store_all(range(COUNT))
    rig.drive.fate = bad_page(rig.page(8), lambda _: -errno.EIO)
    assert rig.desk.load(range(COUNT)).rows(Failed).tolist() == [8]
    assert len(rig.drive.reads) == 4 + 6
    rig.close()


# -- wrong bytes -----------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    """Flips one bit of a byte."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_between_payloads_is_nobodys(rig: ReadRig) -> None:
    path, page = rig.payload(4)
    flip(path, page * PAGE - 1)  # in its header's page
    path, page = rig.payload(5)
    flip(path, page * PAGE + LENGTH)  # in its padding
    assert len(rig.desk.load(range(8)).rows(Done)) == 8
    assert rig.tier.counts["corrupt_blocks"] == 0


def test_a_flipped_bit_beside_a_bad_page(rig: ReadRig) -> None:
    path, page = rig.payload(2)
    flip(path, page * PAGE)
    rig.drive.fate = bad_page(rig.page(5), lambda _: -errno.EIO)
    done = rig.desk.load(range(8))
    assert done.rows(Corrupt).tolist() == [2]
    assert done.rows(Failed).tolist() == [5]
    assert len(done.rows(Done)) == 6


@pytest.mark.parametrize("shard", [0, 1])
def test_a_flipped_bit_of_a_shard(tmp_path: Path, shard: int) -> None:
    rig = ReadRig(tmp_path / "one")
    of = family(shards=2)
    rig.desk.store_all(range(6), of)
    path, page = rig.payload(3, shard)
    flip(path, page * PAGE)
    done = rig.desk.load(range(6), of)
    assert done.rows(Corrupt).tolist() == [3]
    assert len(done.rows(Done)) == 5
    assert rig.tier.counts["corrupt_blocks"] == 1
    assert rig.tier.counts["loaded_blocks"] == 5
    rig.close()


def test_a_block_is_counted_once_however_many_shards_it_has(tmp_path: Path) -> None:
    rig = ReadRig(tmp_path / "one")
    of = family(shards=3)
    rig.desk.store_all(range(8), of)
    rig.desk.load(range(8), of)
    assert rig.tier.counts["loaded_blocks"] == 8
    rig.close()


# -- cancelled -------------------------------------------------------------------------------------


def until(rig: ReadRig, true: Callable[[], bool]) -> None:
    """Polls until it is true; pytest's own timeout bounds the wait."""
    while not true():
        rig.desk.pump(0.01)


@each_interface
def test_cancelled_before_it_begins(rig: ReadRig) -> None:
    rig.drive.shut = True
    ticket = rig.begin(range(8))
    rig.desk.pump(0.02)
    rig.tier.cancel(ticket)
    rig.drive.well()
    done = rig.desk.wait(ticket)
    assert [(o, len(rows)) for o, rows in done.parts] == [(Failed("cancelled"), 8)]
    assert rig.drive.reads == []
    assert rig.tier.counts["read_errors"] == 0
    assert len(rig.desk.load(range(8)).rows(Done)) == 8


@each_interface
@pytest.mark.parametrize("result", [None, -errno.EIO, 0], ids=["good", "EIO", "short"])
def test_cancelled_while_a_joined_read_is_out(rig: ReadRig, result: int | None) -> None:
    rig.drive.holds = lambda _: True
    if result is not None:
        rig.drive.fate = lambda *_: result
    ticket = rig.begin(range(8))
    until(rig, lambda: rig.drive.held == 1)
    rig.tier.cancel(ticket)
    rig.drive.release()
    done = rig.desk.wait(ticket)
    assert [(o, len(rows)) for o, rows in done.parts] == [(Failed("cancelled"), 8)]
    assert len(rig.drive.reads) == 1, "nobody waits for another try"
    assert rig.tier.counts["read_errors"] == 0
    rig.drive.well()
    assert len(rig.desk.load(range(8)).rows(Done)) == 8


def test_cancelled_before_its_records_are_read_singly(rig: ReadRig) -> None:
    def fate(*_: object) -> int:
        rig.drive.shut = True
        return -errno.EIO

    rig.drive.fate = fate
    ticket = rig.begin(range(8))
    until(rig, lambda: rig.tier.figures().queued_reads == 8)
    rig.tier.cancel(ticket)
    rig.drive.well()
    done = rig.desk.wait(ticket)
    assert [(o, len(rows)) for o, rows in done.parts] == [(Failed("cancelled"), 8)]
    assert all(rig.present(range(8)))


def test_cancelled_while_its_records_are_read_singly(rig: ReadRig) -> None:
    page = rig.page(5)
    rig.drive.fate = bad_page(page, lambda _: -errno.EIO)
    rig.drive.holds = lambda each: page in pages_of(each) and size_of(each) < RECORD
    ticket = rig.begin(range(8))
    until(rig, lambda: rig.tier.counts["loaded_blocks"] == 7)
    rig.tier.cancel(ticket)
    rig.drive.fate = lambda _, result: result
    rig.drive.release()
    done = rig.desk.wait(ticket)
    assert done.rows(Done).tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert [(o, rows.tolist()) for o, rows in done.parts if o != Done()] == [
        (Failed("cancelled"), [5])
    ]
    assert all(rig.present(range(8)))


# -- a disk interface that breaks ------------------------------------------------------------------


def test_what_never_began_is_not_read_again_alone(tmp_path: Path) -> None:
    rig = ReadRig(tmp_path / "one", request_bytes=4 * RECORD)
    rig.desk.store_all(range(60))
    rig.desk.rest()
    rig.drive.broken = OSError(errno.EBADF, "gone")
    # Fifteen requests, the first eight of which go to the kernel.
    rig.begin(range(60))
    while not rig.tier.counts["read_errors"]:
        rig.desk.pump(0.01)
    assert rig.tier.counts["read_errors"] == 28
    refusal = rig.tier.submit_load(rig.desk.load_batch([0], family()))
    assert refusal == Throttled("degraded")
