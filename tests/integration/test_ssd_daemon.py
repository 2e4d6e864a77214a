"""A daemon with an SSD tier: status, messages at the start, and bytes that rot."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.http_door import Scrape, ask
from support.raw_door import new_keys

from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of
from kvhearth_server.cli import app
from kvhearth_server.engine.epoch_store import RESERVE_BYTES
from kvhearth_server.tiers.ssd.format import (
    DIRECTORY_DTYPE,
    VERSION,
    DirectoryHead,
    directory_page,
    seal,
)

PAGE = 64 << 10
CONTRACT = contract_of(PAGE, shards=2)
MEMORY, CONFIG = 3, 2
CAPACITY = (64 << 20) - (1 << 20) - RESERVE_BYTES
Run = Callable[..., tuple[int, str, str]]


def ssd(*folders: Path, size: str = "64MiB", **more: object) -> dict[str, object]:
    """Settings of a tier of small segments."""
    dirs = [f"{folder}={size}" for folder in folders]
    return {"ssd_dirs": dirs, "ssd_segment_bytes": "1MiB", **more}


def on_ssd(daemon: Daemon, count: int) -> None:
    """Waits until so many blocks are written."""
    until(lambda: daemon.stats().ssd.blocks >= count, f"{count} blocks are on SSD")


# -- status ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ssd") / "log"


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with running_daemon(http="127.0.0.1:0", **ssd(folder, ssd_bytes_per_day="1TiB")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def engine(daemon: Daemon) -> Iterator[Engine]:
    with engine_of(daemon.url(), CONTRACT) as engine:
        yield engine


@pytest.fixture(scope="module")
def keys(daemon: Daemon, engine: Engine) -> list[bytes]:
    keys = new_keys(8)
    assert engine.store(keys).bound == keys
    on_ssd(daemon, 8)

    def well() -> bool:
        (place,) = ask(daemon, "/v1/stats").json["ssd"]["directories"]
        return not place["reasons"]

    until(well, "that a write was slow is told for a while only")
    return keys


@pytest.fixture
def run(daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process, for the module's daemon: exit code, stdout, stderr."""
    monkeypatch.setenv("KVHEARTH_SOCKET_DIR", str(daemon.socket_dir))

    def call(*words: str) -> tuple[int, str, str]:
        code = app.run(words)
        return code, *capsys.readouterr()

    return call


def test_readiness_tells_of_the_tier(daemon: Daemon, keys: list[bytes]) -> None:
    reply = ask(daemon, "/readyz?verbose")
    assert reply.status == 200
    lines = reply.body.decode().splitlines()
    (line,) = [line for line in lines if "ssd" in line]
    assert line.startswith(f"[i]ssd: healthy, {len(keys)} blocks, ")
    assert lines[-1] == "ok"
    assert ask(daemon, "/readyz").body.decode() == "ok\n"


def test_statistics_by_http(daemon: Daemon, keys: list[bytes], folder: Path) -> None:
    found = ask(daemon, "/v1/stats").json["ssd"]
    assert (found["blocks"], found["live_bytes"]) == (len(keys), len(keys) * 2 * PAGE)
    (place,) = found["directories"]
    assert (place["path"], place["capacity_bytes"], place["reasons"]) == (str(folder), CAPACITY, [])
    assert place["file_bytes"] == sum(place["segments"].values()) << 20
    assert found["interface"] in ("libaio", "threads")
    assert 0 < found["budget_left_bytes"] < 1 << 40
    assert found["counters"]["stored_blocks"] == len(keys)


def test_metrics_of_the_tier(daemon: Daemon, keys: list[bytes], folder: Path) -> None:
    assert Scrape(daemon).of("ssd_blocks") == len(keys)
    assert Scrape(daemon).of("ssd_store_blocks_total", outcome="stored") == len(keys)
    assert Scrape(daemon).of("demoted_blocks_total") == len(keys)
    assert (
        Scrape(daemon).of("ssd_written_bytes_total")
        > Scrape(daemon).of("ssd_stored_bytes_total")
        > 0
    )
    assert Scrape(daemon).of("ssd_capacity_bytes", directory=str(folder)) == CAPACITY
    assert Scrape(daemon).of("ssd_degraded", directory=str(folder), reason="io") == 0
    assert Scrape(daemon).of("ssd_recovering") == 0


def test_verbs_tell_of_the_tier(run: Run, keys: list[bytes], folder: Path) -> None:
    code, out, _ = run("stat")
    assert code == 0
    assert f"blocks on SSD   {len(keys)} of 1 MiB" in out
    assert str(folder) in out
    found = json.loads(run("stat", "--json")[1])
    assert found["ssd"]["blocks"] == len(keys)
    (reads,) = [line.split() for line in out.splitlines() if line.startswith("reads take")]
    assert reads == ["reads", "take", "-"], "nothing was read yet"
    code, out, _ = run("top", "--once")
    assert code == 0
    assert "serving" in out.splitlines()[0], "a tier that was degraded would be named there"
    (drive,) = [line for line in out.splitlines() if line.startswith("SSD /")]
    assert drive.split()[1].endswith(str(folder)[-9:])
    assert "to SSD" in out
    assert run("health") == (0, "serving\n", "")
    assert json.loads(run("health", "--json")[1])["degraded"] == []


def test_explain_a_key_that_is_on_ssd_too(run: Run, keys: list[bytes]) -> None:
    found = json.loads(run("explain", keys[0].hex(), "--json")[1])
    assert [(place["tier"], bool(place["why_not"])) for place in found["places"]] == [
        ("dram", False),
        ("ssd", True),
    ]
    assert "this is a copy" in run("explain", keys[0].hex())[1]


