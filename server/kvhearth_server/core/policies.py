"""Eviction policies by namespace and slot size, over one set of arrays.

With one policy per namespace, a namespace at its quota evicts its own blocks; among namespaces the
colder end goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Container, Iterator

import numpy as np

from kvhearth.model import I64
from kvhearth_server.core.s3fifo import S3FifoPolicy
from kvhearth_server.core.slot_rings import PolicyArrays
from kvhearth_server.core.slot_table import Pick, SlotTable

_ENDED, _WARMEST = -1, 1 << 62
_RINGS_A_POLICY = 2
_STALE_MAX = 64
"""Upper bound on stale entries of a heap, beyond one per policy."""


class PolicySet:
    """All policies; a bound head is a member of exactly one."""

    def __init__(self, slot_count: int, policies_max: int = 64) -> None:
        """``policies_max``: policies for which memory is reserved; more of them make it grow."""
        self._arrays = PolicyArrays(slot_count, _RINGS_A_POLICY * policies_max)
        self._policies: dict[tuple[int, int], S3FifoPolicy] = {}
        self._by_namespace: dict[int, dict[int, S3FifoPolicy]] = {}
        self._changed: set[tuple[int, int]] = set()

    def insert(self, namespace: int, slot_bytes: int, heads: I64, keys: list[bytes] | None) -> None:
        """Admit heads, coldest first; ``keys`` in the same order, or None for an adopted arena."""
        policy = self._policy_for(namespace, slot_bytes)
        if keys is None:
            policy.insert(heads)
            return
        if len(keys) == 1:
            policy.insert_one(int(heads[0]), hash(keys[0]) & 0xFFFFFFFF)
            return
        marks = np.fromiter(map(hash, keys), np.int64, len(keys)).astype(np.uint32)
        policy.insert(heads, marks)

    def insert_one(self, namespace: int, slot_bytes: int, head: int, key: bytes) -> None:
        """Admit one head."""
        self._policy_for(namespace, slot_bytes).insert_one(head, hash(key) & 0xFFFFFFFF)

    def _policy_for(self, namespace: int, slot_bytes: int) -> S3FifoPolicy:
        place = (namespace, slot_bytes)
        policy = self._policies.get(place)
        if policy is None:
            policy = self._policies[place] = S3FifoPolicy(self._arrays)
            self._by_namespace.setdefault(namespace, {})[slot_bytes] = policy
        self._changed.add(place)
        return policy

    def touch(self, heads: Pick) -> None:
        """Mark heads of any policies as used."""
        self._arrays.touch(heads)

    def remove(self, table: SlotTable, heads: I64) -> None:
        """Remove heads without counting them as evicted."""
        sizes = table.slot_bytes_of(heads)
        places = table.namespace[heads].astype(np.int64) << 32 | sizes
        for place in np.unique(places):
            chosen = heads[places == place]
            self._policy_for(int(place) >> 32, int(place) & 0xFFFFFFFF).remove(chosen)

    def tracks(self, head: int) -> bool:
        """Whether a head is in any policy."""
        return self._arrays.places[head] > 0

    def take_changed(self) -> Collection[tuple[int, int]]:
        """Return the (namespace, slot size) pairs that changed since the last call.

        A pair changes when its policy gains blocks or blocks are removed from it.
        """
        changed, self._changed = self._changed, set()
        return changed

    def reorder(self, namespace: int) -> None:
        """Note that a namespace's place among the victims has changed."""
        self._changed.update((namespace, size) for size in self._by_namespace.get(namespace, {}))

    def get(self, namespace: int, slot_bytes: int) -> S3FifoPolicy | None:
        """A namespace's policy of a slot size; None if there is none."""
        return self._policies.get((namespace, slot_bytes))

    def of_namespace(self, namespace: int) -> Iterator[S3FifoPolicy]:
        """Policies of a namespace, over all its slot sizes."""
        yield from self._by_namespace.get(namespace, {}).values()

    def drop(self, namespace: int) -> None:
        """Forget the policies of a namespace that has no blocks any more.

        Raises:
            ValueError: if one has members; nothing has changed.
        """
        members = sum(map(len, self.of_namespace(namespace)))
        if members:
            raise ValueError(f"namespace {namespace}: its policies have {members} members")
        for slot_bytes in self._by_namespace.pop(namespace, {}):
            del self._policies[namespace, slot_bytes]

    def __len__(self) -> int:
        """Number of policies, including those without members."""
        return len(self._policies)

    @property
    def member_count(self) -> int:
        """Number of heads in all policies."""
        return sum(map(len, self._policies.values()))

    def places(self) -> list[tuple[int, int]]:
        """The (namespace, slot size) pairs of all policies."""
        return list(self._policies)

    def members(self, namespace: int, slot_bytes: int) -> I64:
        """The heads in a policy; none if there is no such policy."""
        policy = self._policies.get((namespace, slot_bytes))
        return np.zeros(0, np.int64) if policy is None else policy.slots()

    def check(self, namespace: int, slot_bytes: int) -> None:
        """Raise ValueError if the structures of a policy disagree."""
        policy = self._policies.get((namespace, slot_bytes))
        if policy is not None:
            policy.check()


class Coldest:
    """Policies that compete for the next victim, in a heap by their ``age_rank``.

    A policy's entry is valid only while its rank is the policy's current one: callers that change a
    policy call ``note``. A victim thus costs the logarithm of the number of policies. A sort or a
    scan for each victim costs more: with a thousand namespaces that stopped the daemon for seconds.

    Args:
        ended: names whose policies come before all others.
    """

    def __init__(self, ended: Container[int] = ()) -> None:
        self._ended = ended
        self._policies: dict[int, S3FifoPolicy] = {}
        self._ranks: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._skipped: list[int] = []

    def note(self, name: int, policy: S3FifoPolicy) -> None:
        """Add a policy under a name, or register that it has changed; empty ones are dropped."""
        if not len(policy):
            self._policies.pop(name, None)
            self._ranks.pop(name, None)
            return
        rank = policy.age_rank()
        rank = _ENDED if name in self._ended else _WARMEST if rank is None else rank
        self._policies[name] = policy
        if self._ranks.get(name) != rank:
            self._ranks[name] = rank
            heapq.heappush(self._heap, (rank, name))
            if len(self._heap) > 2 * len(self._ranks) + _STALE_MAX:
                self._heap = [(rank, name) for name, rank in self._ranks.items()]
                heapq.heapify(self._heap)

    def first(self) -> tuple[int, S3FifoPolicy] | None:
        """The policy with the smallest rank, and its name; None if there is none."""
        heap = self._heap
        while heap:
            rank, name = heap[0]
            if self._ranks.get(name) == rank and len(self._policies[name]):
                return name, self._policies[name]
            heapq.heappop(heap)
        return None

    def skip(self, name: int) -> None:
        """Pass over a policy without a victim until ``restore``."""
        del self._ranks[name]
        self._skipped.append(name)

    def restore(self) -> None:
        """Let the policies that were passed over compete again."""
        skipped, self._skipped = self._skipped, []
        for name in skipped:
            self.note(name, self._policies[name])
