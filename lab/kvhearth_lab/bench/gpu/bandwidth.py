"""Bandwidth of copies between pages on a GPU and an arena, against pinned contiguous memory.

Every cell of the matrix is one layout of pages, one number of blocks, scattered or in order, one
way or both at once, and one copy method.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvhearth.copiers.base import Copier, CopyKind, Done, Ticket
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, Records
from kvhearth.page_layout import PagedKV
from kvhearth_lab.bench.gpu.bare_arena import BOOT_ID, BareArena
from kvhearth_lab.bench.gpu.stage import AUTO, Stage, closed, copy_methods
from kvhearth_lab.bench.report import p50

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DONE_S = 60.0
BOTH = "both"
"""Direction: a store and a load at once."""
DIRECTIONS = (CopyKind.STORE.value, CopyKind.LOAD.value, BOTH)


@dataclass(frozen=True)
class Layout:
    """Arrangement of pages on the device: ``layers`` fragments of ``run_bytes`` make a page; with
    one layer, blocks are outermost.
    """

    name: str
    layers: int
    run_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.layers * self.run_bytes


BLOCK_2M = Layout("block_2mib", 1, 2 * MIB)
LAYER_64K = Layout("layer_64kib", 32, 64 * KIB)
MLA = Layout("mla", 61, 18 * KIB)
"""16 tokens of 576 values of 2 bytes, in 61 layers."""
TP8 = Layout("tp8", 80, 8 * KIB)
"""16 tokens of one KV head of 128 values, K and V, in 80 layers: an eighth of a large model."""
TARGETS = (BLOCK_2M, LAYER_64K, MLA, TP8)
"""Layouts whose bandwidth has a target."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the matrix.

    Attributes:
        bytes_max: bytes of the pages on the device, and most bytes of a batch.
        page_bytes: sizes of block-outermost pages.
        blocks: numbers of blocks in a batch.
        target_blocks: number of blocks for the layouts in ``TARGETS``.
        cell_s: least time of a cell's repetitions.
        repeats: least number of them.
        ceiling_bytes: bytes of one copy of pinned memory.
    """

    bytes_max: int
    page_bytes: tuple[int, ...]
    blocks: tuple[int, ...]
    target_blocks: int
    cell_s: float
    repeats: int
    ceiling_bytes: int


FULL = Sizes(
    bytes_max=GIB,
    page_bytes=(16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB),
    blocks=(1, 8, 64, 512, 2048),
    target_blocks=256,
    cell_s=0.05,
    repeats=3,
    ceiling_bytes=512 * MIB,
)
REHEARSAL = Sizes(
    bytes_max=8 * MIB,
    page_bytes=(16 * KIB,),
    blocks=(1, 8),
    target_blocks=3,
    cell_s=0.0,
    repeats=1,
    ceiling_bytes=MIB,
)


@dataclass(frozen=True)
class Cell:
    """One measurement to make."""

    layout: Layout
    blocks: int
    scattered: bool
    direction: str
    method: str = AUTO


@dataclass(frozen=True)
class Row:
    """Result of a cell.

    Attributes:
        gbs: GB/s, of both directions together for ``both``.
        ratio: ``gbs`` over the pinned ceiling of that direction; ``spread`` has the ratios of the
            slowest and the fastest repetition.
        call_us_block: host time in ``store`` and ``load`` of the calling thread, in µs a block.
        cpu_us_block: processor time of the whole process, in µs a block.
    """

    layout: str
    page_bytes: int
    blocks: int
    scattered: bool
    direction: str
    method: str
    gbs: float
    ratio: float
    spread: tuple[float, float]
    call_us_block: float
    cpu_us_block: float


def cells(sizes: Sizes, methods: list[str]) -> list[Cell]:
    """Return the matrix; cells with a target first, then those of the copier's own choice."""
    found = [
        Cell(layout, sizes.target_blocks, scattered=True, direction=direction, method=method)
        for method in methods
        for layout in TARGETS
        for direction in DIRECTIONS
    ]
    alone = Cell(BLOCK_2M, 1, scattered=True, direction=CopyKind.LOAD.value, method=methods[0])
    found.insert(0, alone)
    found += [
        Cell(Layout(f"block_{size // KIB}kib", 1, size), blocks, scattered, direction, method)
        for method in methods
        for size in sizes.page_bytes
        for blocks in sizes.blocks
        for scattered in (True, False)
        for direction in DIRECTIONS
    ]
    return [each for each in found if _fits(each, sizes)]


def _fits(cell: Cell, sizes: Sizes) -> bool:
    copies = 2 if cell.direction == BOTH else 1
    return copies * cell.blocks * cell.layout.page_bytes <= sizes.bytes_max


