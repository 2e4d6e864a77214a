"""Copiers of the currently mapped arena: made at the first copy, dropped when its session ends.

The arena for pages on a GPU is registered with CUDA from the attach on.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvhearth.client import KVClient
from kvhearth.codec import Encoding
from kvhearth.copiers.base import VERIFY_FRACTION, ArenaView, Copier
from kvhearth.copiers.device import CopyDevice, Registrations, index_of
from kvhearth.copiers.host import HostCopier
from kvhearth.copiers.measure import measured_device
from kvhearth.copiers.methods import AUTO
from kvhearth.copiers.remote import RemoteCopier
from kvhearth.counters import Warnings
from kvhearth.errors import KVHearthError, Reason
from kvhearth.page_layout import PagedKV
from kvhearth.session.link import Arena
from kvhearth.session.remote_arena import RemoteArena

CopierFactory = Callable[..., Copier]
"""Makes a copier of pages into an arena: ``make(kv, arena)``, or ``make(kv, arena,
encoding=encoding)`` for blocks that a codec encodes.
"""
_DROP_S = 1.0
_of_process = Registrations()


class CopyOrder(Protocol):
    """Orders our work after the engine's work at its submission."""

    def mark(self) -> object:
        """Mark the current position in the calling thread's current stream.

        Raises:
            RuntimeError: the CUDA context is broken.
        """

    def after(self, mark: object) -> AbstractContextManager[None]:
        """Make work on the current stream within this context wait for the work before ``mark``.

        Copies wait for a mark themselves (``Copier.store``).
        """


class HostOrder:
    """``CopyOrder`` for CPU memory: bytes written before a submission are already visible."""

    def mark(self) -> object:
        return None

    def after(self, mark: object) -> AbstractContextManager[None]:
        return nullcontext()


class CudaOrder:
    """``CopyOrder`` by an event recorded at submission.

    Work that gathers or scatters blocks on the GPU runs on a stream of our own which waits for the
    event, so that the engine's later work delays nothing.

    Args:
        device: such as ``"cuda:0"``.
    """

    def __init__(self, device: str) -> None:
        self._cuda: Any = importlib.import_module("torch").cuda
        self._device = device
        self._stream = self._cuda.Stream(device=device)

    def mark(self) -> object:
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    @contextmanager
    def after(self, mark: object) -> Iterator[None]:
        # Entered first, because it selects the stream's GPU for this thread.
        with self._cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield


def default_copier(
    *,
    sums: bool = True,
    verify_fraction: float = VERIFY_FRACTION,
    method: str = AUTO,
    device: CopyDevice | None = None,
) -> CopierFactory:
    """Return a factory of the copier that fits the tensors and the arena.

    Into an arena on another host, the copier below moves blocks between the tensors and staging
    memory.

    Args:
        sums: passed to ``HostCopier`` and ``RemoteCopier``.
        method: passed to ``CudaCopier``.
        verify_fraction: passed to ``CudaCopier``; the host copier compares every block that it
            loads.
        device: passed to ``CudaCopier``, which is then made for any tensors.
    """

    def make_local(kv: PagedKV, arena: ArenaView, encoding: Encoding | None = None) -> Copier:
        if device is None and kv.device == "cpu":
            return HostCopier(kv, arena, sums=sums, encoding=encoding)
        from kvhearth.copiers.cuda import CudaCopier

        return CudaCopier(
            kv,
            arena,
            device=device,
            method=method,
            encoding=encoding,
            verify_fraction=verify_fraction,
        )

    def make(kv: PagedKV, arena: Arena, encoding: Encoding | None = None) -> Copier:
        if not isinstance(arena, RemoteArena):
            return make_local(kv, arena, encoding)
        if encoding is None and device is None and kv.device == "cpu":
            return RemoteCopier(kv, arena, sums=sums)
        return RemoteCopier(
            kv,
            arena,
            lambda staging: make_local(kv, staging, encoding),
            stored_bytes=0 if encoding is None else encoding.stored_bytes,
            sums=sums,
        )

    return make


@dataclass(eq=False)
class _Mapped:
    """One arena and its copiers, by the pages that they copy."""

    arena: Arena
    copiers: dict[PagedKV, Copier] = field(default_factory=dict)


