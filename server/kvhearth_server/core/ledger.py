"""Books of bytes: for each segment, the use that every slot is counted under."""

from __future__ import annotations

from dataclasses import dataclass

from kvhearth.model import I64
from kvhearth_server.core.slot_table import Pick, SlotTable


@dataclass
class SegmentBooks:
    """Bytes of one segment.

    ``held`` is the part of ``committed`` that a lease, a pin or a write to a slower tier keeps from
    eviction. ``leased_slots`` are slots, not bytes; a slot counts once for each lease on it.
    """

    capacity: int
    reserved: int = 0
    committed: int = 0
    quarantined: int = 0
    loading: int = 0
    held: int = 0
    leased_slots: int = 0

    @property
    def bound(self) -> int:
        """Bytes that eviction could not take now; the quantity that the global cap bounds."""
        return self.reserved + self.quarantined + self.loading + self.held

    @property
    def free(self) -> int:
        """Unused bytes (slack inside slabs included)."""
        return self.capacity - self.reserved - self.committed - self.quarantined - self.loading


class Ledger:
    """Books of all segments; each method books slots of one segment, by their slot size."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        geometry = table.geometry
        self.segments = [
            SegmentBooks(geometry.segment_bytes(i)) for i in range(len(geometry.segments))
        ]

    def reserved(self, segment: int, slots: I64) -> int:
        """Book slots from FREE to RESERVED; returns the bytes."""
        size = self._table.total_bytes(slots)
        self.segments[segment].reserved += size
        return size

    def unreserved(self, segment: int, slots: I64) -> int:
        """Book slots out of RESERVED; the caller books the new use. Returns the bytes."""
        size = self._table.total_bytes(slots)
        self.segments[segment].reserved -= size
        return size

    def committed(self, segment: int, slots: I64, sign: int) -> int:
        """Book slots into (+1) or out of (-1) the index; returns the bytes."""
        size = self._table.total_bytes(slots)
        self.segments[segment].committed += sign * size
        return size

    def quarantined(self, segment: int, slots: I64, sign: int) -> int:
        """Book slots into (+1) or out of (-1) quarantine; returns the bytes."""
        size = self._table.total_bytes(slots)
        self.segments[segment].quarantined += sign * size
        return size

    def loading(self, segment: int, slots: I64, sign: int) -> int:
        """Book slots from FREE to LOADING (+1) or out of LOADING (-1); returns the bytes."""
        size = self._table.total_bytes(slots)
        self.segments[segment].loading += sign * size
        return size

    def held(self, segment: int, slots: Pick, sign: int) -> None:
        """Book committed slots that became (+1) unevictable or evictable again (-1)."""
        self.segments[segment].held += sign * self._table.total_bytes(slots)
