"""The door of a pipeline: how much may be inside, and the outcomes that nobody fetched yet."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

OUTCOMES_MAX = 4096

OutcomeT = TypeVar("OutcomeT")


class Admission(Generic[OutcomeT]):
    """Counts blocks in and out. Thread-safe.

    Args:
        blocks_max: inside at most.
        outcomes_max: outcomes that nobody fetched at most; beyond it nothing is let in, so a caller
            that never polls is throttled instead of growing memory.
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
        """Whether no blocks are let in any more."""
        return self._closed

    def enter(self, blocks: int, wait_s: float) -> int:
        """Let ``blocks`` in, waiting up to ``wait_s`` seconds for room; their number, or 0.

        0 blocks are let in also when closed: they are an outcome that comes at once.
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
        """The blocks that entered as ``number`` are done."""
        with self._changed:
            self._blocks -= self._inside.pop(number)
            self._outcomes[number] = outcome
            self._changed.notify_all()

    def claim_all(self) -> list[OutcomeT]:
        """Give out all outcomes, in the order in which they came."""
        with self._changed:
            outcomes = list(self._outcomes.values())
            self._outcomes.clear()
            self._claimed_count += len(outcomes)
            self._changed.notify_all()
            return outcomes

    def claim(self, number: int, deadline_s: float) -> OutcomeT | None:
        """Give out one outcome, waiting up to ``deadline_s`` seconds for it; None if it did not
        come, or was given out before.
        """
        with self._changed:
            self._changed.wait_for(lambda: number not in self._inside, max(deadline_s, 0.0))
            outcome = self._outcomes.pop(number, None)
            if outcome is not None:
                self._claimed_count += 1
                self._changed.notify_all()
            return outcome

    def wait_empty(self, deadline_s: float) -> bool:
        """Whether nobody is inside, waiting up to ``deadline_s`` seconds for it."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, max(deadline_s, 0.0))

    def close(self) -> None:
        """Let no blocks in any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def check_books(self) -> None:
        """Raise AssertionError with the numbers if outcomes were lost or bounds passed."""
        with self._changed:
            parts = (len(self._inside), len(self._outcomes), self._claimed_count)
            assert sum(parts) == self._entered_count, f"{self._entered_count} entered, have {parts}"
            inside = sum(self._inside.values())
            assert inside == self._blocks <= self._blocks_max, f"{inside}, counted {self._blocks}"

    def _has_room(self, blocks: int) -> bool:
        # Those inside have a place among the outcomes, too: leaving never waits.
        taken = len(self._inside) + len(self._outcomes)
        return self._blocks + blocks <= self._blocks_max and taken < self._outcomes_max
