"""Connections for calls: frames are relayed to the daemon, and the grants follow from them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from google.protobuf.message import DecodeError

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.wire import frames
from kvhearth.wire.remote import TOKEN_BYTES_MAX, Purpose
from kvhearth_server.engine.supervisor import give_back_memory
from kvhearth_server.gateway.counters import ReportedCounters
from kvhearth_server.gateway.sessions import RemoteSession
from kvhearth_server.gateway.streams import FRAME_S, Ended, Stream
from kvhearth_server.transport.kept import Kept
from kvhearth_server.transport.messages import (
    IDS_PER_CALL_MAX,
    SMALL_BODY_BYTES,
    TooManyParts,
    body_bounds,
    check_parts,
)

COMMIT_WAIT_S = 2.0
"""Longest wait of a commit for a put into its slots."""
BREAK_S = 2.0
"""Time for a put to end once its connection is shut."""
REPLY_S = 30.0
"""Longest wait for the daemon's reply; clients give up earlier."""
KEPT_BYTES_MAX = 64 << 20
"""Calls of all connections together that are larger than one piece, whole or not, until they are
answered.
"""
_PIECE_BYTES = 64 << 10
"""Bytes of a body that are received, and get memory, at once."""

_kept = Kept["CallsConnection"](KEPT_BYTES_MAX, give_back_memory)

_Answer = tuple[int, bytes]
"""Kind and body of the daemon's answer."""
_Relay = Callable[[bytes], _Answer]


