"""Components of the SSD tier: opens the directories and wires the parts together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvhearth.model import U8
from kvhearth_server.tiers.base import Counts
from kvhearth_server.tiers.ssd.directory import Directory, open_directories
from kvhearth_server.tiers.ssd.disk.executor import IoExecutor, ReadRate
from kvhearth_server.tiers.ssd.disk.probe import ProbeResult, choose, open_queue
from kvhearth_server.tiers.ssd.disk.queues import DiskQueue
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.index import SsdIndex
from kvhearth_server.tiers.ssd.log import FileWorker, HeaderPages, Log, LogDirectory, TenantLog
from kvhearth_server.tiers.ssd.reclaimer import REINSERT_PAGES, Reclaimer
from kvhearth_server.tiers.ssd.recovery.restore import Progress, Restorer
from kvhearth_server.tiers.ssd.settings import SsdDirectorySpec, SsdSettings, quota_segments
from kvhearth_server.tiers.ssd.transfers import Transfers


@dataclass(frozen=True)
class Environment:
    """The outside world as the tier sees it; tests and fault injection pass other implementations.

    Attributes:
        wrap_queue: applied to the disk queue that was opened.
        queue: used instead of opening one.
    """

    files: Files = field(default_factory=Files)
    clock: Callable[[], float] = time.monotonic
    wrap_queue: Callable[[DiskQueue], DiskQueue] | None = None
    queue: DiskQueue | None = None


@dataclass
class TierComponents:
    """All parts that live as long as the tier.

    Attributes:
        failed_places: directories that could not be used at all, and the reasons.
        verdicts: disk interfaces that were tried, and the results.
    """

    settings: SsdSettings
    counts: Counts
    clock: Callable[[], float]
    files: Files
    failed_places: dict[SsdDirectorySpec, str]
    probe_results: list[ProbeResult]
    interface: str
    executor: IoExecutor
    index: SsdIndex
    log: Log
    pages: HeaderPages
    reclaimer: Reclaimer
    transfers: Transfers
    restorer: Restorer
    rate: ReadRate


def build(
    settings: SsdSettings,
    regions: Sequence[U8],
    environment: Environment,
    on_progress: Progress | None,
    *,
    offers: bool,
) -> TierComponents:
    """Open the directories, start the threads, begin to read the log back.

    Raises:
        DirectoryError: no directory can be used.
        OSError: no way to do disk I/O was found.
    """
    counts, clock = Counts(), environment.clock
    failed: dict[SsdDirectorySpec, str] = {}
    files = environment.files
    directories = open_directories(settings, files, counts, failed)
    try:
        queue, probe_results = _open_queue(settings, environment)
    except (OSError, ValueError):
        for each in directories:
            each.close()
        raise
    executor = IoExecutor(queue, sum_threads=settings.sum_threads, clock=clock)
    log_dirs = [_log_directory(each, executor, settings) for each in directories]
    index = SsdIndex()
    log = Log(log_dirs, executor, counts, settings=settings, clock=clock)
    pages = HeaderPages(settings.queue_writes + REINSERT_PAGES)
    reclaimer = Reclaimer(index, log, counts, clock, offers=offers)
    every_region = [*regions, reclaimer.buffer.bytes]
    parts = (index, log, executor, pages)
    transfers = Transfers(every_region, parts, settings, counts, clock)
    reclaimer.use(transfers, pages, len(regions))
    segments = [s for each in directories for s in each.segments]
    for segment in segments:
        segment.number = log.new_number()
    restorer = Restorer(
        segments,
        index,
        log,
        counts,
        files=files,
        event_fd=executor.event_fd,
        on_progress=on_progress,
    )
    return TierComponents(
        settings,
        counts,
        clock,
        files,
        failed,
        probe_results,
        queue.name,
        executor,
        index,
        log,
        pages,
        reclaimer,
        transfers,
        restorer,
        ReadRate(),
    )


def _log_directory(each: Directory, executor: IoExecutor, settings: SsdSettings) -> LogDirectory:
    made = LogDirectory(each, FileWorker(each, executor.event_fd), each.segments_max)
    quotas = settings.quotas if len(settings.quotas) == 1 else {"": 0.0} | settings.quotas
    for tenant, part in quotas.items():
        most = quota_segments(each.segments_max, part)
        made.logs[tenant] = TenantLog(tenant, made, most, settings.carry_share if most else 0.0)
    return made


def _open_queue(
    settings: SsdSettings, environment: Environment
) -> tuple[DiskQueue, list[ProbeResult]]:
    if environment.queue is not None:
        return environment.queue, []
    name, probe_results = choose(settings.interface, settings.depth)
    queue = open_queue(name, settings.depth)
    wrap = environment.wrap_queue
    return (wrap(queue) if wrap else queue), probe_results
