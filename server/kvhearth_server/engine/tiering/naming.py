"""Translates the core's namespaces and slots into the tier's names and places."""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from kvhearth.model import I64, Records
from kvhearth_server.core.core import Core
from kvhearth_server.core.lower_tier import BlockBatch
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.tiers.base import ADDRESS_DTYPE, BlockSpec, Identity, StoreBatch


@functools.lru_cache(1 << 14)
def _name(lineage: bytes, digest: bytes, tier_epoch: int) -> bytes:
    drops = str(tier_epoch or "").encode()
    return hashlib.sha256(lineage + digest + drops).digest()


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
        self._by_name: dict[bytes, Namespace] = {}
        self._version = -1
        """Version of the namespaces that ``_by_name`` has."""

    def family(self, namespace: Namespace, kv_group: int, epoch: int | None = None) -> BlockSpec:
        """Return the tier's name for the blocks of a KV group, by default of the current epoch."""
        spec = namespace.contract.groups[kv_group]
        shown = namespace.epoch if epoch is None else epoch
        return BlockSpec(self.name(namespace), kv_group, shown, spec.page_bytes, spec.shards)

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
        if self._version != namespaces.version:
            self._version = namespaces.version
            self._by_name = {self.name(each): each for each in namespaces}
        return self._by_name.get(name)

    def owner(self, name: bytes, epoch: int) -> str:
        """Return the tenant that could find blocks of an epoch in the namespace that the tier knows
        as ``name``; "" if none can.
        """
        found = self.namespace(name)
        return found.tenant if found is not None and found.epoch == epoch else ""

    def identify(self, family: BlockSpec) -> Identity | None:
        """Return the identity of a family's blocks at shared tiers; None if they must not be there:
        they are not current, or their weights have no label.
        """
        found = self.namespace(family.namespace)
        if found is None or found.label is None or found.epoch != family.epoch:
            return None
        return Identity(found.tenant, found.contract_json, found.label)

    def name(self, namespace: Namespace) -> bytes:
        """Return the tier's name for a namespace, valid until its copies are dropped."""
        return _name(self._lineage, namespace.digest, namespace.tier_epoch)

    def places(self, slots: I64, length: int) -> Records:
        """Return the places of slots (n, shards) in the arena, ``ADDRESS_DTYPE`` (n, shards)."""
        extents = self._core.state.table.extents(slots.reshape(-1), length)
        places = np.zeros(slots.shape, ADDRESS_DTYPE)
        places["region"] = extents["segment"].reshape(slots.shape)
        places["offset"] = extents["offset"].reshape(slots.shape)
        return places
