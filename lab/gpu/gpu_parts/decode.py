"""Part d: inter-token latency of a decode loop, without a connector, with an idle one, and with
loads and stores of long prompts under way.

The loop makes the calls of vLLM's model runner V2 in its order: the scheduler plans the step; new
blocks are zeroed; a graph is replayed; a token is sampled and copied on a stream of its own; then
loads and stores begin and ended ones are collected; the token arrives; the scheduler gets the
workers' report. The scheduler is scripted, the connector's halves and the daemon are real.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from support.cuda_fake import FakeDevice
from support.scripted_engine import ScriptedPool, ScriptedRequest, contract_of, hashes_of

from gpu_parts.common import Report, run_part
from kvhearth.connectors.core.engine import BlockTable, EngineFacts, Step
from kvhearth.connectors.core.scheduler import SchedulerConnector
from kvhearth.connectors.core.settings import Settings
from kvhearth.connectors.core.step_metadata import Handshake
from kvhearth.connectors.core.worker import WorkerConnector
from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.page_layout import PagedKV
from kvhearth.transfer.copier_pool import default_copier
from kvhearth_lab.bench.daemon import broken, served
from kvhearth_lab.bench.gpu.bare_arena import spare_bytes
from kvhearth_lab.bench.gpu.stage import Stage
from kvhearth_lab.bench.report import p50, p99
from kvhearth_lab.harness.daemon import module

BLOCK_TOKENS = 16
KEPT_TEXT = "kept"
READY_S = 60.0
PHASES = ("none", "idle", "busy")
ENGINE = "decode"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the loop.

    Attributes:
        page_bytes: bytes of a block's page.
        prompt_tokens: tokens of each load and store.
        chunk_tokens: tokens of a prompt that one step computes, and thus stores.
        step_s: duration of a step's graph.
        width: size of the square weights that the graph reads, and their number.
        phase_s: duration of a phase.
        steps_min: least number of steps of a phase.
    """

    page_bytes: int
    prompt_tokens: int
    chunk_tokens: int
    step_s: float
    width: tuple[int, int]
    phase_s: float
    steps_min: int


FULL = Sizes(2 << 20, 32768, 2048, 0.010, (8192, 16), 8.0, 100)
REHEARSAL = Sizes(16 << 10, 512, 128, 0.001, (64, 2), 0.3, 60)


def shrunk(sizes: Sizes, device_bytes: int, memory_bytes: int) -> Sizes:
    """Return sizes whose prompts fit: two of them on the device and three in memory."""
    block_tokens = BLOCK_TOKENS * 64
    tokens = sizes.prompt_tokens
    while tokens > block_tokens:
        prompt_bytes = tokens // BLOCK_TOKENS * sizes.page_bytes
        if 2.2 * prompt_bytes <= device_bytes and 3.2 * prompt_bytes <= memory_bytes:
            break
        tokens //= 2
    return Sizes(**{**vars(sizes), "prompt_tokens": tokens})


class Forward:
    """A step's forward pass: a graph that reads weights, as decoding does, for ``step_s``.

    Args:
        stage: the device.
        sizes: sizes of the loop.
    """

    def __init__(self, stage: Stage, sizes: Sizes) -> None:
        torch = stage.torch
        self._stage = stage
        wide, count = sizes.width
        self._weights = [
            torch.randn(wide, wide, dtype=torch.bfloat16, device=stage.device) / wide**0.5
            for _ in range(count)
        ]
        self._hidden = torch.randn(32, wide, dtype=torch.bfloat16, device=stage.device)
        self.logits = self._hidden
        self._graph: Any = None
        once_s = self._timed(self._products, len(self._weights))
        self.products = max(1, round(len(self._weights) * sizes.step_s / once_s))
        if stage.real:
            self._capture()

    def _products(self, count: int) -> None:
        hidden = self._hidden
        for number in range(count):
            hidden = hidden @ self._weights[number % len(self._weights)]
        self.logits = hidden

    def _timed(self, work: Callable[[int], None], count: int) -> float:
        for _ in range(2):  # the first one chooses kernels
            self._stage.synchronize()
            began_s = time.perf_counter()
            work(count)
            self._stage.synchronize()
            seconds = time.perf_counter() - began_s
        return seconds

    def _capture(self) -> None:
        cuda = self._stage.torch.cuda
        with self._stage.stream():
            self._products(self.products)
        self._stage.synchronize()
        self._graph = cuda.CUDAGraph()
        with cuda.graph(self._graph):
            self._products(self.products)

    def run(self) -> None:
        """Issue the forward pass."""
        if self._graph is None:
            self._products(self.products)
        else:
            self._graph.replay()


