"""The book of a group: which memory its remote processes may write and read now.

The daemon's own replies fill it: a reservation's extents may be written until a commit or an abort
names them, a lookup's may be read until its lease ends. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvhearth.model import EXTENT_BYTES, EXTENT_DTYPE, EXTENT_RECORD
from kvhearth.wire.remote import Outcome
from kvhearth_server.gateway.streams import Stream

GRANTS_MAX = 1 << 20
"""Most extents in a book, for writing and for reading each."""
_RESERVATIONS_MAX = 1 << 16
"""Most reservations that are remembered, so that a second answer grants nothing again."""

Place = tuple[int, int, int, int]
"""Segment, offset, length and generation of a slot's extent."""


def places(extents: bytes | bytearray) -> list[tuple[int, Place]]:
    """Return the slot and place of each record in a blob of extents."""
    whole = len(extents) - len(extents) % EXTENT_BYTES
    return [
        (slot, (segment, offset, length, generation))
        for slot, segment, _, offset, length, generation, _ in EXTENT_RECORD.iter_unpack(
            memoryview(extents)[:whole]
        )
    ]


@dataclass(eq=False)
class Put:
    """A put under way.

    Attributes:
        stream: its connection, which ends the put if it must not wait.
        slots: slots that it writes.
    """

    stream: Stream
    slots: list[int] = field(default_factory=list)


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

    blobs: list[bytes] = field(default_factory=list)
    count: int = 0
    bytes: int = 0
    known: bool = False


class Book:
    """Grants of one group.

    Attributes:
        ranks: those of its ranks that are attached through this gateway.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self._changed = threading.Condition()
        self._writable: dict[int, tuple[Place, int]] = {}
        self._reservations: OrderedDict[int, set[int]] = OrderedDict()
        self._writing: dict[int, Put] = {}
        self._leases: dict[int, _Lease] = {}
        self._leased = 0
        self._leased_bytes = 0
        self._writable_bytes = 0
        self._readable: dict[tuple[int, Place], int] = {}
        self._reserving: dict[int, _Asked] = {}
        self._looking: dict[int, _Asked] = {}
        self._closed = False

    # -- calls -------------------------------------------------------------------------------------

    def reserve(self, reservation: int) -> None:
        """Note that a ``Reserve`` call is about to leave."""
        with self._changed:
            self._reserving.setdefault(reservation, _Asked())

    def reserved(self, reservation: int, blobs: Iterable[bytes]) -> None:
        """Grant the extents of its reply; none after a refusal. A second answer grants nothing."""
        with self._changed:
            asked = self._reserving.pop(reservation, None)
            if asked is None or asked.void or self._closed or reservation in self._reservations:
                return
            granted = self._reservations[reservation] = set()
            for slot, place in (each for blob in blobs for each in places(blob)):
                if slot not in asked.spent and len(self._writable) < GRANTS_MAX:
                    self._drop(slot)
                    self._writable[slot] = place, reservation
                    self._writable_bytes += place[2]
                    granted.add(slot)
            while len(self._reservations) > _RESERVATIONS_MAX:
                self._reservations.popitem(last=False)

    def look_up(self, lease: int) -> None:
        """Note that a ``Lookup`` call with a lease is about to leave."""
        with self._changed:
            self._looking.setdefault(lease, _Asked())

    def leased(self, lease: int, blobs: list[bytes], *, joins: bool = False) -> None:
        """Grant the extents of its reply to readers, until the lease ends; with ``joins``, only to
        those of a lease that has not ended yet.
        """
        records = np.frombuffer(b"".join(blobs), EXTENT_DTYPE)
        count, size = len(records), int(records["length"].sum(dtype=np.int64))
        with self._changed:
            asked = self._looking.pop(lease, None)
            if asked is None or asked.void or self._closed or (lease in self._leases) != joins:
                return
            if count and self._leased + count <= GRANTS_MAX:
                whole = self._leases.setdefault(lease, _Lease())
                whole.blobs += blobs
                whole.count += count
                whole.bytes += size
                self._leased += count
                self._leased_bytes += size
                if whole.known:
                    self._make_readable(blobs)

    def release(self, leases: Iterable[int]) -> None:
        """Take leases from readers, before the ``Release`` leaves."""
        with self._changed:
            for number in leases:
                if (asked := self._looking.get(number)) is not None:
                    asked.void = True
                lease = self._leases.pop(number, None)
                if lease is None:
                    continue
                self._leased -= lease.count
                self._leased_bytes -= lease.bytes
                for blob in lease.blobs if lease.known else ():
                    for each in places(blob):
                        self._forget(each)

    def _make_readable(self, blobs: Iterable[bytes]) -> None:
        for each in (each for blob in blobs for each in places(blob)):
            self._readable[each] = self._readable.get(each, 0) + 1

    def _forget(self, each: tuple[int, Place]) -> None:
        left = self._readable.get(each, 0) - 1
        if left > 0:
            self._readable[each] = left
        else:
            self._readable.pop(each, None)

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
            for put in {self._writing[slot] for slot in named if slot in self._writing}:
                put.stream.end()
            return self._wait(named, time.monotonic() + break_s)

    def _drop(self, slot: int) -> None:
        if (grant := self._writable.pop(slot, None)) is not None:
            self._writable_bytes -= grant[0][2]
            self._reservations.get(grant[1], set()).discard(slot)

    def _wait(self, slots: set[int], end: float) -> bool:
        return self._changed.wait_for(
            lambda: self._writing.keys().isdisjoint(slots), max(0.0, end - time.monotonic())
        )

    # -- transfers ---------------------------------------------------------------------------------

    def begin_put(self, put: Put, extents: Sequence[tuple[int, Place]]) -> list[Outcome]:
        """Mark slots as being written until ``end_put``; others are foreign."""
        outcomes = []
        with self._changed:
            for slot, place in extents:
                grant = self._writable.get(slot)
                good = grant is not None and grant[0] == place and slot not in self._writing
                if good:
                    self._writing[slot] = put
                    put.slots.append(slot)
                outcomes.append(Outcome.OK if good else Outcome.FOREIGN_EXTENT)
        return outcomes

    def end_put(self, put: Put) -> None:
        """Unmark the slots of a put: not a byte of it is written any more. Idempotent."""
        with self._changed:
            for slot in put.slots:
                del self._writing[slot]
            put.slots.clear()
            self._changed.notify_all()

    def readable(self, extents: Sequence[tuple[int, Place]]) -> list[bool]:
        """Return which extents a lease of the group holds."""
        with self._changed:
            for lease in self._leases.values():
                if not lease.known:
                    lease.known = True
                    self._make_readable(lease.blobs)
            return [each in self._readable for each in extents]

    # -- the end -----------------------------------------------------------------------------------

    def close(self, end: float) -> bool:
        """Take back all grants, for good; end the puts under way. Returns as ``retire``."""
        with self._changed:
            self._closed = True
            for table in (self._writable, self._reservations, self._leases, self._readable):
                table.clear()
            self._leased = self._leased_bytes = self._writable_bytes = 0
            for put in set(self._writing.values()):
                put.stream.end()
            return self._changed.wait_for(
                lambda: not self._writing, max(0.0, end - time.monotonic())
            )

    def held(self) -> tuple[int, int]:
        """Return the number of extents that may be written or read, and their bytes."""
        with self._changed:
            return len(self._writable) + self._leased, self._writable_bytes + self._leased_bytes
