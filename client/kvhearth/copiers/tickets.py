"""The book of a copier's batches: bounded, and balanced at all times."""

from __future__ import annotations

import threading
import time

import numpy as np

from kvhearth.copiers.base import BlockFailure, CopyKind, Done, Ticket
from kvhearth.errors import KVHearthError, Reason


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
