"""Deaths at fault points: each point of the sources comes up before any comes up again."""

from __future__ import annotations

import functools
import random
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import kvhearth
import kvhearth_server
from kvhearth_server.tiers.ssd.disk.base import Op
from kvhearth_server.tiers.ssd.format import PAGE_BYTES
from kvhearth_server.tiers.ssd.heads import HEAD_NAME
from kvhearth_server.torture.coverage import CLIENT_POINT, POINT, Mark
from kvhearth_server.torture.decks import Decks
from kvhearth_server.torture.faults.base import Fault, Parameters
from kvhearth_server.torture.report import CRASH
from kvhearth_server.torture.shape import FLEETING, PRESSED, Shape

if TYPE_CHECKING:
    from kvhearth_server.torture.world import World

_WAIT_S = 1.5
_PUSH_S = 0.5
_MORE = 3
_POINTS_A_STEP = 2
_PASSAGES = (1, 1, 2, 3, 5, 8)
_SHORT_SEGMENT = "99999999.segment"
"""Too short and empty: such a file is removed."""
_HIT = re.compile(r'\bhit\("([a-z_.]+)"\)')
_OF_ARENAS = ("journal.", "catalogue.", "durable.")
_OF_DRIVES = ("ssd.", "demote.", "promote.")
_OF_CLIMBS = ("promote.", "ssd.before_read", "ssd.after_read")
_OF_RESIZES = "resize."
"""No world's memory changes; tests/integration/test_arena_resize.py dies at these points."""
_SELDOM = (
    *("attach.", "catalogue.", "durable.", "journal.slab"),
    *("ssd.before_sync", "ssd.after_sync", "ssd.head_written", "ssd.segment_"),
)


@functools.cache
def daemon_points() -> tuple[str, ...]:
    """Every fault point of the daemon's sources that a world can come by."""
    folder = Path(kvhearth_server.__path__[0])
    texts = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    found = {name for text in texts for name in _HIT.findall(text)}
    # The driver of the disk makes the names of these; flushes are not among its jobs.
    jobs = (Op.READ, Op.WRITE)
    found |= {f"ssd.{when}_{op.name.lower()}" for when in ("before", "after") for op in jobs}
    return tuple(sorted(name for name in found if not name.startswith(_OF_RESIZES)))


@functools.cache
def client_points() -> tuple[str, ...]:
    """Every fault point of the host copier."""
    path = Path(kvhearth.__path__[0]) / "copiers" / "host.py"
    return tuple(sorted(set(_HIT.findall(path.read_text(encoding="utf-8")))))


def in_reach(point: str, shape: Shape) -> bool:
    """Whether the daemon of such a world comes by. Blocks climb where memory is too small for
    them, or ended with the daemon, for sure.
    """
    return (
        (bool(shape.ssd_bytes) or not point.startswith(_OF_DRIVES))
        and (shape.arena_stays or not point.startswith(_OF_ARENAS))
        and (shape.kind in (FLEETING, PRESSED) or not point.startswith(_OF_CLIMBS))
        and (shape.flush or not point.endswith("_sync"))
    )


class KillDaemonAtPoint(Fault):
    """At fault points of its sources, one after the other."""

    name = "kill_daemon_at_point"
    help = "kill -9 of the daemon at a fault point, such as between a write and its acknowledgement"
    weight = 6
    in_each_world = True

    def deal(self, decks: Decks, shape: Shape) -> Parameters:
        deck = decks.names(POINT, daemon_points())
        return {"points": deck.deal(_POINTS_A_STEP, lambda point: in_reach(point, shape))}

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        return {"passages": [dice.choice(_PASSAGES) for _ in range(_POINTS_A_STEP)]}

    def aims(self, shape: Shape) -> Iterable[Mark]:
        return [(POINT, point) for point in daemon_points() if in_reach(point, shape)]

    def run(self, world: World, parameters: Parameters) -> None:
        for point, passages in zip(parameters["points"], parameters["passages"], strict=False):
            seldom = point.startswith(_SELDOM)
            # A second time, where it did not come by so often: at its first passage.
            tries = (min(passages, 2) if seldom else passages, 1)
            reached = any(_dies_at(world, f"{point}:{count}") for count in tries)
            world.report.coverage.point(point, reached=reached)
        world.kill_daemon()
        world.start_daemon()


def _dies_at(world: World, fault: str) -> bool:
    """Start a daemon that is to die there and let clients do what leads there; false if it did
    not come by.
    """
    world.kill_daemon()
    _lead_to(world, fault.partition(":")[0])
    if not world.start_daemon(fault):
        return True
    world.store_more(_MORE)
    world.traffic(_PUSH_S)
    if world.daemon.alive:
        # A client that attaches, stores and loads: it is told of, and new slabs are cut.
        world.replace(world.clients[0], kill=True)
        world.store_more(_MORE)
    world.traffic(_WAIT_S)
    status = world.daemon.wait_end(0.0)
    if status not in (None, -signal.SIGKILL):
        text = f"the daemon ended with {status}: {world.daemon.complaints()}"
        world.report.find(CRASH, text, world.where)
    return status == -signal.SIGKILL


def _lead_to(world: World, point: str) -> None:
    """Give a daemon that is to start what it comes by a point for; no block is lost by it."""
    if point == "ssd.head_written":
        (world.ssd_dir / HEAD_NAME).unlink(missing_ok=True)
    elif point == "ssd.segment_removed":
        (world.ssd_dir / _SHORT_SEGMENT).write_bytes(bytes(PAGE_BYTES))


class KillClientAtPoint(Fault):
    """At a fault point of its copier."""

    name = "kill_client_at_point"
    help = "kill -9 of a client at a fault point: in the middle of a copy, right after it"
    weight = 2

    def deal(self, decks: Decks, shape: Shape) -> Parameters:
        return {"point": decks.names(CLIENT_POINT, client_points()).deal(1)[0]}

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        return {"client": dice.randrange(99), "passages": dice.randint(1, 40)}

    def aims(self, shape: Shape) -> Iterable[Mark]:
        return [(CLIENT_POINT, point) for point in client_points()]

    def run(self, world: World, parameters: Parameters) -> None:
        victim, point = world.client(parameters["client"]), str(parameters["point"])
        victim.expected_end = True
        for passages in (parameters["passages"], 1):
            victim.ask("arm", fault=f"{point}:{passages}")
            world.store_more(_MORE)
            end = time.monotonic() + _WAIT_S
            while victim.alive and time.monotonic() < end:
                world.traffic(0.02)
        reached = victim.process.poll() == -signal.SIGKILL
        world.report.coverage.point(point, reached=reached, kind=CLIENT_POINT)
        world.replace(victim, kill=True)


POINTS: tuple[Fault, ...] = (KillDaemonAtPoint(), KillClientAtPoint())
