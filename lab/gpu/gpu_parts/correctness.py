"""Part c: every byte of copies in every layout, and their order with an engine's kernels.

``--sanitized`` runs a small case alone; the part starts itself so under compute-sanitizer.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_parts.common import Report, run_part
from gpu_parts.facts import sanitizer
from kvhearth.copiers.base import BlockFailure, Copier, Done
from kvhearth.errors import KVHearthError
from kvhearth.model import FLAG_SUMMED, FLAG_VERIFY, I64, U8, Records
from kvhearth.page_layout import PagedKV
from kvhearth_lab.bench.gpu.bare_arena import BOOT_ID, HUGEPAGE_BYTES, BareArena
from kvhearth_lab.bench.gpu.stage import AUTO, CudaStage, Stage, closed, copy_methods

PAGES = 48
BLOCKS = 17
SLEEP_S = 0.05
DONE_S = 30.0
SANITIZER_S = 45.0
SANITIZED = "--sanitized"
SUMMARY = "ERROR SUMMARY: "


class Layout:
    """Named pages of an engine: groups of tensors, as they would be registered."""

    def __init__(self, name: str, groups: Sequence[Sequence[Any]]) -> None:
        self.name = name
        self.groups = [list(group) for group in groups]

    def paged(self) -> list[PagedKV]:
        """Return each group's pages."""
        return [PagedKV(group) for group in self.groups]


def layouts(stage: Stage) -> list[Layout]:
    """Return pages in every arrangement that engines have, with odd sizes among them."""
    torch = stage.torch

    def empty(*shape: int, dtype: Any = torch.uint8) -> Any:
        return torch.zeros(shape, dtype=dtype, device=stage.device)

    whole = empty(PAGES, 3 * 4096)
    group = 3 * 4096 // 6
    return [
        Layout("block-outermost", [[empty(PAGES, 2, 16, 8, 64, dtype=torch.bfloat16)]]),
        Layout("layer-major", [list(empty(4, PAGES, 16, 128, dtype=torch.bfloat16))]),
        Layout("K and V apart", [list(empty(6, PAGES, 8, 64, dtype=torch.bfloat16))]),
        Layout("padded strides", [[empty(PAGES, 5000)[:, :4096]]]),
        Layout("padded stack", [list(empty(3, PAGES, 1280)[:, :, :1024])]),
        Layout("MLA pages", [list(empty(5, PAGES, 16, 576, dtype=torch.bfloat16))]),
        Layout("odd bytes", [list(empty(3, PAGES, 37))]),
        Layout("ragged", [[empty(PAGES, 1024), empty(PAGES, 300), empty(PAGES, 7)]]),
        Layout("separate tensors", [[empty(PAGES, 2048) for _ in range(4)]]),
        Layout(
            "six groups over one allocation",
            [[whole[:, part * group : (part + 1) * group]] for part in range(6)],
        ),
    ]


def fill(stage: Stage, layout: Layout, seed: int) -> None:
    """Fill all pages at random, by a kernel."""
    stage.torch.manual_seed(seed)
    for tensors in layout.groups:
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.random_(0, 256)


def page_bytes(tensors: Sequence[Any], page: int, torch: Any) -> U8:
    """Return the bytes of a page by indexing alone, without anything of the copier's."""
    parts = []
    for tensor in tensors:
        flat = tensor[page].contiguous().view(-1)
        parts.append(flat.view(torch.uint8).cpu().numpy())
    return np.concatenate(parts)


class Rig:
    """One group of a layout with an arena and a copier.

    Args:
        stage: the device.
        tensors: the group's tensors.
        arena: has two slots for each page.
        method: copy method.
        slot_gap: bytes between slots.
    """

    def __init__(
        self, stage: Stage, tensors: Sequence[Any], arena: BareArena, method: str, slot_gap: int = 0
    ) -> None:
        self.stage = stage
        self.torch = stage.torch
        self.tensors = list(tensors)
        self.kv = PagedKV(self.tensors)
        self.arena = arena
        self.copier: Copier = stage.copier(self.kv, arena, verify_fraction=1.0, method=method)
        self._slot_bytes = self.kv.page_bytes + slot_gap

    def extents(self, slots: I64) -> Records:
        """Return extents of slots that are a little larger than a page."""
        records = self.arena.extents(slots, self._slot_bytes)
        records["length"] = self.kv.page_bytes
        return records

    def store(self, pages: I64, extents: Records) -> Done:
        """Store and wait."""
        ticket = self.copier.store(BOOT_ID, pages, extents, wait_s=DONE_S)
        return _ended(self.copier, ticket)

    def load(self, extents: Records, pages: I64) -> Done:
        """Load and wait."""
        ticket = self.copier.load(BOOT_ID, extents, pages, wait_s=DONE_S)
        return _ended(self.copier, ticket)

    def page(self, page: int) -> U8:
        """Return a page's bytes."""
        return page_bytes(self.tensors, page, self.torch)

    def close(self) -> None:
        """Close the copier."""
        closed(self.copier)


