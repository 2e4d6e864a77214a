"""A directory of segment files: its ownership, capacity, files, and the logs of its tenants."""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import os
import re
import stat
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvhearth.failpoints import hit
from kvhearth.model import Records
from kvhearth_server.ownership import unwritable
from kvhearth_server.tiers.base import Counts, DirectoryError, Kind, ask_each
from kvhearth_server.tiers.figures import PROBLEMS
from kvhearth_server.tiers.ssd.disk.queues import signal_event
from kvhearth_server.tiers.ssd.disk.worker import StartWorker, ThreadWorker
from kvhearth_server.tiers.ssd.files import Busy, Files, OpenFile
from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    DirectoryHead,
    SegmentHead,
    footer_pages,
    id_of,
)
from kvhearth_server.tiers.ssd.settings import (
    MIB,
    SEGMENTS_LEAST,
    SEGMENTS_MAX,
    SsdDirectorySpec,
    SsdSettings,
    capacity_least,
    quota_segments,
    segment_bytes_for,
    segment_cost_bytes,
    segments_max,
    segments_that_fit,
)
from kvhearth_server.tiers.ssd.superblock import SUPERBLOCK_NAME, own

_PAUSE_FIRST_S = 1.0
_PAUSE_MAX_S = 60.0
_SLOW_KEEP_S = 30.0

UNUSABLE = "unusable"
"""Word for a directory that could not be opened at all."""

INTERFACE = "interface"
"""Word for a kernel queue or a thread that no longer drives any disk."""

_WORDS = {
    "no_space": "no space left on its file system",
    "read_only": "its file system is read-only",
    "io": "its device reports I/O errors",
    "short": "its device moves fewer bytes than asked for",
}


@dataclass
class DirectoryHealth:
    """State of one directory.

    A failed write stops writing for a pause that doubles each time; a success ends it. Reads are
    always tried: each is verified, and a miss costs little.
    """

    name: str
    stuck: int = 0
    _pause_s: float = 0.0
    _paused_until: float = 0.0
    _write_reason: str = ""
    _read_reason: str = ""
    _slow_until: float = 0.0
    _slowest_s: float = 0.0
    _no_room: tuple[str, str] = ("", "")
    _no_room_until: float = 0.0
    _notes: dict[str, str] = field(default_factory=dict)

    def note(self, word: str, message: str) -> None:
        """Record a permanent condition, such as a file system without direct I/O."""
        self._notes[word] = message

    def write_failed(self, reason: str, now: float) -> None:
        """Record that a write, or making room for one, failed."""
        if now >= self._paused_until:
            self._pause_s = min(_PAUSE_MAX_S, max(_PAUSE_FIRST_S, 2 * self._pause_s))
            self._paused_until = now + self._pause_s
        self._write_reason = reason

    def write_done(self) -> None:
        """Record that a write succeeded."""
        self._pause_s = self._paused_until = 0.0
        self._write_reason = ""

    def read_failed(self, reason: str) -> None:
        """Record that a read failed."""
        self._read_reason = reason

    def read_done(self) -> None:
        """Record that a read succeeded."""
        self._read_reason = ""

    def no_room(self, until: float, word: str, message: str) -> None:
        """Record that no segment can be made until ``until``, although no write failed."""
        self._no_room, self._no_room_until = (word, message), until

    def slow(self, took_s: float, now: float) -> None:
        """Record a request that took longer than it should."""
        self._slow_until = now + _SLOW_KEEP_S
        self._slowest_s = took_s

    def may_write(self, now: float) -> bool:
        """Whether new records may go here."""
        return not self.stuck and now >= self._paused_until

    def retry_after_s(self, now: float) -> float:
        """Return the seconds until ``may_write`` may be true again, as far as is known."""
        return max(0.0, self._paused_until - now)

    def problems(self, now: float) -> dict[Kind, str]:
        """Return all current problems: one sentence for people for each kind."""
        found = {(word, ""): message for word, message in self._notes.items()}
        for reason, doing in ((self._write_reason, "writes"), (self._read_reason, "reads")):
            if reason:
                word = reason if reason in PROBLEMS else "io"
                found[word, doing] = f"{doing}: {_WORDS.get(reason, reason)}"
        if self.stuck:
            found["stuck", "requests"] = f"its device holds on to {self.stuck} requests"
        if now < self._no_room_until:
            word, message = self._no_room
            found[word, "segments"] = message
        if now < self._slow_until:
            message = f"its device is slow: a request took {self._slowest_s:.1f} s"
            found["slow", "requests"] = message
        return {
            Kind(self.name, *kind): f"{self.name}: {message}" for kind, message in found.items()
        }


