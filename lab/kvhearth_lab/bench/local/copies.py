"""Copies of 2 MiB blocks in this process, measured against a plain copy."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvhearth.client import KVClient
from kvhearth.copiers.base import Done
from kvhearth.copiers.host import HostCopier
from kvhearth.errors import KVHearthError
from kvhearth.model import I64, U8
from kvhearth.page_layout import PagedKV
from kvhearth.results import CommitGroup, LookupResult
from kvhearth.session.arena import ArenaMapping
from kvhearth.transfer import ReservationPool
from kvhearth.transports.base import CacheTransport
from kvhearth_lab.bench.daemon import Served, attached, broken, contract, empty_call, served, wire
from kvhearth_lab.bench.local.figures import BATCH, PAGE_BYTES, Result, Sizes
from kvhearth_lab.bench.peers.adapters.harness import huge_or_not, pages_behind
from kvhearth_lab.bench.report import p50, ratio_of, steps, us


def blocks(seed: int) -> tuple[U8, str]:
    """Return a batch of distinct, touched blocks, shape (BATCH, PAGE_BYTES), and the kind of its
    pages: huge ones if enough are free, as an engine's pinned pool would have.
    """
    made, kind = huge_or_not(BATCH, PAGE_BYTES, hugepages=True)
    random = np.random.default_rng(seed)
    made[:] = random.integers(0, 256, PAGE_BYTES, np.uint8)
    made[:, 0] = np.arange(BATCH)
    return made, pages_behind(made, kind)


def shuffled() -> I64:
    """Return all block indices in random order, as in a busy engine: few can be joined into longer
    copies.
    """
    return np.random.default_rng(2).permutation(BATCH).astype(np.int64)


def plain_batch(source: U8, target: U8) -> float:
    """Return the seconds to copy a batch, block by block."""
    start = time.perf_counter()
    for index in range(BATCH):
        np.copyto(target[index], source[index])
    return time.perf_counter() - start


def plain_one(source: U8, target: U8, index: int) -> float:
    """Return the seconds to copy one block."""
    start = time.perf_counter()
    np.copyto(target[index], source[index])
    return time.perf_counter() - start


_WARM_ROUNDS = 2
"""Number of rounds until the arena is full and every page of it was touched."""
_ONES_BETWEEN_QUIET = 16
"""Number of rounds back to back, as in an engine; the daemon checksums one block while the next is
copied.
"""
_ROUNDS_AGO = 4
"""Rounds from the store of a block to its load (or twice as many), so that no cache holds it."""
_STOCK_BLOCKS = 32
_STOCK_WAIT_S = 20.0
CONTRACT = contract(PAGE_BYTES)
Measure = Callable[[], float]


@dataclass
class Bench:
    """One client, its pages and copiers, and the keys of the last store.

    Attributes:
        plain, sealing: store from ``source``, the second with checksums.
        trusting, verifying: load into ``target``, the second with verification.
    """

    daemon: Served
    client: KVClient
    result: Result
    source: U8
    target: U8
    pages: I64
    plain: HostCopier
    sealing: HostCopier
    trusting: HostCopier
    verifying: HostCopier
    keys: list[bytes]

    def store(self, copier: HostCopier) -> float:
        """Return the seconds of reserve, copy and commit of a batch."""
        keys = [secrets.token_bytes(32) for _ in range(BATCH)]
        start = time.perf_counter()
        slots = self.client.reserve({0: BATCH})
        extents = slots.groups[0]
        done = copier.store_now(slots.boot_id, self.pages[: len(extents)], extents[:, 0])
        group = CommitGroup(keys[: len(extents)], extents, done.checksums)
        answer = self.client.commit({0: group}, boot_id=slots.boot_id)
        seconds = time.perf_counter() - start
        kept = int(np.count_nonzero(answer.stored[0] & done.ok))
        self.result.store(BATCH, kept)
        if kept < BATCH // 2:
            raise broken(f"stores do not work: {slots.reason or answer.reason or done.reasons}")
        self.keys = keys
        return seconds

    def load(self, copier: HostCopier) -> float:
        """Return the seconds of lookup and copy (and verification) of the batch that was stored
        last.
        """
        start = time.perf_counter()
        found = self.client.lookup({0: self.keys})
        extents = found.groups[0].extents
        done = copier.load_now(found.boot_id, extents, self.pages[: len(extents)])
        seconds = time.perf_counter() - start
        self.client.release(found.lease)
        if len(done.ok) != BATCH or not done.ok.all():
            raise _not_loaded(found, done)
        return seconds

    def store_one(self, slot_pool: ReservationPool, copier: HostCopier, index: int) -> float:
        """Return the seconds of copy and commit of one block into a slot that was reserved
        ahead.
        """
        if not slot_pool.held(0):  # refilling is not on the path of an engine either
            slot_pool.give_back(0, slot_pool.take(0, 1, wait_s=_STOCK_WAIT_S))
        key = secrets.token_bytes(32)
        page = self.pages[index : index + 1]
        start = time.perf_counter()
        slots = slot_pool.take(0, 1, wait_s=_STOCK_WAIT_S)
        done = copier.store_now(slots.boot_id, page[: len(slots)], slots.extents[:, 0])
        group = CommitGroup([key][: len(slots)], slots.extents, done.checksums)
        answer = self.client.commit({0: group}, boot_id=slots.boot_id)
        seconds = time.perf_counter() - start
        self.result.store(1, int(np.count_nonzero(answer.stored[0] & done.ok)))
        self.keys = [key]
        return seconds

    def load_one(self, copier: HostCopier, index: int, key: bytes | None = None) -> float:
        """Return the seconds of lookup and copy of one block, by default of the one that was stored
        last. The release is not included.
        """
        keys = self.keys if key is None else [key]
        start = time.perf_counter()
        found = self.client.lookup({0: keys})
        extents = found.groups[0].extents
        page = self.pages[index : index + 1]
        done = copier.load_now(found.boot_id, extents, page[: len(extents)])
        seconds = time.perf_counter() - start
        self.client.release(found.lease)
        if not len(done.ok) or not done.ok.all():
            raise _not_loaded(found, done)
        return seconds


def _not_loaded(found: LookupResult, done: Done) -> KVHearthError:
    """Return the error for a load that did not bring every block."""
    group = found.groups[0]
    counted = (
        f"of {len(group.present)} blocks {group.present.sum()} there, {group.ready.sum()} ready"
    )
    why = found.reason or found.lease_short or done.reasons or counted
    return broken(f"a load failed: {why}")


@contextlib.contextmanager
def bench_of(
    daemon: Served, client: KVClient, result: Result, source: U8, target: U8, pages: I64
) -> Iterator[Bench]:
    """Provide a client's copiers for these blocks; raises KVHearthError without an arena."""
    arena = client.arena
    if not isinstance(arena, ArenaMapping):
        raise broken("the arena is not mapped")
    stores, loads = PagedKV([source]), PagedKV([target])
    made = Bench(
        daemon=daemon,
        client=client,
        result=result,
        source=source,
        target=target,
        pages=pages,
        plain=HostCopier(stores, arena, sums=False),
        sealing=HostCopier(stores, arena),
        trusting=HostCopier(loads, arena, verify=False),
        verifying=HostCopier(loads, arena),
        keys=[],
    )
    try:
        yield made
    finally:
        for copier in (made.plain, made.sealing, made.trusting, made.verifying):
            copier.close()


