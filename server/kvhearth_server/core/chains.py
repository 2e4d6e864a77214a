"""Links between the blocks of a chain, so that eviction takes a chain from its end.

A prefix is usable up to its first hole. Without links, a chain that grew over many commits is
oldest, and therefore coldest, at its root. Evicting the root first would make the rest useless
while it still takes memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvhearth.model import I64, U32, Bools
from kvhearth_server.core.slot_table import SlotTable

_FEW = 4
"""Number of heads up to which handling them one by one is cheaper."""


class Chains:
    """A forest over the heads of one namespace and group; four u32 links per slot."""

    def __init__(self, table: SlotTable) -> None:
        self._parent = table.parent.data
        self._child = table.child.data
        self._older = table.older.data
        self._younger = table.younger.data
        self._table = table
        self.cuts = 0
        """Number of heads unlinked so far; a remembered place in a chain is stale once it moves."""

    def link_run(self, heads: I64) -> None:
        """Link fresh heads that follow each other, each as the only child of the one before it."""
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
        self._leave_siblings(head)
        self._make_roots(self._child[head])
        self._parent[head] = self._child[head] = self._older[head] = self._younger[head] = 0

    def unlink_many(self, heads: I64) -> None:
        """Unlink distinct heads; see ``unlink``."""
        table = self._table
        self.cuts += len(heads)
        # All children become roots, one child of each head per round.
        links = table.child[heads]
        while len(links := links[links > 0]) > _FEW:
            children = _slots(links)
            links = table.older[children]
            table.parent[children] = table.older[children] = table.younger[children] = 0
        for link in links.tolist():
            self._make_roots(link)
        left = heads[table.parent[heads] > 0]
        siblings = (table.older[left] > 0) | (table.younger[left] > 0)
        table.child[_slots(table.parent[left[~siblings]])] = 0
        for head in left[siblings].tolist():
            self._leave_siblings(head)
        for column in (table.parent, table.child, table.older, table.younger):
            column[heads] = 0

    def _make_roots(self, link: int) -> None:
        """Make a child and its older siblings roots."""
        while link:
            child = link - 1
            link = self._older[child]
            self._parent[child] = self._older[child] = self._younger[child] = 0

    def _leave_siblings(self, head: int) -> None:
        parent, older, younger = self._parent[head], self._older[head], self._younger[head]
        if older:
            self._younger[older - 1] = younger
        if younger:
            self._older[younger - 1] = older
        elif parent:
            self._child[parent - 1] = older

    def leaf(self, head: int) -> int:
        """Follow the youngest children from ``head`` to the end of the line."""
        while link := self._child[head]:
            head = link - 1
        return head

    def parent_of(self, head: int) -> int:
        """The parent's head, or -1."""
        return self._parent[head] - 1

    def is_leaf(self, head: int) -> bool:
        """Whether no resident block continues this one."""
        return not self._child[head]

    def check(self, heads: I64) -> None:
        """Raise ValueError unless links agree in both directions and join only these heads."""
        self.check_links(heads, lambda slots: np.isin(slots, heads))
        self.check_siblings(heads)

    def check_links(self, heads: I64, bound: Callable[[I64], Bools]) -> None:
        """Raise ValueError unless the links of some heads agree with their counterparts.

        ``bound`` tells which slots are heads that are bound to keys. Array work, O(n).
        """
        table = self._table
        parent, child = table.parent[heads], table.child[heads]
        older, younger = table.older[heads], table.younger[heads]
        wrong = (parent == 0) & ((older > 0) | (younger > 0))
        _none(heads[wrong], "has siblings but no parent")
        for links, what in ((parent, "parent"), (child, "child"), (older, "older sibling")):
            there = links > 0
            dangling = ~bound(_slots(links[there]))
            _none(heads[there][dangling], f"has a {what} that is bound to no key")
        last = (parent > 0) & (younger == 0)
        wrong = table.child[_slots(parent[last])] != heads[last] + 1
        _none(heads[last][wrong], "is a youngest child that its parent does not name")
        there = child > 0
        children = _slots(child[there])
        wrong = (table.parent[children] != heads[there] + 1) | (table.younger[children] > 0)
        _none(heads[there][wrong], "names a youngest child that says otherwise")
        for links, column, what in (
            (older, table.younger, "older"),
            (younger, table.older, "younger"),
        ):
            there = links > 0
            others = _slots(links[there])
            wrong = (column[others] != heads[there] + 1) | (table.parent[others] != parent[there])
            _none(heads[there][wrong], f"names an {what} sibling that says otherwise")

    def check_siblings(self, heads: I64) -> None:
        """Raise ValueError if siblings among all heads of an arena form a ring.

        Requires heads whose links agree. Uses pointer doubling over the heads that have a younger
        sibling: the number of steps is the logarithm of the largest number of children.
        """
        followers = np.sort(heads[self._table.younger[heads] > 0])
        count = len(followers)
        if not count:
            return
        younger = _slots(self._table.younger[followers])
        place = np.minimum(np.searchsorted(followers, younger), count - 1)
        # The last entry stands for a youngest child, and leads to itself.
        after = np.append(np.where(followers[place] == younger, place, count), count)
        for _ in range(count.bit_length()):
            after = after[after]
            if (after == count).all():
                return
        _none(followers[after[:-1] != count], "is in a ring of siblings")


def _slots(links: U32) -> I64:
    return links.astype(np.int64) - 1


def _none(slots: I64, what: str) -> None:
    if len(slots):
        raise ValueError(f"slot {slots[0]} {what}, and {len(slots) - 1} more")
