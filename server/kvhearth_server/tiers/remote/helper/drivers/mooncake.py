"""Pools of Mooncake Store, by its client: bytes go straight from and to the staging memory."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from mooncake.store import MooncakeDistributedStore

from kvhearth.native.blocks import address_of
from kvhearth_server.tiers.base import Corrupt, Done, Failed, Failure, Missing, Outcome
from kvhearth_server.tiers.remote.helper.drivers.base import (
    UNREACHABLE,
    Driver,
    Listed,
    Refused,
    told,
)
from kvhearth_server.tiers.remote.url import RemoteUrl

_RDMA_DEVICES = Path("/sys/class/infiniband")
_BUFFER_BYTES = 16 << 20
_RPC_MS = 2000
"""Bound of the library's own for calls of the master; that of transfers (60 s) is fixed."""
_AGAIN_S = 1.0
_ASKING = 2
"""Threads that ask and remove."""
_OUTCOMES: dict[int, Outcome] = {
    -200: Failed(Failure.NO_SPACE),
    -600: Corrupt("remote"),
    -704: Missing(),
    -705: Done(),
}
_T = TypeVar("_T")


class MooncakeDriver(Driver):
    """Values of Mooncake Store. Nothing here keeps a deadline: the daemon ends the process."""

    value_bytes_max = 1 << 30
    parallel = 4
    portion_bytes = 16 << 20
    portion_max = 32

    def __init__(self, url: RemoteUrl) -> None:
        if url.protocol == "rdma" and not any(_RDMA_DEVICES.glob("*")):
            raise Refused(
                f"{url.place}: this host has no RDMA device ({_RDMA_DEVICES} is empty); use "
                "protocol=tcp, or load the device's driver and pass it to the container"
            )
        super().__init__(url)
        self._pool = ThreadPoolExecutor(_ASKING, "kvhearth-mooncake")
        self._lock = threading.Lock()
        self._store: Any = None
        self._tried = 0.0
        self._staging = (0, 0)
        os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(_RPC_MS))

    def attach(self, staging: memoryview) -> None:
        self._staging = (_address(staging), len(staging))

    def _opened(self) -> Any:
        """Return the client, connected; None while its master cannot be reached."""
        with self._lock:
            if self._store is None and time.monotonic() - self._tried >= _AGAIN_S:
                self._tried = time.monotonic()
                ((host, port),) = self.url.hosts
                store = MooncakeDistributedStore()
                place = "127.0.0.1" if host in ("127.0.0.1", "localhost") else os.uname().nodename
                status = store.setup(
                    *(place, "P2PHANDSHAKE", 0, _BUFFER_BYTES, self.url.protocol),
                    *(self.url.device, f"{host}:{port}"),
                )
                if not status:
                    status = store.register_buffer(*self._staging)
                if not status:
                    self._store = store
            return self._store

    async def _run(self, call: Callable[[Any], _T]) -> _T | None:
        """Run a call in a thread; None without a connection."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._call, call)

    def _call(self, call: Callable[[Any], _T]) -> _T | None:
        store = self._opened()
        return None if store is None else call(store)

    def _outcome(self, status: int) -> Outcome:
        outcome = _OUTCOMES.get(status, UNREACHABLE)
        return told(outcome, OSError(f"{self.url.place} answers {status}"))

    def _staged(self, view: memoryview) -> bool:
        start, size = self._staging
        return start <= _address(view) < start + size

    def put(
        self, names: Sequence[str], values: Sequence[memoryview], deadline: float
    ) -> list[Outcome]:
        self.requests["put"] += 1
        keys = [self.prefix + name for name in names]

        def put(store: Any) -> list[int]:
            if not all(map(self._staged, values)):
                pairs = zip(keys, values, strict=True)
                return [store.put(key, bytes(value)) for key, value in pairs]
            places, sizes = list(map(_address, values)), list(map(len, values))
            return list(store.batch_put_from(keys, places, sizes))

        found = self._call(put)
        if found is None:
            return [UNREACHABLE] * len(names)
        return [Done() if status == 0 else self._outcome(status) for status in found]

    def get(
        self, names: Sequence[str], into: Sequence[memoryview], deadline: float
    ) -> list[memoryview | Outcome]:
        self.requests["get"] += 1
        keys = [self.prefix + name for name in names]

        def get(store: Any) -> list[memoryview | int]:
            if not all(map(self._staged, into)):
                found = [store.get(key) if store.is_exist(key) == 1 else None for key in keys]
                return [-704 if each is None else memoryview(each) for each in found]
            places, sizes = list(map(_address, into)), list(map(len, into))
            statuses = store.batch_get_into(keys, places, sizes)
            pairs = zip(statuses, into, strict=True)
            return [view[:status] if status > 0 else status for status, view in pairs]

        found = self._call(get)
        if found is None:
            return [UNREACHABLE] * len(names)
        return [self._outcome(each) if isinstance(each, int) else each for each in found]

    async def exists(self, names: Sequence[str], size: int, deadline: float) -> list[Outcome]:
        # Sizes are not compared: that would be a call for each.
        self.requests["head"] += 1
        keys = [self.prefix + name for name in names]
        found = await self._run(lambda store: list(store.batch_is_exist(keys)))
        if found is None:
            return [UNREACHABLE] * len(names)
        outcomes: dict[int, Outcome] = {1: Done(), 0: Missing()}
        return [outcomes.get(each) or self._outcome(each) for each in found]

    async def delete(self, names: Sequence[str], deadline: float) -> list[Outcome]:
        self.requests["delete"] += 1
        keys = [self.prefix + name for name in names]
        found = await self._run(lambda store: list(store.batch_remove(keys, True)))
        if found is None:
            return [UNREACHABLE] * len(names)
        return [Done() if each in (0, -704) else self._outcome(each) for each in found]

    def list(self, prefix: str) -> AsyncIterator[list[Listed]]:
        raise OSError(f"{self.url.place}: Mooncake does not list its objects; it evicts by itself")

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _address(view: memoryview) -> int:
    return int(address_of(np.frombuffer(view, np.uint8)))
