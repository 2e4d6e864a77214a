"""The contract's groups as the scheduler's half needs them: keys, boundaries, blocks of a load."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvhearth.contract import Contract, GroupKind
from kvhearth.keys import fold_key
from kvhearth.model import I64, Bools, Tier
from kvhearth.results import LookupResult, usable_tokens


class EngineGroups:
    """Arithmetic over the groups of one contract. Pure.

    Args:
        contract: the engine's contract.
        kv_groups: the engine's number of each of the contract's groups.
        hash_tokens: tokens that one of the engine's block hashes covers.

    Attributes:
        step_tokens: granularity of hits: a hit ends at a multiple of this many tokens.
        whole: True if all groups attend to everything, so that a hit may be cut anywhere and the
            engine may step back a token after it.
    """

    def __init__(self, contract: Contract, kv_groups: Sequence[int], hash_tokens: int) -> None:
        self.hash_tokens = hash_tokens
        self.specs = contract.groups
        self.kv_groups = tuple(kv_groups)
        self.count = len(self.specs)
        self._scales = [spec.block_tokens // hash_tokens for spec in self.specs]
        if any(spec.block_tokens % hash_tokens for spec in self.specs):
            raise ValueError(f"hashes of {hash_tokens} tokens do not divide the groups' blocks")
        self._growing = [
            (group, spec.block_tokens)
            for group, spec in enumerate(self.specs)
            if spec.kind is not GroupKind.MAMBA
        ]
        self._block_tokens = min((size for _, size in self._growing), default=1)
        windows = (one for one in self.specs if one.kind is GroupKind.SLIDING_WINDOW)
        self._window_tokens = min((one.window_tokens for one in windows), default=1 << 62)
        self.step_tokens = math.lcm(*(spec.block_tokens for spec in self.specs))
        self.whole = all(spec.kind is GroupKind.FULL for spec in self.specs)

    def keys(self, hashes: Sequence[bytes], key_salt: bytes = b"") -> dict[int, list[bytes]]:
        """Return the keys of all full blocks of a request, by group.

        Args:
            hashes: the engine's hashes, one for each ``hash_tokens``; each covers all before it.
            key_salt: digest of everything that the hashes do not cover, or empty.
        """
        keys: dict[int, list[bytes]] = {}
        for group, scale in enumerate(self._scales):
            own = list(hashes if scale == 1 else hashes[scale - 1 :: scale])
            keys[group] = [fold_key(bytes(key), key_salt) for key in own] if key_salt else own
        return keys

    def key(self, group: int, hashes: Sequence[bytes], block: int, key_salt: bytes = b"") -> bytes:
        """Return the key of one block of one group."""
        own = bytes(hashes[(block + 1) * self._scales[group] - 1])
        return fold_key(own, key_salt) if key_salt else own

    def full_blocks(self, group: int, hashes: Sequence[bytes], tokens: int) -> int:
        """Count the blocks of a group that are full after ``tokens`` computed tokens and have a
        key.
        """
        return min(tokens // self.specs[group].block_tokens, len(hashes) // self._scales[group])

    def due_tokens(self, next_block: Sequence[int]) -> int:
        """Return the token count at which the next block of some group is full. Recurrent states do
        not count: the engine hands them off itself.
        """
        due = 1 << 62
        for group, block_tokens in self._growing:
            due = min(due, (next_block[group] + 1) * block_tokens)
        return due

    def run_tokens(self, wanted_tokens: int) -> int:
        """Return how many tokens after the end of a full block ``wanted_tokens`` of blocks are
        full; 0 if windows are so small that the engine might drop the first of them before.
        """
        return max(min(wanted_tokens, self._window_tokens // 4) - self._block_tokens, 0)

    def reach(self, found: LookupResult, limit_tokens: int) -> int:
        """Return the token count up to which leased blocks let the engine continue,
        ``limit_tokens`` at most.
        """
        limit = min(found.hit_tokens, limit_tokens)
        limit -= limit % self.step_tokens
        if limit <= 0 or found.lease is None:
            return 0
        if limit == found.hit_tokens:
            return limit
        flags = [(self.specs[group], result.leased) for group, result in found.groups.items()]
        return usable_tokens(flags, limit)

    def end(self, tokens: int, *, step_back: bool) -> int:
        """Return the token count up to which a hit of a request of ``tokens`` may reach.

        Where all groups attend to everything, the engine steps back a token itself after a hit of
        the whole prompt. A window or a state cannot step back, nor does the engine where
        ``step_back`` is set.
        """
        return tokens if self.whole and not step_back else tokens - 1

    def ceiling(self, found: LookupResult, limit_tokens: int) -> int:
        """Return the token count that would be reached if all blocks on slower tiers were
        promoted, ``limit_tokens`` at most; those that a remote is asked about count as present.
        """
        flags = [
            (self.specs[group], result.ready | (result.tiers >= Tier.SSD))
            for group, result in found.groups.items()
        ]
        return usable_tokens(flags, limit_tokens)

    def needed(self, group: int, start_tokens: int, end_tokens: int) -> range:
        """Return the blocks of a group to load for a hit of ``end_tokens`` when the engine already
        has the first ``start_tokens``.
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


def rows(leased: Bools, blocks: range) -> I64 | slice | None:
    """Return the positions of ``blocks`` among the leased blocks, which is the order of their
    extents; None if one of them is not leased.
    """
    if blocks.stop > len(leased) or blocks.start >= blocks.stop:
        return None if len(blocks) else slice(0, 0)
    if leased[: blocks.stop].all():  # nearly always; a view of their extents costs no copy
        return slice(blocks.start, blocks.stop)
    if not leased[blocks.start : blocks.stop].all():
        return None
    before: I64 = np.cumsum(leased)[blocks.start : blocks.stop] - 1
    return before
