"""Model of the core for differential tests: plain objects that specify what a core must do.

The model includes memory. It is divided into units of the smallest slot, and a unit holds the token
last written to it, so that overlapping extents are detected, in whichever slot sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.model import Records
from kvhearth_server.core.core import Core
from kvhearth_server.core.slot_table import Geometry

Token = tuple[Any, ...]
"""Content of one shard, different for every write."""


@dataclass(frozen=True)
class Place:
    """Bytes ``[offset, offset + length)`` of a segment, where a shard lies."""

    segment: int
    offset: int
    length: int


def places(extents: Records) -> list[Place]:
    """The places of extents."""
    names = ("segment", "offset", "length")
    return [Place(*map(int, row)) for row in zip(*(extents[n] for n in names), strict=True)]


class Memory:
    """The arena's bytes, as tokens."""

    def __init__(self, geometry: Geometry) -> None:
        self._unit = geometry.slot_bytes_min
        self._segments = [
            [None] * (geometry.segment_bytes(i) // self._unit)
            for i in range(len(geometry.segments))
        ]  # type: list[list[Token | None]]

    def _units(self, place: Place) -> range:
        return range(place.offset // self._unit, -(-(place.offset + place.length) // self._unit))

    def write(self, place: Place, token: Token) -> None:
        """Write a token to a place."""
        units = self._segments[place.segment]
        for index, unit in enumerate(self._units(place)):
            units[unit] = (*token, index)

    def holds(self, place: Place, token: Token) -> bool:
        """Whether a place holds exactly this token."""
        units = self._segments[place.segment]
        return all(units[unit] == (*token, i) for i, unit in enumerate(self._units(place)))

    def checksum(self, place: Place) -> bytes:
        """Return the checksum of a place's current content, 16 bytes."""
        content = [self._segments[place.segment][unit] for unit in self._units(place)]
        return hashlib.blake2b(repr(content).encode(), digest_size=16).digest()


@dataclass(eq=False)
class Shards:
    """The slots of one block, in rank order."""

    slots: list[int]
    generations: list[int]
    places: list[Place]
    kv_group: int


@dataclass(eq=False, repr=False)
class Held(Shards):
    """Slots of one block that a client was handed and has not given back.

    ``writers`` are the sessions that may write to it at any time, until they are drained or the
    client has reported it.
    """

    group: int
    reservation: int
    writers: set[int]
    in_doubt: bool = False

    def __repr__(self) -> str:
        return f"<slots {self.slots} at {self.generations} held by group {self.group}>"


@dataclass(eq=False, repr=False)
class Block(Shards):
    """One committed block that is neither evicted nor replaced."""

    namespace: int
    key: bytes
    epoch: int
    tokens: list[Token]
    summed: bool
    announced: bool = False
    leases: int = 0
    pins: int = 0

    @property
    def name(self) -> tuple[int, int, bytes]:
        """What it is found by."""
        return self.namespace, self.kv_group, self.key

    def __repr__(self) -> str:
        name = f"{self.namespace}/{self.kv_group}/{int.from_bytes(self.key)}"
        return f"<block {name} of epoch {self.epoch} in {self.slots} at {self.generations}>"


@dataclass(frozen=True)
class Served:
    """An extent that a reader was given, with the token that it must read while its generation
    stands.
    """

    boot: int
    slot: int
    generation: int
    place: Place
    token: Token


@dataclass
class Model:
    """Expected state of the core."""

    blocks: dict[tuple[int, int, bytes], Block] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    leases: dict[tuple[int, int], list[Block]] = field(default_factory=dict)
    pins: dict[tuple[int, int], tuple[float, list[Block]]] = field(default_factory=dict)

    def drop_lease(self, group: int, lease_id: int) -> None:
        """End a lease."""
        for block in self.leases.pop((group, lease_id)):
            block.leases -= 1

    def drop_pin(self, name: tuple[int, int]) -> None:
        """End a pin."""
        for block in self.pins.pop(name)[1]:
            block.pins -= 1

    def drop_pins_of(self, namespaces: Collection[int]) -> None:
        """End all pins of namespaces."""
        for name in [name for name in self.pins if name[0] in namespaces]:
            self.drop_pin(name)

    def end_group(self, group: int) -> None:
        """End a group: its leases end, and the slots that it held are in doubt."""
        for owner, lease_id in [name for name in self.leases if name[0] == group]:
            self.drop_lease(owner, lease_id)
        for held in self.held:
            held.in_doubt |= held.group == group

    def quiet(self, sessions: Iterable[int]) -> None:
        """Record that these sessions do not write any more."""
        done = set(sessions)
        for held in self.held:
            held.writers -= done


def longest_hit(groups: Sequence[tuple[GroupSpec, Sequence[bool]]]) -> int:
    """Return the longest hit in tokens by trying every length, token by token."""
    limit = min((len(ready) * spec.block_tokens for spec, ready in groups), default=0)
    return next(
        (n for n in range(limit, 0, -1) if all(_restorable(s, ready, n) for s, ready in groups)), 0
    )


def needed_blocks(spec: GroupSpec, hit_tokens: int) -> set[int]:
    """Return the blocks that a group must load to continue right after ``hit_tokens`` tokens."""
    size = spec.block_tokens
    if not hit_tokens:
        return set()
    if spec.kind is GroupKind.MAMBA:
        return {hit_tokens // size - 1}
    first = 0
    if spec.kind is GroupKind.SLIDING_WINDOW:
        # The next token sees itself and the ``window_tokens - 1`` before it.
        first = max(0, hit_tokens - (spec.window_tokens - 1))
    return {token // size for token in range(first, hit_tokens)}


def _restorable(spec: GroupSpec, ready: Sequence[bool], hit_tokens: int) -> bool:
    if hit_tokens % spec.block_tokens:
        return False
    return all(ready[block] for block in needed_blocks(spec, hit_tokens))


def snapshot(core: Core) -> dict[str, Any]:
    """Return all state of a core that a refused call must not change, in comparable form."""
    state = core.state
    return {
        **{
            name: column.tobytes()
            for owner in (state.table, state.policies._arrays)
            for name, column in vars(owner).items()
            if isinstance(column, np.ndarray) and name != "entries"  # those are "policies"
        },
        "policies": [state.policies.members(*p).tolist() for p in state.policies.places()],
        "sequences": (state.sequence, [log.next for log in state.events._logs.values()]),
        "books": [dict(vars(books)) for books in state.books],
        "index": [(*place, dict(found)) for *place, found in state.index.items()],
        "pools": [
            (
                list(pool._first.unassigned),
                pool.slab_used.tolist(),
                [(size, c.free[: c.count].tolist()) for size, c in pool._first.classes.items()],
            )
            for pool in state.pools
        ],
        "groups": [
            (
                (group.number, group.stock_bytes, group.quarantined_bytes, group.ended),
                (sorted(group.reservations), sorted(group.members), repr(group.members)),
                {number: slots.tolist() for number, slots in group.leases.items()},
            )
            for group in state.groups
        ],
        "namespaces": [repr(vars(space)) for space in state.namespaces],
        "pins": [(name, pin.slots.tolist()) for name, pin in core.pinning._pins.items()],
    }
