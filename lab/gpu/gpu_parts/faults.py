"""Part g: copies while the daemon is killed, stopped or started again, and slots that change."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from support.cuda_fake import FakeDevice

from gpu_parts.common import Report, run_part
from kvhearth.client import KVClient, connect
from kvhearth.copiers.base import BlockFailure, Copier, Done, Ticket
from kvhearth.model import FLAG_SUMMED, FLAG_VERIFY, Records
from kvhearth.page_layout import PagedKV
from kvhearth.results import CommitGroup
from kvhearth.transfer.copier_pool import CopierPool, default_copier
from kvhearth_lab.bench.daemon import Served, broken, contract
from kvhearth_lab.bench.gpu.bare_arena import BOOT_ID, BareArena
from kvhearth_lab.bench.gpu.stage import Stage, closed
from kvhearth_lab.harness.daemon import module

DEADLINE_S = 30.0
GROUP = 0
TMPFS = "/dev/shm"
BLOCKS_MIN = 16


@dataclass(frozen=True)
class Sizes:
    """Sizes of the faults: pages on the device, their bytes, blocks of a batch, rounds."""

    page_bytes: int
    pages: int
    blocks: int
    rounds: int


FULL = Sizes(2 << 20, 512, 256, 4)
REHEARSAL = Sizes(64 << 10, 32, 16, 1)


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition.

    Raises:
        KVHearthError: not within ``DEADLINE_S``.
    """
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise broken(f"not within {DEADLINE_S} s: {what}")
        time.sleep(0.005)


