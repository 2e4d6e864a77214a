"""``kvhearth bench local`` runs and fills every field; the measured values are not asserted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from kvhearth_lab.bench.local.figures import FIGURES, FULL, MEMORY_BYTES_MIN, QUICK, sizes_of
from kvhearth_lab.bench.report import Figure, median_of, missed, p50, p99, ratio_of
from kvhearth_lab.cli import bench
from kvhearth_server.cli import app

RUN_S = 280.0
"""A quick run takes seconds; a shared machine may need longer."""
pytestmark = pytest.mark.timeout(RUN_S + 20)
NUMBERS = (*(each.name for each in FIGURES), "blocks", "stored_blocks", "seconds")
SPREADS = (
    "store_ratio",
    "store_sealed_ratio",
    "load_ratio",
    "load_unverified_ratio",
    "first_touch_ratio",
    "metrics_overhead",
    "metrics_delay",
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Returns the last line of a quick run."""
    command = [sys.executable, "-m", "kvhearth_server.cli.app", "bench", "local", "--quick"]
    ended = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    last: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return last


@pytest.mark.slow
def test_figures_are_numbers_with_their_spreads(found: dict[str, Any]) -> None:
    assert [name for name in NUMBERS if type(found[name]) not in (int, float)] == []
    spreads = {name: found["spread"][name] for name in SPREADS}
    assert [n for n, (low, high) in spreads.items() if not low <= found[n] <= high] == []


@pytest.mark.slow
def test_what_does_not_depend_on_the_machine(found: dict[str, Any]) -> None:
    assert found["quick"] is True
    assert found["blocks"] == QUICK.blocks
    assert found["dropped_stores"] == 0
    assert found["stored_blocks"] > QUICK.blocks
    assert found["books"] == {"balanced": True, "errors": []}
    assert found["missed"] == missed(found, FIGURES)
    assert found["pages"]
    assert found["machine"]["cpus"] > 0


@pytest.mark.slow
def test_the_table_has_every_figure(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for each in bench.local_tables(found):
        bench.console().print(each)
    text = capsys.readouterr().out
    assert all(name in text for name in (*(each.name for each in FIGURES), "books"))


def test_samples_become_figures() -> None:
    assert p50([3, 1, 2]) == 2
    assert p99([1.0] * 99 + [5.0]) == 5.0
    assert p99([7.0]) == 7.0
    assert ratio_of([1.0, 2.0], [2.0, 2.0]) == [0.5, 1.0]
    assert median_of([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    # The 41st and the 61st of 100 samples.
    assert median_of([float(number) for number in range(100)]) == (49.5, 40.0, 60.0)


def test_a_target_is_met_missed_or_not_there() -> None:
    least, most = Figure("a", "", ">=", 0.8), Figure("b", "", "<=", 3)
    assert least.good(0.8)
    assert least.good(0.79) is False
    assert most.good(3)
    assert most.good(3.1) is False
    assert most.good(None) is None
    assert Figure("c", "").good(1) is None


def test_memory_bounds_the_daemons() -> None:
    small = sizes_of(quick=False, memory_bytes=MEMORY_BYTES_MIN)
    assert small.memory_bytes == MEMORY_BYTES_MIN
    assert small.blocks < FULL.blocks
    assert sizes_of(quick=False, memory_bytes=64 << 30) == FULL


@pytest.mark.parametrize("text", ["64MiB", "1GG", "much"])
def test_memory_that_cannot_be(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["bench", "local", "--quick", "--memory", text]) == app.EXIT_CONFIG
    assert "--memory: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_plot_is_drawn_or_says_what_it_needs(
    found: dict[str, Any], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        assert app.run(["bench", "local", "--plot", str(tmp_path / "p.png")]) == app.EXIT_CONFIG
        assert "pip install 'kvhearth[lab]'" in capsys.readouterr().err
        return
    from kvhearth_lab.bench.local.figures import draw

    draw(found, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
