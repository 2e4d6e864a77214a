"""Faults that kill, stop or restart daemons and clients, also at each fault point of the
sources.
"""

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
from kvhearth_lab.harness.client_process import ANSWER_S
from kvhearth_lab.torture.decks import CLIENT_POINT, POINT, Decks, Mark
from kvhearth_lab.torture.faults.base import Fault, Parameters
from kvhearth_lab.torture.report import CRASH
from kvhearth_lab.torture.world_config import FLEETING, PRESSED, SHARED, Shape
from kvhearth_server.tiers.ssd.disk.queues import Op
from kvhearth_server.tiers.ssd.format import PAGE_BYTES
from kvhearth_server.tiers.ssd.superblock import SUPERBLOCK_NAME

if TYPE_CHECKING:
    from kvhearth_lab.harness.client_process import Client
    from kvhearth_lab.torture.world import World


_WAIT_S = 1.5
_PUSH_S = 0.5
_MORE = 3
_POINTS_A_STEP = 2
_PASSAGES = (1, 1, 2, 3, 5, 8)
_SHORT_SEGMENT = "99999999.segment"
"""Name of a segment file that is too short and empty, so that the daemon removes it."""
_HIT = re.compile(r'\bhit\("([a-z_.]+)"\)')
_OF_ARENAS = ("journal.", "catalogue.", "durable.")
_OF_DRIVES = ("ssd.", "demote.")
_OF_PROMOTION = ("promote.", "ssd.before_read", "ssd.after_read")
_OF_RESIZES = "resize."
"""Prefix of points that no world reaches, since its memory does not change;
tests/integration/test_arena_resize.py dies at these points.
"""
OF_MOVERS = "mover."
"""Prefix of points in the helper process of a remote."""
_OF_REMOTES = "remote."
_SELDOM = (
    *("attach.", "catalogue.", "durable.", "journal.slab"),
    *("ssd.before_sync", "ssd.after_sync", "ssd.head_written", "ssd.segment_"),
)


@functools.cache
def daemon_points() -> tuple[str, ...]:
    """Return every fault point of the daemon's sources that a world can reach."""
    folder = Path(kvhearth_server.__path__[0])
    texts = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    found = {name for text in texts for name in _HIT.findall(text)}
    # The disk driver composes these names; flushes are not among its jobs.
    jobs = (Op.READ, Op.WRITE)
    found |= {f"ssd.{when}_{op.name.lower()}" for when in ("before", "after") for op in jobs}
    return tuple(sorted(name for name in found if not name.startswith((_OF_RESIZES, OF_MOVERS))))


@functools.cache
def client_points() -> tuple[str, ...]:
    """Return every fault point of the host copier."""
    path = Path(kvhearth.__path__[0]) / "copiers" / "host.py"
    return tuple(sorted(set(_HIT.findall(path.read_text(encoding="utf-8")))))


def in_reach(point: str, shape: Shape) -> bool:
    """Whether the daemon of such a world reaches the point. Promotions are certain only where
    memory is too small for the blocks or ended with the daemon.
    """
    return (
        (bool(shape.ssd_bytes or shape.tier) or not point.startswith("promote."))
        and (bool(shape.ssd_bytes) or not point.startswith(_OF_DRIVES))
        and (bool(shape.tier) or not point.startswith(_OF_REMOTES))
        and (shape.arena_stays or not point.startswith(_OF_ARENAS))
        and (shape.kind in (FLEETING, PRESSED, SHARED) or not point.startswith(_OF_PROMOTION))
        and (shape.flush or not point.endswith("_sync"))
    )


class KillDaemonAtPoint(Fault):
    """SIGKILL of the daemon at fault points of its sources, one after the other."""

    name = "kill_daemon_at_point"
    help = "kill -9 of the daemon at a fault point, such as between a write and its acknowledgement"
    weight = 6
    in_each_world = True

    def deal(self, decks: Decks, shape: Shape) -> Parameters:
        deck = decks.names(POINT, daemon_points())
        return {"points": deck.deal(_POINTS_A_STEP, lambda point: in_reach(point, shape))}

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"passages": [rng.choice(_PASSAGES) for _ in range(_POINTS_A_STEP)]}

    def aims(self, shape: Shape) -> Iterable[Mark]:
        return [(POINT, point) for point in daemon_points() if in_reach(point, shape)]

    def run(self, world: World, parameters: Parameters) -> None:
        for point, passages in zip(parameters["points"], parameters["passages"], strict=False):
            seldom = point.startswith(_SELDOM)
            # Try again at the first passage if the daemon did not pass often enough.
            tries = (min(passages, 2) if seldom else passages, 1)
            reached = any(_dies_at(world, f"{point}:{count}") for count in tries)
            world.report.coverage.point(point, reached=reached)
        world.kill_daemon()
        world.start_daemon()


