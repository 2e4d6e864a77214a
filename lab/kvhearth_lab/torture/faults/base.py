"""Base class of the kit's faults."""

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
    """One kind of fault. ``plan`` fixes its random parameters, ``deal`` those that are spread
    evenly over a run, and ``run`` executes it.

    ``run`` begins and ends with a daemon that accepts clients and with clients at work. Choices
    that depend on the state at that time are made with the parameter ``seed``.
    """

    name: ClassVar[str] = ""
    help: ClassVar[str] = ""
    weight: ClassVar[int] = 1
    in_each_world: ClassVar[bool] = False
    """Whether it happens once in every world that it fits, so that its aims are covered within
    minutes.
    """

    def fits(self, shape: Shape) -> bool:
        """Whether it can happen in such a world."""
        return True

    def plan(self, rng: random.Random, shape: Shape) -> Parameters:
        """Return its parameters as JSON values."""
        return {}

    def deal(self, decks: Decks, shape: Shape) -> Parameters:
        """Return further parameters, from the decks of the run."""
        return {}

    def aims(self, shape: Shape) -> Iterable[Mark]:
        """Return the marks that it can hit in such a world, for ``Coverage``."""
        return ()

    def run(self, world: World, parameters: Parameters) -> None:
        """Execute the fault."""
        raise NotImplementedError
