"""The scrub: reads everything that is stored again and again, slowly, and verifies it.

Bytes that rot where nobody reads them are found while another copy may still be there. What does
not match is removed and counted by those who verify; this module only says what is next, and keeps
to its rate.
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
from kvhearth_server.tiers.base import BlockSpec, Corrupt, Done, Outcome

DRAM, SSD = "dram", "ssd"

_PORTION_BYTES = 4 << 20
"""Read at once: a fraction of a millisecond of the thread that others' checksums wait for."""
_PORTION_BLOCKS = 1024
"""However small they are: naming them costs the loop a microsecond each."""

_SEGMENT_PART = 64
"""What is read from SSD needs slots: at most this part of a segment is taken for it."""

_ROUND_S = 1.0
"""A round takes no less, however little there is."""

_KEYS_A_STEP = 256
_LOAD_S = 30.0
"""A device that holds on to a read longer than this keeps its slots, and the scrub goes on."""
_AGAIN_S = 0.25
_TRIES = 4
_SLABS_A_TURN = 256

Verify = Callable[[list[I64], str], Awaitable[int]]


class Pace:
    """Lets through so many bytes a second on average, without saving up for a burst."""

    def __init__(self, bytes_per_s: int) -> None:
        self._rate = bytes_per_s
        self._due = 0.0

    async def spend(self, size: int) -> None:
        """Wait until ``size`` more bytes, which were read just now, are paid for."""
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now) + size / self._rate
        await asyncio.sleep(self._due - now)


class Scrub:
    """The scrub of all tiers.

    Args:
        engine: whose blocks are read.
        verify: ``Background.verify_blocks``.
        bytes_per_s: of each tier; more than zero.
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
        """Heads of the blocks that begin in a slab and may be served, as they are now."""
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
        """At which slots a block begins that may be served, as they are now."""
        table = self._engine.core.state.table
        return np.asarray((table.state[rows] == State.SUMMED) & (table.head[rows] == 0))

    # -- SSD ---------------------------------------------------------------------------------------

    async def _ssd_forever(self) -> None:
        tiering = self._engine.tiering
        if tiering is None:
            return
        while tiering.tier.status.recovering:
            await asyncio.sleep(_AGAIN_S)
        pace = Pace(self._rate)
        await self._rounds(SSD, lambda: self._ssd_round(tiering, pace))

    async def _ssd_round(self, tiering: Tiering, pace: Pace) -> None:
        total, seen, cursor = max(1, tiering.tier.status.blocks), 0, 0
        while not tiering.tier.status.interface_broken:
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
        step = max(1, self._load_bytes // block_bytes)
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
        """What the tier calls ``family``, as the core calls it; None for what nobody can ask for:
        blocks of an older epoch, or of a namespace that is gone.
        """
        for namespace in self._engine.core.state.namespaces:
            specs = namespace.contract.groups
            if family.group < len(specs) and tiering.family(namespace, family.group) == family:
                parents = [b""] * len(keys)
                return PromotionRequest(namespace, family.group, specs[family.group], keys, parents)
        return None

    async def _ssd_portion(self, tiering: Tiering, request: PromotionRequest) -> int:
        """Read and verify blocks of the tier; how many were read to the end."""
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def told(parts: list[tuple[Outcome, I64]]) -> None:
            read = [rows for outcome, rows in parts if isinstance(outcome, Done | Corrupt)]
            if not ended.done():
                ended.set_result(sum(map(len, read)))

        for _ in range(_TRIES):
            if tiering.verify_lower_tier(request, told):
                break
            await asyncio.sleep(_AGAIN_S)
        else:
            return 0  # no room now, or they are on their way up and verified by that
        try:
            async with asyncio.timeout(_LOAD_S):
                return await ended
        except TimeoutError:
            return 0
