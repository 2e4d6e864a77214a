"""Scripted stand-ins for CUDA.

``FakeCuda`` is the runtime as all threads of a process share it: each thread's current GPU, the
GPUs with a context, whether a graph is being captured, and uncleared errors. ``FakeDevice`` is one
GPU's streams and events in that runtime.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvhearth.copiers.device import RELAXED

GLOBAL = 0
DEADLINE_S = 10.0


@dataclass
class _Thread:
    """CUDA's state of a thread; each begins on device 0."""

    device: int = 0
    mode: int = GLOBAL
    sticky: int = 0


class FakeCuda:
    """Fake of ``CudaRuntime``. The engine's GPU is ``device``; threads begin on another one.

    Attributes:
        fail_at: the piece (from 1) whose registration is refused.
        fail_call: a call that always fails.
        raise_call: a call that raises ``OSError``, as if the library lacked it.
        capturing: the engine captures a graph; calls that a thread may not make meanwhile break it.
        broken_by: calls that broke a capture.
        contexts: GPUs that calls were made on.
        calls: addresses and sizes of attempted registrations.
        registered: sizes by address.
        gate: while it is cleared, registering and unregistering block.
        stalled: set while one of them blocks.
        copying: whether copies are in progress; set by ``FakeDevice``.
        unpinned_under_copies: pieces that were unregistered meanwhile.
        callers: by call, the threads that made it.
    """

    OUT_OF_MEMORY = 2
    NOT_REGISTERED = 713
    CAPTURE_UNSUPPORTED = 900

    def __init__(self, fail_at: int = 0, device: int = 1) -> None:
        self.device = device
        self.fail_at = fail_at
        self.fail_call = ""
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
        self._own = threading.local()
        self._threads: list[_Thread] = []

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

    def host_register(self, address: int, size_bytes: int) -> int:
        self._pass_gate()
        self.calls.append((address, size_bytes))
        code = self.call("cudaHostRegister")
        if not code and len(self.calls) == self.fail_at:
            code = self._refuse(self.OUT_OF_MEMORY)
        if not code:
            self.registered[address] = size_bytes
        return code

    def host_unregister(self, address: int) -> int:
        self._pass_gate()
        code = self.call("cudaHostUnregister")
        if code:
            return code
        if self.copying:
            self.unpinned_under_copies.append(address)
        if self.registered.pop(address, None) is None:
            return self._refuse(self.NOT_REGISTERED)
        return 0

    def last_error(self) -> int:
        code, self.thread.sticky = self.thread.sticky, 0
        return code

    def _refuse(self, code: int) -> int:
        self.thread.sticky = code
        return code

    def _pass_gate(self) -> None:
        if not self.gate.is_set():
            self.stalled.set()
            assert self.gate.wait(DEADLINE_S), "a test forgot to open the gate"
            self.stalled.clear()


class FakeDevice:
    """Fake of ``CopyDevice`` on the CPU: copies happen at once, events pass while ``held`` is
    False.

    Attributes:
        issuing_now: kind of the current stream, or None.
        meeting: if given, an issuing thread waits here a moment for another one that issues.
        mixed: how often two threads issued at once.
        early_records: events that were recorded before the copies that they should follow.
    """

    def __init__(self, cuda: FakeCuda | None = None) -> None:
        self.cuda = cuda or FakeCuda()
        self.fail_issue = False
        self.fail_record = False
        self.fail_event = False
        self.fail_enter = False
        self.issuing_now: object = None
        self.meeting: threading.Barrier | None = None
        self.mixed = 0
        self.early_records = 0
        self._issued: set[object] = set()
        self._held = False

    @property
    def held(self) -> bool:
        return self._held

    @held.setter
    def held(self, held: bool) -> None:
        self._held = self.cuda.copying = held

    @contextmanager
    def entered(self) -> Iterator[None]:
        if self.fail_enter:
            raise RuntimeError("CUDA error: context is destroyed (scripted)")
        thread = self.cuda.thread
        before = thread.device, thread.mode
        thread.device, thread.mode = self.cuda.device, RELAXED
        try:
            yield
        finally:
            thread.device, thread.mode = before

    @contextmanager
    def issuing(self, kind: object) -> Iterator[None]:
        self._call("cudaStreamWaitEvent")
        if self.fail_issue:
            self._issued.add(kind)
            raise RuntimeError("CUDA error: out of memory (scripted)")
        self.issuing_now = kind
        self._meet_others()
        try:
            yield
        finally:
            self.issuing_now = None
            self._issued.add(kind)

    def record(self, kind: object) -> object:
        self._call("cudaEventRecord")
        self.early_records += kind not in self._issued
        self._issued.discard(kind)
        if self.fail_record:
            raise RuntimeError("CUDA error: context is destroyed (scripted)")
        return object()

    def is_done(self, event: object) -> bool:
        self._call("cudaEventQuery")
        if self.fail_event:
            raise RuntimeError("CUDA error: an illegal memory access (scripted)")
        return not self.held

    def _meet_others(self) -> None:
        if self.meeting is not None:
            try:
                self.meeting.wait(0.05)
                self.mixed += 1
            except threading.BrokenBarrierError:
                self.meeting.reset()

    def _call(self, name: str) -> None:
        if self.cuda.call(name):
            raise RuntimeError(f"CUDA error: {name} was refused (scripted)")
