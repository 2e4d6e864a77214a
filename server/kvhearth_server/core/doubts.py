"""Reservations that were aborted in doubt, so that a later word can free what they put aside."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvhearth_server.core.table import SlotTable

if TYPE_CHECKING:
    from kvhearth_server.core.groups import Handed

DOUBTS_REMEMBERED = 1024
_SLOTS_KEPT_MIN = 4096


class Doubts:
    """What each of one group's reservations was when it was aborted in doubt.

    Memory is bounded by the number of reservations and by what is still put aside: records of which
    nothing is are dropped when there is twice as much on record as there was at the last look.
    """

    def __init__(self) -> None:
        self._handed: OrderedDict[int, list[Handed]] = OrderedDict()
        self._slots = 0
        self._look_at = _SLOTS_KEPT_MIN

    def __contains__(self, reservation_id: int) -> bool:
        return reservation_id in self._handed

    def __len__(self) -> int:
        return len(self._handed)

    @property
    def slot_count(self) -> int:
        """Slots on record."""
        return self._slots

    def get(self, reservation_id: int) -> list[Handed] | None:
        """What a reservation was, if it was aborted in doubt."""
        return self._handed.get(reservation_id)

    def add(self, table: SlotTable, owner: int, reservation_id: int, handed: list[Handed]) -> None:
        """Remember a reservation; of too many the oldest is forgotten, and what it put aside comes
        back with the group's end.
        """
        self._handed[reservation_id] = handed
        self._slots += _size(handed)
        while len(self._handed) > DOUBTS_REMEMBERED:
            self._slots -= _size(self._handed.popitem(last=False)[1])
        if self._slots > self._look_at:
            for number, parts in list(self._handed.items()):
                if not any(len(part.still_held(table, owner)) for part in parts):
                    self.pop(number)
            self._look_at = max(_SLOTS_KEPT_MIN, 2 * self._slots)

    def clear(self) -> None:
        """Forget all."""
        self._handed.clear()
        self._slots = 0

    def pop(self, reservation_id: int) -> list[Handed] | None:
        """Forget a reservation; what it was."""
        handed = self._handed.pop(reservation_id, None)
        if handed is not None:
            self._slots -= _size(handed)
        return handed


def _size(handed: list[Handed]) -> int:
    return sum(part.slots.size for part in handed)
