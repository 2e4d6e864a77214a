"""Connects the tiers to the core: write-back, promotion, repair, and a log of degradations."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvhearth.model import I64, Bools, PackedKeys
from kvhearth_server.core.core import Core
from kvhearth_server.core.lookup import hit_blocks
from kvhearth_server.core.lower_tier import Below, PromotionRequest
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.publishing import PublishPolicy
from kvhearth_server.core.removal import tell_gone
from kvhearth_server.engine.tiering.naming import BlockNaming
from kvhearth_server.engine.tiering.promotion import Promoter
from kvhearth_server.engine.tiering.publishing import Publisher
from kvhearth_server.engine.tiering.writeback import WritebackLoop
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.base import (
    REMOTE,
    Completion,
    Evicted,
    Kind,
    Tier,
)
from kvhearth_server.tiers.chain import TierChain
from kvhearth_server.tiers.figures import TierFigures

LOOK_S = 0.25
"""Shortest time between two looks, in seconds."""

ASKING_ROUNDS = 2
"""Rounds of requests that finding the end of a chain at a shared tier usually takes."""

OVER_S = 5.0
"""Time after which a degradation counts as over. One that comes and goes faster is a single
degradation: a drive on which every second write fails must not fill the log.
"""

_log = get_logger("kvhearth.ssd")


@dataclass
class _Reported:
    began: float
    seen: float
    reason: str


class DegradedLog:
    """Logs each degradation of the tier once when it begins and once when it is over.

    Args:
        found: returns the current degradations, each with a sentence; see ``Tier.problems``.
        log: a logger from ``get_logger``.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        found: Callable[[], Mapping[Kind, str]],
        log: Any = _log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._found, self._log, self._clock = found, log, clock
        self._next_at = 0.0
        self._reported: dict[Kind, _Reported] = {}

    def look(self) -> None:
        """Look for degradations if it is time; meant to be called often."""
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + LOOK_S
        for kind, reason in self._found().items():
            reported = self._reported.get(kind)
            if reported is None:
                self._reported[kind] = _Reported(now, now, reason)
                if kind.about == REMOTE:
                    self._log.warning("remote.degraded", reason=reason, **_fields(kind))
                else:
                    self._log.warning("ssd.degraded", reason=reason, **_fields(kind))
            else:
                reported.seen, reported.reason = now, reason
        for kind, reported in list(self._reported.items()):
            if now - reported.seen >= OVER_S:
                del self._reported[kind]
                lasted_s = round(reported.seen - reported.began, 3)
                over = {"reason": reported.reason, "lasted_s": lasted_s, **_fields(kind)}
                if kind.about == REMOTE:
                    self._log.info("remote.degradation_over", **over)
                else:
                    self._log.info("ssd.degradation_over", **over)


def _fields(kind: Kind) -> dict[str, str]:
    if kind.about == REMOTE:
        return {"remote": kind.directory, "kind": kind.word}
    return {"directory": kind.directory, "kind": kind.word}


