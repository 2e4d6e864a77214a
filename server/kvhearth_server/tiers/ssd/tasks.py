"""A batch on its way: outcomes of its rows, and how many requests are still out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvhearth.model import I64
from kvhearth_server.tiers.base import Completion, Failed, LoadBatch, Outcome, gather
from kvhearth_server.tiers.ssd.job import Job


class Task:
    """One batch of the engine's or of the reclaimer's.

    Attributes:
        jobs: its requests that have not ended.
        shards_left: of each row, requests' shards that have not ended.
        replacing: of a carried batch, the entries that its blocks are carried from; a row is bound
            only while its key is still bound there. None for a batch of the engine's.
    """

    def __init__(
        self,
        ticket: int,
        batch: LoadBatch,
        then: Callable[[Task], None],
        replacing: I64 | None = None,
    ) -> None:
        self.ticket = ticket
        self.batch = batch
        self.replacing = replacing
        self.jobs: set[Job] = set()
        self.shards_left = [batch.family.shards] * len(batch.keys)
        self.cancelled = False
        self._then = then
        self._outcomes: list[Outcome | None] = [None] * len(batch.keys)

    def settle(self, rows: Iterable[int], outcome: Outcome) -> None:
        """The outcome of rows; the first one of a row counts."""
        for row in rows:
            if self._outcomes[row] is None:
                self._outcomes[row] = outcome

    @property
    def out(self) -> I64:
        """Rows of which requests are out, i64."""
        return np.array([row for row, left in enumerate(self.shards_left) if left], np.int64)

    def settled(self, row: int) -> bool:
        """Whether a row has its outcome."""
        return self._outcomes[row] is not None

    def undecided(self) -> I64:
        """Rows without an outcome, i64."""
        return np.array([r for r, each in enumerate(self._outcomes) if each is None], np.int64)

    def cancel(self) -> None:
        """Let what has not begun end at once."""
        self.cancelled = True
        for job in self.jobs:
            job.cancelled = True

    def finish_if_done(self) -> None:
        """Report the batch once no request of it is out."""
        if not self.jobs:
            self._then(self)

    def completion(self) -> Completion:
        """The final completion; every row has an outcome."""
        outcomes = [each or Failed("io") for each in self._outcomes]
        return Completion(self.ticket, gather(outcomes))