def _ended(copier: Copier, ticket: Any) -> Done:
    assert ticket is not None, "the queue is full"
    done = copier.wait(ticket, DONE_S)
    assert done is not None, "a batch never ended"
    return done


@contextlib.contextmanager
def rig_of(
    stage: Stage, tensors: Sequence[Any], arena: BareArena, method: str, slot_gap: int = 0
) -> Iterator[Rig]:
    """Provide a rig, and close it."""
    rig = Rig(stage, tensors, arena, method, slot_gap)
    try:
        yield rig
    finally:
        rig.close()


def bytes_part(report: Report, rig: Rig, name: str, seed: int) -> None:
    """Store random pages, load them into others; compare all bytes, also of those not copied."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(PAGES)
    sources, targets = order[:BLOCKS], order[BLOCKS : 2 * BLOCKS]
    slots = rng.permutation(PAGES)[:BLOCKS]
    extents = rig.extents(slots)
    before = {page: rig.page(page) for page in range(PAGES)}
    rig.arena.view(0)[:] = 0xA5
    done = rig.store(sources, extents)
    report.check(f"{name}: pages are stored", bool(done.ok.all()), done.reasons)
    for page, extent in zip(sources.tolist(), extents, strict=True):
        equal = np.array_equal(rig.arena.slot(extent), before[page])
        report.check(f"{name}: slots hold the pages' bytes", equal, f"page {page}")
    written = np.zeros(rig.arena.size_bytes, np.bool_)
    for extent in extents:
        start = int(extent["offset"])
        written[start : start + rig.kv.page_bytes] = True
    untouched = bool((rig.arena.view(0)[~written] == 0xA5).all())
    report.check(f"{name}: nothing else of the arena is written", untouched)
    summed = rig.arena.with_checksums(extents, FLAG_SUMMED | FLAG_VERIFY)
    done = rig.load(summed, targets)
    report.check(f"{name}: blocks are loaded", bool(done.ok.all()), done.reasons)
    wanted = {**before, **dict(zip(targets.tolist(), (before[p] for p in sources), strict=True))}
    for page, content in wanted.items():
        equal = np.array_equal(rig.page(page), content)
        report.check(f"{name}: pages hold the loaded bytes", equal, f"page {page}")


def order_part(report: Report, rig: Rig, name: str) -> None:
    """Run the engine's kernels right before and after copies, behind a kernel that sleeps."""
    stage, pages = rig.stage, np.arange(BLOCKS)
    extents = rig.extents(pages)
    with stage.stream():
        for tensor in rig.tensors:
            tensor.zero_()
        stage.synchronize()
        # A store sees what the kernels before its mark write.
        stage.sleep(SLEEP_S)
        for tensor in rig.tensors:
            tensor.fill_(7)
        done = rig.store(pages, extents)
        stage.synchronize()
        wanted = rig.page(0)
        stored = all(np.array_equal(rig.arena.slot(extent), wanted) for extent in extents)
        report.check(f"{name}: a store waits for the engine's kernels", stored, done.reasons)
        # A load comes after the zeroing of its pages.
        stage.sleep(SLEEP_S)
        for tensor in rig.tensors:
            tensor.zero_()
        done = rig.load(rig.arena.with_checksums(extents, FLAG_SUMMED | FLAG_VERIFY), pages)
        stage.synchronize()
        loaded = all(np.array_equal(rig.page(page), wanted) for page in pages.tolist())
        report.check(f"{name}: a load follows the zeroing of its pages", loaded, done.reasons)
        # Pages of an aborted request belong to the next one once the load has ended.
        done = rig.load(extents, pages)
        for tensor in rig.tensors:
            tensor.fill_(9)
        stage.synchronize()
        owner = rig.page(0)
        kept = all(np.array_equal(rig.page(page), owner) for page in pages.tolist())
        changed = not np.array_equal(owner, wanted)
        report.check(f"{name}: nothing is written after a load has ended", kept and changed)


