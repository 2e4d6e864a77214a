"""Existence of blocks at a remote: what is known of it, and searches for what is not.

A wrong answer costs a read that misses, or a block that is computed again, never a wrong byte:
every record is verified when it is read. A dict answers a lookup of 512 keys in 0.08 ms; that of
``cachetools`` whose entries end one by one takes 2 ms, on the daemon's loop.

A chain is there up to some key: a block is published after those before it. Searches find that key
in the background, by bisection: three calls of eight keys find the end of a chain of 512. Chains
with the same first unknown key share a search. Of a sliding window only the last blocks are needed,
and earlier ones may be gone: there the last present block counts, not the first absent one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvhearth.model import Bools
from kvhearth_server.tiers.base import Counts, Done, Failed, Failure
from kvhearth_server.tiers.remote.mover import Answer, Exists

ENTRIES_MAX = 1 << 17
"""Most entries: about 18 MB. A larger dict would stop the loop for longer as it grows."""
POSITIVE_S, NEGATIVE_S = 60.0, 5.0
"""Time for which an entry of a present, and of an absent block holds."""
JITTER = 0.2
"""Part of a negative entry's time that is left to chance: hosts do not ask again in step."""
CALL_KEYS = 8
SEARCHES_MAX = 256
"""Most searches at once; blocks of further chains count as absent for the moment."""
FAILED_S = 1.0
"""Time for which blocks that could not be asked about count as absent."""

States = npt.NDArray[np.int8]
"""``YES``, ``NO`` or ``UNKNOWN`` for each key, shape (n,)."""
UNKNOWN, YES, NO = 0, 1, -1

Submit = Callable[[Exists, Callable[[Answer], None]], bool]
"""Sends a request and calls the function with its answer; false if it cannot be sent."""


class ExistenceCache:
    """Bounded knowledge of what a remote has: of two halves the older one is dropped when the other
    one is full.

    Args:
        entries_max: most entries.
    """

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self.entries_max = entries_max
        # The monotonic time at which an entry ends; negative for an absent block.
        self._newer: dict[bytes, float] = {}
        self._older: dict[bytes, float] = {}

    @property
    def entries(self) -> int:
        """Number of entries, of which some may have ended."""
        return len(self._newer) + len(self._older)

    def state(self, name: bytes, now: float) -> int:
        """Return what is known of one block."""
        end = self._newer.get(name) or self._older.get(name, 0.0)
        return YES if end > now else NO if -end > now else UNKNOWN

    def look(self, names: Sequence[bytes], now: float) -> States:
        """Return what is known of blocks."""
        return np.fromiter((self.state(name, now) for name in names), np.int8, len(names))

    def note(
        self, names: Sequence[bytes], present: Bools | bool, now: float, *, for_s: float = 0.0
    ) -> None:
        """Enter blocks as present or absent.

        Args:
            for_s: seconds for which the entries hold; 0 for the usual times.
        """
        shorter = 1 - JITTER * random.random()
        ends = {
            True: now + (for_s or POSITIVE_S),
            False: -now - (for_s or NEGATIVE_S * shorter),
        }
        each: Iterable[bool] = np.broadcast_to(np.asarray(present), len(names)).tolist()
        self._newer.update(zip(names, map(ends.__getitem__, each), strict=True))
        if len(self._newer) > self.entries_max // 2:
            self._newer, self._older = {}, self._newer


@dataclass(eq=False)
class _Search:
    """One chain: the first ``low`` keys are there, the one at ``high`` is not; with a ``window``,
    only that many before ``low`` are.
    """

    chain: Exists
    names: list[bytes]
    low: int
    high: int
    window: int


