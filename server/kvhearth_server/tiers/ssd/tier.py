"""The SSD tier as the engine sees it. ``tiers.base.Tier`` describes its methods.

Threads: one drives the disk (``driver``), one or more verify moved bytes (its ``ChecksumPool``),
one per directory makes files (``janitor``), one reads the log back at the start (``adopter``). All
state belongs to the loop, which calls the methods of this module. Only ``drain``, ``close`` and,
for opening directories, the constructor wait.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from kvhearth.model import I64, U8
from kvhearth_server.tiers.base import (
    BlockSpec,
    Completion,
    Counts,
    Done,
    Evicted,
    Facts,
    Failed,
    Kind,
    LoadBatch,
    Missing,
    Offer,
    StoreBatch,
    TenantUse,
    Throttled,
    Tier,
    TierFigures,
    TierShares,
    check_places,
)
from kvhearth_server.tiers.ssd.assembly import Environment, build
from kvhearth_server.tiers.ssd.directory import Directory
from kvhearth_server.tiers.ssd.disk.executor import Job
from kvhearth_server.tiers.ssd.disk.syscalls import signal_event
from kvhearth_server.tiers.ssd.format import PAGE_BYTES, record_pages
from kvhearth_server.tiers.ssd.log import Log
from kvhearth_server.tiers.ssd.reclaimer import REINSERT_PAGES
from kvhearth_server.tiers.ssd.recovery.restore import Progress
from kvhearth_server.tiers.ssd.settings import SsdSettings
from kvhearth_server.tiers.ssd.stats import SsdStatus
from kvhearth_server.tiers.ssd.transfers import Task
from kvhearth_server.tiers.ssd.walk import walk
from kvhearth_server.tiers.ssd.write_limits import Admission, AdmitAll

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
                notices.append(Completion(task.ticket, [(Failed("stuck"), task.out)], final=False))
        for log_dir in self._log.log_dirs:
            log_dir.directory.health.stuck = stuck.get(log_dir.directory, 0)
        return notices

    def _directory_of(self, job: Job) -> Directory | None:
        found = (s.directory for s in self._log.segments.values() if s.fd == job.fd)
        return next(found, None)


_abandoned: list[object] = []
"""Tiers whose memory a hanging device may still write to; never freed."""


class SsdTier(Tier):
    """Blocks on one or more drives.

    Args:
        settings: places and bounds.
        regions: the bytes of each arena segment, in the order in which places number them.
        admission: policy that selects the blocks worth a write; all blocks by default.
        on_progress: called while the log is read back.
        environment: files, clock and disk queue; the machine's own by default.
        offers: offer blocks to a tier behind this one before they are dropped to make room.

    Raises:
        DirectoryError: no directory can be used.
        OSError: no way to do disk I/O was found.
    """

    name = "ssd"

    def __init__(
        self,
        settings: SsdSettings,
        regions: Sequence[U8],
        *,
        admission: Admission | None = None,
        on_progress: Progress | None = None,
        environment: Environment | None = None,
        offers: bool = False,
    ) -> None:
        environment = environment or Environment()
        self._parts = build(settings, regions, environment, on_progress, offers=offers)
        self.settings = settings
        self.counts = self._parts.counts
        self.event_fd = self._parts.driver.event_fd
        self._regions = list(regions)
        self._clock = environment.clock
        self._admission: Admission = admission or AdmitAll()
        self._budget = self._parts.log.wear.budget
        self.status = SsdStatus(self._parts, self._budget)
        self._watch = Watch(self._parts.log, self.counts, settings.slow_s, settings.stuck_s)
        self._shares: TierShares | None = None
        self._tasks: dict[int, Task] = {}
        self._completions: list[Completion] = []
        self._next_ticket = 1
        self._steps = 0
        self._closed = False

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
            return _counted(self.counts, "stores", refusal, len(batch.keys))
        family = batch.family
        present, _ = self._parts.index.present(family, batch.keys)
        absent = np.flatnonzero(~present)
        if len(absent) * family.shards > min(
            self._parts.pages.free - REINSERT_PAGES,
            self.settings.queue_writes - self._parts.transfers.writes,
        ):
            refusal = Throttled("queue", self._parts.rate.wait_s(self._parts.transfers.writes))
            return _counted(self.counts, "stores", refusal, len(absent))
        task = self._task(batch)
        task.settle(np.flatnonzero(present).tolist(), Done())
        self.counts.add("stores_present", int(present.sum()))
        wanted = self._admitted(task, batch, absent)
        if len(wanted):
            left = self._parts.transfers.store(task, batch, wanted)
            if len(left):
                refusal = _counted(self.counts, "stores", self._no_place(family), len(left))
                task.settle(left.tolist(), refusal)
                self._budget.give_back(len(left) * _disk_bytes(family))
        task.finish_if_done()
        if self._completions or self._parts.needs_reclaim:
            signal_event(self.event_fd)
        return task.ticket

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        self._check(batch)
        driver = self._parts.driver
        if self._parts.log.draining or driver.broken or not driver.alive:
            refusal = Throttled("draining" if self._parts.log.draining else "degraded")
            return _counted(self.counts, "loads", refusal, len(batch.keys))
        family = batch.family
        present, entries = self._parts.index.present(family, batch.keys)
        rows = np.flatnonzero(present)
        if self._parts.transfers.reads + len(rows) * family.shards > self.settings.queue_reads:
            refusal = Throttled("queue", self._parts.rate.wait_s(self._parts.transfers.reads))
            return _counted(self.counts, "loads", refusal, len(rows))
        task = self._task(batch)
        task.settle(np.flatnonzero(~present).tolist(), Missing())
        if len(rows):
            if batch.is_use:
                self._parts.index.used(entries[rows])
            self._parts.transfers.load(task, rows, entries[rows])
        task.finish_if_done()
        if self._completions or self._parts.needs_reclaim:
            signal_event(self.event_fd)
        return task.ticket

    @property
    def progress(self) -> tuple[int, int]:
        """Counters that change with each step towards room for stores: a record, first page or
        footer written, a piece of the log read back or adopted, a piece of a file made, a block
        carried. Loads do not count.
        """
        return self._steps, self._parts.files.steps

    def cancel(self, ticket: int) -> None:
        if (task := self._tasks.get(ticket)) is not None:
            task.cancel()

    def poll(self) -> list[Completion]:
        now = self._clock()
        jobs = self._parts.driver.take()
        self._parts.rate.note(jobs, now)
        for job in jobs:
            self._watch.ended(job, now)
            self._steps += job.good and (job.urgent or not job.is_read)
            job.then(job)
        self._parts.transfers.settle_writes()
        more = self._parts.adopter.turn(now)
        self._parts.log.tick()
        if not self._parts.adopter.recovering:
            more |= self._parts.reclaimer.tick()
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
        if self._parts.log.draining:
            return Throttled("draining")
        if self._parts.log.paused:
            return Throttled("recovering", 0.1)
        if not self._parts.driver.alive or self._parts.driver.broken:
            return Throttled("degraded", 60.0)
        return None

    def _admitted(self, task: Task, batch: StoreBatch, rows: I64) -> I64:
        """Return the rows that admission and the budget let through."""
        family = batch.family
        keys = [batch.keys[row] for row in rows.tolist()]
        good = self._admission.admit(family.namespace, family.group, keys, family.length)
        if not good.all():
            refusal = _counted(self.counts, "stores", Throttled("admission"), int((~good).sum()))
            task.settle(rows[~good].tolist(), refusal)
            rows = rows[good]
        if self._budget.unbounded:
            return rows
        now = self._clock()
        size = _disk_bytes(family)
        tenant = self._shares.owner_of(family.namespace, family.epoch) if self._shares else ""
        through = self._budget.take(size, len(rows), now, tenant)
        if through < len(rows):
            out_of = Throttled("budget", self._budget.wait_s(now))
            task.settle(rows[through:].tolist(), out_of)
            _counted(self.counts, "stores", out_of, len(rows) - through)
        return rows[:through]

    def _no_place(self, family: BlockSpec) -> Throttled:
        """Return the reason why the log had no place for a block."""
        pages = record_pages(family.length) * family.shards
        if self._parts.index.number_of(family.namespace) < 0 or not self._parts.log.fits(
            pages, family.shards
        ):
            return Throttled("too_large", 3600.0)
        now = self._clock()
        healths = [
            log_dir.directory.health
            for log_dir in self._parts.log.log_dirs
            if log_dir.directory.writable
        ]
        if not any(each.may_write(now) for each in healths):
            waits = [each.retry_after_s(now) for each in healths]
            return Throttled("degraded", max(0.1, min(waits, default=60.0)))
        # Reclaiming begins only when recovery knows every stored block.
        return Throttled("recovering", 0.1) if self.status.recovering else Throttled("full", 0.02)

    # -- lookup, removal, status -------------------------------------------------------------------

    def look_up(self, family: BlockSpec, keys: Sequence[bytes]) -> Facts:
        facts = Facts.none(family, len(keys))
        good, entries = self._parts.index.present(family, keys)
        if good.any():
            rows = self._parts.index.rows(entries[good], family.shards)
            facts.present[:] = good
            facts.sequences[good] = rows["sequence"][:, 0]
            facts.parents[good] = rows["parent"][:, 0]
            facts.checksums[good] = rows["checksum"]
        return facts

    def forget(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> int:
        return self._parts.index.unbind(namespace, group, keys)

    def forget_namespace(self, namespace: bytes, count: int) -> Evicted | None:
        return self._parts.index.forget_of(namespace, count)

    def walk(self, cursor: int, count: int) -> tuple[int, list[tuple[BlockSpec, list[bytes]]]]:
        """Take one step through all stored blocks, in disk order: see ``Tier.walk``. A step takes
        well below a millisecond.
        """
        return walk(self._parts.index, cursor, count)

    def take_evicted(self) -> list[Evicted]:
        gone, self._parts.reclaimer.evicted = self._parts.reclaimer.evicted, []
        return gone

    def take_offers(self) -> list[Offer]:
        return self._parts.reclaimer.take_offers()

    def use_shares(self, shares: TierShares, bytes_per_day: int | None = None) -> None:
        self._shares = shares
        self._budget.allot(shares.write_floors, bytes_per_day, self._clock())
        self._parts.reclaimer.use_shares(shares)

    def tenants_use(self, tenants: Sequence[str]) -> Mapping[str, TenantUse]:
        shares = self._shares
        if shares is None:
            return {}
        now, capacity = self._clock(), self._parts.reclaimer.capacity_pages * PAGE_BYTES
        pages = dict.fromkeys(tenants, 0)
        for name, count in self._parts.index.pages().items():
            tenant = shares.owner_of(*name)
            if tenant in pages:
                pages[tenant] += count
        found = dict[str, TenantUse]()
        for tenant in tenants:
            left, reserve = self._budget.reserve(tenant, now)
            bounded = not self._budget.unbounded
            found[tenant] = TenantUse(
                pages[tenant] * PAGE_BYTES,
                int(capacity * shares.floors.get(tenant, 0.0)),
                capacity,
                reserve - left,
                reserve,
                self._budget.size if bounded else 0,
                max(0, self._budget.room(tenant, now)) if bounded else 0,
            )
        return found

    @property
    def blocks(self) -> int:
        return self.status.blocks

    @property
    def recovering(self) -> bool:
        return self.status.recovering

    @property
    def loads_of_the_dead(self) -> bool:
        return bool(self.status.locked_files or self.status.unusable_places)

    @property
    def broken(self) -> str:
        return self.status.interface_broken

    @property
    def directories(self) -> list[Path]:
        return [place.path for place in self.settings.places]

    def estimate_s(self, loads: Sequence[tuple[BlockSpec, int]], waiting: int = 0) -> float:
        return self.status.estimate_s(loads, waiting)

    def problems(self) -> dict[Kind, str]:
        return self.status.by_kind()

    def figures(self) -> TierFigures:
        return self.status.figures()

    def check(self) -> None:
        """Raise ValueError unless all parts agree (tests, ``/debug/books``)."""
        self.status.check(idle=not self._tasks)

    # -- the end -----------------------------------------------------------------------------------

    def drain(self, deadline_s: float) -> bool:
        self._parts.log.draining = True
        end = self._clock() + deadline_s
        poll = select.poll()
        poll.register(self.event_fd, select.POLLIN)
        while True:
            self._completions = self.poll()
            writing = any(segment.writes for segment in self._parts.log.segments.values())
            if not self._tasks and not self._parts.reclaimer.busy and not writing:
                return True
            if self._clock() >= end:
                return False
            poll.poll(50)

    def close(self, deadline_s: float = 5.0) -> None:
        if self._closed:
            return
        self._closed = True
        self._parts.log.draining = True
        end = time.monotonic() + deadline_s
        parts: list[Callable[[float], bool]] = [self._parts.driver.stop, self._parts.adopter.stop]
        parts += [log_dir.janitor.stop for log_dir in self._parts.log.log_dirs]
        stopped = [part(max(0.05, end - time.monotonic())) for part in parts]
        if not all(stopped):
            # The kernel still uses our descriptors and memory: they must stay as they are.
            _abandoned.append(self)
            return
        for log_dir in self._parts.log.log_dirs:
            log_dir.janitor.poll()  # closes files that were made meanwhile, too
            log_dir.directory.close()
        self._parts.driver.close()


def _counted(counts: Counts, what: str, refusal: Throttled, blocks: int) -> Throttled:
    """Count the blocks of a refusal and return it."""
    counts.add(f"{what}_refused_{refusal.reason}", blocks)
    return refusal


def _disk_bytes(family: BlockSpec) -> int:
    return record_pages(family.length) * PAGE_BYTES * family.shards
