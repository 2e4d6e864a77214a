"""The daemon's blocks as events of vLLM's own stream, for routers."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
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

from kvhearth.connectors.core.block_feed import BlockChange, BlockFeed, BlockTokens
from kvhearth.connectors.core.engine import EngineGroups
from kvhearth.model import Tier

OWNERSHIP = "kvhearth"
_PLACES = {
    Tier.DRAM: (MEDIUM_CPU, "LOCAL"),
    Tier.SSD: (MEDIUM_STORAGE, "LOCAL"),
    Tier.REMOTE: (MEDIUM_STORAGE, "REMOTE"),
}
_UNKNOWN = BlockTokens(b"", ())


def kv_events(changes: Iterable[BlockChange], groups: EngineGroups) -> list[KVCacheEvent]:
    """Return changes as vLLM's events, removals first.

    Blocks that another engine stored, and those whose keys cover more than tokens, have no tokens,
    as those of vLLM's own offloading.
    """
    changes = list(changes)
    events: list[KVCacheEvent] = []
    gone = [change for change in changes if change.before]
    for (group, tier), some in groupby(gone, lambda change: (change.group, change.before)):
        medium, locality = _PLACES[tier]
        hashes = [_hash(change.key) for change in some]
        number = groups.kv_groups[group]
        events.append(BlockRemoved(hashes, medium, number, locality, OWNERSHIP))
    stored = _runs([change for change in changes if change.now])
    return events + [_stored(run, groups) for run in stored]


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


def _stored(run: list[BlockChange], groups: EngineGroups) -> BlockStored:
    first, (medium, locality) = run[0], _PLACES[run[0].now]
    parent = (first.holds or _UNKNOWN).parent
    return BlockStored(
        block_hashes=[_hash(change.key) for change in run],
        parent_block_hash=_hash(parent) if parent else None,
        token_ids=[token for change in run for token in (change.holds or _UNKNOWN).tokens],
        block_size=groups.specs[first.group].block_tokens,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=groups.kv_groups[first.group],
        locality=locality,
        ownership=OWNERSHIP,
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
