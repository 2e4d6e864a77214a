"""The part of ``kvhearth bench ssd`` that compares a tier with keys to one without, in turns."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from kvhearth_lab.bench.report import ratio_of, steps
from kvhearth_lab.bench.ssd.blocks import Driven, Mover, Ticker
from kvhearth_lab.bench.ssd.figures import BLOCK_BYTES, GB, Result, Sizes
from kvhearth_lab.bench.ssd.raw import FAMILY, Slots
from kvhearth_server.tiers.ssd.settings import SsdDirectorySpec, SsdSettings
from kvhearth_server.tiers.ssd.tier import SsdTier

_DRAIN_S = 30.0


@dataclass
class _Side:
    """One tier and its turns: seconds, and processor seconds, by kind."""

    mover: Mover
    seconds: dict[str, list[float]]
    cpu_s: dict[str, list[float]]


async def encryption_part(folder: Path, sizes: Sizes, interface: str, result: Result) -> None:
    """Store and load the same blocks with and without keys; nothing without ``cryptography``."""
    if importlib.util.find_spec("cryptography") is None:
        result.values["encryption"] = "the package cryptography is absent"
        return
    slots, numbers, ticker = Slots(), itertools.count(), Ticker()
    async with (
        _side(folder / "plain", slots, sizes, interface, sealed=False) as plain,
        _side(folder / "sealed", slots, sizes, interface, sealed=True) as sealed,
    ):
        count = sizes.round_bytes // BLOCK_BYTES
        await plain.mover.store(itertools.islice(numbers, count))  # files are made at first use
        await sealed.mover.store(itertools.islice(numbers, count))
        for _ in steps(sizes.rounds, "with and without keys"):
            fresh = list(itertools.islice(numbers, count))
            for side in (plain, sealed):
                await _turn(side, "write", side.mover.store, fresh)
            for side in (plain, sealed):
                await _turn(side, "read", side.mover.load, fresh)
        async with ticker.running():
            await sealed.mover.store(list(itertools.islice(numbers, count)))
    size = sizes.round_bytes / GB
    for kind in ("write", "read"):
        result.put(f"encrypted_{kind}_gbs", [size / each for each in sealed.seconds[kind]])
        ratios = ratio_of(plain.seconds[kind], sealed.seconds[kind])
        result.put(f"encrypted_{kind}_ratio", ratios)
        for name, side in (("plain", plain), ("encrypted", sealed)):
            used = [each / size for each in side.cpu_s[kind]]
            result.put(f"{name}_{kind}_cpu_s_per_gb", used, 4)
    result.values["encrypted_loop_block_max_ms"] = round(ticker.late_s * 1e3, 1)


@contextlib.asynccontextmanager
async def _side(
    folder: Path, slots: Slots, sizes: Sizes, interface: str, *, sealed: bool
) -> AsyncIterator[_Side]:
    from kvhearth_server.tiers.ssd.sealing import Keyring

    folder.mkdir()
    capacity = sizes.encryption_bytes // 2
    settings = SsdSettings(
        (SsdDirectorySpec(folder, capacity),),
        segment_bytes=sizes.segment_bytes,
        interface=interface,
        depth=sizes.depth,
        keyring=Keyring({"bench": [secrets.token_bytes(32)]}) if sealed else None,
    )
    tier = SsdTier(settings, [slots.bytes])
    tier.use_owners(lambda name, epoch: "bench" if name == FAMILY.namespace else "")
    try:
        async with Driven(tier) as driven:
            await driven.settled()
            yield _Side(Mover(driven, slots), {}, {})
        tier.drain(_DRAIN_S)
        tier.check()
    finally:
        tier.close()
        shutil.rmtree(folder)


async def _turn(
    side: _Side, kind: str, work: Callable[[list[int]], Awaitable[None]], numbers: list[int]
) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    await work(numbers)
    side.seconds.setdefault(kind, []).append(time.perf_counter() - start)
    side.cpu_s.setdefault(kind, []).append(time.process_time() - cpu)
