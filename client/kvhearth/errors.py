"""The error table: every refusal has a reason, and every reason has one status.

A reason is a stable, lower-case word. It travels to gRPC clients as
``google.rpc.ErrorInfo.reason``, to attach clients as the ``reason`` of a ``refused`` frame, and
becomes the label of a counter. A cache miss is not an error and has no reason here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ERROR_DOMAIN = "kvhearth"
"""``domain`` of every ``google.rpc.ErrorInfo``."""


class Code(enum.IntEnum):
    """gRPC status codes by number, so that this module needs no gRPC."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True)
class Status:
    """A reason's form on the wire: a gRPC code and an HTTP status."""

    code: Code
    http: int


_INVALID = Status(Code.INVALID_ARGUMENT, 400)
_PRECONDITION = Status(Code.FAILED_PRECONDITION, 409)
_EXHAUSTED = Status(Code.RESOURCE_EXHAUSTED, 507)
_NOT_FOUND = Status(Code.NOT_FOUND, 404)
_DENIED = Status(Code.PERMISSION_DENIED, 403)
_EXISTS = Status(Code.ALREADY_EXISTS, 409)
_AWAY = Status(Code.UNAVAILABLE, 503)
_INTERNAL = Status(Code.INTERNAL, 500)


class Reason(enum.StrEnum):
    """Cause of a refusal. Add a reason here and in ``STATUS`` together."""

    # the message itself
    BAD_MESSAGE = "bad_message"
    BAD_KEYS = "bad_keys"
    TOO_MANY_KEYS = "too_many_keys"
    BAD_EXTENTS = "bad_extents"
    BAD_CHECKSUMS = "bad_checksums"
    BAD_GROUP = "bad_group"
    BAD_CONTRACT = "bad_contract"
    BAD_TTL = "bad_ttl"
    BAD_URL = "bad_url"
    PROTOCOL_VERSION = "protocol_version"
    # the caller's identity and rights
    UNKNOWN_TOKEN = "unknown_token"
    PEER_NOT_ALLOWED = "peer_not_allowed"
    NOT_ADMIN = "not_admin"
    NOT_SCHEDULER = "not_scheduler"
    # the daemon's state
    CONTRACT_MISMATCH = "contract_mismatch"
    GROUP_INCOMPLETE = "group_incomplete"
    GROUP_GONE = "group_gone"
    STALE_INCARNATION = "stale_incarnation"
    STALE_EPOCH = "stale_epoch"
    STALE_BOOT = "stale_boot"
    RANK_TAKEN = "rank_taken"
    NOT_RESERVED = "not_reserved"
    FOREIGN_EXTENT = "foreign_extent"
    STALE_EXTENT = "stale_extent"
    ALREADY_COMMITTED = "already_committed"
    UNKNOWN_LEASE = "unknown_lease"
    LEASE_EXISTS = "lease_exists"
    UNKNOWN_PIN = "unknown_pin"
    PIN_EXISTS = "pin_exists"
    UNKNOWN_NAMESPACE = "unknown_namespace"
    NO_SUCH_PATH = "no_such_path"
    NAMESPACE_SHARED = "namespace_shared"
    # bounds
    NO_SPACE = "no_space"
    QUOTA_EXCEEDED = "quota_exceeded"
    HELD_CAP = "held_cap"
    STOCK_CAP = "stock_cap"
    TOO_MANY_SESSIONS = "too_many_sessions"
    TOO_MANY_NAMESPACES = "too_many_namespaces"
    TOO_MANY_LEASES = "too_many_leases"
    TOO_MANY_PINS = "too_many_pins"
    # the service
    DRAINING = "draining"
    DAEMON_AWAY = "daemon_away"
    DEADLINE = "deadline"
    CLOSED = "closed"
    INTERNAL = "internal"
    # the machine
    MEMORY_UNAVAILABLE = "memory_unavailable"
    HUGEPAGES_UNAVAILABLE = "hugepages_unavailable"
    ARENA_BUSY = "arena_busy"
    ARENA_UNUSABLE = "arena_unusable"
    SSD_UNUSABLE = "ssd_unusable"
    SOCKET_UNUSABLE = "socket_unusable"
    CONFIG_INVALID = "config_invalid"
    COPY_FAILED = "copy_failed"


class ClientReason(enum.StrEnum):
    """Cause of an outcome that the client decides alone; it never travels.

    ``QUEUE_FULL``: the queue had no room, nothing was done. ``NO_COPIER``: a rank has no copier for
    its pages, or too many jobs wait for it. ``NOT_PLANNED``: the scheduler's lookup was gone before
    its load began. ``THROTTLED``: a copier took no more work in time. ``NO_ADAPTER_DIGEST``: a
    request's adapter has no identity yet.
    """

    QUEUE_FULL = "queue_full"
    NO_COPIER = "no_copier"
    NOT_PLANNED = "not_planned"
    THROTTLED = "throttled"
    NO_ADAPTER_DIGEST = "no_adapter_digest"


