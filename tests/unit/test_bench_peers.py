"""``kvhearth bench peers``: the line protocol between runner and adapter, and figures from samples.

The adapters here are small programs that speak the same protocol; ``make bench-peers`` measures
the peers themselves.
"""

from __future__ import annotations

import io
import json
import os
import re
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
    parse_answer,
    parse_count,
    reason_of,
    seconds_of,
)
from kvhearth_lab.bench.peers.adapters import harness
from kvhearth_lab.bench.peers.run import Pair, Samples, against, counterpart, figure_names
from kvhearth_lab.cli import bench
from kvhearth_server.cli import app

MIB = 1 << 20
ADAPTERS = Path(harness.__file__).parent


def samples(**times: list[float]) -> Samples:
    """Samples, each beside a plain copy that takes one second."""
    made = Samples()
    for name, seconds in times.items():
        for each in seconds:
            made.add(name, 1.0, each)
    return made


@pytest.mark.parametrize("path", sorted(ADAPTERS.glob("*_peer.py")), ids=lambda path: path.stem)
def test_a_peers_interpreter_needs_nothing_of_ours(path: Path) -> None:
    ours = re.findall(r"^\s*(?:from|import) (kvhearth\S*)", path.read_text(), re.MULTILINE)
    assert set(ours) == {harness.__name__}, "it has only this one, which the harness stands in for"


# The line protocol.


def test_an_answer_is_an_object() -> None:
    assert parse_answer(b'{"seconds": 0.5}\n') == {"seconds": 0.5}


@pytest.mark.parametrize("line", [b"", b"[1]", b"3", b"{", b"\xff\xfe", b'"seconds"'])
def test_another_answer_fails_the_peer(line: bytes) -> None:
    with pytest.raises(PeerFailed, match="no JSON object"):
        parse_answer(line)


def test_a_time_is_a_positive_number() -> None:
    assert seconds_of({"seconds": 2}) == 2.0


@pytest.mark.parametrize("value", [None, 0, -1.0, float("nan"), True, "1", [1]])
def test_no_other_value_is_a_time(value: object) -> None:
    with pytest.raises(PeerFailed, match="answers no seconds"):
        seconds_of({"seconds": value})


@pytest.mark.parametrize("value", [None, -1, 1.5, True, "1"])
def test_a_count_is_a_whole_number(value: object) -> None:
    assert parse_count({"n": 3}, "n") == 3
    with pytest.raises(PeerFailed, match="answers no n"):
        parse_count({"n": value}, "n")


def test_a_reason_is_the_last_line_that_says_something() -> None:
    assert (
        reason_of("Traceback\n  File x\nRuntimeError: no room\n\n  \n") == "RuntimeError: no room"
    )
    assert reason_of("") == "nothing was said"
    assert len(reason_of("x" * 5000)) == 300


# Which peers are available.


def test_a_peer_without_an_interpreter_is_skipped(tmp_path: Path) -> None:
    there = tmp_path / "env" / "bin" / "python"
    there.parent.mkdir(parents=True)
    there.symlink_to(sys.executable)
    usable, skipped = interpreters({"a": None, "b": tmp_path / "no" / "python", "c": there})
    assert usable == {"c": there}
    assert skipped["a"] == "no interpreter was given with --a"
    assert skipped["b"].startswith("no interpreter at ")


def test_a_note_of_who_installed_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    (tmp_path / "not-installed").write_text("pip cannot install it: ERROR: no such version\n")
    assert interpreters({"a": python}) == (
        {},
        {"a": "not installed: pip cannot install it: ERROR: no such version"},
    )


