"""Reclaims whole segments to make room: carries hot blocks over to the open segment, evicts the
rest.

Each directory has one victim at a time. Its hot blocks (loaded since they were written) are read to
a buffer of the tier, which verifies them, and stored again; all others are evicted. Segments have
blocks of several tenants: blocks that would take a tenant below its floor are carried, too, and the
victim is chosen where least has to be carried and tenants far over their floors lose most. If there
are shared tiers behind this one, the hot blocks are first offered to them. The segment is reused
only when nothing reads it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvhearth.model import I64, Records
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
    TierShares,
)
from kvhearth_server.tiers.ssd.directory import Segment, SegmentState
from kvhearth_server.tiers.ssd.format import PAGE_BYTES, pages_of, record_pages
from kvhearth_server.tiers.ssd.index import SegmentRows, SsdIndex, disk_pages, owner_numbers
from kvhearth_server.tiers.ssd.log import Buffer, HeaderPages, Log, LogDirectory
from kvhearth_server.tiers.ssd.transfers import Task, Transfers

REINSERT_BYTES = 32 << 20
"""Size of the buffer through which blocks are carried; a larger block is not carried. The size
keeps the turns of a segment few: each waits for the drive twice, and new stores wait for the
segment.
"""

_FORGET_BLOCKS = 2048
"""Blocks evicted in one turn of the loop, which reports each of them to the core."""

KEEP_SHARE_MAX = 0.5
"""Largest share of a segment that is carried because tenants are owed it."""

REINSERT_PAGES = 64
"""Header pages kept for carried blocks."""


@dataclass(frozen=True)
class _ReinsertionChunk:
    """Blocks of one family that fit into the buffer together."""

    family: BlockSpec
    keys: list[bytes]
    entries: I64
    owed: bool


class _Balance:
    """Pages by tenant at one moment, and those that reclaiming must leave to each.

    Attributes:
        spare: pages that a tenant has over its floor.
        weight: ``spare`` as a fraction of the greatest one; 1 for blocks that nobody can name.
    """

    def __init__(self, index: SsdIndex, shares: TierShares, capacity_pages: int) -> None:
        self._index, self._shares = index, shares
        self._tenants: dict[int, str] = {}
        used: dict[str, int] = {}
        for table in index.segments.values():
            for tenant, pages in self.by_tenant(table).items():
                used[tenant] = used.get(tenant, 0) + pages
        floors = {each: int(capacity_pages * part) for each, part in shares.floors.items()}
        self.spare = {each: max(0, pages - floors.get(each, 0)) for each, pages in used.items()}
        self.spare[""] = max(1, *self.spare.values(), used.get("", 0))
        self.weight = {each: pages / self.spare[""] for each, pages in self.spare.items()}

    def by_tenant(self, table: SegmentRows) -> dict[str, int]:
        """Return a segment's pages by tenant."""
        found: dict[str, int] = {}
        for number, pages in table.pages.items():
            tenant = self._tenant(number)
            found[tenant] = found.get(tenant, 0) + pages
        return found

    def _tenant(self, number: int) -> str:
        tenant = self._tenants.get(number)
        if tenant is None:
            owner = self._shares.owner_of(*self._index.owner(number))
            tenant = self._tenants[number] = owner
        return tenant

    def owed(self, table: SegmentRows) -> dict[str, int]:
        """Return the pages of a segment that must be carried, by tenant."""
        pairs = self.by_tenant(table).items()
        owed = {each: pages - self.spare.get(each, 0) for each, pages in pairs}
        return {each: pages for each, pages in owed.items() if pages > 0}

    def owed_heads(self, table: SegmentRows, heads: I64) -> I64:
        """Return the blocks that must be carried, the most used and youngest of each tenant."""
        numbers = owner_numbers(table.rows[heads])
        chosen = [np.zeros(0, np.int64)]
        for tenant, pages in self.owed(table).items():
            own = [number for number, each in self._tenants.items() if each == tenant]
            mine = heads[np.isin(numbers, own)]
            mine = mine[np.lexsort((-mine, -table.rows["hits"][mine].astype(np.int64)))]
            sizes = disk_pages(table.rows[mine])
            chosen.append(mine[np.cumsum(sizes) - sizes < pages])
        return np.concatenate(chosen)


_FAMILY = ["family", "epoch", "length", "shards"]


def family_of(index: SsdIndex, name: Records) -> BlockSpec:
    """Return the family of a row's fields ``family``, ``epoch``, ``length`` and ``shards``."""
    namespace, group = index.of_family(int(name["family"]))
    epoch, length, shards = int(name["epoch"]), int(name["length"]), int(name["shards"])
    return BlockSpec(namespace, group, epoch, length, shards)


@dataclass(eq=False)
class _Work:
    """A victim, and its chunks that are yet to be carried.

    ``waiting`` stores a chunk that was read and waits for its place. ``offered`` rows of the
    segment were offered.
    """

    segment: Segment
    chunks: Iterator[_ReinsertionChunk]
    running: bool = False
    carried: bool = False
    waiting: Callable[[], bool] | None = None
    offered: int = 0


