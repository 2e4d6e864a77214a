"""Which calls get a span, and what it costs the others."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth import tracing
from kvhearth.errors import KVHearthError
from kvhearth.tracing import NO_SPAN, OFF, Tracer, open_tracer, parsed, root_share, wanted

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def tracer_to(exporter: InMemorySpanExporter, share: float = 1.0) -> Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracer(provider, share)


def test_contexts_that_a_caller_may_pass() -> None:
    assert parsed(SAMPLED) == (int(TRACE, 16), int(SPAN, 16), 1)
    wrong = [
        "",
        "x",
        SAMPLED[:-1],
        SAMPLED.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        SAMPLED + "\n",
    ]
    assert [text for text in wrong if parsed(text) is not None] == []


@given(st.text(max_size=80))
def test_any_text_is_a_context_or_not(text: str) -> None:
    found = parsed(text)
    assert found is None or len(text) == len(SAMPLED)


def test_a_span_follows_its_caller_and_passes_itself_on(exporter: InMemorySpanExporter) -> None:
    tracer = tracer_to(exporter, share=0.0)
    span = tracer.begin("one", SAMPLED)
    assert span.on
    inner = tracer.begin("two", span.traceparent)
    inner.end("no_space", keys=3)
    inner.end(keys=4)
    span.end()
    two, one = exporter.get_finished_spans()
    assert (one.name, two.name) == ("one", "two")
    assert one.parent is not None
    assert (f"{one.parent.trace_id:032x}", f"{one.parent.span_id:016x}") == (TRACE, SPAN)
    assert two.parent is not None
    assert two.parent.span_id == one.context.span_id
    assert dict(two.attributes or {}) == {"kvhearth.keys": 3, "kvhearth.reason": "no_space"}


def test_the_callers_decision_holds(exporter: InMemorySpanExporter) -> None:
    tracer = tracer_to(exporter)
    without = SAMPLED[:-1] + "0"
    span = tracer.begin("one", without)
    assert not span.on
    # The daemon must not begin a trace of its own for it.
    assert span.traceparent == without
    assert tracer_to(exporter, share=0.0).begin("one") is NO_SPAN
    assert exporter.get_finished_spans() == ()


def test_a_wrong_context_is_none(exporter: InMemorySpanExporter) -> None:
    tracer_to(exporter).begin("one", "nonsense").end()
    assert exporter.get_finished_spans()[0].parent is None


def test_spans_of_a_second_are_bounded(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "SPANS_PER_S_MAX", 3)
    monkeypatch.setattr(tracing.time, "monotonic", lambda: 7.5)
    tracer = tracer_to(exporter)
    for _ in range(5):
        tracer.begin("one", SAMPLED).end()
    assert len(exporter.get_finished_spans()) == 3
    assert tracer.dropped == 2


def test_without_traces_a_callers_context_is_passed_on() -> None:
    assert OFF.begin("one") is NO_SPAN
    span = OFF.begin("one", SAMPLED)
    assert (span.on, span.traceparent) == (False, SAMPLED)
    assert OFF.current() == ""
    span.end("x", keys=1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_the_standard_variables_ask_for_traces(environment: dict[str, str], expected: bool) -> None:
    assert wanted(environment) is expected


@pytest.mark.parametrize(
    ("name", "argument", "expected"),
    [
        ("", "", 0.25),
        ("always_on", "", 1.0),
        ("parentbased_always_off", "", 0.0),
        ("parentbased_traceidratio", "0.5", 0.5),
        ("traceidratio", "7", 1.0),
        ("traceidratio", "many", 0.25),
        ("someone_elses", "", 0.25),
    ],
)
def test_the_standard_sampler_prevails(name: str, argument: str, expected: float) -> None:
    environment = {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument}
    assert root_share(0.25, environment) == expected


def test_an_unknown_protocol_is_refused_with_what_to_do() -> None:
    with pytest.raises(KVHearthError, match=r"http/protobuf or grpc, not 'http/json'"):
        open_tracer("x", environment={"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def run(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=variables,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


CLIENT = """
    import sys, types
    import kvhearth, kvhearth.cache
    from kvhearth_lab.harness.engine import contract_of
    cache = kvhearth.open("kvhearth+unix:///nowhere", contract_of(65536), wait_s=0)
    cache.lookup([b"x"])
    cache.close()
    print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""


def test_nothing_is_imported_unless_asked_for() -> None:
    assert "[]" in run(CLIENT).splitlines()


def test_a_client_without_the_library_says_so_and_works() -> None:
    code = 'import sys\nsys.modules["opentelemetry"] = None\n' + textwrap.dedent(CLIENT)
    said = run(code, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert "tracing.off" in said
    assert "pip install 'kvhearth[otel]'" in said
