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
import mmap
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvhearth import Contract, GroupKind, GroupSpec, connect
from kvhearth.client import KVClient
from kvhearth.copiers.host import HostCopier
from kvhearth.model import U8
from kvhearth.page_layout import PagedKV
from kvhearth.results import CommitGroup

MIB = 1 << 20
GIB = 1 << 30
PAGE_BYTES = 2 * MIB
BATCH = 128
SMALL_BYTES = 4096
CONSOLE = Console(stderr=True)


class Served:
    """A daemon process and its log lines."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.log_path = folder / "log"
        self.url = f"kvhearth+unix://{folder / 's'}?lookup_ms=5000&call_ms=20000"
        command = [sys.executable, "-m", "kvhearth_server.cli.app", "serve"]
        command += ["--socket-dir", str(folder / "s"), "--log-format", "json"]
        command += ["--http", "off", *flags]
        self.started = time.monotonic()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def ready(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Wait for the "ready" log line and return it; adds ``seconds`` since the start."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.process.poll() is None:
            for line in self.log_path.read_text().splitlines():
                if line.startswith("{") and json.loads(line).get("event") == "ready":
                    return {**json.loads(line), "seconds": time.monotonic() - self.started}
            time.sleep(0.002)
        raise SystemExit(f"the daemon did not come up:\n{self.log_path.read_text()[-2000:]}")

    def anonymous_bytes(self) -> int:
        """Return the daemon's private memory, which excludes the mapped arena."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        line = next(line for line in text.splitlines() if line.startswith("Anonymous:"))
        return int(line.split()[1]) * 1024

    def end(self, *, kill: bool = False) -> None:
        """Stop the daemon."""
        if self.process.poll() is None:
            self.process.kill() if kill else self.process.terminate()
            self.process.wait(30)


@contextlib.contextmanager
def served(folder: Path, *flags: str) -> Iterator[Served]:
    """Start a daemon and stop it at the end."""
    daemon = Served(folder, *flags)
    try:
        yield daemon
    finally:
        daemon.end()


@contextlib.contextmanager
def attached(url: str, contract: Contract) -> Iterator[KVClient]:
    """Attach a client and wait until it is ready."""
    client = connect(url, contract, engine_id="bench")
    try:
        if not client.wait_ready(60):
            raise SystemExit(f"cannot attach: {client.refusal}")
        yield client
    finally:
        client.close()


def contract(page_bytes: int) -> Contract:
    """Return a contract of one full-attention group whose shards have ``page_bytes``."""
    spec = GroupSpec(GroupKind.FULL, 16, page_bytes)
    return Contract("bench", "none", "uint8", (spec,))


def huge_blocks(count: int) -> U8:
    """Return distinct 2 MiB blocks, on huge pages if enough are free; shape (count, PAGE_BYTES)."""
    size = count * PAGE_BYTES
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x40000)
    except OSError:
        memory = mmap.mmap(-1, size)
    blocks = np.frombuffer(memory, np.uint8).reshape(count, PAGE_BYTES)
    blocks[:] = np.random.default_rng(1).integers(0, 255, PAGE_BYTES, np.uint8)
    return blocks


def plain_copy(source: U8, target: U8) -> float:
    """Return the seconds to copy a batch block by block."""
    start = time.perf_counter()
    for index in range(BATCH):
        np.copyto(target[index], source[index])
    return time.perf_counter() - start


def stored(
    client: KVClient, copier: HostCopier, pages: np.ndarray, *, sums: bool
) -> tuple[float, list[bytes]]:
    """Return the seconds to copy and commit a batch; slots are reserved ahead, as an engine's pool
    is.
    """
    keys = [secrets.token_bytes(32) for _ in range(BATCH)]
    slots = client.reserve({0: BATCH})
    extents = slots.groups[0]
    if len(extents) != BATCH:
        raise SystemExit(f"a store was refused: {slots.short_reason or slots.reason}")
    start = time.perf_counter()
    done = copier.store_now(slots.boot_id, pages, extents[:, 0])
    checksums = (
        done.checksums.reshape(BATCH, 1, 16) if sums and done.checksums is not None else None
    )
    answer = client.commit({0: CommitGroup(keys, extents, checksums)}, boot_id=slots.boot_id)
    seconds = time.perf_counter() - start
    if not done.ok.all() or not answer.stored[0].all():
        raise SystemExit(f"a store was dropped: {done.reasons} {answer.reason}")
    return seconds, keys