def _dies_at(world: World, fault: str) -> bool:
    """Start a daemon that is to die at the fault and make clients work towards it; False if the
    daemon did not reach it.
    """
    world.kill_daemon()
    _lead_to(world, fault.partition(":")[0])
    if not world.start_daemon(fault):
        return True
    world.store_more(_MORE)
    world.traffic(_PUSH_S)
    if not world.daemon.dead:
        # A new client attaches, stores and loads, so that a group joins and new slabs are cut.
        world.replace(world.clients[0], kill=True)
        world.store_more(_MORE)
    world.traffic(_WAIT_S)
    status = world.daemon.exit_code
    if status not in (None, -signal.SIGKILL):
        text = f"the daemon ended with {status}: {world.daemon.complaints()}"
        world.report.find(CRASH, text, world.where)
    return status == -signal.SIGKILL


def _lead_to(world: World, point: str) -> None:
    """Prepare files so that a starting daemon reaches the point; no block is lost by it."""
    if point == "ssd.head_written":
        (world.ssd_dir / SUPERBLOCK_NAME).unlink(missing_ok=True)
    elif point == "ssd.segment_removed":
        (world.ssd_dir / _SHORT_SEGMENT).write_bytes(bytes(PAGE_BYTES))


class KillClientAtPoint(Fault):
    """SIGKILL of a client at a fault point of its copier."""

    name = "kill_client_at_point"
    help = "kill -9 of a client at a fault point: in the middle of a copy, right after it"
    weight = 2

    def fits(self, shape: Shape) -> bool:
        return shape.has_local  # points are the host copier's

    def deal(self, decks: Decks, shape: Shape) -> Parameters:
        return {"point": decks.names(CLIENT_POINT, client_points()).deal(1)[0]}

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"client": rng.randrange(99), "passages": rng.randint(1, 40)}

    def aims(self, shape: Shape) -> Iterable[Mark]:
        return [(CLIENT_POINT, point) for point in client_points() if self.fits(shape)]

    def run(self, world: World, parameters: Parameters) -> None:
        local, point = world.local_clients(), str(parameters["point"])
        victim = local[parameters["client"] % len(local)]
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


_MORE_PROCESSES = 80
"""Additional stores of each client."""
_MORE_COPIES = 16
_WAIT_S_PROCESSES = 1.5
_OTHERS_S = 1.0
_COPYING = "copier.store_copying"


class KillDaemon(Fault):
    """SIGKILL of the daemon at a random moment."""

    name = "kill_daemon"
    help = "kill -9 of the daemon at a random moment of its work"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"after_s": round(rng.uniform(0.0, 0.8), 3)}

    def run(self, world: World, parameters: Parameters) -> None:
        world.store_more()
        world.traffic(parameters["after_s"])
        world.kill_daemon()
        world.start_daemon()


class KillDaemonStarting(Fault):
    """SIGKILL of the daemon while it starts."""

    name = "kill_daemon_starting"
    help = "kill -9 of the daemon while it starts, reads the arena or the log back"

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"after_s": [round(rng.uniform(0.2, 1.2), 3) for _ in range(rng.randint(1, 2))]}

    def run(self, world: World, parameters: Parameters) -> None:
        world.kill_daemon()
        for after_s in parameters["after_s"]:
            world.launch_daemon()
            time.sleep(after_s)
            world.kill_daemon()
        world.start_daemon()


class RestartDaemon(Fault):
    """Orderly restart of the daemon."""

    name = "restart_daemon"
    help = "SIGTERM and a new start: an orderly restart under traffic"

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        late = bool(shape.ssd_bytes) and rng.random() < 0.5
        return {"after_s": round(rng.uniform(0.0, 0.5), 3), "late_drive": late}

    def run(self, world: World, parameters: Parameters) -> None:
        if parameters["late_drive"]:
            # Much is still unwritten when the shutdown begins; the drive has recovered by then.
            world.orders(held=["write"])
            world.store_more(_MORE_PROCESSES)
        world.traffic(parameters["after_s"])
        world.orders()
        world.terminate_daemon()
        world.start_daemon()


