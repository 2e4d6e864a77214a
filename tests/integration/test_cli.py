"""The verbs of ``kvhearth`` against a real daemon: text, JSON, exit codes, and causes of misses."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.entry_point import kvhearth
from support.http_door import ANY_PORT, ask, scraped
from support.raw_door import RawSession, raw_contract

from kvhearth.contract import namespace_digest
from kvhearth.version import __version__
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness import daemon as harness
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of
from kvhearth_server.cli import app
from kvhearth_server.cli import top as top_verbs

PAGE_BYTES = 64 << 10
CONTRACT = contract_of(PAGE_BYTES, shards=2)
DIGEST = namespace_digest("default", CONTRACT).hex()
KEYS = [bytes([number]) * 32 for number in range(1, 9)]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(arena=False) as daemon:
        yield daemon
        daemon.wait_quiet()


@pytest.fixture(scope="module")
def engine(daemon: Daemon) -> Iterator[Engine]:
    with engine_of(daemon.url(), CONTRACT, "e[red]1") as engine:
        engine.wait_ready()
        assert engine.store(KEYS).bound == KEYS
        yield engine


@pytest.fixture
def run(
    daemon: Daemon,
    engine: Engine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Runs the command in this process, for the module's daemon: exit code, stdout, stderr."""
    monkeypatch.setenv("KVHEARTH_SOCKET_DIR", str(daemon.socket_dir))

    def call(*words: str) -> tuple[int, str, str]:
        code = app.run(words)
        return code, *capsys.readouterr()

    return call


