"""Pins: named protection of blocks from eviction, with a time to live."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, U32, Bools
from kvhearth_server.core.holds import hold, hold_room, newly_held_bytes, unhold
from kvhearth_server.core.lookup import KeysItem
from kvhearth_server.core.namespaces import check_epoch
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import CoreState, flat, require


@dataclass(frozen=True)
class Pin:
    """Slots pinned until ``expires_at``; a slot leaves the pin when its generation changes."""

    segment: int
    slots: U32
    generations: U32
    expires_at: float


class Pinning:
    """Pins of all namespaces; they outlive the session that made them, until they expire."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._pins: dict[tuple[int, int], Pin] = {}

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
        state, table = self._state, self._state.table
        group = state.group_of(session)
        namespace = state.namespaces.get(group.namespace)
        check_epoch(namespace, epoch)
        limits = state.limits
        require(
            0 < ttl_s <= limits.pin_ttl_max_s,
            Reason.BAD_TTL,
            f"a pin lives 0..{limits.pin_ttl_max_s} s, not {ttl_s}",
        )
        asked = sum(len(item.keys) for item in items)
        require(asked <= limits.keys_max, Reason.TOO_MANY_KEYS, f"at most {limits.keys_max} keys")
        name = (namespace.number, pin_id)
        require(pin_id and name not in self._pins, Reason.PIN_EXISTS, f"pin {pin_id} exists")
        mine = sum(number == namespace.number for number, _ in self._pins)
        require(mine < limits.pins_max, Reason.TOO_MANY_PINS, f"the namespace has {mine} pins")
        flags, parts = [], [np.zeros(0, np.int64)]
        for item in items:
            spec = state.spec(namespace, item.kv_group)
            heads = state.index.find(namespace.number, item.kv_group, item.keys)
            safe = np.maximum(heads, 0)
            good = (heads >= 0) & (table.epoch[safe] == namespace.epoch)
            flags.append(good)
            parts.append(flat(table.all_shards(heads[good], spec.shards)))
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
        self._pins[name] = Pin(group.segment, kept, generations, now + ttl_s)
        return flags

    def _check_lists(self, segment: int, more: int) -> None:
        listed = sum(len(pin.slots) for pin in self._pins.values() if pin.segment == segment)
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
        unknown = [i for i in pin_ids if not self._end((group.namespace, i))]
        if unknown:
            text = ", ".join(map(str, unknown[:8]))
            raise KVHearthError(Reason.UNKNOWN_PIN, f"this namespace has no pin {text}")

    def expire(self, now: float) -> int:
        """End expired pins; returns their number."""
        over = [name for name, pin in self._pins.items() if pin.expires_at <= now]
        for name in over:
            self._end(name)
        return len(over)

    def held(self, segment: int) -> list[I64]:
        """Slots of each pin on a segment that are still part of it."""
        return [self._own(pin) for pin in self._pins.values() if pin.segment == segment]

    def _own(self, pin: Pin) -> I64:
        table = self._state.table
        same = table.generation[pin.slots] == pin.generations
        bound = np.isin(table.state[pin.slots], (State.COMMITTED, State.SUMMED))
        own: I64 = pin.slots[same & bound].astype(np.int64)
        return own

    def _end(self, name: tuple[int, int]) -> bool:
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        unhold(self._state, pin.segment, self._own(pin), pin=True)
        return True
