"""What the core asks its shell to do, in order, before a reply leaves."""

from __future__ import annotations

from dataclasses import dataclass

from kvhearth.model import I64, U32
from kvhearth_server.core.table import State


@dataclass(frozen=True)
class Mark:
    """Write a new state (and the owner's group number) of slots to the journal."""

    slots: I64
    state: State
    owner: int = 0


@dataclass(frozen=True)
class Bind:
    """Write the headers of blocks that were just committed.

    ``slots`` has shape (n, shards), ``sequences`` (n,): every shard of a block bears the same
    sequence. ``parents`` (n,) are the heads that the blocks continue, -1 for none. ``length`` is a
    shard's bytes.
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


@dataclass(frozen=True)
class Summed:
    """Write the checksums of slots (flat) and then their state."""

    slots: I64


@dataclass(frozen=True)
class Sum:
    """Compute checksums of slots off the loop and report them to ``Writing.summed``; shape (n,
    shards).
    """

    slots: I64
    generations: U32


@dataclass(frozen=True)
class SlabSized:
    """Write the slot size that a slab has from now on (0: none)."""

    slab: int
    slot_bytes: int


@dataclass(frozen=True)
class Catalogue:
    """Make namespaces and groups durable."""


Action = Mark | Bind | Summed | Sum | SlabSized | Catalogue
