"""A core with attached engines, and short names for the operations that its tests use most.

Every call runs ``check_books``, so a test that forgets to do so still fails where the books break.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, U8, U32, Bools
from kvhearth_server.core.core import Core
from kvhearth_server.core.few_commits import SingleCommit
from kvhearth_server.core.groups import Group
from kvhearth_server.core.lookup import Found, KeysItem
from kvhearth_server.core.membership import Joining
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.reservations import CommitItem, Reserved, SlotsItem
from kvhearth_server.core.slot_table import Geometry, SlotTable, State
from kvhearth_server.core.state import CoreState, Limits

SLOT_BYTES = 4096
SLAB_BYTES = 64 * 1024
KEY_BYTES = 32

no_deadline = settings(deadline=None)
"""For random examples on shared machines."""


def shards_of(table: SlotTable, head: int) -> list[int]:
    """Return all slots of a block, in rank order."""
    (block,) = table.blocks_of(np.array([head]))
    slots: list[int] = block[0].tolist()
    return slots


def key(number: int, width: int = KEY_BYTES) -> bytes:
    """A key."""
    return number.to_bytes(width, "big")


def keys(*numbers: int) -> list[bytes]:
    """Keys, in order."""
    return [key(number) for number in numbers]


def singles(item: CommitItem) -> list[SingleCommit]:
    """Return the blocks of a commit, of one slot each, as the path of a few blocks takes them."""
    count = len(item.keys)
    parents = item.chains.parents if item.chains else [item.parent] * count
    sums = [b""] * count if item.checksums is None else [row.tobytes() for row in item.checksums]
    slots, generations = item.slots[:, 0].tolist(), item.generations[:, 0].tolist()
    rows = zip(item.keys, slots, generations, sums, parents, strict=True)
    return [SingleCommit(item.kv_group, *row) for row in rows]


def full(page_bytes: int = SLOT_BYTES, shards: int = 1, block_tokens: int = 16) -> GroupSpec:
    """A full-attention group."""
    return GroupSpec(GroupKind.FULL, block_tokens, page_bytes, shards=shards)


def window(window_tokens: int, page_bytes: int = SLOT_BYTES, block_tokens: int = 16) -> GroupSpec:
    """A sliding-window group."""
    return GroupSpec(
        GroupKind.SLIDING_WINDOW, block_tokens, page_bytes, window_tokens=window_tokens
    )


def mamba(page_bytes: int = SLOT_BYTES, block_tokens: int = 16) -> GroupSpec:
    """A state group."""
    return GroupSpec(GroupKind.MAMBA, block_tokens, page_bytes)


def contract(*groups: GroupSpec, **changes: Any) -> Contract:
    """A contract of these groups (one full-attention group by default)."""
    wanted = groups or (full(),)
    values: dict[str, Any] = {
        "model": "m",
        "revision": "r",
        "kv_dtype": "uint8",
        "hash_bytes": KEY_BYTES,
        "tensor_parallel": max(spec.shards for spec in wanted),
        "groups": wanted,
    }
    return Contract(**{**values, **changes})


def refused(reason: Reason) -> Any:
    """Return a context in which a ``KVHearthError`` of that reason must be raised."""
    return pytest.raises(KVHearthError, match=rf"^{reason}: ")


def items(named: list[bytes], kv_group: int = 0) -> list[KeysItem]:
    """Return keys of one group in the form that calls take."""
    return [KeysItem(kv_group, named)]


def slots_item(slots: Sequence[int], generations: Sequence[int]) -> SlotsItem:
    """Return slots in the form that calls take."""
    return SlotsItem(np.array(slots, np.int64), np.array(generations, np.uint32))


def sums_of(slots: I64) -> U8:
    """Return checksums that name their slots, (n, shards, 16)."""
    words = np.zeros((*slots.shape, 2), np.uint64)
    words[..., 0] = slots
    return words.view(np.uint8).reshape(*slots.shape, 16)


class Rig:
    """A core, and operations that the transport and the clients would perform on it."""

    def __init__(
        self,
        slabs: int = 4,
        *,
        tenants: Sequence[str] = ("t",),
        slab_bytes: int = SLAB_BYTES,
        slot_bytes_min: int = SLOT_BYTES,
        **limits: Any,
    ) -> None:
        self.geometry = Geometry.of(
            [(tenant, slabs * slab_bytes) for tenant in tenants], slab_bytes, slot_bytes_min
        )
        # Wide bounds, so that a test meets only the bound that it sets.
        bounds = {
            **dict.fromkeys(
                ("stock_fraction_max", "held_fraction_max", "pinned_fraction_max"), 1.0
            ),
            **limits,
        }
        self.members: dict[int, list[int]] = {}
        self._sessions = itertools.count(1)
        self._reservations = itertools.count(1)
        self._begin(Limits(**bounds))

    def _begin(self, limits: Limits) -> None:
        self.core = Core(self.geometry, limits)

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the core."""
        return function(*arguments, **named)

    def checked(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the core; the books must balance afterwards, even if it refused."""
        try:
            return self.call(function, *arguments, **named)
        finally:
            self.check()

    @property
    def state(self) -> CoreState:
        """The core's state."""
        return self.core.state

    def check(self) -> None:
        """Check that the books balance."""
        self.core.check_books()

    def join(self, made: Contract, **changes: Any) -> int:
        """Attach one session; returns its number."""
        values: dict[str, Any] = {
            "session": next(self._sessions),
            "tenant": "t",
            "engine_id": "e",
            "contract": made,
            "scheduler": True,
            "rank": 0,
            "incarnation": 0,
            "mapped": True,
        }
        joining = Joining(**{**values, **changes})
        self.core.membership.join(joining)
        self.check()
        return joining.session

    def attach(self, made: Contract | None = None, **changes: Any) -> int:
        """Attach a whole engine; returns the session of its scheduler, which is rank 0, too."""
        made = made or contract()
        first = self.join(made, **changes)
        others = [
            self.join(made, **{**changes, "scheduler": False, "rank": rank})
            for rank in range(1, made.world_size)
        ]
        self.members[first] = [first, *others]
        return first

    def leave(self, session: int, *, finished: bool = True) -> None:
        """Detach a whole engine, its scheduler first."""
        for member in self.members[session]:
            self.checked(self.core.membership.leave, member, finished=finished)

    def remove_bad(self, head: int) -> int:
        """Remove a block as one whose bytes are wrong. Return how many were removed."""
        heads = np.array([head], np.int64)
        generations = self.state.table.generation[heads]
        removed: int = self.checked(self.core.reading.remove_bad, heads, generations)
        return removed

    def group(self, session: int) -> Group:
        """The group of a session."""
        return self.state.group_of(session)

    def space(self, session: int) -> Namespace:
        """Return the session's namespace."""
        return self.state.namespaces.get(self.group(session).namespace)

    def epoch(self, session: int) -> int:
        """The epoch of a session's namespace."""
        return self.space(session).epoch

    def reserve(
        self, session: int, count: int, kv_group: int = 0, reservation_id: int = 0
    ) -> Reserved:
        """Reserve blocks of one group."""
        number, wants = reservation_id or next(self._reservations), [(kv_group, count)]
        found: Reserved = self.checked(
            self.core.writing.reserve, session, number, self.epoch(session), wants
        )
        return found

    def take(self, session: int, count: int, kv_group: int = 0) -> tuple[I64, U32]:
        """Return slots and generations of exactly ``count`` blocks, (count, shards) each."""
        reserved = self.reserve(session, count, kv_group)
        assert reserved.short is None, f"a store was refused: {reserved.short}"
        (part,) = reserved.handed
        assert len(part.slots) == count
        return part.slots, part.generations

    def item(
        self,
        named: list[bytes],
        slots: I64,
        generations: U32,
        *,
        kv_group: int = 0,
        parent: bytes = b"",
        summed: bool = True,
    ) -> CommitItem:
        """Return one item of a commit."""
        sums = sums_of(slots) if summed else None
        return CommitItem(kv_group, named, slots, generations, sums, parent)

    def commit(self, session: int, *parts: CommitItem) -> list[Bools]:
        """Commit the items, one key by the fast path if that takes it, as the transport does."""
        writing, space, epoch = self.core.writing, self.space(session), self.epoch(session)
        if len(parts) == 1 and parts[0].slots.shape == (1, 1):
            ones = singles(parts[0])
            few = self.checked(writing.commit_few, self.group(session), space, epoch, ones)
            if few is not None:
                return [np.array(few)]
        stored: list[Bools] = self.checked(writing.commit, session, epoch, list(parts))
        return stored

    def put(
        self,
        session: int,
        named: list[bytes],
        *,
        kv_group: int = 0,
        parent: bytes = b"",
        summed: bool = True,
    ) -> Bools:
        """Reserve and commit blocks; fails the test if not all could be reserved."""
        slots, generations = self.take(session, len(named), kv_group)
        (stored,) = self.commit(
            session,
            self.item(named, slots, generations, kv_group=kv_group, parent=parent, summed=summed),
        )
        return stored

    def abort(
        self, session: int, slots: I64, generations: U32, *, in_doubt: bool = False
    ) -> tuple[int, int]:
        """Abort slots of any shape."""
        item = SlotsItem(slots.reshape(-1), generations.reshape(-1))
        found: tuple[int, int] = self.checked(
            self.core.writing.abort, session, [item], [], in_doubt=in_doubt
        )
        return found

    def lookup(
        self, session: int, named: list[bytes], *, kv_group: int = 0, lease_id: int = 0
    ) -> Found:
        """Look up keys of one group."""
        return self.lookup_all(session, {kv_group: named}, lease_id=lease_id)

    def lookup_all(
        self, session: int, asked: dict[int, list[bytes]], *, lease_id: int = 0
    ) -> Found:
        """Look up keys of several groups."""
        parts = [KeysItem(kv_group, named) for kv_group, named in asked.items()]
        found: Found = self.checked(
            self.core.reading.lookup, session, self.epoch(session), parts, lease_id
        )
        return found

    def release(self, session: int, *lease_ids: int) -> None:
        """End leases."""
        self.checked(self.core.reading.release, session, list(lease_ids))

    def pin(
        self,
        session: int,
        pin_id: int,
        named: list[bytes],
        *,
        kv_group: int = 0,
        ttl_s: float = 10.0,
        now: float = 0.0,
        name: str = "",
    ) -> list[bool]:
        """Pin keys of one group. Return which of them are present."""
        asked, epoch = items(named, kv_group), self.epoch(session)
        pin = self.core.pinning.pin
        (flags,) = self.checked(pin, session, epoch, pin_id, asked, ttl_s=ttl_s, now=now, name=name)
        return [bool(flag) for flag in flags]

    def present(self, session: int, named: list[bytes], kv_group: int = 0) -> list[bool]:
        """Return which keys are present; marks nothing as used."""
        asked = items(named, kv_group)
        (one,), _, _ = self.core.reading.presence(session, self.epoch(session), asked)
        return [bool(flag) for flag in one.present]

    def head(self, session: int, named: bytes, kv_group: int = 0) -> int:
        """Return the head slot of a key; -1 if it is absent."""
        return int(self.state.index.find(self.space(session).number, kv_group, [named])[0])

    def slots_in(self, state: State) -> int:
        """Return how many slots are in a state (slots of unassigned slabs count as free)."""
        return int((self.state.table.state == state).sum())