NoReason = Literal[""]
"""Type of the empty reason of an outcome for which nothing has to be explained."""

STATUS: Mapping[Reason, Status] = {
    Reason.BAD_MESSAGE: _INVALID,
    Reason.BAD_KEYS: _INVALID,
    Reason.TOO_MANY_KEYS: _INVALID,
    Reason.BAD_EXTENTS: _INVALID,
    Reason.BAD_CHECKSUMS: _INVALID,
    Reason.BAD_GROUP: _INVALID,
    Reason.BAD_CONTRACT: _INVALID,
    Reason.BAD_TTL: _INVALID,
    Reason.BAD_URL: _INVALID,
    Reason.PROTOCOL_VERSION: _PRECONDITION,
    Reason.UNKNOWN_TOKEN: Status(Code.UNAUTHENTICATED, 401),
    Reason.PEER_NOT_ALLOWED: _DENIED,
    Reason.NOT_ADMIN: _DENIED,
    Reason.NOT_SCHEDULER: _DENIED,
    Reason.CONTRACT_MISMATCH: _PRECONDITION,
    Reason.GROUP_INCOMPLETE: _PRECONDITION,
    Reason.GROUP_GONE: _PRECONDITION,
    Reason.STALE_INCARNATION: _PRECONDITION,
    Reason.STALE_EPOCH: _PRECONDITION,
    Reason.STALE_BOOT: _PRECONDITION,
    Reason.RANK_TAKEN: _EXISTS,
    Reason.NOT_RESERVED: _PRECONDITION,
    Reason.FOREIGN_EXTENT: _DENIED,
    Reason.STALE_EXTENT: _PRECONDITION,
    Reason.ALREADY_COMMITTED: _EXISTS,
    Reason.UNKNOWN_LEASE: _NOT_FOUND,
    Reason.LEASE_EXISTS: _EXISTS,
    Reason.UNKNOWN_PIN: _NOT_FOUND,
    Reason.PIN_EXISTS: _EXISTS,
    Reason.UNKNOWN_NAMESPACE: _NOT_FOUND,
    Reason.NO_SUCH_PATH: _NOT_FOUND,
    Reason.NAMESPACE_SHARED: _PRECONDITION,
    Reason.NO_SPACE: _EXHAUSTED,
    Reason.QUOTA_EXCEEDED: _EXHAUSTED,
    Reason.HELD_CAP: _EXHAUSTED,
    Reason.STOCK_CAP: _EXHAUSTED,
    Reason.TOO_MANY_SESSIONS: _EXHAUSTED,
    Reason.TOO_MANY_NAMESPACES: _EXHAUSTED,
    Reason.TOO_MANY_LEASES: _EXHAUSTED,
    Reason.TOO_MANY_PINS: _EXHAUSTED,
    Reason.DRAINING: _AWAY,
    Reason.DAEMON_AWAY: _AWAY,
    Reason.DEADLINE: Status(Code.DEADLINE_EXCEEDED, 504),
    Reason.CLOSED: _PRECONDITION,
    Reason.INTERNAL: _INTERNAL,
    Reason.MEMORY_UNAVAILABLE: _EXHAUSTED,
    Reason.HUGEPAGES_UNAVAILABLE: _EXHAUSTED,
    Reason.ARENA_BUSY: _PRECONDITION,
    Reason.ARENA_UNUSABLE: _PRECONDITION,
    Reason.SSD_UNUSABLE: _PRECONDITION,
    Reason.SOCKET_UNUSABLE: _PRECONDITION,
    Reason.CONFIG_INVALID: _INVALID,
    Reason.COPY_FAILED: _INTERNAL,
}


class KVHearthError(Exception):
    """A refused call or a failure of the environment, with its reason.

    Args:
        reason: the stable word for the failure.
        message: one sentence for a person: the problem and its remedy.
        details: further facts as strings (for example the fields in which two contracts differ).
    """

    def __init__(self, reason: Reason, message: str, **details: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.details = details

    @property
    def status(self) -> Status:
        """The gRPC code and HTTP status of the reason."""
        return STATUS[self.reason]


def reason_of(word: str) -> Reason:
    """Return the reason named ``word``; an unknown one, from a newer peer, becomes ``INTERNAL``."""
    try:
        return Reason(word)
    except ValueError:
        return Reason.INTERNAL
