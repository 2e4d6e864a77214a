"""Blocks that an operator removes from memory and from SSD: they are gone, and stay gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, stopped_daemon, until
from support.http_door import ask
from support.raw_door import new_keys
from support.ssd_kit import CONTRACT, PAGE, SSD, fetch_all, saved, store_all

from kvhearth.contract import namespace_digest
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of
from kvhearth_server.cli import app

BLOCKS = 40
DIGEST = namespace_digest("default", CONTRACT).hex()
OTHER = contract_of(PAGE, model="other")
Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    folder = tmp_path / "ssd"
    with stopped_daemon(http="127.0.0.1:0", **SSD, ssd_dirs=[f"{folder}=64MiB"]) as daemon:
        daemon.start()
        yield daemon
        daemon.stats()


@pytest.fixture
def verb(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Verb:
    """Runs the command for the daemon: exit code, stdout, stderr."""
    monkeypatch.setenv("KVHEARTH_SOCKET_DIR", str(daemon.socket_dir))

    def call(*words: str) -> tuple[int, str, str]:
        code = app.run(words)
        return code, *capsys.readouterr()

    return call


def removed(verb: Verb, *words: str) -> tuple[int, int]:
    """Returns the numbers of blocks that ``evict`` removed from memory and from SSD."""
    code, out, err = verb("evict", *words, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    return found["evicted_blocks"], found["ssd_blocks"]


def stored(daemon: Daemon, engine: Engine) -> list[bytes]:
    """Returns the keys of blocks that are in memory and on SSD."""
    keys, before = new_keys(BLOCKS), daemon.counters().get("demoted_blocks", 0)
    store_all(engine, keys)
    saved(daemon, before + BLOCKS)
    return keys


def found(engine: Engine, keys: list[bytes]) -> tuple[int, int]:
    """Returns how many blocks are in memory, and how many are present at all."""
    answer = engine.client.lookup({0: keys}, lease=False)
    assert not answer.reason
    # An answer covers only the longest run from the first key on.
    ready = [engine.client.lookup({0: [key]}, lease=False).groups[0] for key in keys]
    return sum(bool(g.ready.all()) for g in ready), sum(bool(g.present.all()) for g in ready)


def wait_read_back(daemon: Daemon) -> None:
    until(lambda: daemon.read_back, "the log is read back")


def test_by_default_nothing_is_left_and_nothing_comes_back(daemon: Daemon, verb: Verb) -> None:
    with engine_of(daemon.url(), CONTRACT) as engine, engine_of(daemon.url(), OTHER, "e2") as other:
        keys, theirs = stored(daemon, engine), stored(daemon, other)
        assert found(engine, keys) == (BLOCKS, BLOCKS)
        assert removed(verb, DIGEST, "--keep", "0") == (BLOCKS, BLOCKS)
        assert found(engine, keys) == (0, 0)
        assert found(other, theirs) == (BLOCKS, BLOCKS), "another namespace's"
        assert daemon.stats().ssd.blocks == BLOCKS
        again = stored(daemon, engine)
    daemon.restart()
    wait_read_back(daemon)
    with engine_of(daemon.url(), CONTRACT) as engine, engine_of(daemon.url(), OTHER, "e2") as other:
        assert found(engine, keys) == (0, 0)
        assert found(engine, again) == (BLOCKS, BLOCKS), "stored after the eviction"
        assert found(other, theirs) == (BLOCKS, BLOCKS)


def test_a_cold_start_brings_nothing_back(tmp_path: Path) -> None:
    settings = {**SSD, "ssd_dirs": [f"{tmp_path}/cold=64MiB"], "http": "127.0.0.1:0"}
    with stopped_daemon(arena=False, **settings) as daemon:
        daemon.start()
        with engine_of(daemon.url(), CONTRACT) as engine:
            keys = stored(daemon, engine)
            path = f"/v1/namespaces/{DIGEST}:evict"
            answer = ask(daemon, path, "POST", b'{"tier": "all"}', admin=True).json
            assert (answer["evicted_blocks"], answer["ssd_blocks"]) == (40, 40)
            again = stored(daemon, engine)
        daemon.restart()
        wait_read_back(daemon)
        with engine_of(daemon.url(), CONTRACT) as engine:
            assert found(engine, keys) == (0, 0)
            assert found(engine, again) == (0, BLOCKS)
            assert sorted(fetch_all(engine, again)) == sorted(again)


def test_from_memory_only_the_copies_on_ssd_are_served(daemon: Daemon, verb: Verb) -> None:
    with engine_of(daemon.url(), CONTRACT) as engine:
        keys = stored(daemon, engine)
        assert removed(verb, DIGEST, "--keep", "0", "--tier", "memory") == (BLOCKS, 0)
        assert found(engine, keys) == (0, BLOCKS)
        assert sorted(fetch_all(engine, keys)) == sorted(keys)
        until(lambda: not daemon.stats().leases, "the last load's lease is released")
        assert removed(verb, DIGEST, "--keep", "1MiB") == (BLOCKS - 16, 0)
        assert found(engine, keys) == (16, BLOCKS)


def test_from_ssd_only_what_is_in_memory_is_saved_again_when_its_room_is_wanted(
    daemon: Daemon, verb: Verb
) -> None:
    with engine_of(daemon.url(), CONTRACT) as engine:
        keys = stored(daemon, engine)
        assert removed(verb, DIGEST, "--keep", "0", "--tier", "ssd") == (0, BLOCKS)
        assert (daemon.stats().blocks, daemon.stats().ssd.blocks) == (BLOCKS, 0)
        for _ in range(8):  # more than memory holds
            stored(daemon, engine)
        until(lambda: daemon.stats().ssd.blocks == 9 * BLOCKS, "they are written again")
        assert removed(verb, DIGEST, "--keep", "0", "--tier", "memory")[0] > 0
        assert sorted(fetch_all(engine, keys)) == sorted(keys)


def test_what_is_leased_stays_in_memory(daemon: Daemon, verb: Verb) -> None:
    with engine_of(daemon.url(), CONTRACT) as engine:
        keys = stored(daemon, engine)
        held = engine.client.lookup({0: keys[:4]})
        until(lambda: daemon.stats().leases, "the lease arrives")
        assert removed(verb, DIGEST, "--keep", "0") == (BLOCKS - 4, BLOCKS)
        assert found(engine, keys) == (4, 4)
        engine.client.release(held.lease)
        until(lambda: removed(verb, DIGEST, "--keep", "0") == (4, 0), "the lease is released")
        assert found(engine, keys) == (0, 0)


def test_ssd_keeps_all_or_nothing(daemon: Daemon, verb: Verb) -> None:
    code, _, err = verb("evict", DIGEST, "--keep", "1MiB", "--tier", "all")
    assert (code, "add --keep 0" in err) == (2, True)
    with engine_of(daemon.url(), CONTRACT) as engine:
        stored(daemon, engine)
    path = f"/v1/namespaces/{DIGEST}:evict"
    body = json.dumps({"keep_bytes": 1, "tier": "all"}).encode()
    answer = ask(daemon, path, "POST", body, admin=True)
    assert (answer.status, answer.json["reason"]) == (400, "bad_message")


# -- forget ----------------------------------------------------------------------------------------


def test_a_forgotten_namespace_is_a_miss_in_both_tiers_also_after_a_restart(
    daemon: Daemon, verb: Verb
) -> None:
    with engine_of(daemon.url(), CONTRACT) as engine:
        keys = stored(daemon, engine)
        epoch = engine.client.epoch
        code, out, _ = verb("forget", DIGEST[:6].upper(), "--yes", "--json")
        assert code == 0
        answer = json.loads(out)
        assert (answer["namespace"], answer["epoch"]) == (DIGEST, epoch + 1)
    for _ in range(2):
        with engine_of(daemon.url(), CONTRACT) as engine:
            assert engine.client.epoch == epoch + 1
            assert found(engine, keys) == (0, 0)
        daemon.restart()
        wait_read_back(daemon)


def test_which_namespace_is_forgotten(daemon: Daemon, verb: Verb) -> None:
    contracts = [contract_of(PAGE, model=f"m{number}") for number in range(17)]
    for contract in contracts:
        with engine_of(daemon.url(), contract) as engine:
            engine.wait_ready()
    names = sorted(namespace_digest("default", contract).hex() for contract in contracts)
    digit = next(d for d in "0123456789abcdef" if sum(n.startswith(d) for n in names) > 1)
    like = [name for name in names if name.startswith(digit)]
    code, out, err = verb("forget", digit, "--yes")
    assert (code, out) == (1, "")
    assert f"{len(like)} namespaces start with '{digit}': " in err
    assert all(name[:12] in err for name in like[:8])
    starts = {name[:2] for name in names}
    absent = next(start for n in range(256) if (start := f"{n:02x}") not in starts)
    code, out, err = verb("forget", absent, "--yes")
    assert (code, out) == (1, "")
    assert f"no namespace starts with '{absent}'" in err
    code, _, err = verb("forget", names[0])
    assert (code, "add --yes" in err) == (2, True), "there is no terminal to ask on"


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_person_is_asked(daemon: Daemon, answer: str) -> None:
    with engine_of(daemon.url(), CONTRACT) as engine:
        engine.wait_ready()
    before = epoch_of(daemon)
    words = [sys.executable, "-m", "kvhearth_server.cli.app", "forget", DIGEST[:8]]
    environ = os.environ | {"KVHEARTH_SOCKET_DIR": str(daemon.socket_dir)}
    ours, theirs = os.openpty()
    try:
        os.write(ours, f"{answer}\n".encode())
        done = subprocess.run(
            words, env=environ, stdin=theirs, capture_output=True, timeout=HUNG_S, check=False
        )
    finally:
        os.close(ours)
        os.close(theirs)
    asked = f"forget {DIGEST[:12]} (tenant default, model m) with 0 blocks, 0 B in memory"
    assert asked in done.stderr.decode()
    assert (done.returncode, epoch_of(daemon)) == (
        (0, before + 1) if answer == "y" else (1, before)
    )


def test_a_bump_that_no_drive_noted_is_told(tmp_path: Path, daemon: Daemon, verb: Verb) -> None:
    with engine_of(daemon.url(), CONTRACT) as engine:
        engine.wait_ready()
    current = epoch_of(daemon)
    names = tmp_path / "ssd" / "namespaces"
    fresh = names.with_name("namespaces.new")
    until(names.exists, "the namespaces are written")
    fresh.mkdir()  # can neither be replaced nor, below, removed
    names.unlink()
    names.mkdir()
    (names / "stuck").touch()
    code, out, err = verb("forget", DIGEST, "--yes")
    assert (code, out) == (3, "")
    assert "the change holds, but cannot be written to" in err
    assert epoch_of(daemon) == current + 1
    (names / "stuck").unlink()
    names.rmdir()
    fresh.rmdir()


def epoch_of(daemon: Daemon) -> int:
    spaces: list[dict[str, Any]] = ask(daemon, "/v1/namespaces", admin=True).json["namespaces"]
    return next(int(space["epoch"]) for space in spaces if space["namespace"] == DIGEST)
