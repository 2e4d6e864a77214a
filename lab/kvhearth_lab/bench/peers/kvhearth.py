"""KVHearth's side of a pair: the daemon and the real client, with the steps of a peer's adapter."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from kvhearth.client import KVClient
from kvhearth.copiers.host import HostCopier
from kvhearth.page_layout import PagedKV
from kvhearth.session.arena import ArenaMapping
from kvhearth.transfer import ReservationPool
from kvhearth_lab.bench.daemon import (
    Served,
    attached,
    broken,
    contract,
    keys_of,
    served,
    store_zeros,
)
from kvhearth_lab.bench.local.copies import CONTRACT, Bench, bench_of
from kvhearth_lab.bench.local.figures import (
    BATCH,
    KEYS,
    PAGE_BYTES,
    SLAB_BYTES,
    SMALL_BYTES,
    Result,
    Sizes,
)
from kvhearth_lab.bench.peers.adapters.harness import (
    Plain,
    compare,
    fill,
    huge_or_not,
    order,
    stamp,
    wipe,
)

_STOCK_BLOCKS = 32
_COMMIT_KEYS = 4096
SMALL_CONTRACT = contract(SMALL_BYTES)


class OurCopies:
    """Stores and loads of KVHearth.

    Args:
        bench: client and pages.
        slot_pool: slots for single blocks, reserved ahead.
        pages: kind of the arena's and of the engine's pages.
    """

    def __init__(self, bench: Bench, slot_pool: ReservationPool, pages: str) -> None:
        self.bench = bench
        self.pages = pages
        self.compared_bytes = 0
        self._plain = Plain(bench.source, bench.target)
        self._fresh = 0
        self.measures: Mapping[str, Callable[[int], float]] = {
            "store": lambda _: bench.store(bench.plain),
            "load": lambda _: bench.load(bench.verifying),
            "load_unverified": lambda _: bench.load(bench.trusting),
            "store_one": lambda index: bench.store_one(slot_pool, bench.plain, index),
            "load_one": lambda index: bench.load_one(bench.verifying, index),
            "load_one_unverified": lambda index: bench.load_one(bench.trusting, index),
            "first_touch": lambda _: self._first_touch(),
        }

    def run(self, measure: str, number: int) -> tuple[float, float]:
        """Return the seconds of a plain copy and of one measurement, with the checks of
        ``harness.run_one``. The daemon is quiet afterwards.

        Raises:
            KVHearthError: the measurement failed.
        """
        bench, index = self.bench, number % BATCH
        page = int(bench.pages[index])
        rows = slice(page, page + 1) if "_one" in measure else slice(None)
        source, target = bench.source[rows], bench.target[rows]
        load = measure.startswith("load")
        baseline = self._plain.beside(measure, number)
        if load:
            wipe(target)
        else:
            stamp(source, number)
        seconds = self.measures[measure](index)
        bench.daemon.wait_quiet()
        if load:
            try:
                self.compared_bytes += compare(source, target)
            except RuntimeError as error:
                raise broken(str(error)) from None
        return baseline, seconds

    def _first_touch(self) -> float:
        """Measure the first store of a client that has just attached."""
        self._fresh += 1
        url = self.bench.daemon.client_url
        with attached(url, CONTRACT, f"bench-fresh-{self._fresh}") as fresh:
            if not isinstance(fresh.arena, ArenaMapping):
                raise broken("the arena is not mapped")
            copier = HostCopier(PagedKV([self.bench.source]), fresh.arena, sums=False)
            seconds = replace(self.bench, client=fresh, plain=copier).store(copier)
            self.bench.daemon.wait_quiet()
            copier.close()
        return seconds


@contextlib.contextmanager
def our_copies(sizes: Sizes, hugepages: bool, books: list[str]) -> Iterator[OurCopies]:
    """Provide a daemon, a client and pages; ``books`` receives the daemon's books error, if any."""
    with served(
        memory=sizes.memory_bytes,
        stock_fraction_max=0.5,
        hugepages="prefer" if hugepages else "off",
    ) as daemon:
        said = daemon.ready()
        source, kind = huge_or_not(BATCH, PAGE_BYTES, hugepages)
        target, _ = huge_or_not(BATCH, PAGE_BYTES, hugepages)
        fill(source)
        pages = np.array(order(BATCH), np.int64)
        with (
            attached(daemon.client_url, CONTRACT) as client,
            bench_of(daemon, client, Result(), source, target, pages) as bench,
        ):
            slot_pool = ReservationPool(client, {0: _STOCK_BLOCKS})
            try:
                yield OurCopies(bench, slot_pool, f"arena {said['pages']}, engine {kind}")
            finally:
                slot_pool.close()
        books += daemon.book_errors()


class OurLookups:
    """Lookups of KVHearth, at as many blocks as a peer has.

    Args:
        daemon, client: attached with ``SMALL_CONTRACT``.
        blocks: number of blocks to store; their bytes are zeros, as a new arena's are.

    Raises:
        KVHearthError: they cannot be stored.
    """

    def __init__(self, daemon: Served, client: KVClient, blocks: int) -> None:
        self._daemon = daemon
        self._client = client
        self._seed = secrets.token_bytes(16)
        self._places = random.Random(blocks)
        self._last = blocks - KEYS
        for start in range(0, blocks, _COMMIT_KEYS):
            count = min(_COMMIT_KEYS, blocks - start)
            store_zeros(client, SMALL_BYTES, self._seed, start, count)

    def lookups(self, count: int) -> list[float]:
        """Return the seconds of each lookup, with leases on all keys; releases follow after all of
        them.
        """
        starts = [self._places.randrange(self._last + 1) for _ in range(count)]
        times, leases = [], []
        for keys in [keys_of(self._seed, start, KEYS) for start in starts]:
            start = time.perf_counter()
            found = self._client.lookup({0: keys})
            times.append(time.perf_counter() - start)
            if not found.groups[0].leased.all():
                raise broken(f"a lookup missed: {found.reason or found.lease_short or 'evicted'}")
            leases.append(found.lease)
        for lease in leases:
            self._client.release(lease)
        self._daemon.wait_quiet()
        return times


@contextlib.contextmanager
def our_lookups(blocks: int, hugepages: bool, books: list[str]) -> Iterator[OurLookups]:
    """Provide a daemon with this many small blocks."""
    slabs = -(-blocks * SMALL_BYTES // SLAB_BYTES) + 1
    with served(
        memory=slabs * SLAB_BYTES,
        slot_bytes_min=SMALL_BYTES,
        slab_bytes=SLAB_BYTES,
        hugepages="prefer" if hugepages else "off",
    ) as daemon:
        daemon.ready()
        with attached(daemon.client_url, SMALL_CONTRACT) as client:
            yield OurLookups(daemon, client, blocks)
        books += daemon.book_errors()
