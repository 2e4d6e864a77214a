"""Spans for OpenTelemetry: lookups, loads, stores, promotions, in the engine's trace if it has one.

Nothing of OpenTelemetry is imported unless a setting or its standard variables ask for traces.
Whether a call is traced is decided before anything is made for it.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.version import __version__

SPANS_PER_S_MAX = 500
"""Spans begun in a second at most: a span costs some 30 us of processor time."""
QUEUE_SPANS_MAX = 2048
"""Ended spans that wait for the collector; more are dropped."""
ROOT_SHARE = 0.01
"""Part of the calls without a trace of the engine's that begin one, by default."""
TRACEPARENT = "traceparent"
_EXPORT_TIMEOUT_S = 5
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
_FORM = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


def parsed(traceparent: str) -> tuple[int, int, int] | None:
    """Return trace, span and flags of a W3C ``traceparent``; None if it is not valid."""
    found = _FORM.fullmatch(traceparent)
    if found is None or traceparent.startswith("ff"):
        return None
    trace, span, flags = (int(part, 16) for part in found.groups())
    return (trace, span, flags) if trace and span else None


class Span:
    """A span that was begun, or none: ``end`` then does nothing.

    Attributes:
        traceparent: what a call passes on, so that the daemon's span follows this one; or empty.
        on: whether it is recorded.
    """

    __slots__ = ("_span", "on", "traceparent")

    def __init__(self, traceparent: str = "", span: Any = None) -> None:
        self.traceparent = traceparent
        self._span = span
        self.on = span is not None

    def end(self, reason: object = "", **attributes: str | int | float | bool) -> None:
        """End the span. Idempotent.

        Args:
            reason: why the cache could not serve, or empty.
            attributes: facts, which get the prefix ``kvhearth.``.
        """
        span, self._span = self._span, None
        if span is None:
            return
        for name, value in attributes.items():
            span.set_attribute(f"kvhearth.{name}", value)
        if reason:
            span.set_attribute("kvhearth.reason", str(reason))
        span.end()


NO_SPAN = Span()


class Tracer:
    """Begins spans of one process. Thread-safe.

    Args:
        provider: OpenTelemetry's ``TracerProvider``; None: no spans.
        root_share: part of the calls without a trace of the engine's that begin one, 0 to 1.
    """

    def __init__(self, provider: Any = None, root_share: float = ROOT_SHARE) -> None:
        self.on = provider is not None
        """Whether any call is traced."""
        self._provider = provider
        self._root_share = root_share
        self._second = self._begun = 0
        self.dropped = 0
        """Spans that ``SPANS_PER_S_MAX`` left out."""
        if self.on:
            self._api = importlib.import_module("opentelemetry.trace")
            self._context = importlib.import_module("opentelemetry.context").Context
            self._tracer = provider.get_tracer("kvhearth", __version__)

    def begin(self, name: str, traceparent: str = "", start_ns: int | None = None) -> Span:
        """Begin a span if this call is traced.

        Args:
            name: the operation, without anything that varies.
            traceparent: the caller's span, or empty.
            start_ns: when it began, nanoseconds of ``time.time_ns``; None: now.
        """
        if not self.on:
            return Span(traceparent) if traceparent else NO_SPAN
        above = parsed(traceparent) if traceparent else None
        if not self._samples(above):
            return Span(traceparent) if above is not None else NO_SPAN
        context = self._context()
        if above is not None:
            trace, span, flags = above
            api = self._api
            parent = api.SpanContext(trace, span, is_remote=True, trace_flags=api.TraceFlags(flags))
            context = api.set_span_in_context(api.NonRecordingSpan(parent), context)
        begun = self._tracer.start_span(name, context=context, start_time=start_ns)
        own = begun.get_span_context()
        passed = f"00-{own.trace_id:032x}-{own.span_id:016x}-{int(own.trace_flags):02x}"
        return Span(passed, begun if begun.is_recording() else None)

    def _samples(self, above: tuple[int, int, int] | None) -> bool:
        """Whether to trace a call; the caller's own decision holds if it has made one."""
        if above is not None:
            if not above[2] & _SAMPLED:
                return False
        elif random.random() >= self._root_share:
            return False
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._begun = second, 0
        if self._begun >= SPANS_PER_S_MAX:
            self.dropped += 1
            return False
        self._begun += 1
        return True

    def current(self) -> str:
        """Return the ``traceparent`` of the calling thread's own span; empty if there is none."""
        if not self.on:
            return ""
        own = self._api.get_current_span().get_span_context()
        if not own.is_valid:
            return ""
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-{int(own.trace_flags):02x}"

    def close(self) -> None:
        """Send what waits, within a deadline; only of a provider made by ``open_tracer``."""
        if self.on and getattr(self._provider, "kvhearth_own", False):
            self.on = False
            self._provider.shutdown()


