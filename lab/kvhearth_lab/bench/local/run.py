"""Runs all parts of ``kvhearth bench local``; measurements without load are its own."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth.shared_memory import MADV_POPULATE_WRITE
from kvhearth.version import __version__
from kvhearth_lab.bench.daemon import CHAIN_KEYS, attached, broken, contract, keys_of, served
from kvhearth_lab.bench.local.copies import copy_part
from kvhearth_lab.bench.local.decode import decode_part
from kvhearth_lab.bench.local.figures import KEYS, SLAB_BYTES, SMALL_BYTES, Result, Sizes
from kvhearth_lab.bench.local.lookups import lookup_part
from kvhearth_lab.bench.local.pauses import pauses_part
from kvhearth_lab.bench.report import machine, p50, steps
from kvhearth_server.core.commit import CommitItem
from kvhearth_server.core.core import Core
from kvhearth_server.core.lookup import KeysItem
from kvhearth_server.core.membership import Joining
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.core.state import Limits

_SESSION = 1
_EPOCH = 1
_COMMIT_KEYS = 4096
_SETTLE_S = 2.0
_UTIME = 11
"""Place of the user time among the fields of ``/proc/PID/stat`` behind the name."""


def idle_part(result: Result, sizes: Sizes) -> None:
    """Measure a daemon with default settings, including HTTP, and one engine that only sends
    heartbeats.
    """
    values = result.values
    with served(memory=sizes.memory_bytes, http="127.0.0.1:0") as daemon:
        values["ready_s"] = round(daemon.ready()["seconds"], 2)
        with attached(daemon.client_url, contract(SMALL_BYTES)):
            time.sleep(min(_SETTLE_S, sizes.idle_s))
            values["idle_rss_mib"] = round(daemon.private_bytes() / (1 << 20), 1)
            before, start = daemon.cpu_s(), time.monotonic()
            for _ in steps(10, "an idle daemon"):
                time.sleep(sizes.idle_s / 10)
            used = (daemon.cpu_s() - before) / (time.monotonic() - start)
            values["idle_cpu"] = round(used, 5)
        result.book_errors += daemon.book_errors()


def populate_part(result: Result, sizes: Sizes) -> None:
    """Measure the start of daemons with a larger arena.

    A virtual machine's host gives memory at its first touch and takes it back some time after it is
    freed. That counts as processor time here. As much private memory is touched right before: it
    costs what host and kernel take for it, and the daemon then gets pages that the host has given.
    """
    used, raw, ready = list[float](), list[float](), list[float]()
    gib = (sizes.populate_bytes - SLAB_BYTES) / (1 << 30)
    for _ in steps(sizes.populates, "starts with a larger arena"):
        least, _ = _start(SLAB_BYTES)
        raw.append(_touch(sizes.populate_bytes) / sizes.populate_bytes * (1 << 30))
        cpu_s, seconds = _start(sizes.populate_bytes)
        used.append(max(cpu_s - least, 0.0) / gib)
        ready.append(seconds)
    result.values["populate_bytes"] = sizes.populate_bytes
    result.put("populate_cpu_s_per_gib", used)
    result.put("raw_populate_cpu_s_per_gib", raw)
    result.put("populate_ready_s", ready)


def _start(memory_bytes: int) -> tuple[float, float]:
    """Return the processor time of a daemon until it has all its memory, and the seconds until it
    is ready.
    """
    with served(memory=memory_bytes) as daemon:
        seconds = daemon.ready()["seconds"]
        # Unlike the sum over its threads, this has those that ended.
        fields = (
            Path(f"/proc/{daemon.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        )
    ticks = int(fields[_UTIME]) + int(fields[_UTIME + 1])
    return ticks / os.sysconf("SC_CLK_TCK"), seconds


def _touch(size_bytes: int) -> float:
    """Take and free private memory, in huge pages where possible; return the processor time."""
    start = time.process_time()
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(MADV_POPULATE_WRITE)
        used = time.process_time() - start
    return used


def core_part(result: Result, sizes: Sizes) -> None:
    """Measure lookups of the core in this process, in microseconds a key, with leases, in chain
    order.
    """
    seed = secrets.token_bytes(16)
    core = _filled(seed, sizes.blocks)
    places, times = random.Random(4), []
    for number in range(1, sizes.lookups + 1):
        start_key = places.randrange(sizes.blocks - KEYS + 1)
        items = [KeysItem(0, keys_of(seed, start_key, KEYS))]
        start = time.perf_counter()
        found = core.reading.lookup(_SESSION, _EPOCH, items, number)
        times.append(time.perf_counter() - start)
        if not found.groups[0].leased.all():
            raise broken(f"the core's lookup missed: {found.short}")
        core.reading.release(_SESSION, [number])
        _drop_output(core)
    core.check_books()
    result.values["core_us_per_key"] = round(p50(times) * 1e6 / KEYS, 3)


def _filled(seed: bytes, blocks: int) -> Core:
    """Return a core with this many blocks, committed as a client would."""
    slabs = -(-blocks * SMALL_BYTES // SLAB_BYTES) + 1
    geometry = Geometry.of([("bench", slabs * SLAB_BYTES)], SLAB_BYTES, SMALL_BYTES)
    core = Core(geometry, Limits())
    core.membership.join(
        Joining(
            session=_SESSION,
            tenant="bench",
            engine_id="bench",
            contract=contract(SMALL_BYTES),
            scheduler=True,
            rank=0,
            incarnation=0,
            mapped=True,
        )
    )
    starts = range(0, blocks, _COMMIT_KEYS)
    for number in steps(len(starts), f"{blocks:,} blocks in a core"):
        start = starts[number]
        keys = keys_of(seed, start, min(_COMMIT_KEYS, blocks - start))
        parent = keys_of(seed, start - 1, 1)[0] if start % CHAIN_KEYS else b""
        reserved = core.writing.reserve(_SESSION, number + 1, _EPOCH, [(0, len(keys))])
        handed = reserved.handed[0]
        sums = np.zeros((*handed.slots.shape, 16), np.uint8)
        item = CommitItem(0, keys, handed.slots, handed.generations, sums, parent)
        (stored,) = core.writing.commit(_SESSION, _EPOCH, [item])
        if not stored.all():
            raise broken(f"the core refused a block: {reserved.short}")
        _drop_output(core)
    return core


def _drop_output(core: Core) -> None:
    """Discard the output that the shell would act on and count."""
    core.state.take_actions()
    core.state.take_counts()
    core.state.take_evicted()


_PARTS = (
    idle_part,
    populate_part,
    copy_part,
    pauses_part,
    lookup_part,
    decode_part,
    core_part,
)


def run(sizes: Sizes) -> dict[str, Any]:
    """Measure everything and return the object that the verb prints.

    Raises:
        KVHearthError: a daemon, a client or a part of the run does not work, so that figures would
            mean nothing.
    """
    result = Result()
    result.values["version"] = __version__
    result.values["machine"] = machine()
    start = time.monotonic()
    for part in _PARTS:
        part(result, sizes)
    result.values["seconds"] = round(time.monotonic() - start, 1)
    return result.as_json()