def asked(run: Run, *words: str) -> Any:
    """Returns the verb's --json output; the verb succeeds with one line and an empty stderr."""
    code, out, err = run(*words, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    return json.loads(out)


def reported(run: Run, *words: str) -> str:
    """Returns the verb's text output; the verb succeeds, and stdout has no escapes."""
    code, out, _ = run(*words)
    assert code == 0
    assert "\x1b" not in out
    return out


def test_stat(run: Run, daemon: Daemon) -> None:
    found = asked(run, "stat")
    assert (found["version"], found["blocks"], found["draining"]) == (__version__, 8, False)
    assert found["segments"][0]["capacity_bytes"] == 16 << 20
    assert found["segments"][0]["committed_bytes"] == 16 * PAGE_BYTES
    assert found["counters"]["stored_blocks"] == 8
    assert found["boot_id"] == daemon.stats().boot_id
    text = reported(run, "stat")
    assert "stored_blocks" in text
    assert "16 MiB" in text


def test_health_needs_no_token(run: Run, daemon: Daemon) -> None:
    assert run("health") == (0, "serving\n", "")
    assert asked(run, "health") == {
        "serving": True,
        "problem": "",
        "degraded": [],
        "doors_shut": [],
    }


def test_ls(run: Run, engine: Engine) -> None:
    (space,) = asked(run, "ls")["namespaces"]
    assert asked(run, "ls", DIGEST[:4]) == space
    assert (space["namespace"], space["tenant"], space["blocks"]) == (DIGEST, "default", 8)
    assert (space["used_bytes"], space["epoch"]) == (16 * PAGE_BYTES, engine.client.epoch)
    assert space["contract"] == json.loads(CONTRACT.to_json())
    assert DIGEST[:12] in reported(run, "ls")
    text = reported(run, "ls", DIGEST[:4])
    assert DIGEST in text
    assert "page_bytes=65536" in text
    assert run("ls", "zz") == (
        *(1, ""),
        "kvhearth: error: no namespace starts with 'zz'; kvhearth ls lists all of them\n",
    )


def test_local_models_are_told_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contracts name a path, or the digest of a directory whose name the engine tells."""
    engines = [
        {"model": "/a/llama/", "revision": "r"},
        {"model": "/b/llama", "revision": "r"},
        {"model": "directory", "revision": "1" * 64, "model_name": "llama"},
        {"model": "directory", "revision": "2" * 64, "model_name": "llama"},
        {"model": "org/llama", "revision": "r"},
    ]
    with running_daemon(http=ANY_PORT) as daemon:
        monkeypatch.setenv("KVHEARTH_SOCKET_DIR", str(daemon.socket_dir))
        for told in engines:
            made = raw_contract(model=told["model"], revision=told["revision"]).to_json()
            names = {"model_name": told["model_name"]} if "model_name" in told else {}
            with RawSession(daemon, contract=made, **names):
                pass
        for _ in range(2):
            assert app.run(["ls", "--json"]) == 0
            spaces = json.loads(capsys.readouterr().out)["namespaces"]
            names = [space["model"] for space in spaces]
            assert len(set(names)) == len(engines)
            assert names[-1] == "org/llama"
            assert all(re.fullmatch("llama#[0-9a-f]{4}", name) for name in names[:-1]), names
            assert app.run(["ls"]) == 0
            shown = capsys.readouterr().out
            assert all(name in shown for name in names)
            stats = ask(daemon, "/v1/stats").json
            assert [space["model"] for space in stats["busiest_namespaces"]] == names
            assert all(f'model="{name}"' in scraped(daemon) for name in names)
            daemon.restart()


def test_sessions(run: Run) -> None:
    found = asked(run, "sessions")["sessions"]
    assert {(one["engine_id"], one["rank"], one["pid"]) for one in found} == {
        ("e[red]1", 0, os.getpid()),
        ("e[red]1", 1, os.getpid()),
    }
    assert {one["namespace"] for one in found} == {DIGEST}
    text = reported(run, "sessions")
    assert "e[red]1" in text, "what an engine is called is no markup"
    assert "scheduler + rank 0 of 2" in text


def test_leases(run: Run, engine: Engine) -> None:
    began = time.monotonic()
    assert asked(run, "leases")["groups"] == []
    first = engine.client.lookup({0: KEYS[:2]})
    second = engine.client.lookup({0: KEYS[:4]})
    until(lambda: sum(g["leases"] for g in asked(run, "leases")["groups"]) == 2, "both arrive")
    (held,) = asked(run, "leases")["groups"]
    assert (held["engine_id"], held["namespace"]) == ("e[red]1", DIGEST)
    assert (held["leases"], held["slots"], held["bytes"]) == (2, 12, 12 * PAGE_BYTES)
    assert 0 < held["oldest_s"] < time.monotonic() - began
    assert DIGEST[:12] in reported(run, "leases")
    engine.client.release(first.lease)
    until(lambda: asked(run, "leases")["groups"][0]["leases"] == 1, "the release arrives")
    (left,) = asked(run, "leases")["groups"]
    assert left["slots"] == 8
    engine.client.release(second.lease)
    until(lambda: asked(run, "leases")["groups"] == [], "the release arrives")
    assert "nobody holds a lease" in run("leases")[2]


def test_why_a_key_is_no_miss(run: Run, engine: Engine) -> None:
    pin = engine.pin(KEYS[:1], 60)
    found = asked(run, "explain", KEYS[0].hex())
    assert (found["kind"], found["key"]) == ("key", KEYS[0].hex())
    (place,) = found["places"]
    assert (place["namespace"], place["tenant"], place["kv_group"]) == (DIGEST, "default", 0)
    assert (place["state"], place["tier"]) == ("summed", "dram")
    assert place["why_not"] == ""
    assert place["epoch"] == place["namespace_epoch"] == engine.client.epoch
    assert (place["leases"], place["pins"]) == (0, 1)
    assert (place["shard_bytes"], place["shards"]) == (PAGE_BYTES, 2)
    text = reported(run, "explain", KEYS[0].hex())
    assert "served" in text
    assert "0 leases, 1 pins" in text
    engine.client.unpin(pin)
    until(lambda: asked(run, "stat")["pins"] == 0, "the unpin arrives")


def test_pins_are_listed_and_ended(run: Run, engine: Engine) -> None:
    assert "nothing is pinned" in run("pins")[2]
    for name, seconds in (("agent-7", 60), ("agent-8", 50), ("agent-8", 40), ("", 30)):
        engine.client.pin({0: KEYS[:2]}, seconds, name)
    found = asked(run, "pins")["pins"]
    assert [each["session"] for each in found] == ["", "agent-8", "agent-8", "agent-7"]
    assert {each["namespace"] for each in found} == {DIGEST}
    assert {each["blocks"] for each in found} == {2}
    assert {each["bytes"] for each in found} == {asked(run, "stat")["segments"][0]["pinned_bytes"]}
    assert 0 < found[0]["ends_in_s"] <= 30
    assert "agent-7" in reported(run, "pins")
    assert asked(run, "stat")["retained_blocks"] == 2
    assert asked(run, "unpin", "--session", "agent-8")["ended_pins"] == 2
    assert asked(run, "unpin", DIGEST[:8], "--session", "agent-7")["ended_pins"] == 1
    assert asked(run, "unpin", DIGEST[:8])["ended_pins"] == 1
    engine.client.pin({0: KEYS[:2]}, 60)
    assert "1 pins have ended" in reported(run, "unpin", "--all")
    assert asked(run, "stat")["retained_blocks"] == 0
    for wrong in ([], ["--all", "--session", "s"], ["ffff", "--all"]):
        code, _, err = run("unpin", *wrong)
        assert code
        assert "--all" in err
    assert run("unpin", "ffff")[0] == 1


def test_why_a_key_that_is_absent_is_a_miss(run: Run) -> None:
    code, out, err = run("explain", "ff" * 32, "--json")
    assert (code, json.loads(out)["places"], err) == (1, [], "")
    code, out, _ = run("explain", "ff" * 32)
    assert (code, "is absent" in out) == (1, True)
    code, _, err = run("explain", "ff")
    assert code == 1
    assert "a key has 16..64 bytes, this one has 1" in err


def test_which_fields_of_a_contract_make_a_miss(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(json.loads(CONTRACT.to_json()), indent=2))
    found = asked(run, "explain", str(path))
    assert (found["kind"], found["exists"], found["namespace"]) == ("contract", True, DIGEST)
    assert "exists" in reported(run, "explain", str(path))
    path.write_text(contract_of(PAGE_BYTES, shards=2, model="other").to_json())
    found = asked(run, "explain", str(path))
    assert not found["exists"]
    (near,) = found["nearest"]
    assert near["namespace"] == DIGEST
    assert near["fields"] == [{"field": "model", "asked": "other", "stored": "m"}]
    text = reported(run, "explain", str(path))
    assert f"namespace {DIGEST[:12]} differs in 1:" in text
    assert "other" in text


def test_top(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(run, "top", "--once")
    assert set(found) == {"stats", "rates", "sessions", "leases"}
    assert found["rates"]["stored_blocks"] > 0
    assert len(found["sessions"]) == 2
    text = reported(run, "top", "--once")
    assert "hit ratio" in text
    assert "e[red]1" in text
    looks = iter((None, None))

    def sleep(_: float) -> None:
        if next(looks, "end") == "end":
            raise KeyboardInterrupt

    monkeypatch.setattr(top_verbs.time, "sleep", sleep)
    code, out, err = run("top", "--json")
    assert (code, err) == (0, "")
    views = [json.loads(line) for line in out.splitlines()]
    assert len(views) == 3
    assert views[0]["rates"]["stored_blocks"] > 0 == views[2]["rates"]["stored_blocks"]
    looks = iter((None, None))
    assert reported(run, "top").count("hit ratio") == 3, "into a pipe each look is printed"


def test_evict(run: Run, engine: Engine) -> None:
    found = asked(run, "evict", DIGEST[:6], "--keep", "512KiB")
    assert (found["namespace"], found["evicted_blocks"]) == (DIGEST, 4)
    code, out, _ = run("evict", DIGEST, "--keep", "0")
    assert (code, out) == (0, f"4 blocks of {DIGEST[:12]} are removed\n")
    assert asked(run, "stat")["blocks"] == 0
    assert run("explain", KEYS[0].hex())[0] == 1
    assert engine.store(KEYS).bound == KEYS


def test_why_a_key_of_an_old_epoch_is_a_miss(run: Run, engine: Engine) -> None:
    engine.client.bump_epoch()
    (place,) = asked(run, "explain", KEYS[0].hex())["places"]
    now = engine.client.epoch
    assert (place["epoch"], place["namespace_epoch"]) == (now - 1, now)
    assert f"its weights epoch {now - 1} is not the namespace's {now}" in place["why_not"]
    assert "not served" in reported(run, "explain", KEYS[0].hex())


PARSED = """
import os, sys
from kvhearth.url import parse_url
for text in (sys.argv[1], "/" + chr(0xE4), "/%C3%A4"):
    for calls in ("frames", "grpc"):
        url = parse_url(f"kvhearth+unix://{text}?calls={calls}")
        assert os.fsencode(url.socket_dir) == b"/\\xc3\\xa4", url
        assert url.grpc_target.encode() == b"unix:/\\xc3\\xa4/grpc.sock", url
os.environ["XDG_RUNTIME_DIR"] = os.getcwd()
os.geteuid = lambda: 61000
assert os.fsencode(parse_url("kvhearth+unix:").socket_dir) == os.getcwdb() + b"/kvhearth"
"""


def test_a_path_that_is_not_ascii_in_an_ascii_locale(tmp_path: Path) -> None:
    """From a terminal that can show none of it, too."""
    names = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, **names, "PYTHONIOENCODING": "ascii"}
    place = tmp_path / "ä"
    place.mkdir()

    def python(*words: str) -> tuple[int, str]:
        command = [sys.executable, *words]
        done = subprocess.run(
            command, capture_output=True, env=environment, cwd=place, check=False, timeout=HUNG_S
        )
        text = (done.stdout + done.stderr).decode()
        return done.returncode, text

    def say(*words: str) -> tuple[int, str]:
        code, text = python("-m", "kvhearth_server.cli.app", *words)
        assert "Traceback" not in text, text
        return code, text

    assert python("-c", PARSED, "/ä") == (0, "")
    assert say("init", "--dir", str(place))[0] == 0
    with stopped_daemon(arena=False, starter=harness.SERVE) as daemon:
        daemon.environment = environment
        daemon.socket_dir = place / "s"
        daemon.start()
        assert say("stat", "--socket-dir", str(daemon.socket_dir))[0] == 0
        daemon.kill()
    code, text = say("stat", "--socket-dir", str(place / "t"))
    assert code == app.EXIT_OTHER
    assert r"\xe4/t/admin.sock" in text
    code, text = say("ls", "--socket-dir", os.fsdecode(b"/\xff"))
    assert code == app.EXIT_CONFIG
    assert "not UTF-8" in text


ENDING = """
import atexit, threading
atexit.register(print, "at its end")
threading.Thread(target=threading.Event().wait).start()
"""
"""Statements before a command: a thread that never ends, as a library may leave one."""


@cases(("words", "code"), [(["--version"], 0), (["stat"], 1), (["nothing"], 2)])
def test_a_command_ends_with_its_code_and_all_that_it_printed(
    tmp_path: Path, words: list[str], code: int
) -> None:
    done = kvhearth(*words, prelude=ENDING, KVHEARTH_SOCKET_DIR=str(tmp_path))
    assert done.returncode == code, done.stderr
    *printed, last = done.stdout.splitlines()
    assert last == "at its end"
    assert bool(printed) == (code == 0) == (not done.stderr)


def test_completion_in_a_real_bash(tmp_path: Path) -> None:
    """Installs completion as the help says, into a temporary home, and presses Tab."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
    }
    script = """
    kvhearth --install-completion bash >/dev/null
    . "$HOME/.bashrc"
    ask() {
      COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvhearth_completion kvhearth
      echo "${COMPREPLY[@]}"
    }
    ask kvhearth e
    ask kvhearth config s
    ask kvhearth health --w
    """
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=HUNG_S,
    )
    assert done.stderr == ""
    assert [sorted(line.split()) for line in done.stdout.splitlines()] == [
        ["events", "evict", "explain"],
        ["sample", "show"],
        ["--wait"],
    ]


