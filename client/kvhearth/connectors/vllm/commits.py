"""Commits of finished stores, on a thread: a commit is a call, and the scheduler makes none."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from kvhearth.connectors.vllm.context import Context
from kvhearth.model import U8, Bools
from kvhearth.pipeline.stock import Slots, Stock
from kvhearth.results import CommitGroup
from kvhearth.workers import Worker

COMMITS_MAX = 4096
"""Finished stores that wait for their commit; beyond it they are given back."""
_TICK_S = 0.25


@dataclass(eq=False)
class StorePart:
    """One group of a store.

    Attributes:
        keys: n keys in chain order.
        parent: the key before the first one, or empty.
        slots: what they are copied to.
        ok, summed: (n, shards): copied well, and with a checksum in ``sums`` (n, shards, 16).
    """

    keys: list[bytes]
    parent: bytes
    slots: Slots
    ok: Bools
    sums: U8
    summed: Bools


@dataclass(eq=False)
class OpenStore:
    """A store that ranks work on; a void one is not committed."""

    parts: dict[int, StorePart]
    epoch: int
    ranks_left: int
    begun_at: float
    void: bool = False


class Committer:
    """Binds keys to slots that every rank has written.

    Args:
        context: of the engine.
        stock: where slots come from, and those go back to whose copies failed.

    Attributes:
        under_way: (group, key) of every block that is being stored.
    """

    def __init__(self, context: Context, stock: Stock) -> None:
        self.under_way: set[tuple[int, bytes]] = set()
        self._client = context.client
        self._tally = context.tally
        self._stock = stock
        self._commits: deque[OpenStore] = deque()
        self._at_hand: OpenStore | None = None
        self._worker = Worker("kvhearth-commit", self._step, self._recover)
        self._changed = self._worker.changed
        self._worker.start()

    def put(self, store: OpenStore) -> None:
        """Every rank has finished the store."""
        with self._changed:
            if len(self._commits) < COMMITS_MAX:
                self._commits.append(store)
                self._changed.notify()
                return
        self._give_up(store)

    def drain(self, deadline_s: float) -> bool:
        """Whether all finished copies are committed, waiting up to ``deadline_s`` for it."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._commits and self._at_hand is None, deadline_s
            )

    def close(self, deadline_s: float) -> bool:
        """Commit what is finished and end the thread; False if that took longer."""
        until = time.monotonic() + deadline_s
        self.drain(deadline_s)
        return self._worker.stop(max(until - time.monotonic(), 0.1))

    # -- the thread --------------------------------------------------------------------------------

    def _step(self) -> None:
        with self._changed:
            if not self._commits:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._commits or self._worker.stopping, _TICK_S)
                return
            self._at_hand = self._commits.popleft()
        self._commit(self._at_hand)
        with self._changed:
            self._at_hand = None
            self._changed.notify_all()

    def _commit(self, store: OpenStore) -> None:
        commits: dict[int, CommitGroup] = {}
        boot_id = ""
        for group, part in store.parts.items():
            good = part.ok.all(axis=1)
            boot_id = part.slots.boot_id
            if not good.all():
                self._tally.add("store_failed", int(np.count_nonzero(~good)))
                bad = part.slots.extents[~good]
                self._stock.give_back(group, Slots(boot_id, part.slots.session_id, bad))
            if good.any():
                keys = [part.keys[at] for at in np.flatnonzero(good).tolist()]
                sums = part.sums[good] if part.summed[good].all() else None
                commits[group] = CommitGroup(keys, part.slots.extents[good], sums, part.parent)
        if commits:
            result = self._client.commit(commits, boot_id=boot_id, epoch=store.epoch)
            asked = sum(len(item.keys) for item in commits.values())
            stored = sum(int(np.count_nonzero(flags)) for flags in result.stored.values())
            self._tally.add("store_failed" if result.reason else "store_blocks", asked)
            if not result.reason:
                self._tally.add("store_duplicates", asked - stored)
            self._stock.nudge()
        self._forget(store)

    def _give_up(self, store: OpenStore) -> None:
        for group, part in store.parts.items():
            self._tally.add("store_failed", len(part.keys))
            self._stock.give_back(group, part.slots)
        self._forget(store)

    def _forget(self, store: OpenStore) -> None:
        for group, part in store.parts.items():
            self.under_way.difference_update((group, key) for key in part.keys)

    def _recover(self) -> None:
        self._client.count("commit_crashes")
        store, self._at_hand = self._at_hand, None
        if store is not None:
            self._forget(store)
