"""``kvhearth bench stalls`` runs and fills every field, and finds a planted stall."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.stalled_daemon import BURNT_S

from kvhearth_lab.bench.stalls.figures import CALL_MS_MAX, FIGURES, PARTS, missed
from kvhearth_lab.bench.stalls.run import run
from kvhearth_lab.bench.stalls.sizes import Sizes
from kvhearth_lab.cli import bench_stalls
from kvhearth_server.cli import app

RUN_S = 280.0
"""A quick run takes seconds; a shared machine may need longer."""
pytestmark = pytest.mark.timeout(RUN_S + 20)
TINY = Sizes(
    growth=2000,
    namespaces=(2,),
    full_slabs=1,
    rounds=1,
    many=3000,
    clients=2,
    clients_s=0.5,
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Returns the last line of a quick run."""
    command = [sys.executable, "-m", "kvhearth_server.cli.app", "bench", "stalls", "--quick"]
    ended = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    last: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return last


@pytest.mark.parametrize("name", [each.name for each in FIGURES])
def test_a_figure_is_a_time(found: dict[str, Any], name: str) -> None:
    assert isinstance(found[name], float)
    assert found[name] > 0


def test_what_does_not_depend_on_the_machine(found: dict[str, Any]) -> None:
    assert found["quick"] is True
    assert found["books"] == {"balanced": True, "errors": []}
    assert found["missed"] == missed(found)
    assert found["longest_call_cpu_ms"] == max(found[name] for name in PARTS)
    assert found["timer_late_max_ms"] == max(found["timer_late_ms"].values())
    assert all(found["calls"][name] for name in PARTS)


def test_the_table_has_every_figure(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    bench_stalls.console().print(bench_stalls.shown(found))
    text = capsys.readouterr().out
    assert all(name in text for name in (*(each.name for each in FIGURES), "books"))


def test_a_planted_stall_is_found_in_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    found = run(TINY, "support.stalled_daemon")
    assert [each for each in PARTS if found[each] < BURNT_S * 1e3] == []
    assert found["timer_late_max_ms"] >= BURNT_S * 1e3 / 2
    assert found["missed"] == [*PARTS, "longest_call_cpu_ms"]
    assert "burn_now_and_then" in found["calls"].values()


def test_a_target_is_met_or_missed() -> None:
    values = dict.fromkeys(PARTS, CALL_MS_MAX)
    assert missed(values) == []
    assert missed({**values, "evict_ms": CALL_MS_MAX + 0.1}) == ["evict_ms"]


def test_a_plot_is_drawn_or_says_what_it_needs(
    found: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.png"
    if importlib.util.find_spec("matplotlib") is None:
        assert app.run(["bench", "stalls", "--plot", str(path)]) == app.EXIT_CONFIG
        assert "pip install 'kvhearth[lab]'" in capsys.readouterr().err
        return
    from kvhearth_lab.bench.stalls.plot import draw

    draw(found, path)
    assert path.read_bytes().startswith(b"\x89PNG")
