"""Deaths and pauses of the daemon and of clients."""

from __future__ import annotations

import random
import signal
import time
from typing import TYPE_CHECKING

from kvhearth_server.torture.faults.base import Fault, Parameters
from kvhearth_server.torture.shape import Shape
from kvhearth_server.torture.workers import ANSWER_S

if TYPE_CHECKING:
    from kvhearth_server.torture.workers import Client
    from kvhearth_server.torture.world import World


_MORE = 80
"""Stores of each client beyond the usual."""
_MORE_COPIES = 16
_WAIT_S = 1.5
_OTHERS_S = 1.0
_COPYING = "copier.store_copying"


class KillDaemon(Fault):
    """At a random moment."""

    name = "kill_daemon"
    help = "kill -9 of the daemon at a random moment of its work"
    weight = 2

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        return {"after_s": round(dice.uniform(0.0, 0.8), 3)}

    def run(self, world: World, parameters: Parameters) -> None:
        world.store_more()
        world.traffic(parameters["after_s"])
        world.kill_daemon()
        world.start_daemon()


class KillDaemonStarting(Fault):
    """While it starts."""

    name = "kill_daemon_starting"
    help = "kill -9 of the daemon while it starts, reads the arena or the log back"

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        return {"after_s": [round(dice.uniform(0.2, 1.2), 3) for _ in range(dice.randint(1, 2))]}

    def run(self, world: World, parameters: Parameters) -> None:
        world.kill_daemon()
        for after_s in parameters["after_s"]:
            world.launch_daemon()
            time.sleep(after_s)
            world.kill_daemon()
        world.start_daemon()


class RestartDaemon(Fault):
    """In good order."""

    name = "restart_daemon"
    help = "SIGTERM and a new start: an orderly restart under traffic"

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        late = bool(shape.ssd_bytes) and dice.random() < 0.5
        return {"after_s": round(dice.uniform(0.0, 0.5), 3), "late_drive": late}

    def run(self, world: World, parameters: Parameters) -> None:
        if parameters["late_drive"]:
            # Much is yet to be written when the end begins; the drive is well again by then.
            world.orders(held=["write"])
            world.store_more(_MORE)
        world.traffic(parameters["after_s"])
        world.orders()
        world.terminate_daemon()
        world.start_daemon()


class StopDaemon(Fault):
    """SIGSTOP, then it goes on or is killed."""

    name = "stop_daemon"
    help = "SIGSTOP of the daemon, then SIGCONT or kill -9"

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        return {"for_s": round(dice.uniform(0.2, 1.5), 3), "kill": dice.random() < 0.3}

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
    """At a random moment."""

    name = "kill_client"
    help = "kill -9 of a client at a random moment of its work"
    weight = 2

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        return {"client": dice.randrange(99), "after_s": round(dice.uniform(0.0, 0.5), 3)}

    def run(self, world: World, parameters: Parameters) -> None:
        world.traffic(parameters["after_s"])
        world.replace(world.client(parameters["client"]), kill=True)
        world.traffic(0.2)


class StopClient(Fault):
    """SIGSTOP of a client, perhaps over the daemon's death."""

    name = "stop_client"
    help = "SIGSTOP of a client for a while, perhaps while the daemon is killed and comes back"
    weight = 2

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        return {
            "client": dice.randrange(99),
            "for_s": round(dice.uniform(0.2, 1.5), 3),
            "restart": dice.random() < 0.5,
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
    """SIGSTOP of a client that is about to write into its slots, over the daemon's death.

    Nobody else may get these slots before it has gone on, however many blocks others store.
    """

    name = "stop_client_copying"
    help = (
        "SIGSTOP of a client in the middle of a copy; the daemon is killed, others store, SIGCONT"
    )

    def fits(self, shape: Shape) -> bool:
        return shape.arena_stays

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        return {"client": dice.randrange(99), "passages": dice.randint(1, 4)}

    def run(self, world: World, parameters: Parameters) -> None:
        # Its slots are of use to another client of its model.
        shared = [each for each in world.clients if self._others(world, each)] or world.clients
        victim = shared[parameters["client"] % len(shared)]
        with world.window("client stopped in a copy"):
            try:
                for passages in (parameters["passages"], 1):
                    victim.say("arm", fault=f"{_COPYING}:{passages}:stop")
                    world.go(victim, _MORE_COPIES)
                    if victim.stops_within(_WAIT_S):
                        break
                else:
                    return
                world.report.figures["clients_stopped_in_a_copy"] += 1
                world.kill_daemon()
                world.start_daemon()
                for each in self._others(world, victim):
                    world.go(each, _MORE)
                world.traffic(_OTHERS_S)
            finally:
                self._go_on(victim)
        world.traffic(0.3)

    @staticmethod
    def _others(world: World, client: Client) -> list[Client]:
        return [each for each in world.clients if each is not client and each.model == client.model]

    @staticmethod
    def _go_on(victim: Client) -> None:
        """Also if it stops only now."""
        victim.signal(signal.SIGCONT)
        number = victim.say("arm", fault=None)
        end = time.monotonic() + ANSWER_S
        while victim.alive and victim.answer(number, 0.2) is None and time.monotonic() < end:
            victim.signal(signal.SIGCONT)


class BumpWeights(Fault):
    """New weights: all old blocks are void from now on, in memory and on drives."""

    name = "bump_weights"
    help = "an engine gets new weights: no block of the old ones may ever be served again"

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        return {"client": dice.randrange(99), "kill": dice.random() < 0.5}

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
