"""The scrub: reads all stored blocks again and again, slowly, and verifies them.

It finds bytes that rot unread while another copy may still exist. The verifiers remove and count
blocks that do not match; this module only picks the next blocks and keeps to its rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import numpy as np

from kvhearth.model import I64, Bools
from kvhearth_server.core.lower_tier import PromotionRequest
from kvhearth_server.core.slot_table import State
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.engine.tiering.manager import Tiering
from kvhearth_server.engine.tiering.promotion import BEGUN_AT_ONCE
from kvhearth_server.tiers.base import BlockSpec, Corrupt, Done, Outcome

DRAM, SSD = "dram", "ssd"

_PORTION_BYTES = 4 << 20
"""Upper bound on the bytes of one read: others' checksums wait for its thread meanwhile."""
_PORTION_BLOCKS = 1024
"""Upper bound on the blocks of one read: naming each costs the loop a microsecond."""

_SEGMENT_PART = 64
"""Fraction (1/64) of a segment whose slots reads from SSD may occupy at most."""

_ROUND_S = 1.0
"""Shortest duration of a round, however little there is to read."""

_KEYS_A_STEP = 256
_LOAD_S = 30.0
"""Longest wait for a read; one that takes longer keeps its slots, and the scrub goes on."""
_AGAIN_S = 0.25
_TRIES = 4
_SLABS_A_TURN = 256

Verify = Callable[[list[I64], str], Awaitable[int]]


class Pace:
    """Limits the average bytes per second, without saving up for a burst."""

    def __init__(self, bytes_per_s: int) -> None:
        self._rate = bytes_per_s
        self._due = 0.0

    async def spend(self, size: int) -> None:
        """Wait until the rate allows for ``size`` more bytes, which were read just now."""
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now) + size / self._rate
        await asyncio.sleep(self._due - now)


