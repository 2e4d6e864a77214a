"""A scripted CUDA on the CPU: streams, events, registration and captures as copies observe them.

``FakeCuda`` is ``CudaRuntime`` as all threads of a process share it. Nothing runs when it is
submitted: each poll of an event lets every stream do one thing, ours before the engine's, so that a
copy without its wait runs too early and one that is reported without its end is still missing.
"""

from __future__ import annotations

import ctypes
import functools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvhearth.copiers.base import CopyKind
from kvhearth.copiers.cudart import NOT_READY, RELAXED, DeviceMemory, Scratch
from kvhearth.copiers.descriptors import Recoding
from kvhearth.copiers.device import PIECE_BYTES, CopyDevice
from kvhearth_lab.harness import HUNG_S
from support.triton_interpreter import interpreted_kernels

GLOBAL = 0
LOWEST, HIGHEST = 0, -5
ENGINE_STREAM = 7


@dataclass
class _Thread:
    """CUDA's state of a thread; each begins on device 0."""

    device: int = 0
    mode: int = GLOBAL
    sticky: int = 0


@dataclass
class _Mark:
    """A point in a stream."""

    passed: bool = False


@dataclass
class _Stream:
    """Work that was submitted and has not run: each does one thing, or returns False to wait."""

    priority: int
    device: int
    work: deque[Callable[[], bool]] = field(default_factory=deque)


