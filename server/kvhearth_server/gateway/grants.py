"""Grants of a group: which memory its remote processes may write and read now.

The daemon's own replies are the source: a reservation's extents may be written until a commit or an
abort names them, a lookup's may be read until its lease ends. Thread-safe.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvhearth.model import EXTENT_BYTES, EXTENT_DTYPE, EXTENT_RECORD, FLAG_SUMMED
from kvhearth.wire.remote import Outcome
from kvhearth_server.gateway.streams import Stream

GRANTS_MAX = 1 << 20
"""Most extents of a group, for writing and for reading each."""
_RESERVATIONS_MAX = 1 << 16
"""Most reservations that are remembered, so that a second answer grants nothing again."""

Place = tuple[int, int, int, int]
"""Segment, offset, length and generation of a slot's extent."""


class Extent(NamedTuple):
    """One record of extents; ``checksum`` is empty where none travels."""

    slot: int
    place: Place
    checksum: bytes = b""

    @property
    def bytes(self) -> int:
        """Length of its payload."""
        return self.place[2]


def extents_of(records: bytes | bytearray) -> list[Extent]:
    """Parse records."""
    return [
        Extent(
            slot, (segment, offset, length, generation), checksum if flags & FLAG_SUMMED else b""
        )
        for slot, segment, flags, offset, length, generation, checksum in EXTENT_RECORD.iter_unpack(
            records
        )
    ]


@dataclass(eq=False)
class _Asked:
    """A call under way whose reply may grant extents: ``spent`` ones were named by a commit or an
    abort meanwhile, ``void`` if none may be granted any more.
    """

    spent: set[int] = field(default_factory=set)
    void: bool = False


@dataclass(eq=False)
class _Lease:
    """Extents of a lease; ``known`` once they are among those that may be read."""

    extents: bytearray = field(default_factory=bytearray)
    known: bool = False


