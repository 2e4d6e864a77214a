"""``kvhearth trace`` against live daemons: recorded, simulated and replayed."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.daemon import Daemon, running_daemon, until
from support.raw_door import new_keys

from kvhearth.proto.v1 import admin_pb2
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of
from kvhearth_server.cli import app
from kvhearth_server.traces.format import TraceSpace, TraceWriter, read_trace

PAGE = 64 << 10
BLOCKS = (16 << 20) // PAGE


@contextlib.contextmanager
def recorded(daemon: Daemon, file: Path, *words: str) -> Iterator[None]:
    """Records what the block does; ends once the daemon has told everything."""
    codes = list[int]()
    line = ["trace", "record", str(file), "--socket-dir", str(daemon.socket_dir), *words]
    thread = threading.Thread(target=lambda: codes.append(app.run(line)))
    thread.start()
    until(file.exists, "the recording has begun")
    time.sleep(0.1)
    yield
    thread.join(20)
    assert codes == [0]


def conversation(engine: Engine, chains: list[list[bytes]], order: list[int]) -> None:
    """Looks chains up and stores what is missing."""
    for number in order:
        chain = chains[number]
        found = engine.client.lookup({0: chain})
        if found.lease is not None:
            engine.client.release(found.lease)
        start = found.hit_tokens // 16
        if start < len(chain):
            engine.store(chain[start:], parent=chain[start - 1] if start else None)


@pytest.mark.parametrize("mapped", [True, False], ids=["index", "calls"])
def test_a_recorded_trace_has_each_call_once(tmp_path: Path, mapped: bool) -> None:
    file = tmp_path / "t"
    with (
        running_daemon(arena=False, shared_index=mapped) as daemon,
        engine_of(daemon.url(), contract_of(PAGE, model="llama")) as engine,
    ):
        chains = [new_keys(20) for _ in range(5)]
        with recorded(daemon, file, "--seconds", "2"):
            conversation(engine, chains, [0, 1, 2, 3, 4, 0, 1])
        trace = read_trace(file)
        assert trace.lookups == 7
        assert len(trace) == 12
        assert trace.asked_keys == 140
        assert len(trace.hashes) == 100
        assert trace.lost_keys == 0
        assert trace.facts["memory_bytes"] == 16 << 20
        (space,) = trace.spaces.values()
        assert space.contract["model"] == "llama"
        assert space.block_bytes == PAGE
        data = file.read_bytes()
        assert not any(chain[0][:8] in data for chain in chains)
        assert "admin.trace" in daemon.log_tail()
        # It stopped by itself, and the daemon goes on.
        assert daemon.stats().sessions == 1


def test_a_recording_that_nobody_asks_about_ends(tmp_path: Path) -> None:
    with running_daemon(arena=False, curve_keys=0) as daemon:

        def ask(number: int) -> Any:
            request = admin_pb2.RecordTraceRequest(recording=number)
            return daemon.admin(
                lambda stub, token: stub.RecordTrace(request, metadata=token, timeout=20)
            )

        first = ask(0).recording
        assert ask(first).recording == first
        with pytest.raises(Exception, match="has ended"):
            ask(first + 1)
        others = [ask(0).recording for _ in range(3)]
        assert len({first, *others}) == 4
        with pytest.raises(Exception, match="are under way"):
            ask(0)


def test_a_file_that_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t"
    file.write_text("mine")
    with running_daemon(arena=False) as daemon:
        code = app.run(["trace", "record", str(file), "--socket-dir", str(daemon.socket_dir)])
        assert code == app.EXIT_CONFIG
        assert "choose another file" in capsys.readouterr().err
        assert file.read_text() == "mine"


def a_trace(file: Path) -> None:
    """A trace of chains with popular ones, one and a half times the small daemon's memory."""
    chooser = np.random.default_rng(3)
    names = [b"".join(new_keys(12)) for _ in range(32)]
    with TraceWriter(file, {"memory_bytes": 16 << 20, "ssd_bytes": 0}) as writer:
        writer.space(0, TraceSpace("ab" * 32, "t", 1, 0, PAGE, {"model": "m", "hash_bytes": 32}))
        for at, number in enumerate((chooser.zipf(1.1, 300) % 32).tolist()):
            writer.use(0, 2000 * at, names[number], 32, store=False)


def test_a_replay_has_the_hit_ratio_that_the_simulation_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t"
    a_trace(file)
    # By calls: what a posted lookup does may come after the store behind it.
    with running_daemon(arena=False, shared_index=False, eviction="sieve") as daemon:
        words = [str(file), "--socket-dir", str(daemon.socket_dir), "--json"]
        assert app.run(["trace", "replay", *words]) == 0
        real = json.loads(capsys.readouterr().out)
        counted = daemon.counters()
    assert real["lookups"] == 300
    assert real["wrong_blocks"] == 0
    assert real["reasons"] == {}
    assert counted["evicted_blocks{space}"] > 100
    words = [str(file), "--policy", "sieve", "--memory", "16MiB", "--json"]
    assert app.run(["trace", "simulate", *words]) == 0
    (told,) = json.loads(capsys.readouterr().out)["results"]
    assert 0.3 < told["hit_ratio"] < 0.95
    assert told["sample_rate"] == 1
    assert counted["hit_keys"] / counted["lookup_keys"] == pytest.approx(
        told["hit_ratio"], abs=0.05
    )
    assert real["hit_ratio"] == pytest.approx(told["hit_ratio"], abs=0.05)


def test_a_paced_replay_takes_the_recorded_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t"
    a_trace(file)
    with running_daemon(arena=False) as daemon:
        words = [str(file), "--socket-dir", str(daemon.socket_dir), "--json", "--speed", "0.5"]
        assert app.run(["trace", "replay", *words, "--page-bytes", "16KiB"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["seconds"] > 299 * 0.004
        # All of it fits in smaller blocks.
        assert found["stored_keys"] <= 32 * 12
        assert found["hit_ratio"] > 0.85


def test_a_replay_without_a_daemon_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvhearth_lab import replay

    monkeypatch.setattr(replay, "READY_S", 0.2)
    file = tmp_path / "t"
    a_trace(file)
    assert app.run(["trace", "replay", str(file), "--socket-dir", str(tmp_path)]) == 1
    assert "no daemon serves" in capsys.readouterr().err
