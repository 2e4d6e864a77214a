"""Admission to a pipeline: a bound on the blocks inside, and the outcomes not yet fetched."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

OUTCOMES_MAX = 4096

OutcomeT = TypeVar("OutcomeT")


class Admission(Generic[OutcomeT]):
    """Counts blocks in and out. Thread-safe.

    Args:
        blocks_max: most blocks inside.
        outcomes_max: most outcomes that were not fetched; beyond it nothing is admitted, so a
            caller that never polls is throttled instead of growing memory.
    """

    def __init__(self, blocks_max: int, outcomes_max: int = OUTCOMES_MAX) -> None:
        self._blocks_max = blocks_max
        self._outcomes_max = outcomes_max
        self._changed = threading.Condition()
        self._inside: dict[int, int] = {}
        self._blocks = 0
        self._outcomes: dict[int, OutcomeT] = {}
        self._entered_count = 0
        self._claimed_count = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether no more blocks are admitted."""
        return self._closed

    def enter(self, blocks: int, wait_s: float) -> int:
        """Admit ``blocks``, waiting up to ``wait_s`` seconds for room; return their number, or 0.

        0 blocks are admitted even when closed: their outcome comes at once.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(blocks), max(wait_s, 0.0))
            if (self._closed and blocks) or not self._has_room(blocks):
                return 0
            self._entered_count += 1
            self._inside[self._entered_count] = blocks
            self._blocks += blocks
            return self._entered_count

    def leave(self, number: int, outcome: OutcomeT) -> None:
        """Record the outcome of the blocks that entered as ``number``."""
        with self._changed:
            self._blocks -= self._inside.pop(number)
            self._outcomes[number] = outcome
            self._changed.notify_all()

    def claim_all(self) -> list[OutcomeT]:
        """Hand out all outcomes, in the order in which they came."""
        with self._changed:
            outcomes = list(self._outcomes.values())
            self._outcomes.clear()
            self._claimed_count += len(outcomes)
            self._changed.notify_all()
            return outcomes

    def claim(self, number: int, deadline_s: float) -> OutcomeT | None:
        """Hand out one outcome, waiting up to ``deadline_s`` seconds for it.

        None if it did not come, or was handed out before.
        """
        with self._changed:
            self._changed.wait_for(lambda: number not in self._inside, max(deadline_s, 0.0))
            outcome = self._outcomes.pop(number, None)
            if outcome is not None:
                self._claimed_count += 1
                self._changed.notify_all()
            return outcome

    def wait_empty(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` seconds until nothing is inside; True if so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, max(deadline_s, 0.0))

    def close(self) -> None:
        """Admit no more blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def check_books(self) -> None:
        """Raise AssertionError with the numbers if outcomes were lost or bounds exceeded."""
        with self._changed:
            parts = (len(self._inside), len(self._outcomes), self._claimed_count)
            assert sum(parts) == self._entered_count, f"{self._entered_count} entered, have {parts}"
            inside = sum(self._inside.values())
            assert inside == self._blocks <= self._blocks_max, f"{inside}, counted {self._blocks}"

    def _has_room(self, blocks: int) -> bool:
        # Those inside have a place among the outcomes, too: leaving never waits.
        taken = len(self._inside) + len(self._outcomes)
        return self._blocks + blocks <= self._blocks_max and taken < self._outcomes_max