def test_drain_then_gone(capsys: pytest.CaptureFixture[str]) -> None:
    with running_daemon(arena=False) as daemon:
        words = ["drain", "--wait", "5", "--json", "--socket-dir", str(daemon.socket_dir)]
        assert app.run(words) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["draining"], found["leases"], found["reserved_bytes"]) == (True, 0, 0)
        words.remove("--json")
        assert app.run(words) == 0
        assert capsys.readouterr().out.startswith("draining: 0 sessions, 0 leases")
        words = ["health", "--socket-dir", str(daemon.socket_dir)]
        until(lambda: app.run(words) == 1, "probes hear that it drains")
        assert "the daemon drains" in capsys.readouterr().err
        daemon.kill()
        assert app.run(["top", "--socket-dir", str(daemon.socket_dir)]) == 1
        assert "no daemon answers at" in capsys.readouterr().err


def test_health_waits_for_a_daemon_that_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with stopped_daemon(arena=False) as daemon:
        daemon.launch()
        assert app.run(["health", "--wait", "20", "--socket-dir", str(daemon.socket_dir)]) == 0
        assert capsys.readouterr().out == "serving\n"


def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        stopped_daemon(arena=False, command=True) as daemon,
    ):
        path = daemon.folder / "n"
        systemd.bind(str(path))
        systemd.settimeout(HUNG_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        daemon.start()
        assert [systemd.recv(64) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
        assert daemon.process is not None
        daemon.process.terminate()
        while (heard := systemd.recv(64)) != b"STOPPING=1":  # a full socket accepts no more
            assert heard == b"WATCHDOG=1"
        assert daemon.process.wait(HUNG_S) == 0
        ready = next(line for line in daemon.log_text().splitlines() if '"ready"' in line)
        said = json.loads(ready)
        assert (said["memory_bytes"], len(said["boot_id"]), len(said["pages"])) == (16 << 20, 32, 1)
        sockets = {Path(said[name]) for name in ("attach", "calls", "grpc")}
        assert sockets == {daemon.socket_dir / f"{n}.sock" for n in ("attach", "calls", "grpc")}
