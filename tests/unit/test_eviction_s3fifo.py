"""S3-FIFO: resistance to scans, the ghost's memory, and the end of a chain that leaves first."""

from __future__ import annotations

import numpy as np
from support.eviction_model import PolicyCache, evict, hot_hits, zipf_keys

from kvhearth_server.core.s3fifo import Ghost, S3FifoPolicy
from kvhearth_server.core.slot_rings import PolicyArrays

CAPACITY = 1000
HOT_KEYS = 800


def test_scans_cost_few_hits_of_the_hot_set() -> None:
    """An LRU cache has a share of 0.6 and keeps none of them."""
    cache = PolicyCache(CAPACITY)
    hot_hits(cache, zipf_keys(11, HOT_KEYS, 5_000), 0, 0)
    share = hot_hits(cache, zipf_keys(111, HOT_KEYS, 5_000), 4, HOT_KEYS)  # a scan mixed in
    for key in range(100 * CAPACITY, 110 * CAPACITY):  # and a burst of ten capacities
        cache.get_or_put(key)
    assert share > 0.9
    assert all(key in cache for key in range(100))


def test_eviction_takes_the_tail_of_a_chain_inserted_leaf_first() -> None:
    policy = S3FifoPolicy(PolicyArrays(1000))
    chain = np.arange(100)  # slot i holds the i-th block from the root
    policy.insert(chain[::-1], np.arange(100, dtype=np.uint32) << 24)
    policy._arrays.touch(chain)
    assert sorted(evict(policy, 10)) == list(range(90, 100))
    assert sorted(policy.slots().tolist()) == list(range(90))


def test_a_key_that_comes_back_goes_to_the_main_queue() -> None:
    policy = S3FifoPolicy(PolicyArrays(1000))
    marks = (np.arange(200, dtype=np.uint32) << 24) + np.arange(200, dtype=np.uint32)
    policy.insert(np.arange(100), marks[:100])
    assert evict(policy, 1) == [0]
    policy.insert(np.array([0]), marks[:1])
    policy.insert(np.arange(100, 110), marks[100:110])
    # Blocks that are new to the cache leave first, though they came later.
    assert evict(policy, 109) == list(range(1, 110))
    assert policy.slots().tolist() == [0]
    policy.check()


def test_a_leased_block_waits_at_the_new_end_of_the_small_queue() -> None:
    policy = S3FifoPolicy(PolicyArrays(1000))
    policy.insert(np.arange(10))
    assert policy.victim(lambda slot: slot != 0) == 1
    policy.insert(np.array([10]))
    assert evict(policy, 11) == [*range(1, 10), 0, 10]


def test_the_small_queue_pays_when_all_of_the_main_queue_is_leased() -> None:
    policy = S3FifoPolicy(PolicyArrays(1000))
    policy.insert(np.arange(100))
    policy._arrays.touch(np.arange(100))
    policy.insert(np.array([100, 101]))
    policy._arrays.touch(np.array([101]))
    for expected in (100, 101, None):
        for _ in range(2):
            assert policy.victim(lambda slot: slot >= 100) == expected
        if expected is not None:
            policy.evict(expected)


def test_the_small_queue_keeps_a_tenth_before_the_main_queue_pays() -> None:
    policy = S3FifoPolicy(PolicyArrays(1000))
    policy.insert(np.arange(100))
    policy._arrays.touch(np.arange(100))
    policy.insert(np.arange(100, 111))
    # The used hundred moves to the main queue. Eleven of 111 are less than a tenth: the main queue
    # pays once; eleven of 110 are a tenth: one of them goes; ten of 109 pay again at 100 members.
    assert evict(policy, 12) == [0, 100, *range(1, 10), 101]
    policy.check()


def test_a_used_block_between_leased_ones_is_found() -> None:
    policy = S3FifoPolicy(PolicyArrays(100))
    policy.insert(np.arange(4))
    policy._arrays.touch(np.arange(4))
    policy._arrays.touch(np.array([0]))
    assert evict(policy, 1) == [0]  # all were promoted, which spends all uses
    freq = policy._arrays.freq
    for _ in range(3):
        policy._arrays.touch(np.array([1]))
    assert policy.victim(lambda slot: slot == 3) == 3
    assert freq[1] == 2, "another round in the main queue spends one"


def test_ghost_forgets_a_key_that_it_gave_and_grows_without_loss() -> None:
    ghost = Ghost()
    rng = np.random.default_rng(5)
    marks = rng.choice(1 << 32, 40, replace=False).astype(np.uint32)
    for mark in marks:
        ghost.take_known(np.array([mark]))
    before = len(ghost)
    survivors = [m for m in marks if _holds(ghost, m)]
    ghost.fit(10_000)
    assert len(ghost) > before
    assert 10_000 * 2 / 3 <= len(ghost) <= 10_000 * 4 / 3
    assert all(_holds(ghost, mark) for mark in survivors)
    ghost.fit(0)
    assert len(ghost) == before
    assert ghost.take_known(np.array([survivors[-1]])).tolist() == [True]
    assert ghost.take_known(np.array([survivors[-1]])).tolist() == [False]


def test_the_ghost_grows_with_the_policy() -> None:
    policies = [S3FifoPolicy(PolicyArrays(600)) for _ in range(2)]
    for slot in range(600):
        policies[0].insert_one(slot, slot << 20)
    policies[1].insert(np.arange(600), np.arange(600, dtype=np.uint32) << np.uint32(20))
    assert all(400 <= len(policy._ghost) <= 800 for policy in policies)


def _holds(ghost: Ghost, mark: np.uint32) -> bool:
    known = bool(ghost.take_known(np.array([mark], np.uint32))[0])
    if known:
        ghost.take_known(np.array([mark], np.uint32))  # the query above removed it
    return known


def test_strangers_seem_known_to_the_ghost_once_in_256() -> None:
    ghost = Ghost()
    ghost.fit(1 << 16)
    rng = np.random.default_rng(6)
    print("seed 6")
    ghost.take_known(rng.integers(0, 1 << 32, 1 << 17, dtype=np.uint32))
    known = ghost.take_known(rng.integers(0, 1 << 32, 20_000, dtype=np.uint32))
    print(f"{known.mean():.4f} of strangers seemed known")
    assert known.mean() < 2 / 256
