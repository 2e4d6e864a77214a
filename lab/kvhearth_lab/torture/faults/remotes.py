"""Faults of a remote behind memory: its server, the helper process, and blocks only there."""

from __future__ import annotations

import contextlib
import functools
import random
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import kvhearth_server
from kvhearth.errors import KVHearthError
from kvhearth_lab.torture.decks import MOVER_POINT, Decks, Mark
from kvhearth_lab.torture.faults.base import Fault, Parameters
from kvhearth_lab.torture.faults.daemon import OF_MOVERS
from kvhearth_lab.torture.world_config import Shape

if TYPE_CHECKING:
    from kvhearth_lab.torture.world import World

_MORE = 12
_WAIT_S = 3.0
_TICK_S = 0.05
_PUBLISHED_S = 5.0
_PASSAGES = (1, 1, 2, 5, 12)
_POINTS_A_STEP = 2
_LONG_S = 6.0
"""Longer than any request to a remote but a write, and the time until its helper is ended."""
_HIT = re.compile(r'\bhit\("(' + OF_MOVERS.replace(".", r"\.") + r'[a-z_.]+)"\)')


@functools.cache
def mover_points() -> tuple[str, ...]:
    """Return every fault point of the helper process."""
    folder = Path(kvhearth_server.__path__[0]) / "tiers" / "remote" / "helper"
    texts = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    return tuple(sorted({name for text in texts for name in _HIT.findall(text)}))


class _TierFault(Fault):
    """A fault of worlds with a remote behind memory."""

    def fits(self, shape: Shape) -> bool:
        return bool(shape.tier)


def _evict(world: World) -> None:
    """Evict all that memory can do without, as an operator would."""

    operator = world.daemon.operator()
    with contextlib.suppress(KVHearthError):
        for space in operator.namespaces().namespaces:
            operator.evict(space.namespace, 0, "memory")


def _server_down(world: World, for_s: float) -> None:
    """Kill the server, let clients work without it, and start it again."""
    assert world.server is not None
    world.server.kill()
    world.traffic(for_s)
    world.start_server()


class KillRemoteServer(_TierFault):
    """SIGKILL of the remote's server under traffic; Valkey loses all that it had."""

    name = "kill_remote_server"
    help = "kill -9 of the remote's server, or its directory goes away, and a new start"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {
            "after_s": round(rng.uniform(0.0, 0.5), 3),
            "for_s": round(rng.uniform(0.0, 2.5), 3),
            "evict": rng.random() < 0.5,
        }

    def run(self, world: World, parameters: Parameters) -> None:
        world.store_more(_MORE)
        if parameters["evict"]:
            _evict(world)
        world.traffic(parameters["after_s"])
        _server_down(world, parameters["for_s"])
        world.traffic(0.2)


class StopRemoteServer(_TierFault):
    """SIGSTOP of the remote's server, then SIGCONT or SIGKILL."""

    name = "stop_remote_server"
    help = "SIGSTOP of the remote's server, then SIGCONT, or kill -9 and a new start"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        longer = rng.random() < 0.3
        return {
            "for_s": _LONG_S if longer else round(rng.uniform(0.2, 2.5), 3),
            "kill": rng.random() < 0.3,
            "evict": rng.random() < 0.5,
        }

    def run(self, world: World, parameters: Parameters) -> None:
        assert world.server is not None
        world.store_more(_MORE)
        world.server.stop()
        if parameters["evict"]:
            _evict(world)
        world.traffic(parameters["for_s"])
        if parameters["kill"]:
            _server_down(world, 0.0)
        else:
            world.server.go_on()
        world.traffic(0.2)


class KillMover(_TierFault):
    """SIGKILL of the helper process at random moments, also while it starts."""

    name = "kill_mover"
    help = "kill -9 of the remote's helper process at random moments, also while it starts"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"after_s": [round(rng.uniform(0.0, 0.8), 3) for _ in range(rng.randint(1, 4))]}

    def run(self, world: World, parameters: Parameters) -> None:
        for after_s in parameters["after_s"]:
            world.store_more(_MORE)
            _evict(world)
            world.traffic(after_s)
            world.report.figures["movers_killed"] += world.signal_movers(signal.SIGKILL)
        world.traffic(0.3)


