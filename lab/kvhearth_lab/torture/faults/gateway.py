"""Faults between a daemon and its remote clients: the gateway's process and the network."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvhearth.wire.remote import Purpose
from kvhearth_lab.torture.faults.base import Fault, Parameters
from kvhearth_lab.torture.world_config import Shape

if TYPE_CHECKING:
    from kvhearth_lab.harness.relay import Relay
    from kvhearth_lab.torture.world import World

_MORE = 12
_TRAP_S = 3.0
_TICK_S = 0.02
_BYTES_MAX = 300_000
_STALL_S = 6.5
"""Longer than a client waits for a data connection without progress."""
_RESUME_S = 11.5
"""Longer than a gateway waits for a life line to be resumed."""
_CONTINUE, _KILL, _ORPHAN = "continue", "kill", "orphan"
_DELAY, _HOLD, _AWAY = "delay", "hold", "away"
_CUT, _CUT_IN_A_FRAME, _HALF_NEAR, _HALF_FAR = "cut", "cut_in_a_frame", "half_near", "half_far"


class _RemoteFault(Fault):
    """A fault of worlds with remote clients."""

    def fits(self, shape: Shape) -> bool:
        return bool(shape.remote)


def _spring(
    world: World, relay: Relay, purpose: Purpose, after_bytes: int, action: Callable[[], object]
) -> bool:
    """Take the action in the middle of the relay's traffic; False if there was too little."""
    relay.trap(purpose, after_bytes, action)
    world.store_more(_MORE)
    end = time.monotonic() + _TRAP_S
    while relay.armed and time.monotonic() < end:
        world.traffic(_TICK_S)
    return not relay.disarm()


class KillGateway(_RemoteFault):
    """SIGKILL of the gateway at random moments, also while it starts."""

    name = "kill_gateway"
    help = "kill -9 of the gateway at random moments, sometimes again while it starts"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {
            "after_s": [round(rng.uniform(0.0, 0.6), 3) for _ in range(rng.randint(1, 2))],
            "again_after_s": round(rng.uniform(0.1, 0.8), 3) if rng.random() < 0.3 else 0.0,
        }

    def run(self, world: World, parameters: Parameters) -> None:
        for after_s in parameters["after_s"]:
            world.store_more(_MORE)
            world.traffic(after_s)
            with world.without_gateway("gateway killed"):
                world.kill_gateway()
                if parameters["again_after_s"]:
                    world.traffic(parameters["again_after_s"])
                    world.kill_gateway()
        world.traffic(0.3)


class KillGatewayCopying(_RemoteFault):
    """SIGKILL of the gateway when part of a block's bytes has come."""

    name = "kill_gateway_copying"
    help = "kill -9 of the gateway in the middle of a put or a get"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"client": rng.randrange(99), "after_bytes": rng.randrange(_BYTES_MAX)}

    def run(self, world: World, parameters: Parameters) -> None:
        _, relay = world.relayed(parameters["client"])
        after_bytes = parameters["after_bytes"]
        with world.without_gateway("gateway killed in a copy"):
            if _spring(world, relay, Purpose.DATA, after_bytes, world.kill_gateway):
                world.report.figures["gateways_killed_in_a_copy"] += 1
        world.traffic(0.3)


class StopGateway(_RemoteFault):
    """SIGSTOP of the gateway, then SIGCONT, SIGKILL, or SIGKILL of its daemon."""

    name = "stop_gateway"
    help = "SIGSTOP of the gateway, then SIGCONT, kill -9, or kill -9 of its daemon"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        longer = rng.random() < 0.15
        return {
            "for_s": _STALL_S if longer else round(rng.uniform(0.2, 1.5), 3),
            "then": rng.choice([_CONTINUE, _CONTINUE, _KILL, _ORPHAN]),
        }

    def run(self, world: World, parameters: Parameters) -> None:
        stopped = world.daemon.gateways()
        world.store_more(_MORE)
        with world.without_gateway("gateway stopped"):
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            world.traffic(parameters["for_s"])
            if parameters["then"] == _CONTINUE:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
            elif parameters["then"] == _KILL:
                world.kill_gateway()
            else:
                world.kill_daemon()
                world.start_daemon()
        world.traffic(0.3)


