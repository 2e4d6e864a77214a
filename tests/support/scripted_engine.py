"""A scripted engine: the scheduler and the workers that a test steps, around ``connectors/core``.

The halves, the client, the copiers and the daemon are real. Blocks' bytes follow from their keys,
so that a wrong page is detected.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvhearth.connectors.core.engine import BlockTable, EngineFacts, RequestOptions, Step
from kvhearth.connectors.core.scheduler import SchedulerConnector
from kvhearth.connectors.core.settings import Settings
from kvhearth.connectors.core.step_metadata import Geometry, Handshake, StepMeta, WorkerReport
from kvhearth.connectors.core.worker import WorkerConnector
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.page_layout import PagedKV
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import content
from support.daemon import until

BLOCK_TOKENS = 16
PAGE_BYTES = 16 * 1024
FULL = GroupSpec(GroupKind.FULL, BLOCK_TOKENS, PAGE_BYTES)


def hashes_of(text: str, tokens: int) -> list[bytes]:
    """Return the chained hashes of the full blocks of a prompt that ``text`` stands for."""
    return [
        hashlib.sha256(f"{text}/{at}".encode()).digest() for at in range(tokens // BLOCK_TOKENS)
    ]


class ScriptedPool:
    """Pages with counted references. Page 0 is never given to a request."""

    def __init__(self, count: int) -> None:
        self.references = [1] + [0] * (count - 1)
        self.page_count = count

    def hold(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self.references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference of each page."""
        for page in pages:
            self.references[page] -= 1
            assert self.references[page] >= 0, f"page {page} was freed twice"

    def has_one_reference(self, page: int) -> bool:
        """Whether the page becomes free when one reference is dropped."""
        return self.references[page] == 1

    @property
    def free(self) -> list[int]:
        """Pages without a reference."""
        return [page for page, count in enumerate(self.references) if not count]

    def take(self, count: int) -> list[int]:
        """Take free pages for a request."""
        found = self.free[:count]
        assert len(found) == count, "the pool is exhausted"
        self.hold(found)
        return found

    @property
    def held(self) -> int:
        """Number of references, without page 0's."""
        return sum(self.references[1:])


@dataclass(eq=False)
class ScriptedRequest:
    """A request; all of its tokens are prompt."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    options: RequestOptions = field(default_factory=RequestOptions)
    num_computed_tokens: int = 0
    tables: tuple[list[int], ...] = ()
    outcome: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of the prompt's tokens."""
        return self.num_tokens


def facts_of(engine_id: str, **over: Any) -> EngineFacts:
    """Return the facts of an engine whose requests are scripted."""
    return EngineFacts(engine_id, BLOCK_TOKENS, 512, lambda one: one.options, **over)


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


