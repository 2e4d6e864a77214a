"""A mover with a real helper process over a directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.movers import SPACE, MoverDesk, kinds, mover_desk
from support.tiers import LENGTH, family, key_of, keys_of

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.tiers.base import Refusal, Throttled
from kvhearth_server.tiers.remote.mover import Exists
from kvhearth_server.tiers.remote.names import LAYOUT

pytest.importorskip("obstore")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "remote").mkdir()
    return tmp_path / "remote"


@pytest.fixture
def desk(folder: Path) -> Iterator[MoverDesk]:
    with mover_desk(f"file://{folder}") as found:
        yield found.up()


def test_blocks_come_back_with_parents_and_checksums(desk: MoverDesk) -> None:
    assert kinds(desk.put(range(8))) == ["Done"] * 8
    answer = desk.get(range(8))
    assert kinds(answer) == ["Done"] * 8
    assert answer.parents == [b"", *keys_of(range(7))]


def test_shards_and_lengths(desk: MoverDesk) -> None:
    for group, (length, shards) in enumerate([(1, 1), (4097, 2), (LENGTH, 5), (100, 20)]):
        of = family(group=group, length=length, shards=shards)
        assert kinds(desk.put(range(3), of)) == ["Done"] * 3
        assert kinds(desk.get(range(3), of)) == ["Done"] * 3
        desk.delete(range(3))


def test_a_load_ends_at_its_first_miss(desk: MoverDesk) -> None:
    desk.put([0, 1, 3, 4])
    answer = desk.get(range(5))
    assert kinds(answer) == ["Done", "Done", "Missing", "Missing", "Missing"]
    assert kinds(desk.exists(range(5))) == ["Done", "Done", "Missing", "Done", "Done"]
    assert kinds(desk.delete([0, 77])) == ["Done", "Done"]
    assert kinds(desk.exists([0, 1])) == ["Missing", "Done"]


def test_a_slot_that_changed_is_not_published(desk: MoverDesk) -> None:
    request = desk.put_request(range(2))
    desk.slot(request.places[1, 0], 1)[0] ^= 1
    answer = desk.final(desk.mover.submit(request, HUNG_S))
    assert kinds(answer) == ["Done", "Corrupt source"]
    assert kinds(desk.exists(range(2))) == ["Done", "Missing"]


def objects(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / LAYOUT / SPACE).iterdir() if path.is_file())


def test_flipped_bits_and_other_objects_are_found(desk: MoverDesk, folder: Path) -> None:
    desk.put([0])
    (first,) = objects(folder)
    desk.put([1])
    (second,) = set(objects(folder)) - {first}
    whole = first.read_bytes()
    for at in (20, 100, 200, 250, 260, 400, len(whole) - 1):
        first.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert kinds(desk.get([0])) == ["Corrupt remote"], at
    strange = b"somebody else's".ljust(len(whole))
    for wrong in (whole[:-1], whole + b"x", b"", second.read_bytes(), strange):
        first.write_bytes(wrong)
        assert kinds(desk.get([0])) == ["Corrupt remote"]


def test_names_tell_nothing_and_depend_on_the_fleets_key(folder: Path) -> None:
    with mover_desk(f"file://{folder}") as desk:
        desk.up().put([0])
    assert key_of(0).hex()[:16] not in str(objects(folder))
    with mover_desk(f"file://{folder}", fleet_key=b"another key of a fleet") as desk:
        desk.until(lambda: "another key" in desk.mover.problem)
        assert kinds(desk.get([0])) == ["Failed denied"]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with mover_desk(f"file://{tmp_path}/none") as desk:
        desk.until(lambda: "no directory" in desk.mover.problem)
        refused = desk.mover.submit(Exists(SPACE, family(), [b"k"]), 1.0)
        assert isinstance(refused, Throttled)
        (tmp_path / "none").mkdir()
        desk.up()
        assert kinds(desk.put([0])) == ["Done"]


def test_blocks_beyond_the_staging_memory_are_refused(tmp_path: Path) -> None:
    with mover_desk(f"file://{tmp_path}", staging_bytes=1 << 20) as small:
        request = small.up().put_request([0], family(length=2 << 20))
        assert small.mover.submit(request, HUNG_S) == Throttled("too_large")


def test_a_killed_helper_is_replaced_and_slots_are_free(desk: MoverDesk) -> None:
    (child,) = children()
    os.kill(child, signal.SIGSTOP)
    ticket = desk.mover.submit(desk.get_request(range(4)), 30.0)
    os.kill(child, signal.SIGKILL)
    assert set(kinds(desk.final(ticket))) == {"Failed unreachable"}
    desk.up()
    assert desk.mover.restarts == 1
    assert kinds(desk.put(range(2))) == ["Done"] * 2


def test_a_helper_that_misses_a_deadline_is_killed(desk: MoverDesk) -> None:
    (child,) = children()
    os.kill(child, signal.SIGSTOP)
    request = desk.get_request(range(4))
    ticket = desk.mover.submit(request, 0.2)
    answer = desk.final(ticket)
    told = next(each for each in desk.answers if each.ticket == ticket)
    assert not told.final
    assert set(kinds(told)) == set(kinds(answer)) == {"Failed timeout"}
    assert children() != [child]
    desk.up()
    assert (desk.slot(request.places[0, 0], LENGTH) == 0xEE).all()
    assert desk.mover.counts["kills"] == 1
    assert desk.mover.problem == ""


def test_three_kills_are_a_problem(desk: MoverDesk) -> None:
    for _ in range(3):
        (child,) = children()
        os.kill(child, signal.SIGSTOP)
        desk.final(desk.mover.submit(desk.get_request([0]), 0.01))
        desk.until(lambda: desk.mover.up)
    assert "3 times in a minute" in desk.mover.problem


def children() -> list[int]:
    """Return the helpers of this process."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    found = []
    for pid in map(int, text.split()):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"tiers.remote.helper" in line:
            found.append(pid)
    return found


def test_more_than_staging_holds_is_refused_for_now(desk: MoverDesk) -> None:
    of = family(length=1 << 20)
    first = desk.mover.submit(desk.put_request(range(12), of), HUNG_S)
    assert desk.mover.submit(desk.get_request(range(12), of), 1.0) == Throttled(Refusal.QUEUE)
    desk.final(first)
    huge = family(length=17 << 20)
    assert desk.mover.submit(desk.put_request([0], huge), 1.0) == Throttled(Refusal.TOO_LARGE)


def test_the_daemon_loads_no_client_library() -> None:
    program = (
        "import sys, kvhearth_server.daemon, kvhearth_server.tiers.remote.process;"
        "heavy = {'obstore', 'glide_sync', 'mooncake', 'boto3'};"
        "sys.exit(bool(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_cancelled_rows_do_not_begin(desk: MoverDesk) -> None:
    desk.put(range(4))
    pid = desk.mover.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    ticket = desk.mover.submit(desk.get_request(range(4)), HUNG_S)
    assert isinstance(ticket, int)
    desk.mover.cancel(ticket)
    os.kill(pid, signal.SIGCONT)
    assert set(kinds(desk.final(ticket))) <= {"Done", "Failed cancelled"}


def test_a_drained_mover_takes_nothing(desk: MoverDesk) -> None:
    assert desk.mover.drain(1.0)
    refused = desk.mover.submit(Exists(SPACE, family(), [b"k"]), 1.0)
    assert isinstance(refused, Throttled)
    assert refused.reason == "draining"
