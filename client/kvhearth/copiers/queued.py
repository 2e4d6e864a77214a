"""The outer half of copiers that work on a thread of their own: tickets, marks, and the end."""

from __future__ import annotations

import time
from logging import ERROR
from typing import NamedTuple

from kvhearth.copiers.base import CopyKind, Done, Ticket, TicketBook, copy_failed, deadline_of
from kvhearth.copiers.batch import as_arrays
from kvhearth.counters import log_event
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, Records
from kvhearth.worker_thread import SupervisedThread

_JOIN_S = 0.5


class Job(NamedTuple):
    """One queued batch; its copies begin after the work before ``mark``."""

    ticket: Ticket
    boot_id: str
    pages: I64
    extents: Records
    mark: object


class QueuedCopier:
    """The half of a ``base.Copier`` that its callers see; a subclass has the thread that copies. In
    a forked child it takes no batches.

    A subclass sets ``_worker`` and starts it.

    Args:
        queue_max: most batches under way.
    """

    _worker: SupervisedThread

    def __init__(self, queue_max: int) -> None:
        self._book = TicketBook(queue_max)

    def store(
        self,
        boot_id: str,
        pages: I64,
        extents: Records,
        *,
        wait_s: float = 0.0,
        after: object = None,
    ) -> Ticket | None:
        """Queue a store; see ``base.Copier.store``."""
        return self._submit(CopyKind.STORE, boot_id, pages, extents, wait_s, after)

    def load(
        self,
        boot_id: str,
        extents: Records,
        pages: I64,
        *,
        wait_s: float = 0.0,
        after: object = None,
    ) -> Ticket | None:
        """Queue a load; see ``base.Copier.load``."""
        return self._submit(CopyKind.LOAD, boot_id, pages, extents, wait_s, after)

    def mark(self) -> object:
        """Return a mark of the work on the calling thread's current stream, for ``after``.

        Raises:
            RuntimeError: the CUDA context is broken.
        """
        raise NotImplementedError

    def poll(self) -> list[Done]:
        """Return finished batches; see ``base.Copier.poll``."""
        if self._worker.foreign:
            return []
        # Batches of a copier with several connections may overtake each other.
        return sorted(self._book.claim_all(), key=lambda done: done.ticket.number)

    def wait(self, ticket: Ticket, deadline_s: float) -> Done | None:
        """Return one batch's outcome; see ``base.Copier.wait``."""
        return None if self._worker.foreign else self._book.claim(ticket, deadline_s)

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing is under way; see ``base.Copier.drain``."""
        return self._worker.foreign or self._book.wait_idle(deadline_s)

    def close(self, deadline_s: float = 30.0) -> bool:
        """Take no more batches and wait for the copies to end; see ``base.Copier.close``."""
        if self._worker.foreign:
            return True
        until = deadline_of(deadline_s)
        self._book.close()
        if not self._book.wait_idle(deadline_s):
            return False
        return self._worker.stop(max(until - time.monotonic(), _JOIN_S))

    def check_books(self) -> None:
        """Raise AssertionError if a batch was lost."""
        self._book.check_books()

    def _take(self, job: Job) -> None:
        """Give a batch to the thread."""
        raise NotImplementedError

    def _submit(
        self,
        kind: CopyKind,
        boot_id: str,
        pages: I64,
        extents: Records,
        wait_s: float,
        after: object,
    ) -> Ticket | None:
        if self._worker.foreign:
            raise KVHearthError(Reason.CLOSED, "a forked child has no copier: make one there")
        pages, extents = as_arrays(pages, extents)
        ticket = self._book.open(kind, len(extents), wait_s)
        if ticket is None:
            return None
        try:
            mark = self.mark() if after is None else after
        except RuntimeError:
            log_event(ERROR, "cuda.broken", "the CUDA context is broken", trace=True)
            self._book.finish(copy_failed(ticket))
            return ticket
        self._take(Job(ticket, boot_id, pages, extents, mark))
        return ticket
