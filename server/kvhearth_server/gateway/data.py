"""Data connections: payload goes from the socket into slots, and from slots to the socket."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import checksum_of
from kvhearth.session.arena import ArenaMapping
from kvhearth.wire import frames
from kvhearth.wire.remote import (
    DATA_HEADER,
    RECORD_BYTES,
    TOKEN_BYTES_MAX,
    DataFrame,
    DataKind,
    Outcome,
    Purpose,
)
from kvhearth_server.gateway.counters import ReportedCounters
from kvhearth_server.gateway.grants import Extent, extents_of
from kvhearth_server.gateway.sessions import RemoteSession
from kvhearth_server.gateway.streams import FRAME_S, TERMS, Stream

RATE_LEAST = 1 << 20
"""Bytes a second below which a payload is late."""
NICE = 10
"""Niceness of threads that move bytes: the daemon's loop and its local engines go first."""
_BATCH_BYTES = 1 << 20
_BATCH_EXTENTS = 256
_WASTE_BYTES = 256 << 10


class DataConnection:
    """Serves the requests of one data connection, on its own thread.

    Args:
        stream: the connection, opened with its token.
        session: its session.

    Raises:
        KVHearthError: ``bad_message``: the session has no arena.
    """

    purpose = Purpose.DATA

    def __init__(self, stream: Stream, session: RemoteSession, counters: ReportedCounters) -> None:
        if session.mapping is None:
            raise KVHearthError(Reason.BAD_MESSAGE, "this session did not ask for the arena")
        self._mapping: ArenaMapping = session.mapping
        self._generations = session.mapping.generations
        self._stream = stream
        self._session = session
        self._counters = counters
        self._waste: memoryview | None = None

    @staticmethod
    def token(stream: Stream, end: float) -> str:
        """Return the token with which a connection opens.

        Raises:
            OSError: as ``Stream.read``.
            KVHearthError: ``bad_message``.
        """
        frame, _ = _receive(stream, end, TOKEN_BYTES_MAX)
        if frame.kind is not DataKind.OPEN:
            raise KVHearthError(Reason.BAD_MESSAGE, "a connection opens once, with its token")
        return stream.read(frame.payload_bytes, end).decode("ascii", "replace")

    @staticmethod
    def refusal(error: KVHearthError) -> bytes:
        """Return the frame of a refusal."""
        status = frames.encode_status(error)
        return DataFrame(DataKind.REFUSED, 0, 0, len(status)).pack() + status

    def serve(self) -> None:
        """Answer requests until the connection ends.

        Raises:
            OSError: it ended, or the peer is too slow.
            KVHearthError: a request that breaks the protocol; the connection must end.
        """
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        work = {DataKind.PUT: self._put, DataKind.GET: self._get}
        while True:
            self._stream.wait()
            frame, records = _receive(self._stream, time.monotonic() + FRAME_S, TERMS.window_bytes)
            answer = work.get(frame.kind)
            if answer is None:
                raise KVHearthError(Reason.BAD_MESSAGE, f"no request is {frame.kind.name}")
            self._session.limits.call()
            self._counters.add("gateway_requests", frame.kind.name.lower())
            answer(frame, records)

    # -- stores ------------------------------------------------------------------------------------

    def _put(self, frame: DataFrame, records: bytearray) -> None:
        extents = extents_of(records)
        if sum(each.bytes for each in extents) != frame.payload_bytes or not extents:
            raise KVHearthError(Reason.BAD_MESSAGE, "a put's payload is not that of its extents")
        outcomes = self._store(extents, self._end(frame.payload_bytes))
        self._counters.add("gateway_bytes", "in", frame.payload_bytes)
        self._finish(DataKind.STORED, frame.number, outcomes)

    def _store(self, extents: list[Extent], end: float) -> list[int]:
        with self._session.grants.put(self._stream, extents) as outcomes:
            self._mark_stale(extents, outcomes)
            if self._mapping.unpopulated.bounds is not None:
                self._populate(extents, outcomes)
            for first, last in _batches(extents, outcomes):
                batch = extents[first:last]
                if outcomes[first] != Outcome.OK:
                    self._discard(sum(each.bytes for each in batch), end)
                    continue
                self._stream.fill([self._view(each) for each in batch], end)
                for at, each in enumerate(batch, first):
                    if each.checksum and checksum_of(self._view(each)) != each.checksum:
                        outcomes[at] = Outcome.CHECKSUM_MISMATCH
            if not self._mapping.alive():
                raise KVHearthError(Reason.DAEMON_AWAY, "the daemon ended; attach again")
            self._mark_stale(extents, outcomes)
        return outcomes

    def _mark_stale(
        self, extents: list[Extent], outcomes: list[int], *, alive: bool = True
    ) -> None:
        """Note the extents whose slots have left use; all without a daemon."""
        for at, each in enumerate(extents):
            if outcomes[at] != Outcome.OK:
                continue  # its slot may be none
            if not alive or self._generations[each.slot] != each.place[3]:
                outcomes[at] = Outcome.STALE_GENERATION

    def _populate(self, extents: list[Extent], outcomes: list[int]) -> None:
        """Have the kernel populate the slots; note the extents for which there is no memory."""
        at = [index for index, outcome in enumerate(outcomes) if outcome == Outcome.OK]
        places = [extents[index].place for index in at]
        addresses = [self._mapping.address(segment) + offset for segment, offset, _, _ in places]
        sizes = np.array([length for _, _, length, _ in places], np.int64)
        failed = self._mapping.unpopulated.populate(np.array(addresses, np.int64), sizes)
        for index in np.array(at)[failed].tolist():
            outcomes[index] = Outcome.NO_MEMORY

    def _discard(self, size: int, end: float) -> None:
        """Receive bytes that go nowhere."""
        if self._waste is None:
            self._waste = memoryview(bytearray(_WASTE_BYTES))
        while size:
            piece = self._waste[: min(size, len(self._waste))]
            self._stream.fill([piece], end)
            size -= len(piece)

    # -- loads -------------------------------------------------------------------------------------

    def _get(self, frame: DataFrame, records: bytearray) -> None:
        extents = extents_of(records)
        if frame.payload_bytes or sum(each.bytes for each in extents) > TERMS.window_bytes:
            raise KVHearthError(
                Reason.BAD_MESSAGE,
                f"a get has no payload, and asks for at most {TERMS.window_bytes} bytes",
            )
        outcomes = self._session.grants.readable(extents)
        self._mark_stale(extents, outcomes)
        chosen = [one for one, found in zip(extents, outcomes, strict=True) if found == Outcome.OK]
        size = sum(each.bytes for each in chosen)
        header = DataFrame(DataKind.BYTES, len(outcomes), frame.number, size).pack()
        parts: list[memoryview | bytes] = [header + bytes(outcomes)]
        parts += [self._view(each) for each in chosen]
        self._stream.send(parts, self._end(size))
        self._mark_stale(extents, outcomes, alive=self._mapping.alive())
        self._counters.add("gateway_bytes", "out", size)
        self._finish(DataKind.COPIED, frame.number, outcomes)

    # -- both --------------------------------------------------------------------------------------

    def _finish(self, kind: DataKind, number: int, outcomes: list[int]) -> None:
        """Count the outcomes of a request and send its last answer."""
        for outcome in set(outcomes) - {Outcome.OK}:
            self._counters.add(
                "gateway_extents_refused", Outcome(outcome).name.lower(), outcomes.count(outcome)
            )
        header = DataFrame(kind, len(outcomes), number, 0).pack()
        self._stream.send([header + bytes(outcomes)], self._end(0))

    def _end(self, size: int) -> float:
        return time.monotonic() + FRAME_S + size / RATE_LEAST

    def _view(self, extent: Extent) -> memoryview:
        segment, offset, length, _ = extent.place
        return self._mapping.view(segment)[offset : offset + length].data


def _receive(stream: Stream, end: float, payload_max: int) -> tuple[DataFrame, bytearray]:
    """Return a frame's header and records; its payload is still to be received.

    Raises:
        OSError: as ``Stream.read``.
        KVHearthError: ``bad_message``.
    """
    frame = DataFrame.unpack(bytes(stream.read(DATA_HEADER.size, end)))
    if frame.payload_bytes > payload_max:
        raise KVHearthError(
            Reason.BAD_MESSAGE,
            f"a frame with {frame.payload_bytes} bytes of payload, at most {payload_max}",
        )
    return frame, stream.read(frame.count * RECORD_BYTES[frame.kind], end)


def _batches(extents: list[Extent], outcomes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of extents that are received by one call: alike, and small enough to be summed
    while they are in the processor's cache.
    """
    first, size = 0, 0
    for at, each in enumerate(extents):
        same = (outcomes[at] == Outcome.OK) == (outcomes[first] == Outcome.OK)
        if at > first and not (
            same and size + each.bytes <= _BATCH_BYTES and at - first < _BATCH_EXTENTS
        ):
            yield first, at
            first, size = at, 0
        size += each.bytes
    yield first, len(extents)
