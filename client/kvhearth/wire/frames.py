"""Calls on the wire: frames of the calls socket, stubs of gRPC, errors as ``google.rpc.Status``.

The calls socket carries a decision and its answer without gRPC's overhead. A frame is a header of 8
bytes, little-endian, and a body: ``u32`` bytes of the body, ``u16`` kind, ``u16`` number of the
call. A client's kind is ``OPEN`` (body: the session's token; the first frame of every connection)
or a method of ``METHODS`` (body: its request, protobuf). The daemon answers every frame in order
with kind ``DONE`` (body: the reply, protobuf) or ``REFUSED`` (body: a ``google.rpc.Status`` with
one ``google.rpc.ErrorInfo``) and the same number. A client has one call under way on a connection.

This module needs no gRPC: status messages are made of protobuf, and a stub gets its channel.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from kvhearth.errors import ERROR_DOMAIN, Code, KVHearthError, Reason, reason_of
from kvhearth.proto.v1 import cache_pb2, types_pb2

HEADER = struct.Struct("<IHH")
OPEN = 0
DONE = 0
REFUSED = 1
NUMBERS = 1 << 16
"""Modulus of call numbers."""

_SERVICE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"]
SERVICE: str = _SERVICE.full_name
METHODS: Mapping[str, int] = MappingProxyType(
    {method.name: 1 + method.index for method in _SERVICE.methods}
)
"""Kinds of requests, by the name of the call: its place in the schema, to which new calls are
appended. docs/protocol.md lists the numbers; none is ever given to another call.
"""

NAMES: Mapping[int, str] = MappingProxyType({number: name for name, number in METHODS.items()})


def encode(kind: int, number: int, body: bytes, body_bytes_max: int) -> bytes:
    """Encode one frame.

    Raises:
        KVHearthError: ``bad_message`` if the body is larger than ``body_bytes_max``.
    """
    check_size(len(body), body_bytes_max)
    return HEADER.pack(len(body), kind, number) + body


def check_size(size: int, body_bytes_max: int) -> None:
    """Check a body's size before memory is allocated for it.

    Raises:
        KVHearthError: ``bad_message`` if it is larger than ``body_bytes_max``.
    """
    if size > body_bytes_max:
        raise KVHearthError(
            Reason.BAD_MESSAGE,
            f"a message of {size} bytes, larger than the {body_bytes_max} allowed",
        )


class Stub:
    """Calls of a gRPC service, by name: ``stub.Stats(request, timeout=1.0)``.

    Args:
        channel: a ``grpc.Channel``.
        schema: generated module that has the service.
    """

    def __init__(self, channel: Any, schema: Any) -> None:
        (service,) = schema.DESCRIPTOR.services_by_name.values()
        for method in service.methods:
            call = channel.unary_unary(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key that carries the encoded status."""
TOKEN_KEY = "kvhearth-token"
"""Metadata key of a session's token, in gRPC calls of engines."""

ERROR_INFO_URL = "type.googleapis.com/google.rpc.ErrorInfo"

# Trailing metadata is bounded by 8 KiB at most peers; longer metadata would lose the whole answer.
_MESSAGE_CHARS_MAX = 1024
_DETAILS_MAX = 16
_DETAIL_CHARS_MAX = 192

_CANCELLED = 1
_BARE: Mapping[int, Reason] = {
    _CANCELLED: Reason.CLOSED,
    Code.DEADLINE_EXCEEDED: Reason.DEADLINE,
    Code.PERMISSION_DENIED: Reason.PEER_NOT_ALLOWED,
    # Too many calls at once; `error_from_code` distinguishes a message that is too large.
    Code.RESOURCE_EXHAUSTED: Reason.DAEMON_AWAY,
    Code.UNIMPLEMENTED: Reason.PROTOCOL_VERSION,
    Code.UNAVAILABLE: Reason.DAEMON_AWAY,
    Code.UNAUTHENTICATED: Reason.UNKNOWN_TOKEN,
}
"""Meaning of a status without our details: it comes from gRPC itself, not from the daemon."""


_TOO_LARGE = "larger than max"
"""Part of gRPC's texts, on either side, about a message beyond a bound."""


class BareError(KVHearthError):
    """A status that gRPC made: the daemon's own code said nothing about the call."""


def encode_status(error: KVHearthError) -> bytes:
    """Return the value of ``STATUS_DETAILS_KEY`` for ``error``; long texts are cut."""
    details = list(error.details.items())[:_DETAILS_MAX]
    info = types_pb2.RpcErrorInfo(
        reason=str(error.reason),
        domain=ERROR_DOMAIN,
        metadata={name[:64]: value[:_DETAIL_CHARS_MAX] for name, value in details},
    )
    status = types_pb2.RpcStatus(
        code=int(error.status.code), message=error.message[:_MESSAGE_CHARS_MAX]
    )
    status.details.append(AnyMessage(type_url=ERROR_INFO_URL, value=info.SerializeToString()))
    return status.SerializeToString()


def decode_status(data: bytes) -> KVHearthError:
    """Return the error in a value of ``STATUS_DETAILS_KEY``, ``internal`` if it is unreadable."""
    try:
        status = types_pb2.RpcStatus.FromString(data)
        for detail in status.details:
            if detail.type_url == ERROR_INFO_URL:
                info = types_pb2.RpcErrorInfo.FromString(detail.value)
                if info.domain == ERROR_DOMAIN:
                    return rebuild_error(info.reason, status.message, info.metadata)
    except DecodeError:
        return BareError(Reason.INTERNAL, "the error's details cannot be read")
    return error_from_code(status.code, status.message)


def error_from_code(code: int, message: str) -> KVHearthError:
    """Return the error for a gRPC status without our details."""
    reason = _BARE.get(code, Reason.INTERNAL)
    if code == Code.RESOURCE_EXHAUSTED and _TOO_LARGE in message:
        reason = Reason.BAD_MESSAGE
    return BareError(reason, message[:_MESSAGE_CHARS_MAX])


def rebuild_error(word: str, message: str, details: Mapping[str, str]) -> KVHearthError:
    """Return the error that a peer raised; an unknown reason's word is kept in the details."""
    facts = {name: str(value) for name, value in details.items()}
    # The names of the constructor's own arguments cannot travel as details.
    for name in ("self", "reason", "message"):
        facts.pop(name, None)
    reason = reason_of(word)
    if str(reason) != word:
        facts["word"] = word[:_DETAIL_CHARS_MAX]
    return KVHearthError(reason, message, **facts)
