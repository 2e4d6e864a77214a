"""Loads: from a request's keys to the engine's pages, and how much of the prompt that spares."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvhearth.caller import understood
from kvhearth.client import KVClient
from kvhearth.copiers.base import BlockFailure, Copier, Done, Ticket
from kvhearth.errors import KVHearthError, Reason
from kvhearth.layout import PagedKV
from kvhearth.model import I64, Bools, Records
from kvhearth.pipeline.admission import Admission
from kvhearth.pipeline.movers import CopierFactory, Movers, check_single_rank
from kvhearth.pipeline.pages import KeysAndPages, own_pages, page_numbers
from kvhearth.pipeline.reach import usable_tokens
from kvhearth.pipeline.workers import Worker
from kvhearth.results import LookupResult, PrefetchResult

FLIGHTS_MAX = 8
"""Loads whose copies may be under way."""

_SLICE_S = 0.1
_TICK_S = 0.25
_COPY_S = 30.0


@dataclass(frozen=True)
class LoadTicket:
    """One submitted load.

    Attributes:
        number: unique in its pipeline, from 1.
        blocks: how many were asked for, over all groups.
    """

    number: int
    blocks: int


@dataclass(frozen=True, eq=False)
class LoadDone:
    """What became of a load; its pages are the engine's again. Given out once.

    Attributes:
        ticket: the load.
        hit_tokens: what the daemon had, from the start.
        usable_tokens: the longest run from the start that the loaded blocks of all groups allow to
            compute on; the rest is to be recomputed. Less than ``hit_tokens`` only where a block
            failed.
        loaded: by group, (n,): which pages hold their keys' bytes. The contents of other pages are
            undefined.
        reason: why the daemon was not asked, or a block failed (a reason of the error table or a
            ``BlockFailure``), or empty. Empty with 0 tokens is a miss.
        bytes: copied into pages that hold their bytes.
        seconds: from the begin of the lookup to the end of the last copy.
    """

    ticket: LoadTicket
    hit_tokens: int
    usable_tokens: int
    loaded: dict[int, Bools]
    reason: str = ""
    bytes: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class _Job:
    ticket: LoadTicket
    groups: dict[int, tuple[tuple[bytes, ...], I64]]
    prefetch: bool
    epoch: int
    mark: object
    cancelled: bool = False


@dataclass(eq=False)
class _Part:
    """One group's copies: of the blocks at ``positions`` of what was asked for."""

    kv_group: int
    positions: I64
    extents: Records
    copier: Copier
    ticket: Ticket
    done: Done | None = None


@dataclass(eq=False)
class _Flight:
    job: _Job
    found: LookupResult
    started_at: float
    parts: list[_Part] = field(default_factory=list)
    reason: str = ""


