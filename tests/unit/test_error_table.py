"""The one error table: complete, the same in both directions, and over every transport."""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from support.cases import cases

from kvhearth.errors import STATUS, Code, KVHearthError, Reason, reason_of
from kvhearth.proto.v1 import types_pb2
from kvhearth.wire.frames import (
    BareError,
    decode_status,
    encode_status,
    error_from_code,
    rebuild_error,
)


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


@cases("reason", Reason)
def test_every_reason_survives_the_wire(reason: Reason) -> None:
    back = decode_status(encode_status(KVHearthError(reason, "say what to do", field="groups[0]")))
    assert (back.reason, back.message) == (reason, "say what to do")
    assert back.details == {"field": "groups[0]"}


def test_long_texts_stay_below_the_bound_of_metadata() -> None:
    details = {f"field{index}": "x" * 9999 for index in range(99)}
    assert len(encode_status(KVHearthError(Reason.INTERNAL, "y" * 99999, **details))) < 6000


def test_a_newer_peers_reason_is_kept_as_a_detail() -> None:
    error = rebuild_error(
        "of_tomorrow", "m", {"reason": "a", "message": "b", "self": "c", "d": "e"}
    )
    assert error.reason is Reason.INTERNAL
    assert error.details == {"d": "e", "word": "of_tomorrow"}


def test_foreign_details_fall_back_to_the_code() -> None:
    status = types_pb2.RpcStatus(code=int(Code.UNAVAILABLE), message="m")
    status.details.append(AnyMessage(type_url="type.googleapis.com/google.rpc.RetryInfo"))
    assert decode_status(status.SerializeToString()).reason is Reason.DAEMON_AWAY


def test_garbage_is_internal() -> None:
    assert decode_status(b"\xff\xff\xff").reason is Reason.INTERNAL


@cases(
    ("code", "reason"),
    [
        (Code.UNAVAILABLE, Reason.DAEMON_AWAY),
        (Code.DEADLINE_EXCEEDED, Reason.DEADLINE),
        (Code.UNAUTHENTICATED, Reason.UNKNOWN_TOKEN),
        (Code.INTERNAL, Reason.INTERNAL),
        (1, Reason.CLOSED),
    ],
)
def test_bare_codes(code: int, reason: Reason) -> None:
    assert error_from_code(code, "m").reason is reason


def test_too_many_calls_are_not_too_large_a_message() -> None:
    for text, reason in (
        ("Concurrent RPC limit exceeded!", Reason.DAEMON_AWAY),
        ("CLIENT: Sent message larger than max (9 vs. 4)", Reason.BAD_MESSAGE),
    ):
        error = error_from_code(Code.RESOURCE_EXHAUSTED, text)
        assert (error.reason, isinstance(error, BareError)) == (reason, True)
