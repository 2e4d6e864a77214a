"""Bits that flip in the files that name the blocks: the arena's catalogue, the namespaces beside
the SSD tier's blocks.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from kvhearth_server.engine.ssd_catalogue import FILE_NAME
from kvhearth_server.memory.plan import CATALOGUE_NAME
from kvhearth_server.torture import damage
from kvhearth_server.torture.faults.base import Fault, Parameters
from kvhearth_server.torture.shape import Shape

if TYPE_CHECKING:
    from kvhearth_server.torture.world import World

_SPAN_BYTES = 256
"""From a half's beginning: its header, and no more than the shortest content."""


class FlipCatalogue(Fault):
    """While the daemon is dead. One half of the arena's catalogue costs nothing, both cost the
    arena, and the namespaces beside the SSD tier's blocks cost these only without the arena.
    """

    name = "flip_catalogue"
    help = "bits flip in the arena's catalogue and in the namespaces on a drive: it may start cold"

    def fits(self, shape: Shape) -> bool:
        return shape.arena_stays or bool(shape.ssd_bytes)

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        return {
            "seed": dice.randrange(1 << 32),
            "halves": dice.choice([0, 1, 1, 2]) if shape.arena_stays else 0,
            "namespaces": dice.random() < 0.4,
        }

    def run(self, world: World, parameters: Parameters) -> None:
        dice = random.Random(parameters["seed"])
        with world.paused():
            world.kill_daemon()
            shape = world.shape
            no_arena = not shape.arena_stays or parameters["halves"] > 1
            no_names = not shape.ssd_bytes or parameters["namespaces"]
            if shape.arena_stays:
                path = world.arena_dir / CATALOGUE_NAME
                for half in dice.sample([0, 1], parameters["halves"]):
                    _flip(path, half * (path.stat().st_size // 2), _SPAN_BYTES, dice)
            if shape.ssd_bytes and parameters["namespaces"]:
                path = world.ssd_dir / FILE_NAME
                _flip(path, 0, path.stat().st_size, dice)
            if no_arena and no_names:
                world.excuse_all(self.name)
            elif no_arena:
                world.excuse_not_on_disk(self.name)
            world.start_daemon()
        world.traffic(0.3)


def _flip(path: Path, first: int, size: int, dice: random.Random) -> None:
    damage.flip_bit(path, first + dice.randrange(size), dice.randrange(8))


CATALOGUES: tuple[Fault, ...] = (FlipCatalogue(),)