class Scrub:
    """The scrub of all tiers.

    Args:
        engine: owner of the blocks.
        verify: ``Background.verify_blocks``.
        bytes_per_s: rate for each tier; more than zero.
    """

    def __init__(self, engine: Engine, verify: Verify, bytes_per_s: int) -> None:
        self._engine = engine
        self._verify = verify
        self._rate = bytes_per_s
        geometry = engine.core.state.table.geometry
        smallest = min(map(geometry.segment_bytes, range(len(geometry.segments))))
        self._load_bytes = min(_PORTION_BYTES, smallest // _SEGMENT_PART)

    def start(self, supervisor: Supervisor) -> None:
        """Start a task for each tier; call on the loop."""
        self._engine.scrub_progress[DRAM] = 0.0
        supervisor.spawn("scrub", self._memory_forever)
        if self._engine.tiering is not None:
            self._engine.scrub_progress[SSD] = 0.0
            supervisor.spawn("scrub_ssd", self._ssd_forever)

    async def _rounds(self, tier: str, work: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await work()
            self._engine.counters.add("scrub_rounds", 1, tier)
            await asyncio.sleep(max(0.0, _ROUND_S - (loop.time() - began)))
            self._engine.scrub_progress[tier] = 0.0

    def _count(self, tier: str, blocks: int, size: int) -> None:
        self._engine.counters.add("scrubbed_blocks", blocks, tier)
        self._engine.counters.add("scrubbed_bytes", size, tier)

    # -- memory ------------------------------------------------------------------------------------

    async def _memory_forever(self) -> None:
        pace = Pace(self._rate)
        await self._rounds(DRAM, lambda: self._memory_round(pace))

    async def _memory_round(self, pace: Pace) -> None:
        table = self._engine.core.state.table
        slabs = table.geometry.slab_count
        for slab in range(slabs):
            self._engine.scrub_progress[DRAM] = slab / slabs
            if slab % _SLABS_A_TURN == _SLABS_A_TURN - 1:
                await asyncio.sleep(0)
            for heads in self._portions(slab):
                blocks = table.blocks_of(heads[self._begin_blocks(heads)])
                size = sum(table.total_bytes(slots.reshape(-1)) for slots in blocks)
                await self._verify(blocks, "scrub")
                self._count(DRAM, sum(map(len, blocks)), size)
                await pace.spend(size)
        self._engine.scrub_progress[DRAM] = 1.0

    def _portions(self, slab: int) -> Iterator[I64]:
        """Yield the current heads of blocks that begin in a slab and may be served, in portions."""
        table = self._engine.core.state.table
        segment = int(table.slab_segment[slab])
        rows = self._engine.core.state.pools[segment].slots_in(slab)
        heads = rows.start + np.flatnonzero(self._begin_blocks(rows))
        if len(heads):
            slots = len(table.shards_of(int(heads[0])))
            fit = _PORTION_BYTES // (slots * int(table.slab_slot_bytes[slab]))
            step = min(max(1, fit), _PORTION_BLOCKS)
            for start in range(0, len(heads), step):
                yield heads[start : start + step]

    def _begin_blocks(self, rows: slice | I64) -> Bools:
        """Return at which slots a servable block begins now."""
        table = self._engine.core.state.table
        return np.asarray((table.state[rows] == State.SUMMED) & (table.head[rows] == 0))

    # -- SSD ---------------------------------------------------------------------------------------

    async def _ssd_forever(self) -> None:
        tiering = self._engine.tiering
        if tiering is None:
            return
        while tiering.tier.recovering:
            await asyncio.sleep(_AGAIN_S)
        pace = Pace(self._rate)
        await self._rounds(SSD, lambda: self._ssd_round(tiering, pace))

    async def _ssd_round(self, tiering: Tiering, pace: Pace) -> None:
        total, seen, cursor = max(1, tiering.tier.blocks), 0, 0
        while not tiering.tier.broken:
            cursor, found = tiering.tier.walk(cursor, _KEYS_A_STEP)
            for family, keys in found:
                await self._ssd_family(tiering, pace, family, keys)
                seen += len(keys)
                self._engine.scrub_progress[SSD] = min(1.0, seen / total)
            if not cursor:
                break
            await asyncio.sleep(0)
        self._engine.scrub_progress[SSD] = 1.0

    async def _ssd_family(
        self, tiering: Tiering, pace: Pace, family: BlockSpec, keys: list[bytes]
    ) -> None:
        block_bytes = family.length * family.shards
        step = max(1, min(self._load_bytes // block_bytes, BEGUN_AT_ONCE // family.shards))
        for start in range(0, len(keys), step):
            request = self._request_promotion(tiering, family, keys[start : start + step])
            if request is None:
                return
            verified = await self._ssd_portion(tiering, request)
            self._count(SSD, verified, verified * block_bytes)
            await pace.spend(verified * block_bytes)

    def _request_promotion(
        self, tiering: Tiering, family: BlockSpec, keys: list[bytes]
    ) -> PromotionRequest | None:
        """Translate keys of the tier's ``family`` into a promotion request of the core.

        Returns None for blocks that no lookup can name: those of an older epoch or of a dropped
        namespace.
        """
        for namespace in self._engine.core.state.namespaces:
            specs = namespace.contract.groups
            if family.group < len(specs) and tiering.family(namespace, family.group) == family:
                parents = [b""] * len(keys)
                return PromotionRequest(namespace, family.group, specs[family.group], keys, parents)
        return None

    async def _ssd_portion(self, tiering: Tiering, request: PromotionRequest) -> int:
        """Read and verify blocks of the tier; return how many were read to the end."""
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_done(parts: list[tuple[Outcome, I64]]) -> None:
            read = [rows for outcome, rows in parts if isinstance(outcome, Done | Corrupt)]
            if not ended.done():
                ended.set_result(sum(map(len, read)))

        for _ in range(_TRIES):
            if tiering.verify_lower_tier(request, on_done):
                break
            await asyncio.sleep(_AGAIN_S)
        else:
            return 0  # no room now, or they are being promoted and verified by that
        try:
            async with asyncio.timeout(_LOAD_S):
                return await ended
        except TimeoutError:
            return 0
