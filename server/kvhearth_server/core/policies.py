"""Eviction policies by namespace and slot size, over one set of arrays.

One policy per namespace lets a namespace at its quota evict of its own; among namespaces the colder
end goes first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvhearth.model import I64
from kvhearth_server.core.eviction import EvictionPolicy, PolicyArrays, make_policy
from kvhearth_server.core.table import Pick, SlotTable


class PolicySet:
    """All policies; a bound head is a member of exactly one."""

    def __init__(self, name: str, slot_count: int) -> None:
        self._name = name
        self._arrays = PolicyArrays(slot_count)
        self._policies: dict[tuple[int, int], EvictionPolicy] = {}

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
        """As ``insert``, of one head."""
        policy = self._policies.get((namespace, slot_bytes))
        if policy is None:
            policy = self._policy_for(namespace, slot_bytes)
        policy.insert_one(head, hash(key) & 0xFFFFFFFF)

    def _policy_for(self, namespace: int, slot_bytes: int) -> EvictionPolicy:
        place = (namespace, slot_bytes)
        policy = self._policies.get(place)
        if policy is None:
            policy = self._policies[place] = make_policy(self._name, self._arrays)
        return policy

    def touch(self, heads: Pick) -> None:
        """Mark heads of any policies as used."""
        self._arrays.touch(heads)

    def touch_one(self, head: int) -> None:
        """As ``touch``, of one head."""
        self._arrays.touch_one(head)

    def remove(self, table: SlotTable, heads: I64) -> None:
        """Let heads go without counting them as evicted."""
        sizes = table.slot_bytes_of(heads)
        places = table.namespace[heads].astype(np.int64) << 32 | sizes
        for place in np.unique(places):
            chosen = heads[places == place]
            self._policies[int(place) >> 32, int(place) & 0xFFFFFFFF].remove(chosen)

    def of_size(self, slot_bytes: int) -> Iterator[tuple[int, EvictionPolicy]]:
        """(namespace, policy) of all that hold slots of a size."""
        for (namespace, size), policy in self._policies.items():
            if size == slot_bytes and len(policy):
                yield namespace, policy

    def of_namespace(self, namespace: int) -> Iterator[EvictionPolicy]:
        """Policies of a namespace, over all its slot sizes."""
        for (number, _), policy in self._policies.items():
            if number == namespace and len(policy):
                yield policy

    def drop(self, namespace: int) -> None:
        """Forget the policies of a namespace, which has no blocks any more.

        Raises:
            ValueError: if one has members; nothing has changed.
        """
        places = [place for place in self._policies if place[0] == namespace]
        members = sum(len(self._policies[place]) for place in places)
        if members:
            raise ValueError(f"namespace {namespace}: its policies have {members} members")
        for place in places:
            del self._policies[place]

    def __len__(self) -> int:
        """Policies, those without members too."""
        return len(self._policies)

    @property
    def member_count(self) -> int:
        """Heads in all policies."""
        return sum(map(len, self._policies.values()))

    def places(self) -> list[tuple[int, int]]:
        """(namespace, slot size) of all policies."""
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
