"""What the tier calls the core's blocks and slots."""

from __future__ import annotations

import hashlib

import numpy as np

from kvhearth.contract import GroupSpec
from kvhearth.model import I64, Records
from kvhearth_server.core.core import Core
from kvhearth_server.core.events import EventKind
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.state import flat
from kvhearth_server.tiers.base import PLACE_DTYPE, BlockSpec

_NAMES_MAX = 1 << 14


class TierNames:
    """Families for namespaces and back, places for slots.

    Args:
        core: whose namespaces and slots.
        lineage: of the epochs (docs/adr/0008): what another lineage stored is never found.
    """

    def __init__(self, core: Core, lineage: str) -> None:
        self._core = core
        self._lineage = lineage.encode()
        self._numbers: dict[bytes, int] = {}

    def family(self, namespace: Namespace, kv_group: int, epoch: int | None = None) -> BlockSpec:
        """What the tier calls the blocks of a KV group, of the current epoch if none is given."""
        spec: GroupSpec = namespace.contract.groups[kv_group]
        name = self.name(namespace)
        if len(self._numbers) >= _NAMES_MAX + len(self._core.state.namespaces):
            self._numbers = {self.name(each): each.number for each in self._core.state.namespaces}
        self._numbers[name] = namespace.number
        shown = namespace.epoch if epoch is None else epoch
        return BlockSpec(name, kv_group, shown, spec.page_bytes, spec.shards)

    def namespace(self, name: bytes) -> Namespace | None:
        """The namespace that the tier knows as ``name``, if it is still there."""
        namespaces = self._core.state.namespaces
        number = self._numbers.get(name, -1)
        found = namespaces.get(number) if number in namespaces else None
        # A forgotten namespace's number may be another one's by now.
        return found if found is not None and self.name(found) == name else None

    def name(self, namespace: Namespace) -> bytes:
        """What the tier calls a namespace, until its copies are dropped."""
        drops = str(namespace.tier_epoch or "").encode()
        return hashlib.sha256(self._lineage + namespace.digest + drops).digest()

    def places(self, slots: I64, length: int) -> Records:
        """Where slots (n, shards) are in the arena: ``PLACE_DTYPE`` of the same shape."""
        extents = self._core.state.table.extents(flat(slots), length)
        places = np.zeros(slots.shape, PLACE_DTYPE)
        places["region"] = extents["segment"].reshape(slots.shape)
        places["offset"] = extents["offset"].reshape(slots.shape)
        return places

    def tell_lost(self, namespace: Namespace, kv_group: int, keys: list[bytes], cause: str) -> None:
        """Of keys that the tier has no longer, those that are in memory neither are gone."""
        state = self._core.state
        heads = state.index.find(namespace.number, kv_group, keys)
        gone = [key for key, head in zip(keys, heads.tolist(), strict=True) if head < 0]
        if gone:
            state.events.append(EventKind.REMOVED, namespace.number, kv_group, gone, cause=cause)
