"""What a fault of the kit is."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kvhearth_server.torture.shape import Shape
    from kvhearth_server.torture.world import World

Parameters = dict[str, Any]


class Fault:
    """One kind of fault. ``plan`` fixes its parameters from dice, ``run`` does it.

    ``run`` begins and ends with a daemon that takes clients and with clients at work. Choices that
    depend on what is there then come from the parameter ``seed``.
    """

    name: ClassVar[str] = ""
    help: ClassVar[str] = ""
    weight: ClassVar[int] = 1

    def fits(self, shape: Shape) -> bool:
        """Whether it can happen in such a world."""
        return True

    def plan(self, dice: random.Random, shape: Shape) -> Parameters:
        """Its parameters, as JSON knows them."""
        return {}

    def run(self, world: World, parameters: Parameters) -> None:
        """Do it."""
        raise NotImplementedError
