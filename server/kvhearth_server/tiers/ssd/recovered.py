"""What was read back of a segment, in the form in which the index takes it over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvhearth.model import I64, Records
from kvhearth_server.tiers.ssd.directory import Segment
from kvhearth_server.tiers.ssd.format import PAGE_BYTES, RECORD_DTYPE, Doubt, SegmentHead
from kvhearth_server.tiers.ssd.index import rows_of

NO_HEAD = SegmentHead(0, 0, 0, 0)

_OFFSETS = {name: place[1] for name, place in (RECORD_DTYPE.fields or {}).items()}
_ALIKE = ("key", "key_bytes", "namespace", "sequence", "epoch", "group", "shard_count", "length")
"""Equal in all shards of a block."""
_NAMESPACE_WORDS = slice(_OFFSETS["namespace"] // 8, _OFFSETS["namespace"] // 8 + 4)


@dataclass(frozen=True)
class Portion:
    """Blocks alike in namespace, group, shards and width of their keys.

    Attributes:
        keys: n.
        rows: ``index.ROW_DTYPE`` (n, shards).
    """

    namespace: bytes
    group: int
    keys: list[bytes]
    rows: Records


@dataclass
class Recovered:
    """What one segment has.

    Attributes:
        records: headers that are believed, in the order of their places; of whole blocks only. Of a
            segment with a footer they lie in the reader's memory.
        portions: the same for the index; set by ``sort_out``.
        sealed: it had its footer.
        resume: it can be appended to at ``end``; otherwise it is closed for good.
        empty: nothing of ours is in it.
        foreign: it is of another log: left alone.
        locked: another process's requests hold it, or may, and there was no descriptor to look
            with, as ``failed`` says; to be tried again.
        failed: it cannot be read at all.
    """

    segment: Segment
    head: SegmentHead = NO_HEAD
    records: Records = field(default_factory=lambda: np.zeros(0, RECORD_DTYPE))
    portions: list[Portion] = field(default_factory=list)
    end: int = 1
    sealed: bool = False
    resume: bool = False
    empty: bool = False
    foreign: bool = False
    locked: bool = False
    failed: OSError | None = None
    doubts: Counter[Doubt] = field(default_factory=Counter)

    def sort_out(self) -> None:
        """Make the portions; what lies in the reader's memory is referred to no more."""
        if not self.locked and self.failed is None:
            self.portions = list(_portions(self.records))
        if not self.resume:
            self.records = np.zeros(0, RECORD_DTYPE)


def whole_blocks(lines: Records, doubts: Counter[Doubt]) -> Records:
    """Leave out shards of blocks that are not all there, one after another."""
    if not len(lines) or (lines["shard_count"] == 1).all():
        return lines
    count = lines["shard_count"].astype(np.int64)
    shard = lines["shard"].astype(np.int64)
    heads = np.flatnonzero((shard == 0) & (np.arange(len(lines)) + count <= len(lines)))
    keep = np.zeros(len(lines), np.bool_)
    for shards in np.unique(count[heads]).tolist():
        starts = heads[count[heads] == shards]
        rows = starts[:, None] + np.arange(shards)
        block = lines[rows]
        good = (block["shard"] == np.arange(shards)).all(axis=1)
        step = 1 + -(-block["length"].astype(np.int64) // PAGE_BYTES)
        gap = np.diff(block["position"].astype(np.int64), axis=1)
        good &= (gap == step[:, :1]).all(axis=1)
        for name in _ALIKE:
            good &= (block[name] == block[name][:, :1]).all(axis=1)
        keep[rows[good].reshape(-1)] = True
    if (lost := int((~keep).sum())) > 0:
        doubts[Doubt.INCOMPLETE] += lost
    return lines[keep]


def _portions(lines: Records) -> Iterator[Portion]:
    for rows in _families(lines):
        mine = lines if rows is None else lines[rows]
        namespace, group = mine["namespace"][0].tobytes(), int(mine["group"][0])
        # The shape of a block as one number: most often it is the same for all.
        shape = mine["shard_count"].astype(np.int64) * 256 + mine["key_bytes"]
        kinds = [int(shape[0])] if (shape == shape[0]).all() else np.unique(shape).tolist()
        for kind in kinds:
            shards, width = divmod(kind, 256)
            alike = mine if len(kinds) == 1 else mine[shape == kind]
            heads = alike.view(np.uint8).reshape(len(alike), -1)[::shards]
            names = heads[:, _OFFSETS["key"] : _OFFSETS["key"] + width]
            keys: list[bytes] = np.ascontiguousarray(names).view(f"V{width}").ravel().tolist()
            yield Portion(namespace, group, keys, rows_of(alike.reshape(-1, shards)))


def _families(lines: Records) -> Iterator[I64 | None]:
    """Rows of each namespace and group among contiguous lines, rising; None for all of them."""
    if not len(lines):
        return
    words = lines.view("<u8").reshape(len(lines), -1)[:, _NAMESPACE_WORDS]
    if (words == words[0]).all() and (lines["group"] == lines["group"][0]).all():
        yield None
        return
    # Not a view of the two fields: that would have all the others between them.
    names = np.column_stack([words, lines["group"].astype(np.uint64)])
    packed = np.ascontiguousarray(names).view("V40").reshape(-1)
    groups: dict[bytes, list[int]] = {}
    for row, name in enumerate(packed.tolist()):
        groups.setdefault(name, []).append(row)
    for rows in groups.values():
        yield np.array(rows, np.int64)
