"""A ``CudaStage`` without a GPU: torch on the CPU, with a scripted ``torch.cuda``.

It runs the lines that only a GPU needs, so that a misspelt name in them is found here. Kernels and
copies happen at once; nothing about their order is tested.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from support.cuda_fake import FakeCuda, FakeDevice

from kvhearth.copiers.base import ArenaView, Copier
from kvhearth.copiers.cuda import CudaCopier
from kvhearth.page_layout import PagedKV
from kvhearth_lab.bench.gpu.stage import AUTO, CudaStage

MAKERS = ("arange", "empty", "full", "ones", "randint", "randn", "tensor", "zeros")


class ScriptedEvent:
    """``torch.cuda.Event``: passes at once; its time is that of ``record``."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.recorded_s = 0.0

    def record(self, stream: ScriptedStream | None = None) -> None:
        self.recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        assert self.recorded_s, "an event that was never recorded"

    def elapsed_time(self, end: ScriptedEvent) -> float:
        assert self.enable_timing
        assert end.enable_timing
        return max((end.recorded_s - self.recorded_s) * 1e3, 1e-3)


class ScriptedStream:
    """``torch.cuda.Stream``."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: ScriptedStream) -> None:
        self.waited.append(other)


class ScriptedGraph:
    """``torch.cuda.CUDAGraph``: runs again what ``made`` is."""

    def __init__(self) -> None:
        self.replays = 0
        self.on_replay: Callable[[], object] = lambda: None

    def replay(self) -> None:
        self.replays += 1
        self.on_replay()


class ScriptedNamespace:
    """``torch.cuda`` as far as the parts use it.

    Attributes:
        slept: cycles that kernels were told to sleep.
        graphs: graphs that were captured.
    """

    Event = ScriptedEvent
    Stream = ScriptedStream
    CUDAGraph = ScriptedGraph
    OutOfMemoryError = torch.cuda.OutOfMemoryError

    def __init__(self, runtime: FakeCuda) -> None:
        self.slept = 0
        self.graphs: list[ScriptedGraph] = []
        self._runtime = runtime
        self._stream = ScriptedStream()

    def set_device(self, index: int) -> None:
        assert index == 0

    def synchronize(self) -> None:
        assert not self._runtime.capturing, "a capture forbids to synchronize"

    def current_stream(self, device: object = None) -> ScriptedStream:
        return self._stream

    @contextlib.contextmanager
    def stream(self, stream: ScriptedStream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    @contextlib.contextmanager
    def graph(self, graph: ScriptedGraph, *, capture_error_mode: str = "global") -> Iterator[None]:
        self._runtime.capturing = True
        yield
        self._runtime.capturing = False
        if self._runtime.broken_by:
            raise RuntimeError(f"capture invalidated by {self._runtime.broken_by}")
        self.graphs.append(graph)

    def _sleep(self, cycles: int) -> None:
        self.slept += cycles

    def device_count(self) -> int:
        return 2

    def mem_get_info(self) -> tuple[int, int]:
        return 80 << 30, 96 << 30

    def get_device_name(self, device: int) -> str:
        return "scripted"

    def get_device_properties(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(
            name="scripted", total_memory=96 << 30, pci_domain_id=0, pci_bus_id=1, pci_device_id=0
        )


class _Pinned:
    """Memory that claims to be page-locked."""

    def is_pinned(self) -> bool:
        return True


class HostTorch:
    """Torch whose tensors of any device lie on the CPU."""

    def __init__(self, runtime: FakeCuda) -> None:
        self.cuda = ScriptedNamespace(runtime)

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _on_host(value) if name in MAKERS else value

    def from_numpy(self, array: Any) -> _Pinned:
        return _Pinned()


def _on_host(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*shape: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        if "device" in options:
            options["device"] = "cpu"
        return make(*shape, **options)

    return made


class ScriptedDriver:
    """The driver's library: only the first device has a context."""

    def cuDevicePrimaryCtxGetState(self, device: int, flags: Any, active: Any) -> int:
        active._obj.value = int(device == 0)
        return 0


class ScriptedCudaStage(CudaStage):
    """A real stage's code on a scripted GPU, with the sizes of a rehearsal.

    Attributes:
        scripted: the CUDA runtime.
        wrap: wraps each copier, so that a test can plant a defect.
    """

    def __init__(self, wrap: Callable[[Copier], Copier] = lambda copier: copier) -> None:
        self.scripted = FakeCuda(device=0)
        self.wrap = wrap
        self._copies = FakeDevice(self.scripted)
        super().__init__(HostTorch(self.scripted), small=True)

    def runtime(self) -> FakeCuda:
        return self.scripted

    def driver(self) -> ScriptedDriver:
        return ScriptedDriver()

    def copier(
        self, kv: PagedKV, arena: ArenaView, *, verify_fraction: float = 0.0, method: str = AUTO
    ) -> Copier:
        device = self._copies
        return self.wrap(
            CudaCopier(kv, arena, device=device, verify_fraction=verify_fraction, seed=1)
        )
