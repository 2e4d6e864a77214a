"""Measures the connectors' core: one step at 64 running requests, and planning a large copy.
Prints one JSON object.

    python tests/bench/connector.py

Uses a daemon of its own and the real halves, without an engine. Results are medians in
microseconds; compare them only within one run, because machines differ.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.daemon import running_daemon
from support.scripted_engine import BLOCK_TOKENS, ScriptedEngine, scripted_engine

from kvhearth.connectors.core.engine import Step
from kvhearth.connectors.core.step_metadata import Move
from kvhearth.copiers.batch import Batch, HeldArena, as_arrays
from kvhearth.model import EXTENT_DTYPE
from kvhearth.page_layout import PagedKV

RUNNING = 64
STEPS = 400
FRAGMENTS = 10_000
LAYERS = 32
PROMPT_TOKENS = 480


def step_us(engine: ScriptedEngine) -> dict[str, float]:
    """Return the scheduler's time for decode steps: for steps that store nothing, and for all
    steps.
    """
    requests = [
        engine.add(f"r{number}", f"bench {number}", 2 * PROMPT_TOKENS) for number in range(RUNNING)
    ]
    for request in requests:
        engine.admit(request)
        engine.step({request.request_id: PROMPT_TOKENS})
        request.num_computed_tokens = PROMPT_TOKENS
    engine.settle()
    taken = []
    stored = []
    for _ in range(STEPS):
        scheduled = {request.request_id: 1 for request in requests}
        began = time.perf_counter()
        meta = engine.half.plan_step(Step(RUNNING, scheduled, engine.find_table))
        engine.half.step_done(None, set(), set())
        (stored if meta.stores else taken).append((time.perf_counter() - began) * 1e6)
        for worker in engine.workers:
            worker.start_stores(meta)
        for request in requests:
            request.num_computed_tokens += 1
        engine.step({})
    for request in requests:
        engine.finish(request)
    engine.settle()
    return {
        "step_us_p50": statistics.median(taken + stored),
        "quiet_step_us_p50": statistics.median(taken),
        "storing_step_us_p50": statistics.median(stored),
    }


def plan_us(engine: ScriptedEngine) -> float:
    """Return a worker's time to plan one load of 10,000 fragments, 32 layers of each block: select
    the extents, check them against the arena and the generations, cut them into runs. Blocks are
    scattered, so that no two form one run; the layers of one block are one strided copy.
    """
    worker = engine.workers[0]
    client = worker._client
    assert client is not None
    arena = client.arena
    assert arena is not None
    count = FRAGMENTS // LAYERS
    layers = np.zeros((LAYERS, 2 * count, 64), np.uint8)
    kv = PagedKV(list(layers))
    held = HeldArena(arena)
    extents = np.zeros((count, 1), EXTENT_DTYPE)
    place = np.arange(count)
    extents["slot"][:, 0] = place % len(arena.generations)
    extents["segment"] = next(iter(arena.segments))
    extents["offset"][:, 0] = place * kv.page_bytes
    extents["length"] = kv.page_bytes
    extents["generation"][:, 0] = arena.generations[extents["slot"][:, 0]]
    move = Move(np.arange(count, dtype=np.int64) * 2, extents)
    taken = []
    for _ in range(30):
        began = time.perf_counter()
        pages, records = as_arrays(move.pages, move.extents[:, 0])
        batch = Batch(kv, held, arena.boot_id, pages, records)
        assert len(batch.runs(64)) == count
        taken.append((time.perf_counter() - began) * 1e6)
    return statistics.median(taken)


def main() -> None:
    """Measure and print."""
    with (
        running_daemon(memory="256MiB") as daemon,
        scripted_engine(
            daemon.url(),
            blocks=RUNNING * 2 * PROMPT_TOKENS // BLOCK_TOKENS + 64,
            pool_tokens=1 << 16,
            held_percent=90,
        ) as engine,
    ):
        figures = {**step_us(engine), "plan_10k_us_p50": plan_us(engine)}
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
