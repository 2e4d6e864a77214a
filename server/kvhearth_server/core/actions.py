"""Actions of the core that its shell performs before a reply leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvhearth.model import I64, U32
from kvhearth_server.core.slot_table import State


@dataclass(frozen=True)
class Mark:
    """Write a new state (and the owner's group number) of slots to the journal."""

    slots: I64
    state: State
    owner: int = 0


@dataclass(frozen=True)
class Bind:
    """Write the headers of newly committed blocks.

    ``slots`` has shape (n, shards), ``sequences`` (n,): every shard of a block carries the same
    sequence. ``parents`` (n,) are the heads that the blocks continue, -1 for none. ``length`` is
    the bytes of one shard.
    """

    slots: I64
    sequences: I64
    parents: I64
    length: int
    keys: list[bytes]
    namespace: int
    group: int
    epoch: int
    state: State


class BindOne(NamedTuple):
    """``Bind`` for one block of one slot, handed out at ``generation``, in plain numbers."""

    slot: int
    generation: int
    sequence: int
    parent: int
    length: int
    key: bytes
    namespace: int
    group: int
    epoch: int
    state: State

    def whole(self) -> Bind:
        """Convert to the general action."""
        return Bind(
            np.array([[self.slot]], np.int64),
            np.array([self.sequence], np.int64),
            np.array([self.parent], np.int64),
            self.length,
            [self.key],
            self.namespace,
            self.group,
            self.epoch,
            self.state,
        )


@dataclass(frozen=True)
class Summed:
    """Write the checksums of slots (flat) and then their state."""

    slots: I64


class Sum(NamedTuple):
    """Compute checksums of slots off the loop and report them to ``Writing.summed``.

    Arrays have shape (n, shards).
    """

    slots: I64
    generations: U32


@dataclass(frozen=True)
class SlabSized:
    """Write the new slot size of a slab (0: none)."""

    slab: int
    slot_bytes: int


Action = Mark | Bind | BindOne | Summed | Sum | SlabSized
