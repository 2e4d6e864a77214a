"""The data port of a gateway, over a fake arena: real sockets, and every frame on record."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_BYTES, EXTENT_DTYPE, FLAG_SUMMED, Records, checksum_of
from kvhearth.wire.frames import encode_status
from kvhearth.wire.handshake import SegmentInfo, Welcome
from kvhearth.wire.remote import (
    DATA_HEADER,
    PREFACE,
    DataFrame,
    DataKind,
    Outcome,
    Purpose,
    purpose_of,
)
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.gateway.data import DataConnection
from kvhearth_server.gateway.grants import Extent, Grants
from kvhearth_server.gateway.streams import Stream
from support.arena_fake import FakeArena

TOKEN = "secret-of-the-session"


class FakeGateway:
    """Moves bytes between data connections and a fake arena, until ``stop``.

    Attributes:
        frames: kinds of the requests that came, in order.
        on_frame: called with each request's kind before it is carried out; may raise
            ``ConnectionError`` to break the connection there.
        on_answer: the same right before the answer is sent.
        refusal: the next request is refused for this reason.
    """

    def __init__(self, arena: FakeArena) -> None:
        self.arena = arena
        self.frames: list[DataKind] = []
        self.on_frame: Callable[[DataKind], None] = lambda kind: None
        self.on_answer: Callable[[DataKind], None] = lambda kind: None
        self.refusal: Reason | None = None
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._spawn(self._accept)

    def welcome(self) -> Welcome:
        """Return the welcome of a session on the arena."""
        segments = [SegmentInfo(number, size, 4096) for number, size in self.arena.segments.items()]
        count = len(self.arena.generations)
        return Welcome(self.arena.boot_id, 1, TOKEN, 1, "00", 0, count, 1, 1, 1, segments)

    def drop(self) -> None:
        """Shut all connections down."""
        for stream in self._open:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Close everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        for thread in self._threads:
            thread.join(HUNG_S)

    def _spawn(self, function: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(stream)
            self._spawn(self._serve, stream)

    def _serve(self, stream: socket.socket) -> None:
        with stream, contextlib.suppress(ConnectionError, struct.error):
            if purpose_of(_exactly(stream, PREFACE.size)) is not Purpose.DATA:
                return
            opening = _frame(stream)
            assert opening.kind is DataKind.OPEN
            assert _exactly(stream, opening.payload_bytes).decode() == TOKEN
            self._answer_all(stream)

    def _answer_all(self, stream: socket.socket) -> None:
        """Answer the requests of one connection."""
        with contextlib.suppress(ConnectionError, struct.error):
            while True:
                frame = _frame(stream)
                self.frames.append(frame.kind)
                self.on_frame(frame.kind)
                if self.refusal is not None:
                    refusal, self.refusal = self.refusal, None
                    status = encode_status(KVHearthError(refusal, "not now"))
                    stream.sendall(DataFrame(DataKind.REFUSED, 0, 0, len(status)).pack() + status)
                    return
                self._carry_out(stream, frame)

    def _carry_out(self, stream: socket.socket, frame: DataFrame) -> None:
        blob = _exactly(stream, frame.count * EXTENT_BYTES)
        extents = np.frombuffer(blob, EXTENT_DTYPE)
        self.arena.alive()
        before = self._outcomes(extents)
        if frame.kind is DataKind.PUT:
            self._put(stream, frame, extents, before)
            return
        payload = b"".join(
            bytes(self._bytes_of(extent))
            for extent, outcome in zip(extents, before, strict=True)
            if outcome == Outcome.OK
        )
        self.on_answer(frame.kind)
        reply = DataFrame(DataKind.BYTES, frame.count, frame.number, len(payload)).pack()
        stream.sendall(reply + bytes(before) + payload)
        self.arena.alive()
        after = bytes(self._outcomes(extents))
        stream.sendall(DataFrame(DataKind.COPIED, frame.count, frame.number, 0).pack() + after)

    def _put(
        self, stream: socket.socket, frame: DataFrame, extents: Records, outcomes: list[Outcome]
    ) -> None:
        for index, extent in enumerate(extents):
            data = _exactly(stream, int(extent["length"]))
            if outcomes[index] != Outcome.OK:
                continue
            self._bytes_of(extent)[:] = np.frombuffer(data, np.uint8)
            summed = int(extent["flags"]) & FLAG_SUMMED
            if summed and checksum_of(data) != extent["checksum"].tobytes():
                outcomes[index] = Outcome.CHECKSUM_MISMATCH
        self.arena.alive()
        for index, outcome in enumerate(self._outcomes(extents)):
            if outcome != Outcome.OK:
                outcomes[index] = outcome
        self.on_answer(frame.kind)
        header = DataFrame(DataKind.STORED, len(outcomes), frame.number, 0).pack()
        stream.sendall(header + bytes(outcomes))

    def _outcomes(self, extents: Records) -> list[Outcome]:
        live = self.arena.generations[extents["slot"]] == extents["generation"]
        return [Outcome.OK if each else Outcome.STALE_GENERATION for each in live.tolist()]

    def _bytes_of(self, extent: Any) -> Any:
        start = int(extent["offset"])
        return self.arena.view(int(extent["segment"]))[start : start + int(extent["length"])]


class RealDataPort(FakeGateway):
    """The gateway's own code for data connections, over a fake arena whose extents are all granted.

    The arena is asked whether it is alive before and after each copy, as by a copier.
    """

    def __init__(self, arena: FakeArena) -> None:
        self._session: Any = SimpleNamespace(
            mapping=arena,
            grants=_Granted(arena),
            limits=SimpleNamespace(call=lambda: None),
        )
        super().__init__(arena)

    def _answer_all(self, stream: socket.socket) -> None:
        with contextlib.suppress(OSError, KVHearthError):
            counters: Any = SimpleNamespace(add=lambda *_: None)
            DataConnection(Stream(stream), self._session, counters).serve()


class _Granted(Grants):
    """Grants of everything."""

    def __init__(self, arena: FakeArena) -> None:
        super().__init__()
        self._arena = arena

    @contextlib.contextmanager
    def put(self, stream: Stream, extents: Sequence[Extent]) -> Iterator[list[int]]:
        self._arena.alive()
        yield [Outcome.OK] * len(extents)

    def readable(self, extents: Sequence[Extent]) -> list[int]:
        self._arena.alive()
        return [Outcome.OK] * len(extents)


def _frame(stream: socket.socket) -> DataFrame:
    return DataFrame.unpack(_exactly(stream, DATA_HEADER.size))


def _exactly(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = stream.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data