class Reclaimer:
    """Reclaims segments of directories that run out of them. Called on the loop only."""

    def __init__(
        self,
        index: SsdIndex,
        log: Log,
        counts: Counts,
        clock: Callable[[], float],
        *,
        offers: bool,
    ) -> None:
        """``offers``: whether shared tiers behind this one take offers."""
        self.buffer = Buffer(REINSERT_BYTES)
        self._index, self._log, self._counts = index, log, counts
        self._clock = clock
        self._work: dict[LogDirectory, _Work] = {}
        self._carrying: _Work | None = None
        self._forgot = False
        self.evicted: list[Evicted] = []
        self._transfers: Transfers | None = None
        self._pages: HeaderPages | None = None
        self._region = 0
        self._new_offers: list[Offer] | None = [] if offers else None
        self._shares: TierShares | None = None

    def use(self, transfers: Transfers, pages: HeaderPages, region: int) -> None:
        """Set the parts to carry with. ``region``: number of the buffer in ``transfers``."""
        self._transfers, self._pages, self._region = transfers, pages, region

    def use_shares(self, shares: TierShares) -> None:
        """Leave each tenant its floor from now on. One tenant alone needs none."""
        self._shares = shares if len(shares.floors) > 1 else None
        most = min(KEEP_SHARE_MAX, sum(shares.floors.values())) if self._shares else 0.0
        for log_dir in self._log.log_dirs:
            log_dir.keep_share = most

    @property
    def capacity_pages(self) -> int:
        """Pages of all segments that there may be."""
        return sum(
            log_dir.count_max * (log_dir.directory.segment_bytes // PAGE_BYTES)
            for log_dir in self._log.log_dirs
        )

    def _balance(self) -> _Balance | None:
        """Return the balance of the tenants now; None where they share nothing."""
        shares = self._shares
        return _Balance(self._index, shares, self.capacity_pages) if shares else None

    @property
    def busy(self) -> bool:
        """Whether a block is being carried."""
        return self._carrying is not None

    def tick(self) -> bool:
        """Reclaim wherever a directory has run out of segments. True if more is to be done."""
        for log_dir in self._log.log_dirs:
            if (
                log_dir not in self._work
                and not self._log.draining
                and log_dir.needs_reclaim(self._clock())
            ):
                victim = self._victim(log_dir)
                if victim is not None:
                    victim.state = SegmentState.RECLAIMING
                    self._work[log_dir] = _Work(victim, self._chunks(log_dir, victim))
        more = self._forgot = False
        for log_dir, work in list(self._work.items()):
            more |= self._go_on(log_dir, work)
        return more

    # -- the victim --------------------------------------------------------------------------------

    def _victim(self, log_dir: LogDirectory) -> Segment | None:
        """Return the sealed segment with the highest worth, the oldest of equals."""
        sealed = [s for s in log_dir.directory.segments if s.state is SegmentState.SEALED]
        balance = self._balance()
        if balance is None:
            return max(sealed, key=lambda each: self._worth(log_dir, each), default=None)
        return max(sealed, key=lambda s: self._shared_worth(log_dir, s, balance), default=None)

    def _shared_worth(
        self, log_dir: LogDirectory, segment: Segment, balance: _Balance
    ) -> tuple[bool, float, int]:
        """Return the worth as ``_worth`` does, for a segment with blocks of several tenants.

        A segment that owes more than can be carried comes last. Room won counts by how far the
        tenant that loses it is over its floor.
        """
        table = self._index.segments.get(segment.number)
        whole = segment.directory.segment_bytes // PAGE_BYTES
        age = max(1, self._log.next_sequence - segment.head.sequence)
        if table is None:
            return True, float(age), -segment.head.sequence
        pages, owed = balance.by_tenant(table), balance.owed(table)
        kept = sum(owed.values())
        won = float(whole - sum(pages.values()))
        weight = balance.weight
        won += sum((n - owed.get(each, 0)) * weight.get(each, 1.0) for each, n in pages.items())
        hot = min(table.hot_pages, log_dir.carry_pages)
        carried = min(1.0, max(kept, hot) / whole)
        fits = kept <= _footed(log_dir.keep_pages)
        return fits, won / whole * age / (1 + carried), -segment.head.sequence

    def _worth(self, log_dir: LogDirectory, segment: Segment) -> tuple[float, int]:
        """Return benefit by cost, as in Rosenblum and Ousterhout's log-structured file system
        (1992): room won times age, divided by the bytes read and written for it. Only hot blocks
        count as kept.
        """
        table = self._index.segments.get(segment.number)
        share = 0.0
        if table is not None:
            # Only the share that is carried counts: hot blocks beyond it must age like all others,
            # or old favourites would drive out everything new.
            pages = min(table.hot_pages, log_dir.carry_pages)
            share = pages * PAGE_BYTES / segment.directory.segment_bytes
        age = max(1, self._log.next_sequence - segment.head.sequence)
        return ((1 - share) * age / (1 + share), -segment.head.sequence)

    def _chunks(self, log_dir: LogDirectory, segment: Segment) -> Iterator[_ReinsertionChunk]:
        """Yield the blocks of a segment that are owed to their tenants, then its hot blocks, the
        most used first, each up to the share that may be carried.
        """
        table = self._index.segments.get(segment.number)
        if table is None:
            return
        heads = table.live_heads()
        hits = table.rows["hits"][heads].astype(np.int64)
        hot = heads[np.argsort(-hits, kind="stable")][: np.count_nonzero(hits)]
        balance = self._balance()
        owed = heads[:0] if balance is None else balance.owed_heads(table, heads)
        owed = owed[np.cumsum(disk_pages(table.rows[owed])) <= _footed(log_dir.keep_pages)]
        if len(owed):
            hot = hot[~np.isin(hot, owed)]
        room = _footed(log_dir.carry_pages) - int(disk_pages(table.rows[owed]).sum())
        hot = hot[np.cumsum(disk_pages(table.rows[hot])) <= room]
        yield from self._alike(segment, table, owed, owed=True)
        yield from self._alike(segment, table, hot, owed=False)

    def _alike(
        self, segment: Segment, table: SegmentRows, heads: I64, *, owed: bool
    ) -> Iterator[_ReinsertionChunk]:
        """Yield blocks of a segment by family, as many at once as fit into the buffer."""
        names = table.rows[_FAMILY][heads]
        # Sorting takes ten times as long, and the blocks are mostly alike.
        alike = names[:1] if (names == names[:1]).all() else np.unique(names)
        for name in alike:
            mine = heads[names == name]
            family = family_of(self._index, name)
            fits = REINSERT_BYTES // (pages_of(family.length) * PAGE_BYTES * family.shards)
            fits = min(fits, REINSERT_PAGES // family.shards)
            for start in range(0, len(mine) if fits else 0, max(1, fits)):
                chosen = mine[start : start + fits]
                keys: list[bytes] = table.keys[chosen].tolist()
                yield _ReinsertionChunk(family, keys, (segment.number << 32) + chosen, owed)

    # -- carrying ----------------------------------------------------------------------------------

    def _go_on(self, log_dir: LogDirectory, work: _Work) -> bool:
        if work.running:
            if work.waiting is not None and work.waiting():
                work.waiting = None
            return False
        if not work.carried:
            if self._carrying is not None:
                return False
            chunk = next(work.chunks, None)
            may_carry = self._log.wear.may_carry(log_dir.carry_pages * PAGE_BYTES)
            # What is owed is carried in any case; new blocks pay for it.
            if chunk is not None and (chunk.owed or may_carry):
                self._reinsert(work, chunk)
                return False
            work.carried = True
        if self._new_offers is not None and not self._offered(work, self._new_offers):
            return False
        number = work.segment.number
        if number in self._index.segments:
            if self._forgot:
                return True  # another directory's blocks are enough for this turn
            self._forgot = True
            gone = self._index.forget_some(number, _FORGET_BLOCKS)
            self.evicted += gone
            self._counts.add("evicted_blocks", sum(len(each.keys) for each in gone))
            if number in self._index.segments:
                return True
        if not work.segment.reads and not work.segment.writes:
            del self._work[log_dir]
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
            found: dict[BlockSpec, list[bytes]] = {}
            self._index.gather(table, hot, found)
            new += [Offer(family, keys) for family, keys in found.items()]
            if found:
                return False
        return True

    def _reinsert(self, work: _Work, chunk: _ReinsertionChunk) -> None:
        transfers = self._transfers
        if transfers is None:
            return
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
        task = Task(0, batch, lambda t: self._read_in(work, t, entries, chunk.owed), entries)
        transfers.load(task, np.arange(len(keys)), entries)
        task.finish_if_done()

    def _read_in(self, work: _Work, task: Task, entries: I64, owed: bool) -> None:
        """Store a chunk that was read; one that is owed waits for a place if one is coming."""
        family = task.batch.family
        pages = record_pages(family.length) * family.shards

        def store() -> bool:
            if owed and self._log.place_is_coming(pages, family.shards):
                return False
            self._carried_in(work, task, entries)
            return True

        if not store():
            work.waiting = store

    def _carried_in(self, work: _Work, task: Task, entries: I64) -> None:
        transfers, pages, batch = self._transfers, self._pages, task.batch
        done = task.completion()
        good = done.rows(Done)
        self._tell_doubted(batch, done)
        if transfers is None or pages is None or not len(good):
            self._carried_out(work)
            return
        family = batch.family
        keys = [batch.keys[row] for row in good.tolist()]
        now = self._index.find(family.namespace, family.group, keys)
        same = now == entries[good]
        good, keys = good[same], [k for k, kept in zip(keys, same.tolist(), strict=True) if kept]
        if not len(good) or pages.free < len(good) * family.shards:
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
        left = transfers.store(out, store, np.arange(len(keys)))
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


def _footed(pages: int) -> int:
    """Return the pages that blocks may take of ``pages``: their lines in the footer need room."""
    return pages * 15 // 16


def _cause(outcome: Outcome) -> str:
    """Return the cause of the loss of a block that was to be carried."""
    match outcome:
        case Corrupt():
            return "checksum"
        case Failed():
            return outcome.reason
        case _:
            return "space"
