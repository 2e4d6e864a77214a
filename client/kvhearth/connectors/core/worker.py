"""A worker's half: pages, copiers, and the results of each step's copies. It takes no decision."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import WARNING

import numpy as np

from kvhearth.client import KVClient, connect
from kvhearth.clock import REAL_TIME, Clock
from kvhearth.connectors.core.engine import Counters
from kvhearth.connectors.core.settings import Settings
from kvhearth.connectors.core.step_metadata import (
    STEP_TOKENS_MIN,
    Geometry,
    Handshake,
    LoadFailure,
    LoadJob,
    Move,
    RankLoaded,
    RankStored,
    StepMeta,
    StoreJob,
    WorkerReport,
)
from kvhearth.contract import Contract
from kvhearth.copiers.base import BlockFailure, Copier, Done, Ticket
from kvhearth.copiers.device import numa_node
from kvhearth.counters import Warnings, log_event
from kvhearth.errors import ClientReason, KVHearthError, NoReason, Reason
from kvhearth.model import I64
from kvhearth.page_layout import PagedKV
from kvhearth.prefault import Populate
from kvhearth.transfer.copier_pool import CopierFactory, CopierPool, default_copier
from kvhearth.wire.handshake import NAMELESS, Run

QUEUE_MAX = 4096
"""Upper bound on loads or stores that wait for a copier; the engine's own queues bound them."""
IDLE_WAIT_S = 0.008
"""How long a step without tokens waits for a load. It has nothing else to do, and meanwhile the
engine's loop would take the processor and the interpreter's lock from the copy.
"""
PATIENCE_S = 2.0
"""How long a job waits for a copier's queue to take it."""
SETTLE_S = 5.0
"""How long stores are waited for where there may be no later step."""
CLOSE_S = 5.0


@dataclass(eq=False)
class _Flight:
    """One group's copies of one job."""

    group: int
    positions: I64
    move: Move
    copier: Copier
    ticket: Ticket
    done: Done | None = None

    def ended(self, wait_s: float) -> bool:
        """Whether the copies have ended."""
        if self.done is None:
            self.done = self.copier.wait(self.ticket, wait_s)
        return self.done is not None


@dataclass(eq=False)
class _Work:
    """A job under way."""

    job: LoadJob | StoreJob
    begun_at: float
    todo: list[int]
    mark: object = None
    flights: list[_Flight] = field(default_factory=list)
    reason: LoadFailure | NoReason = ""

    def ended(self, wait_s: float) -> bool:
        """Whether all its copies have begun and ended, or never will."""
        return not self.todo and all(flight.ended(wait_s) for flight in self.flights)


