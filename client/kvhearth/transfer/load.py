"""Loads: copy a request's cached blocks into the engine's pages and report the usable prefix."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from kvhearth.client import KVClient
from kvhearth.copiers.base import BlockFailure
from kvhearth.errors import KVHearthError, Reason
from kvhearth.fail_open import understood
from kvhearth.page_layout import PagedKV
from kvhearth.results import LookupResult, PrefetchResult
from kvhearth.transfer.admission import Admission
from kvhearth.transfer.copier_pool import CopierFactory, CopierPool, check_single_rank
from kvhearth.transfer.hit import PromotionWait, usable_tokens
from kvhearth.transfer.loading import (
    Climb,
    LoadDone,
    LoadFlight,
    LoadJob,
    LoadPart,
    LoadTicket,
    missed,
    own_load,
)
from kvhearth.transfer.pages import KeysAndPages, own_pages
from kvhearth.worker_thread import Worker

FLIGHTS_MAX = 8
"""Most loads whose copies are under way."""
PROMOTIONS_MAX = 64
"""Most loads that wait for promotions: each holds a lease."""

_SLICE_S = 0.1
_TICK_S = 0.25
_COPY_S = 30.0


class LoadPipeline:
    """Looks up, copies and verifies the blocks of requests, on its own thread.

    The pages of a load are untouchable from ``submit`` until its ``LoadDone``. No method raises,
    and none waits longer than documented. If the daemon is away, a load is a miss at once; if the
    weights are bumped during a load, it is a miss too. Thread-safe. In a forked child it takes no
    loads.

    Args:
        client: a scheduler and rank 0 in one process, with the arena mapped.
        kv: by KV cache group, the registered pages.
        queue_blocks_max: most blocks that are submitted and not done.
        copiers: makes copiers; None for the one that fits the tensors.

    Raises:
        KVHearthError: ``bad_contract`` if ``kv`` does not fit the client's contract, or the engine
            has several ranks; ``config_invalid`` for a bound below 1.
    """

    def __init__(
        self,
        client: KVClient,
        kv: Mapping[int, PagedKV],
        *,
        queue_blocks_max: int = 65536,
        copiers: CopierFactory | None = None,
    ) -> None:
        if queue_blocks_max < 1:
            raise KVHearthError(Reason.CONFIG_INVALID, "a pipeline's bounds must be 1 or more")
        check_single_rank(client)
        self._client = client
        self._queue_blocks_max = queue_blocks_max
        self._copier_pool = CopierPool(client, kv, copiers)
        self._door: Admission[LoadDone] = Admission(queue_blocks_max)
        self._queue: deque[LoadJob] = deque()
        self._promotions: list[LoadJob] = []
        self._flights: deque[LoadFlight] = deque()
        # Job that the thread is working on, for `_recover`.
        self._at_hand: LoadJob | None = None
        self._worker = Worker("kvhearth-load", self._step, self._recover)
        self._changed = self._worker.changed
        self._worker.start()

    def submit(
        self,
        groups: KeysAndPages,
        *,
        prefetch: bool = False,
        promotion_s: float = 0.0,
        wait_s: float = 0.0,
    ) -> LoadTicket | None:
        """Queue a request's blocks to be looked up and loaded.

        Args:
            groups: keys and their destination pages; all groups that the request's hit depends on.
            prefetch: start promoting blocks on slower tiers.
            promotion_s: with ``prefetch``, how long the load may wait for promotions. It then takes
                the blocks that are in memory; the other promotions continue.
            wait_s: how long to wait for room in the queue.

        Returns:
            The ticket, or None while the queue is full. Malformed arguments, and more blocks than
            the queue ever takes, are accepted and fail.
        """
        job = self._enqueue(understood(own_pages, groups), Climb(prefetch, promotion_s), wait_s)
        return None if job is None else job.ticket

    def load_now(
        self,
        groups: KeysAndPages,
        *,
        prefetch: bool = False,
        promotion_s: float = 0.0,
        deadline_s: float = 10.0,
    ) -> LoadDone | None:
        """Load and wait for it; arguments as for ``submit``.

        After ``deadline_s`` seconds a load that has not begun to copy is given up (``deadline``),
        and promotions for it alone are cancelled. A load that has begun is waited for, since its
        pages are being written.

        Returns:
            None if those copies did not end in another 30 seconds, because of a broken GPU or a
            stalled machine: the pages are untouchable until ``poll`` brings the outcome.
        """
        until = time.monotonic() + deadline_s
        wanted = understood(own_pages, groups)
        job = self._enqueue(wanted, Climb(prefetch, promotion_s), deadline_s)
        if job is None:
            return missed(LoadTicket(0, 0), wanted or {}, Reason.DEADLINE)
        done = self.wait(job.ticket, until - time.monotonic())
        if done is None:
            _give_up(self._changed, [job])
            done = self.wait(job.ticket, _COPY_S)
        return done

    def prefetch(self, groups: Mapping[int, Sequence[bytes]]) -> PrefetchResult:
        """Request the promotion of blocks on slower tiers; see ``KVClient.prefetch``."""
        return self._client.prefetch(groups)

    def poll(self) -> list[LoadDone]:
        """Return loads that are done and were not handed out yet, oldest first; does not block."""
        return [] if self._worker.foreign else self._door.claim_all()

    def wait(self, ticket: LoadTicket, deadline_s: float) -> LoadDone | None:
        """Return the outcome of one load, waiting up to ``deadline_s`` seconds.

        None if it did not come, or was handed out before.
        """
        return None if self._worker.foreign else self._door.claim(ticket.number, deadline_s)

    def drain(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` seconds until all submitted loads are done; True if so."""
        return self._worker.foreign or self._door.wait_empty(deadline_s)

    def close(self, deadline_s: float = 5.0) -> bool:
        """Take no more loads, give up those that have not begun, finish the rest. Idempotent.

        Returns:
            False if copies were still under way then: their pages are in use. Call it again.
        """
        if self._worker.foreign:
            return True
        until = time.monotonic() + deadline_s
        self._door.close()
        with self._changed:
            _give_up(self._changed, [*self._queue, *self._promotions])
        if not self._door.wait_empty(deadline_s):
            return False
        ended = self._worker.stop(max(until - time.monotonic(), _SLICE_S))
        return self._copier_pool.close(max(until - time.monotonic(), _SLICE_S)) and ended

    def check_books(self) -> None:
        """Raise AssertionError if a load was lost."""
        self._door.check_books()

    def _enqueue(
        self, wanted: KeysAndPages | None, promotion: Climb, wait_s: float
    ) -> LoadJob | None:
        if self._worker.foreign:
            return None
        groups = wanted or {}
        own, blocks, problem = own_load(self._copier_pool, groups, self._queue_blocks_max)
        if wanted is None:
            problem = str(Reason.BAD_MESSAGE)
        mark: object = None
        if self._door.closed:
            problem = str(Reason.CLOSED)
        if not problem:
            try:
                mark = self._copier_pool.order.mark()
            except RuntimeError:
                problem = str(BlockFailure.COPY_FAILED)
        number = self._door.enter(0 if problem else blocks, wait_s)
        if not number:
            self._client.count("load_throttled", blocks)
            return None
        job = LoadJob(LoadTicket(number, blocks), own, promotion, self._client.epoch, mark)
        if problem:
            self._client.count("load_refused", blocks)
            self._door.leave(number, missed(job.ticket, groups, problem))
            return job
        with self._changed:
            self._queue.append(job)
            self._changed.notify_all()
        return job

    # -- the thread --------------------------------------------------------------------------------

    def _step(self) -> None:
        with self._changed:
            job = self._next()
            if job is None and not self._flights:
                self._changed.wait_for(
                    lambda: self._worker.stopping or self._next() is not None,
                    self._pause_s(_TICK_S),
                )
                return
            if job is not None:
                (self._queue if job.found is None else self._promotions).remove(job)
            self._at_hand = job
        if job is not None:
            self._begin(job)
        else:
            self._end_oldest()
        self._at_hand = None

    def _next(self) -> LoadJob | None:
        """Return the load whose turn it is, without removing it."""
        if len(self._flights) >= FLIGHTS_MAX:
            return None
        now = time.monotonic()
        for job in self._promotions:
            if job.cancelled or _due_at(job) <= now:
                return job
        return self._queue[0] if self._queue and len(self._promotions) < PROMOTIONS_MAX else None

    def _pause_s(self, most_s: float) -> float:
        """Return the seconds until a waiting load is due, at most ``most_s``."""
        if len(self._flights) >= FLIGHTS_MAX:
            return most_s
        now = time.monotonic()
        return max(min([most_s, *(_due_at(job) - now for job in self._promotions)]), 0.0)

    def _begin(self, job: LoadJob) -> None:
        """Look a load up and begin its copies, unless it waits for promotions."""
        job.started_at = job.started_at or time.monotonic()
        if not job.cancelled:
            self._look_up(job)
            if not job.cancelled and self._waits(job):
                return
        found, job.found = job.found or LookupResult(0, None, {}), None
        flight = LoadFlight(job, found, reason=found.reason)
        self._flights.append(flight)
        if job.cancelled:
            self._client.cancel(found)
            flight.found = LookupResult(0, None, {})
            given_up = Reason.CLOSED if self._door.closed else Reason.DEADLINE
            flight.reason = flight.reason or str(given_up)
            return
        for kv_group in job.groups:
            self._copy(flight, kv_group)

    def _look_up(self, job: LoadJob) -> None:
        keys = {kv_group: names for kv_group, (names, _) in job.groups.items()}
        found, before = self._client.lookup(keys, prefetch=job.promotion.prefetch), job.found
        if before is not None and found.reason:
            job.wait = PromotionWait(until=0.0)  # continue with the leased blocks
            return
        job.found = found
        if before is not None:
            # Cancelled only now: the promotions must not be without a requester in between.
            self._client.cancel(before)

    def _waits(self, job: LoadJob) -> bool:
        """Return whether the load waits for promotions; it is then looked up again."""
        found, now = job.found, time.monotonic()
        if not job.promotion.prefetch or found is None or found.reason or self._door.closed:
            return False
        job.wait = job.wait or PromotionWait(now + job.promotion.seconds)
        if job.epoch != self._client.epoch or not job.wait.answered(found.eta_us, now):
            return False
        with self._changed:
            self._promotions.append(job)
        return True

    def _copy(self, flight: LoadFlight, kv_group: int) -> None:
        """Begin to copy the leased blocks of one group."""
        found, job = flight.found, flight.job
        result = found.groups[kv_group]
        positions = np.flatnonzero(result.leased)
        if not len(positions):
            return
        copier = self._copier_pool.copier(kv_group, found.boot_id)
        if copier is None:
            flight.reason = flight.reason or str(BlockFailure.STALE_BOOT)
            return
        pages = job.groups[kv_group][1][positions]
        try:
            with self._copier_pool.order.after(job.mark):
                ticket = copier.load(found.boot_id, result.extents, pages, wait_s=_SLICE_S)
        except KVHearthError:  # closed meanwhile, with the session
            ticket = None
        if ticket is None:
            flight.reason = flight.reason or str(BlockFailure.STALE_BOOT)
            return
        flight.parts.append(LoadPart(kv_group, positions, result.extents, copier, ticket))

    def _end_oldest(self) -> None:
        """Finish the oldest load if its copies have ended."""
        flight = self._flights[0]
        for part in flight.parts:
            if part.done is None:
                part.done = part.copier.wait(part.ticket, self._pause_s(_SLICE_S))
            if part.done is None:
                return
        self._at_hand = flight.job
        self._flights.popleft()
        self._finish(flight)

    def _finish(self, flight: LoadFlight) -> None:
        """Release the lease, report bad blocks, and end the load."""
        job, reason, copied_bytes, copy_s = flight.job, flight.reason, 0, 0.0
        loaded = {g: np.zeros(len(keys), np.bool_) for g, (keys, _) in job.groups.items()}
        same_weights = job.epoch == self._client.epoch
        if not same_weights:
            reason = Reason.STALE_EPOCH
        bad = {}
        failed = 0
        for part in flight.parts:
            done = part.done
            assert done is not None, "a load ends after its copies"
            loaded[part.kv_group][part.positions] = done.ok & same_weights
            copied_bytes += done.bytes
            copy_s += done.seconds
            failed += int(np.count_nonzero(~done.ok))
            reason = reason or next(iter(done.reasons), "")
            if done.reasons.get(BlockFailure.CHECKSUM_MISMATCH):
                # The daemon checks the sums itself before it believes a report.
                bad[part.kv_group] = part.extents[~done.ok]
        self._client.release(flight.found.lease, bad=bad or None)
        hit_tokens = flight.found.hit_tokens if same_weights else 0
        specs = self._client.contract.groups
        usable = usable_tokens([(specs[g], flags) for g, flags in loaded.items()], hit_tokens)
        self._client.count("load_blocks", sum(int(flags.sum()) for flags in loaded.values()))
        self._client.count("load_failed", failed)
        self._client.count("load_bytes", copied_bytes)
        self._client.count("load_copy_us", round(copy_s * 1e6))
        seconds = time.monotonic() - job.started_at
        self._door.leave(
            job.ticket.number,
            LoadDone(
                job.ticket,
                hit_tokens,
                usable,
                loaded,
                str(reason),
                copied_bytes,
                seconds,
            ),
        )

    def _recover(self) -> None:
        """Fail the load at hand after a step that raised, once its copies have ended."""
        self._client.count("load_crashes")
        job, self._at_hand = self._at_hand, None
        if job is None:
            return
        for flight in self._flights:
            if flight.job is job:  # some of its copies may be under way
                flight.reason = flight.reason or str(Reason.INTERNAL)
                return
        if job.found is not None:
            self._client.cancel(job.found)
        self._door.leave(job.ticket.number, missed(job.ticket, job.groups, Reason.INTERNAL))


def _due_at(job: LoadJob) -> float:
    return 0.0 if job.wait is None else job.wait.due_at


def _give_up(changed: threading.Condition, jobs: list[LoadJob]) -> None:
    """Cancel jobs that are no longer wanted."""
    with changed:
        for job in jobs:
            job.cancelled = True
        changed.notify_all()
