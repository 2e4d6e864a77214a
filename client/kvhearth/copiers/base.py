"""The copier protocol: guarantees of every copier, and of its caller.

A copier moves blocks between the pages of one ``PagedKV`` and the arena of one run of the daemon
(one boot id). It takes no decisions and makes no calls: leases, reservations and commits are the
client's.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvhearth.model import I64, U8, U32, Bools, Records

VERIFY_FRACTION = 1 / 64
"""Default fraction of loaded blocks whose checksum is compared, for copiers that only sample."""


class CopyKind(enum.StrEnum):
    """Direction of a batch: ``STORE`` is pages to arena, ``LOAD`` is arena to pages."""

    STORE = "store"
    LOAD = "load"


class BlockFailure(enum.StrEnum):
    """Cause of a block's failure in a batch; the keys of ``Done.reasons``.

    ``STALE_BOOT``: the extents are from another run of the daemon, or that daemon died before the
    batch was done. ``STALE_GENERATION``: the slot left use before or during the copy.
    ``CHECKSUM_MISMATCH``: the slot's bytes differ from the stored ones; worth reporting with
    ``client.release(lease, bad=...)``. ``BAD_EXTENT``, ``BAD_PAGE``: outside the arena or the
    registered pages, or not of this ``PagedKV``'s length; nothing was touched. ``COPY_FAILED``: the
    machine refused; the log has the details.
    """

    STALE_BOOT = "stale_boot"
    STALE_GENERATION = "stale_generation"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    BAD_EXTENT = "bad_extent"
    BAD_PAGE = "bad_page"
    COPY_FAILED = "copy_failed"


class ArenaView(Protocol):
    """The part of a mapped arena's interface that a copier needs.

    The arrays keep the memory mapped: a copier holds them until it is closed and freed. The caller
    guarantees that segments neither appear, vanish nor change size.
    """

    @property
    def boot_id(self) -> str:
        """Boot id of the daemon that owns this arena."""

    @property
    def segments(self) -> Mapping[int, int]:
        """Bytes of each mapped segment, by segment number."""

    @property
    def generations(self) -> U32:
        """Live generation of each slot, shape (slots,), read only; written by the daemon."""

    def view(self, segment: int) -> U8:
        """Return all bytes of a segment, shape (bytes,), writable, C-contiguous."""

    def address(self, segment: int) -> int:
        """Return the address of a segment's first byte in this process."""

    def alive(self) -> bool:
        """Return whether the daemon of that boot still runs. Does not block.

        Once False, it stays False.
        """


@dataclass(frozen=True)
class Ticket:
    """One submitted batch.

    Attributes:
        number: unique in its copier, from 1; 0 for a batch that ran in the caller's thread.
        kind: direction.
        count: number of blocks in the batch.
    """

    number: int
    kind: CopyKind
    count: int


@dataclass(frozen=True)
class Done:
    """The outcome of one batch. Handed out once, by ``poll`` or by ``wait``.

    Attributes:
        ticket: the batch.
        ok: shape (n,). In a store: the slot holds the page's bytes and may be committed. In a load:
            the page holds the block's bytes. Where False, the contents of the slot or page are
            undefined.
        checksums: for a store, uint8 of shape (n, 16): ``checksum_of`` each ok block, zero for the
            others. None for loads and for copiers that compute no checksums.
        bytes: bytes copied for blocks that are ok.
        seconds: time from the start of the batch's work to its end, without waiting in the queue.
        reasons: number of failed blocks by ``BlockFailure``; their sum is the number of blocks that
            are not ok.
    """

    ticket: Ticket
    ok: Bools
    checksums: U8 | None
    bytes: int
    seconds: float
    reasons: dict[BlockFailure, int]


class Copier(Protocol):
    """Moves batches of blocks, asynchronously, in a bounded queue.

    The caller guarantees:

    * nothing writes the pages of a batch between ``store`` and its ``Done``, and nothing reads or
      writes them between ``load`` and its ``Done``. The ``Done`` of a batch is the only sign that
      its copies ended: an expired deadline is not;
    * extents of a store are reserved for this rank, extents of a load are leased, until ``Done``;
    * no slot and no page appears twice in one batch, or in two batches under way.

    The copier guarantees:

    * pages, extents and lengths are checked before any memory is touched; a bad one fails alone;
    * extents of another boot fail, all of them, with ``stale_boot``; nothing is touched;
    * a block is ok only if its slot's generation equalled the extent's before *and* after the copy,
      and the daemon of that boot was alive after it. A store never begins to write a slot whose
      generation moved;
    * a load whose checksum was compared and differed is not ok. The host copier compares every
      extent that has a checksum; the CUDA copier a sample, and every one with ``FLAG_VERIFY``;
    * a block's failure is an outcome and not an exception. Exceptions are for the caller's
      mistakes: ``bad_extents`` for arrays of wrong shape or dtype, ``closed`` after ``close``;
    * the arrays passed are copied before the call returns; every wait has a deadline.
    """

    def store(
        self, boot_id: str, pages: I64, extents: Records, *, wait_s: float = 0.0
    ) -> Ticket | None:
        """Queue copies of ``pages[i]`` into ``extents[i]``.

        Args:
            boot_id: boot id of the reply that brought the extents.
            pages: engine pages, integers of shape (n,).
            extents: ``EXTENT_DTYPE``, shape (n,).
            wait_s: how long to wait for room in the queue.

        Returns:
            The ticket, or None if the queue stayed full (throttled: nothing was queued, skip the
            store).

        Raises:
            KVHearthError: ``bad_extents``, ``closed``.
        """

    def load(
        self, boot_id: str, extents: Records, pages: I64, *, wait_s: float = 0.0
    ) -> Ticket | None:
        """Queue copies of ``extents[i]`` into ``pages[i]``; otherwise like ``store``."""

    def poll(self) -> list[Done]:
        """Return finished batches that were not handed out yet, oldest first; does not block."""

    def wait(self, ticket: Ticket, deadline_s: float) -> Done | None:
        """Return the outcome of a batch, waiting up to ``deadline_s`` seconds from now.

        Returns:
            None if the batch is still under way then: its pages stay untouchable, ask again.

        Raises:
            KVHearthError: ``internal`` if the ticket's outcome was handed out before.
        """

    def drain(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` seconds until nothing is under way; True if so."""

    def close(self, deadline_s: float = 30.0) -> bool:
        """Take no more batches, drain, and free threads and streams. Outcomes can still be polled.

        Returns:
            False if copies are still under way: pages and slots are then still in use. May be
            called again.
        """