class Tiering:
    """The tiers under the core.

    Args:
        core: the core whose offered blocks are written and whose promotion requests are loaded.
        tiers: one or more, of which at most the first is not shared: memory's blocks are written to
            it. Blocks are published to the remote, also from the region behind the arena's
            segments if these have one (``Tier.buffer_bytes``).
        lineage: ID that the epochs belong to (docs/adr/0008); blocks stored under another lineage
            are never found.
        call: makes a call of the core and applies its actions.
        now: seconds.
        policy: blocks to publish if there is a shared tier.
    """

    def __init__(
        self,
        core: Core,
        tiers: Sequence[Tier],
        lineage: str,
        call: Callable[..., Any],
        now: Callable[[], float],
        policy: PublishPolicy = PublishPolicy.REUSE,
    ) -> None:
        self._core = core
        self._call = call
        self._now = now
        self.names = BlockNaming(core, lineage)
        self._first, self._several = tiers[0], len(tiers) > 1
        self._chain = TierChain(tiers) if tiers[-1].shared else None
        self.tier: Tier = self._chain or tiers[0]
        """All tiers as one."""
        self.use_policy(policy)
        for tier in tiers:
            tier.use_owners(self.names.owner)
            tier.use_identities(self.names.identify)
        self.promoter = Promoter(core, self.tier, self.names, call, now)
        self.writeback = WritebackLoop(core, self.tier, self.names, call, now)
        self._publisher: Publisher | None = None
        if self._chain is not None:
            self._publisher = Publisher(core, self._chain, self.names, call, now)
        self._completions = deque[Completion]()
        self._drops = deque[Evicted]()
        self._turning = False
        self._recovering = self.tier.recovering
        self.orphaned_loads_after = 0.0
        """Time at which even drives that only an earlier run had are certainly idle."""
        self.due = asyncio.Event()
        """Set when ``turn`` has something to do."""
        core.state.writeback_queue.on = not tiers[0].shared
        core.state.lower_tier = self

    def use_policy(self, policy: PublishPolicy) -> None:
        """Publish by this policy from now on, if there is a shared tier."""
        if self._chain is not None:
            self._core.publishing.use(policy, self._chain.remote.life_s)

    # -- what lookups ask --------------------------------------------------------------------------

    def present(self, namespace: Namespace, kv_group: int, keys: Sequence[bytes]) -> Bools:
        """Return which keys could be loaded from tiers that are not shared."""
        return self.tier.look_up(self.names.family(namespace, kv_group), keys).present

    def ask(
        self, namespace: Namespace, kv_group: int, keys: Sequence[bytes], here: Bools
    ) -> Below | None:
        """Return where keys could be loaded from; see ``core.lower_tier.LowerTier``."""
        chain = self._chain
        if chain is not None and (namespace.label is None or not chain.remote.serving):
            if chain.shared:
                return None
            chain = None
        family = self.names.family(namespace, kv_group)
        window = hit_blocks(namespace.contract.groups[kv_group])
        if chain is not None and chain.shared and not np.count_nonzero(here):
            present, asking = chain.remote.ask(family, keys, window)
            if asking is None and not np.count_nonzero(present):
                return None
            return Below(present, present, asking)
        if chain is None:
            return Below(self.tier.look_up(family, keys).present & ~here)
        absent = ~here
        if not chain.shared:
            absent &= ~self.tier.look_up(family, keys).present
        first, count = int(absent.argmax()), len(keys)
        if not absent[first]:
            return Below(~here)
        # Nearly always: tiers hold chains from their begin.
        whole = np.count_nonzero(absent) == count - first
        rows: I64 | slice = slice(first, None) if whole else np.flatnonzero(absent)
        present, asking = chain.remote.ask(family, _some(keys, rows), window)
        remote = _spread(present, rows, count) if np.count_nonzero(present) else None
        if asking is not None:
            asking = _spread(asking, rows, count)
        if chain.shared:
            if remote is None and asking is None:
                return None
            return Below(np.zeros(count, np.bool_) if remote is None else remote, remote, asking)
        local = ~(absent | here)
        return Below(local if remote is None else local | remote, remote, asking)

    def shared_has(self, namespace: Namespace, kv_group: int, keys: Sequence[bytes]) -> Bools:
        """Return which keys a shared tier has, as far as is known."""
        if self._chain is None or namespace.label is None:
            return np.zeros(len(keys), np.bool_)
        return self._chain.remote.has(self.names.family(namespace, kv_group), keys)

    def list_keys(
        self, namespace: Namespace, kv_group: int, place: int, count: int
    ) -> tuple[list[bytes], int]:
        """List blocks of the namespace's current epoch on tiers that are not shared."""
        family = self.names.family(namespace, kv_group)
        keys, after = self.tier.list_keys(family.namespace, kv_group, place, count)
        present = self.tier.look_up(family, keys).present.tolist()
        return [key for key, here in zip(keys, present, strict=True) if here], after

    def eta_us(
        self,
        promotion_queue: Iterable[PromotionRequest],
        *,
        remote: bool = False,
        asking: bool = False,
    ) -> int:
        """Return the microseconds until all requested blocks could be in memory; 0 for none.

        Args:
            remote: some of them are in a shared tier only.
            asking: a shared tier is being asked about others.
        """
        loads = [(self.names.family(w.namespace, w.kv_group), len(w.keys)) for w in promotion_queue]
        seconds = self.tier.estimate_s(loads, self.promoter.queue.records) if loads else 0.0
        if self._chain is not None and remote:
            seconds = max(seconds, self._chain.remote.estimate_s(loads))
        if self._chain is not None and asking:
            seconds = max(seconds, ASKING_ROUNDS * self._chain.remote.estimate_s([]))
        return max(1, round(seconds * 1e6)) if loads or asking else 0

    # -- dropping ----------------------------------------------------------------------------------

    def forget_copies(self, namespace: Namespace, name: bytes, count: int) -> int:
        """Forget up to ``count`` copies under an earlier name of a namespace; return how many."""
        found = self.tier.forget_namespace(name, count)
        if found is None:
            return 0
        self._call(self._core.writeback.lost, namespace, found.group, found.keys)
        tell_gone(self._core.state, namespace, found.group, found.keys, found.cause)
        return len(found.keys)

    # -- up ----------------------------------------------------------------------------------------

    def promote(
        self, promotion_queue: Iterable[PromotionRequest], group: int = 0, lease_id: int = 0
    ) -> None:
        """Promote blocks for a lookup of a group (group 0: for no particular requester)."""
        self.promoter.ask(promotion_queue, (group, lease_id))
        if self.promoter.queue.blocks:
            self.due.set()

    def repair(self, heads: I64) -> Callable[[], None]:
        """Return a function that promotes good copies of blocks about to be removed as corrupt."""
        state, promotion_queue = self._core.state, list[PromotionRequest]()
        table = state.table
        for number, kv_group, alike in table.by_kind(heads):
            namespace = state.namespaces.get(number)
            mine = alike[table.epoch[alike] == namespace.epoch]
            keys = state.index.keys(mine)
            rows = np.flatnonzero(self.present(namespace, kv_group, keys))
            links = table.parent[mine[rows]].astype(np.int64)
            names = iter(state.index.keys(links[links > 0] - 1))
            parents = [next(names) if link else b"" for link in links.tolist()]
            if parents:
                spec = namespace.contract.groups[kv_group]
                lower_tier = [keys[row] for row in rows.tolist()]
                promotion_queue.append(
                    PromotionRequest(namespace, kv_group, spec, lower_tier, parents)
                )

        def bring_back() -> None:
            state.count(
                "repaired_blocks", sum(len(request.keys) for request in promotion_queue), "dram"
            )
            self.promote(promotion_queue)

        return bring_back

    # -- a turn ------------------------------------------------------------------------------------

    def turn(self, seconds: float = math.inf) -> None:
        """Do the work that is due, or begin to: after ``seconds``, the rest waits for a turn."""
        self._turning = True
        try:
            self._turn(time.perf_counter() + seconds)
        finally:
            self._turning = False
        loads = self.promoter.queue.blocks and not self.promoter.stalled
        if self._completions or self._drops or loads or self.pause_s() <= 0:
            self.due.set()

    def wake(self) -> None:
        """Wake the loop if the last call of the core left something to write or to publish."""
        waiting = self._core.state.writeback_queue.waiting or self._core.publishing.waiting
        if waiting and not self._turning and self.pause_s() <= 0:
            self.due.set()

    def pause_s(self) -> float:
        """Return the seconds until a turn has something to do; infinity without an event."""
        at = min(self.writeback.due_at, self.tier.due_at)
        if self._publisher is not None:
            at = min(at, self._publisher.due_at)
        return at - self._now()

    def _turn(self, end: float) -> None:
        publisher = self._publisher
        if self._recovering and not self.tier.recovering:  # no event told what it has read back
            self._core.state.events.end_all()
        self._recovering = self.tier.recovering
        self._completions.extend(self.tier.poll())
        while self._completions:
            completion = self._completions.popleft()
            mine = self.writeback.completed(completion)
            if not mine and publisher is not None:
                mine = publisher.completed(completion)
            if not mine:
                self.promoter.completed(completion)
            if time.perf_counter() > end:
                return
        self._drops.extend(self.tier.take_evicted())
        while self._drops:
            self._evicted(self._drops.popleft())
            if time.perf_counter() > end:
                return
        if publisher is not None:
            publisher.leaving()
        promotions, now = self._core.promotions, self._now()
        busy = self.tier.loads_of_the_dead or now < self.orphaned_loads_after
        if len(promotions.orphaned_loads) and not busy:
            self._call(promotions.free_orphaned_loads)
        if self.promoter.queue.blocks:
            self.promoter.begin(end)
        self.writeback.begin(end)
        if publisher is not None:
            publisher.begin(end)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued and nothing is under way."""
        publishing = self._publisher is not None and self._publisher.blocks
        return self.promoter.idle and not (self.writeback.blocks or publishing)

    def figures(self) -> TierFigures | None:
        """Return the SSD tier's figures, with what is on its way; None without one."""
        found = self._first.figures()
        return found and replace(
            found,
            demoting_blocks=self.writeback.blocks,
            promoting_blocks=self.promoter.under_way,
            promotion_seconds=self.promoter.seconds,
        )

    def _evicted(self, evicted: Evicted) -> None:
        """Record blocks that a tier dropped, to make room or because they could not be read."""
        namespace, keys = self.names.namespace(evicted.namespace), evicted.keys
        if self._several and namespace is not None:
            here = self.present(namespace, evicted.group, keys).tolist()
            if evicted.cause == "checksum":
                self.promoter.count_wrong(sum(here))
            keys = [key for key, copied in zip(keys, here, strict=True) if not copied]
            if not keys:
                return
        if evicted.cause == "checksum":
            self.promoter.found_wrong(namespace, evicted.group, keys)
        elif namespace is not None:
            self._core.writeback.lost(namespace, evicted.group, keys)
            tell_gone(self._core.state, namespace, evicted.group, keys, evicted.cause)


