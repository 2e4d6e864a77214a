"""``kvhearth bench remote`` measures a real gateway; the machine's speed is not asserted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvhearth_lab.bench.peers.adapters.harness import CONNECTIONS
from kvhearth_lab.bench.remote.figures import FIGURES, PEERS
from kvhearth_lab.bench.report import missed


@pytest.mark.slow
def test_a_quick_run_has_every_figure() -> None:
    command = [sys.executable, "-m", "kvhearth_server.cli.app", "bench", "remote", "--quick"]
    ended = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    own = [each for each in FIGURES if "_vs_" not in each.name]
    assert [each.name for each in own if type(found[each.name]) not in (int, float)] == []
    assert found["missed"] == missed(found, FIGURES)
    assert found["books"] == {"balanced": True, "errors": []}
    assert set(found["skipped"]) == set(PEERS)
    for side in ("sockets", "kvhearth", "unverified", "tls"):
        for operation in ("put", "get"):
            assert list(found["gbs"][side][operation]) == [str(count) for count in CONNECTIONS]
            assert min(found["gbs"][side][operation].values()) > 0
    assert "put_ratio" in ended.stderr