_SEGMENT_NAME = re.compile(r"(\d{8}|[1-9]\d{8,})\.segment")
NO_HEAD = SegmentHead(0, 0, 0, 0)


class CapacityReached(OSError):
    """The directory would exceed its capacity. The log makes no more files than fit, so the
    directory must contain files of others.
    """

    def __init__(self) -> None:
        super().__init__(errno.EDQUOT, "the directory's capacity is reached")


class SegmentState(enum.Enum):
    """State of a segment."""

    BUSY = "busy"
    """Locked by requests of a dead daemon, or not examined yet."""
    FREE = "free"
    WRITING_HEADER = "heading"
    """Its first page is being written."""
    OPEN = "open"
    SEALING = "sealing"
    """Full; its last records or its footer are being written."""
    SEALED = "sealed"
    RECLAIMING = "reclaiming"
    LOST = "lost"
    """Its device failed, or it is left alone; nothing is read from it or written to it."""


@dataclass(eq=False)
class Segment:
    """One segment file.

    Attributes:
        number: unique among all segments of the tier, for this run.
        end: the page after the last record that was given a place.
        promised: number of records that were given a place.
        records: headers of written records, until the footer is written.
        writes, reads: requests in flight.
        damaged: the file is too short or has holes; it is removed once it is empty.
        zeros: bytes that were written to make it.
    """

    number: int
    directory: Directory
    path: Path
    file: OpenFile | None = None
    state: SegmentState = SegmentState.BUSY
    head: SegmentHead = NO_HEAD
    end: int = 1
    promised: int = 0
    records: list[Records] = field(default_factory=list)
    writes: int = 0
    reads: int = 0
    damaged: bool = False
    zeros: int = 0

    @property
    def fd(self) -> int:
        """The file's descriptor; -1 where it is not open."""
        return self.file.fd if self.file else -1

    def room_for(self, pages: int, records: int, keep_pages: int = 0) -> int:
        """Return how many blocks of ``pages`` pages and ``records`` records still fit, footer
        included, if ``keep_pages`` pages are left for others.
        """
        total = self.directory.segment_bytes // PAGE_BYTES - keep_pages
        low, high = 0, max(0, (total - self.end) // pages)
        while low < high:
            middle = (low + high + 1) // 2
            need = middle * pages + footer_pages(self.promised + middle * records)
            if self.end + need <= total:
                low = middle
            else:
                high = middle - 1
        return low

    def footer_parts(self) -> list[Records]:
        """Return all record headers for the footer, in the order of their places."""
        return sorted(self.records, key=lambda part: int(part["position"][0]))

    def restart(self, head: SegmentHead) -> None:
        """Begin a new life of the file."""
        self.head, self.end, self.promised, self.records = head, 1, 0, []


Result = Segment | OSError | None
_Task = tuple[Callable[[], Result], Callable[[Result], None]]


class FileWorker:
    """Runs file system calls that may wait on a thread of its own, one task at a time."""

    def __init__(self, name: str, event_fd: int, start: StartWorker) -> None:
        self._event_fd = event_fd
        self._tasks = deque[_Task]()
        self._stopping = False
        self._ended: deque[tuple[Callable[[Result], None], Result]] = deque()
        self._pending = 0
        self._worker = start(f"kvhearth-files-{name}", self._turn, -1)

    @property
    def busy(self) -> bool:
        """Whether a task's result has not been handed over yet."""
        return self._pending > 0

    def start(self, task: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run ``task`` on the thread; ``poll`` then calls ``then`` with its result on the loop.

        A raised ``OSError`` becomes the result; ``Busy`` becomes a ``BlockingIOError``.
        """
        self._pending += 1
        self._tasks.append((task, then))
        self._worker.wake()

    def poll(self) -> None:
        """Hand over the results of finished tasks."""
        while self._ended:
            then, result = self._ended.popleft()
            self._pending -= 1
            then(result)

    def stop(self, deadline_s: float) -> bool:
        """End the thread; false if a call of the file system does not return."""
        self._stopping = True
        self._worker.wake()
        return self._worker.join(deadline_s)

    def _turn(self) -> bool:
        while self._tasks:
            task, then = self._tasks.popleft()
            result: Result
            try:
                result = task()
            except OSError as error:
                result = error
            except Busy as error:
                result = BlockingIOError(errno.EAGAIN, str(error))
            self._ended.append((then, result))
            signal_event(self._event_fd)
        return not self._stopping


class Directory:
    """A locked directory, its files, and the logs of its tenants.

    Attributes:
        segments: all files.
        segments_max: most files.
        free: segments that hold nothing, for any tenant.
        retry_at: time before which no file is made.
        logs: by tenant; "" has the segments that no tenant may use, and no quota.
        doubts: reasons for not believing the directory's own file.
        repairs: repairs made at the start, and logs begun afresh.
    """

    def __init__(
        self,
        place: SsdDirectorySpec,
        settings: SsdSettings,
        files: Files,
        event_fd: int,
        start: StartWorker = ThreadWorker,
    ) -> None:
        """Lock and open the directory. ``event_fd`` is signalled when ``file_worker`` is done.

        Raises:
            DirectoryError: it does not exist, belongs to another daemon, or is not readable.
        """
        self.path = place.path
        self.capacity_bytes = place.capacity_bytes
        self.files = files
        self.health = DirectoryHealth(str(place.path))
        self.segments: list[Segment] = []
        self.writable = True
        self.direct = True
        self._passed_over: list[str] = []
        wanted = settings.segment_bytes or segment_bytes_for(place.capacity_bytes)
        try:
            self._owned = own(files, self.path, self._segment_paths(), wanted)
        except Busy:
            raise DirectoryError(
                f"{place.path} is used by another daemon; stop it, or give this one another"
            ) from None
        except OSError as error:
            raise DirectoryError(
                f"cannot use {place.path} ({error.strerror}); give a directory that exists and "
                "that the daemon may write to"
            ) from error
        self.doubts, self.repairs = self._owned.doubts, self._owned.repairs
        self._note(self._owned.lock)
        try:
            self._fit(wanted)
        except DirectoryError:
            self._owned.close()
            raise
        self.log_id, self.segment_bytes = self._owned.head.log_id, self._owned.head.segment_bytes
        self.segments_max = segments_max(place.capacity_bytes, self.segment_bytes)
        if segments_that_fit(place.capacity_bytes, self.segment_bytes) > SEGMENTS_MAX:
            used = _mib(SEGMENTS_MAX * self.segment_bytes)
            self.health.note(
                "capped",
                f"only {used} of {_mib(place.capacity_bytes)} are used: its log began with files "
                f"of {_mib(self.segment_bytes)}, of which there are {SEGMENTS_MAX} at most",
            )
        self.free: list[Segment] = []
        self.retry_at = 0.0
        self.logs: dict[str, TenantLog] = {}
        quotas = settings.quotas if len(settings.quotas) == 1 else {"": 0.0} | settings.quotas
        for tenant, part in quotas.items():
            most = quota_segments(self.segments_max, part)
            share = settings.carry_share if most else 0.0
            self.logs[tenant] = TenantLog(tenant, self, most, share)
        self.file_worker = FileWorker(self.path.name, event_fd, start)

    def log_of(self, tenant_id: int) -> TenantLog:
        """Return the log to which a segment of a tenant belongs; a tenant alone has them all."""
        logs = list(self.logs.values())
        named = (log for log in logs[1:] if log.tenant_id == tenant_id)
        return logs[0] if len(logs) == 1 else next(named, logs[0])

    def is_full(self, now: float) -> bool:
        """Whether no segment is free, and none can be made."""
        files = len(self.segments)
        return not self.free and (files >= self.segments_max or now < self.retry_at)

    def _fit(self, wanted: int) -> None:
        """Ensure that there is room for enough segments, if need be for smaller ones.

        Files of the old size are dropped and deleted as they are read back, not earlier: only their
        locks show that no request of a dead daemon is in flight any more.
        """
        old = self._owned.head.segment_bytes
        room = segments_max(self.capacity_bytes, old)
        if room >= SEGMENTS_LEAST or not self.writable:
            return
        message = (
            f"{self.path}: {_mib(self.capacity_bytes)} have room for {room} segments of "
            f"{_mib(old)}, at least {SEGMENTS_LEAST} are needed"
        )
        if segments_max(self.capacity_bytes, wanted) < SEGMENTS_LEAST:
            raise DirectoryError(f"{message}; give it {_mib(capacity_least(wanted))} or more")
        head = DirectoryHead(self._owned.head.log_id, wanted)
        try:
            self._owned.rewrite(self.files, self.path / SUPERBLOCK_NAME, head)
        except OSError as error:
            raise DirectoryError(
                f"{message}, and smaller ones cannot be begun ({error.strerror}); give it "
                f"{_mib(capacity_least(old))} or more"
            ) from error
        self.repairs.append(
            f"{message}: begun anew with {_mib(wanted)}, all older files are removed"
        )

    def _note(self, found: OpenFile) -> None:
        if not found.direct:
            self.direct = False
            self.health.note(
                "buffered", "no direct I/O on its file system: reads and writes are buffered"
            )
        if not found.writable:
            self.writable = False
            problem = unwritable(self.path)
            why = f" ({problem})" if problem else ""
            told = f"may not be written to{why}: what is there is served"
            self.health.note("not_writable", told)

    def pass_over(self, path: Path, why: str) -> None:
        """Leave a file alone permanently; its room counts as taken."""
        self._passed_over.append(f"{path.name} {why}")
        first, more = self._passed_over[0], len(self._passed_over) - 1
        self.health.note(
            "passed_over", first + (f", and {more} more" if more else "") + ": left alone"
        )

    def _names(self) -> list[tuple[int, str]]:
        matches = map(_SEGMENT_NAME.fullmatch, os.listdir(self.path))
        return sorted((int(match[1]), match[0]) for match in matches if match)

    def _segment_paths(self) -> list[Path]:
        return [self.path / name for _, name in self._names()]

    def _free_path(self) -> Path:
        """Return the path of the lowest free number: a foreign file may have the greatest."""
        taken = {number for number, _ in self._names()}
        number = next(each for each in itertools.count(1) if each not in taken)
        return self.path / f"{number:08d}.segment"

    # -- files -------------------------------------------------------------------------------------

    def list_segments(self) -> list[Segment]:
        """List all segment files, not opened nor numbered; remove a killed daemon's leftovers."""
        for orphaned_load in self.path.glob("*.new"):
            with contextlib.suppress(OSError):
                orphaned_load.unlink()
        seen = set[tuple[int, int]]()
        for path in self._segment_paths():
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode):
                self.pass_over(path, "is no regular file")
            elif (facts.st_dev, facts.st_ino) in seen:
                # Its lock is our own, and would be taken for a dead daemon's forever.
                self.pass_over(path, "is another name of a file that is there already")
            else:
                seen.add((facts.st_dev, facts.st_ino))
                self.segments.append(Segment(0, self, path))
        return self.segments

    def open_segment(self, segment: Segment) -> None:
        """Open and lock one file.

        Raises:
            Busy, OSError: as ``Files.open``.
        """
        segment.file = self.files.open(segment.path)
        self._note(segment.file)

    def create_segment(self, number: int, *, prewrite: bool, flush: bool) -> Segment:
        """Make a segment file with all of its blocks reserved; with ``flush`` its name is durable.

        Raises:
            OSError: ENOSPC and the like; ``CapacityReached`` if the directory would exceed its own.
        """
        path = self._free_path()
        fresh = path.with_name(path.name + ".new")
        fresh.unlink(missing_ok=True)
        cost = segment_cost_bytes(self.segment_bytes)
        if self.files.allocated_bytes(self.path) + cost > self.capacity_bytes:
            raise CapacityReached
        found = self.files.open(fresh, create=True)
        try:
            zeros = self.files.allocate(found.fd, self.segment_bytes)
            if prewrite and not zeros:
                self.files.write_zeros(found.fd, self.segment_bytes)
                zeros = self.segment_bytes
            if self.files.allocated_bytes(self.path) > self.capacity_bytes:
                raise CapacityReached
            hit("ssd.segment_allocated")
            fresh.rename(path)
            if flush:
                self.files.sync_directory(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            os.close(found.fd)
            raise
        self._note(found)
        return Segment(number, self, path, found, SegmentState.FREE, zeros=zeros)

    def remove_segment(self, segment: Segment) -> None:
        """Delete a file that nothing uses."""
        try:
            segment.path.unlink(missing_ok=True)
            hit("ssd.segment_removed")
        finally:
            self.close_segment(segment)

    def close_segment(self, segment: Segment) -> None:
        """Close the segment's descriptor, and with it the lock."""
        if segment.file is not None:
            os.close(segment.file.fd)
            segment.file = None

    def close(self) -> None:
        """Close all files and release the directory."""
        self.file_worker.stop(0.0)
        for segment in self.segments:
            self.close_segment(segment)
        self._owned.close()


_READY_MAX = 4
_AHEAD_S = 10.0


@dataclass(eq=False)
class TenantLog:
    """One tenant's segments in one directory: the open one, and those that follow it.

    Attributes:
        segments_max: the tenant's quota.
        held: number of its segments in any state but free.
        ready: the next segments in their order; the first pages of some are still being written.
        sealing: number of segments that are full but not wholly written.
        carry_share: largest share of a segment for hot blocks that are carried.
        ahead, ahead_until: recent maximum of ``sealing``, and the time until which it counts.
    """

    tenant: str
    directory: Directory
    segments_max: int
    carry_share: float
    held: int = 0
    open: Segment | None = None
    ready: deque[Segment] = field(default_factory=deque)
    sealing: int = 0
    ahead: int = 0
    ahead_until: float = 0.0

    def __post_init__(self) -> None:
        self.tenant_id = id_of(self.tenant)

    @property
    def carry_pages(self) -> int:
        """Most pages of hot blocks that are carried from a segment."""
        return int(self.directory.segment_bytes // PAGE_BYTES * self.carry_share)

    def closed(self, now: float) -> None:
        """Count a segment that is full but not wholly written yet."""
        self.sealing += 1
        if self.sealing >= self.ahead or now >= self.ahead_until:
            self.ahead, self.ahead_until = self.sealing, now + _AHEAD_S

    def ready_wanted(self, now: float) -> int:
        """Return how many segments should be ready: one more than the recent maximum of segments
        being sealed, because places are given out ahead of the drive. At most an eighth of the
        quota, because ready segments hold nothing.
        """
        if not self.segments_max:
            return 0
        ahead = self.ahead if now < self.ahead_until else self.sealing
        return max(1, min(1 + ahead, self.segments_max // 8, _READY_MAX))

    def kept_pages(self, *, carried: bool) -> int:
        """Return the pages of the open segment that a new or carried block must leave free."""
        return 0 if carried or self.ready else self.carry_pages

    @property
    def over_quota(self) -> bool:
        """Whether it has more segments than allowed, because the quota was lowered."""
        return self.directory.writable and self.held > self.segments_max

    def needs_reclaim(self, now: float) -> bool:
        """Whether too few segments are ready, and only reclaiming can provide more."""
        if self.directory.file_worker.busy:
            return False
        if self.over_quota:
            return True
        full = self.held >= self.segments_max or self.directory.is_full(now)
        return full and len(self.ready) < self.ready_wanted(now)


def _mib(size: int) -> str:
    return f"{round(size / MIB, 2):g} MiB"


def open_directories(
    settings: SsdSettings,
    files: Files,
    event_fd: int,
    counts: Counts,
    failed: dict[SsdDirectorySpec, str],
    start: StartWorker,
) -> list[Directory]:
    """Open all usable directories and list their segments; reasons of failures go to ``failed``.

    Raises:
        DirectoryError: none can be used.
    """
    places = {place.path: place for place in settings.places}

    def ask(path: Path) -> Directory:
        return _open(Directory(places[path], settings, files, event_fd, start))

    found: list[Directory] = []
    for path, answer in ask_each(places, ask, settings.open_s, Directory.close).items():
        if isinstance(answer, DirectoryError):
            failed[places[path]] = str(answer)
        else:
            found.append(answer)
    if not found:
        raise DirectoryError("; ".join(failed.values()))
    for directory in found:
        for doubt, count in directory.doubts.items():
            counts.add(f"dropped_{doubt.value}", count)
    return found


def _open(found: Directory) -> Directory:
    try:
        found.list_segments()
    except OSError as error:
        found.close()
        raise DirectoryError(f"cannot list {found.path} ({error.strerror})") from error
    return found
