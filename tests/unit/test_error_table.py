"""The one error table: complete, and with the same names in both directions."""

from __future__ import annotations

import grpc

from kvhearth.errors import STATUS, Code, KVHearthError, Reason, reason_of


def test_every_reason_has_a_status_and_every_status_a_reason() -> None:
    assert set(STATUS) == set(Reason)


def test_a_reason_is_a_stable_word() -> None:
    assert [one for one in Reason if one.value != one.name.lower() or len(one.value) > 48] == []
    assert [one for one in Reason if reason_of(one.value) is not one] == []
    assert reason_of("word_of_the_future") is Reason.INTERNAL


def test_codes_are_grpcs() -> None:
    assert {code.name: code.value for code in Code} == {
        code.name: grpc.StatusCode[code.name].value[0] for code in Code
    }


def test_http_and_grpc_agree_on_whose_fault_it_is() -> None:
    ours = {Code.INTERNAL, Code.UNAVAILABLE, Code.DATA_LOSS, Code.DEADLINE_EXCEEDED}
    ours.add(Code.RESOURCE_EXHAUSTED)
    assert [r for r, one in STATUS.items() if (one.http >= 500) != (one.code in ours)] == []
    assert {one.http for one in STATUS.values()} <= {400, 401, 403, 404, 409, 500, 503, 504, 507}


def test_an_error_carries_its_reason() -> None:
    error = KVHearthError(Reason.NO_SPACE, "the segment is full; raise --memory", segment="3")
    assert error.status is STATUS[Reason.NO_SPACE]
    assert str(error) == "no_space: the segment is full; raise --memory"
    assert error.details == {"segment": "3"}
