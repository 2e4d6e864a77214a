"""Runs all parts of ``kvhearth bench ssd``; the cost of a restart is its own.

A restart recovers the tier's index from footers, and the arena's from its journal.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8, checksum_of
from kvhearth.version import __version__
from kvhearth_lab.bench.daemon import broken, contract
from kvhearth_lab.bench.report import machine, steps
from kvhearth_lab.bench.ssd.blocks import Course, Driven, Ticker
from kvhearth_lab.bench.ssd.figures import SMALL_BYTES, Result, Sizes, check_room
from kvhearth_lab.bench.ssd.lookups import lookup_part
from kvhearth_lab.bench.ssd.peers import peers_part
from kvhearth_server.core.actions import Bind, SlabSized
from kvhearth_server.core.adoption import adopt
from kvhearth_server.core.core import Core
from kvhearth_server.core.namespaces import Namespaces
from kvhearth_server.core.slot_table import Geometry, SlotTable, State
from kvhearth_server.core.state import Limits
from kvhearth_server.memory.journal import Journal, journal_bytes, read_journal
from kvhearth_server.memory.mapping import HugepagePolicy
from kvhearth_server.memory.segments import create_segment
from kvhearth_server.tiers.base import ADDRESS_DTYPE, BlockSpec, StoreBatch
from kvhearth_server.tiers.ssd.disk.probe import choose
from kvhearth_server.tiers.ssd.settings import SsdDirectorySpec, SsdSettings
from kvhearth_server.tiers.ssd.tier import SsdTier

_BATCH = 512
_WRITE_BYTES = 256 << 10
_DRAIN_S = 60.0
_FAMILY = BlockSpec(bytes(32), 0, 1, SMALL_BYTES)
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_SLAB_BYTES = 1 << 20
_PARTS = 64
_PAGE_ROUND = 2 << 20


async def recovery_part(folder: Path, sizes: Sizes, interface: str, result: Result) -> None:
    """Fill a tier with small blocks, so that recovery reads mostly footers; close it, and reopen it
    repeatedly.
    """
    folder.mkdir()
    memory = np.frombuffer(mmap.mmap(-1, SMALL_BYTES), np.uint8)
    settings = SsdSettings(
        (SsdDirectorySpec(folder, sizes.small_tier_bytes),),
        segment_bytes=sizes.small_segment_bytes,
        interface=interface,
        request_bytes=_WRITE_BYTES,
    )
    await _fill(settings, memory, sizes.small_blocks)
    rates, cpu, ticker = [], [], Ticker()
    for _ in steps(sizes.restarts, "restarts of the tier"):
        result.values["cold_cache"] = drop_caches(folder)
        async with ticker.running():
            start, used = time.perf_counter(), time.process_time()
            tier = SsdTier(settings, [memory])
            async with Driven(tier) as driven:
                await driven.settled()
            seconds = time.perf_counter() - start
        blocks = tier.blocks
        tier.drain(_DRAIN_S)
        tier.close()
        if blocks < sizes.small_blocks:
            raise broken(f"{blocks} of {sizes.small_blocks} blocks came back")
        rates.append(blocks / seconds)
        cpu.append((time.process_time() - used) / blocks * 1e6)
    result.put("recover_blocks_per_s", rates, 0)
    result.put("recover_cpu_s_per_million", cpu)
    result.values["recovered_blocks"] = blocks
    result.values["recover_loop_block_max_ms"] = round(ticker.late_s * 1e3, 1)


async def _fill(settings: SsdSettings, memory: U8, count: int) -> None:
    tier = SsdTier(settings, [memory])
    digest = np.frombuffer(checksum_of(memory.data), "V16")
    sums = np.repeat(digest, _BATCH).reshape(-1, 1)
    places = np.zeros((_BATCH, 1), ADDRESS_DTYPE)
    async with Driven(tier) as driven:
        await driven.settled()
        for number in steps(-(-count // _BATCH), f"{count:,} small blocks"):
            names = np.arange(number * _BATCH, (number + 1) * _BATCH, dtype=np.uint64)
            keys = [hashlib.sha256(b"%d" % name).digest() for name in names.tolist()]
            batch = StoreBatch(_FAMILY, keys, places, sums, names, names)
            # Blocks without a place are offered again with all others, which the tier has already.
            while tier.blocks < (number + 1) * _BATCH:
                await driven.store_batch(batch)
    tier.drain(_DRAIN_S)
    tier.close()


def drop_caches(folder: Path) -> str:
    """Drop ``folder`` from the page cache; returns the method."""
    os.sync()
    try:
        _DROP_CACHES.write_text("3", encoding="utf-8")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
            raise
    else:
        return "drop_caches"
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return "posix_fadvise"


def adoption_part(sizes: Sizes, result: Result) -> None:
    """Read the journal of a full arena, and build the core's index from it."""
    geometry = Geometry.of([("bench", sizes.slots * SMALL_BYTES)], _SLAB_BYTES, SMALL_BYTES)
    namespaces = Namespaces(8)
    number = namespaces.obtain("bench", contract(SMALL_BYTES)).number
    table = SlotTable(geometry, np.zeros(geometry.slot_count, np.uint32))
    size = -(-journal_bytes(geometry, 1) // _PAGE_ROUND) * _PAGE_ROUND
    journal = Journal(create_segment(size, HugepagePolicy.PREFER), geometry, table)
    for slab in range(geometry.slab_count):
        journal.slab(SlabSized(slab, SMALL_BYTES))
    parts = np.array_split(np.arange(sizes.slots, dtype=np.int64), _PARTS)
    for index in steps(_PARTS, f"a journal of {sizes.slots:,} slots"):
        slots = parts[index]
        keys = [hashlib.sha256(b"%d" % slot).digest() for slot in slots.tolist()]
        parents = np.concatenate([[-1], slots[:-1]])
        columns = (slots[:, None], slots + 1, parents, SMALL_BYTES, keys)
        journal.bind(Bind(*columns, number, 0, 1, State.SUMMED))
    core = Core(geometry, Limits())
    core.state.namespaces = namespaces
    start = time.perf_counter()
    found = read_journal(journal, geometry, namespaces)
    read = time.perf_counter()
    adopt(core.state, found, {})
    adopted = time.perf_counter()
    if len(core.state.index) != sizes.slots:
        raise broken(f"{len(core.state.index)} of {sizes.slots} slots were adopted")
    millions = sizes.slots / 1e6
    result.values["adopt_s_per_million_slots"] = round((read - start) / millions, 3)
    result.values["adopt_index_s_per_million_slots"] = round((adopted - read) / millions, 3)
    journal.close()


_SWITCH_S = 0.0005
"""Interpreter's switch interval, as the daemon sets it."""


def run(
    folder: Path, sizes: Sizes, interface: str, peers: Mapping[str, Path | None]
) -> dict[str, Any]:
    """Measure everything on the drive of ``folder`` and return the object that the verb prints.

    Args:
        interface: auto, libaio or threads.
        peers: interpreters of the peers' environments, by name.

    Raises:
        KVHearthError: ``config_invalid``: no room in ``folder``, or the interface does not work
            here; ``internal``: the drive or the tier failed, so that figures would mean nothing.
    """
    check_room(folder, sizes)
    try:
        name, _ = choose(interface, sizes.depth)
    except (OSError, ValueError) as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--interface: {error}") from None
    result = Result()
    result.values |= {"version": __version__, "machine": machine(), "interface": name}
    start = time.monotonic()
    gc.freeze()  # as the daemon does
    with _own_folder(folder) as own, _switching(_SWITCH_S):
        try:
            asyncio.run(_measure(own, sizes, name, result))
            lookup_part(own, sizes, result)
            adoption_part(sizes, result)
            result.values |= peers_part(own, sizes, name, peers)
        except OSError as error:
            raise broken(str(error)) from error
    result.values["seconds"] = round(time.monotonic() - start, 1)
    return result.as_json()


async def _measure(own: Path, sizes: Sizes, interface: str, result: Result) -> None:
    await Course(own, sizes, interface, result).run()
    await recovery_part(own / "small", sizes, interface, result)


@contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(dir=folder.resolve(), prefix="kvhearth-bench-")
    except OSError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--dir {folder}: {error.strerror}") from None
    with made as own:
        yield Path(own)


@contextmanager
def _switching(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
