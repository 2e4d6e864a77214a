"""``kvhearth bench peers``: the line protocol between runner and adapter, and figures from samples.

The adapters here are small programs that speak the same protocol; ``make bench-peers`` measures
the peers themselves.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvhearth_lab.bench.peers import adapter as adapters
from kvhearth_lab.bench.peers.adapter import (
    Adapter,
    PeerFailed,
    adapter_of,
    interpreters,
)
from kvhearth_lab.bench.peers.adapters import harness
from kvhearth_lab.bench.peers.run import Samples, against
from kvhearth_lab.harness import HUNG_S


def samples(**times: list[float]) -> Samples:
    """Samples, each beside a plain copy that takes one second."""
    made = Samples()
    for name, seconds in times.items():
        for each in seconds:
            made.add(name, 1.0, each)
    return made


# Which peers are available.


def test_a_peer_without_an_interpreter_is_skipped(tmp_path: Path) -> None:
    there = tmp_path / "env" / "bin" / "python"
    there.parent.mkdir(parents=True)
    there.symlink_to(sys.executable)
    usable, skipped = interpreters({"a": None, "b": tmp_path / "no" / "python", "c": there})
    assert usable == {"c": there}
    assert skipped["a"] == "no interpreter was given with --a"
    assert skipped["b"].startswith("no interpreter at ")


# A peer's process, with a program in its place.

PROGRAM = """
import json, os, sys, time
print("noise of a library", file=sys.stderr)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "prepare":
        if os.fork() == 0:
            time.sleep(300)
        said = {"versions": {}, "leftovers": [asked["left"]], "measures": ["store"]}
    elif asked["op"] == "run":
        if asked["measure"] == "break":
            sys.exit("RuntimeError: the pool is gone")
        if asked["measure"] == "hang":
            time.sleep(300)
        said = {"seconds": asked["number"] / 10, "compared_bytes": 7}
    elif asked["op"] == "lookup":
        said = {"seconds": [0.5] * (asked["count"] if asked["count"] < 9 else 1)}
    else:
        said = {}
    print(json.dumps(said), flush=True)
    if asked["op"] == "close":
        break
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Adapter]:
    """A prepared adapter whose harness is ``PROGRAM``."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(adapters, "_HARNESS", program)
    (tmp_path / "left").write_text("")
    made = adapter_of(Path(sys.executable), "some", tmp_path)
    try:
        said = made.prepare(left=str(tmp_path / "left"))
        assert said == {"versions": {}, "measures": ["store"]}
        yield made
    finally:
        made.close()


def test_an_adapter_that_hangs_is_a_reason(
    started: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "RUN_S", 0.2)
    with pytest.raises(PeerFailed, match=r"does not answer to run in time: noise of a library$"):
        started.run("hang", 1)
    monkeypatch.setattr(adapters, "CLOSE_S", 0.2)
    started.close()


def test_the_end_takes_what_it_started_with_it(started: Adapter, tmp_path: Path) -> None:
    group = started._process.pid
    assert os.getpgid(group) == group
    os.killpg(group, 0)
    started.close()
    end = time.monotonic() + HUNG_S
    while _lives(group):  # the grandchild now has another parent, which reaps it
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not (tmp_path / "left").exists()


def _lives(group: int) -> bool:
    """Whether a process of the group still runs (a zombie does not count)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


# The harness, run in this process.


class Memory:
    """A peer backed by a dictionary.

    Args:
        wrong: a load copies nothing.
        stale: a key keeps the first bytes stored under it.
    """

    def __init__(self, wrong: bool = False, stale: bool = False) -> None:
        self.source = np.zeros((4, 4096), np.uint8)
        self.target = np.zeros((4, 4096), np.uint8)
        self.pages = harness.order(4)
        self.kept: dict[int, Any] = {}
        self.wrong = wrong
        self.stale = stale
        self.drops = 0

    def start(self, config: harness.Config) -> Mapping[str, Any]:
        harness.fill(self.source)
        return {"versions": {"memory": config.part}}

    def measures(self) -> Mapping[str, Callable[[int], float]]:
        return {
            "store": lambda _: self._store(range(4)),
            "load": lambda _: self._load(range(4)),
            "store_one": lambda index: self._store([self.pages[index]]),
            "load_one": lambda index: self._load([self.pages[index]]),
        }

    def _store(self, pages: Any) -> float:
        if not self.kept:
            self.kept = {page: self.source[page].copy() for page in pages}
        return 0.25

    def _load(self, pages: Any) -> float:
        for page in pages if not self.wrong else ():
            self.target[page] = self.kept[page]
        return 0.5

    def drop(self) -> None:
        self.drops += 1
        if not self.stale:
            self.kept = {}

    def lookups(self, count: int) -> list[float]:
        return [0.1] * count

    def close(self) -> None:
        self.kept = {}


