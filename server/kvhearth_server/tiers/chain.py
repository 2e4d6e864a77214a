"""An ordered list of tiers, cheapest first, that acts as one tier (docs/adr/0017).

Stores go to the first tier, unless it is shared: blocks are published to shared tiers, which are
behind all others. A load reads each block from the first tier that has it, and falls to the next
one where a read fails. A block that a tier drops to make room is demoted to the tier behind it:
read into a buffer, which verifies it, and stored from there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from kvhearth.model import I64, U8
from kvhearth_server.tiers.base import (
    ADDRESS_DTYPE,
    BlockSpec,
    Completion,
    Corrupt,
    Done,
    Evicted,
    Facts,
    Failed,
    Identify,
    Kind,
    Known,
    LoadBatch,
    Missing,
    Offer,
    Outcome,
    Refusal,
    StoreBatch,
    TenantUse,
    Throttled,
    Tier,
    TierShares,
    gather,
)
from kvhearth_server.tiers.figures import RemoteFigures, TierFigures

DEMOTION_BYTES = 32 << 20
"""Size of the buffer through which blocks are demoted; a larger block is not demoted."""
DEMOTION_S = 2.0
"""Time after which a demotion that a busy tier keeps refusing is given up."""
PAUSE_S = 10.0
"""Time for which nothing is demoted after that: stores wait for the room."""
_PAGE_BYTES = 4096
_BUSY = frozenset({Refusal.QUEUE, Refusal.FULL})
"""Reasons for refusing a batch that is probably accepted in a moment."""


@dataclass(eq=False)
class _Load:
    """A load that parts of the chain work on.

    Attributes:
        facts: facts that the caller knows.
        outcomes: outcome of each row as far as is known.
        corrupt: rows that some tier had wrong bytes of.
        read, parent_keys: facts and keys as read from shared tiers, None and empty for none.
        reading: number of tiers that read rows of it now.
        ends_at: monotonic seconds until which somebody waits for the blocks.
    """

    ticket: int
    batch: LoadBatch
    facts: Facts
    outcomes: list[Outcome]
    ends_at: float
    corrupt: set[int] = field(default_factory=set)
    read: Facts | None = None
    parent_keys: list[bytes] = field(default_factory=list)
    reading: int = 0
    cancelled: bool = False


@dataclass(eq=False)
class _Demotion:
    """Blocks on their way from tier ``upper`` to the next one: a load, later a store.

    ``facts`` (n,) are the upper tier's. ``running``: a tier has the batch now; ``stuck``: its
    device holds on to it.
    """

    upper: int
    batch: LoadBatch
    facts: Facts
    end: float
    running: bool = False
    stuck: bool = False


class TierChain(Tier):
    """Several tiers as one.

    Args:
        tiers: one or more, cheapest first, shared ones last; ``close`` closes them.
        region: number of the region of ``DEMOTION_BYTES`` through which blocks are demoted.
        is_current: tells whether a lookup could still name the blocks of a family; blocks of other
            families are not demoted.
        clock: monotonic seconds.
    """

    name = "chain"

    def __init__(
        self,
        tiers: Sequence[Tier],
        region: int,
        is_current: Callable[[BlockSpec], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = list(tiers)
        self._local_count = sum(not tier.shared for tier in tiers)
        self._region, self._is_current, self._clock = region, is_current, clock
        self.counts = self._tiers[0].counts
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events = select.epoll()
        for descriptor in (self._wake, *(tier.event_fd for tier in self._tiers)):
            self._events.register(descriptor, select.EPOLLIN)
        self.event_fd = self._events.fileno()
        self._next_ticket = 1
        self._ended: dict[tuple[int, int], Callable[[Completion], None]] = {}
        """Handlers of completions, by the tier's number and its ticket."""
        self._parts: dict[int, set[tuple[int, int]]] = {}
        """The tiers' numbers and tickets that work on a ticket of the chain."""
        self._loads: dict[int, _Load] = {}
        self._completions: list[Completion] = []
        self._evicted: list[Evicted] = []
        self._offers: deque[tuple[Offer, Iterator[_Demotion]]] = deque()
        self._leaving: list[Offer] = []
        self._demotion: _Demotion | None = None
        self._demotions = 0
        self._open_at = 0.0

    @property
    def batch_blocks_max(self) -> int:
        return min(tier.batch_blocks_max for tier in self._tiers)

    @property
    def queue_reads(self) -> int:
        return min(tier.queue_reads for tier in self._tiers)

    @property
    def queue_writes(self) -> int:
        return self._tiers[0].queue_writes

    @property
    def shared(self) -> bool:
        return not self._local_count

    @property
    def life_s(self) -> float:
        """Shortest life of a block in a shared tier, in seconds; 0 if it has no end in any."""
        return min(filter(None, (tier.life_s for tier in self._tiers)), default=0.0)

    @property
    def buffer_bytes(self) -> int:
        shared = self._tiers[self._local_count :]
        return min((tier.buffer_bytes for tier in shared), default=0)

    @property
    def serving(self) -> bool:
        """Whether any shared tier answers requests now."""
        return any(tier.serving for tier in self._tiers[self._local_count :])

    # -- batches -----------------------------------------------------------------------------------

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        inner = self._tiers[0].submit_store(batch)
        if isinstance(inner, Throttled):
            return inner
        ticket = self._new_ticket()

        def ended(done: Completion) -> None:
            self._completions.append(Completion(ticket, done.parts, done.final))

        self._expect(0, inner, ticket, ended)
        return ticket

    def publish(self, batch: StoreBatch) -> int | Throttled:
        """Begin to store a batch in all shared tiers; see ``submit_store``. A block is ``Done`` if
        one of them has it. Refused only if all of them refuse.
        """
        inner = [
            (number, self._tiers[number].submit_store(batch))
            for number in range(self._local_count, len(self._tiers))
        ]
        taken = [(number, each) for number, each in inner if not isinstance(each, Throttled)]
        if not taken:
            return next(each for _, each in inner if isinstance(each, Throttled))
        ticket, left, copying = self._new_ticket(), len(taken), {each for each, _ in taken}
        outcomes: list[Outcome] = [Missing()] * len(batch.keys)

        def ended(number: int, done: Completion) -> None:
            nonlocal left
            left -= done.final
            if number in copying and (done.final or done.released):
                copying.discard(number)
                if not copying and left:
                    self._completions.append(Completion(ticket, [], final=False, released=True))
            for outcome, rows in done.parts if done.final else ():
                _note(outcomes, rows, outcome)
            if not left:
                self._completions.append(Completion(ticket, gather(outcomes)))

        for number, each in taken:
            self._expect(number, each, ticket, partial(ended, number))
        return ticket

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        facts = self.look_up(batch.family, batch.keys)
        ends_at = self._clock() + batch.wait_s
        missing: list[Outcome] = [Missing()] * len(batch.keys)
        load = _Load(self._new_ticket(), batch, facts, missing, ends_at)
        self._read(load, np.arange(len(batch.keys)), 0)
        if not load.reading:
            refused = next((each for each in load.outcomes if isinstance(each, Throttled)), None)
            if refused is not None:
                return refused
        self._loads[load.ticket] = load
        self._end_if_read(load)
        return load.ticket

    def _read(self, load: _Load, rows: I64, first: int) -> None:
        """Read rows from the tiers from ``first`` on, each from the first one that has it."""
        for number in range(first, len(self._tiers)):
            if len(rows):
                rows = self._read_from(number, load, rows)

    def _read_from(self, number: int, load: _Load, rows: I64) -> I64:
        """Read rows from a tier; return those that it does not have or does not accept."""
        tier, batch = self._tiers[number], load.batch
        found = tier.look_up(batch.family, [batch.keys[row] for row in rows.tolist()])
        # The caller knows one checksum of each block, and another copy may have other bytes.
        if tier.shared:  # its checksums come with the bytes
            same = found.present if found.asking is None else found.present | found.asking
        else:
            same = found.present & (found.checksums == load.facts.checksums[rows]).all(axis=1)
            if number == 0 and self._local_count == len(self._tiers):
                same |= ~load.facts.present[rows]  # the first tier answers for what none has
        mine = rows[same]
        if not len(mine):
            return rows
        keys = [batch.keys[row] for row in mine.tolist()]
        wait_s = load.ends_at - self._clock()
        part = LoadBatch(batch.family, keys, batch.places[mine], is_use=batch.is_use, wait_s=wait_s)
        ticket = tier.submit_load(part)
        if isinstance(ticket, Throttled):
            _note(load.outcomes, mine, ticket)
            return rows
        load.reading += 1
        self._expect(
            number, ticket, load.ticket, lambda done: self._was_read(number, load, mine, done)
        )
        left: I64 = rows[~same]
        return left

    def _was_read(self, number: int, load: _Load, rows: I64, done: Completion) -> None:
        """Record a tier's outcomes; read from the next tier what it could not read."""
        if not done.final:
            parts = [(outcome, rows[some]) for outcome, some in done.parts]
            self._completions.append(Completion(load.ticket, parts, final=False))
            return
        load.reading -= 1
        self._learn(load, rows, done)
        for outcome, some in done.parts:
            _note(load.outcomes, rows[some], outcome)
            if isinstance(outcome, Corrupt) and outcome.where != "remote":
                load.corrupt.update(rows[some].tolist())
            if not isinstance(outcome, Done) and not load.cancelled:
                self._read(load, rows[some], number + 1)
        self._end_if_read(load)

    def _learn(self, load: _Load, rows: I64, done: Completion) -> None:
        """Take over the facts that came with the blocks of a shared tier."""
        if done.facts is None:
            return
        count = len(load.batch.keys)
        if load.read is None:
            load.read, load.parent_keys = Facts.none(load.batch.family, count), [b""] * count
        for row in np.flatnonzero(done.facts.present).tolist():
            load.read.present[rows[row]] = True
            load.read.checksums[rows[row]] = done.facts.checksums[row]
            load.parent_keys[rows[row]] = done.parent_keys[row] if done.parent_keys else b""

    def _end_if_read(self, load: _Load) -> None:
        if load.reading:
            return
        del self._loads[load.ticket]
        hidden = [
            row for row in sorted(load.corrupt) if not isinstance(load.outcomes[row], Corrupt)
        ]
        if hidden:
            # Another tier had the right bytes: the caller learns of the wrong ones only this way.
            keys = [load.batch.keys[row] for row in hidden]
            family = load.batch.family
            self._evicted.append(Evicted(family.namespace, family.group, keys, "checksum"))
        self._completions.append(
            Completion(
                load.ticket, gather(load.outcomes), facts=load.read, parent_keys=load.parent_keys
            )
        )
        self._signal()

    def cancel(self, ticket: int) -> None:
        if (load := self._loads.get(ticket)) is not None:
            load.cancelled = True
        for number, inner in self._parts.get(ticket, ()):
            self._tiers[number].cancel(inner)

    def poll(self) -> list[Completion]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for number, tier in enumerate(self._tiers):
            for done in tier.poll():
                self._ended[number, done.ticket](done)
            for offer in tier.take_offers():
                if number + 1 == self._local_count:
                    # The tier drops them at its next step: a read that has begun by then ends.
                    offer.settled = True
                    self._leaving.append(offer)
                    continue
                self._offers.append((offer, self._demotions_of(number, offer)))
        while self._demote():
            pass
        completions, self._completions = self._completions, []
        return completions

    def take_leaving(self) -> list[Offer]:
        """Return the hot blocks that the last of the tiers that are not shared drops at the next
        ``poll``; loads that begin before it can still read them.
        """
        leaving, self._leaving = self._leaving, []
        return leaving

    def _expect(
        self, number: int, inner: int, ticket: int, ended: Callable[[Completion], None]
    ) -> None:
        """Call ``ended`` with each completion of tier ``number``'s ticket ``inner``."""

        def done(completion: Completion) -> None:
            if completion.final:
                del self._ended[number, inner]
                parts = self._parts[ticket]
                parts.discard((number, inner))
                if not parts:
                    del self._parts[ticket]
            ended(completion)

        self._ended[number, inner] = done
        self._parts.setdefault(ticket, set()).add((number, inner))

    def _new_ticket(self) -> int:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        return ticket

    def _signal(self) -> None:
        os.eventfd_write(self._wake, 1)

    # -- demotion ----------------------------------------------------------------------------------

    def _demotions_of(self, upper: int, offer: Offer) -> Iterator[_Demotion]:
        """Yield the offered blocks that the next tier lacks, as many at once as fit the buffer."""
        family, tier = offer.family, self._tiers[upper]
        if upper + 1 >= self._local_count or not self._is_current(family):
            return
        lower = self._tiers[upper + 1]
        padded = -(-family.length // _PAGE_BYTES) * _PAGE_BYTES
        count = min(
            DEMOTION_BYTES // (padded * family.shards),
            tier.batch_blocks_max,
            lower.batch_blocks_max,
            tier.queue_reads // (2 * family.shards),
            lower.queue_writes // (2 * family.shards),
        )
        for start in range(0, len(offer.keys) if count else 0, max(1, count)):
            if self._clock() < self._open_at:
                return
            keys = offer.keys[start : start + count]
            wanted = tier.look_up(family, keys).present & ~lower.look_up(family, keys).present
            keys = [keys[row] for row in np.flatnonzero(wanted).tolist()]
            if keys:
                places = np.zeros((len(keys), family.shards), ADDRESS_DTYPE)
                places["region"] = self._region
                places["offset"] = (np.arange(places.size) * padded).reshape(places.shape)
                batch = LoadBatch(family, keys, places, is_use=False)
                end = self._clock() + DEMOTION_S
                yield _Demotion(upper, batch, tier.look_up(family, keys), end)

    def _demote(self) -> bool:
        """Take one step of demoting offered blocks, a batch at a time; false if none can be."""
        demotion = self._demotion
        if demotion is not None and not demotion.running:
            return self._submit(demotion)
        if not self._offers or (demotion is not None and not demotion.stuck):
            return False
        offer, demotions = self._offers[0]
        if demotion is None:
            self._demotion = next(demotions, None)
        if self._demotion is demotion:  # none is left, or the buffer cannot be had
            self._offers.popleft()
            offer.settled = True
            self._signal()  # the tier may go on
        return True

    def _submit(self, demotion: _Demotion) -> bool:
        """Submit a demotion's next batch; false if the tier is busy."""
        batch, upper = demotion.batch, demotion.upper
        if isinstance(batch, StoreBatch):
            number, ticket = upper + 1, self._tiers[upper + 1].submit_store(batch)
        else:
            number, ticket = upper, self._tiers[upper].submit_load(batch)
        if isinstance(ticket, Throttled):
            now = self._clock()
            if ticket.reason in _BUSY and now < demotion.end:
                return False
            self._open_at = now + max(PAUSE_S, ticket.retry_after_s)
            self._count(demotion, 0)
            self._demotion = None
            return True
        demotion.running = True
        self._expect(number, ticket, self._new_ticket(), self._demoted)
        return True

    def _demoted(self, done: Completion) -> None:
        """Go on when a tier has ended a demotion's load or store."""
        demotion = self._demotion
        if demotion is None:
            return
        demotion.running, demotion.stuck = not done.final, not done.final
        if not done.final:
            return
        good, batch = done.rows(Done), demotion.batch
        if isinstance(batch, StoreBatch):
            self._count(demotion, len(good))
            self._demotions += 1
            self._demotion = None
            return
        self._publish_removed(demotion.upper, batch, done)
        if not len(good):
            self._demotion = None
            return
        facts = demotion.facts
        demotion.batch = StoreBatch(
            batch.family,
            [batch.keys[row] for row in good.tolist()],
            batch.places[good],
            np.ascontiguousarray(facts.checksums[good]),
            facts.sequences[good],
            facts.parents[good],
        )

    def _count(self, demotion: _Demotion, demoted: int) -> None:
        counts = self._tiers[demotion.upper].counts
        counts.add("demoted_blocks", demoted)
        counts.add("demotions_refused", len(demotion.batch.keys) - demoted)

    def _publish_removed(self, upper: int, batch: LoadBatch, done: Completion) -> None:
        """Report blocks that the upper tier could not read and forgot."""
        for outcome, rows in done.parts:
            if not isinstance(outcome, Corrupt | Failed):
                continue
            keys = [batch.keys[row] for row in rows.tolist()]
            gone = ~self._tiers[upper].look_up(batch.family, keys).present
            lost = [key for key, away in zip(keys, gone.tolist(), strict=True) if away]
            if lost:
                cause = "checksum" if isinstance(outcome, Corrupt) else outcome.reason
                self._evicted.append(
                    Evicted(batch.family.namespace, batch.family.group, lost, cause)
                )

    # -- lookup, removal ---------------------------------------------------------------------------

    def look_up(self, family: BlockSpec, keys: Sequence[bytes]) -> Facts:
        """Return the facts of blocks in the tiers that are not shared."""
        return self._look_up(self._local_count, family, keys)

    def ask(self, family: BlockSpec, keys: Sequence[bytes], window: int = 0) -> Known:
        """Return what the shared tiers know of a chain's blocks. They are asked in order, each
        about what the ones before do not have.
        """
        first, *others = self._tiers[self._local_count :]
        present, asking = first.ask(family, keys, window)
        for tier in others:
            absent = ~present if asking is None else ~(present | asking)
            rows = np.flatnonzero(absent)
            if not len(rows):
                break
            found = tier.ask(family, [keys[row] for row in rows.tolist()], window)
            present[rows] = found.present
            if found.asking is not None:
                asking = np.zeros(len(keys), np.bool_) if asking is None else asking
                asking[rows] = found.asking
        return Known(present, asking)

    def _look_up(self, count: int, family: BlockSpec, keys: Sequence[bytes]) -> Facts:
        """Return the facts of blocks in the first ``count`` tiers."""
        if not count:
            return Facts.none(family, len(keys))
        facts = self._tiers[0].look_up(family, keys)
        for tier in self._tiers[1:count]:
            absent = np.flatnonzero(~facts.present)
            if not len(absent):
                break
            found = tier.look_up(family, [keys[row] for row in absent.tolist()])
            facts.present[absent] = found.present
            facts.checksums[absent] = found.checksums
            facts.sequences[absent] = found.sequences
            facts.parents[absent] = found.parents
        return facts

    def walk(self, cursor: int, count: int) -> tuple[int, list[tuple[BlockSpec, list[bytes]]]]:
        """Take one step through all blocks, tier by tier: see ``Tier.walk``. A block that a cheaper
        tier has too is left out.
        """
        inner, number = divmod(cursor, len(self._tiers))
        inner, found = self._tiers[number].walk(inner, count)
        if number:
            cheaper = self._tiers[:number]
            found = [(family, _absent(cheaper, family, keys)) for family, keys in found]
        if inner:
            return inner * len(self._tiers) + number, found
        return (number + 1) % len(self._tiers), found

    def forget(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> int:
        """Stop serving these keys; return how many copies there were."""
        return sum(tier.forget(namespace, group, keys) for tier in self._tiers)

    def forget_namespace(self, namespace: bytes, count: int) -> Evicted | None:
        found = (tier.forget_namespace(namespace, count) for tier in self._tiers)
        return next((each for each in found if each is not None), None)

    def take_evicted(self) -> list[Evicted]:
        """Return the blocks that tiers dropped; another tier may still have them."""
        evicted, self._evicted = self._evicted, []
        for tier in self._tiers:
            evicted += tier.take_evicted()
        return evicted

    # -- shares ------------------------------------------------------------------------------------

    def use_shares(self, shares: TierShares, bytes_per_day: int | None = None) -> None:
        for tier in self._tiers:
            tier.use_shares(shares, bytes_per_day)

    def use_identities(self, identify: Identify) -> None:
        for tier in self._tiers:
            tier.use_identities(identify)

    def tenants_use(self, tenants: Sequence[str]) -> Mapping[str, TenantUse]:
        return next(filter(None, (tier.tenants_use(tenants) for tier in self._tiers)), {})

    # -- status ------------------------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        return sum(tier.blocks for tier in self._tiers)

    @property
    def recovering(self) -> bool:
        return any(tier.recovering for tier in self._tiers)

    @property
    def loads_of_the_dead(self) -> bool:
        return any(tier.loads_of_the_dead for tier in self._tiers)

    @property
    def progress(self) -> tuple[int, ...]:
        return (self._demotions, *(step for tier in self._tiers for step in tier.progress))

    @property
    def broken(self) -> str:
        reasons = [tier.broken for tier in self._tiers]
        return "; ".join(reasons) if all(reasons) else ""

    @property
    def directories(self) -> list[Path]:
        return [path for tier in self._tiers for path in tier.directories]

    def estimate_s(self, loads: Sequence[tuple[BlockSpec, int]], waiting: int = 0) -> float:
        """Estimate for the first tier; for a shared one, see ``shared_estimate_s``."""
        return self._tiers[0].estimate_s(loads, waiting)

    def shared_estimate_s(self, loads: Sequence[tuple[BlockSpec, int]]) -> float:
        """Estimate the seconds that loading from the slowest shared tier would take."""
        shared = self._tiers[self._local_count :]
        return max((tier.estimate_s(loads) for tier in shared), default=0.0)

    def problems(self) -> Mapping[Kind, str]:
        return {kind: message for tier in self._tiers for kind, message in tier.problems().items()}

    def figures(self) -> TierFigures | None:
        return next(filter(None, (tier.figures() for tier in self._tiers)), None)

    def remote_figures(self) -> list[RemoteFigures]:
        return [figures for tier in self._tiers for figures in tier.remote_figures()]

    # -- the end -----------------------------------------------------------------------------------

    def drain(self, deadline_s: float) -> bool:
        end = self._clock() + deadline_s
        drained = [tier.drain(max(0.0, end - self._clock())) for tier in self._tiers]
        return all(drained)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()
        if not self._events.closed:
            self._events.close()
            os.close(self._wake)


def demotion_region() -> U8:
    """Return memory to demote through, ``DEMOTION_BYTES`` long and aligned to pages."""
    return np.frombuffer(mmap.mmap(-1, DEMOTION_BYTES), np.uint8)


def _note(outcomes: list[Outcome], rows: I64, outcome: Outcome) -> None:
    """Record an outcome of rows; success replaces a failure, and that replaces ``Missing``."""
    for row in rows.tolist():
        if isinstance(outcome, Done) or isinstance(outcomes[row], Missing):
            outcomes[row] = outcome


def _absent(tiers: Sequence[Tier], family: BlockSpec, keys: list[bytes]) -> list[bytes]:
    for tier in tiers:
        gone = ~tier.look_up(family, keys).present
        keys = [key for key, away in zip(keys, gone.tolist(), strict=True) if away]
    return keys
