"""Which of a namespace's blocks the daemon has, as its events tell, for those who publish it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from kvhearth.client import KVClient
from kvhearth.errors import Reason
from kvhearth.model import Tier
from kvhearth.results import EventsResult
from kvhearth.worker_thread import SupervisedThread

BLOCKS_MAX = 1 << 20
"""Most blocks that are known: each takes about 200 bytes. Further ones are left out."""
TAKEN_MAX = 2048
"""Most changes that a step publishes: some milliseconds of the engine's scheduler."""
POLL_S = 0.25
READS_MAX = 64
"""Most reads in a row."""
AWAY_S = 5.0
"""Time without a daemon after which its blocks count as gone; a restart takes less."""

DESCRIBED_MAX = 1 << 18
"""Most blocks of this engine whose tokens are kept, 250 bytes each."""

_Name = tuple[int, bytes]
"""KV group and key of a block."""


class BlockTokens(NamedTuple):
    """What a block holds.

    Attributes:
        parent: key of the block before it, empty for none.
        tokens: its tokens; empty if its key covers more than tokens.
    """

    parent: bytes
    tokens: tuple[int, ...]


class BlockChange(NamedTuple):
    """A block that is elsewhere than it was, and what it holds if this engine stored it."""

    group: int
    key: bytes
    before: Tier
    now: Tier
    holds: BlockTokens | None = None


class KnownBlocks:
    """Where blocks are, and which have moved since that was told last.

    Attributes:
        cursor: where to read next; empty to begin.
        left_out: blocks for which there was no room.
    """

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self.cursor = ""
        self.left_out = 0
        self._blocks_max = blocks_max
        self._tiers: dict[_Name, Tier] = {}
        self._changed: dict[_Name, Tier] = {}
        """By block that is elsewhere than was told last, what was told."""
        self._unlisted: set[_Name] = set()
        """While a list is read, known blocks that it has not told yet."""
        self._listing = False

    @property
    def changed(self) -> bool:
        """Whether ``take`` may return something."""
        return bool(self._changed)

    def apply(self, found: EventsResult) -> None:
        """Enter the events that were read from ``cursor`` on."""
        if found.lost or not self.cursor:
            self._listing, self._unlisted = True, set(self._tiers)
        self.cursor = found.cursor
        for event in found.events:
            for key in event.keys:
                self._enter((event.group, key), event.tier)
        if self._listing and not found.listing:
            self._end_list()

    def _end_list(self) -> None:
        """Enter as gone what the list has not told."""
        self._listing = False
        while self._unlisted:
            self._enter(self._unlisted.pop(), Tier.NOWHERE)

    def _enter(self, name: _Name, tier: Tier) -> None:
        self._unlisted.discard(name)
        before = self._tiers.get(name, Tier.NOWHERE)
        if tier == before:
            return
        if not before and len(self._tiers) >= self._blocks_max:
            if not self._unlisted:
                self.left_out += 1
                return
            self._enter(self._unlisted.pop(), Tier.NOWHERE)
        if self._changed.setdefault(name, before) == tier:
            del self._changed[name]
        if tier:
            self._tiers[name] = tier
        else:
            del self._tiers[name]

    def forget(self) -> None:
        """Enter all blocks as gone, and begin anew."""
        self.cursor, self._unlisted = "", set(self._tiers)
        self._end_list()

    def tell_again(self) -> None:
        """Let ``take`` return all blocks as new: those who were told have forgotten them."""
        self._changed = dict.fromkeys(self._tiers, Tier.NOWHERE)

    def take(self) -> list[BlockChange]:
        """Return what has changed since the last call, in the order of the first changes, or the
        first ``TAKEN_MAX`` of it.
        """
        names = list(islice(self._changed, TAKEN_MAX))
        return [
            BlockChange(*name, self._changed.pop(name), self._tiers.get(name, Tier.NOWHERE))
            for name in names
        ]


class BlockFeed:
    """Follows the daemon's blocks on a thread.

    Args:
        client: the scheduler's client; the caller closes it.

    Attributes:
        wake: called on the thread when ``take`` has something to return; None while nobody waits.
    """

    def __init__(self, client: KVClient) -> None:
        self._client = client
        self._known = KnownBlocks()
        self._described: dict[_Name, BlockTokens | None] = {}
        """Of blocks that this engine stored, the oldest first; None for those not to be told."""
        self._lock = threading.Lock()
        self.wake: Callable[[], None] | None = None
        self._heard_at = client.clock.now()
        self._worker = SupervisedThread("kvhearth-events", self._step, clock=client.clock)
        self._worker.start()

    @property
    def changed(self) -> bool:
        """Whether ``take`` may return something."""
        return self._known.changed

    def describe(self, group: int, key: bytes, holds: BlockTokens | None) -> None:
        """Note what a block holds that is being stored; None for one that is not to be told."""
        if len(self._described) >= DESCRIBED_MAX:
            del self._described[next(iter(self._described))]
        self._described[group, key] = holds

    def take(self) -> list[BlockChange]:
        """Return what has changed since the last call; never waits. On ``describe``'s thread."""
        if not self._lock.acquire(blocking=False):
            return []
        try:
            changes = self._known.take()
        finally:
            self._lock.release()
        told = []
        for change in changes:
            name = change.group, change.key
            if name not in self._described:
                told.append(change)
                continue
            holds = self._described[name]
            if not change.now:
                del self._described[name]
            if holds is not None:
                told.append(change._replace(holds=holds))
        return told

    def tell_again(self) -> None:
        """Let ``take`` return all blocks as new: those who were told have forgotten them."""
        with self._lock:
            self._known.tell_again()

    def close(self, deadline_s: float) -> bool:
        """Stop the thread; False if that took too long."""
        return self._worker.stop(deadline_s)

    def _step(self) -> None:
        self._worker.rest(POLL_S)
        now = self._client.clock.now()
        if self._client.session_id:
            self._heard_at = now
            self._read()
        elif self._known.cursor and now - self._heard_at > AWAY_S:
            self._forget()
        if self.changed and self.wake is not None:
            self.wake()

    def _read(self) -> None:
        for _ in range(READS_MAX):
            if self._worker.stopping:
                return
            found = self._client.events(self._known.cursor)
            if found.reason:
                if found.reason is Reason.STALE_BOOT:
                    self._known.cursor = ""
                elif found.reason is Reason.STALE_EPOCH:  # none of them fits this engine's weights
                    self._forget()
                return
            with self._lock:
                self._known.apply(found)
            if not (found.events or found.listing):
                break
        self._client.count("events_left_out", self._known.left_out)
        self._known.left_out = 0

    def _forget(self) -> None:
        with self._lock:
            self._known.forget()
