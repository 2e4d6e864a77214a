"""Results of decisions: values, with a ``reason`` for a failure, and what follows from a hit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.errors import ClientReason, NoReason, Reason
from kvhearth.model import U8, U32, Bools, Records, Tier


@dataclass
class Grant:
    """The daemon's word on a lease.

    Attributes:
        heard: it has come. The mapped index answers before that.
        short: fewer blocks are leased than the answer names.
    """

    heard: bool = True
    short: bool = False


@dataclass(frozen=True, eq=False)
class Lease:
    """The right to read the leased extents of one lookup, until it is released.

    Attributes:
        id: chosen by the client.
        boot_id: boot of the daemon that granted it.
        slots: slots that it holds, by group.
        grant: the daemon's word on it.
    """

    id: int
    boot_id: str
    slots: Mapping[int, U32] = field(default_factory=dict)
    grant: Grant = field(default_factory=Grant)

    @property
    def sure(self) -> bool:
        """Whether the daemon has told that it leases all that the answer names."""
        return self.grant.heard and not self.grant.short

    def by_group(self, extents: Mapping[int, Records] | Records) -> dict[int, Records]:
        """Return extents by group; plain records are assigned by the slots of the lease."""
        if isinstance(extents, Mapping):
            return dict(extents)
        flat = np.asarray(extents).reshape(-1)
        return {group: flat[np.isin(flat["slot"], slots)] for group, slots in self.slots.items()}


@dataclass(frozen=True, eq=False)
class GroupResult:
    """Presence of the n requested keys of one group.

    Attributes:
        present: (n,) known on any tier.
        ready: (n,) in DRAM and checksummed.
        leased: (n,) held by the lease.
        tiers: (n,) a ``model.Tier`` each; a block that is ``REMOTE`` but not present is being asked
            about.
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


class BlockEvent(NamedTuple):
    """Blocks of one KV group that changed alike at once.

    Attributes:
        kind: ``stored``, ``moved`` or ``removed``.
        group: KV group.
        keys: their keys.
        tier: where they are now, as far as the daemon knows.
        cause: why they changed, such as an eviction's cause, or empty.
    """

    kind: str
    group: int
    keys: list[bytes]
    tier: Tier
    cause: str


class BlockTokens(NamedTuple):
    """What a block holds, as the engine told that stored it.

    Attributes:
        parent: key of the block before it, empty for none.
        tokens: ids of its tokens; empty if its key covers more than tokens.
    """

    parent: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class EventsResult:
    """What changed among a namespace's blocks.

    Attributes:
        events: in their order.
        tokens: by group and key, what the events' blocks hold, if that was asked for and as far as
            it is known; None for a block that is not to be published.
        cursor: where to read next.
        lost: events that will never come. What is known of the blocks is void then; a list of those
            that are there begins with these events.
        listing: the list goes on in the next result; what changed meanwhile follows it.
        reason: cause of a failure, or empty. After ``stale_boot`` begin without a cursor.
    """

    events: list[BlockEvent] = field(default_factory=list)
    cursor: str = ""
    lost: int = 0
    listing: bool = False
    reason: Reason | NoReason = ""
    tokens: Mapping[tuple[int, bytes], BlockTokens | None] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Reservation:
    """The right to write empty slots.

    Attributes:
        boot_id: boot of the daemon that granted it; commit and abort need it.
        groups: by group, (n, shards) ``EXTENT_DTYPE``; n may be less than requested, also 0.
        short_reason: reason why less was granted, or empty.
        reason: cause of a failure without an answer, or empty.
    """

    boot_id: str
    groups: dict[int, Records]
    short_reason: Reason | NoReason = ""
    reason: Reason | NoReason = ""


