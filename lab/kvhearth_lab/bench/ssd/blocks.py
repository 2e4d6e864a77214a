"""The part of ``kvhearth bench ssd`` that moves 2 MiB blocks: raw and tier in turns.

The tier is driven on an asyncio loop as in the daemon; how long that loop is blocked is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvhearth_lab.bench.report import p50, p99, ratio_of, steps
from kvhearth_lab.bench.ssd.figures import BATCH, BATCHES_OUT, BLOCK_BYTES, GB, Result, Sizes
from kvhearth_lab.bench.ssd.raw import FAMILY, Ceiling, Slots, Spot, keys_of
from kvhearth_server.tiers.base import Completion, Done, LoadBatch, StoreBatch, Throttled
from kvhearth_server.tiers.ssd.settings import SsdDirectorySpec, SsdSettings
from kvhearth_server.tiers.ssd.tier import SsdTier

_TURN_S = 0.1
_HOLD_S = 0.002
_DEADLINE_S = 300.0
_TICK_S = 0.005
_RECENT = 64
"""How far behind the newest store the reads in the mixed phase lag, in blocks."""

_T = TypeVar("_T")


class Ticker:
    """A timer that measures its own lateness, which every task on the loop shares."""

    def __init__(self) -> None:
        self.late_s = 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measure during the block."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            self.late_s = max(self.late_s, time.perf_counter() - before - _TICK_S)


class Driven:
    """A tier and the task that takes its turns; use it as a context manager.

    Attributes:
        call_s, call_cpu_s: wall time of the tier's longest call, and greatest processor time of a
            call.
        closely: also measure processor time; that clock costs as much as some calls.
    """

    def __init__(self, tier: SsdTier) -> None:
        self.tier = tier
        self.call_s = self.call_cpu_s = 0.0
        self.closely = False
        self._out: dict[int, asyncio.Future[Completion]] = {}
        self._put_off: deque[asyncio.Future[None]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Driven:
        self._task = asyncio.create_task(self._turns())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _turns(self) -> None:
        due, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self.tier.event_fd, due.set)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TURN_S):
                        await due.wait()
                due.clear()
                for each in self._timed(self.tier.poll):
                    if each.final:
                        waiting = self._out.pop(each.ticket)
                        if not waiting.done():  # the waiter may be cancelled, as by Ctrl-C
                            waiting.set_result(each)
                        self._wake_one()
                await asyncio.sleep(0)
        finally:
            loop.remove_reader(self.tier.event_fd)

    def _wake_one(self) -> None:
        while self._put_off:
            waiting = self._put_off.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return

    async def put_off(self, most_s: float) -> None:
        """Wait until a batch has ended, at most ``most_s``, as the daemon does when the tier has no
        place.
        """
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put_off.append(waiting)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await waiting

    def _timed(self, call: Callable[[], _T]) -> _T:
        used = time.thread_time() if self.closely else 0.0
        start = time.perf_counter()
        found = call()
        self.call_s = max(self.call_s, time.perf_counter() - start)
        if self.closely:
            self.call_cpu_s = max(self.call_cpu_s, time.thread_time() - used)
        return found

    async def settled(self) -> None:
        """Wait until the log is recovered."""
        async with asyncio.timeout(_DEADLINE_S):
            while self.tier.recovering:
                await asyncio.sleep(_HOLD_S)

    async def _through(self, submit: Callable[[], int | Throttled]) -> Completion:
        """Submit a batch until it is accepted, and wait for its completion."""
        while isinstance(ticket := self._timed(submit), Throttled):
            await asyncio.sleep(max(_HOLD_S, ticket.retry_after_s))
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._out[ticket] = future
        return await future

    async def store_batch(self, batch: StoreBatch) -> Completion:
        """Store a batch once."""
        return await self._through(lambda: self.tier.submit_store(batch))

    async def load_batch(self, batch: LoadBatch) -> Completion:
        """Load a batch once."""
        return await self._through(lambda: self.tier.submit_load(batch))


class Mover:
    """Moves blocks by their numbers, several batches at once.

    Raises:
        OSError: some were not stored or loaded.
    """

    def __init__(self, driven: Driven, slots: Slots) -> None:
        self._driven, self._slots = driven, slots
        self._stop = False
        self._stored: deque[int] = deque(maxlen=_RECENT)

    async def store(self, numbers: Iterable[int], batches: int = BATCHES_OUT) -> None:
        """Store all blocks; those without a place are offered again."""
        left = _cut(numbers)
        async with asyncio.timeout(_DEADLINE_S):
            await asyncio.gather(*(self._store_some(left) for _ in range(batches)))

    async def _store_some(self, left: Iterator[list[int]]) -> None:
        while not self._stop and (numbers := next(left, None)):
            while numbers:
                done = await self._driven.store_batch(self._slots.store_batch(numbers))
                put_off = done.rows(Throttled).tolist()
                stored = done.rows(Done).tolist()
                if len(put_off) + len(stored) != len(numbers):
                    raise OSError(f"a store failed: {done.parts}")
                self._stored.extend(numbers[row] for row in stored)
                numbers = [numbers[row] for row in put_off]
                if numbers:
                    described = [each for each, _ in done.parts if isinstance(each, Throttled)]
                    await self._driven.put_off(max(each.retry_after_s for each in described))

    async def load(self, numbers: Iterable[int], batches: int = BATCHES_OUT) -> None:
        """Load all blocks."""
        left = _cut(numbers)
        async with asyncio.timeout(_DEADLINE_S):
            await asyncio.gather(*(self._load_some(left, place) for place in range(batches)))

    async def _load_some(self, left: Iterator[list[int]], place: int) -> None:
        for numbers in left:
            await self._load(keys_of(numbers), place)

    async def _load(self, keys: list[bytes], place: int) -> None:
        done = await self._driven.load_batch(self._slots.load_batch(keys, place))
        if len(done.rows(Done)) != len(keys):
            raise OSError(f"a load failed: {done.parts}")

    def spots(self, numbers: Iterable[int]) -> list[Spot]:
        """Return the places of those blocks that the tier has."""
        names = list(numbers)
        found = self._driven.tier.places(FAMILY, keys_of(names))
        return [
            (*place, name) for place, name in zip(found, names, strict=True) if place is not None
        ]

    async def loads_among_stores(self, fresh: Iterable[int], count: int) -> list[float]:
        """Return the seconds of each of ``count`` loads of one block, while ``fresh`` ones are
        stored.
        """
        stores = asyncio.create_task(self.store(fresh))
        times = []
        try:
            for _ in range(count):
                number = self._stored[0]  # recent enough not to be evicted meanwhile
                start = time.perf_counter()
                await self._load(keys_of([number]), BATCHES_OUT)
                times.append(time.perf_counter() - start)
        finally:
            self._stop = True
            await stores
            self._stop = False
        return times


def open_tier(folder: Path, slots: Slots, sizes: Sizes, interface: str) -> SsdTier:
    """Make ``folder`` and a tier in it, which stores from and loads into ``slots``."""
    folder.mkdir()
    settings = SsdSettings(
        (SsdDirectorySpec(folder, sizes.tier_bytes),),
        segment_bytes=sizes.segment_bytes,
        interface=interface,
        depth=sizes.depth,
        prewrite=True,
    )
    return SsdTier(settings, [slots.bytes])


def _cut(numbers: Iterable[int]) -> Iterator[list[int]]:
    left = iter(numbers)
    while some := list(itertools.islice(left, BATCH)):
        yield some


_IDLE_S = 1.0
_DRAIN_S = 30.0
_PASSES = {"write": 4}
"""Rounds in a turn, if not one. In a short turn of writes, a tenth would be its beginning and its
end.
"""


@dataclass(frozen=True)
class Took:
    """Wall and processor seconds of a turn."""

    seconds: float
    cpu_s: float


@dataclass
class Turns:
    """Turns of each kind, by name."""

    took: dict[str, list[Took]] = field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block as a turn."""
        start, cpu = time.perf_counter(), time.process_time()
        yield
        took = Took(time.perf_counter() - start, time.process_time() - cpu)
        self.took.setdefault(name, []).append(took)

    def seconds(self, name: str) -> list[float]:
        """Return the seconds of each turn."""
        return [each.seconds for each in self.took[name]]