CONFIG = {
    "part": "copies",
    "memory_bytes": 1,
    "batch": 4,
    "page_bytes": 4096,
    "small_bytes": 1,
    "blocks": 1,
    "keys": 1,
    "hugepages": False,
}


def asked(peer: Memory, *requests: Mapping[str, Any]) -> list[Any]:
    """Returns the harness's answers to the requests."""
    answers: list[Any] = []
    lines = io.StringIO("".join(json.dumps(each) + "\n" for each in requests))
    harness.serve(peer, Path(), lines, answers.append)
    return answers


def test_the_harness_serves_a_peer() -> None:
    peer = Memory()
    answers = asked(
        peer,
        {"op": "prepare", **CONFIG},
        {"op": "run", "measure": "store", "number": 0},
        {"op": "run", "measure": "load", "number": 0},
        {"op": "run", "measure": "store_one", "number": 6},
        {"op": "run", "measure": "load_one", "number": 6},
        {"op": "lookup", "count": 2},
        {"op": "close"},
        {"op": "run", "measure": "store", "number": 1},
    )
    assert all(each.pop("baseline") > 0 for each in answers[1:5])
    assert all(each.pop("cpu_s") >= 0 for each in answers[1:5])
    assert answers == [
        {"versions": {"memory": "copies"}, "measures": ["store", "load", "store_one", "load_one"]},
        {"seconds": 0.25, "compared_bytes": 0},
        {"seconds": 0.5, "compared_bytes": 4 * 4096},
        {"seconds": 0.25, "compared_bytes": 0},
        {"seconds": 0.5, "compared_bytes": 4096},
        {"seconds": [0.1, 0.1]},
    ]
    assert peer.drops == 2


@pytest.mark.parametrize("measure", ["load", "load_one"])
def test_the_harness_does_not_take_wrong_bytes(measure: str) -> None:
    peer = Memory(wrong=True)
    with pytest.raises(RuntimeError, match="wrong bytes"):
        asked(peer, {"op": "prepare", **CONFIG}, {"op": "run", "measure": measure, "number": 0})


@pytest.mark.parametrize("stale", [False, True])
def test_bytes_of_the_last_round_are_wrong_bytes(stale: bool) -> None:
    rounds = [
        {"op": "run", "measure": measure, "number": number}
        for number in range(2)
        for measure in ("store", "load")
    ]
    peer, prepare = Memory(stale=stale), {"op": "prepare", **CONFIG}
    if not stale:
        assert len(asked(peer, prepare, *rounds)) == 5
        return
    assert len(asked(peer, prepare, *rounds[:3])) == 4
    with pytest.raises(RuntimeError, match="wrong bytes"):
        asked(Memory(stale=True), prepare, *rounds)


# Samples.


def test_samples_become_figures() -> None:
    found = samples(store=[1.0, 2.0, 4.0], load_one=[2.0, 4.0, 3.0]).figures(2 * 10**9)
    assert found["store_ratio"] == 0.5
    assert found["store_gbs"] == 1.0
    assert found["load_one_p50_us"] == 3e6
    assert found["load_one_ratio"] == 3.0
    assert found["spread"] == {"store_ratio": [0.25, 1.0], "load_one_p50_us": [2e6, 4e6]}
    assert "lookup512_p50_us" not in found


def test_ours_is_compared_round_by_round() -> None:
    ours = samples(store=[1.0, 2.0, 1.0], load=[1.0], load_unverified=[0.5])
    peer = samples(store=[2.0, 2.0, 3.0], store_bare=[1.0, 1.0, 1.0], load=[4.0], other=[1.0])
    ours.lookups, peer.lookups = [1.0], [3.0]
    assert against(ours, peer) == {"store": 2.0, "store_bare": 1.0, "load": 4.0, "lookup512": 3.0}
