"""Statistics and self-check of the SSD tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvhearth_server.tiers.base import BlockSpec, DirectoryFigures, Kind, TierFigures
from kvhearth_server.tiers.ssd.assembly import TierComponents
from kvhearth_server.tiers.ssd.directory import INTERFACE, UNUSABLE, SegmentState
from kvhearth_server.tiers.ssd.disk.probe import Verdict
from kvhearth_server.tiers.ssd.format import PAGE_BYTES
from kvhearth_server.tiers.ssd.log import LogDirectory
from kvhearth_server.tiers.ssd.write_limits import WriteBudget


class SsdStatus:
    """Reads the tier's parts without changing them. Called on the loop."""

    def __init__(self, parts: TierComponents, budget: WriteBudget) -> None:
        self._parts, self._budget = parts, budget
        self.files_found = sum(len(log_dir.directory.segments) for log_dir in parts.log.log_dirs)
        """Segment files that were there at the start."""

    @property
    def interface(self) -> str:
        """Name of the kernel interface in use."""
        return self._parts.interface

    @property
    def verdicts(self) -> list[Verdict]:
        """Results of the interfaces that were tried at the start, best first."""
        return self._parts.verdicts

    @property
    def repairs(self) -> list[str]:
        """Repairs made when the directories were opened, and logs begun afresh, for people."""
        return [
            message for log_dir in self._parts.log.log_dirs for message in log_dir.directory.repairs
        ]

    @property
    def recovering(self) -> bool:
        """Whether the log is still being read back, so that absent blocks may yet appear."""
        return self._parts.adopter.recovering

    @property
    def files_recovered(self) -> int:
        """Number of those files that were read back, or given up because their device fails."""
        return self._parts.counts["recovered_segments"] + self._parts.counts["segments_lost"]

    @property
    def locked_files(self) -> int:
        """Number of files that requests of a dead daemon may still hold. While it is not zero,
        slots that the dead daemon was loading into must stay quarantined.
        """
        return self._parts.adopter.locked

    @property
    def unusable_places(self) -> int:
        """Number of directories that could not be opened. A dead daemon's requests may still run
        there.
        """
        return len(self._parts.failed_places)

    @property
    def blocks(self) -> int:
        """Number of loadable blocks."""
        return len(self._parts.index)

    @property
    def live_bytes(self) -> int:
        """Payload bytes of the loadable blocks."""
        return self._parts.index.live_bytes

    @property
    def write_amplification(self) -> float:
        """Bytes written to the drives for each byte that was stored; 0 before the first."""
        counts = self._parts.counts
        stored = counts["stored_bytes"]
        return counts["written_bytes"] / stored if stored else 0.0

    @property
    def interface_broken(self) -> str:
        """Problem of the disk interface; empty for none."""
        driver = self._parts.driver
        if driver.broken:
            return f"disk interface failed: {driver.broken}"
        return "" if driver.alive else "the thread that drives the disk has ended"

    def namespaces(self) -> dict[bytes, int]:
        """Return the number of blocks of each namespace that has any."""
        return self._parts.index.namespaces()

    def estimate_s(self, loads: Sequence[tuple[BlockSpec, int]], waiting: int = 0) -> float:
        """Estimate the seconds that loading these numbers of blocks would take from now, behind
        ``waiting`` records that have not reached the tier yet; the loads themselves may be among
        these.
        """
        records = sum(blocks * family.shards for family, blocks in loads)
        size = sum(blocks * family.shards * family.length for family, blocks in loads)
        ahead = self._parts.transfers.reads + max(0, waiting - records)
        return self._parts.rate.estimate_s(size, ahead)

    def places(self, family: BlockSpec, keys: list[bytes]) -> list[tuple[Path, int] | None]:
        """Return the file of each block and the offset of its first shard's payload there; None for
        absent blocks. The next turn of the loop may move a block.
        """
        index, log = self._parts.index, self._parts.log
        good, entries = index.present(family, keys)
        found: list[tuple[Path, int] | None] = [None] * len(keys)
        for row in np.flatnonzero(good).tolist():
            head = index.rows(entries[row : row + 1])[0, 0]
            segment = log.segments[int(entries[row]) >> 32]
            found[row] = segment.path, (int(head["position"]) + 1) * PAGE_BYTES
        return found

    def allocated_bytes(self) -> dict[str, int]:
        """Return the bytes that each directory takes by its file system's own count. Waits for the
        disk.
        """
        directories = [log_dir.directory for log_dir in self._parts.log.log_dirs]
        return {str(each.path): each.allocated_bytes() for each in directories}

    def figures(self) -> TierFigures:
        """Return the tier's current figures. The cost does not depend on its content; never
        waits.
        """
        parts, now = self._parts, self._parts.clock()
        unusable = [
            DirectoryFigures(str(place.path), place.capacity_bytes, 0, {}, ((UNUSABLE, reason),))
            for place, reason in parts.failed_places.items()
        ]
        return TierFigures(
            interface=parts.interface,
            interface_broken=self.interface_broken,
            directories=[
                *(self._directory(log_dir, now) for log_dir in parts.log.log_dirs),
                *unusable,
            ],
            blocks=self.blocks,
            live_bytes=self.live_bytes,
            recovering=self.recovering,
            files_found=self.files_found,
            files_recovered=min(self.files_recovered, self.files_found),
            locked_files=self.locked_files,
            queued_reads=parts.transfers.reads,
            queued_writes=parts.transfers.writes,
            running_requests=len(parts.driver.running),
            read_latency_s=parts.rate.latency_s,
            read_bytes_per_s=parts.rate.bytes_per_s,
            budget_left_bytes=None if self._budget.unbounded else self._budget.left(now),
            counts=dict(parts.counts.values),
        )

    def _directory(self, log_dir: LogDirectory, now: float) -> DirectoryFigures:
        directory = log_dir.directory
        states = {str(state.value): 0 for state in SegmentState}
        for segment in directory.segments:
            states[segment.state.value] += 1
        return DirectoryFigures(
            path=str(directory.path),
            capacity_bytes=directory.capacity_bytes,
            file_bytes=len(directory.segments) * directory.segment_bytes,
            segments=states,
            findings=tuple(directory.health.findings(now)),
        )

    def by_kind(self) -> dict[Kind, str]:
        """Return all current problems: one sentence for people for each kind."""
        now = self._parts.clock()
        failed = self._parts.failed_places
        found = {Kind(str(place.path), UNUSABLE): reason for place, reason in failed.items()}
        for log_dir in self._parts.log.log_dirs:
            found |= log_dir.directory.health.by_kind(now)
        if broken := self.interface_broken:
            found[Kind("", INTERFACE)] = broken
        return found

    def check(self, *, idle: bool) -> None:
        """Raise ValueError unless index, segments and requests in flight agree.

        ``idle``: none of the engine's batches is out.
        """
        parts = self._parts
        parts.index.check()
        for number in parts.index.segments:
            if number not in parts.log.segments:
                raise ValueError(f"segment {number} has rows but no file")
        reads = sum(segment.reads for segment in parts.log.segments.values())
        if reads != parts.transfers.reads:
            raise ValueError(f"{reads} reads by segments, {parts.transfers.reads} in all")
        if not idle or parts.reclaimer.busy:
            return
        missing = parts.header_pages - parts.pages.free + parts.transfers.unread_pages
        if missing or reads or parts.transfers.writes:
            raise ValueError(f"idle, but {missing} header pages and {reads} reads are out")
