"""How far a request can be restored: prefix, trailing window and boundary state, over all groups.

A hit of ``L`` tokens needs of a full-attention group all blocks before ``L``, of a sliding window
the blocks that cover the last ``window - 1`` tokens before ``L``, of a state group the one block
that ends at ``L``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.model import I64, Bools


@dataclass(frozen=True)
class Need:
    """Blocks [first, end) of one group that a hit needs."""

    first: int
    end: int


def window_blocks(spec: GroupSpec) -> int:
    """Blocks that a token right after a boundary can see in a sliding-window group."""
    return -(-(spec.window_tokens - 1) // spec.block_tokens)


def usable_boundaries(spec: GroupSpec, ready: Bools) -> Bools:
    """For k = 0..n: can this group be restored up to its k-th block boundary? Shape (n + 1,)."""
    count = len(ready)
    boundaries = np.ones(count + 1, np.bool_)
    if spec.kind is GroupKind.FULL:
        holes = np.flatnonzero(~ready)
        run = int(holes[0]) if len(holes) else count
        boundaries[run + 1 :] = False
    elif spec.kind is GroupKind.MAMBA:
        boundaries[1:] = ready
    else:
        position = np.arange(1, count + 1)
        last_hole = np.maximum.accumulate(np.where(ready, 0, position))
        boundaries[1:] = position - last_hole >= np.minimum(window_blocks(spec), position)
    return boundaries


def hit_boundaries(groups: list[tuple[GroupSpec, Bools]]) -> I64:
    """Token counts L > 0 at which every group can be restored, longest first.

    Only the longest matters to a lookup; the shorter ones serve when not all of it can be leased.
    """
    if not groups:
        return np.zeros(0, np.int64)
    spec, ready = groups[0]
    if len(groups) == 1 and spec.kind is GroupKind.FULL:
        # Most models, and the most of a lookup's time there: every boundary up to the first hole.
        run = len(ready)
        if np.count_nonzero(ready) < run:  # asked of booleans, this is several times `all`'s speed
            run = int(ready.argmin())
        tokens = spec.block_tokens
        return np.arange(run * tokens, 0, -tokens)
    step = math.lcm(*(spec.block_tokens for spec, _ in groups))
    limit = min(len(ready) * spec.block_tokens for spec, ready in groups) // step
    if not limit:
        return np.zeros(0, np.int64)
    good = np.ones(limit + 1, np.bool_)
    for spec, ready in groups:
        blocks = step // spec.block_tokens
        good &= usable_boundaries(spec, ready)[: limit * blocks + 1 : blocks]
    good[0] = False
    return np.flatnonzero(good)[::-1].astype(np.int64) * step


def blocks_needed(spec: GroupSpec, hit_tokens: int) -> Need:
    """The blocks of a group that a hit of ``hit_tokens`` loads."""
    end = hit_tokens // spec.block_tokens
    if spec.kind is GroupKind.FULL:
        return Need(0, end)
    if spec.kind is GroupKind.MAMBA:
        return Need(max(0, end - 1), end)
    return Need(max(0, end - window_blocks(spec)), end)
