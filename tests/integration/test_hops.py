"""The way of one store and of one lookup: its length, and that ARCHITECTURE.md tells it right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.daemon import ARENA_ROOT

ROOT = Path(__file__).parents[2]
HOPS_MAX, FILES_MAX = 25, 35
"""Bounds of the lists in ARCHITECTURE.md, which leave helpers out."""
TRACED_MAX = {"store": (110, 64), "lookup": (69, 44)}
"""Bounds of the (hops, files) that all traces share, helpers included, as measured. They only go
down. Timers and retries, of which a busy machine has more, are in some traces only.
"""
NOT_TRACED = {
    "connectors/vllm/connector": "imports vLLM; the tracer's engine calls the two halves",
    "connectors/vllm/adapter": "translates vLLM's objects; the scripted engine has none",
    "copiers/cuda": "needs a device; the list names it beside copiers/host",
    "engine/tiering/promotion": "takes part if blocks are on SSD only; those of the trace are not",
}

Trace = dict[str, list[Any]]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trace]]:
    folder = tmp_path_factory.mktemp("hops")
    arena = Path(f"{ARENA_ROOT}/kvhearth-hops-{os.getpid()}")
    arena.mkdir()
    try:
        words = [sys.executable, "-m", "support.hops", str(folder), str(arena)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
        ended = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
    finally:
        for path in arena.iterdir():
            path.unlink()
        arena.rmdir()
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, list[Trace]] = json.loads((folder / "traces.json").read_text())
    return found


def listed(title: str) -> list[list[str]]:
    """Return the modules that each numbered hop of a section of ARCHITECTURE.md names."""
    text = (ROOT / "ARCHITECTURE.md").read_text().split(f"\n## {title}\n", 1)[1]
    lines = re.findall(r"^\d+\. (.*?): ", text.split("\n## ", 1)[0], re.MULTILINE)
    return [re.findall(r"`([^`]+)`", line) for line in lines]


def bare(module: str) -> str:
    return module.split("/", 1)[1]


@pytest.mark.parametrize("kind", ["store", "lookup"])
def test_the_way_is_no_longer_than_before(traces: dict[str, list[Trace]], kind: str) -> None:
    hops = set.intersection(*({tuple(hop) for hop in one["hops"]} for one in traces[kind]))
    files = set.intersection(*(set(one["files"]) for one in traces[kind]))
    print(f"{kind}: {len(hops)} hops through {len(files)} files")
    hops_max, files_max = TRACED_MAX[kind]
    assert len(hops) <= hops_max
    assert len(files) <= files_max


@pytest.mark.parametrize("kind", ["store", "lookup"])
def test_the_map_is_short_and_tells_the_way_in_its_order(
    traces: dict[str, list[Trace]], kind: str
) -> None:
    hops = listed(f"One {kind}")
    files = {name for hop in hops for name in hop}
    assert 10 <= len(hops) <= HOPS_MAX
    assert 20 <= len(files) <= FILES_MAX
    seen = {bare(module) for one in traces[kind] for module in one["files"]}
    assert files - seen <= set(NOT_TRACED), f"not on the way: {sorted(files - seen)}"
    entries = [bare(module) for module in traces[kind][0]["entries"]]
    at = 0
    for number, hop in enumerate(hops, 1):
        if set(hop) <= set(NOT_TRACED):
            continue
        assert set(hop) & set(entries[at:]), f"hop {number} is not after hop {number - 1}: {hop}"
        at = next(n for n in range(at, len(entries)) if entries[n] in hop)
