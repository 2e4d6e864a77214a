"""Loads of the scheduler's half, from a request's lookup to the report of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvhearth.connectors.core.engine import (
    NULL_PAGE,
    BlockTable,
    Context,
    Request,
    RequestOptions,
    rows,
)
from kvhearth.connectors.core.lookup_queue import Lookup
from kvhearth.connectors.core.step_metadata import LoadJob, Move, RankLoaded
from kvhearth.connectors.core.store_tracker import Progress
from kvhearth.contract import GroupKind
from kvhearth.model import Records
from kvhearth.results import LookupResult


@dataclass(eq=False)
class RequestState:
    """State of a live request.

    Attributes:
        request: the engine's request.
        options: its own demands.
        progress: progress of its stores.
        handover_until: end of the wait for another engine's blocks, monotonic seconds.
        lookup: lookup that decides its next admission; None before it is queued and after it was
            used.
        seen: True once the lookup's answer was counted.
        given_up: nothing is loaded any more: a load failed, or an answer took too long.
        declined: this lookup's hit is not loaded.
        asked_count: lookups since the request was last admitted.
        asked_tokens: tokens that the last lookup covered.
        offer: (tokens the engine has, tokens offered) of the last answer.
        computed_tokens: tokens that the engine had when it last asked.
        judged, worth: the last answer with blocks being promoted, and whether to wait for them.
        waited: the request has waited for them.
        sources: tokens of its last load that were in DRAM, and that were promoted from SSD.
        loading: a load of ours is under way.
        admitted: the engine has given it pages; it may have KV.
        dispatched: a step has computed tokens of it since its last admission. All KV that the
            engine counts as computed is then written when its steps end: an engine schedules a
            request only when every load for it has arrived.
        due_step: see ``DueRequests``.
    """

    request: Request
    options: RequestOptions
    progress: Progress
    handover_until: float
    lookup: Lookup | None = None
    seen: bool = False
    given_up: bool = False
    declined: bool = False
    asked_count: int = 0
    asked_tokens: int = 0
    offer: tuple[int, int] = (0, 0)
    computed_tokens: int = 0
    judged: LookupResult | None = None
    worth: bool = False
    waited: bool = False
    sources: tuple[int, int] = (0, 0)
    loading: bool = False
    admitted: bool = False
    dispatched: bool = False
    due_step: int = 0


@dataclass(eq=False)
class _Load:
    state: RequestState
    found: LookupResult
    tokens: int
    begun_at: float
    outcomes: list[RankLoaded] = field(default_factory=list)


class Loads:
    """Plans loads, and ends their leases when every rank has reported.

    Args:
        context: the engine's shared objects.
    """

    def __init__(self, context: Context) -> None:
        self._client = context.client
        self._clock = context.client.clock
        self._groups = context.groups
        self._shards = context.geometry.shards
        self._policy = context.policy
        self._counters = context.counters
        self._under_way: dict[str, _Load] = {}
        self._due: list[LoadJob] = []
        self._lost: list[str] = []

    @property
    def count(self) -> int:
        """Loads under way."""
        return len(self._under_way)

    def take_due(self) -> tuple[list[LoadJob], list[str]]:
        """Return the jobs planned since the last call, and requests whose load could not be
        planned.
        """
        due, lost = self._due, self._lost
        self._due, self._lost = [], []
        return due, lost

    def lose(self, request_id: str) -> None:
        """Report a load as failed that the engine waits for and that will never begin."""
        self._lost.append(request_id)

    def begin(self, state: RequestState, table: BlockTable, tokens: int) -> None:
        """Load ``tokens`` beyond those that the engine has into the request's pages."""
        lookup, request_id = state.lookup, state.request.request_id
        state.lookup, state.loading = None, True
        found = None if lookup is None else lookup.result
        if lookup is None or found is None or lookup.session_id != self._client.session_id:
            self.lose(request_id)
            return
        lookup.cancelled = True  # this load owns its lease now
        self._under_way[request_id] = _Load(state, found, tokens, self._clock.now())
        start = state.offer[0]
        moves = self._moves(found, table, start, start + tokens)
        if moves is None:
            self.lose(request_id)
            return
        dram = min(max(lookup.first_tokens - start, 0), tokens)
        state.sources = (dram, tokens - dram)
        self._counters.add_all(
            {
                "load_requests": 1,
                "load_tokens": tokens,
                "hit_dram_tokens": dram,
                "hit_ssd_tokens": tokens - dram,
            }
        )
        for group, spec in enumerate(self._groups.specs):
            if spec.kind is not GroupKind.MAMBA:
                end = (start + tokens) // spec.block_tokens
                state.progress.next_block[group] = max(state.progress.next_block[group], end)
        self._due.append(LoadJob(request_id, found.boot_id, moves))

    def _moves(
        self, found: LookupResult, block_table: BlockTable, start: int, end: int
    ) -> dict[int, Move] | None:
        """Return the copies by group; None if the lookup's lease or the block table does not cover
        them.
        """
        moves = {}
        for group, kv_group in enumerate(self._groups.kv_groups):
            blocks = self._groups.needed(group, start, end)
            result, table = found.groups[group], block_table[kv_group]
            at = rows(result.leased, blocks)
            if at is None or blocks.stop > len(table):
                return None
            pages = np.fromiter(table[blocks.start : blocks.stop], np.int64, len(blocks))
            extents: Records = result.extents.reshape(-1, self._shards)[at]
            if not pages.all():  # the window does not reach back that far
                if self._groups.specs[group].kind is GroupKind.FULL:
                    return None
                kept = pages != NULL_PAGE
                pages, extents = pages[kept], extents[kept]
            moves[group] = Move(pages, extents)
        return moves

    def reported(self, request_id: str, outcomes: Sequence[RankLoaded]) -> None:
        """Add the outcomes of some ranks for the request's load; ranks may report in different
        steps.
        """
        load = self._under_way.get(request_id)
        if load is not None:
            load.outcomes.extend(outcomes)

    def finish(self, request_id: str, *, failed: bool) -> None:
        """End the request's load after every rank is done, so that no rank reads the slots any
        more.
        """
        load = self._under_way.pop(request_id, None)
        if load is None:
            return
        load.state.loading = False
        seconds = self._clock.now() - load.begun_at
        bad: dict[int, Records] = {}
        for outcome in load.outcomes:
            self._counters.add("load_bytes", outcome.bytes)
            for group, extents in outcome.bad.items():
                bad[group] = np.concatenate([bad[group], extents]) if group in bad else extents
        self._client.release(load.found.lease, bad=bad or None)
        if failed:
            load.state.given_up = True
            self._counters.add("load_failed")
        else:
            self._counters.add("load_seconds", seconds)
            self._policy.load.observe(load.tokens, seconds)

    def close(self) -> None:
        """Release all leases. The workers have ended, or the end of their session releases
        theirs.
        """
        for load in self._under_way.values():
            self._client.release(load.found.lease)
        self._under_way.clear()
