"""Lookups beside empty calls, at ten thousand blocks and at all of them, and the index's memory.

A lookup leases the blocks that it finds. Leases are released after a series, so that no release
shares the daemon with a measured lookup.
"""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass

from kvhearth.client import KVClient
from kvhearth.results import LookupResult
from kvhearth.transports.base import CacheTransport
from kvhearth_lab.bench.daemon import (
    Served,
    attached,
    broken,
    contract,
    empty_call,
    keys_of,
    served,
    store_zeros,
    wire,
)
from kvhearth_lab.bench.local.figures import KEYS, KEYS_LONG, SLAB_BYTES, SMALL_BYTES, Result, Sizes
from kvhearth_lab.bench.local.load_client import crowd
from kvhearth_lab.bench.local.scrapes import scrape_part
from kvhearth_lab.bench.report import p50, p99, steps, us

_COMMIT_KEYS = 4096
_SERIES = 50
CONTRACT = contract(SMALL_BYTES)


@dataclass(frozen=True)
class Lookups:
    """One client and its daemon, transports for empty calls, and the run's keys."""

    daemon: Served
    client: KVClient
    rpc: CacheTransport
    frames: CacheTransport
    result: Result
    seed: bytes

    def fill(self, first: int, end: int) -> None:
        """Commit the blocks ``first`` to ``end``; their bytes are zeros, as a new arena's are."""
        starts = range(first, end, _COMMIT_KEYS)
        for number in steps(len(starts), f"{end:,} blocks"):
            count = min(_COMMIT_KEYS, end - starts[number])
            store_zeros(self.client, SMALL_BYTES, self.seed, starts[number], count)
            self.result.store(count, count)

    def lookup(self, keys: list[bytes]) -> tuple[float, LookupResult]:
        """Return the seconds and the result of a lookup that finds and leases every key."""
        start = time.perf_counter()
        found = self.client.lookup({0: keys})
        seconds = time.perf_counter() - start
        if not found.groups[0].leased.all():
            raise broken(f"a lookup missed: {found.reason or found.lease_short or 'evicted'}")
        return seconds, found

    def series(self, what: str, blocks: int, key_count: int, count: int) -> Series:
        """Run ``count`` lookups of neighbours in a chain, each right after an empty call."""
        places = random.Random(blocks)
        calls, framed, lookups = [], [], []
        rounds = -(-count // _SERIES)
        for _ in steps(rounds, what):
            starts = [places.randrange(blocks - key_count + 1) for _ in range(_SERIES)]
            asked = [keys_of(self.seed, start, key_count) for start in starts]
            leases = []
            for keys in asked:
                calls.append(empty_call(self.rpc))
                framed.append(empty_call(self.frames))
                seconds, found = self.lookup(keys)
                lookups.append(seconds)
                leases.append(found.lease)
            for lease in leases:
                self.client.release(lease)
            self.daemon.wait_quiet()
        return Series(calls[:count], framed[:count], lookups[:count])


@dataclass(frozen=True)
class Series:
    """Seconds of empty gRPC calls, empty frames and lookups, in turn."""

    calls: list[float]
    framed: list[float]
    lookups: list[float]


def lookup_part(result: Result, sizes: Sizes) -> None:
    """Measure all figures of lookups through the daemon."""
    slabs = -(-sizes.blocks * SMALL_BYTES // SLAB_BYTES) + 1
    with served(
        memory=slabs * SLAB_BYTES,
        slot_bytes_min=SMALL_BYTES,
        slab_bytes=SLAB_BYTES,
        http="127.0.0.1:0",
    ) as daemon:
        said = daemon.ready()
        before = daemon.anonymous_bytes()
        with (
            attached(daemon.client_url, CONTRACT) as client,
            wire(daemon.client_url, CONTRACT) as rpc,
            wire(daemon.client_url, CONTRACT, calls="frames") as framed,
        ):
            one = Lookups(daemon, client, rpc, framed, result, secrets.token_bytes(16))
            one.fill(0, sizes.blocks_small)
            _small(one, sizes)
            one.fill(sizes.blocks_small, sizes.blocks)
            grown = daemon.anonymous_bytes() - before
            result.values["blocks"] = sizes.blocks
            result.values["index_bytes_per_block"] = round(grown / sizes.blocks, 1)
            _many(one, sizes)
            address = str(said["http"])
            scrape_part(result, sizes, daemon, client, seed=one.seed, address=address)
        result.book_errors += daemon.book_errors()


def _small(one: Lookups, sizes: Sizes) -> None:
    values = one.result.values
    found = one.series("lookups, few blocks", sizes.blocks_small, KEYS, sizes.lookups)
    values["rpc_p50_us"], values["rpc_p99_us"] = us(p50(found.calls)), us(p99(found.calls))
    values["frame_p50_us"], values["frame_p99_us"] = us(p50(found.framed)), us(p99(found.framed))
    values["lookup512_p50_us"] = us(p50(found.lookups))
    values["lookup512_p99_us"] = us(p99(found.lookups))
    values["lookup512_ratio"] = round(p50(found.lookups) / p50(found.calls), 2)
    values["lookup512_p99_ratio"] = round(p99(found.lookups) / p99(found.calls), 2)


def _many(one: Lookups, sizes: Sizes) -> None:
    values = one.result.values
    found = one.series("lookups, all blocks", sizes.blocks, KEYS, sizes.lookups)
    values["rpc_1m_p50_us"] = us(p50(found.calls))
    values["lookup512_1m_p50_us"] = us(p50(found.lookups))
    values["lookup512_1m_ratio"] = round(p50(found.lookups) / p50(found.calls), 2)
    found = one.series("lookups of 4096 keys", sizes.blocks, KEYS_LONG, sizes.lookups_long)
    values["lookup4096_p50_us"] = us(p50(found.lookups))
    for _ in steps(1, "8 clients"):
        rate = crowd(one.daemon.client_url, one.seed, sizes.blocks, sizes.crowd_s)
        values["clients8_lookups_per_s"] = round(rate)
    one.daemon.wait_quiet()
