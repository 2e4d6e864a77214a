"""The contract's groups as the scheduler's half sees them: keys, boundaries, what a load needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvhearth.contract import Contract, GroupKind
from kvhearth.keys import fold_key
from kvhearth.model import I64, Bools, Tier
from kvhearth.results import LookupResult
from kvhearth.transfer.hit import usable_tokens


class EngineGroups:
    """Pure; of one contract.

    Args:
        contract: of the engine.
        kv_groups: vLLM's number of each of the contract's groups.
        hash_tokens: tokens that one of vLLM's block hashes covers.

    Attributes:
        step_tokens: token counts at which a hit may end are multiples of it.
        whole: all groups attend to everything, so that a hit may be cut anywhere and the engine may
            step back a token after it.
    """

    def __init__(self, contract: Contract, kv_groups: Sequence[int], hash_tokens: int) -> None:
        self.hash_tokens = hash_tokens
        self.specs = contract.groups
        self.kv_groups = tuple(kv_groups)
        self.count = len(self.specs)
        self._scales = [spec.block_tokens // hash_tokens for spec in self.specs]
        if any(spec.block_tokens % hash_tokens for spec in self.specs):
            raise ValueError(f"hashes of {hash_tokens} tokens do not divide the groups' blocks")
        self.step_tokens = math.lcm(*(spec.block_tokens for spec in self.specs))
        self.whole = all(spec.kind is GroupKind.FULL for spec in self.specs)

    def keys(self, hashes: Sequence[bytes], fold: bytes = b"") -> dict[int, list[bytes]]:
        """By group, the keys of all full blocks of a request.

        Args:
            hashes: vLLM's, one for each ``hash_tokens``; each covers everything before it.
            fold: digest of what they do not cover, or empty.
        """
        keys: dict[int, list[bytes]] = {}
        for group, scale in enumerate(self._scales):
            own = [bytes(one) for one in hashes[scale - 1 :: scale]]
            keys[group] = [fold_key(key, fold) for key in own] if fold else own
        return keys

    def key(self, group: int, hashes: Sequence[bytes], block: int, fold: bytes = b"") -> bytes:
        """The key of one block of one group."""
        own = bytes(hashes[(block + 1) * self._scales[group] - 1])
        return fold_key(own, fold) if fold else own

    def full_blocks(self, group: int, hashes: Sequence[bytes], tokens: int) -> int:
        """Blocks of a group that are full after ``tokens`` computed tokens and have a key."""
        return min(tokens // self.specs[group].block_tokens, len(hashes) // self._scales[group])

    def due_tokens(self, next_block: Sequence[int]) -> int:
        """Tokens at which the next block of some group is full. Recurrent states do not count:
        vLLM hands them off itself.
        """
        ends = (
            (block + 1) * spec.block_tokens
            for spec, block in zip(self.specs, next_block, strict=True)
            if spec.kind is not GroupKind.MAMBA
        )
        return min(ends, default=1 << 62)

    def reach(self, found: LookupResult, limit_tokens: int) -> int:
        """Tokens up to which what is leased can be computed on, ``limit_tokens`` at most."""
        limit = min(found.hit_tokens, limit_tokens)
        limit -= limit % self.step_tokens
        if limit <= 0 or found.lease is None:
            return 0
        if limit == found.hit_tokens:
            return limit
        flags = [(self.specs[group], result.leased) for group, result in found.groups.items()]
        return usable_tokens(flags, limit)

    def end(self, tokens: int, *, step_back: bool) -> int:
        """Tokens up to which a hit of a request of ``tokens`` may reach.

        Where all groups attend to everything, vLLM steps back a token itself after a hit of the
        whole prompt; a window or a state cannot, nor where ``step_back`` says so.
        """
        return tokens if self.whole and not step_back else tokens - 1

    def ceiling(self, found: LookupResult, limit_tokens: int) -> int:
        """Tokens up to which could be computed on if all that is on SSD had climbed, at most
        ``limit_tokens``.
        """
        flags = [
            (self.specs[group], result.ready | (result.tiers == Tier.SSD))
            for group, result in found.groups.items()
        ]
        return usable_tokens(flags, limit_tokens)

    def needed(self, group: int, start_tokens: int, end_tokens: int) -> range:
        """Blocks of a group to load for a hit of ``end_tokens`` of which the engine has the first
        ``start_tokens`` itself.
        """
        spec = self.specs[group]
        end = end_tokens // spec.block_tokens
        first = start_tokens // spec.block_tokens
        if spec.kind is GroupKind.MAMBA:
            return range(max(end - 1, 0), end)
        if spec.kind is GroupKind.SLIDING_WINDOW:
            back = -(-(spec.window_tokens - 1) // spec.block_tokens)
            return range(max(end - back, first, 0), end)
        return range(first, end)


def rows(leased: Bools, blocks: range) -> I64 | None:
    """Where blocks stand among the leased ones, whose extents come in that order; None if one of
    them is not leased.
    """
    wanted = np.arange(blocks.start, blocks.stop)
    if not len(wanted):
        return wanted.astype(np.int64)
    if blocks.stop > len(leased) or not leased[wanted].all():
        return None
    before: I64 = np.cumsum(leased)[wanted] - 1
    return before
