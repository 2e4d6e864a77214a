"""Locates given blocks, and iterates over all blocks in disk order in small steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvhearth.model import I64
from kvhearth_server.tiers.base import BlockSpec
from kvhearth_server.tiers.ssd.format import PAGE_BYTES
from kvhearth_server.tiers.ssd.index import SEGMENT_ENTRIES, SegmentRows, SsdIndex
from kvhearth_server.tiers.ssd.log import Log

_ROWS_A_STEP = 1 << 15
"""Most rows examined in one step, so that a step stays short where most rows are dead."""


def walk(
    index: SsdIndex, cursor: int, count: int
) -> tuple[int, list[tuple[BlockSpec, list[bytes]]]]:
    """Take one step: see ``SsdTier.walk``.

    A cursor is the entry at which the next step begins: the segment's number and a row in it. Both
    keep their meaning while blocks come and go; only a segment that was overwritten meanwhile is
    walked from the middle.
    """
    number, row = divmod(cursor, SEGMENT_ENTRIES)
    found: dict[BlockSpec, list[bytes]] = {}
    looked = 0
    for segment in sorted(index.segments):
        if segment < number:
            continue
        if segment > number:
            number, row = segment, 0
        table = index.segments[segment]
        while row < len(table):
            if count <= 0 or looked >= _ROWS_A_STEP:
                return number * SEGMENT_ENTRIES + row, list(found.items())
            end = min(len(table), row + _ROWS_A_STEP - looked)
            heads = table.live_heads(row, end)[:count]
            gather(index, table, heads, found)
            looked += end - row
            count -= len(heads)
            row = int(heads[-1]) + 1 if count <= 0 else end
    return 0, list(found.items())


def gather(
    index: SsdIndex, table: SegmentRows, heads: I64, found: dict[BlockSpec, list[bytes]]
) -> None:
    """Add the keys of blocks that begin at ``heads`` to the lists of their families."""
    names = table.rows[["family", "epoch", "length", "shards"]][heads]
    for name in np.unique(names):
        namespace, group = index.of_family(int(name["family"]))
        epoch, length, shards = (int(name[field]) for field in ("epoch", "length", "shards"))
        keys: list[bytes] = table.keys[heads[names == name]].tolist()
        found.setdefault(BlockSpec(namespace, group, epoch, length, shards), []).extend(keys)


def places(
    index: SsdIndex, log: Log, family: BlockSpec, keys: list[bytes]
) -> list[tuple[Path, int] | None]:
    """Return the file of each block and the offset of its first shard's payload there; None for
    absent blocks. The next turn of the loop may move a block.
    """
    good, entries = index.present(family, keys)
    found: list[tuple[Path, int] | None] = [None] * len(keys)
    for row in np.flatnonzero(good).tolist():
        head = index.rows(entries[row : row + 1])[0, 0]
        segment = log.segments[int(entries[row]) >> 32]
        found[row] = segment.path, (int(head["position"]) + 1) * PAGE_BYTES
    return found
