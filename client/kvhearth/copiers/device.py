"""One GPU's streams and events for the copies, and the arena's registration with CUDA.

Only registered (page-locked) memory is copied asynchronously and at the bus's speed. Registering
takes seconds per 100 GiB, so it begins when the arena is mapped, in pieces and in the background,
and overlaps the engine's start. It follows the daemon, which populates the arena. Until then copies
work, but block the copier's thread.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import INFO, WARNING

import numpy as np

from kvhearth.copiers.base import ArenaView, CopyKind
from kvhearth.copiers.cudart import NOT_READY, CudaRuntime, beside_captures, checked, table_of
from kvhearth.copiers.cudart import Cudart as Cudart  # noqa: PLC0414 - exported here
from kvhearth.copiers.descriptors import Copies, Recoding
from kvhearth.copiers.methods import CopyMethod, Rates
from kvhearth.counters import log_event
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8
from kvhearth.worker_thread import SupervisedThread


class Event:
    """A recorded event; its handle is used again once nobody holds it."""

    def __init__(self, handle: int, spare: deque[int]) -> None:
        self.handle = handle
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append(self.handle)


PORTION_BYTES = 32 << 20
"""Most bytes of one submission to a stream."""
WINDOW_BYTES = 64 << 20
"""Most bytes under way in one direction: bounds what an engine's own copy waits for."""

BRIEF_COPIES_MAX = 256
"""Calls of a loop that keep the interpreter's lock. More could fill the driver's queue, where a
call blocks, and the engine's thread with it.
"""