class Sampler:
    """Samples a token, and copies it to the host on a stream of its own."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._token = stage.torch.zeros(32, dtype=stage.torch.int64, pin_memory=stage.real)
        self._copy_stream = stage.torch.cuda.Stream() if stage.real else None
        self._chosen: Any = None

    def issue(self, logits: Any) -> Callable[[], None]:
        """Issue sampling and copy; return the wait for the token."""
        # Held until the next call: the copy on the other stream may still read it.
        chosen = self._chosen = logits.argmax(-1)
        if self._copy_stream is None:
            self._token.copy_(chosen)
            return lambda: None
        cuda = self._stage.torch.cuda
        self._copy_stream.wait_stream(cuda.current_stream())
        with cuda.stream(self._copy_stream):
            self._token.copy_(chosen, non_blocking=True)
            event = cuda.Event()
            event.record(self._copy_stream)
        wait: Callable[[], None] = event.synchronize
        return wait


@dataclass(eq=False)
class Prompt:
    """A long prompt that is loaded or computed.

    Attributes:
        state: ``asked``, ``loading``, ``computing`` or ``ended``.
    """

    request: ScriptedRequest
    wants_load: bool
    state: str = "asked"


@dataclass
class Traffic:
    """Number of prompts that ended in a phase, and bytes that were copied."""

    loads: int = 0
    stores: int = 0
    load_misses: int = 0
    failed_loads: int = 0
    load_bytes: float = 0.0
    store_bytes: float = 0.0
    skipped_blocks: float = 0.0


@dataclass(eq=False)
class Engine:
    """The scripted scheduler with both halves of the connector.

    Attributes:
        tensor: pages of the engine, shape (pages, page_bytes), uint8.
    """

    stage: Stage
    sizes: Sizes
    tensor: Any
    half: SchedulerConnector
    worker: WorkerConnector
    pool: ScriptedPool
    traffic: Traffic = field(default_factory=Traffic)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    _to_zero: list[int] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    # -- the scheduler -----------------------------------------------------------------------------

    def add(self, text: str, *, wants_load: bool) -> Prompt:
        """Let a prompt arrive."""
        tokens = self.sizes.prompt_tokens + 1
        name = f"{text}-{next(self._numbers)}"
        request = ScriptedRequest(name, tokens, hashes_of(text, tokens))
        prompt = self.prompts[name] = Prompt(request, wants_load)
        self.half.new_request(request)
        return prompt

    def schedule(self) -> Step:
        """Admit prompts, and give the first computing one its next chunk beside the decoding."""
        for prompt in self.prompts.values():
            if prompt.state == "asked":
                self._admit(prompt)
        computing = [each for each in self.prompts.values() if each.state == "computing"]
        scheduled = {}
        for prompt in computing[:1]:
            request = prompt.request
            left = self.sizes.prompt_tokens - request.num_computed_tokens
            scheduled[request.request_id] = min(self.sizes.chunk_tokens, left)
        return Step(1 + sum(scheduled.values()), scheduled, self._table)

    def _table(self, request_id: str) -> BlockTable:
        return [list(table) for table in self.prompts[request_id].request.tables]

    def _admit(self, prompt: Prompt) -> None:
        count = -(-prompt.request.num_tokens // BLOCK_TOKENS)
        tokens = self.half.matched(prompt.request, 0)
        # Stores hold pages for some steps after their prompt has ended.
        if tokens is None or len(self.pool.free) < count:
            return
        pages = self.pool.take(count)
        prompt.request.tables = (pages,)
        self._to_zero = pages
        self.half.allocated(prompt.request, prompt.request.tables, tokens)
        prompt.request.num_computed_tokens = tokens
        prompt.state = "loading" if tokens else "computing"
        self.traffic.load_misses += prompt.wants_load and not tokens

    def _end(self, prompt: Prompt) -> None:
        prompt.state = "ended"
        request = prompt.request
        self.half.finished(request, request.tables)
        self.pool.release(request.tables[0][::-1])
        del self.prompts[request.request_id]
        if prompt.wants_load:
            self.traffic.loads += 1
        else:
            self.traffic.stores += 1

    # -- a step ------------------------------------------------------------------------------------

    def step(self, forward: Forward, sampler: Sampler) -> None:
        """Run a step in the runner's order, with the connector."""
        step = self.schedule()
        meta = self.half.plan_step(step)
        if self._to_zero:
            index = self.stage.torch.tensor(self._to_zero, device=self.stage.device)
            self.tensor.index_fill_(0, index, 0)
            self._to_zero = []
        forward.run()
        wait = sampler.issue(forward.logits)
        self.worker.start_loads(meta)
        self.worker.start_stores(meta)
        loaded, failed = self.worker.results()
        report = self.worker.report()
        wait()
        self.half.step_done(report, loaded, failed)
        self._advance(step, loaded, failed)

    def _advance(self, step: Step, loaded: set[str], failed: set[str]) -> None:
        for name, tokens in step.scheduled.items():
            request = self.prompts[name].request
            request.num_computed_tokens += tokens
            if request.num_computed_tokens >= self.sizes.prompt_tokens:
                self._end(self.prompts[name])
        for name in loaded:
            self.traffic.failed_loads += name in failed
            self._end(self.prompts[name])
        self._count()

    def _count(self) -> None:
        half, worker = self.half.take_counts(), self.worker.counters.take()
        self.traffic.load_bytes += half.get("load_bytes", 0.0)
        self.traffic.store_bytes += worker.get("store_bytes", 0.0)
        self.traffic.skipped_blocks += half.get("store_skipped", 0.0)

    def keep_busy(self) -> None:
        """Hold one load and one store under way."""
        wanted = {prompt.wants_load for prompt in self.prompts.values()}
        if True not in wanted:
            self.add(KEPT_TEXT, wants_load=True)
        if False not in wanted:
            self.add(f"new {next(self._numbers)}", wants_load=False)

    def settle(self, forward: Forward, sampler: Sampler, seconds: float) -> None:
        """Step until no prompt and no store is under way, and all stores are committed.

        Raises:
            KVHearthError: that takes longer than ``seconds``.
        """
        until = time.monotonic() + seconds
        while self.prompts or self.half.has_work:
            self.step(forward, sampler)
            if time.monotonic() > until:
                raise broken(f"prompts never end: {[p.state for p in self.prompts.values()]}")
        if not self.half._stores.drain(seconds):
            raise broken("commits never end")

    def wait_ready(self) -> None:
        """Wait until both halves are attached, and the arena is registered.

        Raises:
            KVHearthError: that takes too long.
        """
        until = time.monotonic() + READY_S
        for client in (self.half._client, self.worker._client):
            if client is None or not client.wait_ready(READY_S):
                raise broken("the connector does not attach")
        arena = self.worker._client.arena if self.worker._client else None
        if not self.stage.real or arena is None:
            return
        ends = [arena.view(segment)[-4096:] for segment in arena.segments]
        while not all(self.stage.torch.from_numpy(end).is_pinned() for end in ends):
            if time.monotonic() > until:
                raise broken("the arena is not registered in time")
            time.sleep(0.01)

    def close(self) -> None:
        """End everything."""
        self.worker.shutdown()
        self.half.shutdown()