def test_without_a_tier_nothing_is_said_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_daemon(arena=False, http="127.0.0.1:0") as daemon:
        assert "ssd" not in ask(daemon, "/readyz?verbose").body.decode()
        assert ask(daemon, "/v1/stats").json["ssd"] is None
        assert not [one for one in Scrape(daemon).samples if re.search("_ssd_|demot", one.name)]
        monkeypatch.setenv("KVHEARTH_SOCKET_DIR", str(daemon.socket_dir))
        assert app.run(["stat", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ssd"] is None


# -- the start -------------------------------------------------------------------------------------


def last_words(daemon: Daemon, status: int) -> str:
    """Returns the one line with which a start fails."""
    assert daemon.launch().wait(HUNG_S) == status, daemon.log_tail()
    assert "Traceback" not in daemon.log_text(), daemon.log_tail()
    return daemon.log_text().splitlines()[-1].removeprefix("kvhearth: error: ")


def newer_head() -> bytes:
    """A directory's own file in a future version."""
    row = np.frombuffer(directory_page(DirectoryHead(7, 1 << 20)), DIRECTORY_DTYPE, 1).copy()
    row["version"] = VERSION + 1
    seal(row)
    return row.tobytes().ljust(4096, b"\0")


def test_a_tier_that_cannot_be_opened(tmp_path: Path) -> None:
    place = tmp_path / "log"
    small = f"ssd_dirs: {place} has 1MiB, too little for the log's files; give it 15MiB"
    newer = f"{place}/kvhearth.log is of another version of KVHearth and cannot be understood"
    absent = f"--ssd-dir {place}/not/there: {place}/not does not exist; mount the drive there"
    place.mkdir()
    (place / "kvhearth.log").write_bytes(newer_head())
    for settings, code, wanted in (
        (ssd(place, size="1MiB"), CONFIG, small),
        (ssd(place), MEMORY, newer),
        (ssd(place / "not" / "there"), MEMORY, absent),
    ):
        with stopped_daemon(arena=False, **settings) as daemon:
            assert last_words(daemon, code).startswith(wanted)


def test_a_directory_is_one_daemons(tmp_path: Path) -> None:
    with (
        running_daemon(arena=False, **ssd(tmp_path / "log")),
        stopped_daemon(arena=False, **ssd(tmp_path / "log")) as second,
    ):
        words = last_words(second, MEMORY)
        assert words.startswith(f"{tmp_path}/log is used by another daemon; stop it")


def test_one_of_two_directories_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.mkdir()
    (bad / "kvhearth.log").write_bytes(newer_head())
    with running_daemon(arena=False, http="127.0.0.1:0", **ssd(bad, good)) as daemon:
        reply = ask(daemon, "/readyz?verbose")
        assert reply.status == 200, "it serves all the same"
        assert "[i]ssd: degraded" in reply.body.decode()
        assert f"[!]ssd: {bad}/kvhearth.log is of another version" in reply.body.decode()
        assert Scrape(daemon).of("ssd_degraded", directory=str(bad), reason="unusable") == 1
        assert Scrape(daemon).of("ssd_degraded", directory=str(good), reason="unusable") == 0
        assert "ssd.degraded" in daemon.log_text()
        monkeypatch.setenv("KVHEARTH_SOCKET_DIR", str(daemon.socket_dir))
        assert app.run(["health"]) == 0
        out, err = capsys.readouterr()
        assert out == "serving\n"
        assert "the SSD tier is degraded" in err
        with engine_of(daemon.url(), CONTRACT) as engine:
            keys = new_keys(4)
            assert engine.store(keys).bound == keys
            on_ssd(daemon, 4)


def test_recovery_is_told(tmp_path: Path) -> None:
    with running_daemon(http="127.0.0.1:0", **ssd(tmp_path / "log")) as daemon:
        until(lambda: _read_back(daemon), "the empty log is read back")
        with engine_of(daemon.url(), CONTRACT) as engine:
            assert engine.store(new_keys(30)).bound
            on_ssd(daemon, 30)
        daemon.restart()
        until(lambda: len(_read_back(daemon)) == 2, "the log is read back")
        assert Scrape(daemon).of("ssd_recovering") == 0
        assert Scrape(daemon).of("ssd_recovered_blocks_total") == 30
        assert Scrape(daemon).of("ssd_recovery_files", state="read") > 0
        assert Scrape(daemon).of("ssd_recovery_dropped_total", reason="torn") == 0
        assert _read_back(daemon) == [0, 30]
        assert daemon.terminate() == 0


def _read_back(daemon: Daemon) -> list[int]:
    """Returns, per start, the number of blocks reported as recovered."""
    lines = [line for line in daemon.log_text().splitlines() if "ssd.read_back" in line]
    return [json.loads(line)["blocks"] for line in lines]


def test_blocks_seen_once_stay_off_the_drive_if_that_is_asked_for(tmp_path: Path) -> None:
    settings = ssd(tmp_path / "log", ssd_admission="seen_twice")
    with running_daemon(**settings) as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys, once = new_keys(8), new_keys(8)
        assert engine.store(keys + once).bound == keys + once
        until(
            lambda: daemon.counters().get("demotion_refused{admission}", 0) >= 16, "all are refused"
        )
        assert engine.check(keys).right == keys
        on_ssd(daemon, 8)
        assert daemon.stats().ssd.blocks == 8
