"""Registration of the arena with CUDA, in pieces and in the background.

Only registered (page-locked) memory is copied asynchronously and at the bus's speed. Registering
takes seconds per 100 GiB, so it happens beside the engine's start; until it is done copies work,
but hold up their caller.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from kvhearth.copiers.base import ArenaView
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8

_LOG = logging.getLogger(__name__)

PIECE_BYTES_MAX = 64 << 30
"""Larger single registrations fail on some drivers. Slabs divide it: no block crosses a bound."""
PAGE_BYTES = 4096
_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context of the process."""


class HostRegistrar(Protocol):
    """The door to the CUDA runtime's registration. Codes are ``cudaError_t``, 0 is success."""

    def register(self, address: int, size_bytes: int) -> int:
        """Page-lock ``size_bytes`` from ``address``; both are multiples of the page size."""

    def unregister(self, address: int) -> int:
        """Undo ``register`` of the piece that began at ``address``."""

    def last_error(self) -> int:
        """Read *and clear* the calling thread's last error.

        One that is left behind is reported by the engine's next kernel launch, as if it were its
        own.
        """


class CudartRegistrar:
    """``HostRegistrar`` by the CUDA runtime that torch has loaded.

    By ctypes, because torch's own binding has no ``cudaGetLastError``.

    Args:
        device_index: of the GPU that this process uses. Each thread starts on device 0, where a
            first call would create a context that costs hundreds of megabytes.

    Raises:
        KVHearthError: ``copy_failed`` if torch has no CUDA or its runtime cannot be found.
    """

    def __init__(self, device_index: int) -> None:
        torch: Any = importlib.import_module("torch")
        version = torch.version.cuda
        if version is None:
            raise KVHearthError(
                Reason.COPY_FAILED, "this torch has no CUDA: install a build that has"
            )
        name = f"libcudart.so.{version.split('.')[0]}"
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise KVHearthError(Reason.COPY_FAILED, f"cannot load {name}: {error}") from None
        self._library.cudaHostRegister.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_uint,
        ]
        self._library.cudaHostUnregister.argtypes = [ctypes.c_void_p]
        self._device_index = device_index

    def register(self, address: int, size_bytes: int) -> int:
        """See ``HostRegistrar.register``."""
        code = int(self._library.cudaSetDevice(self._device_index))
        if code:
            return code
        return int(self._library.cudaHostRegister(address, size_bytes, _REGISTER_PORTABLE))

    def unregister(self, address: int) -> int:
        """See ``HostRegistrar.unregister``."""
        return int(self._library.cudaHostUnregister(address))

    def last_error(self) -> int:
        """See ``HostRegistrar.last_error``."""
        return int(self._library.cudaGetLastError())


class ArenaRegistration:
    """Registers all segments of an arena from its construction on, all or nothing.

    Holds the arena's memory until ``close`` has returned True; close it after the copiers that use
    the arena.

    Args:
        arena: whose segments to register.
        registrar: the door to CUDA.
        piece_bytes: of one registration at most, a multiple of the page size.

    Raises:
        KVHearthError: ``config_invalid`` for a bad ``piece_bytes``.
    """

    def __init__(
        self, arena: ArenaView, registrar: HostRegistrar, *, piece_bytes: int = PIECE_BYTES_MAX
    ) -> None:
        if piece_bytes <= 0 or piece_bytes % PAGE_BYTES or piece_bytes > PIECE_BYTES_MAX:
            raise KVHearthError(
                Reason.CONFIG_INVALID,
                f"pieces of {piece_bytes} bytes: choose a multiple of {PAGE_BYTES} "
                f"up to {PIECE_BYTES_MAX}",
            )
        self._registrar = registrar
        # Views, too: the memory must not be unmapped while CUDA has it.
        self._views = [arena.view(segment) for segment in sorted(arena.segments)]
        self._pieces = list(_pieces(self._views, piece_bytes))
        self._registered: list[int] = []
        self._ready = False
        self._error = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="kvhearth-register", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether the whole arena is registered."""
        return self._ready

    @property
    def error(self) -> str:
        """Why it is not and will not be, or empty."""
        return self._error

    def wait(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` seconds until registration has ended; whether it is ready."""
        self._thread.join(max(deadline_s, 0.0))
        return self._ready

    def close(self, deadline_s: float = 30.0) -> bool:
        """Unregister everything, after the piece that is under way.

        Returns:
            False if that piece took longer than ``deadline_s`` seconds: the arena must stay mapped.
        """
        self._stop.set()
        self._thread.join(max(deadline_s, 0.0))
        if self._thread.is_alive():
            return False
        self._ready = False
        self._unregister()
        self._views.clear()
        return True

    def _main(self) -> None:
        started = time.monotonic()
        try:
            self._error = self._register()
        except (OSError, RuntimeError, KVHearthError) as error:
            self._error = f"registration failed: {error!r}"
        if self._error:
            _LOG.warning("the arena stays unregistered, copies will be slow: %s", self._error)
            self._unregister()
            return
        self._ready = not self._stop.is_set()
        _LOG.info("registered %d pieces in %.1f s", len(self._pieces), time.monotonic() - started)

    def _register(self) -> str:
        """Register piece by piece; the error, or empty."""
        for address, size_bytes in self._pieces:
            if self._stop.is_set():
                return ""
            code = self._registrar.register(address, size_bytes)
            if code:
                self._registrar.last_error()
                return (
                    f"cudaHostRegister of {size_bytes} bytes at {address:#x} (piece "
                    f"{len(self._registered) + 1} of {len(self._pieces)}) returned {code}: check "
                    "the container's memory limit and the driver"
                )
            self._registered.append(address)
        return ""

    def _unregister(self) -> None:
        while self._registered:
            address = self._registered.pop()
            code = self._registrar.unregister(address)
            if code:
                self._registrar.last_error()
                _LOG.warning("cudaHostUnregister of %#x returned %d", address, code)


def _pieces(views: list[U8], piece_bytes: int) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the pieces of all segments."""
    for view in views:
        for offset in range(0, view.nbytes, piece_bytes):
            yield int(view.ctypes.data) + offset, min(piece_bytes, view.nbytes - offset)
