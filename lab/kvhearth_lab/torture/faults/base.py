"""What a fault of the kit is."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kvhearth_lab.torture.decks import Decks, Mark
    from kvhearth_lab.torture.world import World
    from kvhearth_lab.torture.world_config import Shape

Parameters = dict[str, Any]


class Fault:
    """One kind of fault. ``plan`` fixes its parameters from dice, ``deal`` those that come round
    evenly over a run, ``run`` does it.

    ``run`` begins and ends with a daemon that takes clients and with clients at work. Choices that
    depend on what is there then come from the parameter ``seed``.
    """

    name: ClassVar[str] = ""
    help: ClassVar[str] = ""
    weight: ClassVar[int] = 1
    in_each_world: ClassVar[bool] = False
    """It happens once for sure where it fits: what it aims at is to come round in some minutes."""

    def fits(self, shape: Shape) -> bool:
        """Whether it can happen in such a world."""
        return True

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        """Its parameters, as JSON knows them."""
        return {}

    def deal(self, decks: Decks, shape: Shape) -> Parameters:
        """More parameters, from the decks of the run."""
        return {}

    def aims(self, shape: Shape) -> Iterable[Mark]:
        """What it can hit in such a world, for ``Coverage``."""
        return ()

    def run(self, world: World, parameters: Parameters) -> None:
        """Do it."""
        raise NotImplementedError
