"""kill -9 of a process that stores: every acknowledged block is served, and never a wrong one."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import pytest
from support.memory_places import Child
from support.tiers import Arena, Desk, family, settings

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.tiers.base import Corrupt, Done, Failed
from kvhearth_server.tiers.ssd.disk.probe import NAMES, probe
from kvhearth_server.tiers.ssd.tier import SsdTier

WRITER = """
import struct
sys.path.insert(0, arguments[0])
from pathlib import Path
from kvhearth_lab.harness import HUNG_S
from support.tiers import Arena, Desk, family, settings
from kvhearth_server.tiers.base import Done
from kvhearth_server.tiers.ssd.tier import SsdTier
folder, first, last, segments, shards, interface = arguments[1:]
arena = Arena()
options = settings(Path(folder), segments=int(segments), interface=interface)
tier = SsdTier(options, [arena.bytes])
desk = Desk(tier, arena)
desk.settle()
of = family(shards=int(shards), length=9000)
peer.sendall(struct.pack("<I", 2**32 - 1))
left = list(range(int(first), int(last)))
while left:
    numbers = left[:8]
    done = set(desk.store(numbers, of).rows(Done).tolist())
    acknowledged = [numbers[row] for row in sorted(done)]
    peer.sendall(struct.pack(f"<{len(acknowledged)}I", *acknowledged))
    left = [n for row, n in enumerate(numbers) if row not in done] + left[8:]
tier.drain(HUNG_S)
peer.sendall(struct.pack("<I", 2**32 - 2))
peer.recv(1)
"""
TESTS = str(Path(__file__).parents[1])
STARTED, FINISHED = 2**32 - 1, 2**32 - 2


def run_writer(
    folder: Path,
    numbers: range,
    *,
    segments: int,
    shards: int = 1,
    interface: str = "auto",
    kill_after: int = 0,
    fault: str = "",
) -> list[int]:
    """Stores blocks in a process and ends it with SIGKILL, after ``kill_after`` acknowledgements or
    at its fault point; returns the acknowledged blocks, in order.
    """
    acknowledged: list[int] = []
    words = (str(numbers.start), str(numbers.stop), str(segments), str(shards), interface)
    with Child(WRITER, TESTS, str(folder), *words, fault=fault) as child:
        child.socket.settimeout(HUNG_S)
        data = b""
        while piece := child.socket.recv(4096):
            data += piece
            whole = len(data) // 4 * 4
            acknowledged += struct.unpack(f"<{whole // 4}I", data[:whole])
            data = data[whole:]
            if FINISHED in acknowledged or (kill_after and len(acknowledged) > kill_after):
                child.process.kill()
        child.process.wait(HUNG_S)
    return [number for number in acknowledged if number not in (STARTED, FINISHED)]


def check(folder: Path, numbers: list[int], *, segments: int, shards: int = 1) -> list[int]:
    """Loads blocks after recovery, comparing every byte; returns those that are served."""
    arena = Arena()
    options = settings(folder, segments=segments)
    tier = SsdTier(options, [arena.bytes])
    desk = Desk(tier, arena)
    try:
        end = time.monotonic() + HUNG_S
        while tier.figures().locked_files:  # requests of the dead process must end first
            desk.step()
            assert time.monotonic() < end
        served = []
        of = family(shards=shards, length=9000)
        for start in range(0, len(numbers), 24):
            part = numbers[start : start + 24]
            done = desk.load(part, of)
            assert not len(done.rows(Corrupt)), done.parts
            assert not len(done.rows(Failed)), done.parts
            served += [part[row] for row in done.rows(Done).tolist()]
        tier.check()
        (taken,) = tier.allocated_bytes().values()
        assert taken <= tier.settings.places[0].capacity_bytes
        return served
    finally:
        tier.close()


@pytest.mark.parametrize("interface", NAMES)
def test_all_that_was_acknowledged_is_served(tmp_path: Path, interface: str) -> None:
    if not (verdict := probe(interface)).works:
        pytest.skip(f"{interface}: {verdict.reason}")
    seed = random.Random(interface)
    folder, every = tmp_path / "one", list[int]()
    for life in range(2):
        start = 1000 * life
        every += run_writer(
            folder,
            range(start, start + 400),
            segments=80,
            interface=interface,
            kill_after=seed.randrange(20, 150),
        )
        assert len(every) > 20 * (life + 1)
        assert check(folder, every, segments=80) == every


@pytest.mark.parametrize(
    "fault",
    [
        *("ssd.before_write:1", "ssd.before_write:9", "ssd.after_write:1", "ssd.after_write:23"),
        *("ssd.head_written:1", "ssd.segment_allocated:1", "ssd.segment_allocated:3"),
    ],
)
def test_killed_at_a_point_of_a_write(tmp_path: Path, fault: str) -> None:
    found = run_writer(tmp_path / "one", range(200), segments=60, shards=3, fault=fault)
    assert len(found) < 200, "it was not killed"
    assert check(tmp_path / "one", found, segments=60, shards=3) == found


def test_killed_while_segments_are_filled_again(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    found: list[int] = []
    for life in range(2):
        kill_after = 150 + 67 * life
        start = 1000 * life
        numbers = range(start, start + 400)
        found += run_writer(folder, numbers, segments=6, kill_after=kill_after)
        served = check(folder, found, segments=6)
        # Eviction of the oldest made room; the newest blocks are present.
        assert served[-16:] == found[-16:]
        assert len(served) < len(found)
