"""References that keep the engine's KV pages alive until every rank has copied them."""

from __future__ import annotations

from collections.abc import Sequence

from kvhearth.connectors.core.engine import PagePool


class BlockRefs:
    """References to the engine's pages, by store. Used by the scheduler's thread only.

    Args:
        pool: the engine's pages.
        percent: share of them that may be held. Beyond it nothing more is stored, since requests
            cannot use held pages.

    Attributes:
        held_count: pages held, counted once for each store that holds them.
    """

    def __init__(self, pool: PagePool, percent: int) -> None:
        self._pool = pool
        self._pages_max = max(1, pool.page_count * percent // 100)
        self._held_by: dict[int, list[int]] = {}
        self.held_count = 0

    @property
    def room(self) -> int:
        """Number of pages that may still be held."""
        return max(self._pages_max - self.held_count, 0)

    def hold(self, number: int, pages: Sequence[int]) -> None:
        """Keep pages from reuse for store ``number``."""
        self._pool.hold(pages)
        self._held_by[number] = list(pages)
        self.held_count += len(pages)

    def release(self, number: int) -> None:
        """Release a store's pages, its tail first, so that the tail is reused first.
        Idempotent.
        """
        pages = self._held_by.pop(number, None)
        if pages:
            self.held_count -= len(pages)
            self._pool.release(pages[::-1])

    def release_all(self) -> None:
        """Release the pages of all stores. Call it only when no copy reads them any more."""
        for number in list(self._held_by):
            self.release(number)

    @property
    def would_free(self) -> bool:
        """Whether a held page has no other holder and becomes free when its store ends."""
        single = self._pool.has_one_reference
        return any(single(page) for pages in self._held_by.values() for page in pages)

    def check_books(self) -> None:
        """Raise AssertionError if ``held_count`` differs from the number of pages held."""
        held = sum(len(pages) for pages in self._held_by.values())
        assert held == self.held_count, f"{held} pages held, counted {self.held_count}"
