"""Part b: registering the arena's memory with CUDA.

By kind of pages and size of a piece: seconds a GiB, and how long a thread that launches kernels
stalls meanwhile. Then registration during a graph capture, a refused registration, unregistration
from another thread, and the number of contexts.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gpu_parts.common import Report, run_part
from kvhearth.copiers.device import ArenaRegistration, CudaRuntime, beside_captures
from kvhearth.errors import KVHearthError
from kvhearth_lab.bench.gpu.bare_arena import HUGEPAGE_BYTES, PAGE_KINDS, BareArena, spare_bytes
from kvhearth_lab.bench.gpu.stage import Stage

GIB = 1 << 30
START_GIB = 64
"""Size of an arena whose registration must not delay an engine's start by over two seconds."""
PIECES_GIB = (1, 4, 16)
DEADLINE_S = 60.0
QUIET_S = 0.5
RESERVE_S = 20.0
"""Time kept for what comes after the table of pieces."""


@dataclass(frozen=True)
class Row:
    """Registration of one piece.

    Attributes:
        huge_fraction: part of the arena that the kernel maps by huge pages.
        s_per_gib: seconds a GiB of ``cudaHostRegister``.
        unregister_s_per_gib: the same of ``cudaHostUnregister``.
        longest_launch_ms: longest launch of another thread meanwhile; ``quiet_launch_ms`` is that
            of an equal time without a registration.
        lost_s: time of that thread beyond its launches' usual time.
    """

    pages: str
    piece_gib: float
    huge_fraction: float
    s_per_gib: float
    unregister_s_per_gib: float
    longest_launch_ms: float
    quiet_launch_ms: float
    lost_s: float


class Launcher:
    """A loop that launches kernels and times each launch, as an engine's thread does.

    Args:
        launch: launches one small kernel.
        settle: waits for all of them.
    """

    LAUNCHES = 64

    def __init__(self, launch: Callable[[], None], settle: Callable[[], None]) -> None:
        self._launch = launch
        self._settle = settle

    def during(self, work: threading.Event | float) -> list[float]:
        """Return the seconds of each launch until the event is set, or for so many seconds."""
        times: list[float] = []
        until = time.perf_counter() + (work if isinstance(work, float) else DEADLINE_S)
        while time.perf_counter() < until:
            if isinstance(work, threading.Event) and work.is_set():
                break
            for _ in range(self.LAUNCHES):
                began_s = time.perf_counter()
                self._launch()
                times.append(time.perf_counter() - began_s)
            self._settle()
        return times


