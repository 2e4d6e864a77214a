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

from kvhearth_lab.bench.report import missed
from kvhearth_lab.bench.stalls.figures import CALL_MS_MAX, FIGURES, PARTS, Sizes
from kvhearth_lab.bench.stalls.run import Course, run
from kvhearth_lab.bench.stalls.watched_daemon import Longest
from kvhearth_lab.cli import bench
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
    repeats=2,
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


@pytest.mark.slow
def test_figures_are_times(found: dict[str, Any]) -> None:
    values = {each.name: found[each.name] for each in FIGURES}
    assert {n: v for n, v in values.items() if not (isinstance(v, float) and v > 0)} == {}


@pytest.mark.slow
def test_what_does_not_depend_on_the_machine(found: dict[str, Any]) -> None:
    assert found["quick"] is True
    assert found["books"] == {"balanced": True, "errors": []}
    assert found["missed"] == missed(found, FIGURES)
    assert found["longest_call_cpu_ms"] == max(found[name] for name in PARTS)
    assert found["timer_late_max_ms"] == max(found["timer_late_ms"].values())
    assert all(found["calls"][name] for name in PARTS)


@pytest.mark.slow
def test_the_table_has_every_figure(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for each in bench.stalls_tables(found):
        bench.console().print(each)
    text = capsys.readouterr().out
    assert all(name in text for name in (*(each.name for each in FIGURES), "books"))


@pytest.mark.slow
def test_a_planted_stall_is_found_in_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    found = run(TINY, "support.stalled_daemon")
    assert [each for each in PARTS if found[each] < BURNT_S * 1e3] == []
    assert found["timer_late_max_ms"] >= BURNT_S * 1e3 / 2
    assert found["missed"] == [*PARTS, "longest_call_cpu_ms"]
    assert "burn_now_and_then" in found["calls"].values()


def test_of_several_runs_the_least_counts() -> None:
    courses = []
    for values in ((3.0, 1.0), (1.0, 9.0), (2.0, 4.0)):
        calls = [Longest(value, 2 * value, f"call {value}") for value in values]
        courses.append(Course("m", dict(zip(("growth_ms", "evict_ms"), calls, strict=True))))
    courses[1].book_errors.append("one too many")
    found = Course.least(courses)
    assert found.longest["growth_ms"] == Longest(1.0, 2.0, "call 1.0")
    assert found.longest["evict_ms"].call_cpu_ms == 1.0
    assert found.spread == {"growth_ms": [1.0, 3.0], "evict_ms": [1.0, 9.0]}
    assert found.book_errors == ["one too many"]


def test_a_target_is_met_or_missed() -> None:
    values = dict.fromkeys(PARTS, CALL_MS_MAX)
    assert missed(values, FIGURES) == []
    assert missed({**values, "evict_ms": CALL_MS_MAX + 0.1}, FIGURES) == ["evict_ms"]


@pytest.mark.slow
def test_a_plot_is_drawn_or_says_what_it_needs(
    found: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.png"
    if importlib.util.find_spec("matplotlib") is None:
        assert app.run(["bench", "stalls", "--plot", str(path)]) == app.EXIT_CONFIG
        assert "pip install 'kvhearth[lab]'" in capsys.readouterr().err
        return
    from kvhearth_lab.bench.stalls.figures import draw

    draw(found, path)
    assert path.read_bytes().startswith(b"\x89PNG")
