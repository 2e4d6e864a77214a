"""Differential test of the core: a core with fast paths against one without."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError
from kvhearth_server.core.actions import BindOne
from kvhearth_server.core.slot_table import State
from support.core_kit import Rig, key


def plain(value: Any) -> Any:
    """Convert a value to a form that can be compared with ``==``."""
    if isinstance(value, BindOne):
        value = value.whole()
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, [plain(item) for item in vars(value).values()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class Pair:
    """Runs steps on both cores. A step is a tuple: the name of a method, and its arguments after
    the core.

    Args:
        made: the contract of the engine on both.
        key_count: keys are numbered below this.
        rig: options of both cores, see ``Rig``.
    """

    def __init__(self, made: Contract, key_count: int, slabs: int, **rig: Any) -> None:
        self.short, self.long = (Rig(slabs, **rig) for _ in range(2))
        self.session, _ = (each.attach(made) for each in (self.short, self.long))
        self._key_count = key_count
        self.long.core.writing._few.commit = lambda *args: None  # type: ignore[method-assign]
        self.long.core.reading._prefix_path.lookup = lambda *args, **_: None  # type: ignore[method-assign]

    def do(self, step: tuple[Any, ...]) -> None:
        """Run a step on both cores, and compare answers and resulting states."""
        answers = []
        for rig in (self.short, self.long):
            try:
                answers.append(plain(getattr(self, step[0])(rig, *step[1:])))
            except KVHearthError as error:
                answers.append((error.reason, error.message))
        assert answers[0] == answers[1]
        assert self.picture(self.short) == self.picture(self.long)

    def put(
        self, rig: Rig, numbers: list[int], kv_group: int, summed: bool, parent: int = -1
    ) -> Any:
        reserved = rig.reserve(self.session, len(numbers), kv_group)
        if reserved.short is not None:
            for part in reserved.handed:
                rig.abort(self.session, part.slots, part.generations)
            return reserved.short
        (part,) = reserved.handed
        slots, generations = part.slots, part.generations
        before = key(parent) if 0 <= parent < self._key_count else b"x" * (parent >= 0)
        named = [key(number) for number in numbers]
        item = rig.item(named, slots, generations, kv_group=kv_group, parent=before, summed=summed)
        try:
            return rig.commit(self.session, item)
        except KVHearthError:
            rig.abort(self.session, slots, generations)
            raise

    def lookup(self, rig: Rig, numbers: list[int], kv_group: int, lease_id: int) -> Any:
        named = [key(number) for number in numbers]
        return rig.lookup(self.session, named, kv_group=kv_group, lease_id=lease_id)

    def release(self, rig: Rig, lease_id: int) -> None:
        rig.core.reading.release(self.session, [lease_id])

    def pin(self, rig: Rig, number: int, kv_group: int, pin_id: int) -> Any:
        return rig.pin(self.session, pin_id, [key(number)], kv_group=kv_group)

    def sum(self, rig: Rig, number: int, kv_group: int) -> Any:
        head = rig.head(self.session, key(number), kv_group)
        if head < 0 or rig.state.table.state[head] != State.COMMITTED:
            return None
        slots = np.array([[head]], np.int64)
        sums = np.zeros((1, 1, 16), np.uint8)
        return rig.core.writing.summed(slots, rig.state.table.generation[slots], sums)

    def bump(self, rig: Rig) -> Any:
        return rig.core.bump_epoch(self.session, rig.epoch(self.session), only_alone=False)

    def picture(self, rig: Rig) -> Any:
        """Return the whole state of a core."""
        state, group = rig.state, rig.group(self.session)
        arrays = {
            name: array.tobytes()
            for owner in (state.table, state.policies._arrays)
            for name, array in vars(owner).items()
            if isinstance(array, np.ndarray) and name != "position"
        }
        namespace = state.namespaces.get(group.namespace)
        return (
            arrays,
            [vars(books) for books in state.books],
            state.counts,
            plain(state.actions),
            (state.clock, state.sequence, state.release_epoch, state.events.next_sequence),
            {number: slots.tolist() for number, slots in group.leases.items()},
            (group.leased_at, list(group.released_early), group.stock_bytes),
            (namespace.blocks, namespace.used_bytes),
            {place: state.policies.members(*place).tolist() for place in state.policies.places()},
            list(state.index.items()),
        )
