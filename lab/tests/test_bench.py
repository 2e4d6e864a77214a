"""``kvhearth bench``'s verbs run and fill every field; the machine's speed is not asserted.

``bench stalls`` finds a planted stall. ``test_bench_peers`` has the verb for other caches.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.stalled_daemon import BURNT_S

from kvhearth_lab.bench.report import Figure, median_of, missed, p50, p99, ratio_of
from kvhearth_lab.bench.stalls.figures import PARTS, Sizes
from kvhearth_lab.bench.stalls.run import run
from kvhearth_lab.cli import bench
from kvhearth_lab.harness import HUNG_S

"""A quick run takes seconds; a shared machine may need longer."""
VERBS = ("local", "ssd", "stalls")
SPREADS = {
    "local": [
        "store_ratio",
        "store_sealed_ratio",
        "load_ratio",
        "load_unverified_ratio",
        "first_touch_ratio",
        "populate_cpu_s_per_gib",
        "metrics_overhead",
        "metrics_delay",
    ],
    "ssd": [
        "raw_write_gbs",
        "write_of_best",
        "read_of_best",
        "mixed_ratio",
        "write_cpu_s_per_gb",
        "cpu_s_per_gb",
        "recover_blocks_per_s",
    ],
    "stalls": [],
}
PEERS = {"peers": {"lmcache": {"write_gbs": 1.5, "spread": {"write_gbs": [1.0, 2.0]}}}}
"""A peer's figures, which a quick run of ``ssd`` lacks."""
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

Found = Callable[[str], dict[str, Any]]


def figures_of(verb: str) -> Any:
    return importlib.import_module(f"kvhearth_lab.bench.{verb}.figures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drive")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """Returns the last line of a verb's quick run. For ``ssd``, one peer has no environment, the
    other a broken one.
    """
    kept: dict[str, dict[str, Any]] = {}
    more = {"ssd": ["--vllm", str(folder / "none" / "bin" / "python")]}

    def last_line(verb: str) -> dict[str, Any]:
        if verb not in kept:
            command = [sys.executable, "-m", "kvhearth_server.cli.app", "bench", verb, "--quick"]
            ended = subprocess.run(
                [*command, "--json", *more.get(verb, ())],
                cwd=folder,  # where `bench ssd` measures unless it is told otherwise
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == 0, ended.stderr
            assert verb != "ssd" or "write_of_best" in ended.stderr
            kept[verb] = json.loads(ended.stdout.splitlines()[-1])
        return kept[verb]

    return last_line


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_figures_are_numbers_with_their_spreads(found: Found, verb: str) -> None:
    line = found(verb)
    names = [each.name for each in figures_of(verb).FIGURES]
    said = {name: line[name] for name in names if type(line[name]) not in (int, float)}
    assert [name for name in said if "_vs_" not in name] == []
    assert [text for text in said.values() if not text.startswith("skipped: ")] == []
    spreads = {name: line["spread"][name] for name in SPREADS[verb]}
    assert [n for n, (low, high) in spreads.items() if not low <= line[n] <= high] == []
    assert line["missed"] == missed(line, figures_of(verb).FIGURES)
    assert line["quick"] is True


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_the_table_has_every_figure(
    found: Found, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = PEERS if verb == "ssd" else {}
    for each in getattr(bench, f"{verb}_tables")({**found(verb), **more}):
        bench.console().print(each)
    text = capsys.readouterr().out
    wanted = {"ssd": ["1 .. 2", "no interpreter"]}.get(verb, ["books"])
    assert all(name in text for name in (*(f.name for f in figures_of(verb).FIGURES), *wanted))


# -- figures from samples --------------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_end_by_signal_leaves_nothing(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    words = ["kvhearth", "bench", "ssd", "--quick", "--json", "--dir", str(tmp_path)]
    program = (
        "import signal, sys\n"
        # A shell's background job, as the tests may be one, ignores SIGINT; some ignore SIGTERM.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        f"sys.argv = {words}\n"
        "from kvhearth_server.cli.app import main\n"
        "sys.exit(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        end = time.monotonic() + HUNG_S
        while not list(tmp_path.glob("*/tier/*.segment")):
            assert time.monotonic() < end, "it does not begin"
            time.sleep(0.05)
        process.send_signal(number)
        reported = process.communicate(timeout=HUNG_S)[1].decode()
    assert process.returncode == status, reported
    assert "Traceback" not in reported
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_planted_stall_is_found_in_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    found = run(TINY, "doubles.stalled_daemon")
    assert [each for each in PARTS if found[each] < BURNT_S * 1e3] == []
    assert found["timer_late_max_ms"] >= BURNT_S * 1e3 / 2
    assert found["missed"] == [*PARTS, "longest_call_cpu_ms"]
    assert "burn_now_and_then" in found["calls"].values()
