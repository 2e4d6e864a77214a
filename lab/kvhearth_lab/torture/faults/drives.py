"""Drives that fail, fill up, hang or are slow, on command (``harness/faults``)."""

from __future__ import annotations

import errno
import random
import time
from typing import TYPE_CHECKING

from kvhearth_lab.torture import damage
from kvhearth_lab.torture.faults.base import Fault, Parameters
from kvhearth_lab.torture.oracle import look_at_drive
from kvhearth_lab.torture.world_config import FLEETING, SPILLING, Shape
from kvhearth_server.tiers.ssd.format import PAGE_BYTES

if TYPE_CHECKING:
    from kvhearth_lab.torture.world import World

_HEARD_S = 0.05
_MORE = 8
"""Stores of each client that meet the fault, even if the world's limit of stores is nearly
reached.
"""
_BURST, _BURST_S = 60, 1.0
"""Number and duration of stores where memory is to fill up faster than a drive writes."""
_UNWRITTEN_S = 0.5
"""Duration of the stores that are not written yet when the daemon is killed."""
_READS_A_FILE = 3
"""Lower bound on the reads of a segment file at the start."""
_DELAY_S = 0.5
"""Delay of a drive so slow that blocks wait, yet fast enough that the daemon does not give them
up.
"""


class _Drive(Fault):
    """Makes the drive follow ``orders`` for a while; the daemon may be killed afterwards."""

    def fits(self, shape: Shape) -> bool:
        return bool(shape.ssd_bytes)

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {
            "for_s": round(rng.uniform(0.3, 1.5), 3),
            "kill": rng.random() < 0.7,
            "orders": self.orders(rng),
        }

    def orders(self, rng: random.Random) -> Parameters:
        """Return the orders for the drive."""
        raise NotImplementedError

    def run(self, world: World, parameters: Parameters) -> None:
        world.drive_faulted()
        world.orders(**parameters["orders"])
        time.sleep(_HEARD_S)
        world.store_more(_MORE)
        try:
            world.traffic(parameters["for_s"])
        finally:
            world.orders()
        world.traffic(0.2)
        if parameters["kill"]:
            with world.paused():
                look_at_drive(world)
            world.traffic(0.2)
            world.kill_daemon()
            world.start_daemon()
            world.traffic(0.2)


class ReadErrors(_Drive):
    """EIO and short reads."""

    name = "read_errors"
    help = "reads of the drive end with EIO or move fewer bytes"

    def orders(self, rng: random.Random) -> Parameters:
        rate = rng.choice([0.2, 1.0])
        if rng.random() < 0.3:
            return {"short": ["read"], "rate": rate}
        return {"errors": {"read": errno.EIO}, "rate": rate}


class WriteErrors(_Drive):
    """EIO, EROFS, short writes, failed flushes."""

    name = "write_errors"
    help = "writes to the drive end with EIO or EROFS, or move fewer bytes; flushes fail"

    def orders(self, rng: random.Random) -> Parameters:
        rate = rng.choice([0.4, 1.0])  # high, because there are only a few requests
        if rng.random() < 0.3:
            return {"short": ["write"], "rate": rate}
        errors = {rng.choice(["write", "write", "sync"]): rng.choice([errno.EIO, errno.EROFS])}
        return {"errors": errors, "rate": rate}


class NoSpace(_Drive):
    """ENOSPC for writes and for new segment files."""

    name = "no_space"
    help = "ENOSPC: no new segment file can be made, and perhaps no page written"

    def orders(self, rng: random.Random) -> Parameters:
        errors = {"write": errno.ENOSPC} if rng.random() < 0.5 else {}
        return {"make": errno.ENOSPC, "errors": errors}


class SlowDrive(_Drive):
    """Long delays of each request."""

    name = "slow_drive"
    help = "each request of the drive takes up to 1.5 s"

    def orders(self, rng: random.Random) -> Parameters:
        return {"delay_s": round(rng.uniform(0.05, 1.5), 3)}

    def run(self, world: World, parameters: Parameters) -> None:
        if world.shape.kind != SPILLING:
            super().run(world, parameters)
            return
        # No request fails, and each ends soon: stores wait for room, and nothing is lost.
        world.drive_is_good = False
        world.orders(delay_s=min(parameters["orders"]["delay_s"], _DELAY_S))
        time.sleep(_HEARD_S)
        world.store_more(_BURST)
        try:
            world.traffic(_BURST_S + parameters["for_s"])
        finally:
            world.orders()
        world.report.figures["bursts_to_a_slow_drive"] += 1
        if parameters["kill"]:
            world.traffic(0.2)
            world.kill_daemon()
            world.start_daemon()
        world.traffic(0.2)


class HangingDrive(_Drive):
    """Requests that hang for longer than the tier waits for them."""

    name = "hanging_drive"
    help = "requests of the drive do not come back for 6 s"

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {**super().plan(rng, shape), "for_s": 6.0}

    def orders(self, rng: random.Random) -> Parameters:
        return {"held": rng.choice([["write"], ["read", "write"], ["read"]])}


class SlowReadBack(Fault):
    """Slow recovery of the log after SIGKILL, while clients want more room than there is.

    A tier that is still recovering is neither stuck nor slow: nothing may be lost.
    """

    name = "slow_read_back"
    help = "kill -9 with much unwritten; the log is read back for seconds while clients store"
    weight = 2

    def fits(self, shape: Shape) -> bool:
        return shape.kind in (SPILLING, FLEETING)

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        return {"for_s": round(rng.uniform(3.0, 5.0), 3), "footers": rng.random() < 0.5}

    def run(self, world: World, parameters: Parameters) -> None:
        world.orders(held=["write"])
        time.sleep(_HEARD_S)
        world.store_more(_BURST)
        world.traffic(_UNWRITTEN_S)
        with world.paused():
            world.kill_daemon()
            for path in damage.footers(world.ssd_dir) if parameters["footers"] else ():
                damage.zero(path, path.stat().st_size - PAGE_BYTES, PAGE_BYTES)
            reads = _READS_A_FILE * max(1, len(damage.segment_files(world.ssd_dir)))
            world.orders(read_back_s=parameters["for_s"] / reads)
            world.start_daemon()
        world.store_more(_BURST)
        world.traffic(parameters["for_s"])
        world.orders()
        world.traffic(0.2)


DRIVES: tuple[Fault, ...] = (
    ReadErrors(),
    WriteErrors(),
    NoSpace(),
    SlowDrive(),
    HangingDrive(),
    SlowReadBack(),
)
