"""The one error table: complete, and with the same names in both directions."""

from __future__ import annotations

import grpc
import pytest

from kvhearth.errors import STATUS, Code, KVHearthError, Reason, reason_of


def test_every_reason_has_a_status_and_every_status_a_reason() -> None:
    assert set(STATUS) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_a_stable_word(reason: Reason) -> None:
    assert reason.value == reason.name.lower()
    assert reason_of(reason.value) is reason
    assert len(reason.value) <= 48


@pytest.mark.parametrize("code", Code)
def test_codes_are_grpcs(code: Code) -> None:
    number, _ = grpc.StatusCode[code.name].value
    assert number == code.value


@pytest.mark.parametrize("reason", Reason)
def test_http_and_grpc_agree_on_whose_fault_it_is(reason: Reason) -> None:
    status = STATUS[reason]
    assert status.http in {400, 401, 403, 404, 409, 500, 503, 504, 507}
    ours = {Code.INTERNAL, Code.UNAVAILABLE, Code.DATA_LOSS, Code.DEADLINE_EXCEEDED}
    ours.add(Code.RESOURCE_EXHAUSTED)
    assert (status.http >= 500) == (status.code in ours)


def test_an_error_carries_its_reason() -> None:
    error = KVHearthError(Reason.NO_SPACE, "the segment is full; raise --memory", segment="3")
    assert error.status is STATUS[Reason.NO_SPACE]
    assert str(error) == "no_space: the segment is full; raise --memory"
    assert error.details == {"segment": "3"}


def test_a_newer_peers_word_is_internal() -> None:
    assert reason_of("word_of_the_future") is Reason.INTERNAL
