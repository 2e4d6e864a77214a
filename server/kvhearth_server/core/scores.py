"""Scores: how much of a prompt could be restored, for a router that chooses an engine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvhearth.errors import Reason
from kvhearth.model import Bools, Tier
from kvhearth_server.core.lookup import KeysItem, hit_boundaries
from kvhearth_server.core.lower_tier import PromotionRequest
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import CoreState, group_spec, require


class Score(NamedTuple):
    """What a tier and all faster ones could restore.

    Attributes:
        tokens: the longest prefix.
        promotions: its blocks that are not in memory.
    """

    tier: Tier
    tokens: int
    promotions: list[PromotionRequest]


def score(state: CoreState, namespace: Namespace, items: list[KeysItem]) -> list[Score]:
    """Score a prompt's keys, root first: in memory, with SSD, with remotes.

    It counts as no use, holds nothing, and asks no remote: of these it says what is known.

    Raises:
        KVHearthError: ``bad_group``, ``bad_keys``, ``too_many_keys``.
    """
    state.check_count(sum(len(item.keys) for item in items))
    kinds = {item.kv_group for item in items}
    require(len(kinds) == len(items), Reason.BAD_GROUP, "a group is asked for twice")
    require(items and all(item.keys for item in items), Reason.BAD_KEYS, "no keys")
    there = [_there(state, namespace, item) for item in items]
    specs = [group_spec(namespace.contract, item.kv_group) for item in items]
    scores, memory = [], [tiers[0] for tiers in there]
    for number, tier in enumerate((Tier.DRAM, Tier.SSD, Tier.REMOTE)):
        flags = [tiers[number] for tiers in there]
        boundaries = hit_boundaries(list(zip(specs, flags, strict=True)))
        tokens = int(boundaries[0]) if len(boundaries) else 0
        promotions = list[PromotionRequest]()
        for item, spec, here in zip(items, specs, memory, strict=True):
            absent = np.flatnonzero(~here[: tokens // spec.block_tokens]).tolist()
            if absent:
                keys = [item.keys[row] for row in absent]
                nobody = [b""] * len(keys)
                promotions.append(PromotionRequest(namespace, item.kv_group, spec, keys, nobody))
        scores.append(Score(tier, tokens, promotions))
    return scores


def _there(state: CoreState, namespace: Namespace, item: KeysItem) -> tuple[Bools, Bools, Bools]:
    """Return which blocks are in memory, there or on SSD, and there or at a remote."""
    group_spec(namespace.contract, item.kv_group)
    table = state.table
    heads = state.index.find(namespace.number, item.kv_group, item.keys)
    memory = (heads >= 0) & (table.epoch[heads] == namespace.epoch)
    memory &= table.state[heads] == State.SUMMED
    if state.lower_tier is None:
        return memory, memory, memory
    ssd = memory | state.lower_tier.present(namespace, item.kv_group, item.keys)
    return memory, ssd, ssd | state.lower_tier.shared_has(namespace, item.kv_group, item.keys)
