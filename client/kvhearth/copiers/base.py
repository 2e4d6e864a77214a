"""The copier protocol: guarantees of every copier and its caller, and the book of its batches.

A copier moves blocks between the pages of one ``PagedKV`` and the arena of one run of the daemon
(one boot id). It takes no decisions and makes no calls: leases, reservations and commits are the
client's.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, U8, U32, Bools, Records
from kvhearth.prefault import Unpopulated

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
    machine refused, or has no memory for the slot; the log has the details.
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

    @property
    def unpopulated(self) -> Unpopulated:
        """Ranges of the segments that may have no pages: a store has them populated first."""

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
        self,
        boot_id: str,
        pages: I64,
        extents: Records,
        *,
        wait_s: float = 0.0,
        after: object = None,
    ) -> Ticket | None:
        """Queue copies of ``pages[i]`` into ``extents[i]``.

        Args:
            boot_id: boot id of the reply that brought the extents.
            pages: engine pages, integers of shape (n,).
            extents: ``EXTENT_DTYPE``, shape (n,).
            wait_s: how long to wait for room in the queue.
            after: mark of a ``CopyOrder``: on a GPU the copies begin after the work before it. None
                for the work on the calling thread's current stream so far.

        Returns:
            The ticket, or None if the queue stayed full (throttled: nothing was queued, skip the
            store).

        Raises:
            KVHearthError: ``bad_extents``, ``closed``.
        """

    def load(
        self,
        boot_id: str,
        extents: Records,
        pages: I64,
        *,
        wait_s: float = 0.0,
        after: object = None,
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

    def check_books(self) -> None:
        """Raise AssertionError if a batch was lost."""


class TicketBook:
    """Batches under way, and outcomes that were not handed out yet. Thread-safe.

    Args:
        pending_max: most batches under way.
        finished_max: most outcomes that were not fetched; beyond it no batch is taken, so a caller
            that never polls is throttled instead of growing memory.
    """

    def __init__(self, pending_max: int, finished_max: int = 1024) -> None:
        self._pending_max = pending_max
        self._finished_max = finished_max
        # Taking the lock directly costs half as much as taking it through the condition.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pending: set[int] = set()
        self._finished: dict[int, Done] = {}
        self._opened_count = 0
        self._claimed_count = 0
        self._unticketed_count = 0
        self._idle_waiters = 0
        self._closed = False

    def open(self, kind: CopyKind, count: int, wait_s: float) -> Ticket | None:
        """Return a ticket for a new batch, or None if there was no room within ``wait_s`` seconds.

        Raises:
            KVHearthError: ``closed``.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(), max(wait_s, 0.0))
            self._require_open()
            if not self._has_room():
                return None
            self._opened_count += 1
            self._pending.add(self._opened_count)
            return Ticket(self._opened_count, kind, count)

    def finish(self, done: Done) -> None:
        """Record the outcome of a batch that was under way."""
        with self._changed:
            self._pending.remove(done.ticket.number)
            self._finished[done.ticket.number] = done
            self._changed.notify_all()

    def claim_all(self) -> list[Done]:
        """Hand out all outcomes, in the order in which they came."""
        with self._changed:
            outcomes = list(self._finished.values())
            self._finished.clear()
            self._claimed_count += len(outcomes)
            self._changed.notify_all()
            return outcomes

    def claim(self, ticket: Ticket, deadline_s: float) -> Done | None:
        """Hand out one outcome, or None if it did not come within ``deadline_s`` seconds.

        Raises:
            KVHearthError: ``internal`` if it was handed out before.
        """
        with self._changed:
            self._changed.wait_for(lambda: ticket.number not in self._pending, max(deadline_s, 0.0))
            if ticket.number in self._pending:
                return None
            done = self._finished.pop(ticket.number, None)
            if done is None:
                raise KVHearthError(
                    Reason.INTERNAL,
                    f"the outcome of batch {ticket.number} was given out before: "
                    "fetch each by poll() or by wait(), not by both",
                )
            self._claimed_count += 1
            self._changed.notify_all()
            return done

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` seconds until nothing is under way; True if so."""
        with self._changed:
            self._idle_waiters += 1
            try:
                return self._changed.wait_for(
                    lambda: not self._pending and not self._unticketed_count, max(deadline_s, 0.0)
                )
            finally:
                self._idle_waiters -= 1

    def close(self) -> None:
        """Open no more tickets."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def begin_unticketed(self) -> None:
        """Begin a batch that runs in its caller's thread, without a ticket.

        ``wait_idle`` waits for it until ``end_unticketed``.

        Raises:
            KVHearthError: ``closed``.
        """
        with self._lock:
            if self._closed:
                self._require_open()
            self._unticketed_count += 1

    def end_unticketed(self) -> None:
        """End a batch begun with ``begin_unticketed``, whether it succeeded or not."""
        with self._lock:
            self._unticketed_count -= 1
            if self._idle_waiters:  # no other waiter depends on this
                self._changed.notify_all()

    def check_books(self) -> None:
        """Raise AssertionError with the numbers if tickets were lost or bounds exceeded."""
        with self._changed:
            parts = (len(self._pending), len(self._finished), self._claimed_count)
            assert sum(parts) == self._opened_count, f"opened {self._opened_count}, have {parts}"
            assert parts[0] <= self._pending_max, f"{parts[0]} pending of {self._pending_max}"

    def _require_open(self) -> None:
        if self._closed:
            raise KVHearthError(Reason.CLOSED, "the copier is closed: make one for the new mapping")

    def _has_room(self) -> bool:
        return len(self._pending) < self._pending_max and len(self._finished) < self._finished_max


def deadline_of(deadline_s: float) -> float:
    """Return the monotonic time ``deadline_s`` seconds from now."""
    return time.monotonic() + max(deadline_s, 0.0)


def copy_failed(ticket: Ticket) -> Done:
    """Return the outcome of a batch whose copies all failed."""
    reasons = {BlockFailure.COPY_FAILED: ticket.count} if ticket.count else {}
    return Done(ticket, np.zeros(ticket.count, np.bool_), None, 0, 0.0, reasons)
