"""How long a load will take, from how the last ones went. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvhearth_server.tiers.ssd.disk.base import Op
from kvhearth_server.tiers.ssd.job import Job

_START_BYTES_PER_S = 1e9
_START_LATENCY_S = 0.002
_WEIGHT = 0.1
_GAP_S = 0.25


class ReadRate:
    """Moving averages of a read's latency, of a record's size, and of bytes a second while reads
    run.
    """

    def __init__(self) -> None:
        self.bytes_per_s = _START_BYTES_PER_S
        self.latency_s = _START_LATENCY_S
        self._read_bytes = float(1 << 20)
        self._last_at = 0.0

    def note(self, jobs: Iterable[Job], now: float) -> None:
        """Jobs that have just ended."""
        reads = [job for job in jobs if job.op is Op.READ and job.good and job.begun_at]
        if not reads:
            return
        size = sum(job.length for job in reads)
        took = max(job.ended_at - job.begun_at for job in reads)
        self.latency_s += _WEIGHT * (took - self.latency_s)
        records = sum(max(1, len(job.checks)) for job in reads)
        self._read_bytes += _WEIGHT * (size / records - self._read_bytes)
        # Not the time in which nothing was asked for: few reads do not make the drive slow.
        busy_since = max(self._last_at, min(job.begun_at for job in reads))
        gap, self._last_at = now - busy_since, now
        if 0 < gap < _GAP_S:
            self.bytes_per_s += _WEIGHT * (size / gap - self.bytes_per_s)

    def wait_s(self, records: int) -> float:
        """Until so many records that are queued have been read."""
        return min(5.0, self.estimate_s(0, records))

    def estimate_s(self, size_bytes: int, ahead: int) -> float:
        """For so many bytes behind ``ahead`` records of others."""
        return self.latency_s + (ahead * self._read_bytes + size_bytes) / self.bytes_per_s
