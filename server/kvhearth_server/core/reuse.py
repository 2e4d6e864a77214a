"""Hit ratios of other capacities, from sampled reuse distances.

A key's reuse distance is the number of bytes of distinct blocks that were used since its last use.
An LRU cache of at least that size would have served it. Sampling by a hash of the key keeps the
distances' shape: SHARDS with a fixed sample size and its correction (Waldspurger et al., FAST
2015). The sample rate falls as more keys are seen; an unsampled key costs its share of a few numpy
calls and no memory.

A chain's root counts as used after its leaf, because eviction takes a chain from its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvhearth.model import I64
from kvhearth.native import library
from kvhearth.native.sample import KeySampler

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

CHUNK = 256
"""References whose distances are computed at once: a comparison of each with each."""
_PER_OCTAVE = 16
_FIRST_OCTAVE, _OCTAVES = 12, 40
_BUCKETS = _PER_OCTAVE * _OCTAVES
"""Buckets of distances, 4.4 % apart, from 4 KiB to 4 PiB."""
_WHOLE = 1 << 64
_LEFT = 7 / 8
"""Part of the largest sample that is left when the rate falls."""
_EARLIER = np.tri(CHUNK, k=-1, dtype=np.bool_)


class Kind(NamedTuple):
    """Kind of a use.

    Attributes:
        space: number that tells namespaces, groups and epochs apart.
        row: row of the hit ratios that a lookup counts in; -1 for a store, which counts in none.
        block_bytes: memory that a block takes.
    """

    space: int
    row: int
    block_bytes: int


Use = tuple[Kind, bytes]
"""Use of some blocks of one KV group: its kind, and the keys side by side in chain order."""


@dataclass
class Sampled:
    """References of the sample, oldest first; arrays of shape (n,)."""

    hashes: U64
    names: U64
    rows: I64
    weights: F64

    def __len__(self) -> int:
        return len(self.hashes)

    def at(self, places: slice | I64) -> Sampled:
        """Return some of the references."""
        return Sampled(
            self.hashes[places], self.names[places], self.rows[places], self.weights[places]
        )

    @classmethod
    def of(cls, parts: Sequence[Sampled]) -> Sampled:
        """Return the references of several samples, at least one."""
        return cls(
            np.concatenate([part.hashes for part in parts]),
            np.concatenate([part.names for part in parts]),
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.weights for part in parts]),
        )


class ReuseSampler:
    """Reuse distances of the blocks that share one memory.

    Args:
        sample_max: most keys that are tracked, at least 2 * ``CHUNK``.
        rows: number of rows of hit ratios.
        seed: of the hash that samples keys.
        limit_bytes: largest capacity of interest; older keys are dropped.
    """

    def __init__(
        self, sample_max: int, rows: int, *, seed: int = 0, limit_bytes: float = float("inf")
    ) -> None:
        self.sample_max = max(sample_max, 2 * CHUNK)
        self.limit_bytes = limit_bytes
        self._factor = (2 * seed ^ 0x9E3779B97F4A7C15) & _WHOLE - 1 | 1
        self._native = None if library() is None else KeySampler(self._factor)
        self._threshold = _WHOLE
        self.references = 0
        """Sampled references so far."""
        self.asked = np.zeros(rows)
        """Keys looked up by row, sampled or not."""
        self._new = np.zeros(rows)
        self._hist = np.zeros((rows, _BUCKETS))
        # A line of references in the order of time; only a key's last one weighs anything.
        room = 2 * self.sample_max + 2 * CHUNK
        self._line_hashes = np.zeros(room, np.uint64)
        self._line_names = np.zeros(room, np.uint64)
        self._weights = np.zeros(room)
        self._live = np.zeros(room, np.bool_)
        self._end = 0
        self._last: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of tracked keys."""
        return len(self._last)

    @property
    def rate(self) -> float:
        """Part of all keys that is sampled, 0 to 1."""
        return self._threshold / _WHOLE

    def sample(self, uses: Sequence[Use], key_bytes: int) -> Sampled:
        """See ``sample_owned``, which also tells whose references they are."""
        return self.sample_owned(uses, key_bytes)[0]

    def sample_owned(self, uses: Sequence[Use], key_bytes: int) -> tuple[Sampled, I64]:
        """Count the uses; return the references of sampled keys for ``add``, and the number of
        each one's use, shape (n,).

        Args:
            uses: oldest first, at least one.
            key_bytes: bytes of each key of all uses, at least 8.
        """
        blobs = [blob for _, blob in uses]
        self._count(uses, key_bytes)
        if self._native is None:
            hashes, owners = self._drawn(blobs, key_bytes)
        else:
            hashes, owners = self._native.find(blobs, key_bytes)
        if not len(hashes):
            return NOTHING, owners
        kinds = [uses[use][0] for use in owners.tolist()]
        found = Sampled(
            hashes,
            hashes ^ np.array([kind.space & _WHOLE - 1 for kind in kinds], np.uint64),
            np.array([kind.row for kind in kinds], np.int64),
            np.array([kind.block_bytes for kind in kinds], np.float64),
        )
        return found, owners

    def _drawn(self, blobs: list[bytes], key_bytes: int) -> tuple[U64, I64]:
        """Find the sampled keys like ``KeySampler.find``, without the native module."""
        # From the last use's root back to the first one's: read from its end, each chain's leaf
        # comes first.
        blob = b"".join(reversed(blobs))
        hashes = _hashes(blob, key_bytes, np.uint64(self._factor))
        if self._threshold < _WHOLE:
            places = np.flatnonzero(hashes < np.uint64(self._threshold))[::-1]
        else:
            places = np.arange(len(hashes))[::-1]
        at = (len(hashes) - 1 - places) * key_bytes
        ends = np.cumsum(np.array([len(blob) for blob in blobs], np.int64))
        return hashes[places], np.searchsorted(ends, at, side="right")

    def _kept(self, some: Sampled) -> Sampled:
        """Return the references that are still sampled: the rate may have fallen since."""
        if self._threshold == _WHOLE:
            return some
        kept = some.hashes < np.uint64(self._threshold)
        if kept.all():
            return some
        return some.at(np.flatnonzero(kept))

    def _count(self, uses: Sequence[Use], key_bytes: int) -> None:
        sizes: dict[int, int] = {}
        for kind, blob in uses:
            sizes[kind.row] = sizes.get(kind.row, 0) + len(blob)
        for row, size in sizes.items():
            if row >= 0:
                self.asked[row] += size // key_bytes

    def add(self, some: Sampled) -> None:
        """Add up to ``CHUNK`` references that ``sample`` returned; fewer cost nearly as much."""
        some = self._kept(some)
        if not len(some):
            return
        self.references += len(some)
        before = self._enter(some)
        distances = self._distances(before, some.weights)
        self._note(some, before, distances)
        base, end = self._end, self._end + len(some)
        self._line_hashes[base:end] = some.hashes
        self._line_names[base:end] = some.names
        self._weights[base:end] = some.weights
        self._live[base:end] = True
        again = before[before >= 0]
        self._weights[again] = 0
        self._live[again] = False
        self._end = end
        if len(self._last) > self.sample_max:
            self._compact()
            self.lower_rate(int(_LEFT * self.sample_max))
        elif self._end + CHUNK > len(self._live):
            self._compact()

    def _enter(self, some: Sampled) -> I64:
        """Make these references their keys' last ones; return the place of each one's previous
        reference, or -1.
        """
        last, before = self._last, list[int]()
        for place, name in enumerate(some.names.tolist(), self._end):
            before.append(last.get(name, -1))
            last[name] = place
        return np.array(before, np.int64)

    def _distances(self, before: I64, weights: F64) -> F64:
        """Bytes of the sample used since each previous reference, the block's own included."""
        count, end = len(before), self._end
        passed = np.empty(end + count)
        np.cumsum(self._weights[:end], out=passed[:end])
        total = passed[end - 1] if end else 0.0
        passed[end:] = total + np.cumsum(weights)
        # Between two references of a key, another one is new to that time if its own previous one
        # lies before it.
        new = before <= before[:, None]
        new &= _EARLIER[:count, :count]
        between: F64 = new.astype(np.float64) @ weights
        between += total - passed[before] + weights
        return between

    def _note(self, some: Sampled, before: I64, distances: F64) -> None:
        counted = some.rows >= 0
        seen = counted & (before >= 0)
        each = _WHOLE / self._threshold
        np.add.at(self._new, some.rows[counted & ~seen], each)
        octaves = np.log2(np.maximum(distances[seen] * each, 1.0)) - _FIRST_OCTAVE
        buckets = np.clip(octaves * _PER_OCTAVE, 0, _BUCKETS - 1).astype(np.int64)
        np.add.at(self._hist, (some.rows[seen], buckets), each)

    def lower_rate(self, keys_max: int) -> None:
        """Lower the sample rate until at most ``keys_max`` of the present keys are sampled."""
        hashes = self._line_hashes[: self._end][self._live[: self._end]]
        if len(hashes) > keys_max:
            self._threshold = max(1, int(np.partition(hashes, keys_max)[keys_max]))
            if self._native is not None:
                self._native.use(self._threshold)
            self._compact()

    def _compact(self) -> None:
        """Keep the last references of keys that are still sampled and not too old."""
        end = self._end
        kept = self._live[:end].copy()
        if self._threshold < _WHOLE:
            kept &= self._line_hashes[:end] < np.uint64(self._threshold)
        weights = np.where(kept, self._weights[:end], 0)
        kept &= np.cumsum(weights[::-1])[::-1] <= self.limit_bytes * self.rate
        places = np.flatnonzero(kept)
        count = len(places)
        for line in (self._line_hashes, self._line_names, self._weights):
            line[:count] = line[places]
        self._live[:count], self._live[count:] = True, False
        self._weights[count:] = 0
        self._end = count
        self._last = dict(zip(self._line_names[:count].tolist(), range(count), strict=True))

    def decay(self, factor: float) -> None:
        """Multiply all counts, so that older lookups count less."""
        self.asked *= factor
        self._new *= factor
        self._hist *= factor

    def clear(self, row: int) -> None:
        """Forget the counts of a row."""
        self.asked[row] = self._new[row] = 0
        self._hist[row] = 0

    def hit_ratios(self, rows: int | slice | list[int], capacities: Sequence[float]) -> F64:
        """Hit ratios that LRU caches of these capacities (bytes) would have had, shape (n,).

        They are those of the rows' lookups together; 0 before the first lookup.
        """
        rows = [rows] if isinstance(rows, int) else rows
        hist = self._hist[rows].sum(axis=0)
        asked = float(self.asked[rows].sum())
        if asked <= 0:
            return np.zeros(len(capacities))
        # Hot keys are in the sample or not. The difference that makes has small distances.
        missing = asked - hist.sum() - float(self._new[rows].sum())
        below = np.concatenate(([0.0], np.cumsum(hist))) + missing
        octaves = np.log2(np.maximum(np.asarray(capacities, np.float64), 1.0)) - _FIRST_OCTAVE
        places = np.clip(octaves * _PER_OCTAVE, 0, _BUCKETS)
        hits = np.interp(places, np.arange(_BUCKETS + 1), below)
        return np.clip(np.where(np.asarray(capacities) > 0, hits, 0.0) / asked, 0.0, 1.0)


NOTHING = Sampled(
    np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0)
)


def chunks(parts: Sequence[Sampled]) -> Iterator[Sampled]:
    """Yield the references of several samples, ``CHUNK`` at a time."""
    if not parts:
        return
    whole = parts[0] if len(parts) == 1 else Sampled.of(parts)
    for at in range(0, len(whole), CHUNK):
        yield whole.at(slice(at, at + CHUNK))


def _hashes(blob: bytes, key_bytes: int, by: np.uint64) -> U64:
    """Hash each key by its first and its last 8 bytes, shape (n,)."""
    if key_bytes % 8:
        ends = np.dtype(
            {
                "names": ["a", "b"],
                "formats": ["<u8", "<u8"],
                "offsets": [0, key_bytes - 8],
                "itemsize": key_bytes,
            }
        )
        keys = np.frombuffer(blob, ends)
        hashes: U64 = keys["a"] + keys["b"]
    else:
        words = np.frombuffer(blob, np.uint64).reshape(-1, key_bytes // 8)
        hashes = words[:, 0] + words[:, -1]
    hashes *= by
    return hashes
