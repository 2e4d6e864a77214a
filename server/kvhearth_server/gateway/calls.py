"""Connections for calls: frames are relayed to the daemon, and the book is kept by them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from google.protobuf.message import DecodeError

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.wire import frames
from kvhearth_server.gateway.sessions import RemoteSession
from kvhearth_server.gateway.streams import Stream
from kvhearth_server.gateway.tally import Tally
from kvhearth_server.transport.messages import body_bounds

COMMIT_WAIT_S = 2.0
"""Longest wait of a commit for a put into its slots."""
BREAK_S = 2.0
"""Time for a put to end once its connection is shut."""
REPLY_S = 30.0
"""Longest wait for the daemon's reply; clients give up earlier."""
LARGE_BYTES = 64 << 10
"""Frames from this size on share ``Budget``."""
_REPLY_READ_BYTES = 64 << 10
_TICK = struct.pack("@ll", 1, 0)

_Relay = Callable[[bytes], "tuple[int, memoryview]"]


class Budget:
    """Bytes of large frames that are held at once."""

    def __init__(self, bytes_max: int) -> None:
        self._free = bytes_max
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def held(self, size: int, end: float) -> Iterator[None]:
        """Hold ``size`` bytes; waits for them until the monotonic time ``end``.

        Raises:
            KVHearthError: ``deadline``.
        """
        size = size if size >= LARGE_BYTES else 0
        with self._changed:
            left_s = max(0.0, end - time.monotonic())
            if not self._changed.wait_for(lambda: self._free >= size, left_s):
                raise KVHearthError(Reason.DEADLINE, "too many large calls at once; try again")
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


