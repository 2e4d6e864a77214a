"""The daemon's log: attached and lost engines, operator actions, and the totals of a run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.http_door import ANY_PORT, ask

from kvhearth.contract import namespace_digest
from kvhearth.version import PROTOCOL_VERSION, __version__
from kvhearth.wire import handshake as wire
from kvhearth_lab.harness import daemon as harness
from kvhearth_lab.harness.engine import contract_of, engine_of
from kvhearth_server.cli import app

PAGE = 64 << 10
CONTRACT = contract_of(PAGE)
DIGEST = namespace_digest("default", CONTRACT).hex()
KEYS = [bytes([number]) * 32 for number in range(1, 9)]
UNKNOWN = "f" * 64
FIRST_LINE_CHARS_MAX = 200


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon(arena=False, http="127.0.0.1:0") as daemon:
        yield daemon


def lines(daemon: Daemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.own_lines() if line.startswith("{")]


def event(daemon: Daemon, name: str) -> dict[str, Any]:
    """Returns the one line of an event; waits for it."""
    until(lambda: daemon.events(name), f"{name} is told")
    (line,) = daemon.events(name)
    return line


def placed_by_default(
    flags: list[str], environment: Mapping[str, str], log: IO[bytes]
) -> harness.Process:
    """Starts a daemon without a socket directory, where /dev/shm is small; root only."""
    at = flags.index("--socket-dir")
    script = 'mount -t tmpfs -o size=8M none /dev/shm && mount -t tmpfs none /run && exec "$@"'
    start = harness.tied(before=["unshare", "-m", "sh", "-c", script, "sh"])
    return start(flags[:at] + flags[at + 2 :], environment, log)


@contextlib.contextmanager
def attached(daemon: Daemon, engine_id: str) -> Iterator[None]:
    """An engine that maps nothing, and leaves without a goodbye."""
    said = wire.Hello(PROTOCOL_VERSION, engine_id, CONTRACT.to_json(), map_arena=False)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(daemon.socket_dir / "attach.sock"))
        line.sendall(wire.encode_frame(said.to_message()))
        (answer,) = wire.FrameDecoder().feed(line.recv(1 << 16))
        assert answer["kind"] == "welcome", answer
        yield


def lose(daemon: Daemon, engine_id: str) -> None:
    """Attaches an engine and drops it."""
    with attached(daemon, engine_id):
        pass


def test_a_default_arena_that_does_not_fit_is_told() -> None:
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("needs root, and a namespace of mounts")
    with stopped_daemon(arena=False, starter=placed_by_default, http=ANY_PORT) as daemon:
        daemon.launch()
        assert daemon.ready()["level"] == "info"
        told = event(daemon, "arena.anonymous")
        assert told["level"] == "warning"
        assert told["reason"].startswith("/dev/shm has 8MiB free, and the arena takes 81MiB")
        assert f"[!]memory: {told['reason']}" in ask(daemon, "/readyz?verbose").body.decode()
        assert daemon.terminate() == 0


def test_the_first_line_is_short_and_has_the_version(daemon: Daemon) -> None:
    first = daemon.own_lines()[0]
    found = json.loads(first)
    assert len(first) < FIRST_LINE_CHARS_MAX
    assert (found["event"], found["version"]) == ("daemon.starting", __version__)
    assert daemon.process is not None
    assert (found["pid"], found["memory"]) == (daemon.process.pid, "16MiB")
    assert daemon.events("daemon.settings") == []


def test_all_settings_are_told_for_debugging() -> None:
    with running_daemon(arena=False, log_level="debug") as daemon:
        assert event(daemon, "daemon.settings")["memory"] == 16 << 20


def test_a_decimal_memory_is_rounded_down_and_told() -> None:
    with running_daemon(arena=False, memory="20M") as daemon:
        found = event(daemon, "memory.rounded")
        reported = (found["of"], found["asked_bytes"], found["used_bytes"])
        assert reported == ("memory", 20_000_000, 18 << 20)
        assert daemon.stats().segments[0].capacity_bytes == 18 << 20


def test_who_attaches_and_who_leaves(daemon: Daemon) -> None:
    with engine_of(daemon.url(), CONTRACT, "e1") as engine:
        engine.wait_ready()
        found = event(daemon, "engine.attached")
        assert (found["engine_id"], found["uid"], found["pid"]) == ("e1", os.getuid(), os.getpid())
        assert (found["tenant"], found["namespace"]) == ("default", DIGEST[:12])
        assert (found["rank"], found["epoch"]) == (0, engine.client.epoch)
    left = event(daemon, "engine.left")
    assert (left["engine_id"], left["session"]) == ("e1", found["session"])
    assert daemon.events("engine.lost") == []


def test_an_engine_that_is_lost(daemon: Daemon) -> None:
    lose(daemon, "e2")
    found = event(daemon, "engine.lost")
    assert (found["engine_id"], found["level"]) == ("e2", "warning")
    assert (found["uid"], found["pid"]) == (os.getuid(), os.getpid())
    assert found["namespace"] == DIGEST[:12]


def test_who_is_attached_when_the_daemon_ends_is_not_lost(daemon: Daemon) -> None:
    with attached(daemon, "e3"):
        assert daemon.terminate() == 0
    assert daemon.events("engine.lost") == []


@pytest.mark.parametrize("door", ["unix", "http"])
def test_what_operators_do(daemon: Daemon, capsys: pytest.CaptureFixture[str], door: str) -> None:
    with engine_of(daemon.url(), CONTRACT, "e1") as engine:
        engine.wait_ready()
        assert engine.store(KEYS).bound == KEYS
        epoch = engine.client.epoch
    for verb, words, path in (
        ("evict", ("evict", DIGEST, "--keep", "256KiB"), f"namespaces/{DIGEST}:evict"),
        (
            "forget",
            ("forget", DIGEST, "--yes", "--label=step 2"),
            f"namespaces/{DIGEST}:bump-epoch",
        ),
        ("drain", ("drain",), "admin:drain"),
    ):
        if door == "http":
            bodies = {"evict": b'{"keep_bytes": 262144}', "forget": b'{"label": "step 2"}'}
            body = bodies.get(verb)
            assert ask(daemon, f"/v1/{path}", "POST", body, admin=True).status == 200
        else:
            assert app.run([*words, "--socket-dir", str(daemon.socket_dir)]) == 0
        found = event(daemon, f"admin.{verb}")
        assert (found["result"], found["level"]) == ("done", "info")
        wanted = "unix" if door == "unix" else r"127\.0\.0\.1:\d+"
        assert re.fullmatch(wanted, found["peer"])
        assert verb == "drain" or found["namespace"] == DIGEST
    assert event(daemon, "admin.evict")["evicted_blocks"] == 4
    forgotten = event(daemon, "admin.forget")
    assert (forgotten["epoch"], forgotten["label"]) == (epoch + 1, "step 2")


def test_an_engine_that_voids_blocks_is_told(daemon: Daemon) -> None:
    with engine_of(daemon.url(), CONTRACT, "e1") as engine:
        engine.wait_ready()
        engine.client.bump_epoch()
        found = event(daemon, "engine.bumped")
        told = (found["uid"], found["pid"], found["tenant"], found["epoch"])
        assert told == (os.getuid(), os.getpid(), "default", engine.client.epoch)


def test_a_process_that_is_refused_is_told(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(daemon.socket_dir / "attach.sock"))
        line.sendall(wire.encode_frame({"kind": "what"}))
        line.recv(1 << 16)
    found = event(daemon, "attach.refused")
    assert (found["uid"], found["pid"]) == (os.getuid(), os.getpid())
    assert (found["tenant"], found["reason"]) == ("default", "bad_message")


def test_what_operators_are_refused(daemon: Daemon) -> None:
    path = f"/v1/namespaces/{UNKNOWN}:evict"
    assert ask(daemon, path, "POST", admin=True).status == 404
    found = event(daemon, "admin.evict")
    reported = (found["result"], found["namespace"], found["level"])
    assert reported == ("unknown_namespace", UNKNOWN, "warning")
    for _ in range(20):
        assert ask(daemon, path, "POST").status == 403
    refused = daemon.events("admin.refused")
    assert 0 < len(refused) < 20
    assert refused[0]["result"] == "not_admin"


def test_a_run_ends_with_a_summary(daemon: Daemon) -> None:
    with engine_of(daemon.url(), CONTRACT) as engine:
        engine.wait_ready()
        assert engine.store(KEYS).bound == KEYS
        engine.client.lookup({0: [*KEYS, b"\0" * 32]}, lease=False)
    assert daemon.terminate() == 0
    assert event(daemon, "daemon.draining")["cause"] == "SIGTERM"
    found = lines(daemon)[-1]
    assert found["event"] == "daemon.stopped"
    assert (found["hit_keys"], found["miss_keys"], found["stored_blocks"]) == (8, 1, 8)
    assert (found["evicted_blocks"], found["promoted_blocks"], found["lookups"]) == (0, 0, 1)
    assert found["uptime_s"] > 0


def test_a_hangup_is_told_and_survived(daemon: Daemon) -> None:
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGHUP)
    assert event(daemon, "daemon.hangup")["level"] == "warning"
    assert not daemon.stats().draining
    assert daemon.terminate() == 0


def test_people_read_the_same_events(tmp_path: Path) -> None:
    with stopped_daemon(arena=False, log_format="console") as daemon:
        daemon.start()
        lose(daemon, "e7")
        until(lambda: "engine.lost" in daemon.log_text(), "the loss is told")
        (line,) = [one for one in daemon.own_lines() if "engine.attached" in one]
        assert "engine_id=e7" in line
        assert f"pid={os.getpid()}" in line
        assert daemon.terminate() == 0
        assert daemon.own_lines()[0].count("daemon.starting") == 1
        assert "daemon.stopped" in daemon.own_lines()[-1]