class Grants:
    """Grants of one group.

    Attributes:
        ranks: those of its ranks that are attached through this gateway.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self._changed = threading.Condition()
        self._writable: dict[int, tuple[Place, int]] = {}
        self._reservations: OrderedDict[int, set[int]] = OrderedDict()
        self._writing: dict[int, Stream] = {}
        self._leases: dict[int, _Lease] = {}
        self._leased = 0
        self._readable: dict[tuple[int, Place], int] = {}
        self._reserving: dict[int, _Asked] = {}
        self._looking: dict[int, _Asked] = {}
        self._closed = False

    # -- calls -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reserving(self, reservation: int) -> Iterator[list[bytes]]:
        """Yield a list during a ``Reserve`` call, which takes the extents of its reply: they may
        be written from then on. A second answer grants nothing.
        """
        blobs: list[bytes] = []
        with self._changed:
            self._reserving.setdefault(reservation, _Asked())
        try:
            yield blobs
        finally:
            with self._changed:
                asked = self._reserving.pop(reservation, None)
                if asked is not None and not (asked.void or self._closed):
                    self._reserved(reservation, b"".join(blobs), asked.spent)

    def _reserved(self, reservation: int, extents: bytes, spent: set[int]) -> None:
        if reservation in self._reservations:
            return
        granted = self._reservations[reservation] = set()
        for slot, place, _ in extents_of(extents):
            if slot not in spent and len(self._writable) < GRANTS_MAX:
                self._drop(slot)
                self._writable[slot] = place, reservation
                granted.add(slot)
        while len(self._reservations) > _RESERVATIONS_MAX:
            self._reservations.popitem(last=False)

    @contextlib.contextmanager
    def leasing(self, lease: int, *, joins: bool = False) -> Iterator[list[bytes]]:
        """Yield a list during a ``Lookup`` call, which takes the extents of its reply: they may be
        read from then on, until the lease ends; with ``joins`` only if it has not ended yet.
        """
        blobs: list[bytes] = []
        with self._changed:
            self._looking.setdefault(lease, _Asked())
        try:
            yield blobs
        finally:
            extents = b"".join(blobs)
            count = len(extents) // EXTENT_BYTES
            with self._changed:
                asked = self._looking.pop(lease, None)
                good = asked is not None and not asked.void and not self._closed
                if good and count and (lease in self._leases) == joins:
                    self._add(lease, extents, count)

    def _add(self, lease: int, extents: bytes, count: int) -> None:
        if self._leased + count > GRANTS_MAX:
            return
        whole = self._leases.setdefault(lease, _Lease())
        whole.extents += extents
        self._leased += count
        if whole.known:
            self._make_readable(extents)

    def release(self, leases: Iterable[int]) -> None:
        """Take leases from readers, before the ``Release`` leaves."""
        with self._changed:
            for number in leases:
                if (asked := self._looking.get(number)) is not None:
                    asked.void = True
                lease = self._leases.pop(number, _Lease())
                self._leased -= len(lease.extents) // EXTENT_BYTES
                for slot, place, _ in extents_of(lease.extents) if lease.known else ():
                    self._readable[slot, place] -= 1
                    if not self._readable[slot, place]:
                        del self._readable[slot, place]

    def _make_readable(self, extents: bytes | bytearray) -> None:
        for slot, place, _ in extents_of(extents):
            self._readable[slot, place] = self._readable.get((slot, place), 0) + 1

    def retire(
        self,
        slots: Iterable[int],
        end: float,
        *,
        reservations: Iterable[int] = (),
        break_s: float | None = None,
    ) -> bool:
        """Take slots from writers for good, before a ``Commit`` or ``Abort`` that names them
        leaves; wait until nobody writes to them.

        Args:
            slots: named one by one.
            end: monotonic time until which puts may go on.
            reservations: their slots, too.
            break_s: end the connections of puts that go on, and wait this much longer.

        Returns:
            Whether nobody writes to them any more.
        """
        with self._changed:
            named = set(slots)
            for number in reservations:
                if (asked := self._reserving.get(number)) is not None:
                    asked.void = True
                named |= self._reservations.get(number, set())  # those left of its grants
            for asked in self._reserving.values():
                asked.spent |= named
                asked.void = asked.void or len(asked.spent) > GRANTS_MAX
            for slot in named:
                self._drop(slot)
            if self._wait(named, end):
                return True
            if break_s is None:
                return False
            for stream in {self._writing[slot] for slot in named if slot in self._writing}:
                stream.end()
            return self._wait(named, time.monotonic() + break_s)

    def _drop(self, slot: int) -> None:
        if (grant := self._writable.pop(slot, None)) is not None:
            self._reservations.get(grant[1], set()).discard(slot)

    def _wait(self, slots: set[int], end: float) -> bool:
        return self._changed.wait_for(
            lambda: self._writing.keys().isdisjoint(slots), max(0.0, end - time.monotonic())
        )

    # -- transfers ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def put(self, stream: Stream, extents: Sequence[Extent]) -> Iterator[list[int]]:
        """Yield an ``Outcome`` for each extent of a put: ``OK`` for those that it may write
        meanwhile, ``FOREIGN_EXTENT`` for others.

        Args:
            stream: its connection, which ``retire`` and ``close`` end if the put must not go on.
        """
        outcomes: list[int] = []
        slots: list[int] = []
        with self._changed:
            for slot, place, _ in extents:
                grant = self._writable.get(slot)
                good = grant is not None and grant[0] == place and slot not in self._writing
                if good:
                    self._writing[slot] = stream
                    slots.append(slot)
                outcomes.append(Outcome.OK if good else Outcome.FOREIGN_EXTENT)
        try:
            yield outcomes
        finally:
            with self._changed:
                for slot in slots:
                    del self._writing[slot]
                self._changed.notify_all()

    def readable(self, extents: Sequence[Extent]) -> list[int]:
        """Return an ``Outcome`` for each extent: ``OK`` for those that a lease of the group holds,
        ``FOREIGN_EXTENT`` for others.
        """
        with self._changed:
            for lease in self._leases.values():
                if not lease.known:
                    lease.known = True
                    self._make_readable(lease.extents)
            return [
                Outcome.OK if each[:2] in self._readable else Outcome.FOREIGN_EXTENT
                for each in extents
            ]

    # -- the end -----------------------------------------------------------------------------------

    def close(self, end: float) -> None:
        """Take back all grants, for good; end the puts under way, and wait for them until ``end``
        (monotonic).
        """
        with self._changed:
            self._closed = True
            for table in (self._writable, self._reservations, self._leases, self._readable):
                table.clear()
            self._leased = 0
            for stream in set(self._writing.values()):
                stream.end()
            self._changed.wait_for(lambda: not self._writing, max(0.0, end - time.monotonic()))

    def held(self) -> tuple[int, int]:
        """Return the number of extents that may be written or read, and their bytes."""
        with self._changed:
            sizes = [place[2] for place, _ in self._writable.values()]
            leased = b"".join(lease.extents for lease in self._leases.values())
        lengths = np.frombuffer(leased, EXTENT_DTYPE)["length"]
        return len(sizes) + len(lengths), sum(sizes) + int(lengths.sum(dtype=np.int64))
