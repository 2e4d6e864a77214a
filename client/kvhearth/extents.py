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
    else:
        right, inside = _count_many(welcome, page_bytes, extents)
    if right != count:
        raise bad_reply(f"group {group}: an extent is not of the contract's page length")
    if welcome.segments and inside != count:
        raise bad_reply(f"group {group}: an extent lies outside the arena")
    return extents


def _count_few(welcome: Welcome, page_bytes: int, data: bytes) -> tuple[int, int]:
    """As ``_count_many``; for few extents numpy's calls cost more."""
    ends = {info.segment: info.bytes for info in welcome.segments}
    right = inside = 0
    for slot, segment, _, offset, length, _, _ in EXTENT_RECORD.iter_unpack(data):
        right += length == page_bytes
        within = offset + page_bytes <= ends.get(segment, 0)
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
