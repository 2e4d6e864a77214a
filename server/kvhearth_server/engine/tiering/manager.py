"""What is wrong with the slower tier, in the log: once when it begins, once when it is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvhearth.model import I64, Bools
from kvhearth_server.core.core import Core
from kvhearth_server.core.lower_tier import PromotionRequest
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.engine.tiering.naming import TierNames
from kvhearth_server.engine.tiering.promotion import Ended, Promoter
from kvhearth_server.engine.tiering.writeback import WritebackLoop
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.base import BlockSpec, Evicted
from kvhearth_server.tiers.ssd.health import Kind
from kvhearth_server.tiers.ssd.tier import SsdTier

LOOK_S = 0.25
"""Between two looks at the least."""

OVER_S = 5.0
"""What comes and goes faster than this is one degradation: a drive of which each second write fails
must not fill the log.
"""

_log = get_logger("kvhearth.ssd")


@dataclass
class _Told:
    began: float
    seen: float
    reason: str


class DegradedLog:
    """Looks at what is wrong now, and logs what began or is over.

    Args:
        found: what is wrong, each with a sentence; see ``SsdStatus.by_kind``.
        log: of ``get_logger``.
        clock: seconds that only rise.
    """

    def __init__(
        self,
        found: Callable[[], Mapping[Kind, str]],
        log: Any = _log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._found, self._log, self._clock = found, log, clock
        self._next_at = 0.0
        self._told: dict[Kind, _Told] = {}

    def look(self) -> None:
        """Look, if it is time; call it again and again."""
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + LOOK_S
        for kind, reason in self._found().items():
            told = self._told.get(kind)
            if told is None:
                self._told[kind] = _Told(now, now, reason)
                self._log.warning("the SSD tier is degraded", reason=reason, **_fields(kind))
            else:
                told.seen, told.reason = now, reason
        for kind, told in list(self._told.items()):
            if now - told.seen >= OVER_S:
                del self._told[kind]
                lasted_s = round(told.seen - told.began, 3)
                self._log.info(
                    "a degradation of the SSD tier is over",
                    reason=told.reason,
                    lasted_s=lasted_s,
                    **_fields(kind),
                )


def _fields(kind: Kind) -> dict[str, str]:
    return {"directory": kind.directory, "kind": kind.word}


class Tiering:
    """One slower tier under the core.

    Args:
        core: its offers are written, its climbs are loaded.
        tier: where to and where from.
        lineage: of the epochs (docs/adr/0008): what another lineage stored is never found.
        call: does a call of the core and what it asks for.
        now: seconds.
    """

    def __init__(
        self,
        core: Core,
        tier: SsdTier,
        lineage: str,
        call: Callable[..., Any],
        now: Callable[[], float],
    ) -> None:
        self.tier = tier
        self._core = core
        self._call = call
        self._now = now
        self._names = TierNames(core, lineage)
        self._promoter = Promoter(core, tier, self._names, call)
        self._writeback = WritebackLoop(core, tier, self._names, call, now)
        self._turning = False
        self.orphaned_loads_after = 0.0
        """When drives of an earlier run that are not this one's are certainly quiet, too."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something for ``turn`` to do."""
        core.state.writeback_queue.on = True
        core.state.lower_tier = self

    # -- what lookups ask --------------------------------------------------------------------------

    def present(self, namespace: Namespace, kv_group: int, keys: Sequence[bytes]) -> Bools:
        """Which keys could be loaded; see ``core.below.Below``."""
        return self.tier.look_up(self.family(namespace, kv_group), keys).present

    def eta_us(self, promotion_queue: Iterable[PromotionRequest]) -> int:
        """Until all wished blocks could be here, in microseconds; 0 for no wishes."""
        loads = [(self.family(w.namespace, w.kv_group), len(w.keys)) for w in promotion_queue]
        if not loads:
            return 0
        return max(1, round(self.tier.status.estimate_s(loads, self._promoter.records) * 1e6))

    def family(self, namespace: Namespace, kv_group: int) -> BlockSpec:
        """What the tier calls the blocks of a KV group."""
        return self._names.family(namespace, kv_group)

    # -- dropping ----------------------------------------------------------------------------------

    def name(self, namespace: Namespace) -> bytes:
        """What the tier calls a namespace now; ``Core.drop_copies`` gives it another name."""
        return self._names.name(namespace)

    def forget_copies(self, namespace: Namespace, name: bytes, count: int) -> int:
        """Forget up to ``count`` copies that the tier has under an earlier name of a namespace;
        returns how many.
        """
        found = self.tier.forget_namespace(name, count)
        if found is None:
            return 0
        self._call(self._core.writeback.lost, namespace, found.group, found.keys)
        self._names.tell_lost(namespace, found.group, found.keys, found.cause)
        return len(found.keys)

    # -- up ----------------------------------------------------------------------------------------

    def promote(
        self, promotion_queue: Iterable[PromotionRequest], group: int = 0, lease_id: int = 0
    ) -> None:
        """Let blocks climb, for a lookup of a group (0: for nobody in particular)."""
        self._promoter.ask(promotion_queue, (group, lease_id))
        if self._promoter.waiting:
            self.wake()

    def cancel(self, group: int, lease_ids: Iterable[int]) -> None:
        """The requests behind these lookups went away."""
        self._promoter.cancel(group, lease_ids)

    def group_ended(self, group: int) -> None:
        """Nobody of this group waits for anything any more."""
        self._promoter.group_ended(group)

    def verify_lower_tier(self, request: PromotionRequest, ended: Ended) -> bool:
        """Read blocks of the tier and check them, keeping none; ``ended`` is told the outcomes by
        row of what was read. False if there is no room for it now.
        """
        return self._promoter.verify(request, ended)

    def repair(self, heads: I64) -> Callable[[], None]:
        """For blocks that are about to be removed as wrong: what brings them back from below."""
        state, promotion_queue = self._core.state, list[PromotionRequest]()
        table = state.table
        pairs = table.namespace[heads].astype(np.int64) * 256 + table.group[heads]
        for pair in np.unique(pairs).tolist():
            namespace, kv_group = state.namespaces.get(pair // 256), pair % 256
            mine = heads[(pairs == pair) & (table.epoch[heads] == namespace.epoch)]
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

    def turn(self) -> None:
        """Everything that is due."""
        self._turning = True
        try:
            self._turn()
        finally:
            self._turning = False
        if self._promoter.due or self.pause_s() <= 0:
            self.wake()

    def nudge(self) -> None:
        """The core was called: there may be something to write."""
        if self._core.state.writeback_queue.waiting and not self._turning and self.pause_s() <= 0:
            self.wake()

    def pause_s(self) -> float:
        """Until a turn has something to write; infinity for not before something else happens."""
        return self._writeback.due_at - self._now()

    def _turn(self) -> None:
        for completion in self.tier.poll():
            if not self._writeback.completed(completion):
                self._promoter.completed(completion)
        for evicted in self.tier.take_evicted():
            self._evicted(evicted)
        if len(self._core.promotions.orphaned_loads) and self._orphaned_loads_are_over():
            self._call(self._core.promotions.free_orphaned_loads)
        self._promoter.begin()
        self._writeback.begin()

    def _orphaned_loads_are_over(self) -> bool:
        """No request of a dead daemon can still be under way."""
        status = self.tier.status
        locked = status.locked_files or status.unusable_places
        return not locked and self._now() >= self.orphaned_loads_after

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return self._promoter.idle and not self._writeback.blocks

    @property
    def writing(self) -> int:
        """Blocks that wait to be written or are being written."""
        return self._writeback.blocks

    @property
    def promoting(self) -> int:
        """Blocks that are being loaded."""
        return len(self._core.promotions)

    def _evicted(self, evicted: Evicted) -> None:
        """The tier let blocks go: to make room, or because it could not read them right."""
        namespace, keys = self._names.namespace(evicted.namespace), evicted.keys
        if evicted.cause == "checksum":
            self._promoter.found_wrong(namespace, evicted.group, keys)
        elif namespace is not None:
            self._core.writeback.lost(namespace, evicted.group, keys)
            self._names.tell_lost(namespace, evicted.group, keys, evicted.cause)


_TURN_S = 0.1
"""Between two turns at the latest: what is stuck, or may be tried again, is only seen in a turn."""
_FLUSH_S = 0.01


async def drive(tiering: Tiering, degraded: DegradedLog) -> None:
    """Take turns for as long as the task lives."""
    loop = asyncio.get_running_loop()
    due = asyncio.Event()
    descriptor = tiering.tier.event_fd
    tiering.wake = due.set
    loop.add_reader(descriptor, due.set)
    try:
        while True:
            degraded.look()  # before the turn: one that fails is followed by none
            try:
                async with asyncio.timeout(min(_TURN_S, max(0.0, tiering.pause_s()))):
                    await due.wait()
            except TimeoutError:
                pass
            due.clear()
            tiering.turn()
            await asyncio.sleep(0)
    finally:
        loop.remove_reader(descriptor)


async def written(tiering: Tiering) -> None:
    """Wait until everything that was offered is written or was refused."""
    while tiering.writing:
        tiering.wake()
        await asyncio.sleep(_FLUSH_S)
