"""Transfers of batches between arena slots and the log: requests, results, outcomes of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvhearth.model import I64, U8, Records
from kvhearth_server.tiers.base import (
    Completion,
    Corrupt,
    Counts,
    Done,
    Failed,
    Failure,
    LoadBatch,
    Missing,
    Outcome,
    StoreBatch,
    gather,
)
from kvhearth_server.tiers.ssd.directory import Segment
from kvhearth_server.tiers.ssd.disk.executor import Check, IoExecutor, Job
from kvhearth_server.tiers.ssd.disk.queues import PIECES_MAX, Op
from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    RECORD_DTYPE,
    RECORD_MAGIC,
    VERSION,
    pages_of,
    record_pages,
    seal,
)
from kvhearth_server.tiers.ssd.index import SsdIndex, rows_of
from kvhearth_server.tiers.ssd.log import HeaderPages, Log, Run
from kvhearth_server.tiers.ssd.settings import SsdSettings


class Task:
    """One batch of the engine or of the reclaimer.

    Attributes:
        jobs: its requests that have not ended.
        shards_left: for each row, shards whose requests have not ended.
        replacing: for a carried batch, the entries that its blocks are carried from; a row is bound
            only while its key is still bound there. None for a batch of the engine.
    """

    def __init__(
        self,
        ticket: int,
        batch: LoadBatch,
        then: Callable[[Task], None],
        replacing: I64 | None = None,
    ) -> None:
        self.ticket = ticket
        self.batch = batch
        self.replacing = replacing
        self.jobs: set[Job] = set()
        self.shards_left = [batch.family.shards] * len(batch.keys)
        self.cancelled = False
        self._then = then
        self._outcomes: list[Outcome | None] = [None] * len(batch.keys)

    def resolve(self, rows: Iterable[int], outcome: Outcome) -> None:
        """Set the outcome of rows; a row's first outcome counts."""
        for row in rows:
            if self._outcomes[row] is None:
                self._outcomes[row] = outcome

    @property
    def out(self) -> I64:
        """Rows with requests in flight, i64."""
        return np.array([row for row, left in enumerate(self.shards_left) if left], np.int64)

    def settled(self, row: int) -> bool:
        """Whether a row has its outcome."""
        return self._outcomes[row] is not None

    def cancel(self) -> None:
        """Let requests that have not begun end at once."""
        self.cancelled = True
        for job in self.jobs:
            job.cancelled = True

    def finish_if_done(self) -> None:
        """Report the batch once none of its requests is in flight."""
        if not self.jobs:
            self._then(self)

    def completion(self) -> Completion:
        """Return the final completion; rows without an outcome count as failed."""
        outcomes = [each or Failed(Failure.IO) for each in self._outcomes]
        return Completion(self.ticket, gather(outcomes))


_DONE = Done()
"""Shared instance: a batch whose rows all have the same outcome is reported quickly."""

_Record = tuple[int, int, bytes, int, int]
"""A record to read: the batch's row, position, checksum, region and offset of its place."""

_Span = tuple[int, list[_Record]]
"""A segment's number, and neighbouring records there that one request reads."""

_UNREAD_PAGES = 1024
"""Pages for headers that are read only because they lie between payloads. Each header has its own
page: a file system with checksums looks at the memory after the read and must find there what it
read.
"""


@dataclass(eq=False)
class _Run:
    """Neighbouring records in flight: ``records`` (n * shards,), ``owners`` the batch's row of
    each, ``pages`` the header page of each, ``pieces`` two pieces of memory each, ``checks`` one
    each. ``jobs`` counts the requests, ``writes`` those that have not ended.
    """

    task: Task
    segment: Segment
    records: Records
    owners: I64
    pages: list[int] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    jobs: int = 0
    writes: int = 0


