"""Reading the journal that an earlier run left: what is whole is taken, the rest freed or put
aside.

All of it is array work; a million headers take well under a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from kvhearth.contract import Contract
from kvhearth.model import I64, Bools, Records
from kvhearth_server.core.adoption import AdoptedBlocks, Adoption
from kvhearth_server.core.namespaces import Namespaces
from kvhearth_server.core.table import Geometry, State
from kvhearth_server.memory.journal import (
    HEADER_DTYPE,
    MAGIC,
    STATE_WORDS,
    VERSION,
    Journal,
    identity_check,
    sum_check,
)

_CHUNK_ROWS = 1 << 15
_DENSE_ROWS = 1 << 12
_BOUND = (STATE_WORDS[State.COMMITTED], STATE_WORDS[State.SUMMED])
_BUSY = (STATE_WORDS[State.RESERVED], STATE_WORDS[State.LOADING])

_ROW_DTYPE = np.dtype(
    [
        ("slot", "<i8"),
        ("pair", "<i8"),
        ("sequence", "<u8"),
        ("parent_sequence", "<u8"),
        ("shard", "<u2"),
        ("summed", "?"),
        ("key", HEADER_DTYPE["key"]),
        ("checksum", HEADER_DTYPE["checksum"]),
    ]
)


class _Specs:
    """What the catalogue says of each (namespace, group) pair, as arrays to index by pair code."""

    def __init__(self, namespaces: Namespaces, geometry: Geometry) -> None:
        self.contracts: dict[int, Contract] = {}
        count = 1 + max((space.number for space in namespaces), default=0)
        self.known = np.zeros(count * 256, np.bool_)
        self.epoch = np.zeros(count * 256, np.int64)
        self.length = np.zeros(count * 256, np.int64)
        self.shards = np.zeros(count * 256, np.int64)
        self.key_bytes = np.zeros(count * 256, np.int64)
        self.slot_bytes = np.zeros(count * 256, np.int64)
        self.segment = np.zeros(count * 256, np.int64)
        segments = {s.tenant: i for i, s in enumerate(geometry.segments)}
        for space in namespaces:
            self.contracts[space.number] = space.contract
            for kv_group, spec in enumerate(space.contract.groups):
                pair = space.number * 256 + kv_group
                self.known[pair] = space.tenant in segments
                self.segment[pair] = segments.get(space.tenant, -1)
                self.epoch[pair] = space.epoch
                self.length[pair] = spec.page_bytes
                self.shards[pair] = spec.shards
                self.key_bytes[pair] = space.contract.hash_bytes
                self.slot_bytes[pair] = geometry.slot_bytes_for(spec.page_bytes)


def read_journal(journal: Journal, geometry: Geometry, namespaces: Namespaces) -> Adoption:
    """Everything that can be taken over from the journal; nothing is changed."""
    found = Adoption()
    specs = _Specs(namespaces, geometry)
    held: dict[int, list[I64]] = defaultdict(list)
    good: list[Records] = []
    for slab, size in enumerate(journal.slab_sizes.tolist()):
        if not size:
            continue
        if size % geometry.slot_bytes_min or not 0 < size <= geometry.slab_bytes:
            found.reasons["slab"] += 1
            continue
        found.slabs.append((slab, size))
    reader = _Reader(found, held, good, specs, geometry)
    for slots, sizes in _chunks(found.slabs, geometry):
        span = slice(int(slots[0]), int(slots[-1]) + 1)
        dense = span.stop - span.start == len(slots)
        rows = journal.headers[span if dense else slots]
        used = rows["state"] != STATE_WORDS[State.FREE]
        if used.all():
            reader.sort_out(rows, slots, sizes)
        elif used.any():
            reader.sort_out(rows[used], slots[used], sizes[used])
    for number, parts in held.items():
        found.held[number] = np.concatenate(parts)
    if good:
        _blocks(found, specs, np.concatenate(good))
    return found


def _chunks(slabs: list[tuple[int, int]], geometry: Geometry) -> Iterator[tuple[I64, I64]]:
    """(slots, slot sizes) of all slots in assigned slabs, some ten thousand at a time."""
    parts: list[I64] = []
    sizes: list[I64] = []
    rows = 0
    for slab, size in slabs:
        count = geometry.slab_bytes // size
        parts.append(slab * geometry.stride + np.arange(count, dtype=np.int64))
        sizes.append(np.full(count, size, np.int64))
        rows += count
        # A slab of many slots is a chunk of its own: its headers are used where they lie.
        if rows >= _CHUNK_ROWS or count >= _DENSE_ROWS:
            yield np.concatenate(parts), np.concatenate(sizes)
            parts, sizes, rows = [], [], 0
    if parts:
        yield np.concatenate(parts), np.concatenate(sizes)


class _Reader:
    """Puts the used headers of one chunk after the other where they belong."""

    def __init__(
        self,
        found: Adoption,
        held: dict[int, list[I64]],
        good: list[Records],
        specs: _Specs,
        geometry: Geometry,
    ) -> None:
        self._found = found
        self._held = held
        self._good = good
        self._specs = specs
        self._geometry = geometry

    def sort_out(self, rows: Records, slots: I64, sizes: I64) -> None:
        """Headers that are not free, their slots and the sizes of these."""
        found, words = self._found, rows["state"]
        bound = np.isin(words, _BOUND)
        if not bound.all():
            aside = words == STATE_WORDS[State.QUARANTINED]
            read_only = aside & (rows["owner"] == 0)
            busy = np.isin(words, _BUSY) | (aside & ~read_only)
            _drop(found, "readers", slots[read_only])
            for owner in np.unique(rows["owner"][busy]).tolist():
                self._held[int(owner)].append(slots[busy & (rows["owner"] == owner)])
            # A state word that is none of ours was damaged: the slot may have been reserved, so
            # nobody's guess is safe.
            strange = ~(bound | busy | read_only)
            if strange.any():
                found.reasons["state_word"] += int(strange.sum())
                self._held[0].append(slots[strange])
            rows, slots, sizes = rows[bound], slots[bound], sizes[bound]
        if len(rows):
            self._keep(rows, slots, sizes)

    def _keep(self, rows: Records, slots: I64, sizes: I64) -> None:
        found = self._found
        found.sequence = max(found.sequence, int(rows["sequence"].max()))
        whole = self._whole(rows, slots, sizes)
        if not whole.all():
            rows, slots = rows[whole], slots[whole]
        kept = np.empty(len(rows), _ROW_DTYPE)
        for name in ("sequence", "parent_sequence", "shard", "key", "checksum"):
            kept[name] = rows[name]
        kept["slot"] = slots
        kept["pair"] = _pairs(rows)
        kept["summed"] = rows["state"] == STATE_WORDS[State.SUMMED]
        self._good.append(kept)

    def _whole(self, rows: Records, slots: I64, sizes: I64) -> Bools:
        """Which committed headers are undamaged and fit the catalogue; the others are dropped."""
        found, specs = self._found, self._specs
        good = (rows["magic"] == MAGIC) & (rows["version"] == VERSION)
        good &= rows["identity_check"] == identity_check(rows)
        summed = rows["state"] == STATE_WORDS[State.SUMMED]
        good &= ~summed | (rows["sum_check"] == sum_check(rows))
        _drop(found, "header", slots[~good])
        pairs = _pairs(rows)
        inside = pairs < len(specs.known)
        pairs = np.where(inside, pairs, 0)
        fits = inside & specs.known[pairs] & (rows["length"] == specs.length[pairs])
        fits &= (rows["shard_count"] == specs.shards[pairs]) & (rows["shard"] < rows["shard_count"])
        fits &= (rows["key_bytes"] == specs.key_bytes[pairs]) & (sizes == specs.slot_bytes[pairs])
        fits &= _segments(self._geometry, slots) == specs.segment[pairs]
        _drop(found, "contract", slots[good & ~fits])
        current = rows["epoch"] == specs.epoch[pairs]
        _drop(found, "epoch", slots[good & fits & ~current])
        return np.asarray(good & fits & current)


def _pairs(rows: Records) -> I64:
    pairs: I64 = rows["namespace"].astype(np.int64) * 256 + rows["group"]
    return pairs


def _segments(geometry: Geometry, slots: I64) -> I64:
    starts = [segment.first_slab * geometry.stride for segment in geometry.segments]
    return np.searchsorted(starts, slots, side="right").astype(np.int64) - 1


def _drop(found: Adoption, reason: str, slots: I64) -> None:
    if len(slots):
        found.dropped.append(slots)
        found.reasons[reason] += len(slots)


def _blocks(found: Adoption, specs: _Specs, rows: Records) -> None:
    """Join shards to blocks: whole when all agree in count, sequence and key."""
    counts = np.bincount(rows["pair"])
    for pair in np.flatnonzero(counts).tolist():
        mine = rows if counts[pair] == len(rows) else rows[rows["pair"] == pair]
        shards = int(specs.shards[pair])
        rank = mine["sequence"] * np.uint64(shards) + mine["shard"]
        if (rank[1:] <= rank[:-1]).any():
            mine = mine[np.argsort(rank, kind="stable")]
        if shards > 1:
            mine = _complete(found, mine, shards)
        blocks = mine.reshape(-1, shards)
        width = int(specs.key_bytes[pair])
        packed = np.ascontiguousarray(blocks["key"][:, 0]).view(np.uint8).reshape(len(blocks), -1)
        names = np.ascontiguousarray(packed[:, :width])
        keys: list[bytes] = names.view(f"V{width}").reshape(-1).tolist()
        # Keys are hashes, so one word of each tells a million apart; only if two words agree are
        # the keys themselves compared.
        words = names.view(np.uint64)[:, 0] if width % 8 == 0 else np.zeros(len(keys), np.uint64)
        ordered = np.sort(words)
        if (ordered[1:] == ordered[:-1]).any():
            blocks, keys = _newest(found, blocks, keys)
        if len(blocks):
            found.blocks.append(_adopted(pair, blocks, keys))


def _complete(found: Adoption, rows: Records, shards: int) -> Records:
    _, starts, counts = np.unique(rows["sequence"], return_index=True, return_counts=True)
    runs = starts[counts == shards][:, None] + np.arange(shards)
    picked = rows[runs]
    agree = (picked["shard"] == np.arange(shards)).all(axis=1)
    agree &= (picked["key"] == picked["key"][:, :1]).all(axis=1)
    kept = picked[agree].reshape(-1)
    _drop(found, "incomplete", np.setdiff1d(rows["slot"], kept["slot"]))
    return np.asarray(kept)


def _newest(found: Adoption, blocks: Records, keys: list[bytes]) -> tuple[Records, list[bytes]]:
    """One block a key: after a crash between two headers an older one may still stand."""
    last = dict(zip(keys, range(len(keys)), strict=True))
    kept = np.sort(np.fromiter(last.values(), np.int64, len(last)))
    others = np.setdiff1d(np.arange(len(keys)), kept)
    _drop(found, "duplicate", blocks["slot"][others].reshape(-1).astype(np.int64))
    return blocks[kept], [keys[i] for i in kept.tolist()]


def _adopted(pair: int, blocks: Records, keys: list[bytes]) -> AdoptedBlocks:
    sequences = blocks["sequence"][:, 0]
    heads = blocks["slot"][:, 0]
    wanted = blocks["parent_sequence"][:, 0]
    place = np.minimum(np.searchsorted(sequences, wanted), len(sequences) - 1)
    parents = np.where(sequences[place] == wanted, heads[place], -1)
    return AdoptedBlocks(
        pair // 256,
        pair % 256,
        np.ascontiguousarray(blocks["slot"]),
        parents.astype(np.int64),
        keys,
        np.asarray(blocks["summed"].all(axis=1)),
        np.ascontiguousarray(blocks["checksum"]),
    )