def loaded(client: KVClient, copier: HostCopier, keys: list[bytes], pages: np.ndarray) -> float:
    """Return the seconds to look up, copy and verify a batch."""
    start = time.perf_counter()
    found = client.lookup({0: keys})
    done = copier.load_now(
        found.boot_id, found.groups[0].extents, pages[: len(found.groups[0].extents)]
    )
    seconds = time.perf_counter() - start
    client.release(found.lease)
    if not done.ok.all() or len(done.ok) != BATCH:
        raise SystemExit(f"a load failed: {done.reasons} {found.reason}")
    return seconds


def copy_part(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the ratios of the client's copies to plain copies, alternating in one run."""
    memory = "1GiB"
    with served(folder, "--memory", memory, "--stock-fraction-max", "0.3") as daemon:
        pages_kind = daemon.ready()["pages"]
        with attached(daemon.url, contract(PAGE_BYTES)) as client:
            assert client.arena is not None
            source, target = huge_blocks(BATCH), huge_blocks(BATCH)
            plain = HostCopier(PagedKV([source]), client.arena, sums=False, verify=False)
            summing = HostCopier(PagedKV([source]), client.arena)
            # Random order, as a busy engine's pages are: no neighbours to join into longer copies.
            pages = np.random.default_rng(2).permutation(BATCH).astype(np.int64)
            times: dict[str, list[float]] = {"memcpy": [], "store": [], "sealed": [], "load": []}
            for number in track(range(rounds + 2), "copies", console=CONSOLE, transient=True):
                one = {"memcpy": plain_copy(source, target)}
                one["store"], _ = stored(client, plain, pages, sums=False)
                one["sealed"], keys = stored(client, summing, pages, sums=True)
                one["load"] = loaded(client, summing, keys, pages)
                if number >= 2:  # the first rounds touch pages for the first time
                    for name, seconds in one.items():
                        times[name].append(seconds)
            for copier in (plain, summing):
                copier.close()
            del plain, summing, copier
    batch_gb = BATCH * PAGE_BYTES / 1e9
    result: dict[str, Any] = {
        "pages": pages_kind,
        "memcpy_gbs": batch_gb / statistics.median(times["memcpy"]),
        "stored_bytes_over_arena": rounds * 2 * BATCH * PAGE_BYTES / GIB,
    }
    for name, field in (
        ("store", "store_ratio"),
        ("sealed", "store_sealed_ratio"),
        ("load", "load_ratio"),
    ):
        ratios = [m / s for m, s in zip(times["memcpy"], times[name], strict=True)]
        result[field] = statistics.median(ratios)
        result[f"{field}_spread"] = [min(ratios), max(ratios)]
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


def restart_part(folder: Path, blocks: int) -> dict[str, Any]:
    """Return the memory per block, and the time of a restart on a full arena."""
    memory_bytes = -(-blocks * SMALL_BYTES // (64 * MIB)) * 64 * MIB
    with arena_folder() as arena:
        flags = ["--memory", str(memory_bytes), "--arena-dir", str(arena)]
        flags += ["--slot-bytes-min", "4096", "--no-verify-adopted"]
        with served(folder, *flags) as daemon:
            cold = daemon.ready()
            before = daemon.anonymous_bytes()
            with attached(daemon.url, contract(SMALL_BYTES)) as client:
                fill(client, blocks)
                after = daemon.anonymous_bytes()
            daemon.end(kill=True)
        with served(folder, *flags) as daemon:
            warm = daemon.ready()
        return {
            "restart_pages": cold["pages"],
            "blocks": warm["adopted_blocks"],
            "index_bytes_per_block": (after - before) / blocks,
            "cold_ready_s": cold["seconds"],
            "warm_ready_s": warm["seconds"],
            "adopt_s_per_million": warm["adopt_s"] * 1e6 / warm["adopted_blocks"],
        }


def fill(client: KVClient, blocks: int) -> None:
    """Commit ``blocks`` blocks; their bytes are zeros, like those of a new arena."""
    parent, step = b"", 4096
    digest = np.frombuffer(xxhash.xxh3_128_digest(bytes(SMALL_BYTES)), np.uint8)
    checksums = np.tile(digest, (step, 1, 1))
    for start in track(range(0, blocks, step), "a million blocks", console=CONSOLE, transient=True):
        count = min(step, blocks - start)
        slots = client.reserve({0: count})
        keys = [secrets.token_bytes(32) for _ in range(count)]
        group = CommitGroup(keys, slots.groups[0], checksums[:count], parent)
        answer = client.commit({0: group}, boot_id=slots.boot_id)
        if answer.reason or not answer.stored[0].all():
            raise SystemExit(f"a commit failed: {answer.reason}")
        parent = keys[-1]


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
    for part, argument in ((copy_part, arguments.rounds), (restart_part, arguments.blocks)):
        with tempfile.TemporaryDirectory(prefix="kvh-") as name:
            result.update(part(Path(name), argument))
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
