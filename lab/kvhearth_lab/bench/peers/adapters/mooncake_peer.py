"""Adapter of Mooncake Store in shared-memory mode, and over TCP.

It starts a master, a store process with the memory ("real client"), and a client ("dummy") whose
pages lie in memory that it shares with the store process. For the part ``wire`` the client is a
process of its own without memory for the store, as one on another host. Huge pages
(``MC_STORE_USE_HUGEPAGE``) are on where enough are free: they are off by default, and they are
Mooncake's best case.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth_lab.bench.peers.adapters.harness import (
    CONNECTIONS,
    U8,
    Child,
    Config,
    fill,
    free_port,
    huge_or_not,
    order,
)

_PACKAGE = "mooncake-transfer-engine-non-cuda"
_LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")
_LOCAL_BUFFER_BYTES = 16 << 20
_SPARE_BYTES = 64 << 20
_FILL_KEYS = 1024


class _Client:
    """One shared-memory client and its pages."""

    def __init__(self, address: str, page_bytes: int, count: int, areas: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        size = page_bytes * count
        pool_bytes = areas * size + _SPARE_BYTES
        status = self.store.setup_dummy(pool_bytes, _LOCAL_BUFFER_BYTES, address)
        if status:
            raise RuntimeError(f"setup_dummy answers {status}")
        self.areas: list[U8] = []
        self.places: list[int] = []
        for _ in range(areas):
            place = self.store.alloc_from_mem_pool(size)
            if not place or self.store.register_buffer(place, size):
                raise RuntimeError("its memory pool has no room for the pages")
            raw = (ctypes.c_ubyte * size).from_address(place)
            self.areas.append(np.frombuffer(memoryview(raw), np.uint8).reshape(count, page_bytes))
            self.places.append(place)


class _FarClient:
    """One client that reaches the store process over TCP, with its pages registered."""

    def __init__(self, master: str, areas: Sequence[U8]) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        status = self.store.setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, _LOCAL_BUFFER_BYTES, "tcp", "", master
        )
        if status:
            raise RuntimeError(f"setup answers {status}")
        self.areas = areas
        self.places = [int(area.ctypes.data) for area in areas]
        for area, place in zip(areas, self.places, strict=True):
            if self.store.register_buffer(place, area.nbytes):
                raise RuntimeError("the pages cannot be registered")


class Peer:
    """See ``harness.Peer``."""

    source: U8
    target: U8
    pages: Sequence[int] = ()

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._client: _Client | _FarClient | None = None
        self._threads = ThreadPoolExecutor(max(CONNECTIONS))
        self._config: Config | None = None
        self._address = self._master = ""
        self._kept: list[str] = []
        self._keys: list[str] = []

    def start(self, config: Config) -> Mapping[str, Any]:
        self._config = config
        pages = "2MiB" if config.hugepages else "4KiB"
        kind = "shared-memory client"
        if config.hugepages:
            os.environ["MC_STORE_USE_HUGEPAGE"] = "1"
        self._preload()
        self._start_daemons(config)
        if config.part == "copies":
            client = self._client = _Client(self._address, config.page_bytes, config.batch, 2)
            self.source, self.target = client.areas
            self.pages = order(config.batch)
            fill(self.source)
            self.target[:] = 0
        elif config.part == "wire":
            kind = "a client over TCP"
            self.source, pages = huge_or_not(config.batch, config.page_bytes, config.hugepages)
            self.target, _ = huge_or_not(config.batch, config.page_bytes, config.hugepages)
            fill(self.source)
            self.target[:] = 0
            self.pages = range(config.batch)
            self._client = _FarClient(self._master, [self.source, self.target])
        else:
            self._fill_small(config)
        return {
            "versions": {
                "mooncake": importlib.metadata.version(_PACKAGE),
                "numpy": np.__version__,
                "python": sys.version.split()[0],
            },
            "settings": f"master, store process and {kind}; protocol tcp, "
            "metadata P2PHANDSHAKE; memory of pages and store registered at the start",
            "pages": pages,
            "leftovers": [],
            "pids": [child.pid for child in self._children],
        }

    def measures(self) -> Mapping[str, Callable[[int], float]]:
        part = "" if self._config is None else self._config.part
        if part == "wire":
            made: dict[str, Callable[[int], float]] = {}
            for count in CONNECTIONS:
                made[f"store_{count}"] = partial(self._spread, count, True)
                made[f"load_{count}"] = partial(self._spread, count, False)
            return {**made, "store_one": self._store_one, "load_one": self._load_one}
        if part != "copies":
            return {}
        return {
            "store": self._store,
            "load": self._load,
            "store_one": self._store_one,
            "load_one": self._load_one,
            "first_touch": self._first_touch,
        }

    def drop(self) -> None:
        if self._kept:
            self._stored(self._made.store.batch_remove(self._kept, True), 0)
            self._kept = []

    def lookups(self, count: int) -> list[float]:
        made, config = self._made, self._config
        assert config is not None
        times = []
        for _ in range(count):
            place = random.randrange(len(self._keys) - config.keys + 1)
            asked = self._keys[place : place + config.keys]
            start = time.perf_counter()
            found = made.store.batch_is_exist(asked)
            times.append(time.perf_counter() - start)
            self._stored(found, 1)
        return times

    def close(self) -> None:
        self._threads.shutdown()
        if self._client is not None:
            self._client.store.close()
        for child in reversed(self._children):
            child.end()

    @property
    def _made(self) -> _Client | _FarClient:
        if self._client is None:
            raise RuntimeError("not started")
        return self._client

    def _preload(self) -> None:
        """Load the system libraries that its wheel needs; install.sh puts them into the environment
        where the system has none.
        """
        beside = Path(sys.prefix) / "syslibs"
        found = {path.name: path for path in beside.rglob("*.so.*")}
        for name in _LIBRARIES:
            if name in found:
                ctypes.CDLL(str(found[name]), mode=ctypes.RTLD_GLOBAL)
        folders = {str(path.parent) for path in found.values()}
        known = os.environ.get("LD_LIBRARY_PATH", "")
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [*sorted(folders), known]))

    def _start_daemons(self, config: Config) -> None:
        spec = importlib.util.find_spec("mooncake")
        if spec is None or spec.origin is None:
            raise RuntimeError("mooncake is not installed")
        binaries = Path(spec.origin).parent
        master_port, metrics_port, port = free_port(), free_port(), free_port()
        command = [str(binaries / "mooncake_master"), "--logtostderr=true"]
        command += ["--rpc_address=127.0.0.1", f"--rpc_port={master_port}"]
        command += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}"]
        self._children.append(Child(config.folder, "mooncake_master", command))
        self._children[0].wait_port(master_port)
        command = [str(binaries / "mooncake_client"), "--logtostderr=true", "--host=127.0.0.1"]
        command += [f"--port={port}", f"--master_server_address=127.0.0.1:{master_port}"]
        command += ["--metadata_server=P2PHANDSHAKE"]
        command += [f"--global_segment_size={config.memory_bytes}"]
        self._children.append(Child(config.folder, "mooncake_client", command))
        self._children[1].wait_port(port)
        self._address = f"127.0.0.1:{port}"
        self._master = f"127.0.0.1:{master_port}"

    def _stored(self, statuses: Sequence[int], good: int) -> None:
        bad = [status for status in statuses if status != good]
        if bad:
            for child in self._children:
                child.check()
            raise RuntimeError(f"{len(bad)} of {len(statuses)} answers are {bad[0]}, not {good}")

    def _batch(self, area: int) -> tuple[list[int], list[int]]:
        place, page_bytes = self._made.places[area], self.source.shape[1]
        places = [place + page * page_bytes for page in self.pages]
        return places, [page_bytes] * len(places)

    def _spread(self, count: int, put: bool, _index: int) -> float:
        """Return the seconds of puts or gets of all pages, shared among ``count`` threads."""
        store, size = self._made.store, self.source.shape[1]
        if put:
            self._kept = [secrets.token_hex(16) for _ in self.pages]
        place, keys = self._made.places[0 if put else 1], self._kept

        def move(number: int) -> None:
            pages = self.pages[number::count]
            call = store.batch_put_from if put else store.batch_get_into
            places = [place + page * size for page in pages]
            statuses = call([keys[page] for page in pages], places, [size] * len(pages))
            self._stored(statuses, 0 if put else size)

        start = time.perf_counter()
        for done in [self._threads.submit(move, number) for number in range(count)]:
            done.result()
        return time.perf_counter() - start

    def _store(self, _index: int) -> float:
        keys = [secrets.token_hex(16) for _ in self.pages]
        seconds = self._store_into(self._made, keys)
        self._kept = keys
        return seconds

    def _store_into(self, client: _Client | _FarClient, keys: list[str]) -> float:
        page_bytes = self.source.shape[1]
        places = [client.places[0] + page * page_bytes for page in self.pages]
        sizes = [page_bytes] * len(places)
        start = time.perf_counter()
        statuses = client.store.batch_put_from(keys, places, sizes)
        seconds = time.perf_counter() - start
        self._stored(statuses, 0)
        return seconds

    def _load(self, _index: int) -> float:
        places, sizes = self._batch(1)
        start = time.perf_counter()
        lengths = self._made.store.batch_get_into(self._kept, places, sizes)
        seconds = time.perf_counter() - start
        self._stored(lengths, sizes[0])
        return seconds

    def _store_one(self, index: int) -> float:
        key, size = secrets.token_hex(16), self.source.shape[1]
        place = self._made.places[0] + self.pages[index] * size
        start = time.perf_counter()
        status = self._made.store.put_from(key, place, size)
        seconds = time.perf_counter() - start
        self._stored([status], 0)
        self._kept = [key]
        return seconds

    def _load_one(self, index: int) -> float:
        size = self.source.shape[1]
        place = self._made.places[1] + self.pages[index] * size
        start = time.perf_counter()
        length = self._made.store.get_into(self._kept[0], place, size)
        seconds = time.perf_counter() - start
        self._stored([length], size)
        return seconds

    def _first_touch(self, _index: int) -> float:
        fresh = _Client(self._address, self.source.shape[1], len(self.pages), 1)
        fresh.areas[0][:] = self.source
        keys = [secrets.token_hex(16) for _ in self.pages]
        seconds = self._store_into(fresh, keys)
        self._stored(fresh.store.batch_remove(keys, True), 0)
        fresh.areas.clear()
        fresh.store.close()
        return seconds

    def _fill_small(self, config: Config) -> None:
        client = self._client = _Client(self._address, config.small_bytes, _FILL_KEYS, 1)
        client.areas[0][:] = 1
        self._keys = [secrets.token_hex(16) for _ in range(config.blocks)]
        places = [client.places[0] + number * config.small_bytes for number in range(_FILL_KEYS)]
        for start in range(0, config.blocks, _FILL_KEYS):
            keys = self._keys[start : start + _FILL_KEYS]
            sizes = [config.small_bytes] * len(keys)
            self._stored(client.store.batch_put_from(keys, places[: len(keys)], sizes), 0)
