"""A stage: the device that a benchmark runs on, a GPU or this machine's CPU as a rehearsal.

A rehearsal runs the same code on small sizes, so that it can be tried where no GPU is. Its figures
mean nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvhearth.copiers.base import ArenaView, Copier
from kvhearth.copiers.cudart import Cudart, CudaRuntime
from kvhearth.copiers.device import PIECE_BYTES, ArenaRegistration, CopyDevice
from kvhearth.copiers.host import HostCopier
from kvhearth.errors import KVHearthError, Reason
from kvhearth.page_layout import PagedKV

METHOD_ENV = "KVHEARTH_COPY_METHOD"
"""Environment variable that selects the CUDA copier's method."""
AUTO = "auto"
LOOP = "loop"
REGISTER_S = 120.0


class Stage(Protocol):
    """The device of a benchmark.

    Attributes:
        torch: the module.
        device: torch's name of the device.
        real: whether it is a GPU; False in a rehearsal.
        small: whether sizes should be those of a rehearsal.
    """

    torch: Any
    device: str
    real: bool
    small: bool

    def runtime(self) -> CudaRuntime:
        """Return the interface to the CUDA runtime."""

    def driver(self) -> Any:
        """Return the driver's library."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def sleep(self, seconds: float) -> None:
        """Issue a kernel that takes so long on the current stream; nothing in a rehearsal."""

    def stream(self) -> AbstractContextManager[None]:
        """Make a stream of its own current, as an engine's."""

    def copier(
        self, kv: PagedKV, arena: ArenaView, *, verify_fraction: float = 0.0, method: str = AUTO
    ) -> Copier:
        """Return a copier of the stage's pages that uses a method of ``copy_methods``."""

    def registered(self, arena: ArenaView) -> AbstractContextManager[float]:
        """Register an arena, and unregister it at the end; yields the seconds that it took.

        Raises:
            KVHearthError: ``copy_failed`` if CUDA refuses it.
        """


def copy_methods() -> list[str]:
    """Return the methods of the CUDA copier, its own choice first."""
    if importlib.util.find_spec("kvhearth.copiers.methods") is None:
        return [LOOP]
    methods = importlib.import_module("kvhearth.copiers.methods").CopyMethod
    names = [str(getattr(each, "value", each)) for each in methods]
    return [AUTO, *(name for name in names if name != AUTO)]


@contextlib.contextmanager
def chosen(method: str) -> Iterator[None]:
    """Let copiers that are made inside use a method."""
    before = os.environ.get(METHOD_ENV)
    os.environ[METHOD_ENV] = method
    try:
        yield
    finally:
        if before is None:
            del os.environ[METHOD_ENV]
        else:
            os.environ[METHOD_ENV] = before


def device_problem() -> str:
    """Return why there is no CUDA device, or empty."""
    if importlib.util.find_spec("torch") is None:
        return "no CUDA device: torch is not installed"
    torch: Any = importlib.import_module("torch")
    if torch.version.cuda is None:
        return f"no CUDA device: torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return f"no CUDA device: torch {torch.__version__} sees none"
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        return f"no CUDA device: {error}"
    return ""


def closed(copier: Copier) -> None:
    """Close a copier.

    Raises:
        KVHearthError: ``internal`` if its copies never end.
    """
    if not copier.close():
        raise KVHearthError(Reason.INTERNAL, "a copier's copies never end")


class CudaStage:
    """One GPU, the first one that this process sees.

    Args:
        torch: the module; None for torch itself.
        small: use the sizes of a rehearsal.
    """

    real = True

    def __init__(self, torch: Any = None, *, small: bool = False) -> None:
        self.torch: Any = torch or importlib.import_module("torch")
        self.device = "cuda:0"
        self.small = small
        self._cycles_per_s = 0.0
        self.torch.cuda.set_device(0)

    def runtime(self) -> CudaRuntime:
        return Cudart()

    def driver(self) -> Any:
        return ctypes.CDLL("libcuda.so.1")

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def sleep(self, seconds: float) -> None:
        if not self._cycles_per_s:
            self._cycles_per_s = self._measured_cycles()
        self.torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def _measured_cycles(self) -> float:
        cuda, cycles = self.torch.cuda, 50_000_000
        cuda._sleep(cycles)  # warm up: the clock rises under load
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return float(cycles / (begin.elapsed_time(end) / 1000))

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        stream = self.torch.cuda.Stream(device=self.device)
        stream.wait_stream(self.torch.cuda.current_stream(self.device))
        with self.torch.cuda.stream(stream):
            yield

    def copier(
        self, kv: PagedKV, arena: ArenaView, *, verify_fraction: float = 0.0, method: str = AUTO
    ) -> Copier:
        from kvhearth.copiers.cuda import CudaCopier

        with chosen(method):
            return CudaCopier(kv, arena, verify_fraction=verify_fraction, seed=1)

    def registered(self, arena: ArenaView) -> AbstractContextManager[float]:
        return _registered(arena, self.runtime())


class HostStage:
    """A rehearsal on the CPU.

    Args:
        device: scripted interface to CUDA, which the CUDA copier is then driven with; None for the
            host copier.
        runtime: scripted CUDA runtime, for what registers memory.
    """

    real = False
    small = True

    def __init__(
        self, device: CopyDevice | None = None, runtime: CudaRuntime | None = None
    ) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.device = "cpu"
        self._scripted = device
        self._runtime = runtime

    def runtime(self) -> CudaRuntime:
        assert self._runtime is not None, "this rehearsal has no scripted runtime"
        return self._runtime

    def driver(self) -> Any:
        raise KVHearthError(Reason.COPY_FAILED, "a rehearsal has no driver")

    def synchronize(self) -> None:
        """See ``Stage.synchronize``."""

    def sleep(self, seconds: float) -> None:
        """See ``Stage.sleep``."""

    def stream(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def copier(
        self, kv: PagedKV, arena: ArenaView, *, verify_fraction: float = 0.0, method: str = AUTO
    ) -> Copier:
        if self._scripted is None:
            return HostCopier(kv, arena, sums=False, verify=verify_fraction > 0)
        from kvhearth.copiers.cuda import CudaCopier

        # The loop: other methods call the driver, which is not here.
        with chosen(LOOP):
            return CudaCopier(
                kv, arena, device=self._scripted, verify_fraction=verify_fraction, seed=1
            )

    def registered(self, arena: ArenaView) -> AbstractContextManager[float]:
        if self._runtime is None:
            return contextlib.nullcontext(0.0)
        return _registered(arena, self._runtime)


@contextlib.contextmanager
def _registered(arena: ArenaView, runtime: CudaRuntime) -> Iterator[float]:
    began_s = time.perf_counter()
    made = ArenaRegistration(arena, runtime, 0, piece_bytes=PIECE_BYTES)
    try:
        if not made.wait(REGISTER_S):
            problem = made.error or f"not within {REGISTER_S} s"
            raise KVHearthError(Reason.COPY_FAILED, f"the arena is not registered: {problem}")
        yield time.perf_counter() - began_s
    finally:
        made.close(REGISTER_S)
