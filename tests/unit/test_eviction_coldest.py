"""The heap of policies gives the same answer as a search through all of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.eviction_model import nothing_leased

from kvhearth_server.core.policies import Coldest
from kvhearth_server.core.s3fifo import S3FifoPolicy
from kvhearth_server.core.slot_rings import PolicyArrays

POLICIES = 12
SLOTS = 4000


class World:
    """Policies over one set of arrays, their heap, and the members of each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        arrays = PolicyArrays(SLOTS)
        self.policies = [S3FifoPolicy(arrays) for _ in range(POLICIES)]
        self.free = list(range(SLOTS))
        self.cold = Coldest()

    def insert(self, number: int) -> None:
        slots = [self.free.pop() for _ in range(min(len(self.free), self.random.randrange(1, 90)))]
        marks = [self.random.randrange(1 << 32) for _ in slots]
        self.policies[number].insert(np.array(slots, np.int64), np.array(marks, np.uint32))

    def remove(self, number: int) -> None:
        members = self.policies[number].slots().tolist()
        gone = self.random.sample(members, self.random.randrange(len(members) + 1))
        self.policies[number].remove(np.array(gone, np.int64))
        self.free += gone

    def touch(self, number: int) -> None:
        members = self.policies[number].slots()
        self.policies[number]._arrays.touch(members[:: self.random.randrange(1, 4)])

    def evict(self, number: int) -> None:
        for _ in range(self.random.randrange(1, 60)):
            victim = self.policies[number].victim(nothing_leased)
            if victim is None:
                return
            self.policies[number].evict(victim)
            self.free.append(victim)

    def coldest_of(self, policies: list[S3FifoPolicy]) -> int | None:
        """The smallest rank among the policies that have members."""
        ranks = [policy.age_rank() for policy in policies if len(policy)]
        return min((1 << 62 if rank is None else rank for rank in ranks), default=None)


@pytest.mark.parametrize("seed", range(2))
def test_the_first_is_the_coldest_whatever_happens(seed: int) -> None:
    world = World(seed)
    for _ in range(600):
        number = world.random.randrange(POLICIES)
        work = world.random.choice([world.insert, world.remove, world.touch, world.evict])
        work(number)
        world.cold.note(number, world.policies[number])
        found = world.cold.first()
        expected = world.coldest_of(world.policies)
        assert (found is None) == (expected is None)
        if found is not None:
            assert found[1] is world.policies[found[0]]
            assert world.coldest_of([found[1]]) == expected


def test_who_is_passed_over_competes_again() -> None:
    world = World(1)
    for number in range(3):
        world.insert(number)
        world.cold.note(number, world.policies[number])
    order = []
    while (found := world.cold.first()) is not None:
        order.append(found[0])
        world.cold.skip(found[0])
    assert order == [0, 1, 2]
    world.cold.restore()
    found = world.cold.first()
    assert found is not None
    assert found[0] == 0


def test_an_emptied_policy_is_forgotten() -> None:
    world = World(2)
    world.insert(0)
    world.cold.note(0, world.policies[0])
    world.policies[0].remove(world.policies[0].slots())
    assert world.cold.first() is None  # the heap need not be notified
