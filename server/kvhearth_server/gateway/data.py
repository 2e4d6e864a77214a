"""Data connections: payload goes from the socket into slots, and from slots to the socket."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_RECORD, FLAG_SUMMED, checksum_of
from kvhearth.native.blocks import BlockMover, block_mover
from kvhearth.session.arena import ArenaMapping
from kvhearth.wire.remote import RECORD_BYTES, DataFrame, DataKind, Outcome
from kvhearth_server.gateway.book import Place, Put
from kvhearth_server.gateway.sessions import RemoteSession
from kvhearth_server.gateway.streams import Stream
from kvhearth_server.gateway.tally import Tally

RATE_LEAST = 1 << 20
"""Bytes a second below which a payload is late."""
NICE = 10
"""Niceness of threads that move bytes: the daemon's loop and its local engines go first."""
_BATCH_BYTES = 1 << 20
_BATCH_EXTENTS = 256
_ALONE_BYTES = 256 << 10
"""Extents from this size on are summed one by one, which takes a twentieth less of the processor
than the native module's call for all; for small ones the calls cost more.
"""
_WASTE_BYTES = 256 << 10


class _Extent(NamedTuple):
    """One record of a request."""

    slot: int
    place: Place
    checksum: bytes

    @property
    def bytes(self) -> int:
        """Length of its payload."""
        return self.place[2]


