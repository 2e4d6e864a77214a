"""The daemon's blocks as events of vLLM's own stream, for routers."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvhearth.connectors.core.block_feed import BlockChange, BlockFeed
from kvhearth.connectors.core.engine import EngineGroups
from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.model import Tier
from kvhearth.results import BlockTokens

_PLACES = {
    Tier.DRAM: (MEDIUM_CPU, "LOCAL"),
    Tier.SSD: (MEDIUM_STORAGE, "LOCAL"),
    Tier.REMOTE: (MEDIUM_STORAGE, "REMOTE"),
}
_UNKNOWN = BlockTokens(b"", ())

GroupReach = tuple[str, int | None]
"""Kind of a KV group, in vLLM's words, and its window in tokens."""


def reaches_of(kv_cache_config: Any) -> dict[int, GroupReach]:
    """Return the reach of each of vLLM's KV groups, as vLLM's own events tell it."""
    return {
        number: (
            get_kv_cache_spec_kind(group.kv_cache_spec).value,
            get_kv_cache_spec_sliding_window(group.kv_cache_spec),
        )
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    }


def _reach(spec: GroupSpec) -> GroupReach:
    kind = "full_attention" if spec.kind is GroupKind.FULL else str(spec.kind)
    return kind, spec.window_tokens or None


def kv_events(
    changes: Iterable[BlockChange],
    groups: EngineGroups,
    reaches: Mapping[int, GroupReach] | None = None,
) -> list[KVCacheEvent]:
    """Return changes as vLLM's events. Where a block moves, it is stored in its new place before
    it is removed from the other: an index forgets what is nowhere.

    Blocks whose keys cover more than tokens have no tokens, as those of vLLM's own offloading.
    None names an owner: routers drop events of owners that they do not know.

    Args:
        reaches: of vLLM's groups; by default as far as ``groups`` tells.
    """
    changes = list(changes)
    stored = _runs([change for change in changes if change.now])
    events: list[KVCacheEvent] = [_stored(run, groups, reaches or {}) for run in stored]
    gone = [change for change in changes if change.before]
    for (group, tier), some in groupby(gone, lambda change: (change.group, change.before)):
        medium, locality = _PLACES[tier]
        hashes = [_hash(change.key) for change in some]
        number = groups.kv_groups[group]
        events.append(BlockRemoved(hashes, medium, number, locality))
    return events


def _runs(stored: list[BlockChange]) -> Iterator[list[BlockChange]]:
    """Cut changes into chains, and into blocks of which nothing is known."""
    run = list[BlockChange]()
    for change in stored:
        if run and not _continues(run[-1], change):
            yield run
            run = []
        run.append(change)
    if run:
        yield run


def _continues(last: BlockChange, change: BlockChange) -> bool:
    if (last.group, last.now) != (change.group, change.now):
        return False
    if last.holds is None or change.holds is None:
        return last.holds is change.holds
    return change.holds.parent == last.key and bool(last.holds.tokens) == bool(change.holds.tokens)


def _stored(
    run: list[BlockChange], groups: EngineGroups, reaches: Mapping[int, GroupReach]
) -> BlockStored:
    first, (medium, locality) = run[0], _PLACES[run[0].now]
    number, spec = groups.kv_groups[first.group], groups.specs[first.group]
    kind, window = reaches.get(number) or _reach(spec)
    parent = (first.holds or _UNKNOWN).parent
    return BlockStored(
        block_hashes=[_hash(change.key) for change in run],
        parent_block_hash=_hash(parent) if parent else None,
        token_ids=[token for change in run for token in (change.holds or _UNKNOWN).tokens],
        block_size=spec.block_tokens,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=number,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
        locality=locality,
    )


def clears_all(block_pool: Any) -> bool:
    """Whether vLLM's next events make routers forget all that an engine has, ours too."""
    return any(isinstance(event, AllBlocksCleared) for event in block_pool.kv_event_queue)


def must_step(feed: BlockFeed) -> bool:
    """Whether the engine must step, which publishes. Call it in a call from the core's loop.

    An idle core asks nobody, so that the feed wakes it.
    """
    if feed.wake is None:
        feed.wake = _core_waker()
    return feed.changed


def _core_waker() -> Callable[[], None]:
    """Return a function that makes an idle core look for work.

    It waits for its queue of requests, which vLLM does not give to connectors: the queue is found
    by a walk up the stack.
    """
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        requests = getattr(frame.f_locals.get("self"), "input_queue", None)
        if requests is not None:
            return partial(requests.put_nowait, (EngineCoreRequestType.WAKEUP, None))
    return lambda: None


def _hash(key: bytes) -> ExternalBlockHash:
    return maybe_convert_block_hash(BlockHash(key))