class CopyDevice:
    """The streams of one GPU on which copies run, one for each direction. Thread-safe.

    Every method that makes CUDA calls, except ``mark``, is called inside ``entered`` of the same
    thread, which is one of ours: it keeps this GPU selected.

    Args:
        index: number of the GPU.
        runtime: interface to CUDA; None for the real one.
        portion_bytes: most bytes of one submission.
        window_bytes: most bytes under way in one direction, of all copiers.

    Attributes:
        rates: measured rates of the methods; None while they are unknown.

    Raises:
        KVHearthError: ``copy_failed`` if torch has no CUDA.
    """

    def __init__(
        self,
        index: int,
        runtime: CudaRuntime | None = None,
        *,
        portion_bytes: int = PORTION_BYTES,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.index = index
        self.runtime: CudaRuntime = Cudart() if runtime is None else runtime
        self.portion_bytes = portion_bytes
        self.rates: Rates | None = None
        self._window_bytes = window_bytes
        self._under_way = dict.fromkeys(CopyKind, 0)
        self._waiting: dict[CopyKind, deque[object]] = {kind: deque() for kind in CopyKind}
        self._streams: dict[CopyKind, int] = {}
        self._spare: deque[int] = deque()
        self._lock = threading.Lock()

    @functools.cached_property
    def problems(self) -> dict[CopyMethod, str]:
        """Reason why each method cannot be used, or empty."""
        return {
            CopyMethod.LOOP: "",
            CopyMethod.BATCH: self.runtime.batch_problem(),
            CopyMethod.KERNEL: self.runtime.kernel_problem(),
        }

    def reserve(self, kind: CopyKind, size_bytes: int, owner: object) -> bool:
        """Return whether a submission may begin now; then ``release`` must be called at its end.

        A submission larger than the window is alone under way. Owners take turns: one that was
        refused is next, and must ask again or ``withdraw``.
        """
        with self._lock:
            waiting, under_way = self._waiting[kind], self._under_way[kind]
            full = under_way and under_way + size_bytes > self._window_bytes
            if full or (waiting and waiting[0] is not owner):
                if owner not in waiting:
                    waiting.append(owner)
                return False
            if waiting:
                waiting.popleft()
            self._under_way[kind] = under_way + size_bytes
            return True

    def withdraw(self, kind: CopyKind, owner: object) -> None:
        """Give up an owner's place among those that wait."""
        with self._lock:
            if owner in self._waiting[kind]:
                self._waiting[kind].remove(owner)

    def release(self, kind: CopyKind, size_bytes: int) -> None:
        """Undo ``reserve``."""
        with self._lock:
            self._under_way[kind] -= size_bytes

    def mark(self) -> object:
        """Return a mark after all work on the calling thread's current stream; any thread may.

        Raises:
            RuntimeError: the CUDA context is broken.
        """
        return self.runtime.mark(self.index)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Select this GPU for the calling thread, and let its calls succeed during a graph capture.

        Raises:
            RuntimeError: the CUDA context is broken.
        """
        checked(self.runtime, "cudaSetDevice", self.runtime.set_device(self.index))
        with beside_captures(self.runtime):
            yield

    def wait(self, kind: CopyKind, mark: object) -> None:
        """Let later copies of ``kind`` begin only after the mark.

        Loads wait, too: the page's previous owner, or its zeroing, may still run on the engine's
        stream.

        Raises:
            RuntimeError: the call was refused.
        """
        code = self.runtime.wait(self._stream(kind), mark)
        checked(self.runtime, "cudaStreamWaitEvent", code)

    def submit(self, kind: CopyKind, method: CopyMethod, copies: Copies, registered: bool) -> None:
        """Issue copies, which run in any order.

        Args:
            registered: whether all host memory is registered; else only ``LOOP`` may be used, and
                this blocks until the copies have ended.

        Raises:
            RuntimeError: some were refused; others may be under way.
        """
        stream, sources, targets, sizes = self._stream(kind), *copies
        if method is CopyMethod.KERNEL:
            self.runtime.move(table_of(targets, sources, sizes), stream, self.index)
        elif method is CopyMethod.BATCH:
            code = self.runtime.copy_batch(targets, sources, sizes, stream)
            checked(self.runtime, f"cuMemcpyBatchAsync of {len(sizes)} copies", code)
        else:
            copy = self.runtime.copy
            columns = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
            for number, (target, source, size_bytes) in enumerate(columns):
                brief = registered and number < BRIEF_COPIES_MAX
                code = copy(target, source, size_bytes, stream, brief)
                checked(self.runtime, f"cudaMemcpyAsync of {size_bytes} bytes", code)

    def recode(self, kind: CopyKind, recoding: Recoding) -> None:
        """Issue the kernel of encoded blocks.

        Raises:
            RuntimeError: it was refused.
        """
        self.runtime.recode(kind, recoding, self._stream(kind), self.index)

    def record(self, kind: CopyKind) -> Event:
        """Return an event after all copies of ``kind`` so far.

        Raises:
            RuntimeError: the CUDA context is broken; nothing is copied any more.
        """
        try:
            handle = self._spare.pop()
        except IndexError:
            code, handle = self.runtime.create_event()
            checked(self.runtime, "cudaEventCreateWithFlags", code)
        event = Event(handle, self._spare)
        checked(self.runtime, "cudaEventRecord", self.runtime.record(handle, self._stream(kind)))
        return event

    def is_done(self, event: Event) -> bool:
        """Return whether the event has passed; does not block.

        Raises:
            RuntimeError: the work before it failed.
        """
        code = self.runtime.query(event.handle)
        if code == NOT_READY:
            self.runtime.last_error()
            return False
        checked(self.runtime, "cudaEventQuery", code)
        return True

    def _stream(self, kind: CopyKind) -> int:
        # Made by us and not taken from torch's pool, which hands out 32 streams in rotation: ours
        # would soon coincide with the engine's.
        with self._lock:
            if kind not in self._streams:
                code, lowest, _ = self.runtime.stream_priorities()
                checked(self.runtime, "cudaDeviceGetStreamPriorityRange", code)
                code, stream = self.runtime.create_stream(lowest)
                checked(self.runtime, "cudaStreamCreateWithPriority", code)
                self._streams[kind] = stream
            return self._streams[kind]


@functools.cache
def device_of(index: int) -> CopyDevice:
    """Return the process's device of that number: all copiers share its streams.

    Raises:
        KVHearthError: ``copy_failed`` if torch has no CUDA.
    """
    return CopyDevice(index)


def index_of(device: str) -> int:
    """Return the number of a GPU such as ``"cuda:1"``."""
    return int(device.partition(":")[2] or 0)


def numa_node(device: str) -> int:
    """Return the NUMA node of a device such as ``"cuda:1"``; -1 for a CPU or if it is unknown."""
    if not device.startswith("cuda"):
        return -1
    try:
        return device_of(index_of(device)).runtime.numa_node(index_of(device))
    except (KVHearthError, OSError, RuntimeError):
        return -1


PIECE_BYTES = 1 << 30
"""Bytes per registration. The driver blocks the engine's own CUDA calls during each one."""
PIECE_BYTES_MAX = 2 << 30
HUGEPAGE_BYTES = 2 << 20
_IDLE_S = 10.0
_JOIN_S = 0.5


class ArenaRegistration:
    """Registers all segments of an arena, from its construction on.

    A piece is registered once the daemon has populated all of it, since registering takes memory
    for pages that are not there. One without memory never is: copies there stay slow.

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
        self._piece_count = len(self._pieces)
        self._unpopulated = arena.unpopulated
        self._registered: list[int] = []
        self._ready = not self._pieces
        self._error = ""
        self._closing = False
        self._ended = False
        self._began_at = time.monotonic()
        self._worker = SupervisedThread("kvhearth-register", self._step, self._recover)
        self._changed = self._worker.changed
        self._unpopulated.follow(self._look)
        self._worker.start()

    @property
    def ready(self) -> bool:
        """Whether the whole arena is registered; never with a piece without memory."""
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

    def _look(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _step(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._worker.stopping or self._next() is not None, _IDLE_S
            )
            closing, piece = self._closing, self._next()
        if closing:
            self._unregister()
            self._end()
        elif piece is not None and not self._worker.stopping:
            self._register(*piece)

    def _next(self) -> tuple[int, int] | None:
        """Return the first piece that is populated and not registered."""
        if self._error or not self._pieces:
            return None
        addresses, sizes = np.array(self._pieces, np.int64).T
        found = np.flatnonzero(~self._unpopulated.touched_by(addresses, sizes))
        return self._pieces[found[0]] if len(found) else None

    def _register(self, address: int, size_bytes: int) -> None:
        number = len(self._registered) + 1
        try:
            with self._entered():
                code = self._runtime.host_register(address, size_bytes)
                checked(self._runtime, f"cudaHostRegister of {size_bytes} bytes", code)
        except (OSError, RuntimeError) as error:
            self._fail(f"piece {number} of {self._piece_count} at {address:#x}: {error}")
            return
        self._registered.append(address)
        self._pieces.remove((address, size_bytes))
        if not self._pieces:
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
