"""A cache that uses an eviction policy, to run traces through."""

from __future__ import annotations

import numpy as np

from kvhearth.model import I64
from kvhearth_server.core.s3fifo import S3FifoPolicy
from kvhearth_server.core.slot_rings import PolicyArrays


def nothing_leased(_slot: int) -> bool:
    """An ``evictable`` that permits every slot."""
    return True


def fingerprint(key: int) -> int:
    """Return 32 well mixed bits of a key."""
    mixed = (key + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 >> 32) & 0xFFFFFFFF


class PolicyCache:
    """A cache of ``capacity`` keys whose victims a policy chooses."""

    def __init__(self, capacity: int) -> None:
        self.arrays = PolicyArrays(capacity)
        self.policy: S3FifoPolicy = S3FifoPolicy(self.arrays)
        self._slot_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self._free = list(range(capacity))

    def __contains__(self, key: int) -> bool:
        return key in self._slot_of

    def get_or_put(self, key: int) -> bool:
        """Look a key up and admit it on a miss. True for a hit."""
        slot = self._slot_of.get(key)
        if slot is not None:
            self.policy._arrays.touch(np.array([slot]))
            return True
        if not self._free:
            victim = self.policy.victim(nothing_leased)
            assert victim is not None
            self.policy.evict(victim)
            del self._slot_of[self._key_of.pop(victim)]
            self._free.append(victim)
        slot = self._free.pop()
        self._slot_of[key], self._key_of[slot] = slot, key
        self.policy.insert(np.array([slot]), np.array([fingerprint(key)], np.uint32))
        return False


def zipf_keys(seed: int, key_count: int, length: int) -> list[int]:
    """Return keys ``0 .. key_count - 1`` with probability proportional to 1 / (key + 1)."""
    weights = 1.0 / np.arange(1, key_count + 1)
    rng = np.random.default_rng(seed)
    picked: I64 = rng.choice(key_count, length, p=weights / weights.sum())
    return [int(key) for key in picked]


def hot_hits(cache: PolicyCache, hot: list[int], scans_per_hot: int, scan_from: int) -> float:
    """Return the share of hits among the hot accesses, each followed by ``scans_per_hot`` keys that
    occur only once.
    """
    hits, scan = 0, scan_from
    for key in hot:
        hits += cache.get_or_put(key)
        for _ in range(scans_per_hot):
            cache.get_or_put(scan)
            scan += 1
    return hits / len(hot)


def evict(policy: S3FifoPolicy, count: int) -> list[int]:
    """Evict ``count`` slots and return them in their order."""
    gone = []
    for _ in range(count):
        victim = policy.victim(nothing_leased)
        assert victim is not None
        policy.evict(victim)
        gone.append(victim)
    return gone
