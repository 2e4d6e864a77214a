"""The daemon's side of the shared index: one table a segment, in a memfd that clients only read.

A table follows the core by its actions. Removed blocks need no action: the removal bumps their
generations, which voids their entries.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref

import numpy as np

from kvhearth.model import I64
from kvhearth.native import available
from kvhearth.native.blocks import address_of
from kvhearth.native.table import KEY_BYTES_MAX, SPACE_MAX, Shape, Table
from kvhearth_server.core.actions import Action, Bind, BindOne, Summed
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.slot_table import Geometry, State
from kvhearth_server.core.state import CoreState
from kvhearth_server.memory.mapping import make_memfd, seal

_SUMMED = int(State.SUMMED)
_PORTION = 8192
"""Blocks that are published at once after an adoption."""


class SharedIndex:
    """Tables of all segments over a core's state; their memory goes with this object.

    Raises:
        OSError: no address space, or no native module.
    """

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._version = -1
        self._spaces: dict[int, tuple[int, int]] = {}
        """By namespace number, its epoch and its first space."""
        self._next_space = 1
        self._fds: list[int] = []
        weakref.finalize(self, _close_all, self._fds)
        geometry = state.table.geometry
        segments = range(len(geometry.segments))
        self._tables = [self._open(_shape(geometry, segment)) for segment in segments]
        self.rooms = [table.room for table in self._tables]
        """By segment, the word that tells clients how many bytes may still be leased."""
        self._ones: list[BindOne] = []
        """Blocks that ``publish_noted`` publishes together."""
        self._columns = address_of(state.table.checksum), address_of(state.table.flags)

    def _open(self, shape: Shape) -> Table:
        descriptor = make_memfd("kvhearth-index", shape.bytes)
        self._fds.append(descriptor)
        memory = np.frombuffer(mmap.mmap(descriptor, shape.bytes), np.uint8)
        seal(descriptor, read_only=True)
        return Table(shape, memory, self._state.table.generation)

    def shape(self, segment: int) -> Shape:
        """Shape of a segment's table."""
        return self._tables[segment].shape

    def table(self, segment: int) -> Table:
        """A segment's table."""
        return self._tables[segment]

    def reopen(self, segment: int) -> int:
        """Return a descriptor for a client of a segment; the caller closes it."""
        return os.dup(self._fds[segment])

    def follow(self) -> None:
        """Give new spaces to namespaces that are new or have a new epoch; forget the others'."""
        namespaces = self._state.namespaces
        if namespaces.version == self._version:
            return
        self._version = namespaces.version
        living = {each.number: each for each in namespaces}
        for number in [number for number in self._spaces if number not in living]:
            del self._spaces[number]
            for table in self._tables:
                table.use(number, 0, 0)
        for number, namespace in living.items():
            if self._spaces.get(number, (-1, 0))[0] != namespace.epoch:
                self._renew(namespace)

    def _renew(self, namespace: Namespace) -> None:
        contract, space = namespace.contract, self._next_space
        end = space + len(contract.groups)
        if contract.hash_bytes > KEY_BYTES_MAX or end > SPACE_MAX:
            space = 0
        else:
            self._next_space = end
        self._spaces[namespace.number] = namespace.epoch, space
        table = self._tables[self._state.segment_of[namespace.tenant]]
        table.use(namespace.number, namespace.epoch, space)

    def note(self, action: Action) -> None:
        """Publish the blocks that an action makes servable, unless they are gone already.

        Those that were bound one by one wait for ``publish_noted``.
        """
        match action:
            case BindOne():
                if action.state is State.SUMMED:
                    self._ones.append(action)
            case Bind():
                self._bind(action)
            case Summed():
                self._publish_heads(action.slots[self._state.table.head[action.slots] == 0])

    def _bind(self, action: Bind) -> None:
        if action.state is not State.SUMMED:
            return
        table, heads = self._state.table, action.slots[:, 0]
        # A later step of the same call may have removed some, and bound others to their slots.
        same = (table.sequence[heads] == action.sequences) & (table.state[heads] == _SUMMED)
        slots, keys = action.slots, action.keys
        if not same.all():
            slots = slots[same]
            keys = [key for key, its in zip(keys, same.tolist(), strict=True) if its]
        self._publish(action.namespace, action.group, action.epoch, slots, b"".join(keys))

    def publish_noted(self) -> None:
        """Publish the blocks that were bound one by one; call it when all actions were noted."""
        if not self._ones:
            return
        ones, self._ones = self._ones, []
        states, sequences = self._state.table.state, self._state.table.sequence
        alike: dict[tuple[int, int, int], list[BindOne]] = {}
        for one in ones:
            if states.item(one.slot) == _SUMMED and sequences.item(one.slot) == one.sequence:
                alike.setdefault((one.namespace, one.group, one.epoch), []).append(one)
        for (namespace, group, epoch), some in alike.items():
            slots = np.array([[one.slot] for one in some], np.int64)
            keys = b"".join([one.key for one in some])
            self._publish(namespace, group, epoch, slots, keys)

    def publish_all(self) -> None:
        """Publish the blocks of an adopted arena."""
        self.follow()
        for _, _, heads in self._state.index.spaces():
            for start in range(0, len(heads), _PORTION):
                self._publish_heads(heads[start : start + _PORTION])

    def _publish_heads(self, heads: I64) -> None:
        state, table = self._state, self._state.table
        heads = heads[table.state[heads] == _SUMMED]
        for number, group, alike in table.by_kind(heads):
            namespace = state.namespaces.get(number)
            chosen = alike[table.epoch[alike] == namespace.epoch]
            slots = table.all_shards(chosen, namespace.contract.groups[group].shards)
            keys = b"".join(state.index.keys(chosen))
            self._publish(number, group, namespace.epoch, slots, keys)

    def _publish(self, number: int, group: int, epoch: int, slots: I64, keys: bytes) -> None:
        """Publish blocks of one group whose slots are all SUMMED."""
        current, space = self._spaces.get(number, (-1, 0))
        if not space or current != epoch or not len(slots):
            return
        namespace = self._state.namespaces.get(number)
        table = self._tables[self._state.segment_of[namespace.tenant]]
        table.put(space + group, slots, keys, namespace.contract.hash_bytes, *self._columns)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _shape(geometry: Geometry, segment: int) -> Shape:
    own = geometry.segments[segment]
    return Shape(
        segment=segment,
        segment_bytes=geometry.segment_bytes(segment),
        first_slot=own.first_slab * geometry.stride,
        slot_count=own.slabs * geometry.stride,
        stride=geometry.stride,
        slab_bytes=geometry.slab_bytes,
        slot_bytes_min=geometry.slot_bytes_min,
        seed=secrets.randbits(62),
    )


def open_shared_index(state: CoreState) -> SharedIndex | str:
    """Return the tables over a state, or the reason why there can be none."""
    missing = available()
    if missing is not None:
        return missing
    try:
        return SharedIndex(state)
    except (OSError, OverflowError, ValueError) as error:
        return str(error)