class Upstream:
    """A connection to the daemon's calls socket.

    Args:
        path: the calls socket.
        token: the daemon's token of the session.
        reply_bytes_max: bound of a reply's body.

    Raises:
        OSError: the daemon is away.
        KVHearthError: the daemon's refusal of the token.
    """

    def __init__(self, path: str, token: str, reply_bytes_max: int) -> None:
        self._reply_bytes_max = reply_bytes_max
        self._buffer = bytearray(_REPLY_READ_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(self._socket.close)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
            self._socket.connect(path)
            kind, reply = self.exchange(
                frames.encode(frames.OPEN, 0, token.encode(), self._reply_bytes_max)
            )
            if kind == frames.REFUSED:
                raise frames.decode_status(bytes(reply[frames.HEADER.size :]))
            undo.pop_all()

    def exchange(self, frame: bytes | bytearray) -> tuple[int, memoryview]:
        """Send a frame; return the kind of its answer and the answer with its header, valid until
        the next call.

        Raises:
            OSError: the daemon is away, or slow.
            KVHearthError: ``bad_message`` for an oversized reply.
        """
        end = time.monotonic() + REPLY_S
        if len(self._buffer) > _REPLY_READ_BYTES:
            self._buffer = bytearray(_REPLY_READ_BYTES)
        view = memoryview(frame)
        while view:
            with contextlib.suppress(BlockingIOError):
                view = view[self._socket.send(view, socket.MSG_NOSIGNAL) :]
            _check(end)
        have = self._more(0, end)
        while have < frames.HEADER.size:
            have = self._more(have, end)
        size, kind, _ = frames.HEADER.unpack_from(self._buffer)
        frames.check_size(size, self._reply_bytes_max)
        size += frames.HEADER.size
        if size > len(self._buffer):
            larger = bytearray(size)
            larger[:have] = self._buffer[:have]
            self._buffer = larger
        while have < size:
            have = self._more(have, end)
        return kind, memoryview(self._buffer)[:size]

    def _more(self, have: int, end: float) -> int:
        while True:
            try:
                count = self._socket.recv_into(memoryview(self._buffer)[have:])
            except BlockingIOError:
                _check(end)
                continue
            if not count:
                raise ConnectionResetError("the daemon closed the connection")
            return have + count

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _check(end: float) -> None:
    if time.monotonic() > end:
        raise TimeoutError


class CallsConnection:
    """Relays the calls of one connection, on its own thread.

    Args:
        stream: the connection, opened with its token.
        session: its session.
        calls_path: the daemon's calls socket.
        budget: of large frames.
        frame_s: time for a frame from its first byte on.
    """

    def __init__(
        self,
        stream: Stream,
        session: RemoteSession,
        calls_path: str,
        tally: Tally,
        budget: Budget,
        *,
        frame_s: float,
    ) -> None:
        self._stream = stream
        self._session = session
        self._book = session.book
        self._meter = session.meter
        self._tally = tally
        self._budget = budget
        self._frame_s = frame_s
        welcome, contract = session.welcome, session.contract
        shards = max(group.shards for group in contract.groups)
        most = welcome.message_bytes_max
        # Slots that a release reports are bounded by the daemon, whose bound is not in the welcome.
        self._bounds: Mapping[int, tuple[str, int]] = body_bounds(
            contract.hash_bytes, shards, welcome.keys_max, most, most
        )
        self._upstream = Upstream(calls_path, welcome.token, welcome.message_bytes_max)
        self._handlers: Mapping[str, Callable[[bytes, _Relay], tuple[int, memoryview]]] = {
            "Heartbeat": self._heartbeat,
            "Lookup": self._lookup,
            "Reserve": self._reserve,
            "Commit": self._commit,
            "Abort": self._abort,
            "Release": self._release,
        }

    def close(self) -> None:
        """Close the daemon's side."""
        self._upstream.close()

    def serve(self) -> None:
        """Relay calls until either side ends.

        Raises:
            OSError: a side ended, or is too slow.
            KVHearthError: a frame that breaks the protocol; the connection must end.
        """
        header = frames.HEADER
        while True:
            self._stream.wait()
            end = time.monotonic() + self._frame_s
            head = self._stream.read(header.size, end)
            size, kind, number = header.unpack(head)
            name, most = self._bounds.get(kind, ("", 0))
            if not name:
                raise KVHearthError(Reason.PROTOCOL_VERSION, f"no call has the number {kind}")
            frames.check_size(size, most)
            with self._budget.held(size, end):
                body = bytes(self._stream.read(size, end))
                answer = self._answer(name, kind, number, body)
                self._stream.send([answer], time.monotonic() + self._frame_s)

    def _answer(self, name: str, kind: int, number: int, body: bytes) -> memoryview | bytes:
        self._tally.add("gateway_requests", 1, "call")

        def relay(content: bytes) -> tuple[int, memoryview]:
            return self._upstream.exchange(frames.HEADER.pack(len(content), kind, number) + content)

        try:
            self._meter.call()
            handler = self._handlers.get(name)
            if handler is None:
                return relay(body)[1]
            return handler(body, relay)[1]
        except DecodeError:
            error = KVHearthError(Reason.BAD_MESSAGE, f"the body of {name} cannot be parsed")
        except KVHearthError as refusal:
            error = refusal
        self._tally.add("gateway_refusals", 1, str(error.reason))
        status = frames.encode_status(error)
        return frames.HEADER.pack(len(status), frames.REFUSED, number) + status

    def _heartbeat(self, body: bytes, relay: _Relay) -> tuple[int, memoryview]:
        kind, answer = relay(body)
        mapping = self._session.mapping
        if kind == frames.DONE and mapping is not None:
            mapping.heard(pb.HeartbeatResponse.FromString(_body(answer)).unpopulated)
        return kind, answer

    # -- calls by which the book is kept -----------------------------------------------------------

    def _lookup(self, body: bytes, relay: _Relay) -> tuple[int, memoryview]:
        request = pb.LookupRequest.FromString(body)
        lease = request.lease_id
        if not lease:
            return relay(body)
        self._meter.admit()
        self._book.look_up(lease)
        blobs: list[bytes] = []
        try:
            kind, answer = relay(body)
            if kind == frames.DONE:
                reply = pb.LookupResponse.FromString(_body(answer))
                blobs = [group.extents for group in reply.groups if group.extents]
        finally:
            self._book.leased(lease, blobs, joins=request.joins)
            self._session.note_held()
        return kind, answer

    def _reserve(self, body: bytes, relay: _Relay) -> tuple[int, memoryview]:
        request = pb.ReserveRequest.FromString(body)
        reservation = request.reservation_id
        self._meter.admit(*self._size(request))
        self._book.reserve(reservation)
        blobs: list[bytes] = []
        try:
            kind, answer = relay(body)
            if kind == frames.DONE:
                reply = pb.ReserveResponse.FromString(_body(answer))
                blobs = [group.extents for group in reply.groups]
        finally:
            self._book.reserved(reservation, blobs)
            self._session.note_held()
        return kind, answer

    def _size(self, request: pb.ReserveRequest) -> tuple[int, int]:
        """Return the extents that a reservation asks for, and their bytes."""
        groups = self._session.contract.groups
        found = [
            (each.count * groups[each.group].shards, groups[each.group].page_bytes)
            for each in request.groups
            if each.group < len(groups)
        ]
        return sum(count for count, _ in found), sum(count * size for count, size in found)

    def _commit(self, body: bytes, relay: _Relay) -> tuple[int, memoryview]:
        request = pb.CommitRequest.FromString(body)
        slots = [slot for group in request.groups for slot in _slots(group.slots)]
        if not self._book.retire(slots, time.monotonic() + COMMIT_WAIT_S):
            raise KVHearthError(
                Reason.NOT_RESERVED,
                "bytes are still on their way to slots of this commit; commit after the puts ended",
            )
        self._session.note_held()
        return relay(body)

    def _abort(self, body: bytes, relay: _Relay) -> tuple[int, memoryview]:
        request = pb.AbortRequest.FromString(body)
        slots = [slot for group in request.groups for slot in _slots(group.slots)]
        still = not self._book.retire(
            slots,
            time.monotonic() + (0.0 if request.in_doubt else COMMIT_WAIT_S),
            reservations=request.reservation_ids,
            break_s=BREAK_S,
        )
        self._session.note_held()
        if still:
            raise KVHearthError(Reason.DEADLINE, "bytes are still on their way; abort again")
        if request.in_doubt and self._alone:
            request.in_doubt = False
            body = request.SerializeToString()
        return relay(body)

    @property
    def _alone(self) -> bool:
        """Whether this gateway is the only writer of the group: it knows that none is writing."""
        return self._book.ranks.issuperset(range(self._session.contract.world_size))

    def _release(self, body: bytes, relay: _Relay) -> tuple[int, memoryview]:
        request = pb.ReleaseRequest.FromString(body)
        self._book.release(request.lease_ids)
        self._session.note_held()
        return relay(body)


def _body(answer: memoryview) -> bytes:
    return bytes(answer[frames.HEADER.size :])


def _slots(blob: bytes) -> list[int]:
    """Return the numbers in a blob; the daemon refuses one that is cut."""
    found: list[int] = np.frombuffer(blob[: len(blob) - len(blob) % 4], "<u4").tolist()
    return found
