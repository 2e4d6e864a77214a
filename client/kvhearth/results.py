"""Results of decisions. Outcomes are values: a failed call is a miss with a ``reason``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvhearth.errors import ClientReason, NoReason, Reason
from kvhearth.model import U8, U32, Bools, Records


@dataclass(frozen=True, eq=False)
class Lease:
    """The right to read the leased extents of one lookup, until it is released.

    Attributes:
        id: chosen by the client.
        boot_id: boot of the daemon that granted it.
        slots: slots that it holds, by group.
    """

    id: int
    boot_id: str
    slots: Mapping[int, U32] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class GroupResult:
    """Presence of the n requested keys of one group.

    Attributes:
        present: (n,) known on any tier.
        ready: (n,) in DRAM and checksummed.
        leased: (n,) held by the lease.
        tiers: (n,) a ``model.Tier`` each.
        extents: (leased.sum() * shards,) ``EXTENT_DTYPE``, in key order, shards of a block in rank
            order.
    """

    present: Bools
    ready: Bools
    leased: Bools
    tiers: U8
    extents: Records


@dataclass(frozen=True, eq=False)
class LookupResult:
    """Blocks found for one request.

    Attributes:
        hit_tokens: the longest run of tokens from the start that every group can restore from DRAM.
        lease: to be released when loads have finished, or None if nothing was leased.
        groups: by group, one entry for every requested group.
        eta_us: microseconds until blocks on slower tiers could be in DRAM.
        reason: cause of a miss without an answer, or empty.
        lease_short: reason why less was leased than was ready, or empty.
        boot_id: boot of the daemon that answered, or empty.
        id: id of the lookup, also where nothing was leased; 0 if no lease was requested, or without
            an answer.
    """

    hit_tokens: int
    lease: Lease | None
    groups: dict[int, GroupResult]
    eta_us: int = 0
    reason: Reason | ClientReason | NoReason = ""
    lease_short: Reason | NoReason = ""
    boot_id: str = ""
    id: int = 0


@dataclass(frozen=True, eq=False)
class PrefetchResult:
    """Location of blocks after a promotion request; fields as in ``LookupResult``."""

    groups: dict[int, GroupResult]
    eta_us: int = 0
    reason: Reason | NoReason = ""
    boot_id: str = ""


@dataclass(frozen=True, eq=False)
class Reservation:
    """The right to write empty slots.

    Attributes:
        boot_id: boot of the daemon that granted it; commit and abort need it.
        groups: by group, (n, shards) ``EXTENT_DTYPE``; n may be less than requested, also 0.
        short_reason: reason why less was granted, or empty.
        reason: cause of a failure without an answer, or empty.
        id: chosen by the client.
    """

    boot_id: str
    groups: dict[int, Records]
    short_reason: Reason | NoReason = ""
    reason: Reason | NoReason = ""
    id: int = 0


@dataclass(frozen=True, eq=False)
class CommitGroup:
    """n blocks of one group, all shards written.

    Attributes:
        keys: n keys in chain order.
        extents: (n, shards) ``EXTENT_DTYPE``, as reserved.
        checksums: (n, shards, 16) xxh3_128 sums, or None to let the daemon compute them.
        parent: the key before the first one in the chain, or empty.
    """

    keys: Sequence[bytes]
    extents: Records
    checksums: U8 | None = None
    parent: bytes = b""


@dataclass(frozen=True, eq=False)
class CommitResult:
    """Keys that were bound. In every case the extents are no longer the caller's.

    Attributes:
        stored: by group, (n,): True where this commit bound the key. False where the key was bound
            already, and everywhere if there is a reason (it is then unknown whether the daemon
            bound them).
        reason: cause of the missing answer, or empty.
    """

    stored: dict[int, Bools]
    reason: Reason | NoReason = ""


@dataclass(frozen=True, eq=False)
class Pin:
    """Blocks that are protected from eviction for a while.

    Attributes:
        id: chosen by the client.
        boot_id: boot of the daemon that granted it.
        pinned: by group, (n,): True for the keys that are pinned.
        reason: reason why none is, or empty.
    """

    id: int
    boot_id: str
    pinned: dict[int, Bools]
    reason: Reason | NoReason = ""