@dataclass(frozen=True, eq=False)
class CommitGroup:
    """n blocks of one group, all shards written.

    Attributes:
        keys: n keys in chain order.
        extents: (n, shards) ``EXTENT_DTYPE``, as reserved.
        checksums: (n, shards, 16) xxh3_128 sums, or None to let the daemon compute them.
        parent: the key before the first one in the chain, or empty.
        chains: for keys of several chains, each chain's first position in ``keys`` and the key
            before it or empty; ascending, from position 0. ``parent`` is then empty.
        tokens: (n, block tokens) ids of the tokens that the blocks hold, for those who publish
            where blocks are, or None. A whole row of ``TOKENS_UNKNOWN`` stands for more than
            tokens, one of ``TOKENS_UNPUBLISHED`` for a block that is not to be published.
    """

    keys: Sequence[bytes]
    extents: Records
    checksums: U8 | None = None
    parent: bytes = b""
    chains: Sequence[tuple[int, bytes]] = ()
    tokens: U32 | None = None


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
        ids: chosen by the client; several for more blocks than one call takes.
        boot_id: boot of the daemon that granted it.
        pinned: by group, (n,): True for the keys that are pinned.
        reason: reason why none is, or empty.
    """

    ids: tuple[int, ...]
    boot_id: str
    pinned: dict[int, Bools]
    reason: Reason | NoReason = ""


PAUSE_MIN_S = 0.001
PAUSE_MAX_S = 0.25
"""Longest pause for estimates of up to a second, which may be too long. Longer estimates are
checked after a quarter of their time.
"""
_DOUBLINGS = 6


class PromotionWait:
    """A bounded wait, guided by the daemon's estimates. Pure: times are given, monotonic seconds.

    An estimate that was too short is trusted less each time, so that few lookups are made.

    Args:
        until: end of the wait.

    Attributes:
        due_at: time of the next lookup.
        asked_count: number of answers with promotions under way.
    """

    def __init__(self, until: float) -> None:
        self.until = until
        self.due_at = 0.0
        self.asked_count = 0

    def answered(self, eta_us: int, now: float) -> bool:
        """Return whether an answer with this estimate is worth another lookup, at ``due_at``."""
        if eta_us <= 0 or now >= self.until:
            return False
        least_s = PAUSE_MIN_S * 2.0 ** min(self.asked_count, _DOUBLINGS)
        self.asked_count += 1
        eta_s = eta_us / 1e6
        pause_s = min(max(eta_s, least_s), max(PAUSE_MAX_S, eta_s / 4))
        self.due_at = min(now + pause_s, self.until)
        return True


def usable_tokens(groups: Sequence[tuple[GroupSpec, Bools]], hit_tokens: int) -> int:
    """Return the longest run of tokens from the start that can be computed on.

    It is at most ``hit_tokens``. Up to ``L`` tokens a full-attention group needs all blocks before
    ``L``, a sliding window those that cover the last ``window - 1`` tokens before ``L``, a state
    group the one that ends at ``L``.

    Args:
        groups: for each group, (n,): True for the blocks that hold their bytes.
        hit_tokens: from the lookup.
    """
    if not groups or hit_tokens <= 0:
        return 0
    step = math.lcm(*(spec.block_tokens for spec, _ in groups))
    limit = min(hit_tokens, *(len(loaded) * spec.block_tokens for spec, loaded in groups))
    boundaries = np.arange(limit - limit % step, 0, -step)
    for spec, loaded in groups:
        count = np.concatenate(([0], np.cumsum(loaded)))
        ends = boundaries // spec.block_tokens
        back = ends if spec.kind is GroupKind.FULL else blocks_back(spec, 0)
        firsts = np.maximum(ends - back, 0)
        boundaries = boundaries[count[ends] - count[firsts] == ends - firsts]
    return int(boundaries[0]) if len(boundaries) else 0


def blocks_back(spec: GroupSpec, end: int) -> int:
    """Return the number of blocks before a boundary that the token right after it needs."""
    if spec.kind is GroupKind.FULL:
        return end
    if spec.kind is GroupKind.MAMBA:
        return 1
    return -(-(spec.window_tokens - 1) // spec.block_tokens)
