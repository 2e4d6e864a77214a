"""Spans of a client and its daemon, in the trace of the engine's request, at a real collector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.cached import DONE_S, cached_engine
from support.collector import Collector, Received, collector
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.raw_door import new_keys
from support.scripted_engine import BLOCK_TOKENS, ScriptedEngine, scripted_engine

from kvhearth import tracing
from kvhearth.errors import KVHearthError
from kvhearth.tracing import OFF, Tracer

TRACE = "0af7651916cd43dd8448eb211c80319c"
REQUEST = f"00-{TRACE}-b7ad6b7169203331-01"
MORE = 600
"""More blocks than the memory holds."""


@pytest.fixture(scope="module")
def sink() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def daemon(sink: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with an SSD tier that traces what comes with a trace, and nothing else."""
    folder = tmp_path_factory.mktemp("ssd")
    with stopped_daemon(
        arena=False,
        ssd_dirs=[f"{folder}/ssd=512MiB"],
        ssd_segment_bytes="2MiB",
        traces_endpoint=sink.endpoint,
        traces_sample=0,
    ) as found:
        found.environment = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
        found.start()
        yield found


class Spans:
    """A tracer that keeps its spans."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the ended spans of a name."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def spans() -> Iterator[Spans]:
    """Clients that the test makes trace what has a trace, into memory."""
    kept = Spans()
    tracing.use(Tracer(kept.provider, root_share=0.0))
    yield kept
    tracing.use(OFF)


def ids(span: ReadableSpan) -> tuple[str, str]:
    """Return trace and span, in hexadecimal."""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def below(sink: Collector, name: str, span: ReadableSpan) -> list[Received]:
    """Return the daemon's spans of a name that follow one of a client's."""
    return [one for one in sink.spans(name) if (one.trace, one.parent) == ids(span)]


def test_the_simple_api_is_in_its_callers_trace(
    daemon: Daemon, sink: Collector, spans: Spans
) -> None:
    keys = new_keys(8)
    with cached_engine(daemon.url()) as engine:
        with spans.provider.get_tracer("app").start_as_current_span("request") as request:
            assert engine.store(keys).stored == 8
            assert engine.load(keys).usable_blocks == 8
            missing = engine.cache.lookup(new_keys(3))
        assert engine.store(new_keys(1)).stored == 1  # in no trace: no span
    assert missing.hit_blocks == 0
    (store,), (load,) = spans.named("kvhearth.store"), spans.named("kvhearth.load")
    about = dict(store.attributes or {})
    assert (about["kvhearth.blocks"], about["kvhearth.bytes"]) == (8, 8 * 65536)
    for span in (store, load):
        assert span.parent is not None
        assert span.parent.span_id == request.get_span_context().span_id
    inside, asked = spans.named("kvhearth.lookup")
    assert inside.parent is not None
    assert inside.parent.span_id == load.context.span_id
    assert dict(asked.attributes or {})["kvhearth.hit_tokens"] == 0
    stored = until(lambda: below(sink, "kvhearth.daemon.store", store), "it arrives", DONE_S)
    facts = stored[0].attributes
    assert (facts["kvhearth.keys"], facts["kvhearth.stored"]) == (8, 8)
    assert stored[0].resource["service.name"] == "kvhearth"
    if dict(asked.attributes or {})["kvhearth.answered_by"] == "daemon":
        (why,) = until(lambda: below(sink, "kvhearth.daemon.lookup", asked), "it arrives", DONE_S)
        assert why.attributes["kvhearth.keys_nowhere"] == 3


def test_a_promotion_is_in_the_trace_of_its_load(
    daemon: Daemon, sink: Collector, spans: Spans
) -> None:
    keys = new_keys(4)
    with cached_engine(daemon.url()) as engine:
        assert engine.store(keys).stored == 4
        for _ in range(8):
            for _ in range(0, MORE, 100):
                before = daemon.counters()["demoted_blocks"]
                stored = engine.store(new_keys(100)).stored
                until(lambda: daemon.counters()["demoted_blocks"] >= before + stored, "saved")  # noqa: B023
            if not engine.client.lookup({0: keys}, lease=False).groups[0].ready.any():
                break
        with spans.provider.get_tracer("app").start_as_current_span("request") as request:
            assert engine.load(keys, wait_s=10.0).usable_blocks == 4
    trace = f"{request.get_span_context().trace_id:032x}"

    def promoted() -> int:
        found = [one for one in sink.spans("kvhearth.daemon.promotion") if one.trace == trace]
        return sum(one.attributes["kvhearth.promoted"] for one in found)

    until(lambda: promoted() == 4, "the promotions arrive", DONE_S)
    first = next(one for one in sink.spans("kvhearth.daemon.promotion") if one.trace == trace)
    lookups = {ids(span)[1] for span in spans.named("kvhearth.lookup")}
    assert first.parent in lookups
    assert first.seconds > 0


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[ScriptedEngine]:
    with scripted_engine(daemon.url(), engine_id="traced") as found:
        yield found


def test_a_connectors_request_passes_its_trace(
    daemon: Daemon, sink: Collector, spans: Spans, engine: ScriptedEngine
) -> None:
    for name in ("a", "b"):
        request = engine.add(name, "prompt", 8 * BLOCK_TOKENS + 1, traceparent=REQUEST)
        if engine.admit(request):
            assert engine.wait_loaded(request)
        engine.prefill(request)
        until(lambda: engine.step({}) and not engine.half.has_work, "stores end")
        assert engine.half._stores.drain(DONE_S)
        engine.finish(request)
    (load,) = spans.named("kvhearth.load")
    about = dict(load.attributes or {})
    assert about["kvhearth.tokens"] == about["kvhearth.from_memory_tokens"] > 0
    for name in ("kvhearth.lookup", "kvhearth.load", "kvhearth.store"):
        found = spans.named(name)
        assert found, name
        assert {ids(span)[0] for span in found} == {TRACE}
    (store,) = spans.named("kvhearth.store")
    until(lambda: below(sink, "kvhearth.daemon.store", store), "it arrives", DONE_S)


def test_a_daemon_follows_the_standard_variables(sink: Collector) -> None:
    with stopped_daemon(arena=False, command=True) as daemon:
        daemon.environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": sink.base,
            "OTEL_TRACES_SAMPLER": "always_on",
            "OTEL_SERVICE_NAME": "cache-of-rack-7",
        }
        daemon.start()
        with cached_engine(daemon.url()) as engine:
            assert engine.store(new_keys(2)).stored == 2
        assert daemon.terminate() == 0
    mine = [one for one in sink.spans() if one.resource["service.name"] == "cache-of-rack-7"]
    assert "kvhearth.daemon.store" in {one.name for one in mine}
    assert {one.parent for one in mine} == {""}


def test_a_collector_that_is_away_costs_no_answer() -> None:
    with (
        running_daemon(
            arena=False, traces_endpoint="http://127.0.0.1:9/v1/traces", traces_sample=1
        ) as daemon,
        cached_engine(daemon.url()) as engine,
    ):
        keys = new_keys(4)
        assert engine.store(keys).stored == 4
        assert engine.load(keys).usable_blocks == 4


def test_traces_without_the_library_keep_a_daemon_from_starting(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text(
        "raise ImportError(name='opentelemetry')"
    )
    with stopped_daemon(arena=False, command=True, traces_endpoint="http://127.0.0.1:9") as daemon:
        daemon.environment = {"PYTHONPATH": str(tmp_path)}
        with pytest.raises(KVHearthError, match=r"pip install 'kvhearth\[otel\]'"):
            daemon.start()
