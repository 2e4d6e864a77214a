"""Tiers around a tier: for counting, throttling and injected faults. They pass every other call on,
so they can be stacked, and keep the contract.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from kvhearth.model import I64
from kvhearth_server.tiers.base import (
    Completion,
    Counts,
    Done,
    Evicted,
    Facts,
    Failed,
    Family,
    Health,
    LoadBatch,
    Outcome,
    StoreBatch,
    Throttled,
    Tier,
)


class Wrapper:
    """Passes everything on to ``inner``."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.event_fd = inner.event_fd
        self.counts = inner.counts

    @property
    def batch_blocks_max(self) -> int:
        return self.inner.batch_blocks_max

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        return self.inner.submit_store(batch)

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        return self.inner.submit_load(batch)

    def cancel(self, ticket: int) -> None:
        self.inner.cancel(ticket)

    def poll(self) -> list[Completion]:
        return self.inner.poll()

    def look_up(self, family: Family, keys: Sequence[bytes]) -> Facts:
        return self.inner.look_up(family, keys)

    def forget(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> int:
        return self.inner.forget(namespace, group, keys)

    def take_evicted(self) -> list[Evicted]:
        return self.inner.take_evicted()

    def health(self) -> Health:
        return self.inner.health()

    def drain(self, deadline_s: float) -> bool:
        return self.inner.drain(deadline_s)

    def close(self) -> None:
        self.inner.close()


class Counting(Wrapper):
    """Counts batches, blocks and outcomes: ``store_batches``, ``load_blocks``, ``load_missing``."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.seen = Counts()
        self._kinds: dict[int, str] = {}

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        return self._note("store", batch, self.inner.submit_store(batch))

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        return self._note("load", batch, self.inner.submit_load(batch))

    def poll(self) -> list[Completion]:
        completions = self.inner.poll()
        for each in completions:
            if not each.final:
                continue
            kind = self._kinds.pop(each.ticket)
            for outcome, rows in each.parts:
                self.seen.add(f"{kind}_{type(outcome).__name__.lower()}", len(rows))
        return completions

    @property
    def in_flight(self) -> int:
        """Batches without their final completion."""
        return len(self._kinds)

    def _note(self, kind: str, batch: LoadBatch, answer: int | Throttled) -> int | Throttled:
        if isinstance(answer, Throttled):
            self.seen.add(f"{kind}_refused")
            return answer
        self.seen.add(f"{kind}_batches")
        self.seen.add(f"{kind}_blocks", len(batch.keys))
        self._kinds[answer] = kind
        return answer


class Throttling(Wrapper):
    """Lets at most ``bytes_per_s`` through, stores and loads together, and at most ``batches``
    batches at once. Zero stands for no bound.
    """

    def __init__(
        self, inner: Tier, *, clock: Callable[[], float], bytes_per_s: float = 0, batches: int = 0
    ) -> None:
        super().__init__(inner)
        self._clock = clock
        self._bytes_per_s, self._batches = bytes_per_s, batches
        self._free_at = 0.0
        self._open: set[int] = set()

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        return self._refusal() or self._note(batch, self.inner.submit_store(batch))

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        return self._refusal() or self._note(batch, self.inner.submit_load(batch))

    def poll(self) -> list[Completion]:
        completions = self.inner.poll()
        self._open -= {each.ticket for each in completions if each.final}
        return completions

    def _refusal(self) -> Throttled | None:
        if self._batches and len(self._open) >= self._batches:
            return Throttled("queue")
        wait = self._free_at - self._clock()
        return Throttled("rate", wait) if self._bytes_per_s and wait > 0 else None

    def _note(self, batch: LoadBatch, answer: int | Throttled) -> int | Throttled:
        if not isinstance(answer, Throttled):
            self._open.add(answer)
            if self._bytes_per_s:
                size = len(batch.keys) * batch.family.shards * batch.family.length
                start = max(self._clock(), self._free_at)
                self._free_at = start + size / self._bytes_per_s
        return answer


class Faulty(Wrapper):
    """Turns good outcomes into bad ones, and refuses batches, at given rates, from a seed.

    A load that it fails has its bytes in place: only the answer is a lie, on the safe side.
    """

    def __init__(
        self,
        inner: Tier,
        seed: int,
        *,
        fail: float = 0.0,
        refuse: float = 0.0,
        outcome: Outcome | None = None,
    ) -> None:
        """``outcome``: what failed rows get; ``Failed("io")`` by default."""
        super().__init__(inner)
        self._random = random.Random(seed)
        self._fail, self._refuse = fail, refuse
        self._outcome = outcome or Failed("io")
        self.injected = 0

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        return self._refusal() or self.inner.submit_store(batch)

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        return self._refusal() or self.inner.submit_load(batch)

    def poll(self) -> list[Completion]:
        return [self._spoil(each) if each.final else each for each in self.inner.poll()]

    def _refusal(self) -> Throttled | None:
        if self._random.random() < self._refuse:
            self.injected += 1
            return Throttled("injected", 0.01)
        return None

    def _spoil(self, completion: Completion) -> Completion:
        parts: list[tuple[Outcome, I64]] = []
        for outcome, rows in completion.parts:
            if not isinstance(outcome, Done):
                parts.append((outcome, rows))
                continue
            bad = np.array([self._random.random() < self._fail for _ in range(len(rows))])
            self.injected += int(bad.sum())
            chosen = [(outcome, rows[~bad]), (self._outcome, rows[bad])]
            parts += [(what, which) for what, which in chosen if len(which)]
        return Completion(completion.ticket, parts, completion.final)