class CutNetwork(_RemoteFault):
    """Connections that break, also in the middle of a frame or in one direction."""

    name = "cut_network"
    help = "a remote client's connections break: in a frame, or in one direction"
    weight = 3

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        how = [_CUT, _CUT_IN_A_FRAME, _CUT_IN_A_FRAME, _HALF_NEAR, _HALF_FAR]
        cuts = [
            {
                "how": rng.choice(how),
                "purpose": rng.choice([each.name for each in Purpose]),
                "after_bytes": rng.randrange(_BYTES_MAX if rng.random() < 0.5 else 500),
            }
            for _ in range(rng.randint(2, 5))
        ]
        return {"client": rng.randrange(99), "cuts": cuts}

    def run(self, world: World, parameters: Parameters) -> None:
        _, relay = world.relayed(parameters["client"])
        for cut in parameters["cuts"]:
            purpose, how = Purpose[cut["purpose"]], cut["how"]
            if how == _CUT:
                relay.cut(purpose)
            elif how == _CUT_IN_A_FRAME:
                # A life line is silent.
                purpose = Purpose.CALLS if purpose is Purpose.LIFE_LINE else purpose
                after_bytes = cut["after_bytes"]
                sprung = _spring(world, relay, purpose, after_bytes, relay.cut)
                world.report.figures["networks_cut_in_a_frame"] += sprung
            else:
                relay.half_close(purpose, near=how == _HALF_NEAR)
            world.traffic(0.15)


class SlowNetwork(_RemoteFault):
    """A network that is slow, carries nothing, or is away for a while."""

    name = "slow_network"
    help = "a remote client's network delays, holds everything back, or is away for a while"

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        how = rng.choice([_DELAY, _HOLD, _AWAY])
        for_s = round(rng.uniform(0.3, 2.0), 3)
        if how != _DELAY and rng.random() < 0.2:
            for_s = _RESUME_S if how == _AWAY else _STALL_S
        return {
            "client": rng.randrange(99),
            "how": how,
            "for_s": for_s,
            "delay_s": round(rng.uniform(0.005, 0.1), 3),
        }

    def run(self, world: World, parameters: Parameters) -> None:
        victim, relay = world.relayed(parameters["client"])
        how = parameters["how"]
        world.store_more(_MORE)
        with world.window("slow network", victim.name):
            relay.delay_s = parameters["delay_s"] if how == _DELAY else 0.0
            relay.held, relay.away = how == _HOLD, how == _AWAY
            if how == _AWAY:
                relay.cut()
            world.traffic(parameters["for_s"])
            relay.delay_s, relay.held, relay.away = 0.0, False, False
            world.traffic(0.3)


class KillRemoteClient(_RemoteFault):
    """SIGKILL of a remote client when part of a block's bytes has left."""

    name = "kill_remote_client"
    help = "kill -9 of a remote client in the middle of a put or a get"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"client": rng.randrange(99), "after_bytes": rng.randrange(_BYTES_MAX)}

    def run(self, world: World, parameters: Parameters) -> None:
        victim, relay = world.relayed(parameters["client"])
        victim.expected_end = True
        sprung = _spring(world, relay, Purpose.DATA, parameters["after_bytes"], victim.process.kill)
        world.report.figures["remote_clients_killed_in_a_copy"] += sprung
        world.replace(victim, kill=True)
        world.traffic(0.2)


class KillInTurn(_RemoteFault):
    """SIGKILL of gateway, daemon and a client in a random order."""

    name = "kill_in_turn"
    help = "kill -9 of the gateway, the daemon and a client, in a random order under load"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        turns = ["gateway", "daemon", "client"]
        rng.shuffle(turns)
        return {
            "client": rng.randrange(99),
            "turns": turns,
            "after_s": [round(rng.uniform(0.0, 0.5) ** 2, 3) for _ in turns],
        }

    def run(self, world: World, parameters: Parameters) -> None:
        victim, _ = world.relayed(parameters["client"])
        world.store_more(_MORE)
        with world.without_gateway("gateway, daemon and a client killed"):
            for turn, after_s in zip(parameters["turns"], parameters["after_s"], strict=True):
                world.traffic(after_s)
                if turn == "gateway":
                    world.kill_gateway()
                elif turn == "client":
                    world.replace(victim, kill=True)
                else:
                    world.kill_daemon()
                    world.launch_daemon()
            world.wait_daemon()
        world.traffic(0.3)


GATEWAYS: tuple[Fault, ...] = (
    KillGateway(),
    KillGatewayCopying(),
    StopGateway(),
    CutNetwork(),
    SlowNetwork(),
    KillRemoteClient(),
    KillInTurn(),
)