@contextlib.contextmanager
def engine_of(stage: Stage, sizes: Sizes, url: str) -> Iterator[Engine]:
    """Provide an engine that is attached."""
    blocks = sizes.prompt_tokens // BLOCK_TOKENS
    pages = 2 * blocks + blocks // 16 + 16
    tensor = stage.torch.zeros(
        (pages, sizes.page_bytes), dtype=stage.torch.uint8, device=stage.device
    )
    group = GroupSpec(GroupKind.FULL, BLOCK_TOKENS, sizes.page_bytes)
    offer = Handshake(contract_of((group,), 1, 1).to_json(), 1, (0,))
    settings = Settings(
        url=url, policy="always", held_percent=90, pool_tokens=4 * sizes.chunk_tokens
    )
    facts = EngineFacts(ENGINE, BLOCK_TOKENS, sizes.chunk_tokens)
    scripted = None if stage.real else default_copier(device=FakeDevice())
    worker = WorkerConnector(
        settings, offer, [PagedKV([tensor])], engine_id=ENGINE, rank=0, make=scripted
    )
    pool = ScriptedPool(pages)
    half = SchedulerConnector(settings, facts, offer, pool)
    engine = Engine(stage, sizes, tensor, half, worker, pool)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.close()


def run_phase(
    sizes: Sizes, step: Callable[[], None], left_s: Callable[[], float]
) -> tuple[list[float], float]:
    """Return the latencies of a phase's tokens and its seconds; some first steps do not count."""
    for _ in range(5):
        step()
    latencies: list[float] = []
    began_s = last_s = time.perf_counter()
    while len(latencies) < sizes.steps_min or last_s - began_s < sizes.phase_s:
        step()
        now_s = time.perf_counter()
        latencies.append(now_s - last_s)
        last_s = now_s
        if left_s() <= 0:
            break
    return latencies, last_s - began_s


