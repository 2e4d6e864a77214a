"""Transport protocol for the daemon's decisions, and the table of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from kvhearth.proto.v1 import cache_pb2 as pb


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

    def has_connection(self) -> bool:
        """Return whether the next call notices a dead daemon at once because it is connected."""
        ...

    def close(self) -> None:
        """Close the connection; calls that are under way end with ``closed``. Idempotent."""
        ...


MessageT = TypeVar("MessageT", bound=Message)


def _rpc(request: type[MessageT], reply: type[ReplyT]) -> Rpc[MessageT, ReplyT]:
    """Return the call of the schema that takes and returns these messages."""
    message: Any = reply  # a generated class; its bound names only its field
    (name,) = (
        method.name
        for method in pb.DESCRIPTOR.services_by_name["CacheService"].methods
        if (method.input_type, method.output_type) == (request.DESCRIPTOR, message.DESCRIPTOR)
    )
    return Rpc(name, request.SerializeToString, message.FromString)


HEARTBEAT = _rpc(pb.HeartbeatRequest, pb.HeartbeatResponse)
LOOKUP = _rpc(pb.LookupRequest, pb.LookupResponse)
RESERVE = _rpc(pb.ReserveRequest, pb.ReserveResponse)
COMMIT = _rpc(pb.CommitRequest, pb.CommitResponse)
ABORT = _rpc(pb.AbortRequest, pb.AbortResponse)
RELEASE = _rpc(pb.ReleaseRequest, pb.ReleaseResponse)
PREFETCH = _rpc(pb.PrefetchRequest, pb.PrefetchResponse)
PIN = _rpc(pb.PinRequest, pb.PinResponse)
UNPIN = _rpc(pb.UnpinRequest, pb.UnpinResponse)
TOUCH = _rpc(pb.TouchRequest, pb.TouchResponse)
BUMP_EPOCH = _rpc(pb.BumpEpochRequest, pb.BumpEpochResponse)
EVENTS = _rpc(pb.EventsRequest, pb.EventsResponse)