class WorkerConnector:
    """Copies of one rank. Attaches in the background.

    Args:
        settings: the user's options.
        offer: this rank's description. With a ``problem`` the rank does not attach, and its jobs
            fail.
        pages: the rank's pages, by the contract's group.
        engine_id: name of the engine, equal in its scheduler and its ranks.
        rank: index among tensor x pipeline parallel ranks.
        run: as for ``kvhearth.client.connect``.
        make: makes the copiers; by default those of the pages' device.
        clock: times the client's waits; those for copies keep real time.
    """

    def __init__(
        self,
        settings: Settings,
        offer: Handshake,
        pages: Sequence[PagedKV],
        *,
        engine_id: str,
        rank: int,
        run: Run = NAMELESS,
        make: CopierFactory | None = None,
        clock: Clock = REAL_TIME,
    ) -> None:
        self.counters = Counters()
        self._offer = offer
        self._rank = rank
        self._introduced = False
        self._geometry = Geometry()
        self._client: KVClient | None = None
        self._populate: Populate | None = None
        self._loading: CopierPool | None = None
        self._storing: CopierPool | None = None
        self._loads: deque[_Work] = deque()
        self._stores: deque[_Work] = deque()
        self._warnings = Warnings()
        self._report = WorkerReport()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        if offer.problem:
            return
        contract = Contract.from_json(offer.contract)
        self._geometry = Geometry.of(contract, offer.replicas)
        self._client = connect(
            settings.url,
            contract,
            engine_id=engine_id,
            scheduler=False,
            rank=rank,
            numa_node=numa_node(pages[0].device) if pages else -1,
            run=run,
            clock=clock,
        )
        if settings.touch_pages and all(one.device == "cpu" for one in pages):
            spans = [span for one in pages for span in one.host_spans()]
            self._populate = Populate(spans, pages, allocates=True)
        kv = dict(enumerate(pages))
        make = make or default_copier(
            verify_fraction=settings.verify_fraction, method=settings.copy_method
        )
        # Two pools, so that a load does not wait for the stores before it.
        self._loading = CopierPool(self._client, kv, make)
        self._storing = CopierPool(self._client, kv, make)

    def handshake(self) -> Handshake:
        """Return this rank's handshake for the scheduler. The first report repeats it unless this
        was called before.
        """
        self._introduced = True
        return self._offer

    # -- a step ------------------------------------------------------------------------------------

    def start_loads(self, meta: StepMeta) -> None:
        """Begin the step's loads, after the forward pass was issued: on the device, its work and
        the zeroing of new blocks before it come first.

        A step without tokens waits for a load.
        """
        for request_id in meta.lost:
            self._lost(request_id, ClientReason.NOT_PLANNED)
        for job in meta.loads:
            if len(self._loads) >= QUEUE_MAX or self._loading is None:
                self._lost(job.request_id, ClientReason.NO_COPIER)
                continue
            self._loads.append(self._work(job, self._loading))
        self._begin(self._loads, self._loading)
        if not meta.tokens and self._loads:
            self._loads[0].ended(IDLE_WAIT_S)

    def lose_loads(self, meta: StepMeta) -> None:
        """Report the step's loads that did not begin as failed."""
        begun = {work.job.request_id for work in self._loads if isinstance(work.job, LoadJob)}
        names = [*meta.lost, *(job.request_id for job in meta.loads)]
        for request_id in names:
            if request_id not in begun and request_id not in self._loaded:
                self._lost(request_id, Reason.INTERNAL)

    def lose_stores(self, meta: StepMeta) -> None:
        """Report the step's stores that did not begin as failed."""
        begun = {work.job.number for work in self._stores if isinstance(work.job, StoreJob)}
        for job in meta.stores:
            if job.number not in begun and job.number not in self._report.stored_ranks:
                self._report_store(_Work(job, time.monotonic(), [], reason=Reason.INTERNAL))

    def start_stores(self, meta: StepMeta) -> None:
        """Begin to copy the blocks that this step's forward pass has filled."""
        for job in meta.stores:
            if self._storing is None or len(self._stores) >= QUEUE_MAX:
                self._report_store(_Work(job, time.monotonic(), [], reason=ClientReason.NO_COPIER))
                continue
            self._stores.append(self._work(job, self._storing))
        self._begin(self._stores, self._storing)
        if meta.finish:
            self._await_stores(SETTLE_S)
        if meta.tokens >= STEP_TOKENS_MIN:
            self._report.steps.append(meta.number)

    def finish_stores(self, meta: StepMeta) -> tuple[bool, WorkerReport | None]:
        """Begin the stores of ``meta`` and wait for all that are under way, outside of a step.

        Returns:
            Whether all have ended within ``SETTLE_S``, and the report of those that have.
        """
        self.start_stores(meta)
        self._await_stores(SETTLE_S)
        return not self._stores, self.report()

    def _await_stores(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        while self._stores and time.monotonic() < until:
            self._stores[0].ended(max(until - time.monotonic(), 0.0))
            self._collect()

    def _work(self, job: LoadJob | StoreJob, copier_pool: CopierPool) -> _Work:
        work = _Work(job, time.monotonic(), list(job.moves))
        try:
            work.mark = copier_pool.order.mark()
        except RuntimeError:
            work.todo, work.reason = [], BlockFailure.COPY_FAILED
        return work

    def _begin(self, queue: deque[_Work], copier_pool: CopierPool | None) -> None:
        """Give waiting jobs to copiers, in order, as far as their queues take them."""
        if copier_pool is None:
            return
        for work in queue:
            while work.todo:
                if not self._begin_group(work, work.todo[0], copier_pool):
                    return
                work.todo.pop(0)

    def _begin_group(self, work: _Work, group: int, copier_pool: CopierPool) -> bool:
        """Whether the group's copies have begun, or never will."""
        move, storing = work.job.moves[group], isinstance(work.job, StoreJob)
        positions = np.arange(len(move.pages), dtype=np.int64)
        if storing:
            positions = self._geometry.written_by(self._rank, len(move.pages))
        if not len(positions):
            return True
        shard = self._geometry.shard_of(self._rank)
        extents, pages = move.extents[positions, shard], move.pages[positions]
        copier = copier_pool.copier(group, work.job.boot_id)
        if copier is None:
            work.reason = work.reason or BlockFailure.STALE_BOOT
            return True
        try:
            if storing:
                ticket = copier.store(work.job.boot_id, pages, extents, after=work.mark)
            else:
                ticket = copier.load(work.job.boot_id, extents, pages, after=work.mark)
        except KVHearthError:  # the copier was closed with the session
            work.reason = work.reason or BlockFailure.STALE_BOOT
            return True
        if ticket is None:
            if time.monotonic() - work.begun_at < PATIENCE_S:
                return False
            work.reason = work.reason or ClientReason.THROTTLED
            return True
        work.flights.append(_Flight(group, positions, Move(pages, extents), copier, ticket))
        return True

    def results(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended since the last call, and those of them that
        failed.
        """
        self._collect()
        loaded, failed = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def _collect(self) -> None:
        """Move ended copies to the next results and report."""
        self._begin(self._loads, self._loading)
        self._begin(self._stores, self._storing)
        for work in [work for work in self._loads if work.ended(0.0)]:
            self._loads.remove(work)
            self._report_load(work)
        for work in [work for work in self._stores if work.ended(0.0)]:
            self._stores.remove(work)
            self._report_store(work)

    def _report_load(self, work: _Work) -> None:
        assert isinstance(work.job, LoadJob)
        # Entered first, and as failed: the engine waits for it even if something fails below.
        self._loaded.add(work.job.request_id)
        self._failed.add(work.job.request_id)
        outcome = RankLoaded(reason=work.reason, seconds=time.monotonic() - work.begun_at)
        for flight in work.flights:
            done = flight.done
            assert done is not None, "a load ends after its copies"
            outcome.bytes += done.bytes
            outcome.reason = outcome.reason or next(iter(done.reasons), "")
            if done.reasons.get(BlockFailure.CHECKSUM_MISMATCH):
                outcome.bad[flight.group] = flight.move.extents[~done.ok]
        if outcome.reason:
            self._warnings.warn(
                "load.failed", "a load failed, it is recomputed", reason=outcome.reason
            )
        else:
            self._failed.discard(work.job.request_id)
        self._report.loads.setdefault(work.job.request_id, []).append(outcome)

    def _lost(self, request_id: str, reason: LoadFailure) -> None:
        self._loaded.add(request_id)
        self._failed.add(request_id)
        self._report.loads.setdefault(request_id, []).append(RankLoaded(reason=reason))

    def _report_store(self, work: _Work) -> None:
        assert isinstance(work.job, StoreJob)
        number = work.job.number
        self._report.stored_ranks[number] = 1
        outcomes = self._report.stores.setdefault(number, [])
        for flight in work.flights:
            done = flight.done
            assert done is not None, "a store ends after its copies"
            self.counters.add("store_bytes", done.bytes)
            stored = RankStored(self._rank, flight.positions, done.ok, done.checksums)
            outcomes.append((flight.group, stored))

    def report(self) -> WorkerReport | None:
        """Return the results since the last call; None if there are none."""
        if not self._introduced:
            self._report.handshakes.append(self.handshake())
        if self._report.empty:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def shutdown(self) -> None:
        """Let the copies end and detach."""
        if self._populate is not None:
            self._populate.close()
        if self._client is None:
            return
        for copier_pool in (self._loading, self._storing):
            if copier_pool is not None and not copier_pool.close(CLOSE_S):
                log_event(WARNING, "copies.left_running", "copies still run at shutdown")
        self._client.close(CLOSE_S)
        self._client = None