class DataConnection:
    """Serves the requests of one data connection, on its own thread.

    Args:
        stream: the connection, opened with its token.
        session: its session.
        window_bytes: most payload of one request.
        frame_s: time for a frame, in addition to that of its payload.
    """

    def __init__(
        self,
        stream: Stream,
        session: RemoteSession,
        tally: Tally,
        *,
        window_bytes: int,
        frame_s: float,
    ) -> None:
        if session.mapping is None:
            raise KVHearthError(Reason.BAD_MESSAGE, "this session did not ask for the arena")
        self._mapping: ArenaMapping = session.mapping
        self._generations = session.mapping.generations
        self._stream = stream
        self._session = session
        self._tally = tally
        self._window_bytes = window_bytes
        self._frame_s = frame_s
        self._movers: dict[int, BlockMover | None] = {}
        self._waste: memoryview | None = None

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
            frame, records = self.receive(self._stream, self._window_bytes, self._frame_s)
            answer = work.get(frame.kind)
            if answer is None:
                raise KVHearthError(Reason.BAD_MESSAGE, f"no request is {frame.kind.name}")
            self._session.meter.call()
            self._tally.add("gateway_requests", 1, frame.kind.name.lower())
            answer(frame, records)

    @staticmethod
    def receive(stream: Stream, payload_max: int, frame_s: float) -> tuple[DataFrame, bytearray]:
        """Return a frame's header and records; its payload is still to be received.

        Raises:
            OSError: as ``Stream.read``.
            KVHearthError: ``bad_message``.
        """
        end = time.monotonic() + frame_s
        frame = DataFrame.unpack(bytes(stream.read(_HEADER_BYTES, end)))
        if frame.payload_bytes > payload_max:
            raise KVHearthError(
                Reason.BAD_MESSAGE,
                f"a frame with {frame.payload_bytes} bytes of payload, at most {payload_max}",
            )
        return frame, stream.read(frame.count * RECORD_BYTES[frame.kind], end)

    # -- stores ------------------------------------------------------------------------------------

    def _put(self, frame: DataFrame, records: bytearray) -> None:
        extents = _extents(records)
        if sum(each.bytes for each in extents) != frame.payload_bytes or not extents:
            raise KVHearthError(Reason.BAD_MESSAGE, "a put's payload is not that of its extents")
        outcomes = self._store(extents, self._end(frame.payload_bytes))
        self._tally.add("gateway_bytes", frame.payload_bytes, "in")
        self._say(DataKind.STORED, frame.number, bytes(outcomes))

    def _store(self, extents: list[_Extent], end: float) -> list[int]:
        book, put = self._session.book, Put(self._stream)
        outcomes: list[int] = list(book.begin_put(put, [(one.slot, one.place) for one in extents]))
        try:
            self._mark_stale(extents, outcomes)
            if self._mapping.unpopulated.bounds is not None:
                self._populate(extents, outcomes)
            for first, last in _batches(extents, outcomes):
                batch = extents[first:last]
                if outcomes[first] != Outcome.OK:
                    self._discard(sum(each.bytes for each in batch), end)
                    continue
                self._stream.fill([self._view(each) for each in batch], end)
                for at in self._wrong(batch):
                    outcomes[first + at] = Outcome.CHECKSUM_MISMATCH
            if not self._mapping.alive():
                raise KVHearthError(Reason.DAEMON_AWAY, "the daemon ended; attach again")
            self._mark_stale(extents, outcomes)
        finally:
            book.end_put(put)
        self._count(outcomes)
        return outcomes

    def _mark_stale(self, extents: list[_Extent], outcomes: list[int]) -> None:
        """Note the extents whose slots have left use."""
        for at, each in enumerate(extents):
            if outcomes[at] == Outcome.OK and not self._live(each):
                outcomes[at] = Outcome.STALE_GENERATION

    def _populate(self, extents: list[_Extent], outcomes: list[int]) -> None:
        """Have the kernel populate the slots; note the extents for which there is no memory."""
        at = [index for index, outcome in enumerate(outcomes) if outcome == Outcome.OK]
        places = [extents[index].place for index in at]
        addresses = [self._mapping.address(segment) + offset for segment, offset, _, _ in places]
        sizes = np.array([length for _, _, length, _ in places], np.int64)
        failed = self._mapping.unpopulated.populate(np.array(addresses, np.int64), sizes)
        for index in np.array(at)[failed].tolist():
            outcomes[index] = Outcome.NO_MEMORY

    def _wrong(self, batch: Sequence[_Extent]) -> list[int]:
        """Return which extents' bytes are not those of their checksums."""
        summed = [at for at, each in enumerate(batch) if each.checksum]
        if not summed:
            return []
        length = batch[0].bytes
        mover = self._mover(length) if length < _ALONE_BYTES else None
        if mover is None or any(batch[at].bytes != length for at in summed):
            sums = [checksum_of(self._view(batch[at])) for at in summed]
        else:
            addresses = [self._mapping.address(batch[at].place[0]) for at in summed]
            offsets = [batch[at].place[1] for at in summed]
            found = mover.sum(np.array(addresses, np.int64) + np.array(offsets, np.int64))
            sums = [row.tobytes() for row in found]
        return [at for at, found in zip(summed, sums, strict=True) if batch[at].checksum != found]

    def _mover(self, length: int) -> BlockMover | None:
        if length not in self._movers:
            self._movers.clear()
            self._movers[length] = block_mover([(0, 0, length)])
        return self._movers[length]

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
        extents = _extents(records)
        if frame.payload_bytes or sum(each.bytes for each in extents) > self._window_bytes:
            raise KVHearthError(
                Reason.BAD_MESSAGE,
                f"a get has no payload, and asks for at most {self._window_bytes} bytes",
            )
        leased = self._session.book.readable([(one.slot, one.place) for one in extents])
        outcomes: list[int] = [
            (Outcome.OK if self._live(each) else Outcome.STALE_GENERATION)
            if good
            else Outcome.FOREIGN_EXTENT
            for each, good in zip(extents, leased, strict=True)
        ]
        chosen = [one for one, found in zip(extents, outcomes, strict=True) if found == Outcome.OK]
        size = sum(each.bytes for each in chosen)
        header = DataFrame(DataKind.BYTES, len(outcomes), frame.number, size).pack()
        parts: list[memoryview | bytes] = [header + bytes(outcomes)]
        parts += [self._view(each) for each in chosen]
        self._stream.send(parts, self._end(size))
        alive = self._mapping.alive()
        for at, each in enumerate(extents):
            if outcomes[at] == Outcome.OK and not (alive and self._live(each)):
                outcomes[at] = Outcome.STALE_GENERATION
        self._count(outcomes)
        self._tally.add("gateway_bytes", size, "out")
        self._say(DataKind.COPIED, frame.number, bytes(outcomes))

    # -- both --------------------------------------------------------------------------------------

    def _say(self, kind: DataKind, number: int, outcomes: bytes) -> None:
        header = DataFrame(kind, len(outcomes), number, 0).pack()
        self._stream.send([header + outcomes], self._end(0))

    def _end(self, size: int) -> float:
        return time.monotonic() + self._frame_s + size / RATE_LEAST

    def _live(self, extent: _Extent) -> bool:
        return bool(self._generations[extent.slot] == extent.place[3])

    def _view(self, extent: _Extent) -> memoryview:
        segment, offset, length, _ = extent.place
        return self._mapping.view(segment)[offset : offset + length].data

    def _count(self, outcomes: Sequence[int]) -> None:
        for outcome in set(outcomes) - {Outcome.OK}:
            self._tally.add(
                "gateway_extents_refused", outcomes.count(outcome), Outcome(outcome).name.lower()
            )


_HEADER_BYTES = len(DataFrame(DataKind.OPEN, 0, 0, 0).pack())


def _extents(records: bytearray) -> list[_Extent]:
    """Parse the records of a request; ``checksum`` is empty where none travels."""
    return [
        _Extent(
            slot, (segment, offset, length, generation), checksum if flags & FLAG_SUMMED else b""
        )
        for slot, segment, flags, offset, length, generation, checksum in EXTENT_RECORD.iter_unpack(
            records
        )
    ]


def _batches(extents: list[_Extent], outcomes: list[int]) -> Iterator[tuple[int, int]]:
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
