"""Timing of repeated lookups during a promotion, and the usable length of a hit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.model import Bools

PAUSE_MIN_S = 0.001
PAUSE_MAX_S = 0.25
"""Longest pause for estimates of up to a second, which may be too long. Longer estimates are
checked after a quarter of their time.
"""
_DOUBLINGS = 6


class PromotionWait:
    """A bounded wait, guided by the daemon's estimates. Pure: times are given, monotonic seconds.

    An estimate that was too short is trusted less each time, so that few lookups are made.

    Args:
        until: end of the wait.

    Attributes:
        due_at: time of the next lookup.
        asked_count: number of answers with promotions under way.
    """

    def __init__(self, until: float) -> None:
        self.until = until
        self.due_at = 0.0
        self.asked_count = 0

    def answered(self, eta_us: int, now: float) -> bool:
        """Return whether an answer with this estimate is worth another lookup, at ``due_at``."""
        if eta_us <= 0 or now >= self.until:
            return False
        least_s = PAUSE_MIN_S * 2.0 ** min(self.asked_count, _DOUBLINGS)
        self.asked_count += 1
        eta_s = eta_us / 1e6
        pause_s = min(max(eta_s, least_s), max(PAUSE_MAX_S, eta_s / 4))
        self.due_at = min(now + pause_s, self.until)
        return True


def usable_tokens(groups: Sequence[tuple[GroupSpec, Bools]], hit_tokens: int) -> int:
    """Return the longest run of tokens from the start that can be computed on.

    It is at most ``hit_tokens``. Up to ``L`` tokens a full-attention group needs all blocks before
    ``L``, a sliding window those that cover the last ``window - 1`` tokens before ``L``, a state
    group the one that ends at ``L``.

    Args:
        groups: for each group, (n,): True for the blocks that hold their bytes.
        hit_tokens: from the lookup.
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
    """Return the number of blocks before a boundary that the token right after it needs."""
    if spec.kind is GroupKind.FULL:
        return end
    if spec.kind is GroupKind.MAMBA:
        return 1
    return -(-(spec.window_tokens - 1) // spec.block_tokens)