class CallsConnection:
    """Relays the calls of one connection, on its own thread.

    Args:
        stream: the connection, opened with its token.
        session: its session.

    Attributes:
        owner: the identity's name.
        kept_bytes: those of a large call, as far as it has come.
    """

    purpose = Purpose.CALLS

    def __init__(self, stream: Stream, session: RemoteSession, counters: ReportedCounters) -> None:
        self._stream = stream
        self._session = session
        self._grants = session.grants
        self._limits = session.limits
        self._counters = counters
        self.owner = session.identity.name
        self.kept_bytes = 0
        self._closing = False
        welcome = session.welcome
        self._bounds: Mapping[int, tuple[str, int]] = body_bounds(
            session.contract, welcome.keys_max, welcome.message_bytes_max
        )
        self._handlers: Mapping[str, Callable[[bytes, _Relay], _Answer]] = {
            "Heartbeat": self._heartbeat,
            "Lookup": self._lookup,
            "Reserve": self._reserve,
            "Commit": self._commit,
            "Abort": self._abort,
            "Release": self._release,
        }

    @staticmethod
    def token(stream: Stream, end: float) -> str:
        """Return the token with which a connection opens.

        Raises:
            OSError: as ``Stream.read``.
            KVHearthError: ``bad_message``.
        """
        size, kind, _ = frames.HEADER.unpack(stream.read(frames.HEADER.size, end))
        frames.check_size(size, TOKEN_BYTES_MAX)
        if kind != frames.OPEN:
            raise KVHearthError(Reason.BAD_MESSAGE, "a connection opens once, with its token")
        return stream.read(size, end).decode("ascii", "replace")

    @staticmethod
    def refusal(error: KVHearthError, number: int = 0) -> bytes:
        """Return the frame of a refusal."""
        status = frames.encode_status(error)
        return frames.HEADER.pack(len(status), frames.REFUSED, number) + status

    def serve(self) -> None:
        """Relay calls until either side ends.

        Raises:
            OSError: a side ended, or is too slow; the daemon is away.
            KVHearthError: the daemon's refusal of the session; a frame that breaks the protocol:
                the connection must end.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self._session.calls_path)
            upstream = Stream(connection)
            token = self._session.welcome.token.encode()
            kind, reply = _exchange(upstream, frames.OPEN, 0, token)
            if kind == frames.REFUSED:
                raise frames.decode_status(reply)
            self._stream.send([frames.HEADER.pack(0, frames.DONE, 0)], time.monotonic() + 1)
            while True:
                self._next(upstream)

    def _next(self, upstream: Stream) -> None:
        self._stream.wait()
        end = time.monotonic() + FRAME_S
        size, kind, number = frames.HEADER.unpack(self._stream.read(frames.HEADER.size, end))
        name, most = self._bounds.get(kind, ("", 0))
        if not name:
            raise KVHearthError(Reason.PROTOCOL_VERSION, f"no call has the number {kind}")
        frames.check_size(size, most)
        try:
            body = self._body(size, end)
            answer = self._answer(name, body, partial(_exchange, upstream, kind, number), number)
            self._stream.send(answer, time.monotonic() + FRAME_S)
        except OSError:
            if self._closing:
                why = f"large calls of all peers take {KEPT_BYTES_MAX >> 20} MiB, most of it yours"
                raise KVHearthError(Reason.HELD_CAP, why) from None
            raise
        finally:
            self._keep(0)
        if self._closing:
            raise Ended("too many parts")

    def _body(self, size: int, end: float) -> bytes:
        """Return the body of a call; memory is taken for what has come."""
        body = bytearray()
        while len(body) < size:
            body += self._stream.read(min(size - len(body), _PIECE_BYTES), end)
            if size > _PIECE_BYTES:
                self._keep(len(body))
        return bytes(body)

    def _keep(self, count: int) -> None:
        if count != self.kept_bytes:
            self.kept_bytes = count
            _kept.note(self)

    def end_for_memory(self) -> None:
        """End the connection: all of them keep too much."""
        self._closing, self.kept_bytes = True, 0
        self._stream.end()

    def _answer(self, name: str, body: bytes, relay: _Relay, number: int) -> list[bytes]:
        """Return the parts of the frame that answers a call."""
        self._counters.add("gateway_requests", "call")
        try:
            self._limits.call()
            if len(body) > SMALL_BODY_BYTES:
                check_parts(body)
            handler = self._handlers.get(name)
            kind, reply = handler(body, relay) if handler is not None else relay(body)
            return [frames.HEADER.pack(len(reply), kind, number), reply]
        except DecodeError:
            error = KVHearthError(Reason.BAD_MESSAGE, f"the body of {name} cannot be parsed")
        except KVHearthError as refusal:
            error = refusal
            self._closing |= isinstance(refusal, TooManyParts)
        self._counters.add("gateway_refusals", str(error.reason))
        return [self.refusal(error, number)]

    def _heartbeat(self, body: bytes, relay: _Relay) -> _Answer:
        kind, reply = relay(body)
        mapping = self._session.mapping
        if kind == frames.DONE and mapping is not None:
            mapping.heard(pb.HeartbeatResponse.FromString(reply).unpopulated)
        return kind, reply

    # -- calls from which grants follow ------------------------------------------------------------

    def _lookup(self, body: bytes, relay: _Relay) -> _Answer:
        request = pb.LookupRequest.FromString(body)
        if not request.lease_id:
            return relay(body)
        self._limits.admit()
        with self._grants.leasing(request.lease_id, joins=request.joins) as extents:
            kind, reply = relay(body)
            if kind == frames.DONE:
                groups = pb.LookupResponse.FromString(reply).groups
                extents += [group.extents for group in groups]
        return kind, reply

    def _reserve(self, body: bytes, relay: _Relay) -> _Answer:
        request = pb.ReserveRequest.FromString(body)
        self._limits.admit(*self._size(request))
        with self._grants.reserving(request.reservation_id) as extents:
            kind, reply = relay(body)
            if kind == frames.DONE:
                groups = pb.ReserveResponse.FromString(reply).groups
                extents += [group.extents for group in groups]
        return kind, reply

    def _size(self, request: pb.ReserveRequest) -> tuple[int, int]:
        """Return the extents that a reservation asks for, and their bytes."""
        groups = self._session.contract.groups
        found = [
            (each.count * groups[each.group].shards, groups[each.group].page_bytes)
            for each in request.groups
            if each.group < len(groups)
        ]
        return sum(count for count, _ in found), sum(count * size for count, size in found)

    def _commit(self, body: bytes, relay: _Relay) -> _Answer:
        request = pb.CommitRequest.FromString(body)
        slots = [slot for group in request.groups for slot in _slots(group.slots)]
        if not self._grants.retire(slots, time.monotonic() + COMMIT_WAIT_S):
            raise KVHearthError(
                Reason.NOT_RESERVED,
                "bytes are still on their way to slots of this commit; commit after the puts ended",
            )
        return relay(body)

    def _abort(self, body: bytes, relay: _Relay) -> _Answer:
        request = pb.AbortRequest.FromString(body)
        if len(request.reservation_ids) > IDS_PER_CALL_MAX:
            return relay(body)  # the daemon refuses it
        slots = [slot for group in request.groups for slot in _slots(group.slots)]
        if not self._grants.retire(
            slots,
            time.monotonic() + (0.0 if request.in_doubt else COMMIT_WAIT_S),
            reservations=request.reservation_ids,
            break_s=BREAK_S,
        ):
            raise KVHearthError(Reason.DEADLINE, "bytes are still on their way; abort again")
        # The only writer of a group whose ranks are all here knows that none is writing.
        alone = self._grants.ranks.issuperset(range(self._session.contract.world_size))
        if request.in_doubt and alone:
            request.in_doubt = False
            body = request.SerializeToString()
        return relay(body)

    def _release(self, body: bytes, relay: _Relay) -> _Answer:
        ids = pb.ReleaseRequest.FromString(body).lease_ids
        if len(ids) <= IDS_PER_CALL_MAX:  # the daemon refuses more
            self._grants.release(ids)
        return relay(body)


def _exchange(upstream: Stream, kind: int, number: int, body: bytes) -> _Answer:
    """Send a frame to the daemon; return its answer.

    Raises:
        OSError: the daemon is away, or slow.
    """
    end = time.monotonic() + REPLY_S
    upstream.send([frames.HEADER.pack(len(body), kind, number), body], end)
    size, kind, _ = frames.HEADER.unpack(upstream.read(frames.HEADER.size, end))
    return kind, bytes(upstream.read(size, end))


def _slots(blob: bytes) -> list[int]:
    """Return the numbers in a blob; the daemon refuses one that is cut."""
    found: list[int] = np.frombuffer(blob[: len(blob) - len(blob) % 4], "<u4").tolist()
    return found
