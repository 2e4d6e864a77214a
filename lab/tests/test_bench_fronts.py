"""``kvhearth bench fronts`` with a program in the engines' place.

``make bench-fronts`` measures the engines themselves.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvhearth_lab.bench.fronts.figures import MIB, Front, Sizes, figures_of
from kvhearth_lab.bench.fronts.run import run
from kvhearth_lab.cli.bench import fronts_tables

GOOD = Front("good", "doubles.front_double", "good", "store", "load", "fs")
BROKEN = Front("broken", "doubles.no_front", "broken", "store", "load", "fs")
ABSENT = Front("absent", "doubles.front_double", "absent", "store", "load", "fs")


def test_engines_are_measured_or_skipped_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program checks that the frame has moved its blocks to SSD."""
    monkeypatch.setattr("kvhearth_lab.bench.fronts.run.MEMORY_BYTES_MIN", 64 * MIB)
    python = Path(sys.executable)
    pythons = {"good": python, "broken": python, "absent": tmp_path / "python"}
    notes = list[str]()
    found = run(tmp_path, Sizes(4 * MIB, 2), pythons, notes.append, (GOOD, BROKEN, ABSENT))

    assert {each.name for each in figures_of(GOOD)} <= set(found)
    assert found["good_absent_ms"] == 2.0
    assert found["spread"]["good_absent_ms"] == [1.0, 4.0]
    assert "good_absent_ms" in found["missed"]
    assert "good_absent_logged" not in found["missed"]
    runs = found["engines"]["good"]["runs"]
    assert set(runs) == {"2048KiB", "256KiB", "2048KiB_ssd", "256KiB_ssd"}
    assert all(each["gbs"]["load"]["ours"] > 0 for each in runs.values())
    assert "No module named doubles.no_front" in found["skipped"]["broken, no daemon"]
    assert len([name for name in found["skipped"] if name.startswith("broken")]) == 5
    assert found["skipped"]["absent"].startswith("no interpreter at")
    assert not list(tmp_path.iterdir()), "its files are removed"
    assert [each.row_count for each in fronts_tables(found)][1:] == [4, 6]
