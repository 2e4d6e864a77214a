"""One store: its request, its copies under way, its outcome."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvhearth.copiers.base import Copier, Done, Ticket
from kvhearth.model import I64, Records
from kvhearth.results import CommitGroup
from kvhearth.transfer.slot_pool import Slots


@dataclass(frozen=True)
class StoreTicket:
    """One submitted store.

    Attributes:
        number: unique in its pipeline, from 1.
        kv_group: group of its blocks.
        blocks: number of blocks.
    """

    number: int
    kv_group: int
    blocks: int


@dataclass(frozen=True)
class StoreDone:
    """Outcome of a store; its pages are the engine's again. Handed out once.

    Attributes:
        ticket: the store.
        stored: number of blocks that were bound to their keys.
        duplicate: number of blocks whose keys were bound already.
        failed: number of the others; the three add up to the ticket's blocks.
        reason: why the first of these failed (a reason of the error table or a ``BlockFailure``),
            or empty.
    """

    ticket: StoreTicket
    stored: int
    duplicate: int
    failed: int
    reason: str = ""


@dataclass(eq=False)
class StoreJob:
    """Internal state of one store. Modified only by the pipeline's thread."""

    ticket: StoreTicket
    keys: tuple[bytes, ...]
    pages: I64
    parent: bytes
    epoch: int
    mark: object
    submitted_at: float
    begun: int = 0
    stored: int = 0
    duplicate: int = 0
    failed: int = 0
    reason: str = ""

    @property
    def left(self) -> int:
        """Number of blocks whose copies did not begin."""
        return len(self.keys) - self.begun

    @property
    def settled(self) -> bool:
        """Whether every block has its outcome."""
        return self.stored + self.duplicate + self.failed == len(self.keys)

    def done(self) -> StoreDone:
        """Return the outcome."""
        return StoreDone(self.ticket, self.stored, self.duplicate, self.failed, self.reason)


@dataclass(eq=False)
class StoreFlight:
    """A batch whose copies are under way: the blocks of a job from ``start`` on."""

    job: StoreJob
    start: int
    slots: Slots
    copier: Copier
    ticket: Ticket
    accounted: bool = False

    @property
    def kv_group(self) -> int:
        """Group of its blocks."""
        return self.job.ticket.kv_group

    @property
    def extents(self) -> Records:
        """Destinations of the copies, (n, 1)."""
        return self.slots.extents

    def fits(self, other: StoreFlight) -> bool:
        """Return whether both may be committed by one call."""
        return (self.slots.session_id, self.job.epoch) == (other.slots.session_id, other.job.epoch)

    def commit_group(self, done: Done) -> CommitGroup:
        """Return the successfully copied blocks, as one chain.

        Where a block is missing in between, its successor follows its predecessor: eviction still
        takes the chain from its end.
        """
        good = np.flatnonzero(done.ok)
        keys = [self.job.keys[self.start + index] for index in good.tolist()]
        first = self.start + int(good[0])
        parent = self.job.keys[first - 1] if first else self.job.parent
        sums = None if done.checksums is None else done.checksums[good][:, None]
        return CommitGroup(keys, self.extents[good], sums, parent)
