"""Measures the host's processor time for descriptors of copies: `tests/bench/descriptors.py`.

No GPU is needed. `plan` checks a batch and builds, merges and cuts its descriptors. `submit` adds
the copier's whole thread, with a device whose calls return at once: checks of generations, the
choice of the method, one call and one event a portion, the outcome.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.arena_fake import FakeArena
from support.cuda_fake import FakeCuda

from kvhearth.copiers import CopyKind
from kvhearth.copiers.batch import Batch, HeldArena
from kvhearth.copiers.cuda import CudaCopier
from kvhearth.copiers.descriptors import Descriptors
from kvhearth.copiers.device import PIECE_BYTES, PORTION_BYTES, CopyDevice
from kvhearth.copiers.methods import CopyMethod
from kvhearth.page_layout import PagedKV

TARGET_US = 2.0
REPEATS = 30


class _Instant(FakeCuda):
    """A scripted CUDA that copies nothing, at once."""

    def query(self, event: int) -> int:
        return 0

    def record(self, event: int, stream: int) -> int:
        return 0

    def copy_batch(self, targets: Any, sources: Any, sizes: Any, stream: int) -> int:
        return 0


def _pages(layout: str, page_bytes: int, count: int) -> PagedKV:
    """Return untouched pages: one part, or 64 parts (32 layers with K and V)."""
    if layout == "block":
        return PagedKV([np.zeros((count, page_bytes), np.uint8)])
    return PagedKV(list(np.zeros((64, count, page_bytes // 64), np.uint8)))


def _median_us(call: Callable[[], object], blocks: int) -> float:
    spans = []
    for _ in range(REPEATS):
        began = time.process_time()
        call()
        spans.append(time.process_time() - began)
    return statistics.median(spans) / blocks * 1e6


def measure(layout: str, page_bytes: int, blocks: int, *, ordered: bool) -> dict[str, Any]:
    """Return medians in microseconds a block for one shape of batch."""
    kv = _pages(layout, page_bytes, blocks)
    arena = FakeArena(page_bytes, blocks)
    order = np.arange(blocks) if ordered else np.random.default_rng(1).permutation(blocks)
    pages, extents = order.astype(np.int64), arena.extents(range(blocks), page_bytes)
    held = HeldArena(arena)
    planner = Descriptors(kv, held, PIECE_BYTES, portion_bytes=PORTION_BYTES)

    def plan() -> int:
        batch = Batch(kv, held, "boot-1", pages, extents)
        portions = planner.portions(CopyKind.STORE, batch, np.flatnonzero(batch.ok))
        return sum(len(portion.copies.sizes) for portion in portions)

    cuda = _Instant()
    cuda.pin(arena)
    copier = CudaCopier(kv, arena, device=CopyDevice(1, cuda), method=CopyMethod.BATCH)

    def submit() -> None:
        ticket = copier.store("boot-1", pages, extents)
        assert ticket is not None
        done = copier.wait(ticket, 30.0)
        assert done is not None
        assert done.ok.all()

    copies = plan()
    row = {
        "layout": layout,
        "page_kib": page_bytes >> 10,
        "blocks": blocks,
        "order": "in order" if ordered else "scattered",
        "copies": copies,
        "plan_us": round(_median_us(plan, blocks), 3),
        "submit_us": round(_median_us(submit, blocks), 3),
    }
    copier.close()
    return row


def main() -> None:
    """Print a table, or with --json one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        measure(layout, page_bytes, blocks, ordered=ordered)
        for layout, page_bytes in (("block", 2 << 20), ("block", 64 << 10), ("layers", 1 << 20))
        for blocks in (16, 64, 256)
        for ordered in (True, False)
    ]
    if options.json:
        print(json.dumps({"target_us": TARGET_US, "rows": rows}))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
