"""Which of a namespace's blocks the daemon has, as its events tell, for those who publish it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from kvhearth.client import KVClient
from kvhearth.errors import Reason
from kvhearth.model import Tier
from kvhearth.results import BlockTokens, EventsResult
from kvhearth.worker_thread import SupervisedThread

BLOCKS_MAX = 1 << 20
"""Most blocks that are known: each takes about 200 bytes. Further ones are left out."""
TAKEN_MAX = 2048
"""Most changes that a step publishes: some milliseconds of the engine's scheduler."""
WAITING_MAX = 8 * TAKEN_MAX
"""Changes to be published beyond which no further ones are read."""
POLL_S = 0.25
READS_MAX = 64
"""Most reads in a row."""
AWAY_S = 5.0
"""Time without a daemon after which its blocks count as gone; a restart takes less."""

_Name = tuple[int, bytes]
"""KV group and key of a block."""


class BlockChange(NamedTuple):
    """A block that is elsewhere than it was, and what it holds as far as the daemon knows."""

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
        self._changed: dict[_Name, tuple[Tier, BlockTokens | None]] = {}
        """By block that is elsewhere than was told last, what was told, and what it holds."""
        self._unlisted: set[_Name] = set()
        """While a list is read, known blocks that it has not told yet."""
        self._listing = False

    @property
    def waiting(self) -> int:
        """Number of changes that ``take`` has not returned."""
        return len(self._changed)

    def apply(self, found: EventsResult) -> None:
        """Enter the events that were read from ``cursor`` on."""
        if found.lost or not self.cursor:
            self._listing, self._unlisted = True, set(self._tiers)
        self.cursor = found.cursor
        for event in found.events:
            for key in event.keys:
                name = event.group, key
                holds = found.tokens.get(name)
                unpublished = holds is None and name in found.tokens
                self._enter(name, Tier.NOWHERE if unpublished else event.tier, holds)
        if self._listing and not found.listing:
            self._end_list()

    def _end_list(self) -> None:
        """Enter as gone what the list has not told."""
        self._listing = False
        while self._unlisted:
            self._enter(self._unlisted.pop(), Tier.NOWHERE)

    def _enter(self, name: _Name, tier: Tier, holds: BlockTokens | None = None) -> None:
        self._unlisted.discard(name)
        before = self._tiers.get(name, Tier.NOWHERE)
        if tier == before:
            return
        if not before and len(self._tiers) >= self._blocks_max:
            if not self._unlisted:
                self.left_out += 1
                return
            self._enter(self._unlisted.pop(), Tier.NOWHERE)
        told, held = self._changed.get(name, (before, None))
        self._changed[name] = told, holds or held
        if told == tier:
            del self._changed[name]
        if tier:
            self._tiers[name] = tier
        else:
            del self._tiers[name]

    def forget(self) -> None:
        """Enter all blocks as gone, and begin anew."""
        self.cursor, self._unlisted = "", set(self._tiers)
        self._end_list()

    def take(self) -> list[BlockChange]:
        """Return what has changed since the last call, in the order of the first changes, or the
        first ``TAKEN_MAX`` of it.
        """
        changes = []
        for name in list(islice(self._changed, TAKEN_MAX)):
            before, holds = self._changed.pop(name)
            changes.append(BlockChange(*name, before, self._tiers.get(name, Tier.NOWHERE), holds))
        return changes


class BlockFeed:
    """Follows the daemon's blocks on a thread.

    Args:
        client: the scheduler's client; the caller closes it.
        tokens: tell what blocks hold, too.

    Attributes:
        wake: called on the thread when ``take`` has something to return; None while nobody waits.
    """

    def __init__(self, client: KVClient, *, tokens: bool = False) -> None:
        self._client, self._tokens = client, tokens
        self._known = KnownBlocks()
        self._lock = threading.Lock()
        self.wake: Callable[[], None] | None = None
        self._heard_at = client.clock.now()
        self._worker = SupervisedThread("kvhearth-events", self._step, clock=client.clock)
        self._worker.start()

    @property
    def changed(self) -> bool:
        """Whether ``take`` may return something."""
        return self._known.waiting > 0

    def take(self) -> list[BlockChange]:
        """Return what has changed since the last call; never waits."""
        if not self._lock.acquire(blocking=False):
            return []
        try:
            return self._known.take()
        finally:
            self._lock.release()

    def tell_again(self) -> None:
        """Read all blocks anew, and return them as new: those who were told have forgotten them."""
        with self._lock:
            self._known = KnownBlocks()

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
            known = self._known
            if self._worker.stopping or known.waiting >= WAITING_MAX:
                return
            found = self._client.events(known.cursor, tokens=self._tokens)
            if found.reason:
                if found.reason is Reason.STALE_BOOT:
                    known.cursor = ""
                elif found.reason is Reason.STALE_EPOCH:  # none of them fits this engine's weights
                    self._forget()
                return
            with self._lock:
                known.apply(found)
            self._client.count("events_left_out", known.left_out)
            known.left_out = 0
            if not (found.events or found.listing):
                break

    def _forget(self) -> None:
        with self._lock:
            self._known.forget()
