"""Blocks that wait to be copied to a slower tier, and what became of those that did.

Every block that becomes servable is offered once. Eviction takes only what is saved or was refused:
a block that still waits keeps its room, and whoever wants to reserve it is told that there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from kvhearth.model import I64, U32
from kvhearth_server.core.slot_table import CopyState, SlotTable, State

_SUMMED = int(State.SUMMED)
_SAVED = int(CopyState.SAVED)
_RUN = 1024
"""Blocks in one entry of the queue: each look at an entry costs its length."""


class WritebackQueue:
    """The queues down, one for each arena segment; off while there is no slower tier."""

    def __init__(self, table: SlotTable, add: Callable[[str, int, str], None]) -> None:
        """``add`` counts: the name of a counter, an amount, a label."""
        self._table, self._add = table, add
        count = len(table.geometry.segments)
        self._queues: list[deque[tuple[I64, U32]]] = [deque() for _ in range(count)]
        self._last = 0
        self.on = False
        """There is a slower tier."""
        self.closed = ""
        """Why the tier takes nothing now, so that what is offered is refused at once; or empty."""
        self.under_pressure = False
        """Somebody found no room because blocks wait here; whoever writes them resets it."""
        self.waiting = 0
        """Blocks in the queue; those that were removed meanwhile count until it is their turn."""

    def offer(self, heads: I64) -> None:
        """Blocks of one segment to be saved, oldest first; those that wait or are saved are passed
        over.
        """
        if not self.on:
            return
        table = self._table
        copy_state = table.copy_state[heads]
        fit = ((copy_state == CopyState.NOT) | (copy_state == CopyState.REFUSED)) & (
            table.state[heads] == _SUMMED
        )
        if not fit.all():
            heads = heads[fit]
        if not len(heads):
            return
        if self.closed:
            table.copy_state[heads] = CopyState.REFUSED
            self._add("demotion_refused", len(heads), self.closed)
        else:
            table.copy_state[heads] = CopyState.QUEUED
            for start in range(0, len(heads), _RUN):
                run = heads[start : start + _RUN]
                self._queue_of(run).append((run, table.generation[run].copy()))
            self.waiting += len(heads)

    def used(self, heads: I64) -> None:
        """Blocks were asked for: what was refused is offered once more."""
        if not self.on or self.closed:
            return
        refused = heads[self._table.copy_state[heads] == CopyState.REFUSED]
        if len(refused):
            self.offer(np.unique(refused))

    def evictable(self, head: int) -> bool:
        """Whether nothing that was to be kept is lost with the block's slots."""
        return not self.on or self._table.copy_state.item(head) >= _SAVED

    def segments(self) -> Iterator[int]:
        """Segments of which something waits, the one that was served last comes last."""
        count = len(self._queues)
        for step in range(1, count + 1):
            if self._queues[(self._last + step) % count]:
                yield (self._last + step) % count

    def served(self, segment: int) -> None:
        """It is the other segments' turn now."""
        self._last = segment

    def take(self, segment: int) -> tuple[I64, U32] | None:
        """The heads of a segment that came first and still wait, with their generations; None if
        none does.
        """
        queue = self._queues[segment]
        while queue:
            heads, generations = queue.popleft()
            self.waiting -= len(heads)
            live = self._table.generation[heads] == generations
            live &= self._table.copy_state[heads] == CopyState.QUEUED
            if live.any():
                return heads[live], generations[live]
        return None

    def put_back(self, heads: I64, generations: U32) -> None:
        """It is their turn again before all others."""
        if len(heads):
            self._table.copy_state[heads] = CopyState.QUEUED
            self._queue_of(heads).appendleft((heads, generations))
            self.waiting += len(heads)

    def give_up(self) -> int:
        """Refuse everything that waits, so that its room can be taken; how many blocks."""
        refused = 0
        for segment in list(self.segments()):
            while (taken := self.take(segment)) is not None:
                self._table.copy_state[taken[0]] = CopyState.REFUSED
                refused += len(taken[0])
        return refused

    def _queue_of(self, heads: I64) -> deque[tuple[I64, U32]]:
        table = self._table
        return self._queues[int(table.slab_segment[heads[0] // table.geometry.stride])]
