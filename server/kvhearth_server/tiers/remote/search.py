"""Searches for the ends of chains at a remote, in the background, by bisection.

A chain is there up to some key: a block is published after those before it. Three calls of eight
keys find the end of a chain of 512. Chains with the same first unknown key share a search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvhearth_server.tiers.base import BlockSpec, Counts, Done, Failed, Failure
from kvhearth_server.tiers.remote.cache import NO, YES, ExistenceCache, States
from kvhearth_server.tiers.remote.mover import Answer, Exists

CALL_KEYS = 8
SEARCHES_MAX = 256
"""Most searches at once; blocks of further chains count as absent for the moment."""
FAILED_S = 1.0
"""Time for which blocks that could not be asked about count as absent."""

_U64 = npt.NDArray[np.uint64]
Submit = Callable[[Exists, Callable[[Answer], None]], bool]
"""Sends a request and calls the function with its answer; false if it cannot be sent."""


@dataclass(eq=False)
class _Search:
    """One chain: the first ``low`` keys are there, the one at ``high`` is not."""

    family: BlockSpec
    space: str
    keys: list[bytes]
    hashes: _U64
    low: int
    high: int


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
        self._by_first: dict[int, _Search] = {}

    def __len__(self) -> int:
        return len(self._by_first)

    def begin(self, family: BlockSpec, space: str, keys: list[bytes], hashes: _U64) -> bool:
        """Begin to find the end of a chain of unknown keys, unless a search with the same first key
        is under way. Return false if there are too many, or the remote cannot be asked.
        """
        first = int(hashes[0])
        if first in self._by_first:
            self._counts.add("probes_merged")
            return True
        if len(self._by_first) >= SEARCHES_MAX:
            self._counts.add("probes_refused")
            return False
        search = _Search(family, space, keys, hashes, 0, len(keys))
        self._by_first[first] = search
        self._counts.add("probes")
        return self._step(search)

    def _step(self, search: _Search) -> bool:
        """Ask about keys that cut the search's range into equal parts; false if that cannot be."""
        rows = cuts(search.low, search.high)
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
        for row, outcome in zip(rows, answer.outcomes, strict=True):
            if not isinstance(outcome, Done):
                search.high = row
                break
            search.low = row + 1
        if search.low < search.high:
            self._step(search)
        else:
            self._end(search, known=True)

    def _end(self, search: _Search, *, known: bool) -> None:
        del self._by_first[int(search.hashes[0])]
        now, end = self._clock(), search.low
        self._cache.note(search.hashes[:end], True, now)
        self._cache.note(search.hashes[end:], False, now, for_s=0.0 if known else FAILED_S)
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


def cuts(low: int, high: int) -> list[int]:
    """Return up to ``CALL_KEYS`` rows that cut a range into parts as equal as can be."""
    count = min(CALL_KEYS, high - low)
    return [low + (high - low) * (cut + 1) // (count + 1) for cut in range(count)]


def failures(answer: Answer) -> list[Failure]:
    """Return the reasons for which a request failed at the remote, each once."""
    found = {each.reason for each in answer.outcomes if isinstance(each, Failed)}
    return sorted(found - {Failure.CANCELLED})
