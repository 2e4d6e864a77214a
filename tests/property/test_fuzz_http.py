"""Requests derived from the daemon's OpenAPI description, right and wrong.

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
from hypothesis import given
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from support.daemon import Daemon, running_daemon
from support.fuzz import fuzz
from support.http_door import ANY_PORT, address_of, ask
from support.raw_door import RawSession, end_well, raw_contract

from kvhearth.errors import STATUS, Reason
from kvhearth_lab.harness import HUNG_S

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
    """A daemon, a namespace that may be harmed, and the description."""

    daemon: Daemon
    victim: str
    schema: Any


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    victim = raw_contract(model="victim").to_json()
    with running_daemon(arena=False, http=ANY_PORT) as daemon:
        with RawSession(daemon, contract=victim) as session:
            session.store(4)
            described = ask(daemon, "/openapi.json").json
            assert described == DESCRIBED, "what the daemon says of itself is what is checked in"
            schema = schemathesis.openapi.from_dict(described)
            # The history, and statistics twice; more of them come a second apart.
            schema.config.max_stream_events = 3
            yield Place(daemon, session.welcome["namespace"], schema)
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


def refusals_by_reason(daemon: Daemon) -> Counter[Reason]:
    """Return how often the daemon has refused something, by reason."""
    counters = daemon.counters()
    return Counter({reason: counters.get(f"refusals{{{reason}}}", 0) for reason in Reason})


@pytest.mark.parametrize("label", OPERATIONS)
def test_requests_of_the_description(place: Place, label: str) -> None:
    daemon, (method, path) = place.daemon, label.split(" ")
    operation = place.schema[path][method]
    host, port = address_of(daemon)
    token = (daemon.socket_dir / "admin.token").read_text()
    cases = st.one_of(operation.as_strategy(POSITIVE), operation.as_strategy(NEGATIVE))
    refused: Counter[Reason] = Counter()

    @fuzz(10)
    @given(case=cases, admitted=st.booleans(), known=st.booleans())
    def send(case: Any, admitted: bool, known: bool) -> None:
        if known and "ns" in (case.path_parameters or {}):
            case.path_parameters["ns"] = place.victim
        headers = {"Authorization": f"Bearer {token}"} if admitted and label != DRAIN else {}
        base_url = f"http://{host}:{port}"
        response = case.call(base_url=base_url, session=line, headers=headers, timeout=HUNG_S)
        case.validate_response(response, checks=CHECKS)
        reason = judge(response)
        if reason is not None:
            refused[reason] += 1

    before = refusals_by_reason(daemon)
    with requests.Session() as line:
        line.trust_env = False
        send()
    assert refusals_by_reason(daemon) - before == refused
    daemon.stats(check_books=True)


def test_methods_and_paths_that_are_not_described(place: Place) -> None:
    for described, methods in DESCRIBED["paths"].items():
        path = described.replace("{ns}", place.victim)
        has = {method.upper() for method in methods}
        for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "TRACE"} - has:
            answer = ask(place.daemon, path, method, admin=True)
            assert (answer.status, answer.json["reason"]) == (405, "bad_message"), (method, path)
            assert answer.headers["allow"] == ", ".join(sorted(has))
        if path != "/":
            answer = ask(place.daemon, f"{path}/", next(iter(has)), admin=True)
            assert (answer.status, answer.json["reason"]) == (404, "no_such_path"), path
