"""Stores: from an engine's pages to committed blocks, without the engine waiting for anything."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from kvhearth.client import KVClient
from kvhearth.copiers.base import BlockFailure, Done
from kvhearth.errors import KVHearthError, Reason
from kvhearth.fail_open import understood
from kvhearth.model import I64
from kvhearth.page_layout import PagedKV
from kvhearth.transfer.admission import Admission
from kvhearth.transfer.copier_pool import CopierFactory, CopierPool, check_single_rank, host_or_cuda
from kvhearth.transfer.pages import page_numbers
from kvhearth.transfer.slot_pool import Slots, Stock
from kvhearth.transfer.storing import StoreDone, StoreFlight, StoreJob, StoreTicket
from kvhearth.worker_thread import Worker

FLIGHTS_MAX = 16
"""Most batches whose copies are under way; together they hold at most two full batches' blocks."""

_SLICE_S = 0.1
_TICK_S = 0.25
_PAUSE_S = 0.005


class StorePipeline:
    """Reserves slots for blocks, copies and commits them in order, on its own thread.

    A page must stay unchanged from ``submit`` until the ``StoreDone`` of its ticket. No method
    raises, and none waits longer than documented. A daemon that is full or away costs the engine
    nothing but blocks that are not kept: a store waits up to ``reserve_wait_s`` for slots, during
    which a full queue makes ``submit`` return None. Blocks of weights that were bumped meanwhile
    are not kept, nor are blocks submitted before the first attach, when the epoch is not known.
    Thread-safe. In a forked child it takes no stores.

    Args:
        client: a scheduler and rank 0 in one process, with the arena mapped.
        kv: by KV cache group, the registered pages.
        queue_blocks_max: most blocks that are submitted and not done.
        stock_blocks_max: blocks of each group held reserved in advance, at most two steps' worth.
        batch_blocks: most blocks in one copy and one commit.
        reserve_wait_s: how long a store waits without any slot coming: counted from its submission,
            or from the last slots that any store got. If the daemon has been silent for this long,
            stores fail at once.
        copiers: makes copiers; None for the one that fits the tensors. ``host_or_cuda(sums=False)``
            leaves checksums to the daemon.

    Raises:
        KVHearthError: ``bad_contract`` if ``kv`` does not fit the client's contract, or the engine
            has several ranks; ``config_invalid`` for a bound below 1.
    """

    def __init__(
        self,
        client: KVClient,
        kv: Mapping[int, PagedKV],
        *,
        queue_blocks_max: int,
        stock_blocks_max: int,
        batch_blocks: int = 128,
        reserve_wait_s: float = 2.0,
        copiers: CopierFactory | None = None,
    ) -> None:
        if min(queue_blocks_max, stock_blocks_max, batch_blocks) < 1:
            raise KVHearthError(Reason.CONFIG_INVALID, "a pipeline's bounds must be 1 or more")
        check_single_rank(client)
        self._client = client
        self._batch_blocks = min(batch_blocks, stock_blocks_max)
        self._queue_blocks_max = queue_blocks_max
        self._reserve_wait_s = reserve_wait_s
        self._copier_pool = CopierPool(client, kv, copiers or host_or_cuda())
        self._stock = Stock(client, dict.fromkeys(kv, stock_blocks_max))
        self._door: Admission[StoreDone] = Admission(queue_blocks_max)
        self._queue: deque[StoreJob] = deque()
        self._flights: deque[StoreFlight] = deque()
        self._closing = False
        self._progress_at = -math.inf
        # Work that the thread has at hand, for `_recover`.
        self._beginning: tuple[StoreJob, Slots | None] | None = None
        self._ending: list[StoreFlight] = []
        self._worker = Worker("kvhearth-store", self._step, self._recover)
        self._changed = self._worker.changed
        self._worker.start()

    def submit(
        self,
        kv_group: int,
        keys: Sequence[bytes],
        pages: I64 | Sequence[int],
        parent: bytes = b"",
        *,
        wait_s: float = 0.0,
    ) -> StoreTicket | None:
        """Queue ``pages[i]`` to be stored under ``keys[i]``.

        Args:
            kv_group: KV cache group of all of them.
            keys: n keys in chain order, distinct.
            pages: n engine pages, distinct.
            parent: the key before the first one in its chain, or empty.
            wait_s: how long to wait for room in the queue.

        Returns:
            The ticket, or None while the queue is full. Malformed arguments, and more blocks than
            the queue ever takes, are accepted and fail.
        """
        if self._worker.foreign:
            return None
        own, numbers, problem = understood(tuple, keys), page_numbers(pages), ""
        keys = own or ()
        mark: object = None
        if self._door.closed:
            problem = str(Reason.CLOSED)
        elif own is None or not isinstance(parent, bytes):
            problem = str(Reason.BAD_KEYS)
        elif numbers is None or len(numbers) != len(keys):
            problem = str(Reason.BAD_EXTENTS)
        elif len(keys) > self._queue_blocks_max:
            problem = str(Reason.TOO_MANY_KEYS)
        else:
            problem = self._copier_pool.key_problem(kv_group, (*keys, parent) if parent else keys)
        if not problem:
            try:
                mark = self._copier_pool.order.mark()
            except RuntimeError:
                problem = str(BlockFailure.COPY_FAILED)
        number = self._door.enter(0 if problem else len(keys), wait_s)
        if not number:
            self._client.count("store_throttled", len(keys))
            return None
        ticket = StoreTicket(number, kv_group, len(keys))
        if problem or not keys or numbers is None:
            self._client.count("store_refused", len(keys))
            self._door.leave(number, StoreDone(ticket, 0, 0, len(keys), problem))
            return ticket
        epoch = self._client.epoch
        job = StoreJob(ticket, keys, numbers, parent, epoch, mark, time.monotonic())
        with self._changed:
            self._queue.append(job)
            self._changed.notify_all()
        return ticket

    def poll(self) -> list[StoreDone]:
        """Return stores that are done and were not handed out yet, oldest first; does not block."""
        return [] if self._worker.foreign else self._door.claim_all()

    def wait(self, ticket: StoreTicket, deadline_s: float) -> StoreDone | None:
        """Return the outcome of one store, waiting up to ``deadline_s`` seconds.

        None if it did not come, or was handed out before.
        """
        return None if self._worker.foreign else self._door.claim(ticket.number, deadline_s)

    def drain(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` seconds until all submitted stores are done; True if so."""
        return self._worker.foreign or self._door.wait_empty(deadline_s)

    def close(self, deadline_s: float = 5.0) -> bool:
        """Take no more stores, fail those not begun, finish the rest, give the stock back.

        Call it before ``client.close``; drain first to keep queued blocks. Idempotent.

        Returns:
            False if copies were still under way then: their pages are in use. Call it again.
        """
        if self._worker.foreign:
            return True
        until = time.monotonic() + deadline_s
        self._door.close()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if not self._door.wait_empty(deadline_s):
            return False
        ended = self._worker.stop(max(until - time.monotonic(), _SLICE_S))
        ended &= self._stock.close(max(until - time.monotonic(), _SLICE_S))
        return self._copier_pool.close(max(until - time.monotonic(), _SLICE_S)) and ended

    def check_books(self) -> None:
        """Raise AssertionError if a store was lost."""
        self._door.check_books()

    # -- the thread --------------------------------------------------------------------------------

    def _step(self) -> None:
        with self._changed:
            job = self._queue[0] if self._queue else None
            if job is None and not self._flights:
                self._changed.wait_for(lambda: self._queue or self._worker.stopping, _TICK_S)
                return
        if job is not None and self._has_room() and self._begin(job):
            return
        if self._flights:
            self._end_oldest()

    def _has_room(self) -> bool:
        blocks = sum(len(flight.slots) for flight in self._flights)
        return len(self._flights) < FLIGHTS_MAX and blocks <= self._batch_blocks

    def _begin(self, job: StoreJob) -> bool:
        """Begin the job's next copies, or drop it; False if nothing could be done yet."""
        self._beginning = (job, None)
        begun = self._try_begin(job)
        self._beginning = None
        return begun

    def _try_begin(self, job: StoreJob) -> bool:
        if self._closing:
            self._drop(job, Reason.CLOSED)
            return True
        if job.epoch != self._client.epoch:
            self._drop(job, Reason.STALE_EPOCH)
            return True
        kv_group = job.ticket.kv_group
        left_s = self._patience_end(job) - time.monotonic()
        # With copies under way, finishing them is the better use of the time.
        wait_s = 0.0 if self._flights else max(min(left_s, _SLICE_S), 0.0)
        slots = self._stock.take(kv_group, min(self._batch_blocks, job.left), wait_s=wait_s)
        if len(slots):
            self._beginning = (job, slots)
            if self._copy(job, slots):
                return True
            self._stock.give_back(kv_group, slots)
            time.sleep(_PAUSE_S)
        # Computed again: a session that has just begun starts with full patience.
        if self._flights or time.monotonic() < self._patience_end(job):
            return False
        self._drop(job, self._stock.short_reason(kv_group) or Reason.DEADLINE)
        return True

    def _patience_end(self, job: StoreJob) -> float:
        """Return the time at which the job is dropped if no slots come."""
        now = time.monotonic()
        silent_since = now - self._stock.silent_s
        return self._reserve_wait_s + min(max(job.submitted_at, self._progress_at), silent_since)

    def _copy(self, job: StoreJob, slots: Slots) -> bool:
        """Begin to copy the job's next blocks into ``slots``; False if no arena is mapped."""
        copier = self._copier_pool.copier(job.ticket.kv_group, slots.boot_id)
        if copier is None:
            return False
        pages = job.pages[job.begun : job.begun + len(slots)]
        try:
            with self._copier_pool.order.after(job.mark):
                ticket = copier.store(slots.boot_id, pages, slots.extents[:, 0], wait_s=_SLICE_S)
        except KVHearthError:
            return False  # closed meanwhile, with the session
        if ticket is None:
            return False
        self._flights.append(StoreFlight(job, job.begun, slots, copier, ticket))
        self._progress_at = time.monotonic()
        self._advance(job, len(slots))
        return True

    def _advance(self, job: StoreJob, count: int) -> None:
        """Count ``count`` more blocks of the head of the queue as begun or given up."""
        job.begun += count
        if not job.left:
            with self._changed:
                self._queue.popleft()

    def _end_oldest(self) -> None:
        """Commit the oldest batch if its copies have ended, with others that have ended too."""
        ending: list[tuple[StoreFlight, Done]] = []
        groups: set[int] = set()
        while self._flights:
            flight = self._flights[0]
            if flight.kv_group in groups or (self._ending and not flight.fits(self._ending[0])):
                break  # a commit has one chain of each group
            self._ending.append(flight)
            done = flight.copier.wait(flight.ticket, 0.0 if ending else _SLICE_S)
            if done is None:
                self._ending.pop()
                break
            self._flights.popleft()
            ending.append((flight, done))
            groups.add(flight.kv_group)
        if ending:
            self._commit(ending)
        self._ending.clear()

    def _commit(self, ending: list[tuple[StoreFlight, Done]]) -> None:
        first = ending[0][0]
        boot_id, session_id = first.slots.boot_id, first.slots.session_id
        commits = {}
        for flight, done in ending:
            if not done.ok.all():
                bad = Slots(boot_id, session_id, flight.extents[~done.ok])
                self._stock.give_back(flight.kv_group, bad)
            if done.ok.any():
                commits[flight.kv_group] = flight.commit_group(done)
        result = None
        if commits:
            # The epoch of the submission: newer weights did not compute these blocks.
            result = self._client.commit(commits, boot_id=boot_id, epoch=first.job.epoch)
        self._stock.nudge()
        for flight, done in ending:
            good = int(np.count_nonzero(done.ok))
            stored, failed, reason = 0, len(done.ok) - good, next(iter(done.reasons), "")
            if good and result is not None and result.reason:
                failed, reason = len(done.ok), reason or result.reason
            elif good and result is not None:
                stored = int(np.count_nonzero(result.stored[flight.kv_group]))
                self._client.count("store_bytes", done.bytes)
                self._client.count("store_copy_us", round(done.seconds * 1e6))
            self._account(flight, stored, failed, reason)

    def _account(self, flight: StoreFlight, stored: int, failed: int, reason: str) -> None:
        flight.accounted = True
        duplicate = len(flight.slots) - stored - failed
        self._client.count("store_blocks", stored)
        self._client.count("store_duplicates", duplicate)
        self._client.count("store_failed", failed)
        job = flight.job
        job.stored += stored
        job.duplicate += duplicate
        self._fail(job, failed, reason)

    def _drop(self, job: StoreJob, reason: str) -> None:
        """Give up the remaining blocks of the head of the queue."""
        count = job.left
        self._client.count("store_dropped", count)
        self._advance(job, count)
        self._fail(job, count, reason)

    def _fail(self, job: StoreJob, count: int, reason: str) -> None:
        """Count failed blocks, and end the job if these were its last ones."""
        if count:
            job.failed += count
            job.reason = job.reason or str(reason)
        if job.settled:
            self._door.leave(job.ticket.number, job.done())

    def _recover(self) -> None:
        """Fail the work at hand after a step that raised."""
        self._client.count("store_crashes")
        for flight in self._ending:
            if flight in self._flights:
                self._flights.remove(flight)
            if not flight.accounted:
                self._account(flight, 0, len(flight.slots), Reason.INTERNAL)
        self._ending.clear()
        if self._beginning is not None:
            job, slots = self._beginning
            self._beginning = None
            if slots is not None and not any(flight.slots is slots for flight in self._flights):
                self._stock.give_back(job.ticket.kv_group, slots)
            if job.left:
                self._drop(job, Reason.INTERNAL)
