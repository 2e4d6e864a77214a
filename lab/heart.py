"""Measures the client's copies and the daemon's restart, in ratios within one run: `make
bench-heart`.

Starts its own daemons. The copy part stores batches of 128 blocks of 2 MiB through the real client
and compares each with a plain copy of as many bytes between distinct 2 MiB blocks right before it.
The restart part commits a million blocks of 4 KiB, measures the daemon's memory, kills it with
SIGKILL and starts it again on the same arena.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvhearth.copiers.host import HostCopier
from kvhearth.results import CommitGroup
from kvhearth_lab.bench.daemon import Served, attached, broken, contract, served, store_zeros
from kvhearth_lab.bench.local.copies import (
    CONTRACT,
    Bench,
    bench_of,
    blocks,
    plain_batch,
    shuffled,
)
from kvhearth_lab.bench.local.figures import BATCH, PAGE_BYTES, SMALL_BYTES, Result
from kvhearth_lab.bench.report import p50, ratio_of, steps

MIB = 1 << 20
GIB = 1 << 30
COMMIT_KEYS = 4096


def stored(bench: Bench, copier: HostCopier) -> float:
    """Return the seconds to copy and commit a batch; slots are reserved ahead, as an engine's pool
    is.
    """
    bench.keys = [secrets.token_bytes(32) for _ in range(BATCH)]
    slots = bench.client.reserve({0: BATCH})
    extents = slots.groups[0]
    if len(extents) != BATCH:
        raise broken(f"a store was refused: {slots.short_reason or slots.reason}")
    start = time.perf_counter()
    done = copier.store_now(slots.boot_id, bench.pages, extents[:, 0])
    group = CommitGroup(bench.keys, extents, done.checksums)
    answer = bench.client.commit({0: group}, boot_id=slots.boot_id)
    seconds = time.perf_counter() - start
    if not done.ok.all() or not answer.stored[0].all():
        raise broken(f"a store was dropped: {done.reasons} {answer.reason}")
    return seconds


def copy_part(rounds: int) -> dict[str, Any]:
    """Return the ratios of the client's copies to plain copies, alternating in one run."""
    (source, _), (target, _) = blocks(1), blocks(2)
    times: dict[str, list[float]] = {"memcpy": [], "store": [], "store_sealed": [], "load": []}
    with served(memory="1GiB", stock_fraction_max=0.3, http="off") as daemon:
        pages_kind = daemon.ready()["pages"]
        with (
            attached(daemon.client_url, CONTRACT) as client,
            bench_of(daemon, client, Result(), source, target, shuffled()) as bench,
        ):
            for number in steps(rounds + 2, "copies"):
                one = {"memcpy": plain_batch(source, target)}
                one["store"] = stored(bench, bench.plain)
                one["store_sealed"] = stored(bench, bench.sealing)
                one["load"] = bench.load(bench.verifying)
                if number >= 2:  # the first rounds touch pages for the first time
                    for name, seconds in one.items():
                        times[name].append(seconds)
    memcpy = times.pop("memcpy")
    result: dict[str, Any] = {
        "pages": pages_kind,
        "memcpy_gbs": BATCH * PAGE_BYTES / 1e9 / p50(memcpy),
        "stored_bytes_over_arena": rounds * 2 * BATCH * PAGE_BYTES / GIB,
    }
    for name, seconds in times.items():
        ratios = ratio_of(memcpy, seconds)
        result[f"{name}_ratio"] = p50(ratios)
        result[f"{name}_ratio_spread"] = [min(ratios), max(ratios)]
    return result


@contextlib.contextmanager
def arena_folder() -> Iterator[Path]:
    """Return a directory on hugetlbfs if this user may mount one, else on tmpfs."""
    with tempfile.TemporaryDirectory(prefix="kvh-", dir="/dev/shm") as name:
        mounted = subprocess.run(
            ["mount", "-t", "hugetlbfs", "none", name], capture_output=True, check=False
        )
        try:
            yield Path(name)
        finally:
            if mounted.returncode == 0:
                subprocess.run(["umount", "-l", name], check=False)


def restart_part(count: int) -> dict[str, Any]:
    """Return the memory per block, and the time of a restart on a full arena."""
    settings = {
        "memory": -(-count * SMALL_BYTES // (64 * MIB)) * 64 * MIB,
        "slot_bytes_min": SMALL_BYTES,
        "http": "off",
    }
    with tempfile.TemporaryDirectory(prefix="kvh-") as name, arena_folder() as arena:
        daemon = Served(Path(name), arena, settings)
        try:
            daemon.launch()
            cold = daemon.ready()
            before = daemon.anonymous_bytes()
            with attached(daemon.client_url, contract(SMALL_BYTES)) as client:
                # The blocks' bytes are zeros, like those of a new arena.
                starts, seed = range(0, count, COMMIT_KEYS), secrets.token_bytes(16)
                for number in steps(len(starts), f"{count:,} blocks"):
                    portion = min(COMMIT_KEYS, count - starts[number])
                    store_zeros(client, SMALL_BYTES, seed, starts[number], portion)
                after = daemon.anonymous_bytes()
            daemon.kill()
            daemon.launch()
            warm = daemon.ready()
        finally:
            daemon.kill()
    return {
        "restart_pages": cold["pages"],
        "blocks": warm["adopted_blocks"],
        "index_bytes_per_block": (after - before) / count,
        "cold_ready_s": cold["seconds"],
        "warm_ready_s": warm["seconds"],
        "adopt_s_per_million": warm["adopt_s"] * 1e6 / warm["adopted_blocks"],
    }


TARGETS = {
    "store_ratio": (">=", 0.9),
    "store_sealed_ratio": (">=", 0.65),
    "adopt_s_per_million": ("<=", 1.0),
    "warm_ready_s": ("<=", 3.0),
    "index_bytes_per_block": ("<=", 250),
}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the copy part")
    parser.add_argument("--blocks", type=int, default=1 << 20, help="blocks of the restart part")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"cpus": os.cpu_count()}
    result |= copy_part(arguments.rounds)
    result |= restart_part(arguments.blocks)
    if not arguments.json:
        table = Table("figure", "value", "target")
        for name, value in result.items():
            sign, bound = TARGETS.get(name, ("", ""))
            shown = f"{value:.3f}" if isinstance(value, float) else str(value)
            table.add_row(name, shown, f"{sign} {bound}".strip())
        Console().print(table)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
