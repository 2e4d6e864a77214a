"""CUDA as one interface: the calls that the copies need, by ctypes, beside the engine's torch.

The runtime library is the one that torch has loaded. Batched copies are an entry point of the
driver, looked up by version: 12.8 introduced it with an index of the failed copy, 13.0 removed that
argument. Gather and scatter kernels are ``copiers.kernels``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvhearth.copiers.base import CopyKind
from kvhearth.copiers.descriptors import Recoding
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, U8

RELAXED = 2
"""``cudaStreamCaptureModeRelaxed``. In any other mode a call such as ``cudaHostRegister`` or
``cudaEventQuery`` fails while another thread captures a graph, and invalidates that graph.
"""
NOT_READY = 600
"""``cudaErrorNotReady``."""
_REGISTER_FLAGS = 1 | 2
"""``cudaHostRegisterPortable | cudaHostRegisterMapped``: page-locked for every context of the
process, and readable by kernels.
"""
_DISABLE_TIMING = 2
_NON_BLOCKING = 1
_COPY_DEFAULT = 4
_MEMORY_HOST = 1
_DRIVER = "libcuda.so.1"
_BATCH_SYMBOL = b"cuMemcpyBatchAsync"
_BATCH_VERSIONS = ((13000, False), (12080, True))
"""Versions of the entry point, newest first, and whether each takes the failed copy's index."""
_STREAM_ORDER = 1
"""``CU_MEMCPY_SRC_ACCESS_ORDER_STREAM``: sources are read in stream order, hence after the work
that a copy waits for.
"""
_OVERLAP = 1
"""``CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE``."""
_BUS_ID_BYTES = 32
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_DRIVER_VERSION = Path("/sys/module/nvidia/version")


class Scratch(NamedTuple):
    """Memory to measure with.

    Attributes:
        host: page-locked memory, shape (bytes,).
        address: address of as many bytes on the GPU.
        owner: keeps both alive.
    """

    host: U8
    address: int
    owner: object


class DeviceMemory(NamedTuple):
    """Memory of a GPU: its address, a multiple of 256, and what keeps it alive."""

    address: int
    owner: object


class CudaRuntime(Protocol):
    """CUDA as seen by one of our threads. Codes are ``cudaError_t``, 0 is success.

    Streams and events are handles. Calls act on the thread's current GPU, except ``mark``.
    """

    def set_device(self, index: int) -> int:
        """Select the calling thread's GPU.

        Each thread starts on device 0, where its first call would create a context that costs
        hundreds of megabytes.
        """

    def exchange_capture_mode(self, mode: int) -> tuple[int, int]:
        """Set the calling thread's capture mode; return the code and the previous mode."""

    def last_error(self) -> int:
        """Return *and clear* the calling thread's last error.

        An error that is not cleared is reported by the thread's next kernel launch, as if it were
        the launch's own.
        """

    def host_register(self, address: int, size_bytes: int) -> int:
        """Page-lock ``size_bytes`` from ``address``; both are multiples of the page size."""

    def host_unregister(self, address: int) -> int:
        """Undo ``host_register`` of the piece that began at ``address``."""

    def is_registered(self, address: int) -> bool:
        """Return whether the GPU reaches this host address directly, under the same address."""

    def stream_priorities(self) -> tuple[int, int, int]:
        """Return the code, the lowest and the highest priority that streams of the GPU can have."""

    def create_stream(self, priority: int) -> tuple[int, int]:
        """Return the code and a new stream, which does not wait for the default stream."""

    def create_event(self) -> tuple[int, int]:
        """Return the code and a new event without timing."""

    def record(self, event: int, stream: int) -> int:
        """Record the event after all work on the stream."""

    def query(self, event: int) -> int:
        """Return 0 if the event has passed, ``NOT_READY`` if not; does not block."""

    def mark(self, index: int) -> object:
        """Return a mark after all work on the calling thread's current stream of a GPU.

        For threads of the engine: the thread's current GPU stays as it is.

        Raises:
            RuntimeError: the CUDA context is broken.
        """

    def wait(self, stream: int, mark: object) -> int:
        """Let later work on the stream begin only after the mark."""

    def copy(self, target: int, source: int, size_bytes: int, stream: int, brief: bool) -> int:
        """Issue one copy. Blocks for its duration unless the host memory is registered.

        ``brief`` says that the call does not block: it keeps the interpreter's lock then.
        """

    def copy_batch(self, targets: I64, sources: I64, sizes: I64, stream: int) -> int:
        """Issue copies in one call, each shape (n,); they run in any order. The arrays may be
        reused after the call. All host memory is registered.
        """

    def batch_problem(self) -> str:
        """Return the reason why ``copy_batch`` cannot be used, or empty."""

    def move(self, table: I64, stream: int, index: int) -> None:
        """Launch a kernel that moves the rows of ``table``, shape (n, 3): source, target, bytes.

        All host memory is registered.

        Raises:
            RuntimeError: the launch failed.
        """

    def kernel_problem(self) -> str:
        """Return the reason why ``move`` and ``recode`` cannot be used, or empty."""

    def recode(self, kind: CopyKind, recoding: Recoding, stream: int, index: int) -> None:
        """Launch a kernel that encodes pages (``STORE``) or decodes blocks into them (``LOAD``).

        Raises:
            RuntimeError: the launch failed.
        """

    def memory(self, index: int, size_bytes: int) -> DeviceMemory:
        """Return memory of the GPU, which its owner frees.

        Raises:
            RuntimeError: there is no memory.
        """

    def scratch(self, index: int, size_bytes: int) -> Scratch:
        """Return memory to measure with.

        Raises:
            RuntimeError: there is no memory.
        """

    def identity(self, index: int) -> str:
        """Return a name of the GPU's model and the driver's version."""

    def numa_node(self, index: int) -> int:
        """Return the NUMA node that the GPU is attached to, -1 if it is unknown."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class _PointerAttributes(ctypes.Structure):
    """``cudaPointerAttributes`` of CUDA 13, which is that of CUDA 12 and a reserved tail."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_address", ctypes.c_void_p),
        ("host_address", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    )