class Course:
    """Measures the tier in ``folder`` against raw requests to the same places. The tier's folder is
    removed at the end.
    """

    def __init__(self, folder: Path, sizes: Sizes, interface: str, result: Result) -> None:
        self._folder, self._sizes, self._result = folder, sizes, result
        self._interface = interface
        self._turns = Turns()
        self._slots = Slots()
        self._ticker, self._idle = Ticker(), Ticker()
        self._next = itertools.count()
        self._next_number = 0

    async def run(self) -> None:
        """Measure everything; raises OSError if the drive or the tier fails."""
        sizes, values = self._sizes, self._result.values
        values["pages"] = self._slots.pages
        raw = Ceiling(self._slots, sizes)
        folder = self._folder / "tier"
        tier = open_tier(folder, self._slots, sizes, self._interface)
        try:
            async with self._idle.running():
                await asyncio.sleep(_IDLE_S)
            async with Driven(tier) as driven:
                await driven.settled()
                await self._measure(raw, driven)
                values["tier_call_max_ms"] = round(driven.call_s * 1e3, 1)
                values["tier_call_cpu_max_ms"] = round(driven.call_cpu_s * 1e3, 1)
            values["loop_block_max_ms"] = round(self._ticker.late_s * 1e3, 1)
            values["loop_idle_max_ms"] = round(self._idle.late_s * 1e3, 1)
            tier.drain(_DRAIN_S)
            tier.check()
        finally:
            tier.close()
            raw.close()
            shutil.rmtree(folder)
        self._figures()

    async def _measure(self, raw: Ceiling, driven: Driven) -> None:
        mover, tier = Mover(driven, self._slots), driven.tier
        # Fill once, so that rounds overwrite: this is a drive's sustained speed.
        await mover.store(self._fresh(self._sizes.tier_bytes))
        self._aim(raw, mover, self._sizes.round_bytes)
        raw.survey()
        self._result.values |= {"raw_ways": raw.ways, "raw_best": raw.best}
        # Nothing was loaded yet, so that making room carries no block over.
        stored, written = tier.counts["stored_bytes"], tier.counts["written_bytes"]
        for _ in steps(self._sizes.rounds, "writes"):
            await self._write(raw, mover)
        stored = tier.counts["stored_bytes"] - stored
        self._result.values["write_amplification"] = round(
            (tier.counts["written_bytes"] - written) / stored, 4
        )
        for _ in steps(self._sizes.rounds, "reads"):
            await self._read(raw, mover)
        driven.closely = True
        carried = tier.counts["carried_blocks"]
        for _ in steps(self._sizes.rounds, "both"):
            await self._mix(raw, mover)
        self._result.values["mixed_carried_blocks"] = tier.counts["carried_blocks"] - carried
        for _ in steps(1, "reads among writes"):
            await self._among(raw, mover)

    def _fresh(self, size: int) -> list[int]:
        numbers = list(itertools.islice(self._next, size // BLOCK_BYTES))
        self._next_number = numbers[-1] + 1
        return numbers

    def _aim(self, raw: Ceiling, mover: Mover, size: int) -> None:
        """Direct raw requests to the places of the tier's youngest blocks. The loop is blocked
        during a raw turn, so the blocks stay there.
        """
        end = self._next_number
        raw.use(mover.spots(range(max(0, end - size // BLOCK_BYTES), end)))

    async def _write(self, raw: Ceiling, mover: Mover) -> None:
        passes = _PASSES["write"]
        self._aim(raw, mover, self._sizes.tier_bytes)
        with self._turns.timed("raw_write"):
            raw.write(passes)
        fresh = self._fresh(passes * self._sizes.round_bytes)
        with self._turns.timed("write"):
            await mover.store(fresh)
        # Repeat with the timer: its 200 wakeups a second cost a third as much as the loop's work.
        self._last = self._fresh(self._sizes.round_bytes)
        async with self._ticker.running():
            await mover.store(self._last)

    async def _read(self, raw: Ceiling, mover: Mover) -> None:
        self._aim(raw, mover, self._sizes.round_bytes)
        with self._turns.timed("raw_read"):
            raw.read()
        with self._turns.timed("read"):
            await mover.load(self._last)
        async with self._ticker.running():
            await mover.load(self._last)

    async def _mix(self, raw: Ceiling, mover: Mover) -> None:
        fresh = self._fresh(self._sizes.round_bytes // 2)
        self._aim(raw, mover, self._sizes.round_bytes)
        with self._turns.timed("raw_mixed"):
            raw.mix()
        async with self._ticker.running():
            with self._turns.timed("mixed"):
                await asyncio.gather(
                    mover.load(self._last[-len(fresh) :], batches=2),
                    mover.store(fresh, batches=2),
                )
        self._last = fresh

    async def _among(self, raw: Ceiling, mover: Mover) -> None:
        sizes, values = self._sizes, self._result.values
        self._aim(raw, mover, sizes.round_bytes)
        alone = raw.reads_among_writes(sizes.reads)
        async with self._ticker.running():
            times = await mover.loads_among_stores(self._next, sizes.reads)
        values["raw_read_p99_ms"] = round(p99(alone) * 1e3, 2)
        values["read_p50_ms"] = round(p50(times) * 1e3, 2)
        values["read_p99_ms"] = round(p99(times) * 1e3, 2)

    def _figures(self) -> None:
        result, turns = self._result, self._turns
        round_gb = self._sizes.round_bytes / GB
        for name in ("write", "read", "mixed"):
            size = round_gb * _PASSES.get(name, 1)
            for side in (f"raw_{name}", name):
                result.put(f"{side}_gbs", [size / each for each in turns.seconds(side)])
                if name != "mixed":
                    used = [each.cpu_s / size for each in turns.took[side]]
                    result.put(f"{side}_cpu_s_per_gb", used, 4)
            ratios = ratio_of(turns.seconds(f"raw_{name}"), turns.seconds(name))
            result.put("mixed_ratio" if name == "mixed" else f"{name}_of_best", ratios)
        result.values["cpu_s_per_gb"] = result.values["read_cpu_s_per_gb"]
        result.spread["cpu_s_per_gb"] = result.spread["read_cpu_s_per_gb"]
