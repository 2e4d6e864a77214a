"""Interfaces to CUDA: runtime calls that torch does not offer, and the streams of one GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from logging import WARNING
from typing import Any, Protocol

from kvhearth.copiers.base import CopyKind
from kvhearth.counters import log_event
from kvhearth.errors import KVHearthError, Reason

RELAXED = 2
"""``cudaStreamCaptureModeRelaxed``. In any other mode a call such as ``cudaHostRegister`` or
``cudaEventQuery`` fails while another thread captures a graph, and invalidates that graph.
"""
_REGISTER_PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for every context of the process."""


class CudaRuntime(Protocol):
    """The CUDA runtime as seen by one of our threads. Codes are ``cudaError_t``, 0 is success."""

    def set_device(self, index: int) -> int:
        """Select the calling thread's GPU.

        Each thread starts on device 0, where its first call would create a context that costs
        hundreds of megabytes.
        """

    def exchange_capture_mode(self, mode: int) -> tuple[int, int]:
        """Set the calling thread's capture mode; return the code and the previous mode."""

    def host_register(self, address: int, size_bytes: int) -> int:
        """Page-lock ``size_bytes`` from ``address``; both are multiples of the page size."""

    def host_unregister(self, address: int) -> int:
        """Undo ``host_register`` of the piece that began at ``address``."""

    def last_error(self) -> int:
        """Return *and clear* the calling thread's last error.

        An error that is not cleared is reported by the thread's next kernel launch, as if it were
        the launch's own.
        """


class Cudart:
    """``CudaRuntime`` implemented with the library that torch has loaded.

    Raises:
        KVHearthError: ``copy_failed`` if torch has no CUDA or its runtime cannot be found.
    """

    def __init__(self) -> None:
        torch: Any = importlib.import_module("torch")
        version = torch.version.cuda
        if version is None:
            raise KVHearthError(
                Reason.COPY_FAILED, "this torch has no CUDA: install a build that has"
            )
        name = f"libcudart.so.{version.split('.')[0]}"
        try:
            self._slow = ctypes.CDLL(name)
            # PyDLL keeps the interpreter's lock, which another thread could otherwise hold for 5
            # ms.
            self._quick = ctypes.PyDLL(name)
        except OSError as error:
            raise KVHearthError(Reason.COPY_FAILED, f"cannot load {name}: {error}") from None
        self._slow.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._slow.cudaHostUnregister.argtypes = [ctypes.c_void_p]

    def set_device(self, index: int) -> int:
        """See ``CudaRuntime.set_device``."""
        return int(self._slow.cudaSetDevice(index))

    def exchange_capture_mode(self, mode: int) -> tuple[int, int]:
        """See ``CudaRuntime.exchange_capture_mode``."""
        value = ctypes.c_int(mode)
        code = int(self._quick.cudaThreadExchangeStreamCaptureMode(ctypes.byref(value)))
        return code, value.value

    def host_register(self, address: int, size_bytes: int) -> int:
        """See ``CudaRuntime.host_register``."""
        return int(self._slow.cudaHostRegister(address, size_bytes, _REGISTER_PORTABLE))

    def host_unregister(self, address: int) -> int:
        """See ``CudaRuntime.host_unregister``."""
        return int(self._slow.cudaHostUnregister(address))

    def last_error(self) -> int:
        """See ``CudaRuntime.last_error``."""
        return int(self._quick.cudaGetLastError())


def checked(runtime: CudaRuntime, call: str, code: int) -> None:
    """Raise if ``code`` is not success, after clearing the thread's last error.

    Raises:
        RuntimeError: names the call and the code.
    """
    if code:
        runtime.last_error()
        raise RuntimeError(f"{call} returned {code}")


@contextmanager
def beside_captures(runtime: CudaRuntime) -> Iterator[None]:
    """Let the thread's calls succeed while another thread captures a graph.

    Raises:
        RuntimeError: the thread's capture mode cannot be set, or not be restored.
    """
    call = "cudaThreadExchangeStreamCaptureMode"
    code, before = runtime.exchange_capture_mode(RELAXED)
    checked(runtime, call, code)
    try:
        yield
    finally:
        code, _ = runtime.exchange_capture_mode(before)
        checked(runtime, call, code)


class CopyDevice(Protocol):
    """Interface to one GPU's streams and events; the rest of the copier is plain torch.

    Every method except ``entered`` is called inside ``entered`` of the same thread.
    """

    def entered(self) -> AbstractContextManager[None]:
        """Select this GPU for the calling thread, and let its calls succeed during a graph capture.

        Raises:
            RuntimeError: the CUDA context is broken.
        """

    def issuing(self, kind: CopyKind) -> AbstractContextManager[None]:
        """Make the stream of ``kind`` current, ordered after all work of the caller's stream."""

    def record(self, kind: CopyKind) -> object:
        """Return an event after all work on the stream of ``kind``.

        Raises:
            RuntimeError: the CUDA context is broken; nothing is copied any more.
        """

    def is_done(self, event: object) -> bool:
        """Return whether the event has passed; does not block.

        Raises:
            RuntimeError: the work before it failed.
        """


@functools.cache
def _stream(device: str, kind: CopyKind) -> Any:
    """Return the process's stream of that GPU and kind.

    All copiers share it: torch hands out 32 streams in rotation, so that new ones after each attach
    would soon coincide with the engine's. Memory freed on this stream is reused on it.
    """
    # 0 is CUDA's lowest priority: copies yield to the engine's kernels.
    return importlib.import_module("torch").cuda.Stream(device=device, priority=0)


class TorchCuda:
    """``CopyDevice`` implemented with torch.

    Args:
        device: such as ``"cuda:0"``.

    Raises:
        RuntimeError: the CUDA context is broken.
    """

    def __init__(self, device: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._device = device
        self._runtime: CudaRuntime | None = None
        try:
            self._runtime = Cudart()
        except KVHearthError as error:
            log_event(
                WARNING,
                "cuda.captures_unguarded",
                "copies may invalidate a graph capture of another thread",
                error=error,
            )
        with self.entered():
            self._streams = {kind: _stream(device, kind) for kind in CopyKind}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """See ``CopyDevice.entered``."""
        runtime = self._runtime
        captures = nullcontext() if runtime is None else beside_captures(runtime)
        with self._torch.cuda.device(self._device), captures:
            yield

    @contextmanager
    def issuing(self, kind: CopyKind) -> Iterator[None]:
        """See ``CopyDevice.issuing``."""
        cuda, stream = self._torch.cuda, self._streams[kind]
        # Loads wait, too: the page's previous owner, or its zeroing, may still run on the engine's
        # stream.
        stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(stream):
            yield

    def record(self, kind: CopyKind) -> object:
        """See ``CopyDevice.record``."""
        event = self._torch.cuda.Event()
        event.record(self._streams[kind])
        return event

    def is_done(self, event: object) -> bool:
        """See ``CopyDevice.is_done``."""
        done: bool = event.query()  # type: ignore[attr-defined]
        return done
