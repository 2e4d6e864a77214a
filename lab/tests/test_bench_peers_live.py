"""``kvhearth bench peers`` as a whole: our daemon beside a peer in its own process.

One peer keeps its blocks in memory. The real peers need their environments: their test runs only
where `make bench-peers` has made them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvhearth_lab.bench.local.figures import BATCH, PAGE_BYTES, QUICK
from kvhearth_lab.bench.peers import adapter
from kvhearth_lab.bench.peers import run as pairs
from kvhearth_lab.bench.peers.adapters import harness
from kvhearth_lab.bench.peers.run import BATCHES, ONES

ROOT = Path(__file__).resolve().parents[2]
SMALL = replace(
    QUICK, rounds=1, ones=2, first_touches=1, lookups=60, blocks_small=1000, memory_bytes=768 << 20
)
PEER = """
import time
from kvhearth_lab.bench.peers.adapters.harness import fill, huge_or_not, order

class Peer:
    pages = ()
    def start(self, config):
        print("a library that prints")
        self.kept, self.copies = {}, config.part == "copies"
        self.source, _ = huge_or_not(config.batch, config.page_bytes, False)
        self.target, _ = huge_or_not(config.batch, config.page_bytes, False)
        fill(self.source)
        self.pages = order(config.batch)
        return {"versions": {"memory": "1"}, "settings": "none", "pages": "own", "leftovers": []}
    def measures(self):
        if not self.copies:
            return {}
        return {
            "store": lambda index: self.move(self.pages, self.source, self.kept),
            "load": lambda index: self.move(self.pages, self.kept, self.target),
            "store_one": lambda index: self.move([self.pages[index]], self.source, self.kept),
            "load_one": lambda index: self.move([self.pages[index]], self.kept, self.target),
        }
    def move(self, pages, source, target):
        start = time.perf_counter()
        for page in pages:
            target[page] = source[page].copy()
        return time.perf_counter() - start
    def drop(self):
        self.kept.clear()
    def lookups(self, count):
        if count != 50:
            raise ValueError(f"{count} lookups")
        return [0.5] * count
    def close(self):
        pass
"""


@pytest.mark.slow
def test_a_pair_is_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(Path(harness.__file__), tmp_path / "harness.py")
    (tmp_path / "memory_peer.py").write_text(PEER)
    (tmp_path / "broken_peer.py").write_text(PEER.replace("self.kept.clear()", "self.pages.gone"))
    monkeypatch.setattr(adapter, "_HARNESS", tmp_path / "harness.py")
    said: list[str] = []
    python = Path(sys.executable)
    found = pairs.run(SMALL, {"memory": python, "broken": python, "none": None}, said.append)
    pair = found["peers"]["memory"]
    for name in ("store", "load", "first_touch"):
        assert pair["ours"][f"{name}_ratio"] > 0
    assert pair["peer"]["store_ratio"] > 0
    assert pair["peer"]["load_one_p50_us"] > 0
    assert pair["ours"]["lookup512_p50_us"] > 0
    assert pair["peer"]["lookup512_p50_us"] == 0.5e6
    # Each load, of a batch or a single block, was compared; ours for both of its interfaces.
    loads = (SMALL.rounds + 2) * BATCH + SMALL.ones
    assert pair["peer"]["compared_bytes"] == loads * PAGE_BYTES
    assert pair["ours"]["compared_bytes"] == 2 * loads * PAGE_BYTES
    assert set(pair["against"]) == {
        "store",
        "load",
        "store_one",
        "load_one",
        "lookup512",
        "first_store",
    }
    assert pair["books"] == {"balanced": True, "errors": []}
    assert "no interpreter" in found["skipped"]["none"]
    assert "'list' object has no attribute 'gone'" in found["skipped"]["broken.copies"]
    assert "broken.lookups" not in found["skipped"]
    assert json.loads(json.dumps(found)) == found
    assert any("memory 1" in line for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("name", pairs.PEERS)
def test_a_real_peer(name: str) -> None:
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"make {python.parent.parent.name}/.ready")
    command = [sys.executable, "-m", "kvhearth_server.cli.app", "bench", "peers", "--quick"]
    ended = subprocess.run(
        [*command, "--json", f"--{name}", str(python)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [each for each in found["skipped"] if each.startswith(name)] == []
    peer = found["peers"][name]["peer"]
    wanted = {"store", "load", "first_touch", "store_one", "load_one", "lookup512"}
    assert (
        wanted <= set(found["peers"][name]["against"]) <= {*BATCHES, *ONES, *wanted, "first_store"}
    )
    assert peer["compared_bytes"] > 0
