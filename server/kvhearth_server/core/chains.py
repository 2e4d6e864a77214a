"""Chains: which block continues which, so that eviction takes a chain from its end.

A prefix is usable up to its first hole. Without links a chain that grew over many commits is
oldest, and so coldest, at its root; evicting the root first would make all the rest useless while
it still takes memory.
"""

from __future__ import annotations

import numpy as np

from kvhearth.model import I64
from kvhearth_server.core.table import SlotTable


class Chains:
    """A forest over heads of one namespace and group; four u32 links a slot."""

    def __init__(self, table: SlotTable) -> None:
        self._parent = table.parent.data
        self._child = table.child.data
        self._older = table.older.data
        self._younger = table.younger.data
        self._table = table
        self.cuts = 0
        """Heads taken out so far: who remembers a place in a chain asks whether this has moved."""

    def link_run(self, heads: I64) -> None:
        """Link fresh heads that follow each other: each is the only child of the one before it."""
        table = self._table
        links = heads.astype(np.uint32) + np.uint32(1)
        table.parent[heads[1:]] = links[:-1]
        table.child[heads[:-1]] = links[1:]

    def link_many(self, heads: I64, parents: I64) -> None:
        """Link fresh heads, oldest first, to parents (-1: none) that have no children yet."""
        known = parents >= 0
        order = np.argsort(parents[known], kind="stable")
        child, parent = heads[known][order], parents[known][order]
        links = child.astype(np.uint32) + np.uint32(1)
        table = self._table
        table.parent[child] = parent + 1
        same = parent[1:] == parent[:-1]
        table.older[child[1:][same]] = links[:-1][same]
        table.younger[child[:-1][same]] = links[1:][same]
        last = np.append(~same, True)[: len(child)]
        table.child[parent[last]] = links[last]

    def link(self, parent: int, head: int) -> None:
        """Make a fresh head the youngest child of ``parent``."""
        elder = self._child[parent]
        self._parent[head] = parent + 1
        self._older[head] = elder
        if elder:
            self._younger[elder - 1] = head + 1
        self._child[parent] = head + 1

    def unlink(self, head: int) -> None:
        """Take a head out; its children become roots."""
        self.cuts += 1
        parent, older, younger = self._parent[head], self._older[head], self._younger[head]
        if older:
            self._younger[older - 1] = younger
        if younger:
            self._older[younger - 1] = older
        elif parent:
            self._child[parent - 1] = older
        link = self._child[head]
        while link:
            child = link - 1
            link = self._older[child]
            self._parent[child] = self._older[child] = self._younger[child] = 0
        self._parent[head] = self._child[head] = self._older[head] = self._younger[head] = 0

    def leaf(self, head: int) -> int:
        """The end of the youngest line from ``head``."""
        while link := self._child[head]:
            head = link - 1
        return head

    def parent_of(self, head: int) -> int:
        """The parent's head, or -1."""
        return self._parent[head] - 1

    def is_leaf(self, head: int) -> bool:
        """No resident block continues this one."""
        return not self._child[head]

    def check(self, heads: I64) -> None:
        """Raise ValueError unless links agree in both directions and join bound heads only."""
        bound = set(heads.tolist())
        children: dict[int, int] = {}
        for head in bound:
            parent = self._parent[head]
            if parent:
                if parent - 1 not in bound:
                    raise ValueError(f"slot {head}: its parent {parent - 1} is bound to no key")
                children[parent - 1] = children.get(parent - 1, 0) + 1
        for head in bound:
            seen, link, younger = 0, self._child[head], 0
            while link:
                child = link - 1
                if self._parent[child] != head + 1 or self._younger[child] != younger:
                    raise ValueError(f"slot {child}: links to parent {head} disagree")
                seen, younger, link = seen + 1, link, self._older[child]
            if seen != children.get(head, 0):
                raise ValueError(
                    f"slot {head}: {seen} children listed, {children.get(head, 0)} point here"
                )
