"""How far what was loaded reaches, over all KV cache groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.model import Bools


def usable_tokens(groups: Sequence[tuple[GroupSpec, Bools]], hit_tokens: int) -> int:
    """The longest run of tokens from the start, ``hit_tokens`` at most, that can be computed on.

    Up to ``L`` tokens a full-attention group needs all blocks before ``L``, a sliding window those
    that cover the last ``window - 1`` tokens before ``L``, a state group the one that ends at
    ``L``.

    Args:
        groups: of each group, (n,): which of its blocks hold their bytes.
        hit_tokens: as the lookup said.
    """
    if not groups or hit_tokens <= 0:
        return 0
    step = math.lcm(*(spec.block_tokens for spec, _ in groups))
    counts = [np.concatenate(([0], np.cumsum(loaded))) for _, loaded in groups]
    limit = min(hit_tokens, *(len(loaded) * spec.block_tokens for spec, loaded in groups))
    for tokens in range(limit - limit % step, 0, -step):
        for (spec, _), count in zip(groups, counts, strict=True):
            end = tokens // spec.block_tokens
            first = max(end - _blocks_back(spec, end), 0)
            if count[end] - count[first] != end - first:
                break
        else:
            return tokens
    return 0


def _blocks_back(spec: GroupSpec, end: int) -> int:
    """Blocks before a boundary that the token right after it needs."""
    if spec.kind is GroupKind.FULL:
        return end
    if spec.kind is GroupKind.MAMBA:
        return 1
    return -(-(spec.window_tokens - 1) // spec.block_tokens)
