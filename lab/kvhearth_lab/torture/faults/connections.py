"""Faults of connections, descriptors and clocks."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
from typing import TYPE_CHECKING

from kvhearth.url import ATTACH_SOCKET
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.handshake import Hello, encode_frame
from kvhearth_lab.harness.engine import contract_of
from kvhearth_lab.harness.faults import set_offsets
from kvhearth_lab.torture.faults.base import Fault, Parameters
from kvhearth_lab.torture.world_config import Shape

if TYPE_CHECKING:
    from kvhearth_lab.torture.world import World

_DAY_S = 86400.0
STAGES = ("silent", "half", "whole", "received")


class CutHandshake(Fault):
    """Peers that disconnect in the middle of an attach."""

    name = "cut_handshake"
    help = "attaches that break off: before, in and after the hello, with descriptors on their way"

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        stages = [rng.choice(STAGES) for _ in range(rng.randint(4, 16))]
        return {"stages": stages, "cuts": [round(rng.random(), 3) for _ in stages]}

    def run(self, world: World, parameters: Parameters) -> None:
        path = str(world.daemon.socket_dir / ATTACH_SOCKET)
        page_bytes, shards = world.shape.models[0]
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            engine_id="cut",
            contract=contract_of(page_bytes, shards=shards, model=world.model_name(0)).to_json(),
            pid=os.getpid(),
        )
        frame = encode_frame(hello.to_message())
        for stage, cut in zip(parameters["stages"], parameters["cuts"], strict=True):
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(5.0)
                try:
                    line.connect(path)
                    if stage == "half":
                        line.sendall(frame[: int(cut * len(frame))])
                    elif stage != "silent":
                        line.sendall(frame)
                    if stage == "received":
                        # The descriptors come with the answer's first byte.
                        for descriptor in socket.recv_fds(line, 1 + int(cut * 4096), 8)[1]:
                            os.close(descriptor)
                except OSError:
                    continue
        world.traffic(0.3)


class Disconnect(Fault):
    """Connections of a client that are shut down while it uses them."""

    name = "disconnect"
    help = "a client's attach socket or its calls' connections are shut down while it works"
    weight = 2

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        count = rng.randint(1, 4)
        return {
            "client": rng.randrange(99),
            "what": [rng.choice(["life", "calls", "calls"]) for _ in range(count)],
        }

    def run(self, world: World, parameters: Parameters) -> None:
        victim = world.client(parameters["client"])
        for what in parameters["what"]:
            victim.ask("cut", what=what)
            world.traffic(0.1)


class LoseDescriptors(Fault):
    """A client without room for the descriptors that the daemon sends."""

    name = "lose_descriptors"
    help = "a client attaches while it can have no descriptor: those it is sent get lost"

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"client": rng.randrange(99), "for_s": round(rng.uniform(0.2, 0.8), 3)}

    def run(self, world: World, parameters: Parameters) -> None:
        victim = world.client(parameters["client"])
        with world.window("a client has no descriptors"):
            number = victim.say("starve", for_s=parameters["for_s"])
            world.traffic(parameters["for_s"])
            victim.answer(number)
        world.traffic(0.3)


class FewDescriptors(Fault):
    """A daemon that can open no descriptor for a while."""

    name = "few_descriptors"
    help = "the daemon runs out of descriptors while clients come and go"

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"client": rng.randrange(99), "for_s": round(rng.uniform(0.2, 1.0), 3)}

    def run(self, world: World, parameters: Parameters) -> None:
        pid = world.daemon.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
        world.drive_faulted()
        with world.window("the daemon has no descriptors"):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 2, before[1]))
            try:
                world.client(parameters["client"]).ask("cut", what="life")
                world.client(parameters["client"] + 1).ask("cut", what="calls")
                world.traffic(parameters["for_s"])
            finally:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        world.traffic(0.3)


class ClockJump(Fault):
    """Jumps of the daemon's clocks while it runs or between two runs."""

    name = "clock_jump"
    help = "the daemon's wall clock jumps by up to 100 days, its monotonic clock ahead by minutes"
    weight = 2

    def fits(self, shape: Shape) -> bool:
        return shape.skewed

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {
            "wall_s": round(rng.uniform(-100, 100) * _DAY_S, 3),
            "monotonic_s": round(rng.choice([0.0, rng.uniform(0, 600)]), 3),
            "restart": rng.random() < 0.5,
        }

    def run(self, world: World, parameters: Parameters) -> None:
        if parameters["restart"]:
            world.kill_daemon()
        # Deadlines of calls under way expire, as after a pause of the whole machine.
        with world.window("clock jump"):
            world.monotonic_s += parameters["monotonic_s"]
            set_offsets(world.clock_file, parameters["wall_s"], world.monotonic_s)
            time.sleep(0.05)
        if parameters["restart"]:
            world.start_daemon()
        world.traffic(0.4)


LINES: tuple[Fault, ...] = (
    CutHandshake(),
    Disconnect(),
    LoseDescriptors(),
    FewDescriptors(),
    ClockJump(),
)
