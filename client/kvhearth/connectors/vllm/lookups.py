"""Questions to the daemon, asked on threads of their own: the scheduler never waits for an RPC."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvhearth.client import KVClient
from kvhearth.codec import absent
from kvhearth.connectors.vllm.groups import EngineGroups
from kvhearth.pipeline.workers import Worker
from kvhearth.results import LookupResult

_TICK_S = 0.25

Fold = Callable[[], bytes | None]


class Lookup:
    """One question under way.

    Attributes:
        asked_at: when it was put, monotonic seconds.
        session_id: under which it was answered; its lease is void under another.
        fold: what was folded into the keys; None if that could not be found out.
    """

    def __init__(self, hashes: Sequence[bytes], find_fold: Fold | None) -> None:
        self.asked_at = time.monotonic()
        self.answered_at = 0.0
        self.session_id = ""
        self.fold: bytes | None = b"" if find_fold is None else None
        self.hashes = hashes
        self.find_fold = find_fold
        self.cancelled = False
        self._result: LookupResult | None = None
        self._done = threading.Event()

    @property
    def result(self) -> LookupResult | None:
        """The answer, or None while there is none."""
        return self._result

    def wait(self, seconds: float) -> LookupResult | None:
        """The answer, waiting up to ``seconds`` for it."""
        if self._result is None and seconds > 0:
            self._done.wait(seconds)
        return self._result

    def settle(self, result: LookupResult, session_id: str) -> None:
        """The answer came."""
        self.session_id = session_id
        self.answered_at = time.monotonic()
        self._result = result
        self._done.set()


class LookupDesk:
    """Threads that ask; a lease that nobody wants any more is given back here.

    Args:
        client: the scheduler's.
        groups: of its contract.
        threads: how many ask at a time.
        queue_max: questions waiting at most; more are not taken.
    """

    def __init__(
        self, client: KVClient, groups: EngineGroups, *, threads: int = 2, queue_max: int = 4096
    ) -> None:
        self._client = client
        self._groups = groups
        self._queue: deque[Lookup] = deque()
        self._queue_max = queue_max
        self._lock = threading.Lock()
        self._at_hand: dict[int, Lookup] = {}
        self._wake = threading.Condition()
        self._workers = [
            Worker(f"kvhearth-lookup-{index}", self._step, self._recover)
            for index in range(threads)
        ]
        for worker in self._workers:
            worker.start()

    def ask(self, hashes: Sequence[bytes], find_fold: Fold | None = None) -> Lookup | None:
        """Put a question; None if too many wait.

        Args:
            hashes: the request's block hashes, a list of their own.
            find_fold: finds out what else belongs into the keys; runs on the desk's thread and may
                read files.
        """
        lookup = Lookup(hashes, find_fold)
        with self._wake:
            if len(self._queue) >= self._queue_max:
                self._client.count("lookup_throttled")
                return None
            self._queue.append(lookup)
            self._wake.notify()
        return lookup

    def drop(self, lookup: Lookup) -> None:
        """Nobody wants the answer, or the lease, any more. Idempotent."""
        with self._lock:
            if lookup.cancelled:
                return
            lookup.cancelled = True
            result = lookup.result
        if result is not None:
            self._client.release(result.lease)

    def close(self, deadline_s: float) -> bool:
        """End the threads; False if one did not end in time."""
        until = time.monotonic() + deadline_s
        with self._wake:
            for lookup in self._queue:
                lookup.cancelled = True
            self._queue.clear()
            self._wake.notify_all()
        left = [worker.stop(max(until - time.monotonic(), 0.0)) for worker in self._workers]
        return all(left)

    # -- the threads -------------------------------------------------------------------------------

    def _step(self) -> None:
        with self._wake:
            if not self._queue:
                self._wake.wait(_TICK_S)
            lookup = self._queue.popleft() if self._queue else None
        if lookup is None or lookup.cancelled:
            return
        self._at_hand[threading.get_ident()] = lookup
        self._answer(lookup)
        self._at_hand.pop(threading.get_ident(), None)

    def _answer(self, lookup: Lookup) -> None:
        session_id = self._client.session_id
        if lookup.find_fold is not None:
            lookup.fold = lookup.find_fold()
        if lookup.fold is None:
            lookup.settle(LookupResult(0, None, {}, reason="no_adapter_digest"), session_id)
            return
        keys = self._groups.keys(lookup.hashes, lookup.fold)
        result = self._client.lookup(keys, lease=True, prefetch=True)
        with self._lock:
            lookup.settle(result, session_id)
            unwanted = lookup.cancelled
        if unwanted:
            self._client.release(result.lease)

    def _recover(self) -> None:
        self._client.count("lookup_crashes")
        lookup = self._at_hand.pop(threading.get_ident(), None)
        if lookup is not None and lookup.result is None:
            nothing = LookupResult(0, None, absent({}), reason="internal")
            lookup.settle(nothing, self._client.session_id)
