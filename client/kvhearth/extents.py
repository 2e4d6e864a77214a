"""Extents as a reply brings them: none is believed that leaves the arena. Pure."""

from __future__ import annotations

import numpy as np

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_BYTES, EXTENT_DTYPE, EXTENT_RECORD, Records
from kvhearth.wire import Welcome

_FEW = 4
"""So many extents cost less one by one."""


def parse_extents(
    contract: Contract, welcome: Welcome, group: int, data: bytes, count: int
) -> Records:
    """``count`` extents, each inside its segment and of the group's page length.

    Raises:
        KVHearthError: ``bad_message``.
    """
    if len(data) != count * EXTENT_BYTES:
        raise bad_reply(f"group {group}: {len(data)} bytes are not {count} extents")
    # A copy, so that the caller may write to it; copying the bytes is quicker than the records.
    extents = np.frombuffer(bytearray(data), EXTENT_DTYPE)
    page_bytes = contract.groups[group].page_bytes
    # A reader or writer trusts these numbers with its memory.
    if count <= _FEW:
        right, inside = _count_few(welcome, page_bytes, data)
    elif _all_good(welcome, page_bytes, extents):
        return extents
    else:
        right, inside = _count_many(welcome, page_bytes, extents)
    if right != count:
        raise bad_reply(f"group {group}: an extent is not of the contract's page length")
    if welcome.segments and inside != count:
        raise bad_reply(f"group {group}: an extent lies outside the arena")
    return extents


def _all_good(welcome: Welcome, page_bytes: int, extents: Records) -> bool:
    """Whether all extents are right, and inside one segment; a no says nothing.

    Costs a quarter of ``_count_many``: bytes are compared where they must be the same in each
    extent, and of the other numbers only the largest is looked at.
    """
    count = len(extents)
    if extents["length"].tobytes() != page_bytes.to_bytes(4, "little") * count:
        return False
    if not welcome.segments:
        return True
    segments = extents["segment"].tobytes()
    room_bytes = welcome.rooms.get(int.from_bytes(segments[:2], "little"))
    if room_bytes is None or segments != segments[:2] * count:
        return False
    slots, offsets = extents["slot"], extents["offset"]
    if slots.item(slots.argmax()) >= welcome.generation_count:
        return False
    return bool(offsets.item(offsets.argmax()) + page_bytes <= room_bytes)


def _count_few(welcome: Welcome, page_bytes: int, data: bytes) -> tuple[int, int]:
    """As ``_count_many``; for few extents numpy's calls cost more."""
    rooms = welcome.rooms
    right = inside = 0
    for slot, segment, _, offset, length, _, _ in EXTENT_RECORD.iter_unpack(data):
        right += length == page_bytes
        within = offset + page_bytes <= rooms.get(segment, 0)
        inside += within and slot < welcome.generation_count
    return right, inside


def _count_many(welcome: Welcome, page_bytes: int, extents: Records) -> tuple[int, int]:
    """How many extents have a page's length, and how many lie inside the arena if they have."""
    right = int(np.count_nonzero(extents["length"] == page_bytes))
    known = extents["slot"] < welcome.generation_count
    inside = 0
    for info in welcome.segments:
        last = info.bytes - page_bytes
        if last >= 0:
            within = extents["offset"] <= np.uint64(last)
            within &= extents["segment"] == info.segment
            within &= known
            inside += int(np.count_nonzero(within))
    return right, inside


def bad_reply(problem: str) -> KVHearthError:
    """The error of a reply that cannot be meant so."""
    return KVHearthError(Reason.BAD_MESSAGE, f"the daemon's reply makes no sense: {problem}")