class ScriptedEngine:
    """A scheduler and its workers, stepped by the test.

    Args:
        url: URL of a daemon.
        groups: KV cache groups.
        ranks: number of workers.
        pipeline: the workers are stages of a pipeline, otherwise tensor parallel.
        replicas: number of workers that hold the same bytes.
        blocks: size of the pool.
        facts: what differs from an engine that stores and loads.
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
        blocks: int = 256,
        engine_id: str = "scripted",
        facts: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        shards = ranks // replicas
        groups = tuple(GroupSpec(**{**vars(one), "shards": shards}) for one in groups)
        sizes = (1, ranks) if pipeline else (ranks, 1)
        self.contract = contract_of(groups, *sizes)
        chosen = Settings(
            url=url,
            **{"policy": "always", "lookup_wait_ms": 8000, "promotion_wait_ms": 60_000, **settings},
        )
        given = facts_of(engine_id, **(facts or {}))
        offer = Handshake(self.contract.to_json(), replicas, tuple(range(len(groups))))
        self.pool = ScriptedPool(blocks)
        self.geometry = Geometry(*sizes, replicas)
        self.pages: list[list[np.ndarray[Any, Any]]] = []
        self.workers: list[WorkerConnector] = []
        for rank in range(ranks):
            own = [np.zeros((blocks, one.page_bytes), np.uint8) for one in groups]
            paged = [PagedKV([pages]) for pages in own]
            self.pages.append(own)
            self.workers.append(
                WorkerConnector(chosen, offer, paged, engine_id=engine_id, rank=rank)
            )
        local = self.workers[0] if ranks == 1 else None
        self.half = SchedulerConnector(chosen, given, offer, self.pool, local)
        self.requests: dict[str, ScriptedRequest] = {}
        self.loading: set[str] = set()
        self.counts: dict[str, float] = {}
        self.tables_asked = 0
        self._loaded_by: dict[str, int] = {}
        self._failed: set[str] = set()

    def wait_ready(self) -> None:
        """Wait until all members are attached and reserved slots are available."""
        for client in (self.half._client, *(worker._client for worker in self.workers)):
            assert client is not None
            assert client.wait_ready(20)
        slot_pool = self.half._stores._slot_pool
        until(lambda: all(slot_pool.held(g) for g in range(len(self.contract.groups))), "slots")

    # -- the scheduler -----------------------------------------------------------------------------

    def add(self, name: str, text: str, tokens: int, **options: Any) -> ScriptedRequest:
        """Add a new request."""
        given = RequestOptions(**options)
        request = ScriptedRequest(name, tokens, hashes_of(text, tokens), given)
        self.requests[name] = request
        self.half.new_request(request)
        return request

    def admit(self, request: ScriptedRequest, local_tokens: int = 0) -> int:
        """Look a request up until there is an answer, and allocate. Return the tokens that are
        loaded.
        """

        def answer() -> list[int]:
            tokens = self.half.matched(request, local_tokens)
            return [] if tokens is None else [tokens]

        [tokens] = self._step_until(answer, "an answer, if only a miss")
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

    def wait_loaded(self, request: ScriptedRequest) -> bool:
        """Step until the load has ended. Return whether it succeeded."""
        self._step_until(lambda: request.request_id not in self.loading, "the end of a load")
        return request.outcome == "loaded"

    def prefill(self, request: ScriptedRequest, tokens: int | None = None) -> None:
        """Compute the missing tokens in one step."""
        left = request.num_tokens - request.num_computed_tokens
        self.compute(request)
        self.step({request.request_id: tokens or left})
        request.num_computed_tokens += tokens or left

    def compute(self, request: ScriptedRequest) -> None:
        """Write the right content into all of the request's full blocks."""
        for rank, own in enumerate(self.pages):
            for group, table in enumerate(request.tables):
                for at, page in enumerate(table[: len(self._keys(request, group))]):
                    own[group][page] = self._content(request, group, at, rank)

    def holds(self, request: ScriptedRequest, group: int, block: int) -> bool:
        """Whether all ranks' pages of a block have the bytes that its key stands for."""
        page = request.tables[group][block]
        return all(
            np.array_equal(own[group][page], self._content(request, group, block, rank))
            for rank, own in enumerate(self.pages)
        )

    def _keys(self, request: ScriptedRequest, group: int) -> list[bytes]:
        return self.half.groups.keys(request.block_hashes)[group]

    def _content(self, request: ScriptedRequest, group: int, block: int, rank: int) -> Any:
        key = self.half.groups.key(group, request.block_hashes, block)
        size = self.contract.groups[group].page_bytes
        return content(key, group, self.geometry.shard_of(rank), size)

    def step(
        self,
        scheduled: dict[str, int],
        states: dict[str, list[tuple[int, int, int]]] | None = None,
    ) -> StepMeta:
        """Run one step of scheduler and workers."""
        tokens = sum(scheduled.values())
        meta = self.half.plan_step(Step(tokens, scheduled, self.find_table, states or {}))
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

    def _step_until(self, condition: Callable[[], Any], what: str) -> Any:
        """Step until ``condition()`` is true, and return its value."""

        def stepped() -> Any:
            value = condition()
            if not value:
                self.step({})
            return value

        return until(stepped, what, pause_s=0.001)

    def find_table(self, request_id: str) -> BlockTable:
        """Return a copy of a request's block table, and count the calls."""
        self.tables_asked += 1
        return [list(table) for table in self.requests[request_id].tables]

    def finish(self, request: ScriptedRequest) -> int | None:
        """End a request in any state; its blocks are freed when no load writes into them."""
        reported = self.half.finished(request, request.tables)
        self.wait_loaded(request)
        for table in request.tables:
            self.pool.release(table[::-1])
        del self.requests[request.request_id]
        return reported

    def settle(self) -> None:
        """Step until all stores are reported and committed."""
        self._step_until(lambda: not self.half.has_work, "the end of all stores")
        assert self.half._stores.drain(HUNG_S)
        self.half._block_refs.check_books()

    def run(self, name: str, text: str, tokens: int, **options: Any) -> int:
        """Run a request from begin to end. Return the tokens that were loaded, each of them
        checked.
        """
        request = self.add(name, text, tokens, **options)
        loaded = self.admit(request)
        if not self.wait_loaded(request):
            loaded = 0
        for at in range(loaded // BLOCK_TOKENS if self.half.groups.whole else 0):
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
def scripted_engine(url: str, *, ready: bool = True, **options: Any) -> Iterator[ScriptedEngine]:
    """Yield an engine, and close it at the end."""
    engine = ScriptedEngine(url, **options)
    try:
        if ready:
            engine.wait_ready()
        yield engine
    finally:
        engine.close()
