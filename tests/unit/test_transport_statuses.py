"""Statuses of every transport become the error table's reasons, with their details."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from support.fake_daemon import running, small_contract

from kvhearth.errors import Code, KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1 import types_pb2
from kvhearth.transports.base import HEARTBEAT, LOOKUP, CacheTransport
from kvhearth.transports.frames import over_unix
from kvhearth.transports.grpc_unix import GrpcUnixTransport
from kvhearth.wire.frames import (
    BareError,
    decode_status,
    encode_status,
    error_from_code,
    rebuild_error,
)


@pytest.mark.parametrize("reason", Reason)
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


@pytest.mark.parametrize(
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


MakeTransport = Callable[[Path, int], CacheTransport]


def _grpc(folder: Path, message_bytes_max: int) -> CacheTransport:
    return GrpcUnixTransport(f"unix:{folder}/grpc.sock", "t", message_bytes_max)


def _frames(folder: Path, message_bytes_max: int) -> CacheTransport:
    return over_unix(f"{folder}/calls.sock", "t", message_bytes_max)


each_transport = pytest.mark.parametrize("make", [_grpc, _frames])


@each_transport
def test_the_transport_tells_refusals_silence_and_absence_apart(
    tmp_path: Path, make: MakeTransport
) -> None:
    transport = make(tmp_path, 1 << 20)
    with running(tmp_path, small_contract()) as daemon:
        with pytest.raises(KVHearthError) as refusal:
            transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
        assert refusal.value.reason is Reason.UNKNOWN_TOKEN
        daemon.tokens.append("t")
        assert transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0).boot_id == daemon.boot_id
        daemon.refuse_next("Lookup", Reason.STALE_EPOCH)
        with pytest.raises(KVHearthError) as refusal:
            transport.call(LOOKUP, pb.LookupRequest(), 5.0)
        assert refusal.value.reason is Reason.STALE_EPOCH
        assert refusal.value.details == {"field": "x"}
        daemon.slow_next("Lookup", 0.5)
        with pytest.raises(KVHearthError) as refusal:
            transport.call(LOOKUP, pb.LookupRequest(), 0.05)
        assert refusal.value.reason is Reason.DEADLINE
    with pytest.raises(KVHearthError) as refusal:
        transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
    assert refusal.value.reason is Reason.DAEMON_AWAY
    transport.close()
    transport.close()
    with pytest.raises(KVHearthError) as refusal:
        transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
    assert refusal.value.reason is Reason.CLOSED


@each_transport
def test_a_message_beyond_the_bound_is_refused(tmp_path: Path, make: MakeTransport) -> None:
    transport = make(tmp_path, 64)
    with running(tmp_path, small_contract()) as daemon:
        daemon.tokens.append("t")
        request = pb.LookupRequest(groups=[types_pb2.GroupKeys(group=0, keys=b"x" * 1000)])
        with pytest.raises(KVHearthError) as refusal:
            transport.call(LOOKUP, request, 5.0)
        assert refusal.value.reason is Reason.BAD_MESSAGE
    transport.close()


@each_transport
def test_an_answer_stays_as_it_came(tmp_path: Path, make: MakeTransport) -> None:
    """The next answer on the same connection must not change it, whatever its size."""
    transport = make(tmp_path, 1 << 20)
    sizes = [0, 1, 5000, 65_500, 65_536, 200_000, 3]
    with running(tmp_path, small_contract()) as daemon:
        daemon.tokens.append("t")
        answers = []
        for number, size in enumerate(sizes):
            group = pb.GroupPresence(group=number, extents=bytes([number]) * size)
            reply = pb.LookupResponse(groups=[group], lease_short=f"{number}" * 9)
            daemon.answer("Lookup", lambda _, reply=reply: reply)
            answers.append(transport.call(LOOKUP, pb.LookupRequest(), 5.0))
        for number, (size, answer) in enumerate(zip(sizes, answers, strict=True)):
            assert answer.lease_short == f"{number}" * 9
            assert answer.groups[0].extents == bytes([number]) * size
    transport.close()


def test_frames_are_warm_with_an_idle_connection_only(tmp_path: Path) -> None:
    frames, grpc = _frames(tmp_path, 1 << 20), _grpc(tmp_path, 1 << 20)
    assert not frames.has_connection()
    with running(tmp_path, small_contract()) as daemon:
        daemon.tokens.append("t")
        for transport in (frames, grpc):
            transport.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
        assert (frames.has_connection(), grpc.has_connection()) == (True, False)
    with pytest.raises(KVHearthError) as refusal:
        frames.call(HEARTBEAT, pb.HeartbeatRequest(), 5.0)
    assert refusal.value.reason is Reason.DAEMON_AWAY
    assert not frames.has_connection()
    for transport in (frames, grpc):
        transport.close()
