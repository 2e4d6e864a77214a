"""Searches for the ends of chains at a remote, in the background, by bisection.

A chain is there up to some key: a block is published after those before it. Three calls of eight
keys find the end of a chain of 512. Chains with the same first unknown key share a search.

Of a sliding window only the last blocks are needed, and earlier ones may be gone: there the last
present block counts, not the first absent one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvhearth_server.tiers.base import BlockSpec, Counts, Done, Failed, Failure
from kvhearth_server.tiers.remote.cache import NO, YES, ExistenceCache, States
from kvhearth_server.tiers.remote.mover import Answer, Exists

CALL_KEYS = 8
SEARCHES_MAX = 256
"""Most searches at once; blocks of further chains count as absent for the moment."""
FAILED_S = 1.0
"""Time for which blocks that could not be asked about count as absent."""

Submit = Callable[[Exists, Callable[[Answer], None]], bool]
"""Sends a request and calls the function with its answer; false if it cannot be sent."""


@dataclass(eq=False)
class _Search:
    """One chain: the first ``low`` keys are there, the one at ``high`` is not; with a ``window``,
    only that many before ``low`` are.
    """

    family: BlockSpec
    space: str
    keys: list[bytes]
    names: list[bytes]
    low: int
    high: int
    window: int = 0


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

    def begin(
        self,
        family: BlockSpec,
        space: str,
        keys: list[bytes],
        names: list[bytes],
        window: int = 0,
    ) -> bool:
        """Begin to find the end of a chain of unknown keys, unless a search with the same first key
        is under way. Return false if there are too many, or the remote cannot be asked.

        Args:
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
        search = _Search(family, space, keys, names, 0, len(keys), window)
        self._by_first[first] = search
        self._counts.add("probes")
        return self._step(search)

    def _step(self, search: _Search) -> bool:
        """Ask about keys that cut the search's range into equal parts; false if that cannot be."""
        rows = cuts(search.low, search.high, last=search.window > 0)
        request = Exists(search.space, search.family, [search.keys[row] for row in rows])
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
