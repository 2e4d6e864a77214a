"""Copiers of the arena that is mapped now: made when it appears, dropped when its session ends."""

from __future__ import annotations

import importlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Integral
from typing import Any, Protocol

from kvhearth.arena import ArenaMapping
from kvhearth.client import KVClient
from kvhearth.copiers.base import VERIFY_FRACTION, ArenaView, Copier
from kvhearth.copiers.device import CopyDevice
from kvhearth.copiers.host import HostCopier
from kvhearth.copiers.register import ArenaRegistration, CudartRegistrar
from kvhearth.errors import KVHearthError, Reason
from kvhearth.layout import PagedKV
from kvhearth.meters import LOGGER, Warnings

CopierFactory = Callable[[PagedKV, ArenaView], Copier]
_DROP_S = 1.0


class CopyOrder(Protocol):
    """Puts copies, which a thread of ours issues, after the engine's work at their submission."""

    def mark(self) -> object:
        """This moment of the calling thread's current stream.

        Raises:
            RuntimeError: the CUDA context is broken.
        """

    def after(self, mark: object) -> AbstractContextManager[None]:
        """Within it, copies that are issued wait for what came before ``mark``."""


class HostOrder:
    """``CopyOrder`` of CPU memory: what was written before a submission is there."""

    def mark(self) -> object:
        """See ``CopyOrder.mark``."""
        return None

    def after(self, mark: object) -> AbstractContextManager[None]:
        """See ``CopyOrder.after``."""
        return nullcontext()


