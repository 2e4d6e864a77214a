"""``kvhearth serve --listen``: the daemon starts, watches, shows and ends its gateway."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.daemon import Daemon, running_daemon, until
from support.http_door import ask, scraped
from support.remote_raw import PAGE_BYTES, RawSession, close_all, keys_of, refusal_of

from kvhearth.wire.remote import Outcome
from kvhearth_lab.harness import HUNG_S


def pid_of(daemon: Daemon) -> int:
    """Return the gateway process that served last."""
    found: int = daemon.events("gateway.serving")[-1]["pid"]
    return found


def served_at(daemon: Daemon, count: int) -> int:
    """Wait until that many processes have come up, one after another; return the port."""
    until(lambda: len(daemon.events("gateway.serving")) >= count, "the gateway serves")
    port: int = daemon.events("gateway.serving")[0]["port"]
    return port


def test_the_daemon_starts_and_restarts_its_gateway() -> None:
    with running_daemon(listen="127.0.0.1:0", http="127.0.0.1:0") as daemon:
        port = served_at(daemon, 1)
        session = RawSession(port)
        keys = keys_of(1)
        payload = session.store(keys)
        bad = session.reserve(1)
        bad["offset"] += PAGE_BYTES
        assert session.put(bad, bytes(PAGE_BYTES)) == [Outcome.FOREIGN_EXTENT]
        assert refusal_of(lambda: session.open_calls("wrong")) == "unknown_token"
        until(lambda: daemon.counters().get("gateway_bytes{in}"), "counts reach the daemon")
        text = scraped(daemon)
        assert 'kvhearth_gateway_refusals_total{reason="unknown_token"} 1.0' in text
        assert 'kvhearth_gateway_extents_refused_total{outcome="foreign_extent"} 1.0' in text
        assert f'kvhearth_gateway_bytes_total{{direction="in"}} {2 * PAGE_BYTES}.0' in text
        line = f"[i]gateway: its process serves 127.0.0.1:{port}"
        assert line in ask(daemon, "/readyz?verbose").body.decode()
        os.kill(pid_of(daemon), signal.SIGKILL)
        assert served_at(daemon, 2) == port
        session = RawSession(port)
        _, leased = session.look_up(keys)
        assert session.get(leased)[1] == payload
        session.bye()
        daemon.wait_quiet()
        assert daemon.counters()["gateway_restarts"] == 1
        child = pid_of(daemon)
        daemon.terminate()
        assert not Path(f"/proc/{child}").exists()
    close_all()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_gateway_ends_with_its_killed_daemon(*, stopped: bool) -> None:
    with running_daemon(listen="127.0.0.1:0") as daemon:
        served_at(daemon, 1)
        child = pid_of(daemon)
        if stopped:
            os.kill(child, signal.SIGSTOP)
        daemon.kill()
        until(lambda: not Path(f"/proc/{child}").exists(), "the gateway ends")


def test_a_gateway_that_cannot_start_now_starts_later() -> None:
    with running_daemon(listen="127.0.0.1:0") as daemon:
        served_at(daemon, 1)
        before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        few = max(int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd")) + 1
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (few, before[1]))
        os.kill(pid_of(daemon), signal.SIGKILL)
        until(lambda: daemon.events("gateway.cannot_start"), "no descriptor is left")
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
        served_at(daemon, 2)
        assert not [name for name in daemon.counters() if name.startswith("task_failures")]


@pytest.mark.parametrize("said", ["nothing", "a part", "all"])
def test_a_gateway_whose_daemon_dies_at_once_ends_silently(tmp_path: Path, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        message = {
            "settings": {"socket_dir": str(tmp_path), "listen": "127.0.0.1:0"},
            "listener": listener.fileno(),
        }
        line = json.dumps(message).encode() + b"\n"
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer) as stdout:
            ended = subprocess.run(
                [sys.executable, "-m", "kvhearth_server.gateway"],
                input={"nothing": b"", "a part": line[:20], "all": line}[said],
                stdout=stdout,
                stderr=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                timeout=HUNG_S,
                check=False,
            )
    assert ended.returncode == 0
    assert b"Traceback" not in ended.stderr
