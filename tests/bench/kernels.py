"""Times the kernels on a GPU beside a copy of as many bytes over the bus, as docs/adr/0024 asks.

Prints JSON: seconds and GB/s of each kernel for submissions of 64 MiB, and the ratio of the copy's
time to the kernel's; a checksum above 1 verifies every block without slowing the bus. With
``TRITON_INTERPRET=1`` it runs on the CPU, where its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from kvhearth.codec import encoding_of
from kvhearth.copiers import kernels

SHAPES = {
    "2 MiB": (32, 1, 2 << 20),
    "2 MiB in 64 layers": (32, 64, 32 << 10),
    "64 KiB": (1024, 1, 64 << 10),
}
"""Shards of a submission, runs of a shard, bytes of a run."""


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """Return the least time of a run, which has ended on the device."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    run()
    best = float("inf")
    for _ in range(repeats):
        wait()
        begun = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - begun)
    return best


def measured(shards: int, parts: int, run_bytes: int, device: str, repeats: int) -> dict[str, Any]:
    """Return the times of one shape."""
    size, source_bytes = shards * parts * run_bytes, parts * run_bytes
    pages = torch.randn(size // 2, device=device).to(torch.bfloat16)
    host = torch.empty_like(pages, device="cpu")
    host = host.pin_memory() if device != "cpu" else host
    order = torch.randperm(shards * parts, device=device).reshape(shards, parts)
    fragments = pages.data_ptr() + order * run_bytes
    runs: dict[str, Callable[[], object]] = {
        "copy": lambda: pages.copy_(host, non_blocking=True),
        "accumulate": lambda: kernels.accumulate(fragments, run_bytes),
    }
    for codec in ("fp8", "int4"):
        encoding = encoding_of(codec, "bfloat16", source_bytes)
        rest = torch.empty(shards * encoding.stored_bytes, dtype=torch.uint8, device=device)
        blocks = rest.data_ptr() + torch.arange(shards, device=device) * encoding.stored_bytes
        given = (fragments, run_bytes, blocks, encoding, rest)
        runs[f"encode {codec}"] = lambda it=given: kernels.encode(*it[:4])
        runs[f"decode {codec}"] = lambda it=given: kernels.decode(it[2], it[0], it[1], it[3])
    seconds = {name: seconds_of(run, repeats) for name, run in runs.items()}
    return {
        name: {"s": taken, "gbytes_per_s": size / taken / 1e9, "of_copy": seconds["copy"] / taken}
        for name, taken in seconds.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--divide", type=int, default=1, help="take less, for a trial")
    given = parser.parse_args()
    if reason := kernels.available():
        raise SystemExit(reason)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {
        name: measured(
            max(shards // given.divide, 1), parts, run_bytes // given.divide, device, given.repeats
        )
        for name, (shards, parts, run_bytes) in SHAPES.items()
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