class CudaOrder:
    """``CopyOrder`` by an event at submission.

    A copier waits for the current stream of the thread that calls it. That is a stream of our own
    here, which waits for the event: the engine's later work holds nothing up.

    Args:
        device: such as ``"cuda:0"``.
    """

    def __init__(self, device: str) -> None:
        self._cuda: Any = importlib.import_module("torch").cuda
        self._device = device
        self._stream = self._cuda.Stream(device=device)

    def mark(self) -> object:
        """See ``CopyOrder.mark``."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    @contextmanager
    def after(self, mark: object) -> Iterator[None]:
        """See ``CopyOrder.after``."""
        self._stream.wait_event(mark)
        with self._cuda.stream(self._stream):
            yield


def host_or_cuda(
    *,
    sums: bool = True,
    verify_fraction: float = VERIFY_FRACTION,
    device: CopyDevice | None = None,
) -> CopierFactory:
    """Makes the copier that fits the tensors.

    Args:
        sums: ``HostCopier``'s.
        verify_fraction: ``CudaCopier``'s; the host copier compares every block that it loads.
        device: ``CudaCopier``'s, which is made for any tensors then.
    """

    def make(kv: PagedKV, arena: ArenaView) -> Copier:
        if device is None and kv.device == "cpu":
            return HostCopier(kv, arena, sums=sums)
        from kvhearth.copiers.cuda import CudaCopier

        return CudaCopier(kv, arena, device=device, verify_fraction=verify_fraction)

    return make


class Movers:
    """One copier for each KV cache group of this rank, of the arena that is mapped now.

    It registers ``drain`` with the client: before a lost session is let go, all copies have ended
    and nothing here holds its memory any more. Thread-safe.

    Args:
        client: of the process.
        kv: by KV group, the registered pages, all on one device.
        make: makes a copier.

    Raises:
        KVHearthError: ``bad_contract`` if the pages are not those of the client's contract.
    """

    def __init__(
        self, client: KVClient, kv: Mapping[int, PagedKV], make: CopierFactory | None = None
    ) -> None:
        devices = {pages.device for pages in kv.values()}
        if len(devices) != 1:
            raise KVHearthError(
                Reason.BAD_CONTRACT, f"pages on {sorted(devices)}: register those of one device"
            )
        _check_pages(client, kv)
        self.device = devices.pop()
        self.order: CopyOrder = HostOrder() if self.device == "cpu" else CudaOrder(self.device)
        self._client = client
        self._kv = dict(kv)
        self._make = make or host_or_cuda()
        self._lock = threading.Lock()
        self._arena: ArenaMapping | None = None
        self._copiers: dict[int, Copier] = {}
        self._closed = False
        self._warnings = Warnings()
        client.add_drain(self.drain)

    def copier(self, kv_group: int, boot_id: str) -> Copier | None:
        """The copier into the mapped arena of that boot; None if that is not mapped (any more), or
        no copier can be made.
        """
        try:
            return self._copier(kv_group, boot_id)
        except Exception as error:  # noqa: BLE001 - fail-open boundary: a GPU without memory, say
            # Asked for anew with each batch: said once, not each time.
            self._warnings.warn(f"copier:{kv_group}", "no copier for group %d: %r", kv_group, error)
            return None

    def _copier(self, kv_group: int, boot_id: str) -> Copier | None:
        with self._lock:
            arena = self._client.arena
            if arena is None or arena.boot_id != boot_id or self._closed:
                return None
            if arena is not self._arena and not self._take(arena):
                return None
            copier = self._copiers.get(kv_group)
            if copier is None:
                copier = self._make(self._kv[kv_group], arena)
                self._copiers[kv_group] = copier
            # A drain that came before the lock was taken would not have seen it.
            if self._client.arena is not arena:
                self._drop(_DROP_S)
                return None
            return copier

    def key_problem(self, kv_group: object, keys: Sequence[bytes]) -> str:
        """Why these cannot be keys of blocks that are moved here, or empty."""
        if not isinstance(kv_group, Integral) or kv_group not in self._kv:
            return str(Reason.BAD_GROUP)
        size = self._client.contract.hash_bytes
        if not all(isinstance(key, bytes) and len(key) == size for key in keys):
            return str(Reason.BAD_KEYS)
        return ""

    def drain(self, deadline_s: float) -> bool:
        """End the copiers and let go of the arena; False if copies are still under way then.

        The next ``copier`` makes new ones, for the arena that is mapped then.
        """
        with self._lock:
            return self._drop(deadline_s)

    def close(self, deadline_s: float) -> bool:
        """``drain``, and make no more copiers."""
        with self._lock:
            self._closed = True
            return self._drop(deadline_s)

    def _take(self, arena: ArenaMapping) -> bool:
        if not self._drop(_DROP_S):
            return False
        self._arena = arena
        if self.device != "cpu":
            _registrations.acquire(arena, self.device)
        return True

    def _drop(self, deadline_s: float) -> bool:
        until = time.monotonic() + deadline_s
        for copier in self._copiers.values():
            if not copier.close(max(until - time.monotonic(), 0.0)):
                return False
        self._copiers.clear()
        registered = self._arena if self.device != "cpu" else None
        left_s = max(until - time.monotonic(), 0.0)
        if registered is not None and not _registrations.release(registered, left_s):
            return False
        self._arena = None
        return True


class _Registrations:
    """Registers each arena with CUDA once, however many movers of this process use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: weakref.WeakKeyDictionary[ArenaMapping, int] = weakref.WeakKeyDictionary()
        self._made: weakref.WeakKeyDictionary[ArenaMapping, ArenaRegistration] = (
            weakref.WeakKeyDictionary()
        )

    def acquire(self, arena: ArenaMapping, device: str) -> None:
        """Register, in the background; copies work without, only slower."""
        with self._lock:
            self._users[arena] = self._users.get(arena, 0) + 1
            if arena in self._made:
                return
            try:
                registrar = CudartRegistrar(int(device.partition(":")[2] or 0))
                self._made[arena] = ArenaRegistration(arena, registrar)
            except KVHearthError as error:
                LOGGER.warning("the arena stays unregistered, copies will be slow: %s", error)

    def release(self, arena: ArenaMapping, deadline_s: float) -> bool:
        """Undo one ``acquire``; False if the last one's registration did not end in time: again."""
        with self._lock:
            users = self._users.get(arena, 0)
            made = self._made.get(arena)
            if users <= 1 and made is not None and not made.close(deadline_s):
                return False
            if users <= 1:
                self._users.pop(arena, None)
                self._made.pop(arena, None)
            else:
                self._users[arena] = users - 1
            return True


_registrations = _Registrations()


def _check_pages(client: KVClient, kv: Mapping[int, PagedKV]) -> None:
    groups = client.contract.groups
    for kv_group, pages in kv.items():
        if not 0 <= kv_group < len(groups):
            raise KVHearthError(
                Reason.BAD_CONTRACT, f"group {kv_group} is not one of the contract's {len(groups)}"
            )
        if pages.page_bytes != groups[kv_group].page_bytes:
            raise KVHearthError(
                Reason.BAD_CONTRACT,
                f"group {kv_group}: pages of {pages.page_bytes} bytes, the contract says "
                f"{groups[kv_group].page_bytes}",
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
            f"{contract.world_size} ranks: a pipeline serves an engine of one process, use Stock "
            "in its scheduler and Movers at its ranks",
        )