class StopMover(_TierFault):
    """SIGSTOP of the helper process, across its deadlines or the daemon's death."""

    name = "stop_mover"
    help = "SIGSTOP of the remote's helper process, then SIGCONT, kill -9, or kill -9 of its daemon"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        longer = rng.random() < 0.4
        return {
            "for_s": _LONG_S if longer else round(rng.uniform(0.1, 1.5), 3),
            "then": rng.choice(["continue", "continue", "kill", "orphan"]),
        }

    def run(self, world: World, parameters: Parameters) -> None:
        _evict(world)
        world.signal_movers(signal.SIGSTOP)
        world.store_more(_MORE)
        world.traffic(parameters["for_s"])
        if parameters["then"] == "orphan":
            world.kill_daemon()
            world.start_daemon()
        else:
            ends = parameters["then"] == "kill"
            world.signal_movers(signal.SIGKILL if ends else signal.SIGCONT)
        world.traffic(0.3)


class KillMoverAtPoint(_TierFault):
    """SIGKILL of the helper process at fault points of its sources, one after the other. Each
    helper of that daemon dies there, so that a new daemon is started afterwards.
    """

    name = "kill_mover_at_point"
    help = "kill -9 of the remote's helper process at a fault point, such as after a write"
    weight = 3
    in_each_world = True

    def deal(self, decks: Decks, shape: Shape) -> Parameters:
        return {"points": decks.names(MOVER_POINT, mover_points()).deal(_POINTS_A_STEP)}

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"passages": [rng.choice(_PASSAGES) for _ in range(_POINTS_A_STEP)]}

    def aims(self, shape: Shape) -> Iterable[Mark]:
        return [(MOVER_POINT, point) for point in mover_points()] if self.fits(shape) else []

    def run(self, world: World, parameters: Parameters) -> None:
        for point, passages in zip(parameters["points"], parameters["passages"], strict=True):
            reached = any(self._dies_at(world, f"{point}:{count}") for count in (passages, 1))
            world.report.coverage.point(point, reached=reached, kind=MOVER_POINT)
        world.kill_daemon()
        world.start_daemon()

    @staticmethod
    def _dies_at(world: World, fault: str) -> bool:
        world.kill_daemon()
        world.start_daemon(fault)
        end = time.monotonic() + _WAIT_S
        while time.monotonic() < end:
            world.store_more(_MORE)
            _evict(world)
            world.traffic(_TICK_S)
            if _HELPER_ENDED in "\n".join(world.daemon.own_lines()):
                return True
        return False


_HELPER_ENDED = "remote.helper_ended"


class KillAllOfRemote(_TierFault):
    """SIGKILL of server, helper process and daemon in a random order."""

    name = "kill_all_of_remote"
    help = "kill -9 of the remote's server, the helper process and the daemon, in a random order"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        turns = ["server", "mover", "daemon"]
        rng.shuffle(turns)
        return {"turns": turns, "after_s": [round(rng.uniform(0.0, 0.5) ** 2, 3) for _ in turns]}

    def run(self, world: World, parameters: Parameters) -> None:
        assert world.server is not None
        world.store_more(_MORE)
        for turn, after_s in zip(parameters["turns"], parameters["after_s"], strict=True):
            world.traffic(after_s)
            if turn == "server":
                world.server.kill()
            elif turn == "mover":
                world.signal_movers(signal.SIGKILL)
            else:
                world.kill_daemon()
                world.start_daemon()
        world.start_server()
        world.traffic(0.3)


class LoseMemory(_TierFault):
    """All blocks leave memory once they are published: what the remote has comes back."""

    name = "lose_memory"
    help = "blocks are published, then all leave memory: the remote gives them back"
    weight = 3
    in_each_world = True

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"kill": rng.random() < 0.5}

    def run(self, world: World, parameters: Parameters) -> None:
        world.store_more(_MORE)
        world.traffic(_TICK_S)
        with world.paused():
            end = time.monotonic() + _PUBLISHED_S
            with contextlib.suppress(OSError):
                while self._unpublished(world) and time.monotonic() < end:
                    time.sleep(_TICK_S)
            _evict(world)
            if parameters["kill"]:
                world.kill_daemon()
                world.start_daemon()
        world.traffic(0.3)

    @staticmethod
    def _unpublished(world: World) -> int:
        there = sum(map(len, world.at_the_remote().values()))
        return sum(len(world.oracle.known(model)) for model in world.models) - there


REMOTES: tuple[Fault, ...] = (
    KillRemoteServer(),
    StopRemoteServer(),
    KillMover(),
    StopMover(),
    KillMoverAtPoint(),
    KillAllOfRemote(),
    LoseMemory(),
)