class BatchCall:
    """The driver's batched copy.

    Args:
        address: address of the entry point.
        failed_index: whether this version takes a pointer for the index of the failed copy.
    """

    def __init__(self, address: int, failed_index: bool) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        arguments = [pointer, pointer, pointer, size, pointer, pointer, size]
        arguments += [pointer] if failed_index else []
        # The interpreter's lock is released: a call of thousands of copies takes milliseconds.
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, *arguments, pointer)(address)
        self._failed = (ctypes.byref(ctypes.c_size_t()),) if failed_index else ()
        self._attributes = _CopyAttributes(order=_STREAM_ORDER, flags=_OVERLAP)
        self._first = ctypes.c_size_t(0)

    def __call__(self, targets: I64, sources: I64, sizes: I64, stream: int) -> int:
        """Issue the copies; see ``CudaRuntime.copy_batch``."""
        return int(
            self._call(
                targets.ctypes.data,
                sources.ctypes.data,
                sizes.ctypes.data,
                len(sizes),
                # One set of attributes, from the first copy on.
                ctypes.byref(self._attributes),
                ctypes.byref(self._first),
                1,
                *self._failed,
                stream,
            )
        )


def find_batch_call(driver: Any) -> BatchCall | str:
    """Return the newest batched copy that a driver library offers, or the reason for none."""
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return "the driver does not tell its version"
    for wanted, failed_index in _BATCH_VERSIONS:
        if version.value < wanted:
            continue
        found, status = ctypes.c_void_p(), ctypes.c_int()
        code = driver.cuGetProcAddress_v2(
            _BATCH_SYMBOL,
            ctypes.byref(found),
            ctypes.c_int(wanted),
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        if not code and found.value:
            return BatchCall(found.value, failed_index)
    return f"a driver for CUDA {version.value // 1000}.{version.value % 1000 // 10} has none"


class Cudart:
    """``CudaRuntime`` implemented with the libraries of torch and of the driver.

    Raises:
        KVHearthError: ``copy_failed`` if torch has no CUDA or its runtime cannot be found.
    """

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        version = self._torch.version.cuda
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
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        for library in (self._slow, self._quick):
            library.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
        self._slow.cudaHostRegister.argtypes = [pointer, size, ctypes.c_uint]
        self._slow.cudaHostUnregister.argtypes = [pointer]
        self._quick.cudaPointerGetAttributes.argtypes = [pointer, pointer]
        self._quick.cudaEventRecord.argtypes = [pointer, pointer]
        self._quick.cudaEventQuery.argtypes = [pointer]
        self._quick.cudaStreamWaitEvent.argtypes = [pointer, pointer, ctypes.c_uint]
        try:
            self._batch: BatchCall | str = find_batch_call(ctypes.CDLL(_DRIVER))
        except (OSError, AttributeError) as error:
            self._batch = str(error)

    def set_device(self, index: int) -> int:
        return int(self._slow.cudaSetDevice(index))

    def exchange_capture_mode(self, mode: int) -> tuple[int, int]:
        value = ctypes.c_int(mode)
        code = int(self._quick.cudaThreadExchangeStreamCaptureMode(ctypes.byref(value)))
        return code, value.value

    def last_error(self) -> int:
        return int(self._quick.cudaGetLastError())

    def host_register(self, address: int, size_bytes: int) -> int:
        return int(self._slow.cudaHostRegister(address, size_bytes, _REGISTER_FLAGS))

    def host_unregister(self, address: int) -> int:
        return int(self._slow.cudaHostUnregister(address))

    def is_registered(self, address: int) -> bool:
        found = _PointerAttributes()
        if self._quick.cudaPointerGetAttributes(ctypes.byref(found), address):
            self.last_error()
            return False
        return bool(found.type == _MEMORY_HOST and found.device_address == address)

    def stream_priorities(self) -> tuple[int, int, int]:
        lowest, highest = ctypes.c_int(), ctypes.c_int()
        read = self._slow.cudaDeviceGetStreamPriorityRange
        code = int(read(ctypes.byref(lowest), ctypes.byref(highest)))
        return code, lowest.value, highest.value

    def create_stream(self, priority: int) -> tuple[int, int]:
        stream = ctypes.c_void_p()
        create = self._slow.cudaStreamCreateWithPriority
        code = int(create(ctypes.byref(stream), _NON_BLOCKING, priority))
        return code, stream.value or 0

    def create_event(self) -> tuple[int, int]:
        event = ctypes.c_void_p()
        create = self._quick.cudaEventCreateWithFlags
        return int(create(ctypes.byref(event), _DISABLE_TIMING)), event.value or 0

    def record(self, event: int, stream: int) -> int:
        return int(self._quick.cudaEventRecord(event, stream))

    def query(self, event: int) -> int:
        return int(self._quick.cudaEventQuery(event))

    def mark(self, index: int) -> object:
        # By torch, which creates the event on the stream's GPU without a context on another one.
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(index))
        return event

    def wait(self, stream: int, mark: object) -> int:
        event: Any = mark
        return int(self._quick.cudaStreamWaitEvent(stream, event.cuda_event, 0))

    def copy(self, target: int, source: int, size_bytes: int, stream: int, brief: bool) -> int:
        library = self._quick if brief else self._slow
        return int(library.cudaMemcpyAsync(target, source, size_bytes, _COPY_DEFAULT, stream))

    def copy_batch(self, targets: I64, sources: I64, sizes: I64, stream: int) -> int:
        assert not isinstance(self._batch, str), self._batch
        return self._batch(targets, sources, sizes, stream)

    def batch_problem(self) -> str:
        return self._batch if isinstance(self._batch, str) else ""

    def move(self, table: I64, stream: int, index: int) -> None:
        kernels = importlib.import_module("kvhearth.copiers.kernels")
        own = self._torch.cuda.ExternalStream(stream, device=index)
        # Allocated on the stream that uses it: memory freed on another one may still be in use.
        with self._torch.cuda.stream(own):
            pinned = self._torch.from_numpy(table).pin_memory()
            kernels.move(pinned.to(f"cuda:{index}", non_blocking=True), own)

    def kernel_problem(self) -> str:
        try:
            kernels = importlib.import_module("kvhearth.copiers.kernels")
        except ImportError as error:
            return str(error)
        return str(kernels.available() or "")

    def recode(self, kind: CopyKind, recoding: Recoding, stream: int, index: int) -> None:
        kernels = importlib.import_module("kvhearth.copiers.kernels")
        own = self._torch.cuda.ExternalStream(stream, device=index)
        with self._torch.cuda.stream(own):
            fragments, blocks = (
                self._torch.from_numpy(table).pin_memory().to(f"cuda:{index}", non_blocking=True)
                for table in (recoding.fragments, recoding.blocks)
            )
            if kind is CopyKind.STORE:
                kernels.encode(fragments, recoding.run_bytes, blocks, recoding.encoding, own)
            else:
                kernels.decode(blocks, fragments, recoding.run_bytes, recoding.encoding, own)

    def memory(self, index: int, size_bytes: int) -> DeviceMemory:
        kind = self._torch.uint8
        made = self._torch.empty(size_bytes, dtype=kind, device=f"cuda:{index}")
        return DeviceMemory(int(made.data_ptr()), made)

    def scratch(self, index: int, size_bytes: int) -> Scratch:
        kind = self._torch.uint8
        host = self._torch.empty(size_bytes, dtype=kind, pin_memory=True)
        on_device = self._torch.empty(size_bytes, dtype=kind, device=f"cuda:{index}")
        return Scratch(host.numpy(), int(on_device.data_ptr()), (host, on_device))

    def identity(self, index: int) -> str:
        version = ctypes.c_int()
        self._slow.cudaDriverGetVersion(ctypes.byref(version))
        text = f"{self._torch.cuda.get_device_name(index)}, CUDA {version.value}"
        with contextlib.suppress(OSError):
            text += f", driver {_DRIVER_VERSION.read_text(encoding='utf-8').strip()}"
        return text

    def numa_node(self, index: int) -> int:
        text = ctypes.create_string_buffer(_BUS_ID_BYTES)
        if self._slow.cudaDeviceGetPCIBusId(text, _BUS_ID_BYTES, index):
            self.last_error()
            return -1
        return numa_node_of(text.value.decode())


def numa_node_of(bus_id: str, devices: Path = _PCI_DEVICES) -> int:
    """Return the NUMA node of a PCI device such as ``0000:3B:00.0``, -1 if it is unknown."""
    try:
        return max(int((devices / bus_id.lower() / "numa_node").read_text(encoding="utf-8")), -1)
    except (OSError, ValueError):
        return -1


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


def table_of(targets: I64, sources: I64, sizes: I64) -> I64:
    """Return descriptors as rows of source, target and bytes, shape (n, 3)."""
    return np.stack((sources, targets, sizes), axis=1)
