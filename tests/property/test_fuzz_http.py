"""Requests derived from the daemon's OpenAPI description, right and wrong, beside a good engine.

The description must know each answer; each rejection is counted, and is a problem document with a
reason of the error table.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from support.daemon import Daemon, stopped_daemon
from support.fuzz import depths, fuzz, refusals_by_reason, unharmed
from support.http_door import ANY_PORT, address_of, ask, scraped
from support.raw_door import PAGE_BYTES, RawSession, end_well, raw_contract

from kvhearth.errors import STATUS, Reason
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of

DESCRIBED = json.loads((Path(__file__).parents[1] / "golden" / "openapi.json").read_text())
OPERATIONS = sorted(
    f"{method.upper()} {path}" for path, item in DESCRIBED["paths"].items() for method in item
)
DRAIN = "POST /v1/admin:drain"
CHECKS: list[Any] = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.use_after_free,
]
POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@dataclass(frozen=True)
class Place:
    """A daemon, a good engine at work in it, and a namespace that may be harmed."""

    daemon: Daemon
    neighbour: Engine
    victim: str
    schema: Any


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    victim = raw_contract(model="victim").to_json()
    with stopped_daemon(arena=False, http=ANY_PORT) as daemon:
        daemon.fresh_s = 0.02  # each test scrapes twice
        daemon.start()
        with (
            engine_of(daemon.url(), contract_of(PAGE_BYTES), "neighbour") as engine,
            RawSession(daemon, contract=victim) as session,
        ):
            session.store(4)
            described = ask(daemon, "/openapi.json").json
            assert described == DESCRIBED, "what the daemon says of itself is what is checked in"
            schema = schemathesis.openapi.from_dict(described)
            # The history, and statistics twice; more of them come a second apart.
            schema.config.max_stream_events = 3
            yield Place(daemon, engine, session.welcome["namespace"], schema)
        end_well(daemon)


def judge(response: Any) -> Reason | None:
    """Returns a rejection's reason, None for success; a rejection must be a problem document."""
    if 200 <= response.status_code < 300:
        return None
    assert response.headers["content-type"] == ["application/problem+json"], response.text
    found = response.json()
    reason = Reason(found["reason"])
    assert found["type"] == f"urn:kvhearth:reason:{reason}"
    assert found["status"] == response.status_code
    assert found["title"]
    assert 0 < len(found["detail"]) <= 1024
    if reason is not Reason.BAD_MESSAGE:
        assert response.status_code == STATUS[reason].http
    return reason


def operation_of(schema: Any, label: str) -> Any:
    method, path = label.split(" ")
    return schema[path][method]


def url_of(daemon: Daemon) -> str:
    host, port = address_of(daemon)
    return f"http://{host}:{port}"


def refusals_total(daemon: Daemon) -> float:
    """Returns the sum of the metric over its reasons."""
    lines = scraped(daemon).splitlines()
    found = [one for one in lines if one.startswith("kvhearth_refusals_total{")]
    return sum(float(one.rpartition(" ")[2]) for one in found)


@pytest.mark.parametrize("label", OPERATIONS)
@depths(10)
def test_requests_of_the_description(place: Place, label: str, examples: int) -> None:
    daemon = place.daemon
    operation, base_url = operation_of(place.schema, label), url_of(daemon)
    token = (daemon.socket_dir / "admin.token").read_text()
    cases = st.one_of(operation.as_strategy(POSITIVE), operation.as_strategy(NEGATIVE))
    refused: Counter[Reason] = Counter()

    @settings(fuzz, max_examples=examples)
    @given(case=cases, admitted=st.booleans(), known=st.booleans())
    def send(case: Any, admitted: bool, known: bool) -> None:
        if known and "ns" in (case.path_parameters or {}):
            case.path_parameters["ns"] = place.victim
        # A draining daemon accepts no stores: the neighbour would be right to complain.
        headers = {"Authorization": f"Bearer {token}"} if admitted and label != DRAIN else {}
        response = case.call(base_url=base_url, session=line, headers=headers, timeout=20)
        case.validate_response(response, checks=CHECKS)
        reason = judge(response)
        if reason is not None:
            refused[reason] += 1

    before, metric = refusals_by_reason(daemon), refusals_total(daemon)
    with unharmed(daemon, place.neighbour), requests.Session() as line:
        line.trust_env = False
        send()
    after = refusals_by_reason(daemon)
    assert {reason: after[reason] - before[reason] for reason in Reason if refused[reason]} == dict(
        refused
    )
    assert refusals_total(daemon) - metric == refused.total()


@pytest.mark.parametrize("path", sorted(DESCRIBED["paths"]))
def test_methods_that_a_path_does_not_have(place: Place, path: str) -> None:
    has = {method.upper() for method in DESCRIBED["paths"][path]}
    before = refusals_total(place.daemon)
    others = [one for one in ("GET", "POST", "PUT", "DELETE", "PATCH", "TRACE") if one not in has]
    for method in others:
        answer = ask(place.daemon, path.replace("{ns}", place.victim), method, admin=True)
        assert (answer.status, answer.json["reason"]) == (405, "bad_message")
        assert answer.headers["allow"] == ", ".join(sorted(has))
    assert refusals_total(place.daemon) - before == len(others)


@pytest.mark.parametrize("path", sorted(DESCRIBED["paths"]))
def test_a_slash_at_the_end_is_another_path(place: Place, path: str) -> None:
    method = next(iter(DESCRIBED["paths"][path])).upper()
    answer = ask(place.daemon, path.replace("{ns}", place.victim) + "/", method, admin=True)
    assert (answer.status, answer.json["reason"]) == (404, "no_such_path")
