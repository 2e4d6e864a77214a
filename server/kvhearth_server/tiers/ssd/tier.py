"""The SSD tier as the engine sees it. ``tiers.base.Tier`` describes its methods.

Threads: one drives the disk (``executor``), one or more verify moved bytes (its ``ChecksumPool``),
one per directory makes files (``file_worker``), one reads the log back (``restorer``). Tests drive
the workers by hand (``disk.worker``), and have no threads that verify. All state belongs to the
loop, which calls the methods of this module. Only ``drain``, ``close`` and, for opening
directories, the constructor wait.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvhearth.model import I64, U8
from kvhearth_server.tiers.base import (
    BlockSpec,
    Completion,
    Counts,
    DirectoryError,
    Done,
    Evicted,
    Facts,
    Failed,
    Failure,
    Kind,
    LoadBatch,
    Missing,
    Offer,
    OwnerOf,
    Refusal,
    StoreBatch,
    Throttled,
    Tier,
    check_places,
)
from kvhearth_server.tiers.figures import DirectoryFigures, TenantFigures, TierFigures
from kvhearth_server.tiers.ssd.directory import (
    INTERFACE,
    UNUSABLE,
    Directory,
    SegmentState,
    open_directories,
)
from kvhearth_server.tiers.ssd.disk.executor import IoExecutor, Job, ReadRate
from kvhearth_server.tiers.ssd.disk.probe import ProbeResult, choose, open_queue
from kvhearth_server.tiers.ssd.disk.queues import DiskQueue, make_event, signal_event
from kvhearth_server.tiers.ssd.disk.worker import StartWorker, ThreadWorker
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.format import PAGE_BYTES, record_pages
from kvhearth_server.tiers.ssd.index import SsdIndex
from kvhearth_server.tiers.ssd.log import (
    Buffer,
    HeaderPages,
    Log,
)
from kvhearth_server.tiers.ssd.reclaimer import REINSERT_BYTES, REINSERT_PAGES, Reclaimer
from kvhearth_server.tiers.ssd.recovery.restore import Restorer
from kvhearth_server.tiers.ssd.settings import SsdDirectorySpec, SsdSettings
from kvhearth_server.tiers.ssd.transfers import Task, Transfers
from kvhearth_server.tiers.ssd.write_limits import SeenTwice

_JOBS_AT_ONCE = 64
"""Ended requests that one ``poll`` handles, some 10 us each."""
_EVERY_S = 0.25


class Watch:
    """Watches the age of requests, every quarter of a second at most."""

    def __init__(self, log: Log, counts: Counts, slow_s: float, stuck_s: float) -> None:
        self._log, self._counts = log, counts
        self._slow_s, self._stuck_s = slow_s, stuck_s
        self._next_at = 0.0

    def ended(self, job: Job, now: float) -> None:
        """Record a slow request that has ended."""
        took = job.ended_at - job.begun_at if job.begun_at and job.ended_at else 0.0
        if took > self._slow_s and (directory := self._directory_of(job)) is not None:
            directory.health.slow(took, now)
            self._counts.add("slow_requests")

    def look(self, tasks: Iterable[Task], now: float) -> list[Completion]:
        """Return notices for batches with requests that became stuck since the last look."""
        if now < self._next_at:
            return []
        self._next_at = now + _EVERY_S
        stuck: dict[Directory, int] = {}
        notices = []
        for task in tasks:
            late = [job for job in task.jobs if now - job.queued_at > self._stuck_s]
            for job in late:
                # A request that waited for its turn is late only because others are.
                hangs = job.begun_at and now - job.begun_at > self._stuck_s
                directory = self._directory_of(job) if hangs else None
                if directory is not None:
                    stuck[directory] = stuck.get(directory, 0) + 1
            if any(not job.reported_stuck for job in late):
                for job in task.jobs:
                    job.reported_stuck = True
                self._counts.add("stuck_batches")
                notices.append(
                    Completion(task.ticket, [(Failed(Failure.STUCK), task.out)], final=False)
                )
        for directory in self._log.directories:
            directory.health.stuck = stuck.get(directory, 0)
        return notices

    def _directory_of(self, job: Job) -> Directory | None:
        found = (s.directory for s in self._log.segments.values() if s.fd == job.fd)
        return next(found, None)


@dataclass(frozen=True)
class Environment:
    """The outside world as the tier sees it; tests and fault injection pass other implementations.

    Attributes:
        wrap_queue: applied to the disk queue that was opened.
        queue: used instead of opening one.
        start: starts the workers.
    """

    files: Files = field(default_factory=Files)
    clock: Callable[[], float] = time.monotonic
    wrap_queue: Callable[[DiskQueue], DiskQueue] | None = None
    queue: DiskQueue | None = None
    start: StartWorker = ThreadWorker


_abandoned: list[object] = []
"""Tiers whose memory a hanging device may still write to; never freed."""


class SsdTier(Tier):
    """Blocks on one or more drives.

    Args:
        settings: places and bounds.
        regions: the bytes of each arena segment, in the order in which places number them.
        admission: selects the blocks worth a write; all blocks by default.
        environment: files, clock and disk queue; the machine's own by default.
        offers: offer used blocks to shared tiers before they are dropped to make room.

    Attributes:
        failed_places: directories that could not be used at all, and the reasons.
        probe_results: disk interfaces that were tried, and the results.

    Raises:
        DirectoryError: no directory can be used.
        OSError: no way to do disk I/O was found.
    """

    name = "ssd"
    due_at = math.inf  # no call: the loop asks at every turn

    def __init__(
        self,
        settings: SsdSettings,
        regions: Sequence[U8],
        *,
        admission: SeenTwice | None = None,
        environment: Environment | None = None,
        offers: bool = False,
    ) -> None:
        environment = environment or Environment()
        self.settings = settings
        self.counts = Counts()
        self.failed_places: dict[SsdDirectorySpec, str] = {}
        self._files, self._clock = environment.files, environment.clock
        self.event_fd = make_event()
        directories, queue = self._open(environment)
        self.interface = queue.name
        self.executor = IoExecutor(
            queue,
            self.event_fd,
            sum_threads=settings.sum_threads,
            clock=self._clock,
            start=environment.start,
        )
        self.rate = ReadRate()
        self.index = SsdIndex()
        self.pages = HeaderPages(settings.queue_writes + REINSERT_PAGES)
        self.log = Log(directories, self.executor, settings, self.counts, self._clock)
        parts = (self.index, self.log, self.executor, self.pages)
        carried = Buffer(REINSERT_BYTES)
        self.transfers = Transfers(
            [*regions, carried.bytes], parts, settings, self.counts, self._clock
        )
        self.reclaimer = Reclaimer(
            self.index,
            self.log,
            self.transfers,
            self.pages,
            len(regions),
            self.counts,
            self._clock,
            offers=offers,
        )
        segments = [segment for each in directories for segment in each.segments]
        for segment in segments:
            segment.number = self.log.new_number()
        self.restorer = Restorer(
            segments,
            self.index,
            self.log,
            self.counts,
            files=self._files,
            event_fd=self.event_fd,
            start=environment.start,
        )
        self._regions = list(regions)
        self._admission = admission
        self._files_found = len(segments)
        self._watch = Watch(self.log, self.counts, settings.slow_s, settings.stuck_s)
        self._owner_of: OwnerOf = lambda namespace, epoch: ""
        self._tasks: dict[int, Task] = {}
        self._completions: list[Completion] = []
        self._next_ticket = 1
        self._steps = 0
        self._closed = False

    def _open(self, environment: Environment) -> tuple[list[Directory], DiskQueue]:
        directories: list[Directory] = []
        try:
            directories = open_directories(
                self.settings,
                self._files,
                self.event_fd,
                self.counts,
                self.failed_places,
                environment.start,
            )
            queue, self.probe_results = _open_queue(self.settings, environment)
        except (DirectoryError, OSError, ValueError):
            for each in directories:
                each.close()
            os.close(self.event_fd)
            raise
        return directories, queue

    # -- batches -----------------------------------------------------------------------------------

    @property
    def batch_blocks_max(self) -> int:
        return self.settings.batch_blocks_max

    @property
    def queue_reads(self) -> int:
        return self.settings.queue_reads

    @property
    def queue_writes(self) -> int:
        return self.settings.queue_writes

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        self._check(batch)
        refusal = self._refusal()
        if refusal is not None:
            return self.counts.refused("stores", refusal, len(batch.keys))
        family = batch.family
        present, _ = self.index.present(family, batch.keys)
        absent = np.flatnonzero(~present)
        if len(absent) * family.shards > min(
            self.pages.free - REINSERT_PAGES,
            self.settings.queue_writes - self.transfers.writes,
        ):
            refusal = Throttled(Refusal.QUEUE, self.rate.wait_s(self.transfers.writes))
            return self.counts.refused("stores", refusal, len(absent))
        task = self._task(batch)
        task.resolve(np.flatnonzero(present).tolist(), Done())
        self.counts.add("stores_present", int(present.sum()))
        wanted = self._admitted(task, batch, absent)
        if len(wanted):
            tenant = self._tenant_of(family)
            left = self.transfers.store(tenant, task, batch, wanted)
            if len(left):
                refusal = self.counts.refused("stores", self._no_place(family), len(left))
                task.resolve(left.tolist(), refusal)
                self.log.budget.give_back(len(left) * _disk_bytes(family))
        task.finish_if_done()
        if self._completions or self.log.needs_reclaim:
            signal_event(self.event_fd)
        return task.ticket

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        self._check(batch)
        if self.log.draining or self.broken:
            refusal = Throttled(Refusal.DRAINING if self.log.draining else Refusal.DEGRADED)
            return self.counts.refused("loads", refusal, len(batch.keys))
        family = batch.family
        present, entries = self.index.present(family, batch.keys)
        rows = np.flatnonzero(present)
        if self.transfers.reads + len(rows) * family.shards > self.settings.queue_reads:
            refusal = Throttled(Refusal.QUEUE, self.rate.wait_s(self.transfers.reads))
            return self.counts.refused("loads", refusal, len(rows))
        task = self._task(batch)
        task.resolve(np.flatnonzero(~present).tolist(), Missing())
        if len(rows):
            if batch.is_use:
                self.index.used(entries[rows])
            self.transfers.load(task, rows, entries[rows])
        task.finish_if_done()
        if self._completions or self.log.needs_reclaim:
            signal_event(self.event_fd)
        return task.ticket

    @property
    def progress(self) -> tuple[int, int]:
        """Counters that change with each step towards room for stores: a record, first page or
        footer written, a piece of the log read back or adopted, a piece of a file made, a block
        carried. Loads do not count.
        """
        return self._steps, self._files.steps

    def cancel(self, ticket: int) -> None:
        if (task := self._tasks.get(ticket)) is not None:
            task.cancel()

    def poll(self) -> list[Completion]:
        now = self._clock()
        jobs = self.executor.take(_JOBS_AT_ONCE)
        self.rate.note(jobs, now)
        for job in jobs:
            self._watch.ended(job, now)
            self._steps += job.good and (job.urgent or not job.is_read)
            job.then(job)
        self.transfers.settle_writes()
        more = self.restorer.unfinished and self.restorer.step(now)
        self.log.tick()
        if not self.restorer.recovering and (self.reclaimer.under_way or self.log.needs_reclaim):
            more |= self.reclaimer.tick()
        self._steps += more
        self._completions += self._watch.look(self._tasks.values(), now)
        if more:
            signal_event(self.event_fd)
        done, self._completions = self._completions, []
        return done

    def _check(self, batch: LoadBatch) -> None:
        if len(batch.keys) > self.settings.batch_blocks_max:
            most = self.settings.batch_blocks_max
            raise ValueError(f"{len(batch.keys)} blocks, at most {most} a batch")
        check_places(batch.places, batch.family.length, self._regions, PAGE_BYTES)

    def _task(self, batch: LoadBatch) -> Task:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        task = self._tasks[ticket] = Task(ticket, batch, self._finished)
        return task

    def _finished(self, task: Task) -> None:
        if self._tasks.pop(task.ticket, None) is not None:
            self._completions.append(task.completion())

    def _refusal(self) -> Throttled | None:
        if self.log.draining:
            return Throttled(Refusal.DRAINING)
        if self.log.paused:
            return Throttled(Refusal.RECOVERING, 0.1)
        if self.broken:
            return Throttled(Refusal.DEGRADED, 60.0)
        return None

    def _admitted(self, task: Task, batch: StoreBatch, rows: I64) -> I64:
        """Return the rows that admission and the budget let through."""
        family = batch.family
        if self._admission is not None:
            keys = [batch.keys[row] for row in rows.tolist()]
            good = self._admission.admit(family.namespace, family.group, keys)
            refusal = self.counts.refused(
                "stores", Throttled(Refusal.ADMISSION), int((~good).sum())
            )
            task.resolve(rows[~good].tolist(), refusal)
            rows = rows[good]
        if self.log.budget.unbounded:
            return rows
        now = self._clock()
        size = _disk_bytes(family)
        through = self.log.budget.take(size, len(rows), now)
        if through < len(rows):
            out_of = Throttled(Refusal.BUDGET, self.log.budget.wait_s(now))
            task.resolve(rows[through:].tolist(), out_of)
            self.counts.refused("stores", out_of, len(rows) - through)
        return rows[:through]

    def _no_place(self, family: BlockSpec) -> Throttled:
        """Return the reason why the log had no place for a block."""
        pages = record_pages(family.length) * family.shards
        if self.index.number_of(family.namespace) < 0 or not self.log.fits(pages, family.shards):
            return Throttled(Refusal.TOO_LARGE, 3600.0)
        now = self._clock()
        healths = [directory.health for directory in self.log.directories if directory.writable]
        if not any(each.may_write(now) for each in healths):
            waits = [each.retry_after_s(now) for each in healths]
            return Throttled(Refusal.DEGRADED, max(0.1, min(waits, default=60.0)))
        # Reclaiming begins only when recovery knows every stored block.
        return (
            Throttled(Refusal.RECOVERING, 0.1) if self.recovering else Throttled(Refusal.FULL, 0.02)
        )

    # -- lookup, removal ---------------------------------------------------------------------------

    def look_up(self, family: BlockSpec, keys: Sequence[bytes]) -> Facts:
        facts = Facts.none(family, len(keys))
        good, entries = self.index.present(family, keys)
        if good.any():
            rows = self.index.rows(entries[good], family.shards)
            facts.present[:] = good
            facts.sequences[good] = rows["sequence"][:, 0]
            facts.parents[good] = rows["parent"][:, 0]
            facts.checksums[good] = rows["checksum"]
        return facts

    def forget(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> int:
        return self.index.unbind(namespace, group, keys)

    def list_keys(
        self, namespace: bytes, group: int, place: int, count: int
    ) -> tuple[list[bytes], int]:
        return self.index.list_keys(namespace, group, place, count)

    def forget_namespace(self, namespace: bytes, count: int) -> Evicted | None:
        return self.index.forget_of(namespace, count)

    def take_evicted(self) -> list[Evicted]:
        gone, self.reclaimer.evicted = self.reclaimer.evicted, []
        return gone

    def take_offers(self) -> list[Offer]:
        return self.reclaimer.take_offers()

    def use_owners(self, owner_of: OwnerOf) -> None:
        self._owner_of = owner_of

    def use_budget(self, bytes_per_day: int) -> None:
        self.log.budget.use(bytes_per_day, self._clock())

    def quota_bytes(self, tenant: str) -> int:
        return sum(each.quota_bytes for each in self._tenants() if each.tenant == tenant)

    def _tenant_of(self, family: BlockSpec) -> str:
        """Return the tenant whose log gets a family's blocks; a tenant alone has the only log."""
        logs = self.log.directories[0].logs
        if len(logs) == 1:
            return next(iter(logs))
        return self._owner_of(family.namespace, family.epoch)

    def _tenants(self) -> list[TenantFigures]:
        """Return what each tenant with a quota uses of it."""
        used, most = Counter[str](), Counter[str]()
        for log in self.log.tenant_logs:
            if log.segments_max:
                size = log.directory.segment_bytes
                used[log.tenant] += log.held * size
                most[log.tenant] += log.segments_max * size
        return [TenantFigures(tenant, used[tenant], most[tenant]) for tenant in most]

    @property
    def loads_of_the_dead(self) -> bool:
        return bool(self.restorer.locked or self.failed_places)

    @property
    def directories(self) -> list[Path]:
        return [place.path for place in self.settings.places]

    # -- status ------------------------------------------------------------------------------------

    @property
    def recovering(self) -> bool:
        return self.restorer.recovering

    @property
    def blocks(self) -> int:
        """Number of loadable blocks."""
        return len(self.index)

    @property
    def broken(self) -> str:
        """Problem of the disk interface; empty for none."""
        executor = self.executor
        if executor.broken:
            return f"disk interface failed: {executor.broken}"
        return "" if executor.alive else "the thread that drives the disk has ended"

    def estimate_s(self, loads: Sequence[tuple[BlockSpec, int]], waiting: int = 0) -> float:
        records = sum(blocks * family.shards for family, blocks in loads)
        size = sum(blocks * family.shards * family.length for family, blocks in loads)
        ahead = self.transfers.reads + max(0, waiting - records)
        return self.rate.estimate_s(size, ahead)

    def places(self, family: BlockSpec, keys: list[bytes]) -> list[tuple[Path, int] | None]:
        """Return the file of each block and the offset of its first shard's payload there; None for
        absent blocks. The next turn of the loop may move a block.
        """
        index, log = self.index, self.log
        good, entries = index.present(family, keys)
        found: list[tuple[Path, int] | None] = [None] * len(keys)
        for row in np.flatnonzero(good).tolist():
            head = index.rows(entries[row : row + 1])[0, 0]
            segment = log.segments[int(entries[row]) >> 32]
            found[row] = segment.path, (int(head["position"]) + 1) * PAGE_BYTES
        return found

    def allocated_bytes(self) -> dict[str, int]:
        """Return the bytes of each directory by its file system's count. Waits for the disk."""
        paths = [directory.path for directory in self.log.directories]
        return {str(path): self._files.allocated_bytes(path) for path in paths}

    def figures(self) -> TierFigures:
        """Return the tier's current figures at a cost that does not depend on its content."""
        now = self._clock()
        recovered = self.counts["recovered_segments"] + self.counts["segments_lost"]
        unusable = [
            DirectoryFigures(str(place.path), place.capacity_bytes, 0, {}, [UNUSABLE], [reason])
            for place, reason in self.failed_places.items()
        ]
        return TierFigures(
            interface=self.interface,
            interface_broken=self.broken,
            directories=[
                *(self._directory(directory, now) for directory in self.log.directories),
                *unusable,
            ],
            tenants=self._tenants(),
            blocks=self.blocks,
            live_bytes=self.index.live_bytes,
            recovering=self.recovering,
            files_found=self._files_found,
            files_recovered=min(recovered, self._files_found),
            locked_files=self.restorer.locked,
            queued_reads=self.transfers.reads,
            queued_writes=self.transfers.writes,
            running_requests=len(self.executor.running),
            read_latency_s=self.rate.latency_s,
            read_bytes_per_s=self.rate.bytes_per_s,
            budget_left_bytes=None if self.log.budget.unbounded else int(self.log.budget.left(now)),
            counters=dict(self.counts.values),
            io_seconds={"read": self.rate.seconds[True], "write": self.rate.seconds[False]},
        )

    def _directory(self, directory: Directory, now: float) -> DirectoryFigures:
        states = {str(state.value): 0 for state in SegmentState}
        for segment in directory.segments:
            states[segment.state.value] += 1
        found = directory.health.problems(now)
        return DirectoryFigures(
            path=str(directory.path),
            capacity_bytes=directory.capacity_bytes,
            file_bytes=len(directory.segments) * directory.segment_bytes,
            segments=states,
            problems=[kind.word for kind in found],
            reasons=list(found.values()),
        )

    def problems(self) -> dict[Kind, str]:
        now = self._clock()
        failed = self.failed_places
        found = {Kind(str(place.path), UNUSABLE): reason for place, reason in failed.items()}
        for directory in self.log.directories:
            found |= directory.health.problems(now)
        if broken := self.broken:
            found[Kind("", INTERFACE)] = broken
        return found

    def check(self) -> None:
        """Raise ValueError unless index, segments and requests agree (tests, ``/debug/books``)."""
        self.index.check()
        for number in self.index.segments:
            if number not in self.log.segments:
                raise ValueError(f"segment {number} has rows but no file")
        reads = sum(segment.reads for segment in self.log.segments.values())
        if reads != self.transfers.reads:
            raise ValueError(f"{reads} reads by segments, {self.transfers.reads} in all")
        if self._tasks or self.reclaimer.busy:
            return
        missing = self.pages.lent + self.transfers.unread.lent
        if missing or reads or self.transfers.writes:
            raise ValueError(f"idle, but {missing} header pages and {reads} reads are out")

    # -- the end -----------------------------------------------------------------------------------

    def drain(self, deadline_s: float) -> bool:
        self.log.draining = True
        end = self._clock() + deadline_s
        poll = select.poll()
        poll.register(self.event_fd, select.POLLIN)
        while True:
            self._completions = self.poll()
            writing = any(segment.writes for segment in self.log.segments.values())
            if not self._tasks and not self.reclaimer.busy and not writing:
                return True
            if self._clock() >= end:
                return False
            poll.poll(50)

    def close(self, deadline_s: float = 5.0) -> None:
        if self._closed:
            return
        self._closed = True
        self.log.draining = True
        end = time.monotonic() + deadline_s
        ends: list[Callable[[float], bool]] = [
            self.executor.stop,
            self.restorer.stop,
        ]
        ends += [directory.file_worker.stop for directory in self.log.directories]
        stopped = [end_part(max(0.05, end - time.monotonic())) for end_part in ends]
        if not all(stopped):
            # The kernel still uses our descriptors and memory: they must stay as they are.
            _abandoned.append(self)
            return
        for directory in self.log.directories:
            directory.file_worker.poll()  # closes files that were made meanwhile, too
            directory.close()
        self.executor.close()
        os.close(self.event_fd)


def _open_queue(
    settings: SsdSettings, environment: Environment
) -> tuple[DiskQueue, list[ProbeResult]]:
    if environment.queue is not None:
        return environment.queue, []
    name, probe_results = choose(settings.interface, settings.depth)
    queue = open_queue(name, settings.depth)
    wrap = environment.wrap_queue
    return (wrap(queue) if wrap else queue), probe_results


def _disk_bytes(family: BlockSpec) -> int:
    return record_pages(family.length) * PAGE_BYTES * family.shards
