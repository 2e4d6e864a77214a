"""Reclaims whole segments to make room: carries hot blocks over to the open segment, evicts the
rest.

Each log of a tenant has one victim at a time: a tenant that needs room loses blocks of its own.
The victim's hot blocks (loaded since they were written) are read to a buffer of the tier, which
verifies them, and stored again; all others are evicted. If there are shared tiers behind this one,
the hot blocks are first offered to them. The segment is reused only when nothing reads it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvhearth.model import I64
from kvhearth_server.tiers.base import (
    ADDRESS_DTYPE,
    BlockSpec,
    Completion,
    Corrupt,
    Counts,
    Done,
    Evicted,
    Failed,
    LoadBatch,
    Offer,
    Outcome,
    Refusal,
    StoreBatch,
    Throttled,
)
from kvhearth_server.tiers.ssd.directory import Segment, SegmentState, TenantLog
from kvhearth_server.tiers.ssd.format import PAGE_BYTES, pages_of
from kvhearth_server.tiers.ssd.index import SsdIndex, disk_pages
from kvhearth_server.tiers.ssd.log import HeaderPages, Log
from kvhearth_server.tiers.ssd.transfers import Task, Transfers

REINSERT_BYTES = 32 << 20
"""Size of the buffer through which blocks are carried; a larger block is not carried. The size
keeps the turns of a segment few: each waits for the drive twice, and new stores wait for the
segment.
"""

_FORGET_BLOCKS = 2048
"""Blocks evicted in one turn of the loop, which reports each of them to the core."""

REINSERT_PAGES = 64
"""Header pages kept for carried blocks."""


@dataclass(frozen=True)
class _ReinsertionChunk:
    """Blocks of one family that fit into the buffer together."""

    family: BlockSpec
    keys: list[bytes]
    entries: I64


@dataclass(eq=False)
class _Work:
    """A victim, and its chunks that are yet to be carried. ``offered`` rows of the segment were
    offered.
    """

    segment: Segment
    chunks: Iterator[_ReinsertionChunk]
    running: bool = False
    carried: bool = False
    offered: int = 0


class Reclaimer:
    """Reclaims segments of directories that run out of them. Called on the loop only."""

    def __init__(
        self,
        index: SsdIndex,
        log: Log,
        transfers: Transfers,
        pages: HeaderPages,
        region: int,
        counts: Counts,
        clock: Callable[[], float],
        *,
        offers: bool,
    ) -> None:
        """Carries through ``region`` of ``transfers``, which has ``REINSERT_BYTES``.

        ``offers``: whether shared tiers behind this one take offers.
        """
        self._index, self._log, self._counts = index, log, counts
        self._transfers, self._pages, self._region = transfers, pages, region
        self._clock = clock
        self.under_way: dict[TenantLog, _Work] = {}
        """Segments that are being reclaimed."""
        self._carrying: _Work | None = None
        self._forgot = False
        self.evicted: list[Evicted] = []
        self._new_offers: list[Offer] | None = [] if offers else None

    @property
    def busy(self) -> bool:
        """Whether a block is being carried."""
        return self._carrying is not None

    def tick(self) -> bool:
        """Reclaim wherever a log has run out of segments. True if more is to be done."""
        for log in self._log.tenant_logs:
            if (
                log not in self.under_way
                and not self._log.draining
                and log.needs_reclaim(self._clock())
            ):
                victim = self._victim(log)
                if victim is not None:
                    victim.state = SegmentState.RECLAIMING
                    self.under_way[log] = _Work(victim, self._chunks(log, victim))
        more = self._forgot = False
        for log, work in list(self.under_way.items()):
            more |= self._go_on(log, work)
        return more

    # -- the victim --------------------------------------------------------------------------------

    def _victim(self, log: TenantLog) -> Segment | None:
        """Return the sealed segment with the highest worth, the oldest of equals."""
        sealed = [s for s in log.directory.segments if s.state is SegmentState.SEALED]
        mine = [each for each in sealed if self._log.log_of(each) is log]
        return max(mine, key=lambda each: self._worth(log, each), default=None)

    def _worth(self, log: TenantLog, segment: Segment) -> tuple[float, int]:
        """Return benefit by cost, as in Rosenblum and Ousterhout's log-structured file system
        (1992): room won times age, divided by the bytes read and written for it. Only hot blocks
        count as kept.
        """
        table = self._index.segments.get(segment.number)
        share = 0.0
        if table is not None:
            # Only the share that is carried counts: hot blocks beyond it must age like all others,
            # or old favourites would drive out everything new.
            pages = min(table.hot_pages, log.carry_pages)
            share = pages * PAGE_BYTES / segment.directory.segment_bytes
        age = max(1, self._log.next_sequence - segment.head.sequence)
        return ((1 - share) * age / (1 + share), -segment.head.sequence)

    def _chunks(self, log: TenantLog, segment: Segment) -> Iterator[_ReinsertionChunk]:
        """Yield the hot blocks of a segment, the most used first, up to the share that may be
        carried, by family, as many at once as fit into the buffer.
        """
        table = self._index.segments.get(segment.number)
        if table is None:
            return
        heads = table.live_heads()
        hits = table.rows["hits"][heads].astype(np.int64)
        hot = heads[np.argsort(-hits, kind="stable")][: np.count_nonzero(hits)]
        # Their lines in the footer need room, too.
        room = log.carry_pages * 15 // 16
        hot = hot[np.cumsum(disk_pages(table.rows[hot])) <= room]
        for family, mine in self._index.by_family(table, hot):
            fits = REINSERT_BYTES // (pages_of(family.length) * PAGE_BYTES * family.shards)
            fits = min(fits, REINSERT_PAGES // family.shards)
            for start in range(0, len(mine) if fits else 0, max(1, fits)):
                chosen = mine[start : start + fits]
                keys: list[bytes] = table.keys[chosen].tolist()
                yield _ReinsertionChunk(family, keys, (segment.number << 32) + chosen)

    # -- carrying ----------------------------------------------------------------------------------

    def _go_on(self, log: TenantLog, work: _Work) -> bool:
        if work.running:
            return False
        if not work.carried:
            if self._carrying is not None:
                return False
            chunk = next(work.chunks, None)
            share_bytes = log.carry_pages * PAGE_BYTES
            if chunk is not None and self._log.budget.may_carry(share_bytes, self._clock()):
                self._reinsert(log, work, chunk)
                return False
            work.carried = True
        if self._new_offers is not None and not self._offered(work, self._new_offers):
            return False
        number = work.segment.number
        if number in self._index.segments:
            if self._forgot:
                return True  # another log's blocks are enough for this turn
            self._forgot = True
            gone = self._index.forget_some(number, _FORGET_BLOCKS)
            self.evicted += gone
            self._counts.add("evicted_blocks", sum(len(each.keys) for each in gone))
            if number in self._index.segments:
                return True
        if not work.segment.reads and not work.segment.writes:
            del self.under_way[log]
            self._log.release(work.segment)
        return False

    def take_offers(self) -> list[Offer]:
        """Return the offers made since the last call."""
        if not self._new_offers:
            return []
        new, self._new_offers = self._new_offers, []
        return new

    def _offered(self, work: _Work, new: list[Offer]) -> bool:
        """Offer the victim's next used blocks, as many as are carried at once; true once none is
        left. What was offered in one step may be dropped in the next.

        A tier that drains drops nothing: the next run finds the blocks in the segment.
        """
        if self._log.draining:
            return False
        table = self._index.segments.get(work.segment.number)
        while table is not None and work.offered < len(table):
            end = work.offered + _FORGET_BLOCKS
            heads = table.live_heads(work.offered, end)
            size = np.cumsum(disk_pages(table.rows[heads])) * PAGE_BYTES
            fit = max(1, int(np.count_nonzero(size <= REINSERT_BYTES)))
            work.offered = int(heads[fit]) if fit < len(heads) else end
            hot = heads[:fit][table.rows["hits"][heads[:fit]] > 0]
            for family, mine in self._index.by_family(table, hot):
                new.append(Offer(family, table.keys[mine].tolist()))
            if len(hot):
                return False
        return True

    def _reinsert(self, log: TenantLog, work: _Work, chunk: _ReinsertionChunk) -> None:
        family = chunk.family
        # Skip blocks that were unbound or replaced meanwhile.
        now = self._index.find(family.namespace, family.group, chunk.keys)
        same = np.flatnonzero(now == chunk.entries)
        if not len(same):
            return
        keys = [chunk.keys[row] for row in same.tolist()]
        padded = pages_of(family.length) * PAGE_BYTES
        places = np.zeros((len(keys), family.shards), ADDRESS_DTYPE)
        places["region"] = self._region
        places["offset"] = (np.arange(places.size) * padded).reshape(places.shape)
        work.running, self._carrying = True, work
        entries = chunk.entries[same]
        batch = LoadBatch(family, keys, places)
        task = Task(0, batch, lambda t: self._read_in(log, work, t, entries), entries)
        self._transfers.load(task, np.arange(len(keys)), entries)
        task.finish_if_done()

    def _read_in(self, log: TenantLog, work: _Work, task: Task, entries: I64) -> None:
        """Store a chunk that was read."""
        batch = task.batch
        done = task.completion()
        good = done.rows(Done)
        self._tell_doubted(batch, done)
        if not len(good):
            self._carried_out(work)
            return
        family = batch.family
        keys = [batch.keys[row] for row in good.tolist()]
        now = self._index.find(family.namespace, family.group, keys)
        same = now == entries[good]
        good, keys = good[same], [k for k, kept in zip(keys, same.tolist(), strict=True) if kept]
        if not len(good) or self._pages.free < len(good) * family.shards:
            self._carried_out(work)
            return
        rows = self._index.rows(entries[good], family.shards)
        store = StoreBatch(
            family,
            keys,
            batch.places[good],
            np.ascontiguousarray(rows["checksum"]),
            rows["sequence"][:, 0].copy(),
            rows["parent"][:, 0].copy(),
        )
        out = Task(0, store, lambda _: self._carried_out(work), entries[good])
        left = self._transfers.store(log.tenant, out, store, np.arange(len(keys)))
        self._counts.add("carries_without_place", len(left))
        out.resolve(left.tolist(), Throttled(Refusal.FULL))
        out.finish_if_done()

    def _tell_doubted(self, batch: LoadBatch, done: Completion) -> None:
        """Report unreadable blocks, which the index has forgotten, as evicted: the core must know
        that the copies in memory have no copy on SSD any more, and why.
        """
        family = batch.family
        for outcome, rows in done.parts:
            if isinstance(outcome, Done):
                continue
            keys = [batch.keys[row] for row in rows.tolist()]
            gone = self._index.find(family.namespace, family.group, keys) < 0
            lost = [key for key, away in zip(keys, gone.tolist(), strict=True) if away]
            if lost:
                cause = _cause(outcome)
                self.evicted.append(Evicted(family.namespace, family.group, lost, cause))

    def _carried_out(self, work: _Work) -> None:
        work.running, self._carrying = False, None


def _cause(outcome: Outcome) -> str:
    """Return the cause of the loss of a block that was to be carried."""
    match outcome:
        case Corrupt():
            return "checksum"
        case Failed():
            return outcome.reason
        case _:
            return "space"
