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
from support.stalled_daemon import BURNT_S

from kvhearth.errors import KVHearthError
from kvhearth_lab.bench.local.figures import FULL as LOCAL_FULL
from kvhearth_lab.bench.local.figures import MEMORY_BYTES_MIN, sizes_of
from kvhearth_lab.bench.local.figures import QUICK as LOCAL_QUICK
from kvhearth_lab.bench.report import Figure, median_of, missed, p50, p99, ratio_of
from kvhearth_lab.bench.ssd import figures as ssd
from kvhearth_lab.bench.stalls.figures import CALL_MS_MAX, FIGURES, PARTS, Sizes
from kvhearth_lab.bench.stalls.run import Course, run
from kvhearth_lab.bench.stalls.watched_daemon import Longest
from kvhearth_lab.cli import bench
from kvhearth_server.cli import app
from kvhearth_server.tiers.ssd.disk.probe import NAMES

RUN_S = 280.0
"""A quick run takes seconds; a shared machine may need longer."""
pytestmark = pytest.mark.timeout(RUN_S + 20)
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
BALANCED = {"balanced": True, "errors": []}

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
                timeout=RUN_S,
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


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_plot_is_drawn_or_says_what_it_needs(
    found: Found, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.png"
    if importlib.util.find_spec("matplotlib") is None:
        assert app.run(["bench", verb, "--plot", str(path)]) == app.EXIT_CONFIG
        assert "pip install 'kvhearth[lab]'" in capsys.readouterr().err
        return
    figures_of(verb).draw({**found(verb), **(PEERS if verb == "ssd" else {})}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


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


# -- local -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_local_has_what_does_not_depend_on_the_machine(found: Found) -> None:
    line = found("local")
    assert line["blocks"] == LOCAL_QUICK.blocks
    assert line["dropped_stores"] == 0
    assert line["stored_blocks"] > LOCAL_QUICK.blocks
    assert line["books"] == BALANCED
    assert type(line["seconds"]) in (int, float)
    assert line["pages"]
    assert line["machine"]["cpus"] > 0


def test_memory_bounds_the_daemons() -> None:
    small = sizes_of(quick=False, memory_bytes=MEMORY_BYTES_MIN)
    assert small.memory_bytes == MEMORY_BYTES_MIN
    assert small.blocks < LOCAL_FULL.blocks
    assert sizes_of(quick=False, memory_bytes=64 << 30) == LOCAL_FULL


@pytest.mark.parametrize("text", ["64MiB", "1GG", "much"])
def test_memory_that_cannot_be(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["bench", "local", "--quick", "--memory", text]) == app.EXIT_CONFIG
    assert "--memory: " in capsys.readouterr().err


# -- ssd -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ssd_has_what_does_not_depend_on_the_machine(found: Found, folder: Path) -> None:
    line = found("ssd")
    assert line["interface"] in NAMES
    assert line["recovered_blocks"] >= ssd.QUICK.small_blocks
    assert line["cold_cache"] in {"drop_caches", "posix_fadvise"}
    assert 1 < line["write_amplification"] < 1.1
    assert line["peers"] == {}
    assert set(line["skipped"]) == {"lmcache", "vllm"}
    assert line["read_vs_lmcache"] == f"skipped: {line['skipped']['lmcache']}"
    assert line["machine"]["cpus"] > 0
    assert list(folder.iterdir()) == [], "something was left on the drive"


def test_targets_are_those_that_are_missed() -> None:
    result = ssd.Result()
    result.put("write_of_best", [0.8, 0.91, 0.95])
    result.put("read_of_best", [0.5, 0.6, 0.7])
    assert result.as_json()["missed"] == ["read_of_best"]
    assert result.as_json()["spread"]["write_of_best"] == [0.8, 0.95]
    assert missed({}, ssd.FIGURES) == []


def test_a_drive_with_too_little_room_is_refused(tmp_path: Path) -> None:
    ssd.check_room(tmp_path, ssd.QUICK)
    assert ssd.QUICK.needed_bytes < ssd.FULL.needed_bytes < 6 << 30
    with pytest.raises(KVHearthError, match="are needed"):
        ssd.check_room(tmp_path, type(ssd.FULL)(tier_bytes=1 << 60))


@pytest.mark.parametrize("words", [["--dir", "/nowhere"], ["--interface", "carrier-pigeon"]])
def test_a_wrong_word_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["bench", "ssd", "--quick", *words]) == app.EXIT_CONFIG
    assert words[0] in capsys.readouterr().err


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
        end = time.monotonic() + 60
        while not list(tmp_path.glob("*/tier/*.segment")):
            assert time.monotonic() < end, "it does not begin"
            time.sleep(0.05)
        process.send_signal(number)
        reported = process.communicate(timeout=60)[1].decode()
    assert process.returncode == status, reported
    assert "Traceback" not in reported
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_figures_are_told_also_where_no_picture_can_be_drawn(
    found: Found,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    line = found("ssd")
    monkeypatch.setattr("kvhearth_lab.bench.ssd.run.run", lambda *_: line)
    words = ["bench", "ssd", "--quick", "--json", "--plot", str(tmp_path / "none" / "p.png")]
    assert app.run(words) == app.EXIT_CONFIG
    reported = capsys.readouterr()
    assert json.loads(reported.out.splitlines()[-1])["write_of_best"] == line["write_of_best"]
    assert "--plot" in reported.err


# -- stalls ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stalls_has_what_does_not_depend_on_the_machine(found: Found) -> None:
    line = found("stalls")
    assert all(line[each.name] > 0 for each in FIGURES)
    assert line["books"] == BALANCED
    assert line["longest_call_cpu_ms"] == max(line[name] for name in PARTS)
    assert line["timer_late_max_ms"] == max(line["timer_late_ms"].values())
    assert all(line["calls"][name] for name in PARTS)


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


def test_a_stalls_target_is_met_or_missed() -> None:
    values = dict.fromkeys(PARTS, CALL_MS_MAX)
    assert missed(values, FIGURES) == []
    assert missed({**values, "evict_ms": CALL_MS_MAX + 0.1}, FIGURES) == ["evict_ms"]