_TURN_S = 0.001
"""Time of the loop that one turn takes. A step that has begun goes on above it: a batch's end, the
begin of a load of ``promotion.BEGUN_AT_ONCE`` slots or of a store.
"""
_CYCLES = 8
"""Cycles of the loop between two turns: a session that waits for its reply has several calls."""
_PAUSE_S = 0.1
"""Longest time between two turns: only a turn notices a request that is stuck or due again."""
_FLUSH_S = 0.01


async def drive(tiering: Tiering, degraded: DegradedLog) -> None:
    """Take turns for as long as the task lives."""
    loop = asyncio.get_running_loop()
    due, descriptor = tiering.due, tiering.tier.event_fd
    loop.add_reader(descriptor, due.set)
    try:
        while True:
            degraded.look()  # before the turn: one that fails is followed by none
            try:
                async with asyncio.timeout(min(_PAUSE_S, max(0.0, tiering.pause_s()))):
                    await due.wait()
            except TimeoutError:
                pass
            due.clear()
            tiering.turn(_TURN_S)
            for _ in range(_CYCLES):
                await asyncio.sleep(0)
    finally:
        loop.remove_reader(descriptor)


async def written(tiering: Tiering) -> None:
    """Wait until every offered block is written or refused."""
    while tiering.writeback.blocks:
        tiering.due.set()
        await asyncio.sleep(_FLUSH_S)


def _some(keys: Sequence[bytes], rows: I64 | slice) -> Sequence[bytes]:
    """Return some of the keys, in order."""
    if isinstance(rows, slice):
        if not rows.start:
            return keys
        if isinstance(keys, PackedKeys):
            return PackedKeys(keys.blob[rows.start * keys.key_bytes :], keys.key_bytes)
        return keys[rows]
    return [keys[row] for row in rows.tolist()]


def _spread(flags: Bools, rows: I64 | slice, count: int) -> Bools:
    """Return flags of some rows as flags of all ``count``."""
    if len(flags) == count:
        return flags
    spread = np.zeros(count, np.bool_)
    spread[rows] = flags
    return spread
