"""The part of ``kvhearth bench ssd`` that moves 2 MiB blocks: raw and tier in turns."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvhearth_lab.bench.report import p50, p99, ratio_of, steps
from kvhearth_lab.bench.ssd.driver import Driven, Mover, Ticker
from kvhearth_lab.bench.ssd.figures import BLOCK_BYTES, GB, Result, Sizes
from kvhearth_lab.bench.ssd.raw import Raw, Slots
from kvhearth_server.tiers.ssd.settings import Place, SsdSettings
from kvhearth_server.tiers.ssd.tier import SsdTier

_IDLE_S = 1.0
_DRAIN_S = 30.0
_PASSES = {"write": 4}
"""Rounds in a turn, if not one. In a short turn of writes, a tenth would be its beginning and its
end.
"""


@dataclass(frozen=True)
class Took:
    """Wall and processor seconds of a turn."""

    seconds: float
    cpu_s: float


@dataclass
class Turns:
    """Turns of each kind, by name."""

    took: dict[str, list[Took]] = field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block as a turn."""
        start, cpu = time.perf_counter(), time.process_time()
        yield
        took = Took(time.perf_counter() - start, time.process_time() - cpu)
        self.took.setdefault(name, []).append(took)

    def seconds(self, name: str) -> list[float]:
        """Return the seconds of each turn."""
        return [each.seconds for each in self.took[name]]