class StopDaemon(Fault):
    """SIGSTOP of the daemon, followed by SIGCONT or SIGKILL."""

    name = "stop_daemon"
    help = "SIGSTOP of the daemon, then SIGCONT or kill -9"

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"for_s": round(rng.uniform(0.2, 1.5), 3), "kill": rng.random() < 0.3}

    def run(self, world: World, parameters: Parameters) -> None:
        with world.window("daemon stopped"):
            world.daemon.stop()
            time.sleep(parameters["for_s"])
            if parameters["kill"]:
                world.kill_daemon()
            else:
                world.daemon.go_on()
        if parameters["kill"]:
            world.start_daemon()
        world.traffic(0.2)


class KillClient(Fault):
    """SIGKILL of a client at a random moment."""

    name = "kill_client"
    help = "kill -9 of a client at a random moment of its work"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"client": rng.randrange(99), "after_s": round(rng.uniform(0.0, 0.5), 3)}

    def run(self, world: World, parameters: Parameters) -> None:
        world.traffic(parameters["after_s"])
        world.replace(world.client(parameters["client"]), kill=True)
        world.traffic(0.2)


class StopClient(Fault):
    """SIGSTOP of a client, perhaps across the daemon's death."""

    name = "stop_client"
    help = "SIGSTOP of a client for a while, perhaps while the daemon is killed and comes back"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {
            "client": rng.randrange(99),
            "for_s": round(rng.uniform(0.2, 1.5), 3),
            "restart": rng.random() < 0.5,
        }

    def run(self, world: World, parameters: Parameters) -> None:
        victim = world.client(parameters["client"])
        with world.window("client stopped"):
            victim.signal(signal.SIGSTOP)
            try:
                if parameters["restart"]:
                    world.kill_daemon()
                    world.start_daemon()
                world.traffic(parameters["for_s"])
            finally:
                victim.signal(signal.SIGCONT)
        world.traffic(0.3)


class StopClientCopying(Fault):
    """SIGSTOP of a client that is about to write into its slots, across the daemon's death.

    No other client may get these slots before it has continued, however many blocks others store.
    """

    name = "stop_client_copying"
    help = (
        "SIGSTOP of a client in the middle of a copy; the daemon is killed, others store, SIGCONT"
    )

    def fits(self, shape: Shape) -> bool:
        return shape.arena_stays and shape.has_local

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"client": rng.randrange(99), "passages": rng.randint(1, 4)}

    def run(self, world: World, parameters: Parameters) -> None:
        # Prefer a client whose model has another client that could take its slots.
        local = world.local_clients()
        shared = [each for each in local if self._others(world, each)] or local
        victim = shared[parameters["client"] % len(shared)]
        with world.window("client stopped in a copy"):
            try:
                for passages in (parameters["passages"], 1):
                    victim.say("arm", fault=f"{_COPYING}:{passages}:stop")
                    world.go(victim, _MORE_COPIES)
                    if victim.stops_within(_WAIT_S_PROCESSES):
                        break
                else:
                    return
                world.report.figures["clients_stopped_in_a_copy"] += 1
                world.kill_daemon()
                world.start_daemon()
                for each in self._others(world, victim):
                    world.go(each, _MORE_PROCESSES)
                world.traffic(_OTHERS_S)
            finally:
                self._go_on(victim)
        world.traffic(0.3)

    @staticmethod
    def _others(world: World, client: Client) -> list[Client]:
        return [each for each in world.clients if each is not client and each.model == client.model]

    @staticmethod
    def _go_on(victim: Client) -> None:
        """Continue the client, also if it stops only now."""
        victim.signal(signal.SIGCONT)
        number = victim.say("arm", fault=None)
        end = time.monotonic() + ANSWER_S
        while victim.alive and victim.answer(number, 0.2) is None and time.monotonic() < end:
            victim.signal(signal.SIGCONT)


class BumpWeights(Fault):
    """New weights: all old blocks become void, in memory and on drives."""

    name = "bump_weights"
    help = "an engine gets new weights: no block of the old ones may ever be served again"

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"client": rng.randrange(99), "kill": rng.random() < 0.5}

    def run(self, world: World, parameters: Parameters) -> None:
        world.bump(world.client(parameters["client"]))
        if parameters["kill"]:
            world.traffic(0.1)
            world.kill_daemon()
            world.start_daemon()
        world.traffic(0.3)


PROCESSES: tuple[Fault, ...] = (
    KillDaemon(),
    KillDaemonStarting(),
    RestartDaemon(),
    StopDaemon(),
    KillClient(),
    StopClient(),
    StopClientCopying(),
    BumpWeights(),
)