def copy_part(result: Result, sizes: Sizes) -> None:
    """Measure all figures of copies."""
    # Half of the arena may be reserved, for a batch and the pool.
    with served(memory=sizes.memory_bytes, stock_fraction_max=0.5) as daemon:
        result.values["pages"] = daemon.ready()["pages"]
        (source, result.values["source_pages"]), (target, _) = blocks(1), blocks(2)
        with (
            attached(daemon.client_url, CONTRACT) as client,
            bench_of(daemon, client, result, source, target, shuffled()) as bench,
        ):
            _batches(bench, sizes.rounds)
            with wire(daemon.client_url, CONTRACT) as calls:
                _ones(bench, calls, sizes.ones)
            _first_touches(bench, sizes.first_touches)
        result.book_errors += daemon.book_errors()


def _batches(bench: Bench, rounds: int) -> None:
    measures: dict[str, Measure] = {
        "store_ratio": lambda: bench.store(bench.plain),
        "store_sealed_ratio": lambda: bench.store(bench.sealing),
        "load_ratio": lambda: bench.load(bench.verifying),
        "load_unverified_ratio": lambda: bench.load(bench.trusting),
    }
    baselines: dict[str, list[float]] = {name: [] for name in measures}
    times: dict[str, list[float]] = {name: [] for name in measures}
    for number in steps(rounds + _WARM_ROUNDS, "batches of 128 x 2 MiB"):
        for name, measure in measures.items():
            baseline = plain_batch(bench.source, bench.target)
            seconds = measure()
            bench.daemon.wait_quiet()
            if number >= _WARM_ROUNDS:
                baselines[name].append(baseline)
                times[name].append(seconds)
        if number == 0 and not np.array_equal(bench.source, bench.target):
            raise broken("what was loaded is not what was stored")
    every = [seconds for part in baselines.values() for seconds in part]
    bench.result.values["memcpy_gbs"] = round(BATCH * PAGE_BYTES / p50(every) / 1e9, 2)
    for name in measures:
        bench.result.put(name, ratio_of(baselines[name], times[name]))


