"""Other caches' files on the same drive: their stores and loads in turns with raw writes and reads.

They keep 2 MiB blocks as ours does, in files of their own, and verify nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvhearth_lab.bench.peers.adapter import Adapter, PeerFailed, interpreters, seconds_of
from kvhearth_lab.bench.peers.run import hugepages_free
from kvhearth_lab.bench.report import ratio_of, steps
from kvhearth_lab.bench.ssd.figures import BLOCK_BYTES, GB, SLOTS, Result, Sizes
from kvhearth_lab.bench.ssd.raw import Raw, Slots

LMCACHE, VLLM = "lmcache", "vllm"
_ADAPTERS = {LMCACHE: "lmcache_fs", VLLM: "vllm_fs"}
_SPARE_PAGES = 64
_WARM_ROUNDS = 1


def peers_part(
    folder: Path, sizes: Sizes, interface: str, given: Mapping[str, Path | None]
) -> dict[str, Any]:
    """Return ``peers`` by name, and the reasons why others were ``skipped``."""
    usable, skipped = interpreters(given)
    found: dict[str, Any] = {}
    for name, python in usable.items():
        own = folder / name
        own.mkdir()
        try:
            found[name] = _beside(name, python, own, sizes, interface)
        except PeerFailed as failed:
            skipped[name] = str(failed)
    return {"peers": found, "skipped": skipped}


def _beside(name: str, python: Path, folder: Path, sizes: Sizes, interface: str) -> dict[str, Any]:
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
        result = Result()
        for key in ("versions", "settings", "pages"):
            result.values[key] = said.get(key)
        for measure, kind, move in (("store", "write", raw.write), ("load", "read", raw.read)):
            rounds = [
                _round(adapter, measure, number, move)
                for number in steps(_WARM_ROUNDS + sizes.peer_rounds, f"{name}: {measure}s")
            ][_WARM_ROUNDS:]
            _put(result, kind, rounds, sizes)
        return {**result.values, "spread": result.spread}


def _round(adapter: Adapter, measure: str, number: int, move: Any) -> tuple[float, float, float]:
    """Return the seconds of the raw requests and of the peer, and the peer's processor time."""
    start = time.perf_counter()
    move()
    raw = time.perf_counter() - start
    answer = adapter.run(measure, number)
    return raw, seconds_of(answer), seconds_of(answer, "cpu_s")


def _put(result: Result, kind: str, rounds: list[tuple[float, float, float]], sizes: Sizes) -> None:
    size = SLOTS * BLOCK_BYTES / GB
    # Scale to as many bytes as the peer moves.
    raw = [each[0] * SLOTS * BLOCK_BYTES / sizes.round_bytes for each in rounds]
    seconds = [each[1] for each in rounds]
    result.put(f"raw_{kind}_gbs", [size / each for each in raw])
    result.put(f"{kind}_gbs", [size / each for each in seconds])
    result.put(f"{kind}_ratio", ratio_of(raw, seconds))
    result.put(f"{kind}_cpu_s_per_gb", [each[2] / size for each in rounds], 4)


@contextlib.contextmanager
def _adapter(name: str, python: Path, folder: Path) -> Iterator[Adapter]:
    adapter = Adapter(python, _ADAPTERS[name], folder)
    try:
        yield adapter
    finally:
        adapter.close()
