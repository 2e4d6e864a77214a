"""Hit ratios of other capacities, from the reuse times of sampled keys.

A key's reuse time is the bytes of blocks that were used since its last use. How often it is how
long tells how long blocks stay in an LRU cache, and so which lookups find theirs (AET; Hu et al.,
USENIX ATC 2016). Keys are sampled by a hash, half as many whenever there are too many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvhearth.model import I64

F64 = npt.NDArray[np.float64]
OTHER, NAMED_MAX = "other", 16
"""Row of the namespaces beyond the first ``NAMED_MAX``."""
TRACKED_MAX, SAMPLED_MAX = 8192, 2048
"""Bounds on sampled keys, and on the uses of them that are counted at once."""
_FADE_S, _HALF_LIFE_S, _WHOLE, _ODD = 60.0, 3600.0, 1 << 64, np.uint64(0x9E3779B97F4A7C15)
_EDGES: F64 = 2.0 ** (12 + np.arange(40 * 16) / 16)
"""Reuse times that bound the buckets, 4.4 % apart from 4 KiB on; new keys are in the last one."""


class Kind(NamedTuple):
    """What uses have in common: ``space`` is a number below 2 ** 64 of namespace, epoch and group,
    ``row`` names the hit ratios that lookups count in (stores: none), keys have 8 bytes or more.
    """

    space: int
    row: str
    block_bytes: int
    key_bytes: int


Use = tuple[float, Kind, bytes]
"""Monotonic time in seconds, and keys side by side that were looked up or stored then."""


class ReuseTimes:
    """Reuse times of the blocks that share one memory."""

    def __init__(self) -> None:
        self._threshold, self._clock, self._faded_at = _WHOLE, 0, float("-inf")
        self._last: dict[int, int] = {}  # by sampled key, the clock (bytes) at its last use
        self.used: F64 = np.zeros(2 + len(_EDGES))
        """Bytes used, and how many of them had which reuse time."""
        self.rows: dict[str, F64] = {}
        """The same in keys looked up, by ``Kind.row``."""

    def __len__(self) -> int:
        """Number of tracked keys."""
        return len(self._last)

    @property
    def rate(self) -> float:
        """Part of all keys that is sampled, 0 to 1."""
        return self._threshold / _WHOLE

    def add(self, uses: Sequence[Use], now: float, limit_bytes: Callable[[], int]) -> None:
        """Count uses, the oldest first; forget keys that ``limit_bytes()`` would not have kept."""
        if now - self._faded_at > _FADE_S:
            self._fade(now)
        for width in {kind.key_bytes for _, kind, keys in uses if keys}:
            self._count([use for use in uses if use[1].key_bytes == width], width)
        if len(self._last) > TRACKED_MAX:
            oldest = self._clock - float(np.interp(limit_bytes(), self._capacities(), _EDGES))
            self._last = {name: at for name, at in self._last.items() if at >= oldest}
        while len(self._last) > TRACKED_MAX:
            self._threshold //= 2
            self._last = {name: at for name, at in self._last.items() if name < self._threshold}

    def _count(self, uses: Sequence[Use], width: int) -> None:
        """Count uses of keys of one width."""
        counts = [len(keys) // width for _, _, keys in uses]
        names, ends = self._sampled(uses, counts, width)
        last, clock, start = self._last, self._clock, 0
        times, sizes = list[float](), list[int]()
        asked, spans = dict[str, int](), dict[str, list[slice]]()
        for (_, (_, row, size, _), _), count, end in zip(uses, counts, ends, strict=True):
            clock += count * size
            if row:
                asked[row] = asked.get(row, 0) + count
            if start < end:
                some = names[start:end]
                times += [clock - last.get(name, -_WHOLE) for name in some]
                sizes += [size] * len(some)
                last.update(dict.fromkeys(some, clock))
                spans.setdefault(row, []).append(slice(start, end))
                start = end
        buckets = 1 + np.searchsorted(_EDGES, np.array(times, np.float64), side="right")
        self._add(self.used, clock - self._clock, buckets, np.array(sizes, np.float64))
        self._clock = clock
        for row, count in asked.items():
            known = row in self.rows or len(self.rows) < NAMED_MAX
            into = self.rows.setdefault(row if known else OTHER, np.zeros_like(self.used))
            found = [buckets[span] for span in spans.get(row, ())]
            self._add(into, count, np.concatenate(found) if found else buckets[:0])

    def _add(self, row: F64, total: int, buckets: I64, weights: F64 | None = None) -> None:
        row[0] += total
        row += np.bincount(buckets, weights, len(row)) / self.rate

    def _sampled(
        self, uses: Sequence[Use], counts: Sequence[int], width: int
    ) -> tuple[list[int], list[int]]:
        """Return the hashes of the sampled keys, and where those of each use end."""
        blob = b"".join([keys for _, _, keys in uses])
        first, last = (
            np.ndarray(len(blob) // width, "<u8", blob, at, (width,)) for at in (0, width - 8)
        )
        spaces = np.array([kind.space for _, kind, _ in uses], np.uint64)
        hashes = ((first + last) ^ np.repeat(spaces, counts)) * _ODD
        chosen = np.flatnonzero(hashes <= np.uint64(self._threshold - 1))
        while len(chosen) > SAMPLED_MAX:
            self._threshold //= 2
            chosen = chosen[hashes[chosen] < np.uint64(self._threshold)]
        return hashes[chosen].tolist(), np.searchsorted(chosen, np.cumsum(counts)).tolist()

    def _fade(self, now: float) -> None:
        """Count older uses less; sample more keys again if few are tracked."""
        factor, self._faded_at = 0.5 ** ((now - self._faded_at) / _HALF_LIFE_S), now
        self.used *= factor
        self.rows = {name: row * factor for name, row in self.rows.items() if row[0] > 1}
        if len(self._last) < TRACKED_MAX // 4:
            self._threshold = min(_WHOLE, 2 * self._threshold)

    def _capacities(self) -> F64:
        """Return the bytes of LRU caches that keep blocks for each of the reuse times."""
        alive = 1 - _below(self.used)
        steps = np.diff(_EDGES) * (alive[1:] + alive[:-1]) / 2
        return np.cumsum(np.concatenate((_EDGES[:1], steps)))

    def hit_ratios(self, row: F64, sizes: Sequence[int]) -> list[float]:
        """Return the hit ratios of a row's lookups, had the caches had ``sizes`` bytes."""
        return np.interp(sizes, self._capacities(), _below(row)).tolist()


def _below(row: F64) -> F64:
    """Return which part of a row has shorter reuse times than each of the edges."""
    # A hot key is in the sample or not. The difference that makes is one of short times.
    missing = row[0] - row[1:].sum()
    counts = np.cumsum(np.concatenate(([missing + row[1]], row[2:-1])))
    below: F64 = np.clip(counts / max(row[0], 1e-9), 0, 1)
    return below
