"""Adopts recovered segments into the index and the log, a little at each turn of the loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvhearth.model import U32, Bools, Records
from kvhearth_server.tiers.base import Counts
from kvhearth_server.tiers.ssd.directory import Segment, SegmentState
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.format import Doubt
from kvhearth_server.tiers.ssd.index import SsdIndex
from kvhearth_server.tiers.ssd.log import Log
from kvhearth_server.tiers.ssd.recovery.recover import Recovery
from kvhearth_server.tiers.ssd.recovery.scanner import Portion, Recovered

_BLOCKS_A_TURN = 2048
_RETRY_S = 0.5

Progress = Callable[[int, int], None]
"""Callback with (segments read, segments in all)."""


class Restorer:
    """Turns the list of segment files into an index of all believed blocks."""

    def __init__(
        self,
        segments: list[Segment],
        index: SsdIndex,
        log: Log,
        counts: Counts,
        *,
        files: Files,
        event_fd: int,
        on_progress: Progress | None,
    ) -> None:
        self._index, self._log, self._counts = index, log, counts
        self._files, self._event_fd = files, event_fd
        self._on_progress = on_progress
        self._recovery: Recovery | None = Recovery(segments, files, event_fd)
        self._current: Recovered | None = None
        self._at = 0
        self._locked: list[Segment] = []
        self._retried: list[Segment] = []
        self._retry_at = self._now = 0.0
        self.recovering = True

    @property
    def locked(self) -> int:
        """Number of files that requests of a dead daemon still hold. Slots that it was loading into
        may still be written to.
        """
        return len({*self._locked, *self._retried}) + self.recovering

    def turn(self, now: float) -> bool:
        """Adopt some more; true if there is more to do at once."""
        self._now = now
        if self._current is None and self._recovery is not None:
            self._current = self._recovery.take()
            if self._current is not None:
                self._begin(self._current)
                self._report()
        if self._current is not None:
            self._go_on(self._current)
            self._let_write()
            return True
        if self._recovery is not None and self._recovery.done:
            if unread := self._recovery.unread:
                self._pass_over(unread)
                return True
            self._recovery, self._retried = None, []
            if self.recovering:
                self.recovering = False
                if self._log.paused:
                    self._log.begin()
        if self._recovery is None and self._locked and now >= self._retry_at:
            self._retry_at = now + _RETRY_S
            self._retried, self._locked = self._locked, []
            self._recovery = Recovery(self._retried, self._files, self._event_fd)
        return False

    def _let_write(self) -> None:
        """Allow writes as soon as there is a place, although older segments are not read yet."""
        if self._log.paused and self._recovery is not None and self._log.has_place:
            youngest = self._recovery.youngest
            if youngest is not None:
                self._log.begin(youngest)

    def _pass_over(self, unread: list[Segment]) -> None:
        """Continue behind the first of these segments, on which the reader failed because of
        a bug.
        """
        lost = Recovered(unread[0], failed=OSError("the reader failed"))
        self._counts.add("recovery_failures")
        self._end(lost)
        self._recovery = Recovery(unread[1:], self._files, self._event_fd)

    def stop(self, deadline_s: float) -> bool:
        """Give up; false if a read hangs."""
        return self._recovery is None or self._recovery.stop(deadline_s)

    def _report(self) -> None:
        if self._on_progress is not None and self._recovery is not None and self.recovering:
            self._on_progress(self._recovery.read, self._recovery.total)

    def _begin(self, found: Recovered) -> None:
        for reason, count in found.doubts.items():
            self._counts.add(f"dropped_{reason.value}", count)
        self._at = 0
        if found.portions:
            found.segment.head = found.head
            self._log.segments[found.segment.number] = found.segment
            self._index.expect(found.segment.number, sum(each.rows.size for each in found.portions))

    def _go_on(self, found: Recovered) -> None:
        if found.portions:
            portion, end = found.portions[-1], self._at + _BLOCKS_A_TURN
            span = slice(self._at, end)
            self._adopt(found.segment, portion, portion.keys[span], portion.rows[span])
            self._at = end
            if end >= len(portion.keys):
                found.portions.pop()
                self._at = 0
        if not found.portions:
            self._end(found)
            self._current = None

    def _adopt(self, segment: Segment, of: Portion, keys: list[bytes], rows: Records) -> None:
        """Bind some blocks of a portion, given by ``keys`` and ``rows``."""
        if self._index.number_of(of.namespace) < 0:
            self._counts.add("dropped_namespaces", len(keys))
            return
        before, number = len(self._index), segment.number
        if not self._index.bind_new(of.namespace, of.group, keys, number, rows):
            younger = self._younger(segment, of, keys, rows["epoch"][:, 0])
            self._counts.add(f"dropped_{Doubt.DUPLICATE.value}", int(younger.sum()))
            # A carried block of old weights may lie behind the block of newer weights: the last one
            # is bound.
            kept = np.flatnonzero(~younger)
            kept = kept[np.argsort(rows["epoch"][kept, 0], kind="stable")]
            rows, keys = rows[kept], [keys[row] for row in kept.tolist()]
            if not keys:
                return
            self._index.bind(of.namespace, of.group, keys, number, rows)
        replaced = before + len(keys) - len(self._index)
        self._counts.add(f"dropped_{Doubt.DUPLICATE.value}", replaced)
        self._counts.add("recovered_blocks", len(keys) - replaced)

    def _younger(self, segment: Segment, of: Portion, keys: list[bytes], epochs: U32) -> Bools:
        """Return which keys are bound to a block that is younger than the one in this segment.

        The epoch takes precedence over the segment: each directory has a segment open, so a block
        of newer weights may lie in a segment that was begun before that of the older weights'
        block.
        """
        entries = self._index.find(of.namespace, of.group, keys)
        bound = self._index.heads(entries)["epoch"]
        younger = np.zeros(len(keys), np.bool_)
        for row in np.flatnonzero(entries >= 0).tolist():
            other = self._log.segments[int(entries[row]) >> 32]
            theirs = int(bound[row]), other.head.sequence
            younger[row] = theirs > (int(epochs[row]), segment.head.sequence)
        return younger

    def _end(self, found: Recovered) -> None:
        segment = found.segment
        segment.head = found.head
        if found.locked:
            if found.failed is not None:
                message = "the daemon has no descriptor left to read a segment file back with"
                segment.directory.health.no_room(
                    self._now + 4 * _RETRY_S, "no_descriptors", message
                )
            self._locked.append(segment)
            return
        if found.failed is not None:
            segment.state = SegmentState.LOST
            segment.directory.health.read_failed("io")
            self._counts.add("segments_lost")
            return
        self._counts.add("recovered_segments")
        if found.foreign:
            segment.state = SegmentState.LOST
            segment.directory.pass_over(segment.path, "is of another log")
            return
        if found.empty:
            segment.state = SegmentState.FREE
        elif found.resume and segment.directory.writable:
            self._resume(found)
            return
        else:
            segment.state = SegmentState.SEALED
        self._log.add(segment)

    def _resume(self, found: Recovered) -> None:
        segment = found.segment
        segment.end, segment.promised = found.end, len(found.records)
        segment.records = [found.records] if len(found.records) else []
        segment.state = SegmentState.BUSY
        self._log.add(segment)
        self._log.resume(segment)
