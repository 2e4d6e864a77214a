"""Blocks that wait for their load to begin."""

from __future__ import annotations

from collections import deque

import numpy as np

from kvhearth.model import I64
from kvhearth_server.core.below import Wish
from kvhearth_server.core.climbing import Asker


class Wishes:
    """Oldest first, and each block once for each asker: who asks again while it waits, as engines
    do, must not fill the queue and be served over and over before all others.
    """

    def __init__(self) -> None:
        self.blocks = self.records = 0
        self._queue: deque[tuple[Wish, Asker]] = deque()
        self._named: dict[Asker, set[tuple[int, int, bytes]]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def fresh(self, wish: Wish, asker: Asker) -> Wish | None:
        """What of a wish does not wait for this asker yet, each block once; None for nothing."""
        named, names = self._named.get(asker) or set(), _names(wish)
        if named.isdisjoint(names) and len(set(names)) == len(names):
            return wish
        new = dict[tuple[int, int, bytes], int]()
        for row, name in enumerate(names):
            if name not in named:
                new.setdefault(name, row)
        return some(wish, np.array(list(new.values()), np.int64)) if new else None

    def add(self, wish: Wish, asker: Asker) -> None:
        """At the end of the queue."""
        self._named.setdefault(asker, set()).update(_names(wish))
        self.put_back(wish, asker)

    def take(self) -> tuple[Wish, Asker]:
        """The first, of which the caller says what becomes: ``put_back`` or ``done``."""
        wish, asker = self._queue.popleft()
        self._count(wish, -1)
        return wish, asker

    def put_back(self, wish: Wish, asker: Asker, *, first: bool = False) -> None:
        """It waits on."""
        (self._queue.appendleft if first else self._queue.append)((wish, asker))
        self._count(wish, 1)

    def done(self, wish: Wish, asker: Asker) -> None:
        """It waits no longer."""
        named = self._named.get(asker)
        if named is not None:
            named.difference_update(_names(wish))
            if not named:
                del self._named[asker]

    def drop(self, askers: set[Asker]) -> None:
        """These do not wait any more."""
        found = askers & self._named.keys()
        if not found:
            return
        for asker in found:
            del self._named[asker]
        before, self._queue = self._queue, deque[tuple[Wish, Asker]]()
        self.blocks = self.records = 0
        for wish, asker in before:
            if asker not in found:
                self.put_back(wish, asker)

    def askers_of(self, group: int) -> set[Asker]:
        """Who of a group waits."""
        return {asker for asker in self._named if asker[0] == group}

    def _count(self, wish: Wish, sign: int) -> None:
        self.blocks += sign * len(wish.keys)
        self.records += sign * len(wish.keys) * wish.spec.shards


def some(wish: Wish, rows: I64) -> Wish:
    """Rows of a wish."""
    keys = [wish.keys[row] for row in rows.tolist()]
    parents = [wish.parents[row] for row in rows.tolist()]
    return Wish(wish.namespace, wish.kv_group, wish.spec, keys, parents)


def split(wish: Wish, count: int) -> tuple[Wish, Wish | None]:
    """The first ``count`` blocks, and the others if there are any."""
    if len(wish.keys) <= count:
        return wish, None
    parts = [
        Wish(wish.namespace, wish.kv_group, wish.spec, wish.keys[cut], wish.parents[cut])
        for cut in (slice(None, count), slice(count, None))
    ]
    return parts[0], parts[1]


def _names(wish: Wish) -> list[tuple[int, int, bytes]]:
    number, kv_group = wish.namespace.number, wish.kv_group
    return [(number, kv_group, key) for key in wish.keys]