class Transfers:
    """Makes the requests of batches and handles their ends. Called on the loop only."""

    def __init__(
        self,
        regions: Sequence[U8],
        parts: tuple[SsdIndex, Log, IoExecutor, HeaderPages],
        settings: SsdSettings,
        counts: Counts,
        clock: Callable[[], float],
    ) -> None:
        self._views = [region.data for region in regions]
        self._bases = [int(region.ctypes.data) for region in regions]
        self._index, self._log, self._driver, self._pages = parts
        self._settings = settings
        self._counts = counts
        self._clock = clock
        self.reads = 0
        self.writes = 0
        self._ended: list[_Run] = []
        self.unread = HeaderPages(_UNREAD_PAGES)

    # -- stores ------------------------------------------------------------------------------------

    def store(self, tenant: str, task: Task, batch: StoreBatch, rows: I64) -> I64:
        """Begin to write rows of a tenant's batch; return those without place. Header pages must be
        free.
        """
        family = batch.family
        pages = record_pages(family.length)
        carried = task.replacing is not None
        sizes = pages * family.shards, family.shards
        runs = self._log.allocate(tenant, *sizes, len(rows), carried=carried)
        jobs: list[Job] = []
        at = 0
        for run in runs:
            mine = rows[at : at + run.count]
            at += run.count
            made = self._write_run(task, batch, run, mine)
            run.segment.writes += len(made)
            jobs += made
        task.jobs.update(jobs)
        self.writes += len(jobs)
        self._driver.submit(jobs)
        for run in runs:
            self._log.ended(run.segment, None, 1)
        return rows[at:]

    def _write_run(self, task: Task, batch: StoreBatch, run: Run, rows: I64) -> list[Job]:
        family = batch.family
        records = self._records(batch, run, rows)
        out = _Run(task, run.segment, records, np.repeat(rows, family.shards))
        seal(records)
        self._gather(out, batch.places[rows].reshape(-1), family.length)
        size = record_pages(family.length) * PAGE_BYTES
        together = self._together(record_pages(family.length))
        starts = [*range(0, len(records), together), len(records)]
        out.jobs = out.writes = len(starts) - 1
        return [self._write(out, span, size) for span in pairwise(starts)]

    def _gather(self, run: _Run, places: Records, length: int) -> None:
        """Collect the memory of all records of a run, and the checks to make on it."""
        padded = pages_of(length) * PAGE_BYTES
        regions, offsets = places["region"].tolist(), places["offset"].tolist()
        run.pages = self._pages.take(run.records)
        sums = run.records["checksum"].tolist()
        for page, sum_, region, offset in zip(run.pages, sums, regions, offsets, strict=True):
            header = self._pages.address(page)
            run.pieces += ((header, PAGE_BYTES), (self._bases[region] + offset, padded))
            view = self._views[region][offset : offset + length]
            run.checks.append((view, bytes(sum_)))

    def _write(self, run: _Run, span: tuple[int, int], record_bytes: int) -> Job:
        first, end = span
        size = (end - first) * record_bytes
        self._log.budget.wrote(size, self._clock(), taken=run.task.replacing is None)
        return Job(
            Op.WRITE,
            run.segment.fd,
            int(run.records["position"][first]) * PAGE_BYTES,
            tuple(run.pieces[2 * first : 2 * end]),
            size,
            tuple(run.checks[first:end]),
            lambda job: self._written(job, run, span),
            sync=self._settings.flush,
            urgent=run.task.replacing is not None,
        )

    def _records(self, batch: StoreBatch, run: Run, rows: I64) -> Records:
        family, head = batch.family, run.segment.head
        count, shards = len(rows), family.shards
        records = np.zeros((count, shards), RECORD_DTYPE)
        records["magic"], records["version"] = RECORD_MAGIC, VERSION
        records["group"], records["epoch"] = family.group, family.epoch
        records["log_id"], records["segment_sequence"] = head.log_id, head.sequence
        records["length"], records["shard_count"] = family.length, shards
        records["shard"] = np.arange(shards)
        records["namespace"] = np.frombuffer(family.namespace, "V32")
        step = record_pages(family.length)
        places = run.position + np.arange(count * shards) * step
        records["position"] = places.reshape(count, shards)
        records["sequence"] = batch.sequences[rows][:, None]
        records["parent_sequence"] = batch.parents[rows][:, None]
        records["checksum"] = batch.checksums[rows]
        keys = [batch.keys[row] for row in rows.tolist()]
        records["key_bytes"] = np.array([len(key) for key in keys], np.uint8)[:, None]
        padded = b"".join(key.ljust(64, b"\0") for key in keys)
        records["key"] = np.frombuffer(padded, "V64")[:, None]
        return records.reshape(-1)

    def _written(self, job: Job, run: _Run, span: tuple[int, int]) -> None:
        run.task.jobs.discard(job)
        self.writes -= 1
        self._pages.give(run.pages[span[0] : span[1]])
        health = run.segment.directory.health
        if job.good:
            health.write_done()
            if job.wrong:
                rows = [int(run.owners[span[0] + index]) for index in job.wrong]
                run.task.resolve(rows, Corrupt("source"))
                self._counts.add("corrupt_sources", len(rows))
        else:
            run.task.resolve(run.owners[span[0] : span[1]].tolist(), Failed(job.reason))
            if job.reason != Failure.CANCELLED:
                health.write_failed(job.reason, self._clock())
                self._counts.add("write_errors")
        run.writes -= 1
        if not run.writes:
            self._ended.append(run)

    def settle_writes(self) -> None:
        """Enter written blocks into the index, a whole run at a time."""
        ended, self._ended = self._ended, []
        for run in ended:
            self._log.ended(run.segment, self._bind(run), run.jobs)
        for task in {run.task: None for run in ended}:
            task.finish_if_done()

    def _bind(self, run: _Run) -> Records | None:
        """Bind the blocks that are wholly written and not superseded; return their headers."""
        task, family = run.task, run.task.batch.family
        shards = family.shards
        # A block lies in one run, its shards one after another.
        rows = run.owners[::shards].tolist()
        for row in rows:
            task.shards_left[row] = 0
        good = [index for index, row in enumerate(rows) if not task.settled(row)]
        rows = [rows[index] for index in good]
        task.resolve(rows, _DONE)
        keys = [task.batch.keys[row] for row in rows]
        if task.replacing is not None and rows:
            now = self._index.find(family.namespace, family.group, keys)
            same = np.flatnonzero(now == task.replacing[rows]).tolist()
            good, keys = [good[index] for index in same], [keys[index] for index in same]
        if not keys:
            return None
        records = run.records.reshape(-1, shards)
        new = rows_of(records)
        if len(good) < len(records):
            records, new = records[good], new[good]
        number, name = run.segment.number, (family.namespace, family.group)
        if not self._index.bind_new(*name, keys, number, new):
            # A block of newer weights may have been written while this write was in flight.
            bound = self._index.heads(self._index.find(*name, keys))["epoch"]
            mine = np.flatnonzero(bound <= family.epoch)
            keys, records = [keys[index] for index in mine.tolist()], records[mine]
            if not keys:
                return None
            self._index.bind(*name, keys, number, new[mine])
        what = "carried" if task.replacing is not None else "stored"
        self._counts.add(f"{what}_blocks", len(keys))
        self._counts.add(f"{what}_bytes", len(keys) * shards * family.length)
        return records.reshape(-1)

    # -- loads -------------------------------------------------------------------------------------

    def load(self, task: Task, rows: I64, entries: I64) -> None:
        """Begin to read the rows of a batch that lie at ``entries``."""
        batch = task.batch
        shards = batch.family.shards
        found = self._index.rows(entries, shards).reshape(-1)
        owners = np.repeat(rows, shards).tolist()
        numbers = np.repeat(entries >> 32, shards).tolist()
        # Convert whole columns to plain numbers at once: a conversion for each row would cost half
        # as much as the row's other work.
        places = batch.places[rows].reshape(-1)
        columns = (found["position"], found["checksum"], places["region"], places["offset"])
        records = zip(owners, *(column.tolist() for column in columns), strict=True)
        self._submit_reads(task, self._spans(task, numbers, records))

    def _spans(self, task: Task, numbers: list[int], records: Iterable[_Record]) -> list[_Span]:
        """Join neighbouring records, but keep enough requests to occupy the drive."""
        step = record_pages(task.batch.family.length)
        enough = len(numbers) // max(1, self._settings.depth // 2)
        most = max(1, min(self._together(step), enough))
        spans: list[_Span] = []
        at, next_position, room, unread = -1, -1, 0, self.unread.free
        for number, record in zip(numbers, records, strict=True):
            if number == at and record[1] == next_position and room and unread:
                spans[-1][1].append(record)
                room -= 1
                unread -= 1
            elif number in self._log.segments:
                spans.append((number, [record]))
                at, room = number, most - 1
            else:
                task.resolve([record[0]], Missing())
                continue
            next_position = record[1] + step
        return spans

    def _together(self, record_pages: int) -> int:
        """Return the most neighbouring records of a request; each takes two pieces."""
        most = self._settings.request_bytes // (record_pages * PAGE_BYTES)
        return max(1, min(most, PIECES_MAX // 2))

    def _submit_reads(self, task: Task, spans: Iterable[_Span]) -> None:
        jobs = [self._read_span(task, span) for span in spans]
        task.jobs.update(jobs)
        self._driver.submit(jobs)

    def _read_span(self, task: Task, span: _Span) -> Job:
        number, records = span
        length = task.batch.family.length
        padded = pages_of(length) * PAGE_BYTES
        segment = self._log.segments[number]
        segment.reads += len(records)
        self.reads += len(records)
        pages = self.unread.lend(len(records) - 1)
        pieces: list[tuple[int, int]] = []
        checks: list[Check] = []
        for _, _, sum_, region, offset in records:
            if pieces:
                pieces.append((self.unread.address(pages[len(checks) - 1]), PAGE_BYTES))
            pieces.append((self._bases[region] + offset, padded))
            checks.append((self._views[region][offset : offset + length], bytes(sum_)))
        return Job(
            Op.READ,
            segment.fd,
            (records[0][1] + 1) * PAGE_BYTES,
            tuple(pieces),
            len(records) * (padded + PAGE_BYTES) - PAGE_BYTES,
            tuple(checks),
            lambda job: self._read(job, task, span, pages),
            urgent=task.replacing is not None,
            cancelled=task.cancelled,
        )

    def _read(self, job: Job, task: Task, span: _Span, pages: list[int]) -> None:
        task.jobs.discard(job)
        if pages:
            self.unread.give(pages)
        number, records = span
        self.reads -= len(records)
        segment = self._log.segments[number]
        segment.reads -= len(records)
        health = segment.directory.health
        if not job.good and job.begun_at and job.reason != Failure.CANCELLED and len(records) > 1:
            # A single unreadable page must not cost its neighbours.
            self._submit_reads(task, [(number, [record]) for record in records])
            return
        rows = [record[0] for record in records]
        for row in rows:
            task.shards_left[row] -= 1
        if not job.good:
            task.resolve(rows, Failed(job.reason))
            if job.reason != Failure.CANCELLED:
                health.read_failed(job.reason)
                for row in rows:
                    self._counts.add("read_errors")
                    self._doubt(task.batch, row, number)
        elif job.cancelled:
            task.resolve(rows, Failed(Failure.CANCELLED))
        else:
            for row in dict.fromkeys(rows[index] for index in job.wrong):
                self._counts.add("corrupt_blocks")
                self._doubt(task.batch, row, number)
                task.resolve([row], Corrupt("tier"))
            good = len(rows) - len(job.wrong)
            if good:
                health.read_done()
            self._counts.add("loaded_bytes", good * task.batch.family.length)
            ended = dict.fromkeys(row for row in rows if not task.shards_left[row])
            done = [row for row in ended if not task.settled(row)]
            task.resolve(done, _DONE)
            self._counts.add("loaded_blocks", len(done))
        task.finish_if_done()

    def _doubt(self, batch: LoadBatch, row: int, number: int) -> None:
        """Forget a block that could not be read correctly, if its key is still bound to it."""
        family, key = batch.family, batch.keys[row]
        entry = int(self._index.find(family.namespace, family.group, [key])[0])
        if entry >= 0 and entry >> 32 == number:
            self._index.unbind(family.namespace, family.group, [key])
