"""Bit flips and damage in the daemon's files: catalogues, journal, arena blocks and log
directory.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvhearth_lab.torture import damage
from kvhearth_lab.torture.damage import ARENA, DRIVE, SECTOR_BYTES
from kvhearth_lab.torture.decks import BOUNDARY, Decks, Mark
from kvhearth_lab.torture.faults.base import Fault, Parameters
from kvhearth_lab.torture.oracle import claimed, given_up, judge
from kvhearth_lab.torture.world_config import ROOMY, Shape
from kvhearth_server.engine.epoch_store import FILE_NAME
from kvhearth_server.engine.tiering.writeback import PATIENCE_S
from kvhearth_server.memory.journal import HEADER_BYTES, journal_path
from kvhearth_server.memory.plan import CATALOGUE_NAME
from kvhearth_server.tiers.ssd.format import DIRECTORY_DTYPE, PAGE_BYTES, RECORD_BYTES, record_pages
from kvhearth_server.tiers.ssd.superblock import SUPERBLOCK_NAME

if TYPE_CHECKING:
    from kvhearth_lab.torture.world import World


_SPAN_BYTES = 256
"""Flipped range from a half's beginning: its header, and no more than the shortest content."""


class FlipCatalogue(Fault):
    """Bit flips in catalogues while the daemon is dead. Damage to one half of the arena's catalogue
    costs nothing; damage to both costs the arena. Damage to the namespaces beside the SSD tier's
    blocks costs these blocks only if the arena is gone.
    """

    name = "flip_catalogue"
    help = "bits flip in the arena's catalogue and in the namespaces on a drive: it may start cold"

    def fits(self, shape: Shape) -> bool:
        # Epochs that begin again would find the remote's blocks of older ones: content of the kit
        # follows from the epoch.
        return not shape.tier and (shape.arena_stays or bool(shape.ssd_bytes))

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {
            "seed": rng.randrange(1 << 32),
            "halves": rng.choice([0, 1, 1, 2]) if shape.arena_stays else 0,
            "namespaces": rng.random() < 0.4,
        }

    def run(self, world: World, parameters: Parameters) -> None:
        rng = random.Random(parameters["seed"])
        with world.paused():
            world.kill_daemon()
            shape = world.shape
            no_arena = not shape.arena_stays or parameters["halves"] > 1
            no_names = not shape.ssd_bytes or parameters["namespaces"]
            if shape.arena_stays:
                path = world.arena_dir / CATALOGUE_NAME
                for half in rng.sample([0, 1], parameters["halves"]):
                    _flip(path, half * (path.stat().st_size // 2), _SPAN_BYTES, rng)
            if shape.ssd_bytes and parameters["namespaces"]:
                path = world.ssd_dir / FILE_NAME
                _flip(path, 0, path.stat().st_size, rng)
            if no_arena and no_names:
                world.excuse_all(self.name)
            elif no_arena:
                world.excuse_not_on_disk(self.name)
            world.start_daemon()
        world.traffic(0.3)


def _flip(path: Path, first: int, size: int, rng: random.Random) -> None:
    damage.flip_bit(path, first + rng.randrange(size), rng.randrange(8))


CATALOGUES: tuple[Fault, ...] = (FlipCatalogue(),)


_BITS = 4
_QUIET_S = 0.2
_HEARD_S = 0.05
_HELD_S = 0.8
_DEALT = 64
"""Boundaries dealt in a step, for each size of records."""
T = TypeVar("T")


def _some(rng: random.Random, things: Sequence[T], count: int) -> list[T]:
    return rng.sample(list(things), min(count, len(things)))


def _plan(rng: random.Random) -> Parameters:
    return {"seed": rng.randrange(1 << 32), "bits": rng.randint(1, _BITS)}


_LATER_S = 0.2


class _Flip(Fault):
    """Flips bits while the daemon is dead, or while it runs and clients pause."""

    dead_only = False

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {**_plan(rng), "dead": self.dead_only or rng.random() < 0.5}

    def run(self, world: World, parameters: Parameters) -> None:
        rng = random.Random(parameters["seed"])
        with world.paused():
            if parameters["dead"]:
                world.kill_daemon()
            self.flip(world, rng, parameters["bits"])
            if parameters["dead"]:
                world.start_daemon()
        world.traffic(0.3)

    def flip(self, world: World, rng: random.Random, bits: int) -> None:
        """Flip ``bits`` bits, and excuse the blocks that may be gone."""
        raise NotImplementedError


class FlipArena(_Flip):
    """Bit flips in the bytes of blocks in memory."""

    name = "flip_arena"
    help = "bits flip in blocks in memory: served never; from a drive's copy they come back"

    def fits(self, shape: Shape) -> bool:
        return shape.arena_stays

    def flip(self, world: World, rng: random.Random, bits: int) -> None:
        world.damaged.add(ARENA)
        found = damage.in_arena(world.arena_dir, world.shape.memory_bytes)
        hit = _some(rng, found, bits)
        for each in hit:
            damage.flip_bit(each.path, each.offset + rng.randrange(each.length), rng.randrange(8))
            world.excuse_unless_on_disk([each.key], self.name, spoilt=True)
        # Another block may have been stored in a slot since the journal was read.
        time.sleep(_LATER_S)
        slots = {each.header_at for each in hit}
        later = damage.in_arena(world.arena_dir, world.shape.memory_bytes)
        now = [each.key for each in later if each.header_at in slots]
        world.excuse_unless_on_disk(now, self.name, spoilt=True)


class FlipJournal(_Flip):
    """Bit flips in headers of the journal."""

    name = "flip_journal"
    help = "bits flip in the arena's journal while the daemon is dead"
    dead_only = True

    def fits(self, shape: Shape) -> bool:
        return shape.arena_stays

    def flip(self, world: World, rng: random.Random, bits: int) -> None:
        found = damage.in_arena(world.arena_dir, world.shape.memory_bytes)
        path = journal_path(world.arena_dir)
        for each in _some(rng, found, bits):
            damage.flip_bit(path, each.header_at + rng.randrange(HEADER_BYTES), rng.randrange(8))
            world.excuse_unless_on_disk([each.key], self.name)


class FlipRecord(_Flip):
    """Bit flips in records on a drive, in header or payload."""

    name = "flip_record"
    help = "bits flip in records on a drive, in headers and payloads"

    def fits(self, shape: Shape) -> bool:
        return bool(shape.ssd_bytes)

    def flip(self, world: World, rng: random.Random, bits: int) -> None:
        world.damaged.add(DRIVE)
        for each in _some(rng, damage.on_disk(world.ssd_dir), bits):
            in_head = rng.random() < 0.4
            span = RECORD_BYTES if in_head else each.length
            start = each.offset if in_head else each.offset + PAGE_BYTES
            damage.flip_bit(each.path, start + rng.randrange(span), rng.randrange(8))
            if world.shape.kind != ROOMY:
                # A block stored again is evicted without a write: this record counts as its copy.
                world.excuse([each.key], self.name, spoilt=True)


class FlipFooter(_Flip):
    """Bit flips in footers and first pages of segments; nothing may be lost."""

    name = "flip_footer"
    help = "bits flip in footers and first pages of segment files: records are found without them"
    dead_only = True

    def fits(self, shape: Shape) -> bool:
        return bool(shape.ssd_bytes)

    def flip(self, world: World, rng: random.Random, bits: int) -> None:
        # (file, first byte, bytes) of the footer's page, its lines and the first page.
        spans = [(path, 0, 64) for path in damage.segment_files(world.ssd_dir)]
        for path in damage.footers(world.ssd_dir):
            last = path.stat().st_size - PAGE_BYTES
            spans += [(path, last, 64), (path, last - RECORD_BYTES, RECORD_BYTES)]
        for path, first, size in _some(rng, spans, bits):
            damage.flip_bit(path, first + rng.randrange(size), rng.randrange(8))


class DamageLog(Fault):
    """Damage to the log directory's own file, and to a first page. Nothing may be lost: segment
    files repeat the content of the former, footers and records that of the latter.
    """

    name = "damage_log"
    help = "a drive's kvhearth.log is damaged, cut, deleted; a segment's first page is zeroed"

    def fits(self, shape: Shape) -> bool:
        return bool(shape.ssd_bytes)

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"seed": rng.randrange(1 << 32), "first_page": rng.random() < 0.4}

    def deal(self, decks: Decks, shape: Shape) -> Parameters:
        return {"how": decks.names(self.name, ("flip", "empty", "delete")).deal(1)[0]}

    def run(self, world: World, parameters: Parameters) -> None:
        rng = random.Random(parameters["seed"])
        path, how = world.ssd_dir / SUPERBLOCK_NAME, parameters["how"]
        with world.paused():
            world.kill_daemon()
            if how == "flip":
                damage.flip_bit(path, rng.randrange(DIRECTORY_DTYPE.itemsize), rng.randrange(8))
            elif how == "empty":
                os.truncate(path, 0)
            else:
                path.unlink()
            if parameters["first_page"]:
                for segment in _some(rng, damage.segment_files(world.ssd_dir), 1):
                    damage.zero(segment, 0, PAGE_BYTES)
            world.start_daemon()
        world.traffic(0.3)


class TornRecords(Fault):
    """Unacknowledged records that end at a sector boundary.

    The drive holds back the completions of its writes (``harness/faults``), the daemon is
    killed, and each record written in that time is cut at the next boundary that was dealt for its
    size.
    """

    name = "torn_records"
    help = "the daemon dies while it writes: each such record ends at another sector boundary"
    weight = 2
    in_each_world = True

    def fits(self, shape: Shape) -> bool:
        return bool(shape.ssd_bytes)

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"seed": rng.randrange(1 << 32)}

    def deal(self, decks: Decks, shape: Shape) -> Parameters:
        sizes = _record_sectors(shape)
        return {"sectors": {str(size): decks.boundaries(size).deal(_DEALT) for size in sizes}}

    def aims(self, shape: Shape) -> Iterable[Mark]:
        sizes = _record_sectors(shape)
        return [(BOUNDARY, (size, sectors)) for size in sizes for sectors in range(size + 1)]

    def run(self, world: World, parameters: Parameters) -> None:
        rng = random.Random(parameters["seed"])
        with world.paused():
            time.sleep(_QUIET_S)
            held_at = time.monotonic()
            world.orders(held=["write"])
            time.sleep(_HEARD_S)
            # Present records may have been acknowledged before the drive read its orders.
            before = {(r.path, r.page, r.key) for r in damage.on_disk(world.ssd_dir)}
            given_up_before = given_up(world)
        world.store_more(_DEALT)
        world.traffic(_HELD_S)
        with world.paused():
            reported_state = claimed(world)
            held_s = time.monotonic() - held_at
            if held_s > PATIENCE_S and given_up(world) != given_up_before:
                world.drive_faulted()  # the machine is so slow that the drive was held for too long
            world.kill_daemon(settled=False)
            world.orders()
            torn = [
                record
                for record in damage.on_disk(world.ssd_dir)
                if (record.path, record.page, record.key) not in before
            ]
            dealt = {int(size): list(left) for size, left in parameters["sectors"].items()}
            for record in torn:
                size = record.bytes // SECTOR_BYTES
                left = dealt.get(size)
                sectors = left.pop(0) if left else rng.randint(0, size)
                world.report.coverage.torn(size, sectors)
                damage.tear(record, sectors, rng)
            # None of these was acknowledged.
            judge(world, reported_state, len(damage.names_on_disk(world.ssd_dir)))
            world.settle_memory()
            world.start_daemon()
        world.traffic(0.2)


def _record_sectors(shape: Shape) -> list[int]:
    """Return the sizes of the records of such a world, in sectors."""
    if not shape.ssd_bytes:
        return []
    return sorted({record_pages(p) * PAGE_BYTES // SECTOR_BYTES for p, _ in shape.models})


FILES: tuple[Fault, ...] = (
    FlipArena(),
    FlipJournal(),
    FlipRecord(),
    FlipFooter(),
    DamageLog(),
    TornRecords(),
)