class Rank:
    """An engine of one rank: its pages, its client, its copiers.

    Args:
        stage: the device.
        sizes: sizes of the faults.
        url: the daemon's.
    """

    def __init__(self, stage: Stage, sizes: Sizes, url: str) -> None:
        torch = stage.torch
        self.stage = stage
        self.sizes = sizes
        shape = (sizes.pages, sizes.page_bytes)
        self.tensor = torch.zeros(shape, dtype=torch.uint8, device=stage.device)
        self.tensor.random_(0, 256)
        self.before = self.tensor.clone()
        stage.synchronize()
        self.client: KVClient = connect(url, contract(sizes.page_bytes), engine_id="faults")
        make = default_copier(verify_fraction=1.0, device=None if stage.real else FakeDevice())
        self.pool = CopierPool(self.client, {GROUP: PagedKV([self.tensor])}, make)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the rank is attached and its arena is registered."""
        until(lambda: self.client.wait_ready(0.2), "attached")
        if self.stage.real:
            until(self._registered, "the arena is registered")

    def _registered(self) -> bool:
        arena = self.client.arena
        if arena is None:
            return False
        ends = [arena.view(segment)[-4096:] for segment in arena.segments]
        return all(self.stage.torch.from_numpy(end).is_pinned() for end in ends)

    @property
    def boot_id(self) -> str:
        """Boot of the mapped arena, or empty."""
        arena = self.client.arena
        return "" if arena is None else arena.boot_id

    def store(self, count: int) -> tuple[list[bytes], Done]:
        """Store the first pages under new keys, and commit them."""
        reserved = self.client.reserve({GROUP: count})
        extents = reserved.groups[GROUP][:, 0]
        copier = self.copier(reserved.boot_id)
        pages = np.arange(len(extents))
        done = ended(copier, copier.store(reserved.boot_id, pages, extents, wait_s=DEADLINE_S))
        keys = [secrets.token_bytes(32) for _ in pages]
        self.client.commit(
            {GROUP: CommitGroup(keys=keys, extents=extents[:, None], checksums=None)},
            boot_id=reserved.boot_id,
        )
        return keys, done

    def found(self, keys: list[bytes]) -> tuple[str, Records]:
        """Look keys up with a lease, until all of them are ready."""
        asked = self.client.lookup
        until(lambda: bool(asked({GROUP: keys}, lease=False).groups[GROUP].ready.all()), "ready")
        answer = asked({GROUP: keys})
        return answer.boot_id, answer.groups[GROUP].extents

    def copier(self, boot_id: str) -> Copier:
        """Return the copier of the mapped arena.

        Raises:
            KVHearthError: there is none.
        """
        copier = self.pool.copier(GROUP, boot_id)
        if copier is None:
            raise broken("no copier for the mapped arena")
        return copier

    def equal(self, pages: Any) -> bool:
        """Whether pages hold the bytes that they had at first, from the first page on."""
        torch, count = self.stage.torch, len(pages)
        return bool(torch.equal(self.tensor[pages], self.before[:count]))

    def close(self) -> bool:
        """End the copiers and detach."""
        return self.pool.close(DEADLINE_S) and self.client.close(DEADLINE_S)


def ended(copier: Copier, ticket: Ticket | None) -> Done:
    """Return a batch's outcome.

    Raises:
        KVHearthError: it never ends.
    """
    done = None if ticket is None else copier.wait(ticket, DEADLINE_S)
    if done is None:
        raise broken("a batch has no outcome")
    return done


def arena_bytes(sizes: Sizes) -> int:
    """Return the memory of the daemon."""
    return 4 * sizes.blocks * sizes.page_bytes + (128 << 20)


def fitting(sizes: Sizes, free_bytes: int) -> Sizes:
    """Return sizes whose arena fits into ``free_bytes``, with an eighth to spare; containers often
    have a small ``/dev/shm``.
    """
    while sizes.blocks > BLOCKS_MIN and arena_bytes(sizes) > free_bytes * 7 // 8:
        sizes = replace(sizes, blocks=sizes.blocks // 2)
    return sizes


@contextmanager
def daemon_of(sizes: Sizes) -> Iterator[Served]:
    """Run a daemon whose arena survives it."""
    with (
        tempfile.TemporaryDirectory(prefix="kvh-") as name,
        tempfile.TemporaryDirectory(prefix="kvh-", dir=TMPFS) as arena,
    ):
        settings = {"memory": str(arena_bytes(sizes)), "http": "off", "hugepages": "off"}
        daemon = Served(Path(name), Path(arena), settings, module("kvhearth_server", "serve"))
        try:
            daemon.launch()
            daemon.ready()
            yield daemon
        finally:
            daemon.kill()


def stop_part(report: Report, rank: Rank, daemon: Served) -> None:
    """Stop the daemon: copies go on, calls end at their deadlines."""
    keys, stored = rank.store(rank.sizes.blocks)
    report.check("blocks are stored", bool(stored.ok.all()), stored.reasons)
    boot_id, extents = rank.found(keys)
    target = np.arange(rank.sizes.pages - len(keys), rank.sizes.pages)
    daemon.stop()
    try:
        copier = rank.copier(boot_id)
        loaded = ended(copier, copier.load(boot_id, extents, target))
        rank.stage.synchronize()
        report.check("a load ends while the daemon is stopped", bool(loaded.ok.all()), loaded)
        report.check("its bytes are right", rank.equal(target))
        began_s = time.monotonic()
        rank.client.lookup({GROUP: keys}, lease=False)
        seconds = time.monotonic() - began_s
        report.put(lookup_of_a_stopped_daemon_s=round(seconds, 3))
        report.check("a call ends while the daemon is stopped", seconds < DEADLINE_S, seconds)
    finally:
        daemon.go_on()
    until(lambda: rank.client.wait_ready(0.2), "attached again")


def kill_part(report: Report, rank: Rank, daemon: Served) -> None:
    """Kill the daemon in the middle of copies; start it, attach, register, and load again."""
    times = []
    for _ in range(rank.sizes.rounds):
        rank.wait_ready()
        keys, _ = rank.store(rank.sizes.blocks)
        boot_id, extents = rank.found(keys)
        copier = rank.copier(boot_id)
        target = np.arange(rank.sizes.pages - len(keys), rank.sizes.pages)
        killer = threading.Timer(0.002, daemon.kill)
        killer.start()
        ticket = copier.load(boot_id, extents, target)
        done = ended(copier, ticket)
        killer.join()
        allowed = {BlockFailure.STALE_BOOT}
        report.check("copies end when the daemon dies", set(done.reasons) <= allowed, done.reasons)
        if done.ok.all():
            report.check("blocks that count as loaded are right", rank.equal(target))
        began_s = time.monotonic()
        daemon.start()
        until(lambda old=boot_id: rank.boot_id not in ("", old), "attached to the new daemon")
        attached_s = time.monotonic() - began_s
        rank.wait_ready()
        times.append((round(attached_s, 3), round(time.monotonic() - began_s, 3)))
        report.put(attached_and_registered_s=times)
        boot_id, extents = rank.found(keys)
        copier = rank.copier(boot_id)
        again = ended(copier, copier.load(boot_id, extents, target))
        rank.stage.synchronize()
        report.check("blocks survive the daemon", bool(again.ok.all()), again.reasons)
        report.check("surviving blocks are right", rank.equal(target))
    report.figure("reregistered_s", max(registered for _, registered in times))


def slots_part(report: Report, stage: Stage, sizes: Sizes) -> None:
    """Change slots while they are copied: each block fails, or holds right bytes."""
    torch = stage.torch
    arena = BareArena(sizes.blocks * sizes.page_bytes)
    arena.view(0)[:] = np.random.default_rng(4).integers(0, 255, arena.size_bytes, np.uint8)
    tensor = torch.zeros((sizes.blocks, sizes.page_bytes), dtype=torch.uint8, device=stage.device)
    copier = stage.copier(PagedKV([tensor]), arena, verify_fraction=1.0)
    slots = np.arange(sizes.blocks)
    extents = arena.extents(slots, sizes.page_bytes)
    summed = arena.with_checksums(extents, FLAG_SUMMED | FLAG_VERIFY)
    torn = slots[::3]

    def tear() -> None:
        # The daemon frees a slot before somebody else writes it.
        arena.bump(torn)
        for slot in torn.tolist():
            arena.slot(extents[slot])[:] = 0

    tearing = threading.Thread(target=tear)
    ticket = copier.load(BOOT_ID, summed, slots)
    tearing.start()
    done = ended(copier, ticket)
    tearing.join()
    allowed = {BlockFailure.STALE_GENERATION, BlockFailure.CHECKSUM_MISMATCH}
    report.check("torn slots fail as such", set(done.reasons) <= allowed, done.reasons)
    stage.synchronize()
    host = tensor.cpu().numpy()
    kept = np.setdiff1d(slots, torn)
    right = [np.array_equal(host[slot], arena.slot(extents[slot])) for slot in kept.tolist()]
    report.check("other slots are loaded", bool(done.ok[kept].all()) and all(right), done.reasons)
    arena.slot(extents[1])[5] ^= 8
    done = ended(copier, copier.load(BOOT_ID, summed, slots))
    gone = len(torn)
    expected = {BlockFailure.STALE_GENERATION: gone, BlockFailure.CHECKSUM_MISMATCH: 1}
    report.check("a flipped byte is found", done.reasons == expected, done.reasons)
    arena.end_life()
    done = ended(copier, copier.load(BOOT_ID, summed, slots))
    expected = {BlockFailure.STALE_BOOT: sizes.blocks}
    report.check("a dead daemon's blocks are refused", done.reasons == expected, done.reasons)
    closed(copier)


def measure(report: Report, stage: Stage) -> None:
    """Run all faults."""
    sizes = REHEARSAL if stage.small else FULL
    slots_part(report, stage, sizes)
    free_bytes = shutil.disk_usage(TMPFS).free
    sizes = fitting(sizes, free_bytes)
    if arena_bytes(sizes) > free_bytes:
        report.shorten(f"no daemon was killed: {TMPFS} has only {free_bytes >> 20} MiB")
        report.figure("fault_failures", len(report.failures()))
        return
    report.put(blocks=sizes.blocks)
    with daemon_of(sizes) as daemon:
        rank = Rank(stage, sizes, daemon.client_url)
        try:
            stop_part(report, rank, daemon)
            kill_part(report, rank, daemon)
        finally:
            ended_well = rank.close()
    report.check("all copies end at the close", ended_well)
    stage.synchronize()
    report.figure("fault_failures", len(report.failures()))


if __name__ == "__main__":
    run_part(measure)