class Searches:
    """Searches under way; what they find goes into the cache.

    Args:
        cache: existence cache.
        counts: counters: probes, probes_merged, probes_refused, probes_failed.
        submit: see ``Submit``.
        clock: monotonic seconds.
    """

    def __init__(
        self, cache: ExistenceCache, counts: Counts, submit: Submit, clock: Callable[[], float]
    ) -> None:
        self._cache, self._counts = cache, counts
        self._submit, self._clock = submit, clock
        self._by_first: dict[bytes, _Search] = {}

    def __len__(self) -> int:
        return len(self._by_first)

    def begin(self, chain: Exists, names: list[bytes], window: int = 0) -> bool:
        """Begin to find the end of a chain of unknown keys, unless a search with the same first key
        is under way. Return false if there are too many, or the remote cannot be asked.

        Args:
            chain: all its keys.
            names: those of the keys in the cache.
            window: blocks at its end that a hit needs; 0 for all.
        """
        first = names[0]
        if first in self._by_first:
            self._counts.add("probes_merged")
            return True
        if len(self._by_first) >= SEARCHES_MAX:
            self._counts.add("probes_refused")
            return False
        search = _Search(chain, names, 0, len(names), window)
        self._by_first[first] = search
        self._counts.add("probes")
        return self._step(search)

    def _step(self, search: _Search) -> bool:
        """Ask about keys that cut the search's range into equal parts; false if that cannot be."""
        rows = cuts(search.low, search.high, last=search.window > 0)
        request = replace(search.chain, keys=[search.chain.keys[row] for row in rows])
        if not self._submit(request, partial(self._answered, search, rows)):
            self._end(search, known=False)
            return False
        return True

    def _answered(self, search: _Search, rows: list[int], answer: Answer) -> None:
        if not answer.final:
            return
        if failures(answer):
            self._end(search, known=False)
            return
        there = [isinstance(outcome, Done) for outcome in answer.outcomes]
        if search.window:
            found = max((index for index, here in enumerate(there) if here), default=-1)
        else:
            found = (there.index(False) if False in there else len(there)) - 1
        if found >= 0:
            search.low = rows[found] + 1
        if found + 1 < len(rows):
            search.high = rows[found + 1]
        if search.low < search.high:
            self._step(search)
        else:
            self._end(search, known=True)

    def _end(self, search: _Search, *, known: bool) -> None:
        del self._by_first[search.names[0]]
        now, end = self._clock(), search.low
        first = max(0, end - search.window) if search.window else 0
        self._cache.note(search.names[first:end], True, now)
        self._cache.note(search.names[end:], False, now, for_s=0.0 if known else FAILED_S)
        if not known:
            self._counts.add("probes_failed")


def unknown(states: States) -> tuple[int, int]:
    """Return the range of a chain about which the remote must be asked; empty if there is none.

    It is between the last present block before the first absent one, and that one.
    """
    high = int(states.argmin())
    if states[high] != NO:
        high = len(states)
    known = states[:high] == YES
    if not np.count_nonzero(known):
        return 0, high
    return high - int(known[::-1].argmax()), high


def unknown_of_window(states: States) -> tuple[int, int]:
    """Return the range of a chain about which the remote must be asked if only its last blocks are
    needed; empty if there is none. It is between the last present block and the last one that may
    be there.
    """
    maybe = np.flatnonzero(states != NO)
    high = int(maybe[-1]) + 1 if len(maybe) else 0
    known = np.flatnonzero(states[:high] == YES)
    return int(known[-1]) + 1 if len(known) else 0, high


def cuts(low: int, high: int, *, last: bool = False) -> list[int]:
    """Return up to ``CALL_KEYS`` rows that cut a range into parts as equal as can be; with ``last``
    the range's last row is one of them.
    """
    count = min(CALL_KEYS, high - low)
    if last:
        return [low + (high - low) * (cut + 1) // count - 1 for cut in range(count)]
    return [low + (high - low) * (cut + 1) // (count + 1) for cut in range(count)]


def failures(answer: Answer) -> list[Failure]:
    """Return the reasons for which a request failed at the remote, each once."""
    found = {each.reason for each in answer.outcomes if isinstance(each, Failed)}
    return sorted(found - {Failure.CANCELLED})
