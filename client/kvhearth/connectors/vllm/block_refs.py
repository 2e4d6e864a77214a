"""References that keep the engine's KV blocks alive until every rank has copied them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BlockHolds:
    """References into vLLM's block pool. Used by the scheduler's thread only.

    Args:
        pool: vLLM's block pool; ``blocks``, ``touch`` and ``free_blocks`` are used.
        percent: share of the pool's blocks that may be held. Beyond it nothing more is stored,
            since requests cannot use held blocks.

    Attributes:
        held_count: blocks held, counted once for each store that holds them.
    """

    def __init__(self, pool: Any, percent: int) -> None:
        self._pool = pool
        self._blocks_max = max(1, len(pool.blocks) * percent // 100)
        self._held_by: dict[int, list[Any]] = {}
        self.held_count = 0

    @property
    def room(self) -> int:
        """Number of blocks that may still be held."""
        return max(self._blocks_max - self.held_count, 0)

    def hold(self, number: int, block_ids: Sequence[int]) -> None:
        """Keep blocks from reuse for store ``number``."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self._held_by[number] = blocks
        self.held_count += len(blocks)

    def release(self, number: int) -> None:
        """Release a store's blocks, its tail first, so that the tail is reused first.
        Idempotent.
        """
        blocks = self._held_by.pop(number, None)
        if blocks:
            self.held_count -= len(blocks)
            self._pool.free_blocks(reversed(blocks))

    def release_all(self) -> None:
        """Release the blocks of all stores. Call it only when no copy reads them any more."""
        for number in list(self._held_by):
            self.release(number)

    @property
    def would_free(self) -> bool:
        """Whether a held block has no other holder and becomes free when its store ends."""
        return any(block.ref_cnt == 1 for blocks in self._held_by.values() for block in blocks)

    def check_books(self) -> None:
        """Raise AssertionError if ``held_count`` differs from the number of blocks held."""
        held = sum(len(blocks) for blocks in self._held_by.values())
        assert held == self.held_count, f"{held} blocks held, counted {self.held_count}"