def bare_step(forward: Forward, sampler: Sampler) -> None:
    """Run a step without a connector."""
    forward.run()
    sampler.issue(forward.logits)()


def phases(report: Report, engine: Engine, forward: Forward, sampler: Sampler) -> None:
    """Run the three phases, and report latencies and ratios."""
    rows: dict[str, Any] = {}

    def busy_step() -> None:
        engine.keep_busy()
        engine.step(forward, sampler)

    steps = {
        "none": lambda: bare_step(forward, sampler),
        "idle": lambda: engine.step(forward, sampler),
        "busy": busy_step,
    }
    for phase in PHASES:
        engine.traffic = Traffic()
        latencies, seconds = run_phase(engine.sizes, steps[phase], report.left_s)
        rows[phase] = {
            "steps": len(latencies),
            "p50_ms": round(p50(latencies) * 1e3, 4),
            "p99_ms": round(p99(latencies) * 1e3, 4),
            "max_ms": round(max(latencies) * 1e3, 4),
            "load_gbs": round(engine.traffic.load_bytes / seconds / 1e9, 3),
            "store_gbs": round(engine.traffic.store_bytes / seconds / 1e9, 3),
            **vars(engine.traffic),
        }
        report.put(phases=rows)
    for phase in PHASES[1:]:
        for name in ("p50", "p99"):
            ratio = rows[phase][f"{name}_ms"] / rows["none"][f"{name}_ms"]
            report.figure(f"decode_{phase}_{name}_ratio", round(ratio, 4))
    busy = rows["busy"]
    report.check("no load failed", busy["failed_loads"] == 0, busy)
    report.check("bytes were stored while tokens were decoded", busy["store_bytes"] > 0, busy)


def measure(report: Report, stage: Stage) -> None:
    """Store the prompt that is loaded later, run the phases, and check that a load brings it."""
    sizes = REHEARSAL
    spare = spare_bytes()
    if not stage.small:
        device_bytes = int(stage.torch.cuda.mem_get_info()[0] * 0.6)
        sizes = shrunk(FULL, device_bytes, spare)
        if sizes != FULL:
            report.shorten(f"prompts of {sizes.prompt_tokens} tokens only: memory is short")
    prompt_bytes = sizes.prompt_tokens // BLOCK_TOKENS * sizes.page_bytes
    memory = 3 * prompt_bytes + (256 << 20)
    starter = module("kvhearth_server", "serve")
    with served(starter, memory=str(memory), http="off") as daemon:
        daemon.ready()
        forward, sampler = Forward(stage, sizes), Sampler(stage)
        report.put(prompt_tokens=sizes.prompt_tokens, products=forward.products)
        with engine_of(stage, sizes, daemon.client_url) as engine:
            traffic = engine.traffic
            until = time.monotonic() + READY_S
            while True:
                # Slots arrive in the background, and a lookup that takes long is a miss: tries end
                # with time, since without slots one takes a few milliseconds.
                engine.add(KEPT_TEXT, wants_load=False)
                engine.settle(forward, sampler, READY_S)
                daemon.wait_quiet()  # blocks are ready once they are checksummed
                before = traffic.load_bytes
                loading = engine.add(KEPT_TEXT, wants_load=True)
                engine.settle(forward, sampler, READY_S)
                loaded = traffic.load_bytes - before
                if loaded >= prompt_bytes or time.monotonic() > until:
                    break
            report.check("a stored prompt is loaded", loaded >= prompt_bytes, vars(traffic))
            report.check("its load has ended", loading.state == "ended", loading.state)
            phases(report, engine, forward, sampler)
            engine.settle(forward, sampler, READY_S)
            report.check("no page is held", engine.pool.held == 0, engine.pool.held)


if __name__ == "__main__":
    run_part(measure)
