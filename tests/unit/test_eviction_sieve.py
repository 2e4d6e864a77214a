"""SIEVE: the hand, and the blocks that survive a scan."""

from __future__ import annotations

import numpy as np
import pytest
from support.eviction_model import (
    PolicyCache,
    QueueCache,
    evict,
    hot_hits,
    zipf_keys,
)

from kvhearth_server.core.eviction import PolicyArrays
from kvhearth_server.core.eviction.sieve import SievePolicy

CAPACITY = 1000
HOT_KEYS = 800


class ListSieve:
    """The paper's algorithm on a plain list, the oldest first."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.marked: set[int] = set()
        self._hand: int | None = None

    def evict(self) -> int:
        at = 0 if self._hand is None else self.order.index(self._hand)
        while self.order[at] in self.marked:
            self.marked.discard(self.order[at])
            at = (at + 1) % len(self.order)
        slot = self.order.pop(at)
        self._hand = self.order[at] if at < len(self.order) else None
        return slot


def test_new_blocks_are_safe_from_a_hand_that_has_passed_the_newest() -> None:
    policy = SievePolicy(PolicyArrays(100))
    policy.insert(np.arange(4))
    policy.touch(np.array([0, 1, 2]))
    assert evict(policy, 1) == [3]
    policy.insert(np.array([9]))
    assert evict(policy, 4) == [0, 1, 2, 9]


@pytest.mark.parametrize("seed", [31, 32, 33])
def test_victims_are_those_of_the_paper(seed: int) -> None:
    """Long enough that chunks fill, become sparse and merge under the hand."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    policy, model = SievePolicy(PolicyArrays(4000)), ListSieve()
    policy.insert(np.arange(3500))
    model.order = list(range(3500))
    free = list(range(3500, 4000))
    for step in range(60):
        used = rng.choice(model.order, 300)
        policy.touch(used)
        model.marked.update(used.tolist())
        for _ in range(int(rng.integers(50, 150))):
            expected = model.evict()
            assert evict(policy, 1) == [expected]
            free.append(expected)
        new = [free.pop(0) for _ in range(int(rng.integers(20, 120)))]
        policy.insert(np.array(new))
        model.order += new
        model.marked.difference_update(new)
        assert policy.slots().tolist() == model.order, step
        policy.check()


@pytest.mark.parametrize("seed", [41, 42])
def test_a_mixed_in_scan_costs_few_hits(seed: int) -> None:
    print(f"seed {seed}")
    warm, hot = zipf_keys(seed, HOT_KEYS, 10_000), zipf_keys(seed + 100, HOT_KEYS, 10_000)
    share = {}
    for name in ("sieve", "lru"):
        cache = QueueCache(CAPACITY, lru=True) if name == "lru" else PolicyCache(name, CAPACITY)
        hot_hits(cache, warm, 0, 0)
        share[name] = hot_hits(cache, hot, 4, HOT_KEYS)
    print({name: round(value, 3) for name, value in share.items()})
    assert share["sieve"] > share["lru"]


def test_eviction_takes_the_tail_of_a_chain_inserted_leaf_first() -> None:
    policy = SievePolicy(PolicyArrays(100))
    policy.insert(np.arange(100)[::-1])
    assert evict(policy, 10) == list(range(99, 89, -1))
    assert sorted(policy.slots().tolist()) == list(range(90))
