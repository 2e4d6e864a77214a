"""Adapter of LMCache's daemon ("MP server") with its shared-memory pool, transfers by the engine.

A chunk is one block: 256 tokens, the default, for copies; 16, as in our bench's contract, for
lookups, because a lookup ships every token of the prompt and the daemon hashes it.

``store`` and ``load`` go through the transfer context that LMCache's engine connectors use.
``*_bare`` replaces that context's gathering of pages by one plain copy for each block and leaves
the release out: the best that its protocol allows.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth_lab.bench.peers.adapters.harness import (
    U8,
    Child,
    Config,
    fill,
    free_port,
    huge_or_not,
    order,
)

_CHUNK_TOKENS = {"copies": 256, "lookups": 16}
_MODEL = "bench"
_DEADLINE_S = 60.0
_TOKEN = 5
_FIRST_TOKENS = 1 << 30
_TENSOR = "layer"


@dataclass
class _Worker:
    """One registered client: its transfer context, and the pages as its tensors."""

    number: int
    transfer: Any
    source: dict[str, Any]
    target: dict[str, Any]


class _Server:
    """The daemon, and the connection of all workers here to it.

    Args:
        config: configuration of the run.
    """

    def __init__(self, config: Config) -> None:
        self.chunk_tokens = _CHUNK_TOKENS[config.part]
        shm_name = f"kvhearth_bench_{secrets.token_hex(4)}"
        self.shm_path = Path("/dev/shm") / shm_name
        self._port = free_port()
        self._first_tokens = itertools.count(random.randrange(_FIRST_TOKENS))
        self._numbers = itertools.count(os.getpid())
        self._zmq: Any = None
        self.client: Any = None
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.server"]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--shm-name", shm_name]
        command += ["--chunk-size", str(self.chunk_tokens), "--eviction-policy", "LRU"]
        command += ["--l1-size-gb", str(config.memory_bytes / (1 << 30))]
        command += ["--supported-transfer-mode", "engine_driven", "--disable-observability"]
        self._child = Child(config.folder, "lmcache_server", command)

    def connect(self) -> None:
        """Wait until the daemon answers.

        Raises:
            RuntimeError: it does not.
        """
        import zmq
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        url = f"tcp://127.0.0.1:{self._port}"
        self._zmq = zmq.Context()
        self.client = RequestClientFactory.create(url, context=self._zmq)
        asked = self.client.get_chunk_size()
        self._child.wait_until(lambda: bool(asked.wait(timeout=0.1)))
        if asked.result(timeout=0) != self.chunk_tokens:
            raise RuntimeError("the server has chunks of another length")

    def register(self, source: U8, target: U8) -> _Worker:
        """Register a worker with these pages and its own mapping of the pool.

        Raises:
            RuntimeError: there is no shared memory.
        """
        from lmcache.utils import EngineType
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from lmcache.v1.multiprocess.transfer_context import (
            EngineDrivenContextShm,
            EngineDrivenTransferContext,
        )

        number, tokens = next(self._numbers), self.chunk_tokens
        transfer = EngineDrivenTransferContext(number, self.client)
        made = _Worker(number, transfer, _tensors(source, tokens), _tensors(target, tokens))
        group = EngineGroupInfo(engine_group_id=0, layer_indices=(0,), tokens_per_block=tokens)
        transfer.register(
            made.source,
            _MODEL,
            1,
            1,
            _DEADLINE_S,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[group],
            engine_type=EngineType.VLLM,
        )
        context = transfer.engine_driven_context
        if not isinstance(context, EngineDrivenContextShm):
            raise RuntimeError(f"no shared memory: {type(context).__name__}")
        return made

    def unregister(self, worker: _Worker) -> None:
        """End a worker."""
        asked = worker.transfer.unregister()
        if asked is not None:
            self.answer(asked)
        worker.transfer.close()

    @staticmethod
    def answer(asked: Any) -> Any:
        """Return the result of a call; raises TimeoutError."""
        return asked.result(timeout=_DEADLINE_S)

    def key(self, tokens: tuple[int, ...], worker_id: int | None) -> Any:
        """Return the key of a whole prompt, in a request of its own."""
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        return IPCCacheServerKey(
            model_name=_MODEL,
            world_size=1,
            worker_id=worker_id,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=secrets.token_hex(8),
            num_kv_readers=1,
        )

    def new_key(self, blocks: int) -> Any:
        """Return the key of a new prompt of this many blocks."""
        rest = [_TOKEN] * (blocks * self.chunk_tokens - 1)
        return self.key((next(self._first_tokens), *rest), 0)

    def look_up(self, key: Any) -> None:
        """Find and lock every block of a prompt, as an engine's scheduler does.

        Raises:
            RuntimeError: some are missing.
        """
        self.answer(self.client.lookup(key, 1))
        found = self.answer(self.client.wait_prefetch_status(key.request_id, _DEADLINE_S))
        wanted = len(key.token_ids) // self.chunk_tokens
        if found != wanted:
            raise RuntimeError(f"a lookup found {found} of {wanted} blocks")

    def end_request(self, key: Any) -> None:
        """End the request in the daemon; the blocks stay."""
        self.answer(self.client.end_session(key.request_id))

    def close(self) -> None:
        """Close the connection and end the daemon."""
        if self.client is not None:
            self.client.close()
        if self._zmq is not None:
            self._zmq.destroy(0)
        self._child.end()
        with contextlib.suppress(FileNotFoundError):
            self.shm_path.unlink()


def _tensors(blocks: U8, tokens: int) -> dict[str, Any]:
    """Return one layer whose block is one contiguous page."""
    import torch

    shape = (len(blocks), tokens, blocks.shape[1] // tokens // 2)
    return {_TENSOR: torch.from_numpy(blocks).view(torch.bfloat16).view(shape)}


class Peer:
    """See ``harness.Peer``."""

    source: U8
    target: U8
    pages: Sequence[int] = ()

    def __init__(self) -> None:
        self._daemon: _Server | None = None
        self._registered: _Worker | None = None
        self._copies = False
        self._kept: Any = None
        self._prompts: list[tuple[int, ...]] = []

    def start(self, config: Config) -> Mapping[str, Any]:
        os.environ.update(LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1")
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
        self._daemon = _Server(config)
        import torch

        torch.set_num_threads(1)
        self._daemon.connect()
        self._copies = config.part == "copies"
        count = config.batch if self._copies else config.keys
        size = config.page_bytes if self._copies else config.small_bytes
        self.source, kind = huge_or_not(count, size, config.hugepages)
        self.target, _ = huge_or_not(count, size, config.hugepages)
        fill(self.source)
        self.pages = order(count)
        self._registered = self._daemon.register(self.source, self.target)
        if not self._copies:
            self._fill_prompts(config)
        return {
            "versions": {
                "lmcache": importlib.metadata.version("lmcache"),
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": sys.version.split()[0],
            },
            "settings": f"MP server over ZMQ, engine_driven, {type(self._context).__name__}; "
            f"chunks of {self._daemon.chunk_tokens} tokens, L1 only, LRU",
            "pages": f"pool 4KiB (its shared memory refuses huge pages), engine {kind}",
            "leftovers": [str(self._daemon.shm_path)],
        }

    def measures(self) -> Mapping[str, Callable[[int], float]]:
        if not self._copies:
            return {}
        every = list(self.pages)
        return {
            "store": lambda _: self._store(self._worker, every),
            "store_bare": lambda _: self._store_bare(every),
            "load": lambda _: self._load(every),
            "load_bare": lambda _: self._load_bare(every),
            "store_one": lambda index: self._store(self._worker, [self.pages[index]]),
            "store_one_bare": lambda index: self._store_bare([self.pages[index]]),
            "load_one": lambda index: self._load([self.pages[index]]),
            "load_one_bare": lambda index: self._load_bare([self.pages[index]]),
            "first_touch": lambda _: self._first_touch(every),
        }

    def drop(self) -> None:
        if self._kept is not None:
            self._server.end_request(self._kept)
        self._kept = None
        self._server.answer(self._server.client.clear())

    def lookups(self, count: int) -> list[float]:
        server, times = self._server, []
        for _ in range(count):
            key = server.key(random.choice(self._prompts), None)
            start = time.perf_counter()
            server.look_up(key)
            times.append(time.perf_counter() - start)
            server.answer(server.client.free_lookup_locks(key, 1))
            server.end_request(key)
        return times

    def close(self) -> None:
        if self._registered is not None:
            self._registered.transfer.close()  # without a call, since the daemon ends, too
        if self._daemon is not None:
            self._daemon.close()

    @property
    def _server(self) -> _Server:
        if self._daemon is None:
            raise RuntimeError("not started")
        return self._daemon

    @property
    def _worker(self) -> _Worker:
        if self._registered is None:
            raise RuntimeError("not started")
        return self._registered

    @property
    def _context(self) -> Any:
        return self._worker.transfer.engine_driven_context

    def _store(self, worker: _Worker, pages: list[int]) -> float:
        key = self._server.new_key(len(pages))
        start = time.perf_counter()
        done = worker.transfer.submit_store(key.request_id, key, worker.source, [pages], None, 1)
        stored = self._server.answer(done)
        seconds = time.perf_counter() - start
        if not stored:
            raise RuntimeError("a store failed")
        self._kept = key
        return seconds

    def _store_bare(self, pages: list[int]) -> float:
        key, source = self._server.new_key(len(pages)), self._worker.source[_TENSOR]
        start = time.perf_counter()
        slots, indices = self._context.prepare_store(key, self._worker.number)
        for slot, index in zip(slots, indices, strict=True):
            slot.view(-1).copy_(source[pages[index]].view(-1))
        stored = self._context.commit_store(key, self._worker.number, slots)
        seconds = time.perf_counter() - start
        if not stored or len(slots) != len(pages):
            raise RuntimeError(f"a store failed: {len(slots)} of {len(pages)} slots")
        self._kept = key
        return seconds

    def _load(self, pages: list[int]) -> float:
        key, made = self._kept, self._worker
        start = time.perf_counter()
        self._server.look_up(key.no_worker_id_version())
        done = made.transfer.submit_retrieve(key.request_id, key, made.target, [pages], None, 1)
        loaded = self._server.answer(done)
        seconds = time.perf_counter() - start
        if not loaded:
            raise RuntimeError("a load failed")
        return seconds

    def _load_bare(self, pages: list[int]) -> float:
        key, target = self._kept, self._worker.target[_TENSOR]
        start = time.perf_counter()
        self._server.look_up(key.no_worker_id_version())
        slots = self._context.prepare_retrieve(key, self._worker.number)
        for page, slot in zip(pages, slots or [], strict=True):
            target[page].view(-1).copy_(slot.view(-1))
        seconds = time.perf_counter() - start
        if not self._context.commit_retrieve(key, self._worker.number):
            raise RuntimeError("a load failed")
        return seconds

    def _first_touch(self, pages: list[int]) -> float:
        fresh = self._server.register(self.source, self.target)
        try:
            return self._store(fresh, pages)
        finally:
            self._server.unregister(fresh)

    def _fill_prompts(self, config: Config) -> None:
        """Store as many whole prompts as hold the blocks; a lookup asks for one of them."""
        for _ in range(-(-config.blocks // config.keys)):
            self._store(self._worker, list(self.pages))
            self._prompts.append(self._kept.token_ids)
            self._server.end_request(self._kept)
        self._kept = None