class CopierPool:
    """One copier for each KV cache group of this rank, for the currently mapped arena.

    It registers ``drain`` with the client: before a lost session is closed, all copies have ended
    and nothing here holds its memory any more. ``copier`` never waits for that. Thread-safe.

    Args:
        client: the process's client.
        kv: by KV group, the registered pages, all on one device.
        make: makes a copier.
        device: the device where ``kv`` is empty, for pages that are given to ``copier_of``.
        registrations: registers arenas with CUDA; None for the process's own, for pages on a GPU.

    Raises:
        KVHearthError: ``bad_contract`` if the pages are not those of the client's contract.
    """

    def __init__(
        self,
        client: KVClient,
        kv: Mapping[int, PagedKV],
        make: CopierFactory | None = None,
        *,
        device: str = "",
        registrations: Registrations | None = None,
    ) -> None:
        devices = {pages.device for pages in kv.values()} or {device} - {""}
        if len(devices) != 1:
            raise KVHearthError(
                Reason.BAD_CONTRACT, f"pages on {sorted(devices)}: register those of one device"
            )
        _check_pages(client, kv)
        self.device = devices.pop()
        on_gpu = self.device != "cpu"
        self.order: CopyOrder = CudaOrder(self.device) if on_gpu else HostOrder()
        self._registrations = registrations or (_of_process if on_gpu else None)
        self._client = client
        self._kv = dict(kv)
        self._encodings = {pages: client.contract.encoding(group) for group, pages in kv.items()}
        self._make = make or default_copier()
        # Held while a copier is made, but never while copies or CUDA's registration end.
        self._lock = threading.Lock()
        self._mapped: _Mapped | None = None
        self._leaving: _Mapped | None = None
        self._closed = False
        self._warnings = Warnings()
        if on_gpu:
            # Begun before the first copies, which would share the bus with it.
            with suppress(KVHearthError):
                measured_device(index_of(self.device))
        client.add_quiesce_hook(self.drain)
        client.add_attached(self._attached)

    def copier(self, kv_group: int, boot_id: str) -> Copier | None:
        """Return the copier into the mapped arena of that boot.

        None if that arena is not mapped (any more), or if no copier can be made.
        """
        return self.copier_of(self._kv[kv_group], boot_id)

    def copier_of(self, kv: PagedKV, boot_id: str) -> Copier | None:
        """Return the copier of any pages on this device, of the contract's size; like ``copier``.

        It is kept until ``drop`` or the end of its session.
        """
        try:
            return self._copier(kv, boot_id)
        except Exception as error:  # noqa: BLE001 - fail-open boundary: a GPU without memory, say
            # Retried with each batch, but logged once and not each time.
            self._warnings.warn(
                "copier.missing", "no copier for pages", device=kv.device, error=repr(error)
            )
            return None

    def drop(self, kv: PagedKV) -> None:
        """End the copier of pages whose copies have ended, and release them."""
        with self._lock:
            copiers = {} if self._mapped is None else self._mapped.copiers
            copier = copiers.get(kv)
        # Closed first, while a drain still finds it.
        if copier is not None and copier.close(_DROP_S):
            with self._lock:
                copiers.pop(kv, None)

    def _copier(self, kv: PagedKV, boot_id: str) -> Copier | None:
        with self._lock:
            # Read with the lock held. The link is lost before its drain begins, so a copier of its
            # arena is either made before that drain takes the lock, or not at all.
            arena = self._client.arena
            if arena is None or arena.boot_id != boot_id:
                return None
            mapped = self._take(arena)
            if mapped is None:
                return None
            copier = mapped.copiers.get(kv)
            if copier is None:
                # Pages that no group registered are of a contract with one group.
                encoding = self._encodings.get(kv, self._client.contract.encoding(0))
                options = {} if encoding is None else {"encoding": encoding}
                copier = mapped.copiers[kv] = self._make(kv, arena, **options)
            return copier

    def drain(self, deadline_s: float) -> bool:
        """End the copiers and release the arena; False if that takes longer: call again.

        The next ``copier`` makes new ones, for the arena that is mapped then.
        """
        return self._drain(deadline_s, close=False)

    def close(self, deadline_s: float) -> bool:
        """Drain, and make no more copiers."""
        return self._drain(deadline_s, close=True)

    def _attached(self) -> None:
        """Prepare the arena of a session that has begun, on the client's thread."""
        with self._lock:
            arena = self._client.arena
            if arena is not None:
                self._take(arena)

    def _take(self, arena: Arena) -> _Mapped | None:
        """Return the state of the mapped arena; None while another one is being left.

        The caller holds the lock.
        """
        if self._closed or self._leaving is not None:
            return None
        if self._mapped is None:
            self._mapped = _Mapped(arena)
            if self._registrations is not None:
                self._registrations.acquire(
                    _memory(arena), self, index_of(self.device), self._registration_failed
                )
        return self._mapped if self._mapped.arena is arena else None

    def _registration_failed(self) -> None:
        self._client.count("registration_failed")

    def _drain(self, deadline_s: float, *, close: bool) -> bool:
        until = self._client.clock.now() + deadline_s
        if not self._lock.acquire(timeout=max(deadline_s, 0.0)):
            return False
        try:
            self._closed |= close
            if self._leaving is None:
                self._leaving, self._mapped = self._mapped, None
            leaving = self._leaving
        finally:
            self._lock.release()
        if leaving is None:
            return True
        if not self._end(leaving, until):
            return False
        with self._lock:
            if self._leaving is leaving:
                self._leaving = None
        return True

    def _end(self, leaving: _Mapped, until: float) -> bool:
        """Wait for copies to end, then unregister the arena from CUDA; no lock is held."""
        for copier in list(leaving.copiers.values()):
            if not copier.close(max(until - self._client.clock.now(), 0.0)):
                return False
        if self._registrations is None:
            return True
        left_s = max(until - self._client.clock.now(), 0.0)
        return self._registrations.release(_memory(leaving.arena), self, left_s)


def _memory(arena: Arena) -> ArenaView:
    """Return the memory of this host that copies of a GPU use."""
    return arena.staging if isinstance(arena, RemoteArena) else arena


def _check_pages(client: KVClient, kv: Mapping[int, PagedKV]) -> None:
    groups = client.contract.groups
    for kv_group, pages in kv.items():
        if not 0 <= kv_group < len(groups):
            raise KVHearthError(
                Reason.BAD_CONTRACT, f"group {kv_group} is not one of the contract's {len(groups)}"
            )
        if pages.page_bytes != groups[kv_group].engine_bytes:
            raise KVHearthError(
                Reason.BAD_CONTRACT,
                f"group {kv_group}: pages of {pages.page_bytes} bytes, the contract says "
                f"{groups[kv_group].engine_bytes}",
            )


def check_single_rank(client: KVClient) -> None:
    """Refuse an engine of several ranks.

    Raises:
        KVHearthError: ``bad_contract``.
    """
    contract = client.contract
    if contract.world_size != 1 or any(spec.shards != 1 for spec in contract.groups):
        raise KVHearthError(
            Reason.BAD_CONTRACT,
            f"{contract.world_size} ranks: a cache serves an engine of one process, use Stock "
            "in its scheduler and CopierPool at its ranks",
        )
