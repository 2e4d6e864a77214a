"""vLLM's scheduler and worker as the connector's halves see them, without vLLM.

The halves, the client, the copiers and the daemon are real. Blocks' bytes follow from their keys,
so that a wrong page is detected.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvhearth.connectors.vllm.scheduler import SchedulerConnector
from kvhearth.connectors.vllm.settings import Settings
from kvhearth.connectors.vllm.step_metadata import Geometry, Handshake, StepMeta, WorkerReport
from kvhearth.connectors.vllm.worker import WorkerConnector
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.page_layout import PagedKV
from support.daemon import until
from support.engine import content

BLOCK_TOKENS = 16
PAGE_BYTES = 16 * 1024
FULL = GroupSpec(GroupKind.FULL, BLOCK_TOKENS, PAGE_BYTES)


def hashes_of(text: str, tokens: int) -> list[bytes]:
    """Return the chained hashes of the full blocks of a prompt that ``text`` stands for."""
    return [
        hashlib.sha256(f"{text}/{at}".encode()).digest() for at in range(tokens // BLOCK_TOKENS)
    ]


@dataclass(eq=False)
class FakeBlock:
    """One entry of the pool."""

    block_id: int
    ref_cnt: int = 0


class FakePool:
    """vLLM's block pool, as far as connectors use it. Block 0 is the null block."""

    def __init__(self, count: int) -> None:
        self.blocks = [FakeBlock(number) for number in range(count)]
        self.blocks[0].ref_cnt = 1

    def touch(self, blocks: list[FakeBlock]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        """Drop a reference of each block."""
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"block {block.block_id} was freed twice"

    def take(self, count: int) -> list[int]:
        """Take free blocks for a request."""
        found = [block for block in self.blocks if not block.ref_cnt][:count]
        assert len(found) == count, "the pool is exhausted"
        self.touch(found)
        return [block.block_id for block in found]

    @property
    def held(self) -> int:
        """Number of references, without the null block's."""
        return sum(block.ref_cnt for block in self.blocks[1:])


@dataclass(eq=False)
class FakeRequest:
    """One of vLLM's requests."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    num_computed_tokens: int = 0
    tables: tuple[list[int], ...] = ()
    outcome: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens: all of them are prompt."""
        return self.num_tokens


@dataclass
class FakeOutput:
    """A scheduler's output."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    states: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    tables_asked: int = 0

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Sum over all requests."""
        return sum(self.num_scheduled_tokens.values())

    @property
    def kv_connector_block_state(self) -> Any:
        """Return vLLM's view of the block tables."""
        return SimpleNamespace(
            get_block_ids=self._get_block_ids, boundary_state_offloads=self.states
        )

    def _get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        self.tables_asked += 1
        return tuple(list(table) for table in self.tables[request_id])


def config_of(role: str, engine_id: str, **over: Any) -> Any:
    """Return the part of vLLM's configuration that the scheduler's half reads."""
    transfer = SimpleNamespace(
        kv_role=role,
        is_kv_producer=role in ("kv_producer", "kv_both"),
        is_kv_consumer=role in ("kv_consumer", "kv_both"),
        engine_id=engine_id,
    )
    values = {
        "kv_transfer_config": transfer,
        "speculative_config": None,
        "scheduler_config": SimpleNamespace(
            max_num_batched_tokens=512, enable_chunked_prefill=True
        ),
        "model_config": SimpleNamespace(is_prefix_caching_supported=True),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        "weight_transfer_config": None,
        **over,
    }
    return SimpleNamespace(**values)


def contract_of(groups: tuple[GroupSpec, ...], tensor: int, pipeline: int) -> Contract:
    """Return a contract for groups of the engine."""
    return Contract(
        model="fake",
        revision="1",
        kv_dtype="uint8",
        groups=groups,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
    )


class FakeEngine:
    """A scheduler and its workers, stepped by the test.

    Args:
        url: URL of a daemon.
        groups: KV cache groups.
        ranks: number of workers.
        pipeline: the workers are stages of a pipeline, otherwise tensor parallel.
        replicas: number of workers that hold the same bytes.
        role: ``kv_role``.
        blocks: size of the pool.
        settings: options.
    """

    def __init__(
        self,
        url: str,
        *,
        groups: tuple[GroupSpec, ...] = (FULL,),
        ranks: int = 1,
        pipeline: bool = False,
        replicas: int = 1,
        role: str = "kv_both",
        blocks: int = 256,
        engine_id: str = "fake",
        **settings: Any,
    ) -> None:
        shards = ranks // replicas
        groups = tuple(GroupSpec(**{**vars(one), "shards": shards}) for one in groups)
        sizes = (1, ranks) if pipeline else (ranks, 1)
        self.contract = contract_of(groups, *sizes)
        chosen = Settings(url=url, **{"policy": "always", "lookup_wait_ms": 8000, **settings})
        config = config_of(role, engine_id)
        self.pool = FakePool(blocks)
        self.geometry = Geometry(*sizes, replicas)
        self.pages: list[list[np.ndarray[Any, Any]]] = []
        self.workers: list[WorkerConnector] = []
        for rank in range(ranks):
            worker = WorkerConnector(
                chosen, config, SimpleNamespace(kv_tp_replicas=replicas), rank=rank
            )
            worker._geometry = self.geometry
            own = [np.zeros((blocks, one.page_bytes), np.uint8) for one in groups]
            worker._attach(self.contract, [PagedKV([pages]) for pages in own])
            self.pages.append(own)
            self.workers.append(worker)
        offer = Handshake(self.contract.to_json(), replicas, tuple(range(len(groups))))
        self.half = SchedulerConnector(chosen, config, BLOCK_TOKENS, offer, self.pool)
        self.requests: dict[str, FakeRequest] = {}
        self.loading: set[str] = set()
        self.counts: dict[str, float] = {}
        self.tables_asked = 0
        self._loaded_by: dict[str, int] = {}
        self._failed: set[str] = set()

    def wait_ready(self) -> None:
        """Wait until all members are attached and reserved slots are available."""
        assert self.half._client.wait_ready(20)
        stock = self.half._stores._stock
        until(lambda: all(stock.held(g) for g in range(len(self.contract.groups))), "slots")

    # -- vLLM's scheduler --------------------------------------------------------------------------

    def add(self, name: str, text: str, tokens: int, **more: Any) -> FakeRequest:
        """Add a new request."""
        request = FakeRequest(name, tokens, hashes_of(text, tokens), **more)
        self.requests[name] = request
        self.half.new_request(request)
        return request

    def admit(self, request: FakeRequest, local_tokens: int = 0, timeout_s: float = 20.0) -> int:
        """Look a request up until there is an answer, and allocate. Return the tokens that are
        loaded.
        """
        end = time.monotonic() + timeout_s
        while True:
            tokens, is_async = self.half.matched(request, local_tokens)
            if tokens is not None:
                break
            self.step({})
            assert time.monotonic() < end, "no answer, not even a miss"
            time.sleep(0.001)
        assert is_async == (tokens > 0)
        if not request.tables:
            request.tables = tuple(
                self.pool.take(-(-request.num_tokens // one.block_tokens))
                for one in self.contract.groups
            )
        for own in self.pages:
            for group, table in enumerate(request.tables):
                own[group][table[local_tokens // BLOCK_TOKENS :]] = 0
        self.half.allocated(request, request.tables, tokens)
        request.num_computed_tokens = local_tokens + tokens
        if tokens:
            self.loading.add(request.request_id)
        return tokens

    def wait_loaded(self, request: FakeRequest, timeout_s: float = 20.0) -> bool:
        """Step until the load has ended. Return whether it succeeded."""
        end = time.monotonic() + timeout_s
        while request.request_id in self.loading:
            self.step({})
            assert time.monotonic() < end, "a load never ends"
            time.sleep(0.001)
        return request.outcome == "loaded"

    def prefill(self, request: FakeRequest, tokens: int | None = None) -> None:
        """Compute the missing tokens in one step."""
        left = request.num_tokens - request.num_computed_tokens
        self.compute(request)
        self.step({request.request_id: tokens or left})
        request.num_computed_tokens += tokens or left

    def compute(self, request: FakeRequest) -> None:
        """Write the right content into all of the request's full blocks."""
        for rank, own in enumerate(self.pages):
            for group, table in enumerate(request.tables):
                for at, page in enumerate(table[: len(self._keys(request, group))]):
                    own[group][page] = self._content(request, group, at, rank)

    def holds(self, request: FakeRequest, group: int, block: int) -> bool:
        """Whether all ranks' pages of a block have the bytes that its key stands for."""
        page = request.tables[group][block]
        return all(
            np.array_equal(own[group][page], self._content(request, group, block, rank))
            for rank, own in enumerate(self.pages)
        )

    def _keys(self, request: FakeRequest, group: int) -> list[bytes]:
        return self.half._groups.keys(request.block_hashes)[group]

    def _content(self, request: FakeRequest, group: int, block: int, rank: int) -> Any:
        key = self._keys(request, group)[block]
        size = self.contract.groups[group].page_bytes
        return content(key, group, self.geometry.shard_of(rank), size)

    def step(
        self,
        scheduled: dict[str, int],
        states: dict[str, list[tuple[int, int, int]]] | None = None,
    ) -> StepMeta:
        """Run one step of scheduler and workers."""
        tables = {name: self.requests[name].tables for name in scheduled}
        output = FakeOutput(scheduled, tables, states or {})
        meta = self.half.plan_step(output)
        self.tables_asked += output.tables_asked
        report: WorkerReport | None = None
        loaded: set[str] = set()
        for worker in self.workers:
            worker.start_loads(meta)
            worker.start_stores(meta)
            done, failed = worker.results()
            self._failed |= failed
            for name in done:
                self._loaded_by[name] = self._loaded_by.get(name, 0) + 1
                if self._loaded_by[name] == len(self.workers):
                    del self._loaded_by[name]
                    loaded.add(name)
            part = worker.report()
            if part is not None:
                report = part if report is None else report.aggregate(part)
        failed_now = self._failed & loaded
        self._failed -= failed_now
        for name in loaded:
            assert name in self.loading, f"{name} was told to be loaded twice"
            self.loading.discard(name)
            request = self.requests[name]
            request.outcome = "failed" if name in failed_now else "loaded"
            if name in failed_now:
                request.num_computed_tokens = 0
        self.half.step_done(report, loaded, failed_now)
        for name, value in self.half.take_counts().items():
            self.counts[name] = self.counts.get(name, 0) + value
        return meta

    def finish(self, request: FakeRequest) -> dict[str, Any] | None:
        """End a request in any state; its blocks are freed when no load writes into them."""
        told = self.half.finished(request, request.tables)
        self.wait_loaded(request)
        for table in request.tables:
            self.pool.free_blocks([self.pool.blocks[page] for page in reversed(table)])
        del self.requests[request.request_id]
        return told

    def settle(self) -> None:
        """Step until all stores are reported and committed."""
        end = time.monotonic() + 20
        while self.half.has_work:
            self.step({})
            assert time.monotonic() < end, "a store never ends"
            time.sleep(0.001)
        assert self.half._stores.drain(20)
        self.half._holds.check_books()

    def run(self, name: str, text: str, tokens: int, **more: Any) -> int:
        """Run a request from begin to end. Return the tokens that were loaded, each of them
        checked.
        """
        request = self.add(name, text, tokens, **more)
        loaded = self.admit(request)
        if not self.wait_loaded(request):
            loaded = 0
        for at in range(loaded // BLOCK_TOKENS if self.half._groups.whole else 0):
            assert self.holds(request, 0, at), f"{name}: block {at} has wrong bytes"
        if request.num_computed_tokens < request.num_tokens:
            self.prefill(request)
        self.finish(request)
        self.settle()
        return loaded

    def close(self) -> None:
        """End everything; no block of the pool may be held."""
        for worker in self.workers:
            worker.shutdown()
        self.half.shutdown()
        assert self.pool.held == 0, f"{self.pool.held} blocks are still held"


@contextlib.contextmanager
def fake_engine(url: str, *, ready: bool = True, **options: Any) -> Iterator[FakeEngine]:
    """Yield an engine, and close it at the end."""
    engine = FakeEngine(url, **options)
    try:
        if ready:
            engine.wait_ready()
        yield engine
    finally:
        engine.close()
