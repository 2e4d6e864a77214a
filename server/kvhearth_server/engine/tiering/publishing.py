"""Publishes blocks of memory to the remote."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvhearth_server.core.core import Core
from kvhearth_server.core.lower_tier import BlockBatch
from kvhearth_server.core.publishing import HELD_FRACTION_MAX
from kvhearth_server.engine.tiering.naming import BlockNaming
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.base import (
    ADDRESS_DTYPE,
    BlockSpec,
    Completion,
    Corrupt,
    Done,
    Facts,
    Failed,
    LoadBatch,
    Refusal,
    StoreBatch,
    Throttled,
)
from kvhearth_server.tiers.chain import TierChain

BATCH_BLOCKS_MAX = 32
BATCHES_MAX = 4
"""Most batches under way at once."""
_HELD_BYTES_MAX = 256 << 20
_PAGE_BYTES = 4096
_PAUSE_MIN_S, _PAUSE_HELD_S, _PAUSE_MAX_S = 0.005, 0.1, 1.0
_WAIT = frozenset({Refusal.OPEN, Refusal.RATE, Refusal.RECOVERING})
"""Reasons for refusing a batch that wait in the queue; for other ones blocks are skipped."""
_log = get_logger("kvhearth.remote")


class Publisher:
    """Stores to shared tiers; see ``Tiering`` for the arguments."""

    def __init__(
        self,
        core: Core,
        chain: TierChain,
        names: BlockNaming,
        call: Callable[..., Any],
        now: Callable[[], float],
    ) -> None:
        self._core, self._chain, self._names = core, chain, names
        self._call, self._now = call, now
        self._stores: dict[int, BlockBatch] = {}
        self._leaving: dict[int, StoreBatch | LoadBatch] = {}
        """Blocks that a tier drops: a load, later a store; one at most, for the buffer's sake."""
        self._facts: Facts | None = None
        self._again_at = 0.0
        self._stalled = False
        self._too_large_told = False
        geometry = core.state.table.geometry
        smallest = min(geometry.segment_bytes(i) for i in range(len(geometry.segments)))
        self._bytes_max = min(_HELD_BYTES_MAX, int(smallest * HELD_FRACTION_MAX))

    @property
    def blocks(self) -> int:
        """Number of blocks that are being published."""
        leaving = sum(len(batch.keys) for batch in self._leaving.values())
        return leaving + sum(len(batch.keys) for batch in self._stores.values())

    @property
    def due_at(self) -> float:
        """Time at which a turn has something to publish; infinity if that takes another event."""
        full = self._stalled or len(self._stores) >= BATCHES_MAX
        return math.inf if full or not self._core.publishing.waiting else self._again_at

    def begin(self, end: float = math.inf) -> None:
        """Publish waiting blocks until the time ``end``, as far as the tiers accept them."""
        publishing, now = self._core.publishing, self._now()
        publishing.now = now
        while publishing.waiting and now >= self._again_at and len(self._stores) < BATCHES_MAX:
            room = self._bytes_max - publishing.payload_bytes
            batch = self._call(publishing.begin, BATCH_BLOCKS_MAX, room)
            if batch is None:  # no more may be held, until a batch or a reader lets go
                self._stalled, self._again_at = bool(self._stores), now + _PAUSE_HELD_S
                break
            ticket = self._chain.publish(self._names.store_batch(batch))
            if isinstance(ticket, Throttled):
                self._refused(batch, ticket, now)
            else:
                self._stores[ticket] = batch
            if time.perf_counter() > end:
                break

    def _refused(self, batch: BlockBatch, why: Throttled, now: float) -> None:
        publishing = self._core.publishing
        if why.reason in _WAIT:
            self._again_at = now + min(max(why.retry_after_s, _PAUSE_MIN_S), _PAUSE_MAX_S)
            self._call(publishing.retreat, batch)
            return
        for_good = why.reason == Refusal.TOO_LARGE
        if for_good and not self._too_large_told:
            self._too_large_told = True
            _log.warning(
                "remote.too_large",
                block_bytes=batch.block_bytes,
                message="the remote takes no values of this size: these blocks are not published",
            )
        self._call(publishing.skip, batch, str(why.reason), for_good=for_good)

    def completed(self, completion: Completion) -> bool:
        """Handle the completion of a store; return False if it belongs to none."""
        batch = self._stores.get(completion.ticket)
        if batch is None:
            return self._left(completion)
        if self._stalled:
            self._stalled, self._again_at = False, 0.0
        if completion.final:
            del self._stores[completion.ticket]
            self._count_unpublished(completion)
            published, wrong = completion.rows(Done), completion.rows(Corrupt)
            self._call(self._core.publishing.resolve, batch, published, wrong)
        return True

    def _count_unpublished(self, completion: Completion) -> None:
        state = self._core.state
        for outcome, rows in completion.parts:
            if isinstance(outcome, Throttled):
                state.count("publish_skipped", len(rows), outcome.reason)
            elif isinstance(outcome, Failed):
                state.count("publish_failed", len(rows), outcome.reason)

    # -- blocks that the last tier of the daemon's own drops ---------------------------------------

    def leaving(self) -> None:
        """Publish hot blocks that are about to be dropped: from memory, or read in time from the
        tier. One batch at a time; further blocks are left out, so that nothing waits.
        """
        for offer in self._chain.take_leaving():
            namespace = self._names.namespace(offer.family.namespace)
            if namespace is None or namespace.epoch != offer.family.epoch:
                continue
            kv_group = offer.family.group
            rows = self._call(self._core.publishing.leaving, namespace, kv_group, offer.keys)
            keys = [offer.keys[row] for row in rows.tolist()]
            if keys:
                self._skip_leaving(len(keys) - self._read(offer.family, keys), "leaving")

    def _skip_leaving(self, count: int, why: str) -> None:
        self._core.state.count("publish_skipped", count, why)

    def _read(self, family: BlockSpec, keys: list[bytes]) -> int:
        """Begin to read blocks that a tier drops; return how many."""
        chain = self._chain
        padded = -(-family.length // _PAGE_BYTES) * _PAGE_BYTES
        count = min(
            len(keys), BATCH_BLOCKS_MAX, chain.remote.buffer_bytes // (padded * family.shards)
        )
        facts = chain.look_up(family, keys[:count])
        if self._leaving or not count or not chain.remote.serving or not facts.present.all():
            return 0
        places = np.zeros((count, family.shards), ADDRESS_DTYPE)
        places["region"] = len(self._core.state.table.geometry.segments)
        places["offset"] = (np.arange(places.size) * padded).reshape(places.shape)
        batch = LoadBatch(family, keys[:count], places, is_use=False)
        ticket = chain.submit_load(batch)
        if isinstance(ticket, Throttled):
            return 0
        self._leaving[ticket], self._facts = batch, facts
        return count

    def _left(self, completion: Completion) -> bool:
        """Go on with blocks that a tier drops, which were read or stored."""
        batch = self._leaving.get(completion.ticket)
        if batch is None:
            return False
        if not completion.final:
            return True
        del self._leaving[completion.ticket]
        good, state, facts = completion.rows(Done), self._core.state, self._facts
        if isinstance(batch, StoreBatch):
            state.count("published_blocks", len(good))
            size = batch.family.length * batch.family.shards
            state.count("published_bytes", len(good) * size)
            self._count_unpublished(completion)
            return True
        assert facts is not None
        self._skip_leaving(len(batch.keys) - len(good), "leaving")
        if not len(good):
            return True
        store = StoreBatch(
            batch.family,
            [batch.keys[row] for row in good.tolist()],
            batch.places[good],
            np.ascontiguousarray(facts.checksums[good]),
            facts.sequences[good],
            facts.parents[good],
        )
        ticket = self._chain.publish(store)
        if isinstance(ticket, Throttled):
            self._skip_leaving(len(good), str(ticket.reason))
        else:
            self._leaving[ticket] = store
        return True