OFF = Tracer()


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the standard variables ask for traces: an endpoint, or the exporter ``otlp``."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if exporters := environment.get("OTEL_TRACES_EXPORTER", "").strip():
        return "otlp" in exporters.replace(" ", "").split(",")
    return any(environment.get(name) for name in _ENDPOINTS)


def root_share(default: float, environment: Mapping[str, str] = os.environ) -> float:
    """Return the part of calls without a caller's trace that ``OTEL_TRACES_SAMPLER`` asks for."""
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip().removeprefix("parentbased_")
    if name == "traceidratio":
        try:
            return min(max(float(environment.get("OTEL_TRACES_SAMPLER_ARG") or 1), 0.0), 1.0)
        except ValueError:
            return default
    return {"always_on": 1.0, "always_off": 0.0}.get(name, default)


def open_tracer(
    service: str,
    endpoint: str = "",
    share: float = ROOT_SHARE,
    environment: Mapping[str, str] = os.environ,
) -> Tracer:
    """Return a tracer that sends to a collector.

    Where the process has a provider of OpenTelemetry's, as an engine that traces has, that one gets
    the spans.

    Args:
        service: name of this process's part, unless ``OTEL_SERVICE_NAME`` gives another.
        endpoint: URL of a collector that takes OTLP by HTTP; "": as the standard variables say.
        share: see ``Tracer``; ``OTEL_TRACES_SAMPLER`` prevails.

    Raises:
        KVHearthError: ``config_invalid`` if OpenTelemetry is not installed or the protocol is not
            known.
    """
    share = root_share(share, environment)
    try:
        api = importlib.import_module("opentelemetry.trace")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        theirs = api.get_tracer_provider()
        if isinstance(theirs, sdk.TracerProvider) and not endpoint:
            return Tracer(theirs, share)
        return Tracer(_own_provider(sdk, service, endpoint, environment), share)
    except ImportError as error:
        raise KVHearthError(
            Reason.CONFIG_INVALID,
            f"traces need OpenTelemetry ({error.name} is missing): pip install 'kvhearth[otel]'",
        ) from None


def _own_provider(sdk: Any, service: str, endpoint: str, environment: Mapping[str, str]) -> Any:
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    resources = importlib.import_module("opentelemetry.sdk.resources")
    sampling = importlib.import_module("opentelemetry.sdk.trace.sampling")
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "")
    protocol = "http/protobuf" if endpoint or not protocol else protocol
    if protocol not in _EXPORTERS:
        known = " or ".join(_EXPORTERS)
        raise KVHearthError(
            Reason.CONFIG_INVALID, f"traces go by {known}, not {protocol!r} ({_PROTOCOLS[1]})"
        )
    exporter = importlib.import_module(_EXPORTERS[protocol])
    options = {"endpoint": endpoint} if endpoint else {}
    # The processes of one host are told apart by the standard attribute.
    about = {"service.version": __version__, "process.pid": os.getpid()}
    if not environment.get("OTEL_SERVICE_NAME"):
        about["service.name"] = service
    provider = sdk.TracerProvider(
        sampler=sampling.ALWAYS_ON,  # it was decided before
        resource=resources.Resource.create(about),
        shutdown_on_exit=False,  # a collector that is away must not hold up an engine's end
    )
    provider.add_span_processor(
        export.BatchSpanProcessor(
            exporter.OTLPSpanExporter(timeout=_EXPORT_TIMEOUT_S, **options),
            max_queue_size=QUEUE_SPANS_MAX,
        )
    )
    provider.kvhearth_own = True
    return provider


_shared: list[Tracer] = []
_lock = threading.Lock()


def client_tracer(environment: Mapping[str, str] = os.environ) -> Tracer:
    """Return the tracer of this process's clients, one for all of them.

    Raises:
        KVHearthError: see ``open_tracer``.
    """
    with _lock:
        if not _shared:
            _shared.append(
                open_tracer("kvhearth-client", environment=environment)
                if wanted(environment)
                else OFF
            )
        return _shared[0]


def use(tracer: Tracer) -> None:
    """Give the clients that are made from now on this tracer, whatever the environment says."""
    with _lock:
        _shared[:] = [tracer]
