"""Statuses of every transport become the error table's reasons, with their details."""

from __future__ import annotations

from google.protobuf.any_pb2 import Any as AnyMessage
from support.cases import cases

from kvhearth.errors import Code, KVHearthError, Reason
from kvhearth.proto.v1 import types_pb2
from kvhearth.wire.frames import (
    BareError,
    decode_status,
    encode_status,
    error_from_code,
    rebuild_error,
)


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
