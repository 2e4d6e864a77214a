"""Single blocks with pauses between them, as an engine decodes, and stores until blocks are served.

After a pause of some milliseconds other work has taken the processor's caches: each step of a call
is read from memory again, and a plain copy's own start, too. Both sides pause alike.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import defaultdict

import numpy as np

from kvhearth.client import KVClient
from kvhearth.results import CommitGroup
from kvhearth.transfer import ReservationPool
from kvhearth_lab.bench.daemon import attached, broken, served
from kvhearth_lab.bench.local.copies import (
    CONTRACT,
    Bench,
    bench_of,
    blocks,
    plain_batch,
    plain_one,
    shuffled,
)
from kvhearth_lab.bench.local.figures import BATCH, Result, Sizes
from kvhearth_lab.bench.report import p50, ratio_of, steps, us

PAUSES_MS = (0, 1, 10)
_STOCK_BLOCKS = 32
_STOCK_WAIT_S = 20.0
_LOADED_AGO = 16
"""Blocks between the store of a block and its load: its bytes have left the caches."""
_BATCHES = 3
"""Batches of one measurement: half of the arena may be reserved or committed at a time."""


class CommitThread:
    """Commits blocks behind the caller, as the connector's commit thread does.

    Attributes:
        served_s: seconds from the start of each store until its block may be served.
        kept: number of committed blocks.
    """

    def __init__(self, client: KVClient) -> None:
        self.served_s: list[float] = []
        self.kept = 0
        self._client = client
        self._queue: queue.SimpleQueue[tuple[float, str, CommitGroup] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="bench-commit", daemon=True)
        self._thread.start()

    def put(self, began: float, boot_id: str, group: CommitGroup) -> None:
        """Queue the commit of one block."""
        self._queue.put((began, boot_id, group))

    def close(self) -> None:
        """Finish what is queued."""
        self._queue.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (item := self._queue.get()) is not None:
            began, boot_id, group = item
            answer = self._client.commit({0: group}, boot_id=boot_id)
            self.served_s.append(time.perf_counter() - began)
            self.kept += int(np.count_nonzero(answer.stored[0]))


def pauses_part(result: Result, sizes: Sizes) -> None:
    """Measure stores until their blocks may be served, and single blocks with pauses."""
    with served(memory=sizes.memory_bytes, stock_fraction_max=0.5) as daemon:
        daemon.ready()
        (source, _), (target, _) = blocks(1), blocks(2)
        with (
            attached(daemon.client_url, CONTRACT) as client,
            bench_of(daemon, client, result, source, target, shuffled()) as bench,
        ):
            _until_servable(bench, sizes.rounds)
            for pause_ms in PAUSES_MS:
                _paused(bench, pause_ms, max(sizes.ones // 4, _LOADED_AGO + 4))
        result.book_errors += daemon.book_errors()


def _until_servable(bench: Bench, rounds: int) -> None:
    """Store batches back to back, then look the last one up until it is served."""
    baselines, times = [], []
    for number in steps(rounds + 1, "batches until they are served"):
        baseline = sum(plain_batch(bench.source, bench.target) for _ in range(_BATCHES))
        start = time.perf_counter()
        for _ in range(_BATCHES):
            bench.store(bench.sealing)
        while True:
            found = bench.client.lookup({0: bench.keys}, lease=False)
            if found.reason:
                raise broken(f"a lookup failed: {found.reason}")
            if found.groups[0].ready.all():
                break
        seconds = time.perf_counter() - start
        bench.daemon.wait_quiet()
        if number:  # the first one touches the arena's pages
            baselines.append(baseline)
            times.append(seconds)
    bench.result.put("store_until_servable_ratio", ratio_of(baselines, times))


def _paused(bench: Bench, pause_ms: int, count: int) -> None:
    """Store and load one block after each pause; the commit is left to a thread of its own."""
    pool = ReservationPool(bench.client, {0: _STOCK_BLOCKS})
    commits = CommitThread(bench.client)
    times: dict[str, list[float]] = defaultdict(list)
    keys: list[bytes] = []
    try:
        for number in steps(count, f"single blocks with pauses of {pause_ms} ms"):
            if not pool.held(0):
                pool.give_back(0, pool.take(0, 1, wait_s=_STOCK_WAIT_S))
            time.sleep(pause_ms / 1000)
            times["plain"].append(plain_one(bench.source, bench.target, 3 * number % BATCH))
            time.sleep(pause_ms / 1000)
            keys.append(secrets.token_bytes(32))
            times["store"].append(_store(bench, pool, commits, number % BATCH, keys[-1]))
            if number >= _LOADED_AGO:
                time.sleep(pause_ms / 1000)
                key = keys[number - _LOADED_AGO]
                page = (5 * number + 1) % BATCH
                times["load"].append(bench.load_one(bench.verifying, page, key))
    finally:
        commits.close()
        pool.close()
    bench.result.store(count, commits.kept)
    times["served"] = commits.served_s
    suffix = "paused" if pause_ms == PAUSES_MS[-1] else f"paused_{pause_ms}ms"
    plain_s = p50(times["plain"])
    bench.result.values[f"memcpy_one_{suffix}_p50_us"] = us(plain_s)
    for name in ("store", "load", "served"):
        figure = f"store_one_served_{suffix}" if name == "served" else f"{name}_one_{suffix}"
        bench.result.values[f"{figure}_ratio"] = round(p50(times[name]) / plain_s, 2)


def _store(
    bench: Bench, pool: ReservationPool, commits: CommitThread, index: int, key: bytes
) -> float:
    """Return the seconds until the block's page may change again and its commit is queued."""
    page = bench.pages[index : index + 1]
    start = time.perf_counter()
    slots = pool.take(0, 1, wait_s=_STOCK_WAIT_S)
    done = bench.sealing.store_now(slots.boot_id, page[: len(slots)], slots.extents[:, 0])
    if not len(done.ok) or not done.ok.all():
        raise broken(f"a store failed: {done.reasons or 'no slot'}")
    commits.put(start, slots.boot_id, CommitGroup([key], slots.extents, done.checksums))
    return time.perf_counter() - start