class Course:
    """Measures the tier in ``folder`` against raw requests to the same places. The tier's folder is
    removed at the end.
    """

    def __init__(self, folder: Path, sizes: Sizes, interface: str, result: Result) -> None:
        self._folder, self._sizes, self._result = folder, sizes, result
        self._interface = interface
        self._turns = Turns()
        self._slots = Slots()
        self._ticker, self._idle = Ticker(), Ticker()
        self._next = itertools.count()
        self._next_number = 0

    async def run(self) -> None:
        """Measure everything; raises OSError if the drive or the tier fails."""
        sizes, values = self._sizes, self._result.values
        values["pages"] = self._slots.pages
        raw = Raw(self._slots, sizes, self._interface)
        place = Place(self._folder / "tier", sizes.tier_bytes)
        place.path.mkdir()
        settings = SsdSettings(
            (place,),
            segment_bytes=sizes.segment_bytes,
            interface=self._interface,
            depth=sizes.depth,
            prewrite=True,
        )
        tier = SsdTier(settings, [self._slots.bytes])
        try:
            async with self._idle.running():
                await asyncio.sleep(_IDLE_S)
            async with Driven(tier) as driven:
                await driven.settled()
                await self._measure(raw, driven)
                values["tier_call_max_ms"] = round(driven.call_s * 1e3, 1)
                values["tier_call_cpu_max_ms"] = round(driven.call_cpu_s * 1e3, 1)
            values["loop_block_max_ms"] = round(self._ticker.late_s * 1e3, 1)
            values["loop_idle_max_ms"] = round(self._idle.late_s * 1e3, 1)
            tier.drain(_DRAIN_S)
            tier.check()
        finally:
            tier.close()
            raw.close()
            shutil.rmtree(place.path)
        self._figures()

    async def _measure(self, raw: Raw, driven: Driven) -> None:
        mover, tier = Mover(driven, self._slots), driven.tier
        # Fill once, so that rounds overwrite: this is a drive's sustained speed.
        await mover.store(self._fresh(self._sizes.tier_bytes))
        # Nothing was loaded yet, so that making room carries no block over.
        stored, written = tier.counts["stored_bytes"], tier.counts["written_bytes"]
        for _ in steps(self._sizes.rounds, "writes"):
            await self._write(raw, mover)
        stored = tier.counts["stored_bytes"] - stored
        self._result.values["write_amplification"] = round(
            (tier.counts["written_bytes"] - written) / stored, 4
        )
        for _ in steps(self._sizes.rounds, "reads"):
            await self._read(raw, mover)
        driven.closely = True
        carried = tier.counts["carried_blocks"]
        for _ in steps(self._sizes.rounds, "both"):
            await self._mix(raw, mover)
        self._result.values["mixed_carried_blocks"] = tier.counts["carried_blocks"] - carried
        for _ in steps(1, "reads among writes"):
            await self._among(raw, mover)
        for _ in steps(1, "a scrub"):
            await self._scrub(mover)

    def _fresh(self, size: int) -> list[int]:
        numbers = list(itertools.islice(self._next, size // BLOCK_BYTES))
        self._next_number = numbers[-1] + 1
        return numbers

    def _aim(self, raw: Raw, mover: Mover, size: int) -> None:
        """Direct raw requests to the places of the tier's youngest blocks. The loop is blocked
        during a raw turn, so the blocks stay there.
        """
        end = self._next_number
        raw.use(mover.spots(range(max(0, end - size // BLOCK_BYTES), end)))

    async def _write(self, raw: Raw, mover: Mover) -> None:
        passes = _PASSES["write"]
        self._aim(raw, mover, self._sizes.tier_bytes)
        with self._turns.timed("raw_write"):
            raw.write(passes)
        fresh = self._fresh(passes * self._sizes.round_bytes)
        with self._turns.timed("write"):
            await mover.store(fresh)
        # Repeat with the timer: its 200 wakeups a second cost a third as much as the loop's work.
        self._last = self._fresh(self._sizes.round_bytes)
        async with self._ticker.running():
            await mover.store(self._last)

    async def _read(self, raw: Raw, mover: Mover) -> None:
        self._aim(raw, mover, self._sizes.round_bytes)
        with self._turns.timed("raw_read"):
            raw.read()
        with self._turns.timed("read"):
            await mover.load(self._last)
        async with self._ticker.running():
            await mover.load(self._last)

    async def _mix(self, raw: Raw, mover: Mover) -> None:
        fresh = self._fresh(self._sizes.round_bytes // 2)
        self._aim(raw, mover, self._sizes.round_bytes)
        with self._turns.timed("raw_mixed"):
            raw.mix()
        async with self._ticker.running():
            with self._turns.timed("mixed"):
                await asyncio.gather(
                    mover.load(self._last[-len(fresh) :], batches=2),
                    mover.store(fresh, batches=2),
                )
        self._last = fresh

    async def _among(self, raw: Raw, mover: Mover) -> None:
        sizes, values = self._sizes, self._result.values
        self._aim(raw, mover, sizes.round_bytes)
        alone = raw.reads_among_writes(sizes.reads)
        async with self._ticker.running():
            times = await mover.loads_among_stores(self._next, sizes.reads)
        values["raw_read_p99_ms"] = round(p99(alone) * 1e3, 2)
        values["read_p50_ms"] = round(p50(times) * 1e3, 2)
        values["read_p99_ms"] = round(p99(times) * 1e3, 2)

    async def _scrub(self, mover: Mover) -> None:
        async with self._ticker.running():
            start = time.perf_counter()
            blocks = await mover.walk()
            seconds = time.perf_counter() - start
        self._result.values["scrub_gbs"] = round(blocks * BLOCK_BYTES / GB / seconds, 3)

    def _figures(self) -> None:
        result, turns = self._result, self._turns
        round_gb = self._sizes.round_bytes / GB
        for name in ("write", "read", "mixed"):
            size = round_gb * _PASSES.get(name, 1)
            for side in (f"raw_{name}", name):
                result.put(f"{side}_gbs", [size / each for each in turns.seconds(side)])
                if name != "mixed":
                    used = [each.cpu_s / size for each in turns.took[side]]
                    result.put(f"{side}_cpu_s_per_gb", used, 4)
            ratios = ratio_of(turns.seconds(f"raw_{name}"), turns.seconds(name))
            result.put(f"{name}_ratio", ratios)
        values = result.values
        worse = max(("write", "read"), key=lambda name: float(values[f"{name}_cpu_s_per_gb"]))
        values["cpu_s_per_gb"] = values[f"{worse}_cpu_s_per_gb"]
        result.spread["cpu_s_per_gb"] = result.spread[f"{worse}_cpu_s_per_gb"]
