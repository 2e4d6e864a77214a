"""Pins: hints that blocks will be wanted again, for a limited time. Eviction takes them last."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, U32, Bools
from kvhearth_server.core.holds import keep, unkeep
from kvhearth_server.core.lookup import KeysItem
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import CoreState, group_spec, require


@dataclass(frozen=True)
class Pin:
    """Slots pinned until ``expires_at``; a slot leaves the pin when its generation changes.
    ``session`` is the client's name for what wants the blocks.
    """

    segment: int
    slots: U32
    generations: U32
    expires_at: float
    session: str


_Name = tuple[int, int]
"""Number of the namespace, and the client's id."""
_STALE_LEAST = 1024


class Pinning:
    """Pins of all namespaces. They outlive the engine that made them, and end with their time,
    their weights epoch, or a word of the client or the operator.
    """

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._pins: dict[_Name, Pin] = {}
        self._due: list[tuple[float, _Name]] = []
        """Heap of expiries; entries of pins that ended earlier are stale."""
        self._of_namespace: Counter[int] = Counter()
        self._of_segment: Counter[int] = Counter()
        self._listed: Counter[int] = Counter()
        """Slots that a segment's pins name."""
        state.namespaces.end_pins = self.end_all

    def __len__(self) -> int:
        return len(self._pins)

    def pin(
        self,
        session: int,
        epoch: int,
        pin_id: int,
        items: list[KeysItem],
        *,
        ttl_s: float,
        now: float,
        name: str = "",
    ) -> list[Bools]:
        """Pin the present blocks; returns a boolean for each key of each item.

        Args:
            name: of the dialogue that wants them, by which an operator may end the pin.

        Raises:
            KVHearthError: ``group_gone``, ``stale_epoch``, ``bad_group``, ``bad_ttl``,
                ``pin_exists``, ``too_many_pins``, ``too_many_keys``.
        """
        with self._refusals_counted(items):
            state, table = self._state, self._state.table
            group, namespace = state.current(session, epoch)
            limits = state.limits
            require(
                0 < ttl_s <= limits.pin_ttl_max_s,
                Reason.BAD_TTL,
                f"a pin lives 0..{limits.pin_ttl_max_s} s, not {ttl_s}",
            )
            state.check_count(sum(len(item.keys) for item in items))
            own = (namespace.number, pin_id)
            require(pin_id and own not in self._pins, Reason.PIN_EXISTS, f"pin {pin_id} exists")
            flags, parts = [], [np.zeros(0, np.int64)]
            for item in items:
                spec = group_spec(namespace.contract, item.kv_group)
                heads = state.index.find(namespace.number, item.kv_group, item.keys)
                safe = np.maximum(heads, 0)
                good = (heads >= 0) & (table.epoch[safe] == namespace.epoch)
                flags.append(good)
                parts.append(table.all_shards(heads[good], spec.shards).reshape(-1))
            slots = np.unique(np.concatenate(parts))
            self._check_bounds(namespace.number, group.segment, slots)
            keep(state, group.segment, slots)
            generations = table.generation[slots].copy()
            kept = slots.astype(np.uint32)
            self._add(own, Pin(group.segment, kept, generations, now + ttl_s, name))
            return flags

    @contextmanager
    def _refusals_counted(self, items: list[KeysItem]) -> Iterator[None]:
        try:
            yield
        except KVHearthError:
            self._state.count("retained_ended", sum(len(item.keys) for item in items), "refused")
            raise

    def _check_bounds(self, namespace: int, segment: int, slots: I64) -> None:
        limits, books = self._state.limits, self._state.books[segment]
        mine, of_tenant = self._of_namespace[namespace], self._of_segment[segment]
        listed, most = self._listed[segment], limits.pinned_slots_max
        table, room = self._state.table, int(books.capacity * limits.pinned_fraction_max)
        more = table.total_bytes(slots[table.pins[slots] == 0])
        for good, text in (
            (mine < limits.pins_max, f"the namespace has {mine} pins"),
            (of_tenant < limits.tenant_pins_max, f"the tenant has {of_tenant} pins"),
            (listed + len(slots) <= most, f"pins name {listed} slots, at most {most}; unpin some"),
            (
                books.pinned + more <= room,
                f"pins keep {books.pinned} bytes, {more} more would exceed pinned_fraction_max; "
                "unpin some",
            ),
        ):
            require(good, Reason.TOO_MANY_PINS, text)

    def unpin(self, session: int, pin_ids: list[int]) -> None:
        """End pins of the session's namespace. Known ones end in any case.

        Raises:
            KVHearthError: ``group_gone``; ``unknown_pin`` naming the ids.
        """
        group = self._state.group_of(session)
        unknown = [i for i in pin_ids if not self._end((group.namespace, i), "released")]
        if unknown:
            text = ", ".join(map(str, unknown[:8]))
            raise KVHearthError(Reason.UNKNOWN_PIN, f"this namespace has no pin {text}")

    def end_all(
        self, namespace: int | None, how: str, *, name: str | None = None, most: int | None = None
    ) -> int:
        """End pins of a namespace (None for all), or those of one name there, at most ``most``;
        returns their number.
        """
        found = [
            own
            for own, pin in self._pins.items()
            if namespace in (None, own[0]) and name in (None, pin.session)
        ]
        return sum(self._end(own, how) for own in found[:most])

    def expire(self, now: float, most: int | None = None) -> int:
        """End expired pins, at most ``most``; returns their number."""
        ended = 0
        while self._due and self._due[0][0] <= now and ended != most:
            expires_at, own = heapq.heappop(self._due)
            pin = self._pins.get(own)
            if pin is not None and pin.expires_at == expires_at:
                ended += self._end(own, "expired")
        return ended

    def listed(self) -> list[tuple[int, Pin]]:
        """All pins, with the numbers of their namespaces."""
        return [(own[0], pin) for own, pin in self._pins.items()]

    def held(self, segment: int) -> list[I64]:
        """Slots of each pin on a segment that are still part of it."""
        return [self.living(pin) for pin in self._pins.values() if pin.segment == segment]

    def living(self, pin: Pin) -> I64:
        """Slots of a pin that are still part of it."""
        table = self._state.table
        same = table.generation[pin.slots] == pin.generations
        bound = np.isin(table.state[pin.slots], (State.COMMITTED, State.SUMMED))
        own: I64 = pin.slots[same & bound].astype(np.int64)
        return own

    def check(self) -> None:
        """Compare the counts with the pins.

        Raises:
            ValueError: with the counts that differ.
        """
        found = Counter[int](), Counter[int](), Counter[int]()
        for (namespace, _), pin in self._pins.items():
            found[0][namespace] += 1
            found[1][pin.segment] += 1
            found[2][pin.segment] += len(pin.slots)
        booked = self._of_namespace, self._of_segment, self._listed
        # Counters are equal if they differ only by zeros.
        if found != booked or len(self._due) < len(self._pins):
            raise ValueError(f"pins: counted {found}, booked {booked}, {len(self._due)} expiries")
        every = [np.zeros(0, np.int64), *(self.living(pin) for pin in self._pins.values())]
        heads = int(np.count_nonzero(self._state.table.head[np.unique(np.concatenate(every))] == 0))
        if heads != (retained := self._state.retained_blocks):
            raise ValueError(f"retained blocks: counted {heads}, booked {retained}")

    def _add(self, own: _Name, pin: Pin) -> None:
        self._pins[own] = pin
        if len(self._due) > 2 * len(self._pins) + _STALE_LEAST:
            self._due = [(each.expires_at, of) for of, each in self._pins.items()]
            heapq.heapify(self._due)
        else:
            heapq.heappush(self._due, (pin.expires_at, own))
        self._count(own, pin, 1)

    def _count(self, own: _Name, pin: Pin, sign: int) -> None:
        self._of_namespace[own[0]] += sign
        if not self._of_namespace[own[0]]:
            del self._of_namespace[own[0]]
        self._of_segment[pin.segment] += sign
        self._listed[pin.segment] += sign * len(pin.slots)

    def _end(self, own: _Name, how: str) -> bool:
        pin = self._pins.pop(own, None)
        if pin is None:
            return False
        self._count(own, pin, -1)
        unkeep(self._state, pin.segment, self.living(pin), how)
        return True
