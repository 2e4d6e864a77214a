"""The daemon's own tier, if it has one, and the remote behind it act as one tier (docs/adr/0017).

Stores go to the daemon's own tier; blocks are published to the remote. A load reads each block
from the first tier that has it, and falls to the remote where a read fails.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvhearth.model import I64
from kvhearth_server.tiers.base import (
    BlockSpec,
    Completion,
    Corrupt,
    Done,
    Evicted,
    Facts,
    Kind,
    LoadBatch,
    Missing,
    Offer,
    Outcome,
    StoreBatch,
    Throttled,
    Tier,
    gather,
)


@dataclass(eq=False)
class _Load:
    """A load that parts of the chain work on.

    Attributes:
        outcomes: outcome of each row as far as is known.
        corrupt: rows that some tier had wrong bytes of.
        read, parent_keys: facts and keys as read from the remote, None and empty for none.
        reading: number of tiers that read rows of it now.
        ends_at: monotonic seconds until which somebody waits for the blocks.
    """

    ticket: int
    batch: LoadBatch
    outcomes: list[Outcome]
    ends_at: float
    corrupt: set[int] = field(default_factory=set)
    read: Facts | None = None
    parent_keys: list[bytes] = field(default_factory=list)
    reading: int = 0
    cancelled: bool = False


class TierChain(Tier):
    """A tier and a remote, or a remote alone, as one.

    Args:
        tiers: at most one that is not shared, then one that is; ``close`` closes them.
        clock: monotonic seconds.

    Attributes:
        remote: the one that is shared.
    """

    name = "chain"

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float] = time.monotonic) -> None:
        self._tiers = list(tiers)
        *self._local, self.remote = tiers
        self._clock = clock
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
        self._leaving: list[Offer] = []

    @property
    def batch_blocks_max(self) -> int:
        return min(tier.batch_blocks_max for tier in self._tiers)

    @property
    def due_at(self) -> float:
        return min(tier.due_at for tier in self._tiers)

    @property
    def queue_reads(self) -> int:
        return min(tier.queue_reads for tier in self._tiers)

    @property
    def queue_writes(self) -> int:
        return self._tiers[0].queue_writes

    @property
    def shared(self) -> bool:
        return not self._local

    # -- batches -----------------------------------------------------------------------------------

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        return self._store(0, batch)

    def publish(self, batch: StoreBatch) -> int | Throttled:
        """Begin to store a batch at the remote; see ``submit_store``."""
        return self._store(len(self._local), batch)

    def _store(self, number: int, batch: StoreBatch) -> int | Throttled:
        inner = self._tiers[number].submit_store(batch)
        if isinstance(inner, Throttled):
            return inner
        ticket = self._new_ticket()

        def ended(done: Completion) -> None:
            self._completions.append(Completion(ticket, done.parts, done.final))

        self._expect(number, inner, ticket, ended)
        return ticket

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        ends_at = self._clock() + batch.wait_s
        missing: list[Outcome] = [Missing()] * len(batch.keys)
        load = _Load(self._new_ticket(), batch, missing, ends_at)
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
        there = tier.look_up(batch.family, [batch.keys[row] for row in rows.tolist()]).present
        mine = rows[there]
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
        left: I64 = rows[~there]
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
        """Take over the facts that came with the blocks of the remote."""
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
            self._leaving += tier.take_offers()
        completions, self._completions = self._completions, []
        return completions

    def take_leaving(self) -> list[Offer]:
        """Return the hot blocks that the daemon's own tier drops at the next ``poll``; loads that
        begin before it can still read them.
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

    # -- lookup, removal ---------------------------------------------------------------------------

    def look_up(self, family: BlockSpec, keys: Sequence[bytes]) -> Facts:
        """Return the facts of blocks in the daemon's own tier."""
        if not self._local:
            return Facts.none(family, len(keys))
        return self._local[0].look_up(family, keys)

    def list_keys(
        self, namespace: bytes, group: int, place: int, count: int
    ) -> tuple[list[bytes], int]:
        """List keys of the daemon's own tier."""
        return self._tiers[0].list_keys(namespace, group, place, count)

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

    # -- status ------------------------------------------------------------------------------------

    @property
    def recovering(self) -> bool:
        return any(tier.recovering for tier in self._tiers)

    @property
    def loads_of_the_dead(self) -> bool:
        return any(tier.loads_of_the_dead for tier in self._tiers)

    @property
    def progress(self) -> tuple[int, ...]:
        return tuple(step for tier in self._tiers for step in tier.progress)

    def estimate_s(self, loads: Sequence[tuple[BlockSpec, int]], waiting: int = 0) -> float:
        """Estimate for the first tier."""
        return self._tiers[0].estimate_s(loads, waiting)

    def problems(self) -> Mapping[Kind, str]:
        return {kind: message for tier in self._tiers for kind, message in tier.problems().items()}

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


def _note(outcomes: list[Outcome], rows: I64, outcome: Outcome) -> None:
    """Record an outcome of rows; success replaces a failure, and that replaces ``Missing``."""
    for row in rows.tolist():
        if isinstance(outcome, Done) or isinstance(outcomes[row], Missing):
            outcomes[row] = outcome