def refusals_part(report: Report, rig: Rig, name: str) -> None:
    """Load blocks whose slots moved on, whose bytes flipped, and whose daemon is another."""
    pages = np.arange(BLOCKS)
    extents = rig.extents(pages)
    rig.store(pages, extents)
    summed = rig.arena.with_checksums(extents, FLAG_SUMMED | FLAG_VERIFY)
    rig.arena.slot(extents[3])[11] ^= 1
    done = rig.load(summed, pages)
    expected = {BlockFailure.CHECKSUM_MISMATCH: 1}
    report.check(f"{name}: a flipped bit is found", done.reasons == expected, done.reasons)
    rig.arena.bump(extents["slot"][5:6].astype(np.int64))
    done = rig.load(extents, pages)
    expected = {BlockFailure.STALE_GENERATION: 1}
    report.check(f"{name}: a freed slot is found", done.reasons == expected, done.reasons)
    other = rig.copier.load("another boot", extents, pages)
    done = _ended(rig.copier, other)
    expected = {BlockFailure.STALE_BOOT: BLOCKS}
    report.check(f"{name}: another boot is refused", done.reasons == expected, done.reasons)


def run_layout(report: Report, stage: Stage, layout: Layout, method: str, seed: int) -> None:
    """Run all checks on each group of a layout, pinned and not, in inference mode and not."""
    bound = max(kv.page_bytes for kv in layout.paged()) + 4096
    modes = ((True, False, 0), (True, True, 512), (False, False, 0))
    for registered, inference, gap in modes:
        for number, tensors in enumerate(layout.groups):
            arena = BareArena(2 * PAGES * bound)
            pinned = stage.registered(arena) if registered else contextlib.nullcontext()
            mode = stage.torch.inference_mode() if inference else contextlib.nullcontext()
            fill(stage, layout, seed + number)
            stage.synchronize()
            with pinned, mode, rig_of(stage, tensors, arena, method, gap) as rig:
                bytes_part(report, rig, layout.name, seed)
                if number == 0:
                    order_part(report, rig, layout.name)
                    refusals_part(report, rig, layout.name)
            stage.synchronize()


def sanitized(stage: Stage) -> int:
    """Copy a few pages both ways; the tool around this process watches every access."""
    arena = BareArena(HUGEPAGE_BYTES)
    report = Report(Path(tempfile.mkstemp(suffix=".json")[1]), 600)
    for layout in (layouts(stage)[0], layouts(stage)[1]):
        fill(stage, layout, 1)
        with stage.registered(arena), rig_of(stage, layout.groups[0], arena, AUTO) as rig:
            bytes_part(report, rig, layout.name, 1)
    stage.synchronize()
    return len(report.failures())


def sanitizer_part(report: Report) -> None:
    """Run a small case under compute-sanitizer, where it is installed."""
    tool = sanitizer()
    seconds = min(report.left_s(), SANITIZER_S)
    if not tool or seconds < 10:
        report.put(sanitizer="not installed" if not tool else "no time was left")
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "99", sys.executable, "-m"]
    command += ["gpu_parts.correctness", SANITIZED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        report.put(sanitizer=f"not ended after {seconds:.0f} s")
        return
    report.put(sanitizer=done.stdout[-800:])
    # The tool itself may refuse a device; only its own verdict counts.
    if SUMMARY in done.stdout:
        clean = f"{SUMMARY}0 errors" in done.stdout and done.returncode == 0
        report.check("compute-sanitizer finds nothing", clean, done.stdout[-800:])


def measure(report: Report, stage: Stage) -> None:
    """Check every layout with every copy method, the copier's own choice first."""
    methods = copy_methods() if stage.real else [AUTO]
    left_out: list[str] = []
    unusable: dict[str, str] = {}
    for method in methods:
        for seed, layout in enumerate(layouts(stage), 1):
            if report.left_s() <= 0:
                left_out.append(f"{layout.name} by {method}")
                continue
            name = f"{layout.name} by {method}"
            try:
                run_layout(report, stage, layout, method, seed)
            except (KVHearthError, RuntimeError, ValueError, OSError) as error:
                unusable[name] = f"{type(error).__name__}: {error}"[:400]
            # A machine may lack a method; the copier's own choice must always work.
            if method == methods[0]:
                report.check("every layout is copied", name not in unusable, unusable.get(name))
    report.put(methods=methods, unusable=unusable)
    if left_out:
        report.shorten(f"not checked: {', '.join(left_out)}")
    report.figure("correctness_failures", len(report.failures()))
    if stage.real:
        sanitizer_part(report)
        report.figure("correctness_failures", len(report.failures()))
    report.put(checks_passed=report.passed_count())


if __name__ == "__main__":
    if sys.argv[1:] == [SANITIZED]:
        sys.exit(sanitized(CudaStage()))
    run_part(measure)
