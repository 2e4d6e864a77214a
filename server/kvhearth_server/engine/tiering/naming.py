"""Translates the core's namespaces and slots into the tier's names and places."""

from __future__ import annotations

import hashlib

import numpy as np

from kvhearth.contract import GroupSpec
from kvhearth.model import I64, Records
from kvhearth_server.core.actions import EventKind
from kvhearth_server.core.core import Core
from kvhearth_server.core.lower_tier import BlockBatch
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.tiers.base import ADDRESS_DTYPE, BlockSpec, Identity, StoreBatch

_NAMES_MAX = 1 << 14


class BlockNaming:
    """Maps namespaces to families and back, and slots to places.

    Args:
        core: the core that has the namespaces and slots.
        lineage: ID that the epochs belong to (docs/adr/0008); blocks stored under another lineage
            are never found.
    """

    def __init__(self, core: Core, lineage: str) -> None:
        self._core = core
        self._lineage = lineage.encode()
        self._numbers: dict[bytes, int] = {}
        self._names: dict[tuple[bytes, int], bytes] = {}
        self._numbered = -1
        """Version of the namespaces whose names are all known."""

    def family(self, namespace: Namespace, kv_group: int, epoch: int | None = None) -> BlockSpec:
        """Return the tier's name for the blocks of a KV group, by default of the current epoch."""
        spec: GroupSpec = namespace.contract.groups[kv_group]
        name = self.name(namespace)
        if len(self._numbers) >= _NAMES_MAX + self._core.state.limits.namespaces_max:
            self._number_all()
        self._numbers[name] = namespace.number
        shown = namespace.epoch if epoch is None else epoch
        return BlockSpec(name, kv_group, shown, spec.page_bytes, spec.shards)

    def store_batch(self, batch: BlockBatch) -> StoreBatch:
        """Return a batch of the core in the tier's words."""
        return StoreBatch(
            self.family(batch.namespace, batch.kv_group, batch.epoch),
            batch.keys,
            self.places(batch.slots, batch.spec.page_bytes),
            batch.checksums,
            batch.sequences,
            batch.parents,
            parent_keys=batch.parent_keys,
            renew=batch.renew,
        )

    def namespace(self, name: bytes) -> Namespace | None:
        """Return the namespace that the tier knows as ``name``, or None if it is gone."""
        namespaces = self._core.state.namespaces
        number = self._numbers.get(name, -1)
        found = namespaces.get(number) if number in namespaces else None
        # A forgotten namespace's number may belong to another one by now.
        return found if found is not None and self.name(found) == name else None

    def owner(self, name: bytes, epoch: int) -> str:
        """Return the tenant that could find blocks of an epoch in the namespace that the tier knows
        as ``name``; "" if none can.
        """
        found = self._found(name)
        return found.tenant if found is not None and found.epoch == epoch else ""

    def _found(self, name: bytes) -> Namespace | None:
        """Return the namespace that the tier knows as ``name``, even if it was never asked for."""
        version = self._core.state.namespaces.version
        if name not in self._numbers and self._numbered != version:
            self._number_all()
            self._numbered = version
        return self.namespace(name)

    def identify(self, family: BlockSpec) -> Identity | None:
        """Return the identity of a family's blocks at shared tiers; None if they must not be there:
        they are not current, or their weights have no label.
        """
        found = self.namespace(family.namespace)
        if found is None or found.label is None or found.epoch != family.epoch:
            return None
        return Identity(found.tenant, found.contract_json, found.label)

    def _number_all(self) -> None:
        self._numbers = {self.name(each): each.number for each in self._core.state.namespaces}

    def name(self, namespace: Namespace) -> bytes:
        """Return the tier's name for a namespace, valid until its copies are dropped."""
        known = (namespace.digest, namespace.tier_epoch)
        name = self._names.get(known)
        if name is None:
            if len(self._names) >= _NAMES_MAX:
                self._names.clear()
            drops = str(namespace.tier_epoch or "").encode()
            name = hashlib.sha256(self._lineage + namespace.digest + drops).digest()
            self._names[known] = name
        return name

    def places(self, slots: I64, length: int) -> Records:
        """Return the places of slots (n, shards) in the arena, ``ADDRESS_DTYPE`` (n, shards)."""
        extents = self._core.state.table.extents(slots.reshape(-1), length)
        places = np.zeros(slots.shape, ADDRESS_DTYPE)
        places["region"] = extents["segment"].reshape(slots.shape)
        places["offset"] = extents["offset"].reshape(slots.shape)
        return places

    def publish_removed(
        self, namespace: Namespace, kv_group: int, keys: list[bytes], cause: str
    ) -> None:
        """Publish as removed those keys lost by the tier that are not in memory either."""
        state = self._core.state
        heads = state.index.find(namespace.number, kv_group, keys)
        gone = [key for key, head in zip(keys, heads.tolist(), strict=True) if head < 0]
        if gone:
            state.events.append(EventKind.REMOVED, namespace.number, kv_group, gone, cause=cause)