class Bench:
    """Measures cells on one stage; the pages and the arena are made once.

    Args:
        stage: the device.
        sizes: sizes of the matrix.

    Raises:
        KVHearthError: ``memory_unavailable``.
    """

    def __init__(self, stage: Stage, sizes: Sizes) -> None:
        self._stage = stage
        self._sizes = sizes
        self.arena = BareArena(sizes.bytes_max, "thp")
        self._memory = stage.torch.zeros(
            sizes.bytes_max, dtype=stage.torch.uint8, device=stage.device
        )
        self._random = np.random.default_rng(1)
        self.ceiling: dict[str, float] = {}

    def measure_ceiling(self) -> dict[str, float]:
        """Return GB/s of plain copies between pinned memory and the device, by direction."""
        torch, count = self._stage.torch, self._sizes.ceiling_bytes
        pinned = [
            torch.zeros(count, dtype=torch.uint8, pin_memory=self._stage.real) for _ in range(2)
        ]
        device = [self._memory[:count], self._memory[count : 2 * count]]
        copies = {
            CopyKind.STORE.value: [(pinned[0], device[0])],
            CopyKind.LOAD.value: [(device[1], pinned[1])],
        }
        copies[BOTH] = copies[CopyKind.STORE.value] + copies[CopyKind.LOAD.value]
        for name, pairs in copies.items():
            samples = [_plain_s(self._stage, pairs) for _ in range(self._sizes.repeats + 2)]
            self.ceiling[name] = round(len(pairs) * count / min(samples) / 1e9, 2)
        return self.ceiling

    def measure(self, cell: Cell) -> Row:
        """Measure one cell; ``measure_ceiling`` comes first.

        Raises:
            KVHearthError: ``internal`` if a copy fails or never ends; whatever the copier raises
                where it does not offer the method.
        """
        kv = self._pages(cell.layout)
        directions = [CopyKind.STORE, CopyKind.LOAD]
        if cell.direction != BOTH:
            directions = [CopyKind(cell.direction)]
        copiers = [self._stage.copier(kv, self.arena, method=cell.method) for _ in directions]
        try:
            jobs = [
                _Job(copier, kind, *self._choice(cell, index))
                for index, (copier, kind) in enumerate(zip(copiers, directions, strict=True))
            ]
            _run(jobs)
            samples: list[tuple[float, float, float]] = []
            until = time.perf_counter() + self._sizes.cell_s
            while len(samples) < self._sizes.repeats or time.perf_counter() < until:
                samples.append(_run(jobs))
        finally:
            for copier in copiers:
                closed(copier)
        return self._row(cell, samples)

    def _row(self, cell: Cell, samples: list[tuple[float, float, float]]) -> Row:
        blocks = cell.blocks * (2 if cell.direction == BOTH else 1)
        walls = [wall for wall, _, _ in samples]
        slowest, gbs, fastest = (
            blocks * cell.layout.page_bytes / wall / 1e9
            for wall in (max(walls), p50(walls), min(walls))
        )
        ceiling = self.ceiling[cell.direction]
        return Row(
            layout=cell.layout.name,
            page_bytes=cell.layout.page_bytes,
            blocks=cell.blocks,
            scattered=cell.scattered,
            direction=cell.direction,
            method=cell.method,
            gbs=round(gbs, 3),
            ratio=round(gbs / ceiling, 4),
            spread=(round(slowest / ceiling, 4), round(fastest / ceiling, 4)),
            call_us_block=round(p50([call for _, call, _ in samples]) / blocks * 1e6, 3),
            cpu_us_block=round(p50([cpu for _, _, cpu in samples]) / blocks * 1e6, 3),
        )

    def _pages(self, layout: Layout) -> PagedKV:
        count = self._sizes.bytes_max // layout.page_bytes
        whole = self._memory[: count * layout.page_bytes]
        if layout.layers == 1:
            return PagedKV([whole.view(count, layout.run_bytes)])
        return PagedKV(list(whole.view(layout.layers, count, layout.run_bytes)))

    def _choice(self, cell: Cell, part: int) -> tuple[I64, Records]:
        """Return pages and extents of a batch; ``part`` 0 and 1 have none in common."""
        count = self._sizes.bytes_max // cell.layout.page_bytes
        start = part * (count // 2)
        chosen: list[I64] = []
        for _ in range(2):
            if cell.scattered:
                most = count // 2 if cell.direction == BOTH else count
                chosen.append(start + self._random.permutation(most)[: cell.blocks])
            else:
                chosen.append(start + np.arange(cell.blocks))
        return chosen[0], self.arena.extents(chosen[1], cell.layout.page_bytes)


@dataclass
class _Job:
    copier: Copier
    kind: CopyKind
    pages: I64
    extents: Records

    def begin(self) -> Ticket:
        if self.kind is CopyKind.STORE:
            ticket = self.copier.store(BOOT_ID, self.pages, self.extents, wait_s=DONE_S)
        else:
            ticket = self.copier.load(BOOT_ID, self.extents, self.pages, wait_s=DONE_S)
        if ticket is None:
            raise KVHearthError(Reason.INTERNAL, "a copier took no batch")
        return ticket

    def end(self, ticket: Ticket) -> Done:
        done = self.copier.wait(ticket, DONE_S)
        if done is None or not done.ok.all():
            problem = "never ended" if done is None else f"failed: {done.reasons}"
            raise KVHearthError(Reason.INTERNAL, f"a {self.kind} {problem}")
        return done


def _run(jobs: list[_Job]) -> tuple[float, float, float]:
    """Run a batch of each job at once; return seconds, those within the calls, and processor
    seconds.
    """
    cpu_s, began_s = time.process_time(), time.perf_counter()
    tickets = [job.begin() for job in jobs]
    called_s = time.perf_counter()
    for job, ticket in zip(jobs, tickets, strict=True):
        job.end(ticket)
    ended_s = time.perf_counter()
    return ended_s - began_s, called_s - began_s, time.process_time() - cpu_s


def _plain_s(stage: Stage, pairs: list[tuple[Any, Any]]) -> float:
    """Return the seconds of plain copies at once, each on a stream of its own."""
    stage.synchronize()
    began_s = time.perf_counter()
    for target, source in pairs:
        with stage.stream():
            target.copy_(source, non_blocking=True)
    stage.synchronize()
    return time.perf_counter() - began_s


def rows_of(
    bench: Bench, wanted: list[Cell], left_s: Callable[[], float]
) -> Iterator[tuple[Cell, Row | str]]:
    """Measure cells in their order while time is left; yield a reason instead of a row where a cell
    cannot be measured.
    """
    for cell in wanted:
        if left_s() <= 0:
            return
        try:
            yield cell, bench.measure(cell)
        except (KVHearthError, RuntimeError, OSError, ValueError) as error:
            yield cell, f"{type(error).__name__}: {error}"


def measure(
    stage: Stage,
    sizes: Sizes,
    left_s: Callable[[], float],
    say: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure the matrix while time is left; ``say`` is called with the results so far.

    Returns:
        ``ceiling`` in GB/s, ``rows``, ``unmeasured`` (by cell, the reason), ``left_out`` (number of
        cells for which no time was left), ``figures`` and their ``spread``.
    """
    found: dict[str, Any] = {"ceiling": {}, "rows": [], "unmeasured": {}, "left_out": 0}
    found.update(figures={}, spread={})
    bench = Bench(stage, sizes)
    with stage.registered(bench.arena) as seconds:
        found["registered_s"] = round(seconds, 3)
        found["ceiling"] = bench.measure_ceiling()
        methods = copy_methods() if stage.real else [AUTO]
        wanted = cells(sizes, methods)
        for count, (cell, row) in enumerate(rows_of(bench, wanted, left_s), 1):
            if isinstance(row, Row):
                found["rows"].append(asdict(row))
            else:
                name = f"{cell.layout.name} {cell.blocks} {cell.direction} {cell.method}"
                found["unmeasured"][name] = row
            found["left_out"] = len(wanted) - count
            found["figures"], found["spread"] = figures_of(found["rows"], sizes, methods[0])
            say(found)
    return found


def figures_of(
    rows: list[dict[str, Any]], sizes: Sizes, method: str
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return the figures that have targets, of the copier's own choice of a method, and their
    spread.
    """
    figures: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    names = {each.name for each in TARGETS}
    for row in rows:
        wanted = row["layout"] in names and row["blocks"] == sizes.target_blocks
        if not wanted or row["method"] != method or not row["scattered"]:
            continue
        name = f"{row['direction']}_{row['layout']}_ratio"
        figures[name], spread[name] = row["ratio"], row["spread"]
        if row["layout"] == BLOCK_2M.name and row["direction"] == CopyKind.LOAD:
            figures["host_us_block"] = row["cpu_us_block"]
            figures.update(_main_us(rows, row))
    return figures, spread


def _main_us(rows: list[dict[str, Any]], many: dict[str, Any]) -> dict[str, float]:
    """Return the calling thread's time a block, beyond the time of a call for one block."""
    alone = [
        row
        for row in rows
        if row["layout"] == many["layout"]
        and row["direction"] == many["direction"]
        and row["blocks"] == 1
    ]
    if not alone or many["blocks"] < 2:
        return {}
    calls = many["call_us_block"] * many["blocks"] - alone[0]["call_us_block"]
    return {"main_us_block": round(max(calls, 0.0) / (many["blocks"] - 1), 3)}