def _ones(bench: Bench, calls: CacheTransport, count: int) -> None:
    """Measure single blocks. Slots are reserved ahead and the release is deferred, so one call is
    on the path.

    Neither these copies nor the baseline touch recently used memory: blocks in the processor's
    cache are copied several times as fast.
    """
    slot_pool = ReservationPool(bench.client, {0: _STOCK_BLOCKS})
    baselines: list[float] = []
    times: dict[str, list[float]] = {}
    sealed: deque[bytes] = deque(maxlen=2 * _ROUNDS_AGO)
    try:
        for index in range(2 * _ROUNDS_AGO):
            bench.store_one(slot_pool, bench.sealing, index)
            sealed += bench.keys
        for number in steps(count, "single blocks of 2 MiB"):
            at, old, older = 2 * number % BATCH, sealed[_ROUNDS_AGO], sealed[0]
            measures = {
                "store_one": partial(bench.store_one, slot_pool, bench.plain, at),
                "store_one_sealed": partial(bench.store_one, slot_pool, bench.sealing, at + 1),
                "load_one": partial(bench.load_one, bench.verifying, at, old),
                "load_one_unverified": partial(bench.load_one, bench.trusting, at + 1, older),
            }
            if not number % _ONES_BETWEEN_QUIET:
                bench.daemon.wait_quiet()
            for name, measure in measures.items():
                index = len(baselines) % BATCH
                baselines.append(plain_one(bench.source, bench.target, index))
                times.setdefault(name, []).append(measure())
                if name == "store_one_sealed":
                    sealed += bench.keys
    finally:
        slot_pool.close()
    values, memcpy_s = bench.result.values, p50(baselines)
    # Measured after the others: no engine goes through gRPC between two blocks.
    times["rpc_one"] = _empty_calls(bench, calls, count)
    values["memcpy_one_p50_us"] = us(memcpy_s)
    again = [plain_one(bench.source, bench.target, 0) for _ in range(count)]
    values["memcpy_one_cached_p50_us"] = us(p50(again))
    for name, seconds in times.items():
        values[f"{name}_p50_us"] = us(p50(seconds))
    for name in ("store_one", "load_one"):
        values[f"{name}_ratio"] = round(p50(times[name]) / memcpy_s, 2)


def _empty_calls(bench: Bench, calls: CacheTransport, count: int) -> list[float]:
    """Return the seconds of empty calls, each after a plain copy."""
    bench.daemon.wait_quiet()
    times = []
    for number in steps(count, "empty calls between copies"):
        plain_one(bench.source, bench.target, number % BATCH)
        times.append(empty_call(calls))
    return times


def _first_touches(bench: Bench, count: int) -> None:
    """Measure the first store of a client that has just attached: its page tables are empty."""
    baselines, times = [], []
    for number in steps(count, "first touch of a mapping"):
        bench.daemon.wait_quiet()
        with attached(bench.daemon.client_url, CONTRACT, f"bench-fresh-{number}") as fresh:
            if not isinstance(fresh.arena, ArenaMapping):
                raise broken("the arena is not mapped")
            copier = HostCopier(PagedKV([bench.source]), fresh.arena, sums=False)
            one = Bench(**{**vars(bench), "client": fresh, "plain": copier})
            baselines.append(plain_batch(bench.source, bench.target))
            times.append(one.store(copier))
            bench.daemon.wait_quiet()
            copier.close()
            del one, copier
    bench.result.put("first_touch_ratio", ratio_of(baselines, times))
