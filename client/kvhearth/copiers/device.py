"""Interfaces to CUDA: runtime calls that torch does not offer, one GPU's streams, registration.

Only registered (page-locked) memory is copied asynchronously and at the bus's speed. Registering
takes seconds per 100 GiB, so it begins when the arena is mapped, in pieces and in the background,
and overlaps the engine's start. Until then copies work, but block their caller.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, Protocol

from kvhearth.copiers.base import ArenaView, CopyKind
from kvhearth.counters import log_event
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8
from kvhearth.worker_thread import SupervisedThread

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


PIECE_BYTES = 1 << 30
"""Bytes per registration. The driver blocks the engine's own CUDA calls during each one."""
PIECE_BYTES_MAX = 2 << 30
HUGEPAGE_BYTES = 2 << 20
_IDLE_S = 10.0
_JOIN_S = 0.5


class ArenaRegistration:
    """Registers all segments of an arena, from its construction on.

    All CUDA calls are made on one dedicated thread, without a lock. Registered pieces stay
    registered until ``close``, also after a failure: copies may be under way in them. The object
    holds the arena's memory until ``close`` has returned True; close it after the copiers that use
    the arena. At the interpreter's exit the thread ends after the piece under way. In a forked
    child nothing is registered and ``close`` does nothing.

    Args:
        arena: arena whose segments to register.
        runtime: interface to the CUDA runtime.
        device_index: index of the GPU that the copiers use.
        piece_bytes: largest size of one registration, a multiple of 2 MiB.
        failed: called once on that thread if a piece is refused.

    Raises:
        KVHearthError: ``config_invalid`` for a bad ``piece_bytes``.
    """

    def __init__(
        self,
        arena: ArenaView,
        runtime: CudaRuntime,
        device_index: int,
        *,
        piece_bytes: int = PIECE_BYTES,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        if piece_bytes <= 0 or piece_bytes % HUGEPAGE_BYTES or piece_bytes > PIECE_BYTES_MAX:
            raise KVHearthError(
                Reason.CONFIG_INVALID,
                f"pieces of {piece_bytes} bytes: choose a multiple of {HUGEPAGE_BYTES} "
                f"up to {PIECE_BYTES_MAX}",
            )
        self._runtime = runtime
        self._device_index = device_index
        self._failed = failed
        # Views are held too: the memory must not be unmapped while it is registered with CUDA.
        self._views = [arena.view(segment) for segment in sorted(arena.segments)]
        self._pieces = list(_pieces(self._views, piece_bytes))
        self._registered: list[int] = []
        self._ready = not self._pieces
        self._error = ""
        self._closing = False
        self._ended = False
        self._began_at = time.monotonic()
        self._worker = SupervisedThread("kvhearth-register", self._step, self._recover)
        self._changed = self._worker.changed
        self._worker.start()

    @property
    def ready(self) -> bool:
        """Whether the whole arena is registered."""
        return self._ready

    @property
    def error(self) -> str:
        """Reason why the arena is not and will not be registered, or empty."""
        return self._error

    def wait(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` seconds until registration has ended; True if it succeeded."""
        if self._worker.foreign:
            return False
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready or self._error or self._closing or self._worker.stopping,
                max(deadline_s, 0.0),
            )
            return self._ready

    def close(self, deadline_s: float = 30.0) -> bool:
        """Unregister everything, after the piece under way. Idempotent.

        Returns:
            False if that took longer than ``deadline_s`` seconds: the arena must stay mapped. The
            work continues; call again.
        """
        if self._worker.foreign:
            return True
        with self._changed:
            self._closing = True
            self._ready = False
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._ended or self._worker.stopping, max(deadline_s, 0.0)
            )
            if not self._ended:
                return False
        # The thread has nothing left to do, so this takes a moment.
        return self._worker.stop(_JOIN_S)

    def _step(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._worker.stopping or self._has_more(), _IDLE_S
            )
            closing, more = self._closing, self._has_more()
        if closing:
            self._unregister()
            self._end()
        elif more and not self._worker.stopping:
            self._register(*self._pieces[len(self._registered)])

    def _has_more(self) -> bool:
        return not self._error and len(self._registered) < len(self._pieces)

    def _register(self, address: int, size_bytes: int) -> None:
        number = len(self._registered) + 1
        try:
            with self._entered():
                code = self._runtime.host_register(address, size_bytes)
                checked(self._runtime, f"cudaHostRegister of {size_bytes} bytes", code)
        except (OSError, RuntimeError) as error:
            self._fail(f"piece {number} of {len(self._pieces)} at {address:#x}: {error}")
            return
        self._registered.append(address)
        if number == len(self._pieces):
            with self._changed:
                self._ready = not self._closing
                self._changed.notify_all()
            seconds = time.monotonic() - self._began_at
            log_event(
                INFO,
                "arena.registered",
                "the arena is registered with CUDA",
                pieces=number,
                seconds=round(seconds, 1),
            )

    def _unregister(self) -> None:
        while self._registered:
            address = self._registered.pop()
            try:
                with self._entered():
                    code = self._runtime.host_unregister(address)
                    checked(self._runtime, "cudaHostUnregister", code)
            except (OSError, RuntimeError) as error:
                log_event(
                    WARNING,
                    "arena.not_unregistered",
                    "a piece of the arena stays registered",
                    address=hex(address),
                    error=error,
                )

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Prepare this thread for one call, which may overlap a graph capture of the engine."""
        code = self._runtime.set_device(self._device_index)
        checked(self._runtime, "cudaSetDevice", code)
        with beside_captures(self._runtime):
            yield

    def _fail(self, error: str) -> None:
        log_event(
            WARNING,
            "arena.not_registered",
            "the arena stays unregistered from here on, copies will be slow: check the container's "
            "memory limit and the driver",
            error=error,
        )
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._failed()

    def _end(self) -> None:
        with self._changed:
            self._views.clear()
            self._ended = True
            self._changed.notify_all()
        self._worker.stop(0.0)

    def _recover(self) -> None:
        if not self._error:
            self._fail("the thread that registers failed")


@dataclass
class _Shared:
    """The registration of one arena (None if it could not begin) and its users."""

    registration: ArenaRegistration | None
    users: set[object] = field(default_factory=set)


class Registrations:
    """Registers each arena once, however many users it has in this process. Thread-safe.

    Args:
        runtime: makes the interface to CUDA.
    """

    def __init__(self, runtime: Callable[[], CudaRuntime] = Cudart) -> None:
        self._runtime = runtime
        # Never held during a CUDA call: a worker's threads take it.
        self._lock = threading.Lock()
        self._arenas: weakref.WeakKeyDictionary[ArenaView, _Shared] = weakref.WeakKeyDictionary()

    def acquire(
        self, arena: ArenaView, user: object, device_index: int, failed: Callable[[], None]
    ) -> None:
        """Register in the background. A failure is logged, and ``failed`` called once per arena."""
        with self._lock:
            shared = self._arenas.get(arena)
            if shared is None:
                shared = self._arenas[arena] = _Shared(self._begin(arena, device_index, failed))
            shared.users.add(user)

    def release(self, arena: ArenaView, user: object, deadline_s: float) -> bool:
        """Undo ``acquire``; the last user waits up to ``deadline_s`` seconds for unregistration.

        Returns:
            False if it did not finish in time: the arena must stay mapped. Call again.
        """
        with self._lock:
            shared = self._arenas.get(arena)
            if shared is None:
                return True
            shared.users.discard(user)
            if shared.users:
                return True
        if shared.registration is not None and not shared.registration.close(deadline_s):
            return False
        with self._lock:
            if not shared.users:
                self._arenas.pop(arena, None)
        return True

    def _begin(
        self, arena: ArenaView, device_index: int, failed: Callable[[], None]
    ) -> ArenaRegistration | None:
        try:
            return ArenaRegistration(arena, self._runtime(), device_index, failed=failed)
        except KVHearthError as error:
            log_event(
                WARNING,
                "arena.not_registered",
                "the arena stays unregistered, copies will be slow",
                error=error,
            )
            failed()
            return None


def _pieces(views: list[U8], piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of the pieces of all segments."""
    for view in views:
        for offset in range(0, view.nbytes, piece_bytes):
            yield int(view.ctypes.data) + offset, min(piece_bytes, view.nbytes - offset)
