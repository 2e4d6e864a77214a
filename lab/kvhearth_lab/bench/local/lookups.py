"""Lookups beside empty calls, at ten thousand blocks and at all of them, and the index's memory.

The base of every ratio is the empty frame, measured right before each lookup. A lookup leases the
blocks that it finds. Leases are released after a series, so that no release shares the daemon with
a measured lookup, and once the daemon has heard of them, so that no posted lookup does.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvhearth.client import KVClient
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.results import LookupResult
from kvhearth.transports.base import CacheTransport
from kvhearth_lab.bench.daemon import (
    CHAIN_KEYS,
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
from kvhearth_lab.harness.engine import BLOCK_TOKENS, contract_of

_COMMIT_KEYS = 4096
_SCATTERED_BLOCKS = 2 * CHAIN_KEYS
_SHARDS = 8
_WINDOW_BLOCKS = 64
CONTRACT = contract(SMALL_BYTES)

Question = tuple[dict[int, list[bytes]], int]
"""Keys by group, and the number of blocks from the start that are to be found."""


@dataclass(frozen=True)
class Series:
    """Seconds of empty frames and of lookups, in turn."""

    framed: list[float]
    lookups: list[float]

    @property
    def ratio(self) -> float:
        """Median of the lookups against that of the empty frames."""
        return round(p50(self.lookups) / p50(self.framed), 2)


@dataclass(frozen=True)
class Lookups:
    """One client and its daemon, a transport for empty frames, and the run's keys.

    Attributes:
        leases: lookups until their leases are released; the index promises no more than fits.
    """

    daemon: Served
    client: KVClient
    frames: CacheTransport
    result: Result
    seed: bytes
    leases: int = 50

    def fill(self, first: int, end: int) -> None:
        """Commit the blocks ``first`` to ``end``; their bytes are zeros, as a new arena's are."""
        starts = range(first, end, _COMMIT_KEYS)
        for number in steps(len(starts), f"{end:,} blocks"):
            count = min(_COMMIT_KEYS, end - starts[number])
            store_zeros(self.client, SMALL_BYTES, self.seed, starts[number], count)
            self.result.store(count, count)

    def lookup(self, question: Question) -> tuple[float, LookupResult]:
        """Return the seconds and the result of a lookup that finds and leases what it should."""
        keys, blocks = question
        start = time.perf_counter()
        found = self.client.lookup(keys)
        seconds = time.perf_counter() - start
        if found.hit_tokens != blocks * BLOCK_TOKENS or (blocks and found.lease is None):
            why = found.reason or found.lease_short or "evicted"
            tokens = f"{found.hit_tokens} tokens, not {blocks * BLOCK_TOKENS}"
            raise broken(f"a lookup found {tokens}: {why}")
        return seconds, found

    def series(self, what: str, ask: Callable[[], Question], count: int) -> Series:
        """Run ``count`` lookups, each right after an empty frame."""
        framed, lookups = list[float](), list[float]()
        for _ in steps(-(-count // self.leases), what):
            asked, leases = [ask() for _ in range(self.leases)], []
            for question in asked:
                framed.append(empty_call(self.frames))
                seconds, found = self.lookup(question)
                lookups.append(seconds)
                leases.append(found.lease)
            for lease in leases:
                self.daemon.wait_heard(lease)
                self.client.release(lease)
            self.daemon.wait_quiet()
        return Series(framed[:count], lookups[:count])


def _neighbours(seed: bytes, blocks: int, key_count: int = KEYS) -> Callable[[], Question]:
    """Ask for neighbours of a chain, from random places."""
    places = random.Random(blocks)

    def ask() -> Question:
        start = places.randrange(blocks - key_count + 1)
        return {0: keys_of(seed, start, key_count)}, key_count

    return ask


def lookup_part(result: Result, sizes: Sizes) -> None:
    """Measure all figures of lookups through the daemon."""
    slabs = -(-(sizes.blocks + _SCATTERED_BLOCKS) * SMALL_BYTES // SLAB_BYTES) + 1
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
            wire(daemon.client_url, CONTRACT, calls="frames") as framed,
        ):
            one = Lookups(daemon, client, framed, result, secrets.token_bytes(16))
            one.fill(0, sizes.blocks_small)
            _small(one, sizes)
            one.fill(sizes.blocks_small, sizes.blocks)
            grown = daemon.anonymous_bytes() - before
            result.values["blocks"] = sizes.blocks
            result.values["index_bytes_per_block"] = round(grown / sizes.blocks, 1)
            _many(one, sizes)
            _shapes(one, sizes)
            address = str(said["http"])
            scrape_part(result, sizes, daemon, client, seed=one.seed, address=address)
        result.book_errors += daemon.book_errors()
    _layouts(result, sizes)


def _small(one: Lookups, sizes: Sizes) -> None:
    values = one.result.values
    ask = _neighbours(one.seed, sizes.blocks_small)
    found = one.series("lookups, few blocks", ask, sizes.lookups)
    values["frame_p50_us"], values["frame_p99_us"] = us(p50(found.framed)), us(p99(found.framed))
    values["lookup512_p50_us"] = us(p50(found.lookups))
    values["lookup512_p99_us"] = us(p99(found.lookups))
    values["lookup512_frame_ratio"] = found.ratio
    values["lookup512_p99_ratio"] = round(p99(found.lookups) / p99(found.framed), 2)


def _many(one: Lookups, sizes: Sizes) -> None:
    values = one.result.values
    found = one.series("lookups, all blocks", _neighbours(one.seed, sizes.blocks), sizes.lookups)
    values["lookup512_1m_p50_us"] = us(p50(found.lookups))
    values["lookup512_1m_ratio"] = found.ratio
    ask = _neighbours(one.seed, sizes.blocks, KEYS_LONG)
    found = one.series("lookups of 4096 keys", ask, sizes.lookups_long)
    values["lookup4096_p50_us"] = us(p50(found.lookups))
    for _ in steps(1, "8 clients"):
        rate = crowd(one.daemon.client_url, one.seed, sizes.blocks, sizes.crowd_s)
        values["clients8_lookups_per_s"] = round(rate)
    one.daemon.wait_quiet()


def _shapes(one: Lookups, sizes: Sizes) -> None:
    """Measure lookups beside all blocks that are no whole hit of neighbours."""
    scattered = secrets.token_bytes(16)
    for start in range(0, _SCATTERED_BLOCKS, _COMMIT_KEYS):
        store_zeros(one.client, SMALL_BYTES, scattered, start, _COMMIT_KEYS, scattered=True)
        one.result.store(_COMMIT_KEYS, _COMMIT_KEYS)
    whole = _neighbours(one.seed, sizes.blocks)

    def unknown(count: int) -> list[bytes]:
        return keys_of(secrets.token_bytes(16), 0, count)

    def half() -> Question:
        keys, _ = whole()
        return {0: keys[0][: KEYS // 2] + unknown(KEYS - KEYS // 2)}, KEYS // 2

    for name, ask in (
        ("fragmented", _neighbours(scattered, _SCATTERED_BLOCKS)),
        ("half", half),
        ("miss", lambda: ({0: unknown(KEYS)}, 0)),
    ):
        found = one.series(f"lookups, {name}", ask, sizes.lookups)
        one.result.values[f"lookup512_{name}_ratio"] = found.ratio


def _layouts(result: Result, sizes: Sizes) -> None:
    """Measure lookups of blocks of several shards, and of several groups."""
    window = BLOCK_TOKENS * _WINDOW_BLOCKS
    groups = (
        GroupSpec(GroupKind.FULL, BLOCK_TOKENS, SMALL_BYTES),
        GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, SMALL_BYTES, window_tokens=window),
    )
    for name, made in (
        (f"shards{_SHARDS}", contract_of(SMALL_BYTES, shards=_SHARDS)),
        ("groups2", Contract("bench", "r", "uint8", groups)),
    ):
        result.values[f"lookup512_{name}_ratio"] = _layout(result, sizes, made, name)


def _layout(result: Result, sizes: Sizes, made: Contract, name: str) -> float:
    shards = sum(group.shards for group in made.groups)
    numbers = range(len(made.groups))
    slabs = -(-2 * sizes.blocks_small * shards * SMALL_BYTES // SLAB_BYTES) + len(numbers)
    with (
        served(
            memory=slabs * SLAB_BYTES,
            slot_bytes_min=SMALL_BYTES,
            slab_bytes=SLAB_BYTES,
        ) as daemon,
        contextlib.ExitStack() as undo,
    ):
        daemon.ready()
        client = undo.enter_context(attached(daemon.client_url, made))
        framed = undo.enter_context(wire(daemon.client_url, CONTRACT, calls="frames"))
        leases = max(1, sizes.blocks_small // KEYS // 2)
        one = Lookups(daemon, client, framed, result, secrets.token_bytes(16), leases)
        for start in range(0, sizes.blocks_small, _COMMIT_KEYS // shards):
            count = min(_COMMIT_KEYS // shards, sizes.blocks_small - start)
            for group in numbers:
                store_zeros(client, SMALL_BYTES, one.seed, start, count, group=group)
                result.store(count, count)
        whole = _neighbours(one.seed, sizes.blocks_small, KEYS // len(numbers))

        def ask() -> Question:
            keys, blocks = whole()
            return dict.fromkeys(numbers, keys[0]), blocks

        found = one.series(f"lookups, {name}", ask, sizes.lookups)
        result.book_errors += daemon.book_errors()
    return found.ratio
