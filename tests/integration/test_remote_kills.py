"""Random kills and stops of a mover's helper among puts and gets: no wrong byte, nothing lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from support.movers import DEADLINE_S, MoverDesk, kinds, mover_desk
from support.tiers import family

from kvhearth_server.tiers.base import Throttled
from kvhearth_server.tiers.remote.mover import Exists, Get

pytest.importorskip("obstore")
OF = family(length=150_000, shards=2)
ALLOWED = {"Done", "Missing", "Failed timeout", "Failed unreachable", "Failed cancelled"}


def _one(desk: MoverDesk, chance: random.Random, acknowledged: set[int]) -> None:
    """Begin a request, disturb its helper at a random moment, and check every answer."""
    start = chance.randrange(8)
    numbers = range(start, start + 4)
    puts = chance.random() < 0.5
    request = desk.put_request(numbers, OF) if puts else desk.get_request(numbers, OF)
    ticket = desk.mover.submit(request, 0.6)
    if isinstance(ticket, Throttled):
        desk.step(0.1)
        return
    blow = chance.choice([signal.SIGKILL, signal.SIGSTOP, None, None, "cancel"])
    time.sleep(chance.random() * 0.01)
    pid = desk.mover.pid
    if blow == "cancel":
        desk.mover.cancel(ticket)
    elif isinstance(blow, signal.Signals) and pid is not None:
        os.kill(pid, blow)
    answer = desk.final(ticket)
    assert set(kinds(answer)) <= ALLOWED, kinds(answer)
    if isinstance(request, Get) and not puts:
        desk.check(answer, request, numbers)
        if acknowledged.issuperset(numbers):
            assert "Missing" not in kinds(answer), "an acknowledged block was lost"
    else:
        acknowledged |= {
            n for n, what in zip(numbers, kinds(answer), strict=True) if what == "Done"
        }


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_and_stops_at_random(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with mover_desk(f"file://{tmp_path}") as desk:
        desk.up()
        acknowledged: set[int] = set()
        for _ in range(12):
            _one(desk, chance, acknowledged)
            desk.until(lambda: desk.mover.up)
        assert desk.mover.restarts > 0
        assert desk.mover.staging.free_bytes == desk.mover.staging.size
        for number in sorted(acknowledged):
            assert kinds(desk.get([number], OF)) == ["Done"], (number, seed)


def test_cancelled_rows_do_not_begin(tmp_path: Path) -> None:
    with mover_desk(f"file://{tmp_path}") as desk:
        desk.up().put(range(4), OF)
        pid = desk.mover.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        ticket = desk.mover.submit(desk.get_request(range(4), OF), DEADLINE_S)
        assert isinstance(ticket, int)
        desk.mover.cancel(ticket)
        os.kill(pid, signal.SIGCONT)
        assert set(kinds(desk.final(ticket))) <= {"Done", "Failed cancelled"}


def test_an_idle_mover_costs_nothing(tmp_path: Path) -> None:
    with mover_desk(f"file://{tmp_path}") as desk:
        desk.up()
        path = Path(f"/proc/{desk.mover.pid}/task")
        before = {each: _ran(each) for each in path.iterdir()}
        time.sleep(1.0)
        spent = sum(_ran(each) - before.get(each, 0) for each in path.iterdir())
        assert spent < 50_000_000, "5 % of a second, ten times what is wanted"


def _ran(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])


def test_a_drained_mover_takes_nothing(tmp_path: Path) -> None:
    with mover_desk(f"file://{tmp_path}") as desk:
        desk.up()
        assert desk.mover.drain(1.0)
        refused = desk.mover.submit(Exists("0" * 32, OF, [b"k"]), 1.0)
        assert isinstance(refused, Throttled)
        assert refused.reason == "draining"
