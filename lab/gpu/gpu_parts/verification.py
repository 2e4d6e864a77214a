"""Part f: checksums of loaded blocks: their rate out of cold memory, and what they cost a load and
the thread of an engine's worker.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from gpu_parts.common import Report, run_part
from kvhearth.copiers.base import VERIFY_FRACTION, Copier
from kvhearth.model import FLAG_SUMMED, U8, Records, checksum_of
from kvhearth.page_layout import PagedKV
from kvhearth_lab.bench.gpu.bandwidth import BLOCK_2M, FULL, REHEARSAL, Bench
from kvhearth_lab.bench.gpu.bare_arena import BOOT_ID, BareArena
from kvhearth_lab.bench.gpu.stage import Stage, closed
from kvhearth_lab.bench.report import p50

FRACTIONS = (0.0, VERIFY_FRACTION, 1.0)
COLD_BYTES = 512 << 20
REHEARSED_BYTES = 4 << 20
BATCH_BYTES = 256 << 20
ROUNDS = 5
DONE_S = 60.0
TICK_S = 0.0005


def cold_rate(memory: U8, block_bytes: int) -> float:
    """Return GB/s of checksums of blocks in random order over memory larger than the caches."""
    count = len(memory) // block_bytes
    order = np.random.default_rng(3).permutation(count).tolist()
    began_s = time.perf_counter()
    for index in order:
        checksum_of(memory[index * block_bytes : (index + 1) * block_bytes].data)
    return len(order) * block_bytes / (time.perf_counter() - began_s) / 1e9


class Ticker:
    """A thread like an engine's worker: short turns of Python, whose lateness it records."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        last_s = time.perf_counter()
        while not self._stop.is_set():
            time.sleep(TICK_S)
            now_s = time.perf_counter()
            self.late_s.append(now_s - last_s - TICK_S)
            last_s = now_s

    def end(self) -> list[float]:
        """Stop, and return the lateness of each turn in seconds."""
        self._stop.set()
        self._thread.join()
        return self.late_s


def load_rounds(copier: Copier, extents: Records, rounds: int) -> list[float]:
    """Load a batch several times; return the seconds of each round, verification included.

    Raises:
        AssertionError: a block is refused.
    """
    pages = np.arange(len(extents))
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        ticket = copier.load(BOOT_ID, extents, pages, wait_s=DONE_S)
        assert ticket is not None, "the copier took no batch"
        done = copier.wait(ticket, DONE_S)
        times.append(time.perf_counter() - began_s)
        assert done is not None, "a load never ended"
        assert done.ok.all(), done.reasons
    return times


def loads_part(report: Report, stage: Stage, arena: BareArena, ceiling: float) -> None:
    """Load with each fraction of blocks verified, beside a ticking thread."""
    size = min(REHEARSED_BYTES if stage.small else BATCH_BYTES, arena.size_bytes)
    count = max(size // BLOCK_2M.page_bytes, 1)
    tensor = stage.torch.zeros(
        (count, BLOCK_2M.page_bytes), dtype=stage.torch.uint8, device=stage.device
    )
    kv = PagedKV([tensor])
    extents = arena.extents(np.arange(count), kv.page_bytes)
    summed = arena.with_checksums(extents, FLAG_SUMMED)
    rows: dict[str, Any] = {}
    for fraction in FRACTIONS:
        copier = stage.copier(kv, arena, verify_fraction=fraction)
        load_rounds(copier, summed, 1)
        ticker = Ticker()
        times = load_rounds(copier, summed, ROUNDS)
        late_s = ticker.end()
        closed(copier)
        gbs = count * kv.page_bytes / p50(times) / 1e9
        rows[f"{fraction:g}"] = {
            "gbs": round(gbs, 3),
            "ratio": round(gbs / ceiling, 4),
            "stall_max_ms": round(max(late_s, default=0.0) * 1e3, 3),
            "stall_p50_ms": round(p50(late_s or [0.0]) * 1e3, 4),
        }
        report.put(fractions=rows)
    report.figure("verify_all_ratio", rows["1"]["ratio"])


def refusal_part(report: Report, stage: Stage, arena: BareArena) -> None:
    """Check that verification is real: with all blocks verified, a flipped bit is found."""
    tensor = stage.torch.zeros((2, 4096), dtype=stage.torch.uint8, device=stage.device)
    kv = PagedKV([tensor])
    copier = stage.copier(kv, arena, verify_fraction=1.0)
    summed = arena.with_checksums(arena.extents(np.arange(2), 4096), FLAG_SUMMED)
    arena.slot(summed[1])[100] ^= 4
    ticket = copier.load(BOOT_ID, summed, np.arange(2))
    done = None if ticket is None else copier.wait(ticket, DONE_S)
    found = done is not None and done.ok.tolist() == [True, False]
    report.check("a flipped bit is found", found, done)
    closed(copier)


def measure(report: Report, stage: Stage) -> None:
    """Measure checksums alone, then loads with them."""
    sizes = REHEARSAL if stage.small else FULL
    bench = Bench(stage, sizes)
    arena = bench.arena
    size = min(COLD_BYTES, arena.size_bytes)
    arena.view(0)[:size] = np.random.default_rng(2).integers(0, 255, size, np.uint8)
    report.put(cold_gbs=round(cold_rate(arena.view(0)[:size], BLOCK_2M.page_bytes), 2))
    with stage.registered(arena):
        ceiling = bench.measure_ceiling()["load"]
        report.put(ceiling_gbs=ceiling)
        loads_part(report, stage, arena, ceiling)
        refusal_part(report, stage, arena)


if __name__ == "__main__":
    run_part(measure)
