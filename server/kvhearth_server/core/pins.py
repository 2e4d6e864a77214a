"""Pins: named protection of blocks from eviction, with a time to live."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, U32, Bools
from kvhearth_server.core.holds import hold, hold_room, newly_held_bytes, unhold
from kvhearth_server.core.lookup import KeysItem
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import CoreState, group_spec, require


@dataclass(frozen=True)
class Pin:
    """Slots pinned until ``expires_at``; a slot leaves the pin when its generation changes."""

    segment: int
    slots: U32
    generations: U32
    blocks: int
    expires_at: float


_Name = tuple[int, int]
"""Number of the namespace, and the client's id."""
_STALE_LEAST = 1024


class Pinning:
    """Pins of all namespaces; they outlive the session that made them, until they expire."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._pins: dict[_Name, Pin] = {}
        self._due: list[tuple[float, _Name]] = []
        """Heap of expiries; entries of pins that ended earlier are stale."""
        self._of_namespace: Counter[int] = Counter()
        self._of_segment: Counter[int] = Counter()
        self._listed: Counter[int] = Counter()
        """Slots that a segment's pins name."""
        self.blocks = 0
        """Blocks that all pins name, one once for each."""

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
    ) -> list[Bools]:
        """Pin the present blocks; returns a boolean for each key of each item.

        Raises:
            KVHearthError: ``group_gone``, ``stale_epoch``, ``bad_group``, ``bad_ttl``,
                ``pin_exists``, ``too_many_pins``, ``too_many_keys``, ``held_cap``.
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
            name = (namespace.number, pin_id)
            require(pin_id and name not in self._pins, Reason.PIN_EXISTS, f"pin {pin_id} exists")
            mine, of_tenant = self._of_namespace[namespace.number], self._of_segment[group.segment]
            many = Reason.TOO_MANY_PINS
            require(mine < limits.pins_max, many, f"the namespace has {mine} pins")
            require(of_tenant < limits.tenant_pins_max, many, f"the tenant has {of_tenant} pins")
            flags, parts = [], [np.zeros(0, np.int64)]
            for item in items:
                spec = group_spec(namespace.contract, item.kv_group)
                heads = state.index.find(namespace.number, item.kv_group, item.keys)
                safe = np.maximum(heads, 0)
                good = (heads >= 0) & (table.epoch[safe] == namespace.epoch)
                flags.append(good)
                parts.append(table.all_shards(heads[good], spec.shards).reshape(-1))
            slots = np.unique(np.concatenate(parts))
            self._check_lists(group.segment, len(slots))
            require(
                newly_held_bytes(state, slots) <= hold_room(state, group.segment),
                Reason.HELD_CAP,
                "leases, stocks, pins and quarantine are at their cap; unpin or release some",
            )
            hold(state, group.segment, slots, pin=True)
            generations = table.generation[slots].copy()
            kept = slots.astype(np.uint32)
            blocks = sum(int(np.count_nonzero(good)) for good in flags)
            state.count("retained", blocks)
            self._add(name, Pin(group.segment, kept, generations, blocks, now + ttl_s))
            return flags

    @contextmanager
    def _refusals_counted(self, items: list[KeysItem]) -> Iterator[None]:
        try:
            yield
        except KVHearthError:
            self._state.count("retained_ended", sum(len(item.keys) for item in items), "refused")
            raise

    def _check_lists(self, segment: int, more: int) -> None:
        listed = self._listed[segment]
        most = self._state.limits.pinned_slots_max
        require(
            listed + more <= most,
            Reason.TOO_MANY_PINS,
            f"pins name {listed} slots, at most {most}; unpin some",
        )

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

    def expire(self, now: float, most: int | None = None) -> int:
        """End expired pins, at most ``most``; returns their number."""
        ended = 0
        while self._due and self._due[0][0] <= now and ended != most:
            expires_at, name = heapq.heappop(self._due)
            pin = self._pins.get(name)
            if pin is not None and pin.expires_at == expires_at:
                ended += self._end(name, "expired")
        return ended

    def held(self, segment: int) -> list[I64]:
        """Slots of each pin on a segment that are still part of it."""
        return [self._own(pin) for pin in self._pins.values() if pin.segment == segment]

    def _own(self, pin: Pin) -> I64:
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

    def _add(self, name: _Name, pin: Pin) -> None:
        self._pins[name] = pin
        if len(self._due) > 2 * len(self._pins) + _STALE_LEAST:
            self._due = [(each.expires_at, of) for of, each in self._pins.items()]
            heapq.heapify(self._due)
        else:
            heapq.heappush(self._due, (pin.expires_at, name))
        self._count(name, pin, 1)

    def _count(self, name: _Name, pin: Pin, sign: int) -> None:
        self._of_namespace[name[0]] += sign
        if not self._of_namespace[name[0]]:
            del self._of_namespace[name[0]]
        self._of_segment[pin.segment] += sign
        self._listed[pin.segment] += sign * len(pin.slots)
        self.blocks += sign * pin.blocks
        self._state.pins += sign

    def _end(self, name: _Name, how: str) -> bool:
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        self._count(name, pin, -1)
        self._state.count("retained_ended", pin.blocks, how)
        unhold(self._state, pin.segment, self._own(pin), pin=True)
        return True
