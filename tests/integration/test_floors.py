"""The daemon and the command line in this environment's versions; also in `make test-floors`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.daemon import running_daemon
from support.http_door import ANY_PORT, ask
from support.raw_door import PAGE_BYTES, goes_on

from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import contract_of, engine_of

VERBS = ("serve", "top", "ls", "stat", "evict", "forget", "explain", "drain", "doctor", "config")


def test_help() -> None:
    """All in one interpreter, whose start takes longer than they do."""
    asked = [["--help"], *([verb, "--help"] for verb in VERBS)]
    program = f"from kvhearth_server.cli.app import run; print([run(each) for each in {asked}])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HUNG_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"{[0] * len(asked)}\n")
    assert done.stdout.count("Usage") == len(asked)


@pytest.mark.parametrize("calls", ["frames", "grpc"])
def test_a_daemon_stores_and_loads(calls: str) -> None:
    with running_daemon(command=True, http=ANY_PORT) as daemon:
        contract = contract_of(PAGE_BYTES)
        with engine_of(daemon.url(f"calls={calls}"), contract, "engine") as engine:
            goes_on(engine)
        for path in ("/readyz", "/metrics", "/v1/stats", "/v1/sessions", "/openapi.json"):
            assert ask(daemon, path, admin=True).status == 200
        assert ask(daemon, "/v1/sessions").status == 403
        assert daemon.terminate() == 0
