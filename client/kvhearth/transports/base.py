"""Transport protocol for the daemon's decisions, and the table of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvhearth.proto.v1 import cache_pb2 as pb

SERVICE = "kvhearth.proto.v1.CacheService"
TOKEN_KEY = "kvhearth-token"
"""Metadata key of the session's token."""


class Reply(Protocol):
    """The field that all replies have in common."""

    boot_id: str


RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT", bound=Reply)


@dataclass(frozen=True)
class Rpc(Generic[RequestT, ReplyT]):
    """One call of the service: its name and the conversion of its messages to and from bytes.

    ``parse`` takes bytes or a view of them, and keeps no reference to them.
    """

    name: str
    serialize: Callable[[RequestT], bytes]
    parse: Callable[[Any], ReplyT]


class CacheTransport(Protocol):
    """Carries one decision and its answer.

    The caller guarantees a positive deadline. The implementation guarantees: ``call`` returns or
    raises by the deadline (or slightly later), may be used from several threads, and raises only
    ``KVHearthError``; after ``close``, or in a forked child, it raises ``closed``.
    """

    def call(self, rpc: Rpc[RequestT, ReplyT], request: RequestT, deadline_s: float) -> ReplyT:
        """Send ``request``, return the reply.

        Raises:
            KVHearthError: the daemon's refusal, or ``daemon_away``, ``deadline``, ``closed``.
        """
        ...

    def warm(self) -> bool:
        """Return whether the next call notices a dead daemon at once because it is connected."""
        ...

    def close(self) -> None:
        """Close the connection; calls that are under way end with ``closed``. Idempotent."""
        ...


HEARTBEAT = Rpc("Heartbeat", pb.HeartbeatRequest.SerializeToString, pb.HeartbeatResponse.FromString)
LOOKUP = Rpc("Lookup", pb.LookupRequest.SerializeToString, pb.LookupResponse.FromString)
RESERVE = Rpc("Reserve", pb.ReserveRequest.SerializeToString, pb.ReserveResponse.FromString)
COMMIT = Rpc("Commit", pb.CommitRequest.SerializeToString, pb.CommitResponse.FromString)
ABORT = Rpc("Abort", pb.AbortRequest.SerializeToString, pb.AbortResponse.FromString)
RELEASE = Rpc("Release", pb.ReleaseRequest.SerializeToString, pb.ReleaseResponse.FromString)
PREFETCH = Rpc("Prefetch", pb.PrefetchRequest.SerializeToString, pb.PrefetchResponse.FromString)
PIN = Rpc("Pin", pb.PinRequest.SerializeToString, pb.PinResponse.FromString)
UNPIN = Rpc("Unpin", pb.UnpinRequest.SerializeToString, pb.UnpinResponse.FromString)
TOUCH = Rpc("Touch", pb.TouchRequest.SerializeToString, pb.TouchResponse.FromString)
BUMP_EPOCH = Rpc(
    "BumpEpoch", pb.BumpEpochRequest.SerializeToString, pb.BumpEpochResponse.FromString
)
