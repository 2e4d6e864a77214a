"""The daemon's log: attached and lost engines, operator actions, and the totals of a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from typing import IO, Any

import pytest
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.http_door import ANY_PORT, ask
from support.raw_door import RawLine, RawSession, attach_path, raw_hello

from kvhearth.contract import namespace_digest
from kvhearth.errors import KVHearthError
from kvhearth.version import __version__
from kvhearth.wire.handshake import encode_frame
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


def test_a_runs_log(daemon: Daemon) -> None:
    """From the first line to the summary: engines that come, change, leave and are lost."""
    first = daemon.own_lines()[0]
    found = json.loads(first)
    assert len(first) < FIRST_LINE_CHARS_MAX
    assert (found["event"], found["version"]) == ("daemon.starting", __version__)
    assert (found["pid"], found["memory"]) == (daemon.pid, "16MiB")
    assert daemon.events("daemon.settings") == []
    me = {"uid": os.getuid(), "pid": os.getpid(), "tenant": "default"}
    with engine_of(daemon.url(), CONTRACT, "e1") as engine:
        engine.wait_ready()
        came = event(daemon, "engine.attached")
        assert came.items() >= {**me, "engine_id": "e1", "namespace": DIGEST[:12]}.items()
        assert (came["rank"], came["epoch"]) == (0, engine.client.epoch)
        engine.client.bump_epoch()
        bumped = event(daemon, "engine.bumped")
        assert bumped.items() >= {**me, "epoch": engine.client.epoch}.items()
        assert engine.store(KEYS).bound == KEYS
        engine.client.lookup({0: [*KEYS, b"\0" * 32]}, lease=False)
    left = event(daemon, "engine.left")
    assert (left["engine_id"], left["session"]) == ("e1", came["session"])
    assert daemon.events("engine.lost") == []
    RawSession(daemon, engine_id="e2", contract=CONTRACT.to_json()).close(bye=False)
    lost = event(daemon, "engine.lost")
    wanted = {**me, "engine_id": "e2", "namespace": DIGEST[:12], "level": "warning"}
    assert lost.items() >= wanted.items()
    with pytest.raises(KVHearthError):
        RawSession(daemon, kind="what")
    assert event(daemon, "attach.refused").items() >= {**me, "reason": "bad_message"}.items()
    os.kill(daemon.pid, signal.SIGHUP)
    assert event(daemon, "daemon.hangup")["level"] == "warning"
    assert not daemon.stats().draining
    with RawSession(daemon, engine_id="e3"):
        assert daemon.terminate() == 0
    assert daemon.events("engine.lost") == [lost], "who is attached at the end is not lost"
    assert event(daemon, "daemon.draining")["cause"] == "SIGTERM"
    (found,) = daemon.events("daemon.stopped")
    assert json.loads(daemon.own_lines()[-1]) == found
    assert (found["hit_keys"], found["miss_keys"], found["stored_blocks"]) == (8, 1, 8)
    assert (found["evicted_blocks"], found["promoted_blocks"], found["lookups"]) == (0, 0, 1)
    assert found["uptime_s"] > 0


def test_engines_cannot_flood_the_log(daemon: Daemon) -> None:
    hello = encode_frame(raw_hello())

    def held_back() -> int:
        for _ in range(100):
            with RawLine(attach_path(daemon)) as line:
                line.send(hello)
                line.answer()
        return sum(each.get("suppressed", 0) for each in daemon.events("engine.lost"))

    until(held_back, "those that were held back are told")


def test_people_read_the_same_events() -> None:
    """All settings are told for debugging, and memory that was rounded down."""
    settings = {"log_format": "console", "log_level": "debug", "memory": "20M"}
    with running_daemon(arena=False, **settings) as daemon:
        RawSession(daemon, engine_id="e7").close(bye=False)
        until(lambda: "engine.lost" in daemon.log_text(), "the loss is told")
        (line,) = [one for one in daemon.own_lines() if "engine.attached" in one]
        assert f"pid={os.getpid()}" in line
        assert "engine_id=e7" in line
        (rounded,) = [one for one in daemon.own_lines() if "memory.rounded" in one]
        for word in ("of=memory", "asked_bytes=20000000", f"used_bytes={18 << 20}"):
            assert word in rounded
        assert daemon.stats().segments[0].capacity_bytes == 18 << 20
        assert [one for one in daemon.own_lines() if "daemon.settings" in one and "memory=" in one]
        assert daemon.terminate() == 0
        assert daemon.own_lines()[0].count("daemon.starting") == 1
        assert "daemon.stopped" in daemon.own_lines()[-1]


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