class LoadPipeline:
    """Looks up, copies and verifies the blocks of requests, on a thread of its own.

    The pages of a load are untouchable from ``submit`` until its ``LoadDone``. No method raises,
    none waits longer than it says; a daemon that is away is a miss at once, and so is a load during
    which the weights were bumped. Thread-safe. In a forked child it takes nothing.

    Args:
        client: a scheduler and rank 0 in one process, with the arena mapped.
        kv: by KV cache group, the registered pages.
        queue_blocks_max: blocks submitted and not done at most.
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
        self._movers = Movers(client, kv, copiers)
        self._door: Admission[LoadDone] = Admission(queue_blocks_max)
        self._queue: deque[_Job] = deque()
        self._flights: deque[_Flight] = deque()
        # What the thread has at hand, for `_recover`.
        self._at_hand: _Job | None = None
        self._worker = Worker("kvhearth-load", self._step, self._recover)
        self._changed = self._worker.changed
        self._worker.start()

    def submit(
        self, groups: KeysAndPages, *, prefetch: bool = False, wait_s: float = 0.0
    ) -> LoadTicket | None:
        """Queue a request's blocks to be looked up and loaded.

        Args:
            groups: what is wanted where; all groups that the request's hit depends on.
            prefetch: let blocks on slower tiers begin to climb.
            wait_s: how long to wait for room in the queue.

        Returns:
            The ticket, or None while the queue is full. Arguments that cannot be right, and more
            blocks than the queue ever takes, are taken and fail.
        """
        job = self._enqueue(understood(own_pages, groups), prefetch, wait_s)
        return None if job is None else job.ticket

    def load_now(
        self, groups: KeysAndPages, *, prefetch: bool = False, deadline_s: float = 10.0
    ) -> LoadDone | None:
        """Load and wait for it.

        After ``deadline_s`` seconds a load that has not begun to copy is given up (``deadline``),
        and one that has is waited for, since its pages are being written.

        Returns:
            None if those copies did not end in another 30 seconds: the pages are untouchable until
            ``poll`` brings the outcome. It is a broken GPU or a machine that stands still.
        """
        until = time.monotonic() + deadline_s
        wanted = understood(own_pages, groups)
        job = self._enqueue(wanted, prefetch, deadline_s)
        if job is None:
            return _missed(LoadTicket(0, 0), wanted or {}, Reason.DEADLINE)
        done = self.wait(job.ticket, until - time.monotonic())
        if done is None:
            job.cancelled = True
            done = self.wait(job.ticket, _COPY_S)
        return done

    def prefetch(self, groups: Mapping[int, Sequence[bytes]]) -> PrefetchResult:
        """Ask for blocks on slower tiers to climb; see ``KVClient.prefetch``."""
        return self._client.prefetch(groups)

    def poll(self) -> list[LoadDone]:
        """Loads that are done and were not given out yet, oldest first; does not block."""
        return [] if self._worker.foreign else self._door.claim_all()

    def wait(self, ticket: LoadTicket, deadline_s: float) -> LoadDone | None:
        """The outcome of one load, waiting up to ``deadline_s`` seconds; None if it did not come,
        or was given out before.
        """
        return None if self._worker.foreign else self._door.claim(ticket.number, deadline_s)

    def drain(self, deadline_s: float) -> bool:
        """Whether all that was submitted is done, waiting up to ``deadline_s`` seconds for it."""
        return self._worker.foreign or self._door.wait_empty(deadline_s)

    def close(self, deadline_s: float = 5.0) -> bool:
        """Take no more; give up what has not begun, finish the rest. Idempotent.

        Returns:
            False if copies were still under way then: their pages are in use. Call it again.
        """
        if self._worker.foreign:
            return True
        until = time.monotonic() + deadline_s
        self._door.close()
        with self._changed:
            for job in self._queue:
                job.cancelled = True
            self._changed.notify_all()
        if not self._door.wait_empty(deadline_s):
            return False
        ended = self._worker.stop(max(until - time.monotonic(), _SLICE_S))
        return self._movers.close(max(until - time.monotonic(), _SLICE_S)) and ended

    def check_books(self) -> None:
        """Raise AssertionError if a load was lost."""
        self._door.check_books()

    def _enqueue(self, wanted: KeysAndPages | None, prefetch: bool, wait_s: float) -> _Job | None:
        if self._worker.foreign:
            return None
        groups = wanted or {}
        own, blocks, problem = self._own(groups)
        if wanted is None:
            problem = str(Reason.BAD_MESSAGE)
        mark: object = None
        if self._door.closed:
            problem = str(Reason.CLOSED)
        if not problem:
            try:
                mark = self._movers.order.mark()
            except RuntimeError:
                problem = str(BlockFailure.COPY_FAILED)
        number = self._door.enter(0 if problem else blocks, wait_s)
        if not number:
            self._client.count("load_throttled", blocks)
            return None
        job = _Job(LoadTicket(number, blocks), own, prefetch, self._client.epoch, mark)
        if problem:
            self._client.count("load_refused", blocks)
            self._door.leave(number, _missed(job.ticket, groups, problem))
            return job
        with self._changed:
            self._queue.append(job)
            self._changed.notify_all()
        return job

    def _own(
        self, groups: KeysAndPages
    ) -> tuple[dict[int, tuple[tuple[bytes, ...], I64]], int, str]:
        """Copies of the caller's arguments, the count of their blocks, and what is wrong."""
        own = {}
        problem = ""
        for kv_group, (keys, pages) in groups.items():
            names, numbers = tuple(keys), page_numbers(pages)
            problem = problem or self._movers.key_problem(kv_group, names)
            if numbers is None or len(numbers) != len(names):
                problem = problem or str(Reason.BAD_EXTENTS)
            else:
                own[kv_group] = (names, numbers)
        blocks = sum(len(keys) for keys, _ in groups.values())
        if blocks > self._queue_blocks_max:
            problem = problem or str(Reason.TOO_MANY_KEYS)
        return own, blocks, problem

    # -- the thread --------------------------------------------------------------------------------

    def _step(self) -> None:
        with self._changed:
            if not self._queue and not self._flights:
                self._changed.wait_for(lambda: self._queue or self._worker.stopping, _TICK_S)
                return
            job = None
            if self._queue and len(self._flights) < FLIGHTS_MAX:
                job = self._queue.popleft()
                self._at_hand = job
        if job is not None:
            self._begin(job)
        else:
            self._end_oldest()
        self._at_hand = None

    def _begin(self, job: _Job) -> None:
        """Look a load up and begin its copies."""
        started_at = time.monotonic()
        found = LookupResult(0, None, {}) if job.cancelled else self._lookup(job)
        flight = _Flight(job, found, started_at, reason=found.reason)
        self._flights.append(flight)
        if job.cancelled:
            given_up = Reason.CLOSED if self._door.closed else Reason.DEADLINE
            flight.reason = flight.reason or str(given_up)
            return
        for kv_group in job.groups:
            self._copy(flight, kv_group)

    def _lookup(self, job: _Job) -> LookupResult:
        keys = {kv_group: names for kv_group, (names, _) in job.groups.items()}
        return self._client.lookup(keys, prefetch=job.prefetch)

    def _copy(self, flight: _Flight, kv_group: int) -> None:
        """Begin to copy what of one group is leased."""
        found, job = flight.found, flight.job
        result = found.groups[kv_group]
        positions = np.flatnonzero(result.leased)
        if not len(positions):
            return
        copier = self._movers.copier(kv_group, found.boot_id)
        if copier is None:
            flight.reason = flight.reason or str(BlockFailure.STALE_BOOT)
            return
        pages = job.groups[kv_group][1][positions]
        try:
            with self._movers.order.after(job.mark):
                ticket = copier.load(found.boot_id, result.extents, pages, wait_s=_SLICE_S)
        except KVHearthError:  # closed meanwhile, with the session
            ticket = None
        if ticket is None:
            flight.reason = flight.reason or str(BlockFailure.STALE_BOOT)
            return
        flight.parts.append(_Part(kv_group, positions, result.extents, copier, ticket))

    def _end_oldest(self) -> None:
        """Finish the oldest load if its copies have ended."""
        flight = self._flights[0]
        for part in flight.parts:
            if part.done is None:
                part.done = part.copier.wait(part.ticket, _SLICE_S)
            if part.done is None:
                return
        self._at_hand = flight.job
        self._flights.popleft()
        self._finish(flight)

    def _finish(self, flight: _Flight) -> None:
        """Give the lease back, tell what was wrong, and end the load."""
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
                # The daemon sums them itself before it believes it.
                bad[part.kv_group] = part.extents[~done.ok]
        self._client.release(flight.found.lease, bad=bad or None)
        hit_tokens = flight.found.hit_tokens if same_weights else 0
        specs = self._client.contract.groups
        usable = usable_tokens([(specs[g], flags) for g, flags in loaded.items()], hit_tokens)
        self._client.count("load_blocks", sum(int(flags.sum()) for flags in loaded.values()))
        self._client.count("load_failed", failed)
        self._client.count("load_bytes", copied_bytes)
        self._client.count("load_copy_us", round(copy_s * 1e6))
        seconds = time.monotonic() - flight.started_at
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
        """After a step that raised: the load at hand has failed, once its copies have ended."""
        self._client.count("load_crashes")
        job, self._at_hand = self._at_hand, None
        if job is None:
            return
        for flight in self._flights:
            if flight.job is job:  # some of its copies may be under way
                flight.reason = flight.reason or str(Reason.INTERNAL)
                return
        self._door.leave(job.ticket.number, _missed(job.ticket, job.groups, Reason.INTERNAL))


def _missed(ticket: LoadTicket, groups: KeysAndPages, reason: str) -> LoadDone:
    loaded = {g: np.zeros(len(keys), np.bool_) for g, (keys, _) in groups.items()}
    return LoadDone(ticket, 0, 0, loaded, str(reason))