class FakeCuda:
    """Fake of ``CudaRuntime``. The engine's GPU is ``device``; threads begin on another one.

    Attributes:
        fail_at: the piece (from 1) whose registration is refused.
        fail_call: a call that always fails.
        fail_late: a call that does its work, or the first half of it, and then fails.
        raise_call: a call that raises ``OSError``, as if the library lacked it.
        capturing: the engine captures a graph; calls that a thread may not make meanwhile break it.
        broken_by: calls that broke a capture.
        contexts: GPUs that calls were made on.
        calls: addresses and sizes of attempted registrations.
        registered: sizes by address.
        gate: while it is cleared, registering and unregistering block.
        stalled: set while one of them blocks.
        copying: whether copies are in progress, for tests without any.
        unpinned_under_copies: pieces that were unregistered meanwhile.
        callers: by call, the threads that made it.
        held: our streams stand still.
        held_streams: these stand still.
        engine_held: the engine's stream stands still.
        missing: methods that the machine lacks, with the reason.
        garbles: a method that copies a wrong byte.
        submitted: (method, copies, bytes) of each submission.
        under_way_max: most bytes that were under way on one stream.
        misuse: calls that a real driver punishes later.
        brief_copies: single copies that kept the interpreter's lock.
    """

    OUT_OF_MEMORY = 2
    INVALID_VALUE = 1
    NOT_REGISTERED = 713
    ILLEGAL_ADDRESS = 700
    CAPTURE_UNSUPPORTED = 900

    def __init__(self, fail_at: int = 0, device: int = 1) -> None:
        self.device = device
        self.fail_at = fail_at
        self.fail_call = ""
        self.fail_late = ""
        self.raise_call = ""
        self.capturing = False
        self.broken_by: list[str] = []
        self.contexts = {device}
        self.calls: list[tuple[int, int]] = []
        self.registered: dict[int, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.stalled = threading.Event()
        self.copying = False
        self.unpinned_under_copies: list[int] = []
        self.callers: dict[str, set[int]] = {}
        self.held = False
        self.held_streams: set[int] = set()
        self.engine_held = False
        self.missing: dict[str, str] = {}
        self.garbles = ""
        self.submitted: list[tuple[str, int, int]] = []
        self.under_way_max = 0
        self.misuse: list[str] = []
        self.brief_copies = 0
        self.streams = {ENGINE_STREAM: _Stream(0, device)}
        self._events: dict[int, _Mark] = {}
        self._under_way: dict[int, int] = {}
        self._lock = threading.RLock()
        self._random = random.Random(11)
        self._own = threading.local()
        self._threads: list[_Thread] = []
        self._told = threading.Condition()
        self._told_count = 0
        self._still_count = 0

    # -- tests -------------------------------------------------------------------------------------

    def wait_for(self, predicate: Callable[[], object]) -> None:
        """Wait until ``predicate()`` is true: asked after each poll and each registration."""
        while True:
            before = self._told_count
            if predicate():
                return
            with self._told:
                told = self._told.wait_for(lambda before=before: self._told_count != before, HUNG_S)
            assert told, "nothing happens"

    def wait_still(self) -> None:
        """Wait until three polls in a row found that no stream can go on."""
        self._still_count = 0
        self.wait_for(lambda: self._still_count >= 3)

    def _tell(self) -> None:
        with self._told:
            self._told_count += 1
            self._told.notify_all()

    # -- threads -----------------------------------------------------------------------------------

    @property
    def thread(self) -> _Thread:
        """State of the calling thread."""
        if not hasattr(self._own, "state"):
            self._own.state = _Thread()
            self._threads.append(self._own.state)
        state: _Thread = self._own.state
        return state

    def left_behind(self) -> list[_Thread]:
        """Return the threads with an uncleared error, or with a changed capture mode."""
        return [each for each in self._threads if each.sticky or each.mode != GLOBAL]

    def call(self, name: str) -> int:
        """Make a call that CUDA forbids during a capture, on the calling thread's GPU."""
        thread = self.thread
        self.callers.setdefault(name, set()).add(threading.get_ident())
        self.contexts.add(thread.device)
        if name == self.raise_call:
            raise OSError(f"{name} is not there (scripted)")
        if name == self.fail_call:
            return self._refuse(self.OUT_OF_MEMORY)
        if self.capturing and thread.mode != RELAXED:
            self.broken_by.append(name)
            return self._refuse(self.CAPTURE_UNSUPPORTED)
        return 0

    def set_device(self, index: int) -> int:
        self.thread.device = index
        return self._refuse(self.OUT_OF_MEMORY) if self.fail_call == "cudaSetDevice" else 0

    def exchange_capture_mode(self, mode: int) -> tuple[int, int]:
        if self.fail_call == "cudaThreadExchangeStreamCaptureMode":
            return self._refuse(self.OUT_OF_MEMORY), mode
        before, self.thread.mode = self.thread.mode, mode
        return 0, before

    def last_error(self) -> int:
        code, self.thread.sticky = self.thread.sticky, 0
        return code

    # -- registration ------------------------------------------------------------------------------

    def host_register(self, address: int, size_bytes: int) -> int:
        self._pass_gate()
        self.calls.append((address, size_bytes))
        code = self.call("cudaHostRegister")
        if not code and len(self.calls) == self.fail_at:
            code = self._refuse(self.OUT_OF_MEMORY)
        if not code:
            self.registered[address] = size_bytes
        self._tell()
        return code

    def host_unregister(self, address: int) -> int:
        self._pass_gate()
        code = self.call("cudaHostUnregister")
        if code:
            return code
        if self.copying or self.unfinished():
            self.unpinned_under_copies.append(address)
        found = self.registered.pop(address, None)
        self._tell()
        return 0 if found is not None else self._refuse(self.NOT_REGISTERED)

    def is_registered(self, address: int) -> bool:
        self.call("cudaPointerGetAttributes")
        return self._piece_of(address) is not None

    def pin(self, arena: Any, piece_bytes: int = PIECE_BYTES) -> None:
        """Register an arena as ``ArenaRegistration`` does."""
        for segment, size_bytes in arena.segments.items():
            for offset in range(0, size_bytes, piece_bytes):
                begin = arena.address(segment) + offset
                self.registered[begin] = min(piece_bytes, size_bytes - offset)

    # -- streams -----------------------------------------------------------------------------------

    def stream_priorities(self) -> tuple[int, int, int]:
        return self.call("cudaDeviceGetStreamPriorityRange"), LOWEST, HIGHEST

    def create_stream(self, priority: int) -> tuple[int, int]:
        if code := self.call("cudaStreamCreateWithPriority"):
            return code, 0
        handle = 100 + len(self.streams)
        self.streams[handle] = _Stream(priority, self.thread.device)
        return 0, handle

    def create_event(self) -> tuple[int, int]:
        if code := self.call("cudaEventCreateWithFlags"):
            return code, 0
        handle = 1000 + len(self._events)
        self._events[handle] = _Mark(passed=True)
        return 0, handle

    def record(self, event: int, stream: int) -> int:
        if code := self.call("cudaEventRecord"):
            return code
        self._events[event] = self._put_mark(stream)
        return 0

    def query(self, event: int) -> int:
        if code := self.call("cudaEventQuery"):
            return code
        self._still_count = 0 if self.advance() else self._still_count + 1
        self._tell()
        return 0 if self._events[event].passed else self._refuse(NOT_READY)

    def mark(self, index: int) -> object:
        if self.fail_call == "mark":
            raise RuntimeError("CUDA error: context is destroyed (scripted)")
        assert index == self.device
        return self._put_mark(ENGINE_STREAM)

    def wait(self, stream: int, mark: object) -> int:
        if code := self.call("cudaStreamWaitEvent"):
            return code
        assert isinstance(mark, _Mark)
        self._put(stream, lambda: mark.passed)
        return 0

    def engine(self, kernel: Callable[[], object]) -> None:
        """Submit a kernel to the engine's stream."""

        def run() -> bool:
            kernel()
            return True

        self._put(ENGINE_STREAM, run)

    def advance(self) -> bool:
        """Let every stream that does not stand still do one thing; return whether one did."""
        with self._lock:
            moved = False
            for handle in sorted(self.streams, reverse=True):
                stands = self.engine_held if handle == ENGINE_STREAM else self.held
                stands |= handle in self.held_streams
                work = self.streams[handle].work
                if work and not stands and work[0]():
                    work.popleft()
                    moved = True
            return moved

    def event_count(self) -> int:
        """Return the number of events that were created."""
        return len(self._events)

    def unfinished(self) -> int:
        """Return the number of things that our streams have not done yet."""
        with self._lock:
            ours = [each for name, each in self.streams.items() if name != ENGINE_STREAM]
            return sum(len(stream.work) for stream in ours)

    # -- copies ------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, size_bytes: int, stream: int, brief: bool) -> int:
        if code := self.call("cudaMemcpyAsync"):
            return code
        if self._crosses(target, size_bytes) or self._crosses(source, size_bytes):
            return self._refuse(self.INVALID_VALUE)
        self._submitted("loop", [(target, source, size_bytes)], stream)
        pinned = {self._piece_of(target), self._piece_of(source)} != {None}
        self.brief_copies += brief
        if brief and not pinned:
            self.misuse.append("an unregistered copy kept the interpreter's lock")
        if not pinned:
            self._drain(stream)
        return self._late("cudaMemcpyAsync")

    def copy_batch(self, targets: Any, sources: Any, sizes: Any, stream: int) -> int:
        if code := self.call("cuMemcpyBatchAsync"):
            return code
        rows = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        if not rows or stream not in self.streams or stream == ENGINE_STREAM:
            return self._refuse(self.INVALID_VALUE)
        for target, source, size_bytes in rows:
            if self._crosses(target, size_bytes) or self._crosses(source, size_bytes):
                return self._refuse(self.INVALID_VALUE)
            if self._piece_of(target) is self._piece_of(source) is None:
                self.misuse.append("a batched copy of unregistered memory")
        self._random.shuffle(rows)
        late = self.fail_late == "cuMemcpyBatchAsync"
        self._submitted("batch", rows[: len(rows) // 2 + 1] if late else rows, stream)
        return self._late("cuMemcpyBatchAsync")

    def move(self, table: Any, stream: int, index: int) -> None:
        if self.call("kernel"):
            raise RuntimeError("CUDA error: out of memory (scripted)")
        assert index == self.device
        rows = [(target, source, size) for source, target, size in table.tolist()]
        if any(self._piece_of(a) is self._piece_of(b) is None for a, b, _ in rows):
            self.misuse.append("a kernel reached for unregistered memory")
        self._random.shuffle(rows)
        self._submitted("kernel", rows, stream)
        if self._late("kernel"):
            raise RuntimeError("CUDA error: late (scripted)")

    def recode(self, kind: CopyKind, recoding: Recoding, stream: int, index: int) -> None:
        if self.call("kernel"):
            raise RuntimeError("CUDA error: out of memory (scripted)")
        assert index == self.device
        import torch

        kernels = interpreted_kernels()
        fragments, blocks, run_bytes, encoding = recoding
        tables = [torch.from_numpy(fragments), torch.from_numpy(blocks)]

        def run() -> bool:
            if kind is CopyKind.STORE:
                kernels.encode(tables[0], run_bytes, tables[1], encoding)
            else:
                kernels.decode(tables[1], tables[0], run_bytes, encoding)
            return True

        self._put(stream, run)

    def memory(self, index: int, size_bytes: int) -> DeviceMemory:
        if self.fail_call == "memory":
            raise RuntimeError("CUDA error: out of memory (scripted)")
        made = np.full(size_bytes + 256, 0xEE, np.uint8)
        return DeviceMemory(int(made.ctypes.data) + -int(made.ctypes.data) % 256, made)

    def batch_problem(self) -> str:
        return self.missing.get("batch", "")

    def kernel_problem(self) -> str:
        return self.missing.get("kernel", "")

    def scratch(self, index: int, size_bytes: int) -> Scratch:
        if self.fail_call == "scratch":
            raise RuntimeError("CUDA error: out of memory (scripted)")
        host, on_device = np.zeros(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
        self.registered[int(host.ctypes.data)] = size_bytes
        return Scratch(host, int(on_device.ctypes.data), (host, on_device))

    def identity(self, index: int) -> str:
        return f"scripted GPU, CUDA {13000 + index}"

    def numa_node(self, index: int) -> int:
        return index

    # -- inside ------------------------------------------------------------------------------------

    def _put(self, stream: int, work: Callable[[], bool]) -> None:
        with self._lock:
            if stream not in self.streams:
                self.misuse.append(f"stream {stream} does not exist")
            self.streams.setdefault(stream, _Stream(0, self.device)).work.append(work)

    def _put_mark(self, stream: int) -> _Mark:
        mark = _Mark()

        def passed() -> bool:
            mark.passed = True
            return True

        with self._lock:
            if not self.streams[stream].work and stream == ENGINE_STREAM and not self.engine_held:
                mark.passed = True
            else:
                self._put(stream, passed)
        return mark

    def _submitted(self, method: str, rows: list[tuple[int, int, int]], stream: int) -> None:
        size_bytes = sum(size for _, _, size in rows)
        self.submitted.append((method, len(rows), size_bytes))
        with self._lock:
            self._under_way[stream] = self._under_way.get(stream, 0) + size_bytes
            self.under_way_max = max(self.under_way_max, self._under_way[stream])
            for row in rows:
                self._put(stream, functools.partial(self._move_now, method, row, stream))

    def _move_now(self, method: str, row: tuple[int, int, int], stream: int) -> bool:
        target, source, size_bytes = row
        ctypes.memmove(target, source, size_bytes)
        if method == self.garbles:
            ctypes.memset(target, 0x5A, 1)
        self._under_way[stream] -= size_bytes
        return True

    def _drain(self, stream: int) -> None:
        """Run a stream to its end, as a copy of unregistered memory does for its caller."""
        pause = threading.Event()
        for _ in range(int(HUNG_S / 0.001)):
            while self.advance():
                pass
            if not self.streams[stream].work:
                return
            pause.wait(0.001)
        raise AssertionError("a test forgot to let the streams run")

    def _piece_of(self, address: int) -> int | None:
        for begin, size_bytes in list(self.registered.items()):
            if begin <= address < begin + size_bytes:
                return begin
        return None

    def _crosses(self, address: int, size_bytes: int) -> bool:
        return self._piece_of(address) != self._piece_of(address + size_bytes - 1)

    def _late(self, name: str) -> int:
        return self._refuse(self.OUT_OF_MEMORY) if self.fail_late == name else 0

    def _refuse(self, code: int) -> int:
        self.thread.sticky = code
        return code

    def _pass_gate(self) -> None:
        if not self.gate.is_set():
            self.stalled.set()
            assert self.gate.wait(HUNG_S), "a test forgot to open the gate"
            self.stalled.clear()


class FakeDevice(CopyDevice):
    """The streams of a scripted GPU. ``held`` keeps copies from ending."""

    def __init__(self, cuda: FakeCuda | None = None, **options: Any) -> None:
        self.cuda = cuda or FakeCuda()
        super().__init__(self.cuda.device, self.cuda, **options)

    @property
    def held(self) -> bool:
        return self.cuda.held

    @held.setter
    def held(self, held: bool) -> None:
        self.cuda.held = held

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter as our own threads do, but leave the thread of a test as it was."""
        before = self.cuda.thread.device
        try:
            with super().entered():
                yield
        finally:
            self.cuda.thread.device = before

    def check_end(self) -> None:
        """Raise AssertionError if the copies that ended did something that a GPU punishes."""
        cuda = self.cuda
        assert cuda.contexts == {cuda.device}, "a thread called CUDA without choosing its device"
        assert cuda.broken_by == []
        assert cuda.left_behind() == []
        assert cuda.misuse == []
        assert not cuda.unfinished(), "copies were reported before their end"
        assert set(self._under_way.values()) == {0}, "bytes under way were never released"
        assert not any(self._waiting.values()), "a copier never gave up its place"
        ours = [stream for name, stream in cuda.streams.items() if name != ENGINE_STREAM]
        assert len(ours) <= len(CopyKind)
        assert {stream.priority for stream in ours} <= {LOWEST}
        assert {stream.device for stream in ours} <= {cuda.device}
