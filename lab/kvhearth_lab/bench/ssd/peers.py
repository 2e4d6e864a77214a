"""Other caches' files on the same drive: stores and loads in turns with raw requests and ours.

They keep 2 MiB blocks as ours does, in files of their own, and verify nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvhearth_lab.bench.peers.adapter import (
    Adapter,
    PeerFailed,
    adapter_of,
    interpreters,
    seconds_of,
)
from kvhearth_lab.bench.peers.run import hugepages_free
from kvhearth_lab.bench.report import ratio_of, steps
from kvhearth_lab.bench.ssd.blocks import Driven, Mover, open_tier
from kvhearth_lab.bench.ssd.figures import BLOCK_BYTES, GB, SLOTS, Result, Sizes
from kvhearth_lab.bench.ssd.raw import Raw, Slots

LMCACHE, VLLM = "lmcache", "vllm"
_ADAPTERS = {LMCACHE: "lmcache_fs", VLLM: "vllm_fs"}
_LABELS = {LMCACHE: "lmcache", VLLM: "vllm_fs"}
_KINDS = {"store": "write", "load": "read"}
_SPARE_PAGES = 64
_WARM_ROUNDS = 1
_SETTLE_S = 0.3
"""Pause after a store of ours, in which the tier makes room ahead."""
_DRAIN_S = 30.0

_Round = dict[str, tuple[float, float]]
"""Seconds and processor seconds of raw requests, of the peer, and of ours."""


def peers_part(
    folder: Path, sizes: Sizes, interface: str, given: Mapping[str, Path | None]
) -> dict[str, Any]:
    """Return ``peers`` by name, the reasons why others were ``skipped``, and how ours compares:
    ``read_vs_*`` and ``write_vs_*``, a reason where a peer was skipped.
    """
    usable, skipped = interpreters(given)
    found: dict[str, Any] = {}
    for name, python in usable.items():
        own = folder / name
        own.mkdir()
        try:
            found[name] = asyncio.run(_beside(name, python, own, sizes, interface))
        except PeerFailed as failed:
            skipped[name] = str(failed)
    against = {
        f"{kind}_vs_{_LABELS[name]}": (
            found[name][f"{kind}_ours_vs"] if name in found else f"skipped: {skipped[name]}"
        )
        for name in given
        for kind in _KINDS.values()
    }
    return {"peers": found, "skipped": skipped, **against}


async def _beside(
    name: str, python: Path, folder: Path, sizes: Sizes, interface: str
) -> dict[str, Any]:
    """Return one peer's figures. Raises PeerFailed."""
    slots = Slots()
    raw = Raw(slots, sizes, interface)
    with contextlib.closing(raw), _adapter(name, python, folder) as adapter:
        # Two buffers of the peer, two of the plain copies that its harness compares with.
        huge = hugepages_free() >= 4 * SLOTS + _SPARE_PAGES
        said = adapter.prepare(
            part="files",
            memory_bytes=0,
            batch=SLOTS,
            page_bytes=BLOCK_BYTES,
            small_bytes=0,
            blocks=0,
            keys=0,
            hugepages=huge,
        )
        raw.use_file(folder / "raw")
        tier = open_tier(folder / "tier", slots, sizes, interface)
        try:
            async with Driven(tier) as driven:
                await driven.settled()
                sides = _Sides(raw, adapter, Mover(driven, slots))
                await sides.fill(sizes)
                result = await _rounds(sides, name, sizes)
            tier.drain(_DRAIN_S)
        finally:
            tier.close()
        for key in ("versions", "settings", "pages"):
            result.values[key] = said.get(key)
        result.values["our_pages"] = slots.pages
        return {**result.values, "spread": result.spread}


class _Sides:
    """Raw requests, a peer and ours, each of which moves its own blocks."""

    def __init__(self, raw: Raw, adapter: Adapter, mover: Mover) -> None:
        self._raw, self._adapter, self._mover = raw, adapter, mover
        self._next = 0

    async def fill(self, sizes: Sizes) -> None:
        """Write all of our tier once, so that it overwrites from now on."""
        self._next = sizes.tier_bytes // BLOCK_BYTES
        await self._mover.store(range(self._next))
        await asyncio.sleep(_SETTLE_S)

    async def round(self, measure: str, number: int) -> _Round:
        """Let each side store or load once; the order alternates."""
        took: _Round = {}
        for side in ("raw", "peer", "ours")[:: -1 if number % 2 else 1]:
            start, used = time.perf_counter(), time.process_time()
            if side == "peer":
                answer = self._adapter.run(measure, number)
                took[side] = seconds_of(answer), seconds_of(answer, "cpu_s")
                continue
            if side == "raw":
                self._raw.write() if measure == "store" else self._raw.read()
            else:
                await self._ours(measure)
            took[side] = time.perf_counter() - start, time.process_time() - used
            if side == "ours" and measure == "store":
                await asyncio.sleep(_SETTLE_S)
        return took

    async def _ours(self, measure: str) -> None:
        if measure == "store":
            self._next += SLOTS
            await self._mover.store(range(self._next - SLOTS, self._next))
        else:
            await self._mover.load(range(self._next - SLOTS, self._next))


async def _rounds(sides: _Sides, name: str, sizes: Sizes) -> Result:
    result = Result()
    for measure, kind in _KINDS.items():
        rounds = [
            await sides.round(measure, number)
            for number in steps(_WARM_ROUNDS + sizes.peer_rounds, f"{name}: {measure}s")
        ]
        _put(result, kind, rounds[_WARM_ROUNDS:], sizes)
    return result


def _put(result: Result, kind: str, rounds: list[_Round], sizes: Sizes) -> None:
    size = SLOTS * BLOCK_BYTES / GB
    # Scale to as many bytes as the peer moves.
    raw = [each["raw"][0] * SLOTS * BLOCK_BYTES / sizes.round_bytes for each in rounds]
    peer, ours = ([each[side][0] for each in rounds] for side in ("peer", "ours"))
    result.put(f"raw_{kind}_gbs", [size / each for each in raw])
    result.put(f"{kind}_gbs", [size / each for each in peer])
    result.put(f"ours_{kind}_gbs", [size / each for each in ours])
    result.put(f"{kind}_ratio", ratio_of(raw, peer))
    result.put(f"{kind}_ours_vs", ratio_of(peer, ours))
    for side, prefix in (("peer", ""), ("ours", "ours_")):
        used = [each[side][1] / size for each in rounds]
        result.put(f"{prefix}{kind}_cpu_s_per_gb", used, 4)


@contextlib.contextmanager
def _adapter(name: str, python: Path, folder: Path) -> Iterator[Adapter]:
    adapter = adapter_of(python, _ADAPTERS[name], folder)
    try:
        yield adapter
    finally:
        adapter.close()
