"""Reads of a namespace's events by those who follow it, from the list of its blocks on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvhearth.errors import Reason
from kvhearth.model import Tier
from kvhearth_server.core.events import Cursor, Event, EventKind
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import CoreState, require

SLOTS_AT_ONCE = 1 << 16
"""Slots that one read looks through for a namespace's blocks."""
PLACES = 1 << 16
"""Places of a KV group in the list of a lower tier."""


class Told(NamedTuple):
    """Answer to a read.

    Attributes:
        events: in their order.
        cursor: where to read next.
        lost: events that the reader will never get. What it knows is void then, and the list of
            the blocks that are there begins with these events.
    """

    events: list[Event]
    cursor: Cursor
    lost: int


class Following:
    """Tells readers of their namespace's blocks: first which are there, as stored, then what
    changes.

    A block that changes while the list is told is told in the log afterwards, so that whoever
    replays all events knows what is there.
    """

    def __init__(self, state: CoreState, slots_at_once: int = SLOTS_AT_ONCE) -> None:
        self._state, self._slots_at_once = state, slots_at_once

    def read(
        self, session: int, epoch: int, cursor: Cursor | None, blocks_max: int, now: float
    ) -> Told:
        """Return events of the session's namespace with about ``blocks_max`` blocks.

        Args:
            cursor: the one that the last read returned; None begins with the list.
            now: seconds; see ``EventLogs.end_unread``.

        Raises:
            KVHearthError: ``group_gone``, ``stale_epoch``; ``bad_message`` for a cursor that no
                read has returned.
        """
        _, namespace = self._state.current(session, epoch)
        return self.read_of(namespace, cursor, blocks_max, now)

    def read_of(
        self, namespace: Namespace, cursor: Cursor | None, blocks_max: int, now: float
    ) -> Told:
        """Return events of a namespace; see ``read``.

        Raises:
            KVHearthError: ``bad_message`` for a cursor that no read has returned.
        """
        log, lost = self._state.events.open(namespace, now), 0
        if cursor is not None:
            good = cursor.number <= log.next and cursor.place >= -1
            require(good, Reason.BAD_MESSAGE, "no read has returned this cursor")
            lost = max(0, log.oldest - cursor.number)
        if cursor is None or lost:
            cursor = Cursor(log.next, 0)
        if cursor.place >= 0:
            return self._list(namespace, cursor, blocks_max, lost)
        events = log.read(cursor.number, blocks_max)
        return Told(events, Cursor(cursor.number + len(events)), 0)

    def _list(self, namespace: Namespace, cursor: Cursor, blocks_max: int, lost: int) -> Told:
        slots = self._state.table.geometry.slot_count
        if cursor.place < slots:
            events, place = self._in_memory(namespace, cursor.place, blocks_max)
        else:
            events, place = self._below(namespace, cursor.place - slots, blocks_max)
            place = place if place < 0 else place + slots
        return Told(events, cursor._replace(place=place), lost)

    def _in_memory(
        self, namespace: Namespace, start: int, blocks_max: int
    ) -> tuple[list[Event], int]:
        """Return the blocks of a range of slots, parents first, and the next slot."""
        table, index = self._state.table, self._state.index
        end = min(start + self._slots_at_once, table.geometry.slot_count)
        span = slice(start, end)
        good = (table.namespace[span] == namespace.number) & (table.head[span] == 0)
        good &= (table.state[span] == State.SUMMED) & (table.epoch[span] == namespace.epoch)
        heads = start + np.flatnonzero(good)
        if len(heads) > blocks_max:
            end = int(heads[blocks_max])
            heads = heads[:blocks_max]
        heads = heads[np.argsort(table.sequence[heads], kind="stable")]
        events = [
            Event(EventKind.STORED, kv_group, tuple(index.keys(mine)), "", Tier.DRAM)
            for _, kv_group, mine in table.by_kind(heads)
        ]
        return events, end

    def _below(self, namespace: Namespace, place: int, blocks_max: int) -> tuple[list[Event], int]:
        """Return blocks that are only on a lower tier, and the next place, -1 at the end."""
        tier, groups = self._state.lower_tier, len(namespace.contract.groups)
        kv_group, part = divmod(place, PLACES)
        if tier is None or kv_group >= groups:
            return [], -1
        keys, part = tier.list_keys(namespace, kv_group, part, blocks_max)
        events = list[Event]()
        if keys:
            heads = self._state.index.find(namespace.number, kv_group, keys)
            here = (heads >= 0) & (self._state.table.epoch[heads] == namespace.epoch)
            only = tuple(keys[row] for row in np.flatnonzero(~here).tolist())
            events += [Event(EventKind.STORED, kv_group, only, "", Tier.SSD)] if only else []
        after = (kv_group + 1) * PLACES if part < 0 else kv_group * PLACES + part
        return events, after if after < groups * PLACES else -1
