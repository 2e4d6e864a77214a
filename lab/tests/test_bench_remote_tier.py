"""``kvhearth bench remote-tier``: its figures, of which only those of faults are checked."""

from __future__ import annotations

import json

import pytest

from kvhearth_lab.bench.remote_tier.figures import STALL_FIGURES, figures_of
from kvhearth_server.cli.app import run


def test_the_null_bucket_is_measured(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("obstore")
    assert run(["bench", "remote-tier", "--quick", "--json"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    (values,) = found["drivers"].values()
    assert set(values) >= {each.name for each in figures_of("null")}
    assert all(values[name] > 0 for name in ("put_ratio", "vs_plain_get"))
    assert set(found) >= {each.name for each in STALL_FIGURES}
    assert found["late_bytes"] == 0
    assert found["stall_freed_s"] > 0
