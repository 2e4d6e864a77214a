"""Requests that do not come back: who tells whom, and when."""

from __future__ import annotations

from collections.abc import Iterable

from kvhearth_server.tiers.base import Completion, Counts, Failed
from kvhearth_server.tiers.ssd.directory import Directory
from kvhearth_server.tiers.ssd.job import Job
from kvhearth_server.tiers.ssd.log import Log
from kvhearth_server.tiers.ssd.tasks import Task

_EVERY_S = 0.25


class Watch:
    """Looks at the age of requests, every quarter of a second at most."""

    def __init__(self, log: Log, counts: Counts, slow_s: float, stuck_s: float) -> None:
        self._log, self._counts = log, counts
        self._slow_s, self._stuck_s = slow_s, stuck_s
        self._next_at = 0.0

    def ended(self, job: Job, now: float) -> None:
        """A request came back: was it slow?"""
        took = job.ended_at - job.begun_at if job.begun_at and job.ended_at else 0.0
        if took > self._slow_s and (directory := self._directory_of(job)) is not None:
            directory.health.slow(took, now)
            self._counts.add("slow_requests")

    def look(self, tasks: Iterable[Task], now: float) -> list[Completion]:
        """Notices for batches of which something is stuck that was not before."""
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
            if any(not job.told_stuck for job in late):
                for job in task.jobs:
                    job.told_stuck = True
                self._counts.add("stuck_batches")
                notices.append(Completion(task.ticket, [(Failed("stuck"), task.out)], final=False))
        for lane in self._log.lanes:
            lane.directory.health.stuck = stuck.get(lane.directory, 0)
        return notices

    def _directory_of(self, job: Job) -> Directory | None:
        found = (s.directory for s in self._log.segments.values() if s.fd == job.fd)
        return next(found, None)
