"""Connections to a gateway: a preface that names the purpose, then frames; bytes have frames of
their own.

A process on another host has one life line (the handshake of the attach socket, without
descriptors), some connections for calls (the frames of the calls socket) and some for bytes. All
begin with ``PREFACE``. docs/protocol.md, section 6, describes them for other languages.

A data frame is ``DATA_HEADER``, then ``count`` records, then ``payload_bytes`` bytes. Requests of
one connection are answered in order. A client keeps the payload of all its unanswered requests on a
connection within the gateway's ``window_bytes``, which bounds what either side holds back.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_BYTES

MAGIC = b"KVHG"
VERSION = 1
PREFACE = struct.Struct("<4sHH")
"""Magic, version, and the connection's ``Purpose``; the first bytes of every connection."""


class Purpose(enum.IntEnum):
    """Purpose of a connection, in its preface."""

    LIFE_LINE = 1
    CALLS = 2
    DATA = 3


class DataKind(enum.IntEnum):
    """Kind of a data frame. A request's answer has the request's number.

    ``OPEN``: the session's token as payload; the first frame of a data connection, not answered
    unless it is refused. ``PUT``: extents, then their bytes; answered by ``STORED``. ``GET``:
    extents; answered by ``BYTES`` and at once by ``COPIED``. ``REFUSED``: a ``google.rpc.Status``
    as payload; the connection ends.
    """

    OPEN = 0
    PUT = 1
    GET = 2
    STORED = 0x81
    BYTES = 0x82
    COPIED = 0x83
    REFUSED = 0xFF


DATA_HEADER = struct.Struct("<HHIQQ")
"""Kind, flags (0), number of records, number of the request, bytes of payload. 24 bytes."""


class Outcome(enum.IntEnum):
    """Outcome of one extent: a byte of ``STORED``, ``BYTES`` and ``COPIED``.

    ``STORED`` has one for each extent; ``BYTES`` too, and the payload has those that are ``OK``;
    ``COPIED`` has one for each extent after its bytes were sent: only one that is ``OK`` in both
    was the block's while it was read. ``NO_MEMORY``: the gateway's machine has none for the slot.
    """

    OK = 0
    STALE_GENERATION = 1
    CHECKSUM_MISMATCH = 2
    FOREIGN_EXTENT = 3
    NO_MEMORY = 4


RECORD_BYTES: Mapping[DataKind, int] = MappingProxyType(
    {
        DataKind.OPEN: 0,
        DataKind.PUT: EXTENT_BYTES,
        DataKind.GET: EXTENT_BYTES,
        DataKind.STORED: 1,
        DataKind.BYTES: 1,
        DataKind.COPIED: 1,
        DataKind.REFUSED: 0,
    }
)
"""Bytes of one record by the frame's kind: an extent or an ``Outcome``."""
REQUEST_RECORDS_MAX = 4096
"""Most extents of one data frame."""
TOKEN_BYTES_MAX = 256
"""Most bytes of a secret in ``Identify``, and of a session's token."""


def preface(purpose: Purpose) -> bytes:
    """Return the first bytes of a connection."""
    return PREFACE.pack(MAGIC, VERSION, purpose)


def purpose_of(data: bytes) -> Purpose:
    """Return the purpose that a preface names.

    Raises:
        KVHearthError: ``protocol_version`` for another version, ``bad_message`` for other bytes.
    """
    magic, version, purpose = PREFACE.unpack(data)
    if magic != MAGIC:
        raise KVHearthError(Reason.BAD_MESSAGE, "not the first bytes of a KVHearth client")
    if version != VERSION:
        raise KVHearthError(
            Reason.PROTOCOL_VERSION, f"remote protocol {version}, this gateway speaks {VERSION}"
        )
    try:
        return Purpose(purpose)
    except ValueError:
        raise KVHearthError(Reason.BAD_MESSAGE, f"unknown purpose {purpose}") from None


@dataclass(frozen=True)
class DataFrame:
    """Header of a data frame."""

    kind: DataKind
    count: int
    number: int
    payload_bytes: int

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return DATA_HEADER.pack(self.kind, 0, self.count, self.number, self.payload_bytes)

    @classmethod
    def unpack(cls, data: bytes) -> DataFrame:
        """Parse a header; bounds of records and payload are the receiver's.

        Raises:
            KVHearthError: ``bad_message``.
        """
        kind, flags, count, number, payload_bytes = DATA_HEADER.unpack(data)
        if flags or count > REQUEST_RECORDS_MAX:
            raise KVHearthError(
                Reason.BAD_MESSAGE, f"data frame with flags {flags} and {count} records"
            )
        try:
            return cls(DataKind(kind), count, number, payload_bytes)
        except ValueError:
            raise KVHearthError(Reason.BAD_MESSAGE, f"unknown data frame {kind}") from None


@dataclass(frozen=True)
class Identify:
    """First frame of a life line, before the hello.

    Attributes:
        secret: the identity's token; "" where a client certificate is the identity, or none is
            needed.
        resume: the token of a session whose life line broke, to continue it: no hello follows, and
            the answer is ``{"kind": "resumed"}`` or a refusal. "" for a new session.
    """

    secret: str = ""
    resume: str = ""

    def to_message(self) -> dict[str, Any]:
        """Return the frame's JSON object."""
        return {"kind": "identify"} | asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Identify:
        """Parse the frame.

        Raises:
            KVHearthError: ``bad_message``.
        """
        values = {name: value for name, value in message.items() if name != "kind"}
        texts = all(isinstance(value, str) for value in values.values())
        if message.get("kind") != "identify" or not texts or not values.keys() <= _IDENTIFY:
            raise KVHearthError(Reason.BAD_MESSAGE, "a life line begins with who calls: identify")
        if any(len(value) > TOKEN_BYTES_MAX for value in values.values()):
            raise KVHearthError(Reason.BAD_MESSAGE, f"a secret beyond {TOKEN_BYTES_MAX} bytes")
        return cls(**values)


_IDENTIFY = frozenset(("secret", "resume"))


@dataclass(frozen=True)
class GatewayTerms:
    """The gateway's frame before the welcome (``kind`` is ``gateway``).

    Attributes:
        window_bytes: most payload of a data connection's unanswered requests.
        data_connections: most data connections of this session.
        calls_connections: most connections for calls of this session.
        resume_s: seconds for which a session outlives its broken life line.
        keepalive_s: seconds of silence after which either side looks whether the other one lives.
    """

    window_bytes: int
    data_connections: int
    calls_connections: int
    resume_s: float
    keepalive_s: float

    def to_message(self) -> dict[str, Any]:
        """Return the frame's JSON object."""
        return {"kind": "gateway"} | asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> GatewayTerms:
        """Parse the frame.

        Raises:
            KVHearthError: ``bad_message``.
        """
        values = {name: value for name, value in message.items() if name != "kind"}
        numbers = all(type(value) in (int, float) and value > 0 for value in values.values())
        if message.get("kind") != "gateway" or not numbers or values.keys() != _TERMS:
            raise KVHearthError(Reason.BAD_MESSAGE, "the gateway's terms are malformed")
        return cls(**values)


_TERMS = frozenset(GatewayTerms.__dataclass_fields__)
