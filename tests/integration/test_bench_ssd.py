"""``kvhearth bench ssd`` runs and fills every field; the drive's speed is not asserted."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvhearth.errors import KVHearthError
from kvhearth_lab.bench.report import missed
from kvhearth_lab.bench.ssd.figures import FIGURES, FULL, QUICK, Result, check_room
from kvhearth_lab.cli import bench
from kvhearth_server.cli import app
from kvhearth_server.tiers.ssd.disk.probe import NAMES

RUN_S = 280.0
"""A quick run takes seconds; a shared machine may need longer."""
pytestmark = pytest.mark.timeout(RUN_S + 20)
SPREADS = (
    "raw_write_gbs",
    "write_ratio",
    "read_ratio",
    "mixed_ratio",
    "write_cpu_s_per_gb",
    "cpu_s_per_gb",
    "recover_blocks_per_s",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drive")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """Returns the last line of a quick run; one peer has no environment, the other a broken one."""
    command = [sys.executable, "-m", "kvhearth_server.cli.app", "bench", "ssd", "--quick", "--json"]
    where = ["--dir", str(folder), "--vllm", str(folder / "none" / "bin" / "python")]
    ended = subprocess.run(
        [*command, *where], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "write_ratio" in ended.stderr
    last: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return last


@pytest.mark.slow
def test_figures_are_numbers_with_their_spreads(found: dict[str, Any]) -> None:
    assert [each.name for each in FIGURES if type(found[each.name]) not in (int, float)] == []
    spreads = {name: found["spread"][name] for name in SPREADS}
    assert [n for n, (low, high) in spreads.items() if not low <= found[n] <= high] == []


@pytest.mark.slow
def test_what_does_not_depend_on_the_machine(found: dict[str, Any], folder: Path) -> None:
    assert found["quick"] is True
    assert found["interface"] in NAMES
    assert found["recovered_blocks"] >= QUICK.small_blocks
    assert found["cold_cache"] in {"drop_caches", "posix_fadvise"}
    assert 1 < found["write_amplification"] < 1.1
    assert found["missed"] == missed(found, FIGURES)
    assert found["peers"] == {}
    assert set(found["skipped"]) == {"lmcache", "vllm"}
    assert found["machine"]["cpus"] > 0
    assert list(folder.iterdir()) == [], "something was left on the drive"


@pytest.mark.slow
def test_the_table_has_every_figure(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    peer = {"write_gbs": 1.5, "spread": {"write_gbs": [1.0, 2.0]}}
    for each in bench.ssd_tables({**found, "peers": {"lmcache": peer}}):
        bench.console().print(each)
    text = capsys.readouterr().out
    assert all(each.name in text for each in FIGURES)
    assert "1 .. 2" in text
    assert "no interpreter" in text


def test_targets_are_those_that_are_missed() -> None:
    result = Result()
    result.put("write_ratio", [0.8, 0.91, 0.95])
    result.put("read_ratio", [0.5, 0.6, 0.7])
    assert result.as_json()["missed"] == ["read_ratio"]
    assert result.as_json()["spread"]["write_ratio"] == [0.8, 0.95]
    assert missed({}, FIGURES) == []


def test_a_drive_with_too_little_room_is_refused(tmp_path: Path) -> None:
    check_room(tmp_path, QUICK)
    assert QUICK.needed_bytes < FULL.needed_bytes < 6 << 30
    with pytest.raises(KVHearthError, match="are needed"):
        check_room(tmp_path, type(FULL)(tier_bytes=1 << 60))


@pytest.mark.parametrize("words", [["--dir", "/nowhere"], ["--interface", "carrier-pigeon"]])
def test_a_wrong_word(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["bench", "ssd", "--quick", *words]) == app.EXIT_CONFIG
    assert words[0] in capsys.readouterr().err


@pytest.mark.slow
def test_a_plot_is_drawn_or_says_what_it_needs(
    found: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        assert app.run(["bench", "ssd", "--plot", str(tmp_path / "p.png")]) == app.EXIT_CONFIG
        assert "pip install 'kvhearth[lab]'" in capsys.readouterr().err
        return
    from kvhearth_lab.bench.ssd.figures import draw

    peer = {"write_gbs": 1.5, "spread": {"write_gbs": [1.0, 2.0]}}
    draw({**found, "peers": {"lmcache": peer}}, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


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
    found: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    monkeypatch.setattr("kvhearth_lab.bench.ssd.run.run", lambda *_: found)
    words = ["bench", "ssd", "--quick", "--json", "--plot", str(tmp_path / "none" / "p.png")]
    assert app.run(words) == app.EXIT_CONFIG
    reported = capsys.readouterr()
    assert json.loads(reported.out.splitlines()[-1])["write_ratio"] == found["write_ratio"]
    assert "--plot" in reported.err