def test_a_run_without_peers_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["bench", "peers", "--quick", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    assert found["peers"] == {}
    assert set(found["skipped"]) == {"lmcache", "mooncake"}
    assert "no interpreter was given with --lmcache" in printed.err


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


def test_requests_and_answers(started: Adapter) -> None:
    assert started.run("store", 5) == {"seconds": 0.5, "compared_bytes": 7}
    assert started.lookups(3) == [0.5, 0.5, 0.5]
    with pytest.raises(PeerFailed, match="no times of lookups"):
        started.lookups(9)


def test_the_end_of_an_adapter_is_a_reason(started: Adapter) -> None:
    with pytest.raises(PeerFailed, match=r"ended with 1: RuntimeError: the pool is gone$"):
        started.run("break", 1)
    with pytest.raises(PeerFailed, match="the pool is gone"):
        started.run("store", 1)


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
    end = time.monotonic() + 20
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


def test_nothing_is_measured_before_the_start() -> None:
    with pytest.raises(RuntimeError, match="no such op, or not yet: run"):
        asked(Memory(), {"op": "run", "measure": "store", "number": 0})


def test_a_child_that_ends_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = harness.Child(tmp_path, "some", [sys.executable, "-c", "raise SystemExit('no port')"])
    with pytest.raises(RuntimeError, match="some ended with 1: no port"):
        child.wait_port(harness.free_port())
    assert "no port" in capsys.readouterr().err
    child.end()


# Samples.


def test_samples_become_figures() -> None:
    found = samples(store=[1.0, 2.0, 4.0], load_one=[2.0, 4.0, 3.0]).figures(2 * 10**9)
    assert found["store_ratio"] == 0.5
    assert found["store_gbs"] == 1.0
    assert found["load_one_p50_us"] == 3e6
    assert found["load_one_ratio"] == 3.0
    assert found["spread"] == {"store_ratio": [0.25, 1.0], "load_one_p50_us": [2e6, 4e6]}
    assert "lookup512_p50_us" not in found


def test_lookups_become_figures() -> None:
    made = Samples(lookups=[1.0, 3.0, 2.0])
    assert made.figures(1)["lookup512_p50_us"] == 2e6
    assert made.figures(1)["lookup512_p99_us"] == 3e6


def test_ours_is_compared_round_by_round() -> None:
    ours = samples(store=[1.0, 2.0, 1.0], load=[1.0], load_unverified=[0.5])
    peer = samples(store=[2.0, 2.0, 3.0], store_bare=[1.0, 1.0, 1.0], load=[4.0], other=[1.0])
    ours.lookups, peer.lookups = [1.0], [3.0]
    assert against(ours, peer) == {"store": 2.0, "store_bare": 1.0, "load": 4.0, "lookup512": 3.0}


def test_a_variant_is_compared_with_our_default() -> None:
    assert counterpart("load_one_bare") == "load_one"
    assert counterpart("first_touch") == "first_touch"


def test_a_pair_has_its_table() -> None:
    pair = Pair(samples(store=[1.0], store_one=[1.0]), samples(store=[2.0], store_one_bare=[3.0]))
    pair.said = {"versions": {"lmcache": "0.0"}}
    pair.ours.lookups = pair.peer.lookups = [1.0]
    made = pair.as_json()
    names = figure_names(made)
    assert names[:3] == ["store_ratio", "store_one_p50_us", "store_one_ratio"]
    assert "lookup512_p99_us" in names
    assert made["memcpy_gbs"] == round(128 * 2 * MIB / 1e9, 2)
    assert made["against"] == {"store": 2.0, "store_one_bare": 3.0, "lookup512": 1.0}
    found = {"peers": {"lmcache": made}, "skipped": {"mooncake": "no interpreter"}}
    tables = list(bench.peers_tables(found))
    console = bench.console()
    with console.capture() as printed:
        for each in tables:
            console.print(each)
    lines = [" ".join(line.split()) for line in printed.get().splitlines()]
    assert "lmcache 0.0" in lines
    assert "store_ratio 1 1 .. 1 0.5 0.5 .. 0.5 2" in lines
    assert "store_one_bare_p50_us - 3e+06 3e+06 .. 3e+06 3" in lines
    assert "mooncake no interpreter" in lines


def test_a_pair_without_samples_is_still_a_report() -> None:
    made = Pair().as_json()
    assert made["memcpy_gbs"] is None
    assert made["against"] == {}
    assert figure_names(made) == []
    assert list(bench.peers_tables({"peers": {"lmcache": made}, "skipped": {}})) == []
