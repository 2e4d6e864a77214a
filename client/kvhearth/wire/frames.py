"""Frames of the calls socket: one decision and its answer, without gRPC's overhead.

A frame is a header of 8 bytes, little-endian, and a body: ``u32`` bytes of the body, ``u16`` kind,
``u16`` number of the call. A client's kind is ``OPEN`` (body: the session's token; the first frame
of every connection) or a method of ``METHODS`` (body: its request, protobuf). The daemon answers
every frame in order with kind ``DONE`` (body: the reply, protobuf) or ``REFUSED`` (body: a
``google.rpc.Status``, see ``status``) and the same number. A client has one call under way on a
connection.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2

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