def measure_piece(
    runtime: CudaRuntime, arena: BareArena, size_bytes: int, launcher: Launcher
) -> Row:
    """Register the arena's first bytes as one piece on a thread, and unregister them.

    Raises:
        RuntimeError: CUDA refuses.
    """
    quiet = launcher.during(QUIET_S)
    ended = threading.Event()
    seconds: list[float] = []
    errors: list[str] = []

    def register() -> None:
        try:
            runtime.set_device(0)
            with beside_captures(runtime):
                for call in (
                    lambda: runtime.host_register(arena.address(0), size_bytes),
                    lambda: runtime.host_unregister(arena.address(0)),
                ):
                    began_s = time.perf_counter()
                    code = call()
                    seconds.append(time.perf_counter() - began_s)
                    if code:
                        runtime.last_error()
                        errors.append(f"code {code}")
                        return
        finally:
            ended.set()

    worker = threading.Thread(target=register)
    worker.start()
    busy = launcher.during(ended)
    worker.join()
    if errors:
        raise RuntimeError(f"a piece of {size_bytes >> 20} MiB was refused: {errors[0]}")
    usual_s = sorted(quiet)[len(quiet) // 2]
    return Row(
        pages="",
        piece_gib=round(size_bytes / GIB, 3),
        huge_fraction=round(min(arena.huge_bytes() / arena.size_bytes, 1.0), 3),
        s_per_gib=round(seconds[0] / size_bytes * GIB, 4),
        unregister_s_per_gib=round(seconds[1] / size_bytes * GIB, 4),
        longest_launch_ms=round(max(busy, default=0.0) * 1e3, 3),
        quiet_launch_ms=round(max(quiet) * 1e3, 3),
        lost_s=round(sum(max(each - 2 * usual_s, 0.0) for each in busy), 4),
    )


def sizes_of(stage: Stage) -> list[int]:
    """Return the sizes of pieces, in bytes."""
    return [size * GIB for size in PIECES_GIB] if not stage.small else [HUGEPAGE_BYTES]


def pieces_part(report: Report, stage: Stage, runtime: CudaRuntime, launcher: Launcher) -> None:
    """Measure every kind of pages with every size of a piece."""
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for kind in PAGE_KINDS:
        for size_bytes, arena in _arenas(report, kind, sizes_of(stage), left_out):
            name = f"{kind} {size_bytes >> 20} MiB"
            try:
                row = measure_piece(runtime, arena, size_bytes, launcher)
            except RuntimeError as error:
                left_out[name] = str(error)
                continue
            rows.append({**asdict(row), "pages": kind})
            report.put(rows=rows, left_out=left_out)
    report.put(rows=rows, left_out=left_out)
    report.check("a piece was registered", bool(rows), left_out)
    best = [row for row in rows if row["piece_gib"] <= 1] or rows
    if best:
        report.figure("register_s_per_gib", min(row["s_per_gib"] for row in best))


def _arenas(
    report: Report, kind: str, sizes: list[int], left_out: dict[str, str]
) -> Iterator[tuple[int, BareArena]]:
    """Yield sizes with one arena that holds the largest one for which there is memory."""
    spare = spare_bytes()
    fitting = [size for size in sizes if size <= spare]
    for size in set(sizes) - set(fitting):
        left_out[f"{kind} {size >> 20} MiB"] = f"{spare >> 20} MiB of memory are to spare"
    for size in sorted(fitting):
        if report.left_s() < RESERVE_S * (1 if report.values["rehearsal"] is False else 0):
            left_out[f"{kind} {size >> 20} MiB"] = "no time was left"
            report.shorten(f"pieces of {size >> 20} MiB in pages of {kind} were not measured")
            continue
        try:
            yield size, BareArena(size, kind)
        except KVHearthError as error:
            left_out[f"{kind} {size >> 20} MiB"] = str(error)


def background_part(report: Report, stage: Stage, runtime: CudaRuntime, launcher: Launcher) -> None:
    """Register an arena as the product does, beside a thread that launches; scale to 64 GiB."""
    size = min(8 * GIB, spare_bytes()) if not stage.small else 2 * HUGEPAGE_BYTES
    arena = BareArena(size, "thp")
    quiet = launcher.during(QUIET_S)
    began_s = time.perf_counter()
    registration = ArenaRegistration(arena, runtime, 0)
    ended = threading.Event()
    watcher = threading.Thread(target=lambda: (registration.wait(DEADLINE_S), ended.set()))
    watcher.start()
    busy = launcher.during(ended)
    seconds = time.perf_counter() - began_s
    watcher.join()
    report.check("the arena is registered", registration.ready, registration.error)
    usual_s = sorted(quiet)[len(quiet) // 2]
    lost_s = sum(max(each - 2 * usual_s, 0.0) for each in busy)
    scale = START_GIB * GIB / arena.size_bytes
    report.put(
        background={
            "gib": round(arena.size_bytes / GIB, 3),
            "seconds": round(seconds, 3),
            "seconds_of_64_gib": round(seconds * scale, 2),
            "longest_launch_ms": round(max(busy, default=0.0) * 1e3, 3),
            "lost_s": round(lost_s, 4),
        }
    )
    report.figure("register_64gib_start_s", round(lost_s * scale, 3))
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(registration.close(DEADLINE_S)))
    closer.start()
    closer.join(DEADLINE_S)
    report.check("another thread ends the registration", closed == [True])
    report.check("no error is left behind", runtime.last_error() == 0)


def refusal_part(report: Report, runtime: CudaRuntime, launch: Callable[[], None]) -> None:
    """Force a refusal; it must leave no error for the next kernel."""
    errors: list[str] = []
    found: list[int] = []
    arena = BareArena(2 * HUGEPAGE_BYTES)

    def refused() -> None:
        runtime.set_device(0)
        first = runtime.host_register(arena.address(0), HUGEPAGE_BYTES)
        # Unregistering memory that is not registered fails on every driver.
        second = runtime.host_unregister(arena.address(0) + HUGEPAGE_BYTES)
        found.extend([first, second, runtime.last_error(), runtime.last_error()])
        try:
            launch()
        except RuntimeError as error:
            errors.append(str(error))
        found.append(runtime.host_unregister(arena.address(0)))

    worker = threading.Thread(target=refused)
    worker.start()
    worker.join(DEADLINE_S)
    report.put(refusal=found)
    report.check(
        "a refusal is reported", len(found) == 5 and found[0] == 0 and found[1] != 0, found
    )
    report.check("an error is cleared by reading it", len(found) == 5 and found[3] == 0, found)
    report.check("a kernel runs after a refusal", not errors, errors)


def capture_part(report: Report, stage: Stage, runtime: CudaRuntime) -> None:
    """Register and unregister while this thread captures a graph; replay it afterwards."""
    torch = stage.torch
    arena = BareArena(64 << 20)
    graph = torch.cuda.CUDAGraph()
    ones = torch.ones(1024, device=stage.device)
    torch.cuda.synchronize()
    problem = ""
    try:
        with torch.cuda.graph(graph, capture_error_mode="global"):
            twice = ones * 2
            registration = ArenaRegistration(arena, runtime, 0, piece_bytes=HUGEPAGE_BYTES)
            registered = registration.wait(DEADLINE_S)
            ended = registration.close(DEADLINE_S)
            thrice = twice + ones
        ones.fill_(2.0)
        graph.replay()
        torch.cuda.synchronize()
        total = float(thrice.sum())
    except RuntimeError as error:
        problem = str(error)
    name = "a capture survives a registration"
    if report.check(name, not problem, problem):
        report.check("the arena is registered during a capture", registered, registration.error)
        report.check("it is unregistered during a capture", ended)
        report.check("the captured graph is right", total == 6.0 * 1024, total)


def contexts_part(report: Report, driver: Any, devices: int) -> None:
    """Count the contexts of this process: one, on the device that is used."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    contexts = []
    for device in range(devices):
        code = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        contexts.append(active.value if code == 0 else f"code {code}")
    report.put(contexts=contexts)
    report.check("no other device has a context", contexts == [1] + [0] * (devices - 1), contexts)


def measure(report: Report, stage: Stage) -> None:
    """Run the checks, then the table of pieces, which takes the rest of the time."""
    runtime = stage.runtime()
    tensor = stage.torch.ones(1024, device=stage.device)
    tensor.add_(1)
    stage.synchronize()
    launcher = Launcher(lambda: tensor.add_(1), stage.synchronize)
    refusal_part(report, runtime, lambda: tensor.add_(1))
    if stage.real:
        capture_part(report, stage, runtime)
        contexts_part(report, stage.driver(), stage.torch.cuda.device_count())
    background_part(report, stage, runtime, launcher)
    pieces_part(report, stage, runtime, launcher)


if __name__ == "__main__":
    run_part(measure)
