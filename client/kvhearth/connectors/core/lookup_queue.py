"""Lookups run on threads of their own, so that the scheduler never waits for an RPC. The mapped
index answers most of them at once, without a thread.

    asked ──▶ answered ──▶ taken or dropped
                │    ▲
                └────┘ asked again while blocks are promoted from SSD

Only the scheduler takes and drops; only the queue's threads resolve.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvhearth.client import KVClient
from kvhearth.clock import Clock
from kvhearth.connectors.core.engine import EngineGroups
from kvhearth.errors import ClientReason, Reason
from kvhearth.results import LookupResult, PromotionWait
from kvhearth.wire.messages import absent
from kvhearth.worker_thread import SupervisedThread

_TICK_S = 0.25

KeySalt = Callable[[], bytes | None]


class Lookup:
    """One lookup under way.

    Attributes:
        asked_at: time of its creation, monotonic seconds.
        answered_at: time of the last answer, monotonic seconds.
        first_tokens: hit of the first answer, in tokens.
        session_id: session that answered it; its lease is void under another.
        key_salt: digest folded into the keys; None if it could not be determined.
        prefetch: True if blocks on SSD are to be promoted.
        promotions: True if some are being promoted; the daemon is asked again when that may have
            ended.
        promotion_at: time of the first answer to a lookup with ``prefetch``, monotonic seconds.
        promotion_s: seconds from then to the answer after which asking again was no longer
            worthwhile.
        taken: True once the answer is in use; no later one replaces it.
    """

    def __init__(
        self,
        hashes: Sequence[bytes],
        find_key_salt: KeySalt | None,
        clock: Clock,
        *,
        prefetch: bool = False,
    ) -> None:
        self._clock = clock
        self.asked_at = clock.now()
        self.answered_at = 0.0
        self.first_tokens = 0
        self.session_id = ""
        self.key_salt: bytes | None = b"" if find_key_salt is None else None
        self.hashes = hashes
        self.find_key_salt = find_key_salt
        self.prefetch = prefetch
        self.pauses: PromotionWait | None = None
        self.promotions = False
        self.promotion_at = 0.0
        self.promotion_s = 0.0
        self.cancelled = False
        self.taken = False
        self._result: LookupResult | None = None
        self._done: threading.Event | None = None

    @property
    def result(self) -> LookupResult | None:
        """The last answer, or None before the first one."""
        return self._result

    def wait(self, seconds: float) -> LookupResult | None:
        """Return the answer, after waiting up to ``seconds`` for the first one."""
        if self._result is None and seconds > 0 and self._done is not None:
            self._clock.wait(self._done, seconds)
        return self._result

    def asked(self) -> None:
        """Prepare for ``wait``, before the lookup is queued."""
        if self._done is None:
            self._done = threading.Event()

    def resolve(self, result: LookupResult, session_id: str) -> None:
        """Record an answer."""
        if self._result is None:
            self.first_tokens = result.hit_tokens
        self.session_id = session_id
        self.answered_at = self._clock.now()
        self._result = result
        if self._done is not None:
            self._done.set()


class LookupQueue:
    """Threads that send lookups to the daemon. Releases leases that are no longer wanted.

    Args:
        client: the scheduler's client.
        groups: groups of the client's contract.
        promotion_s: longest time for which a lookup is repeated because blocks are being promoted.
        threads: number of lookups sent at a time.
        queue_max: upper bound on waiting lookups; more are rejected.
    """

    def __init__(
        self,
        client: KVClient,
        groups: EngineGroups,
        *,
        promotion_s: float,
        threads: int = 2,
        queue_max: int = 4096,
    ) -> None:
        self._client = client
        self._clock = client.clock
        self._groups = groups
        self._promotion_s = promotion_s
        self._queue: deque[Lookup] = deque()
        self._queue_max = queue_max
        # Holds live requests only, fewer than `queue_max`: each was in the queue.
        self._promotions: list[tuple[float, int, Lookup]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._at_hand: dict[int, Lookup] = {}
        self._worker = SupervisedThread(
            "kvhearth-lookup", self._step, self._recover, threads=threads, clock=client.clock
        )
        self._changed = self._worker.changed
        self._worker.start()

    def ask(
        self,
        hashes: Sequence[bytes],
        find_key_salt: KeySalt | None = None,
        *,
        prefetch: bool = False,
    ) -> Lookup | None:
        """Answer a lookup from the mapped index, or queue it; None if too many wait.

        Args:
            hashes: the request's block hashes, in a list that is not shared.
            find_key_salt: finds the digest to mix into keys; runs on the queue's thread and may
                read files.
            prefetch: promote blocks from SSD, and ask again when they may be ready.
        """
        lookup = Lookup(hashes, find_key_salt, self._clock, prefetch=prefetch)
        if find_key_salt is None and self._client.index_mapped:
            session_id = self._client.session_id
            keys = self._groups.keys(hashes, b"")
            result = self._client.lookup_mapped(keys)
            if result is not None:
                lookup.resolve(result, session_id)
                return lookup
        return lookup if self._enqueue(lookup) else None

    def promotion(self, lookup: Lookup) -> bool:
        """Promote the blocks that an answer has found on SSD after all. Returns whether the request
        was queued.
        """
        lookup.prefetch = lookup.promotions = True
        lookup.promotions = self._enqueue(lookup)
        return lookup.promotions

    def _enqueue(self, lookup: Lookup) -> bool:
        with self._changed:
            if len(self._queue) + len(self._promotions) >= self._queue_max:
                self._client.count("lookup_throttled")
                return False
            lookup.asked()
            self._queue.append(lookup)
            self._changed.notify()
        return True

    def take(self, lookup: Lookup) -> LookupResult | None:
        """Return the answer and keep later ones from replacing it. Idempotent."""
        with self._lock:
            lookup.taken, lookup.promotions = True, False
            return lookup.result

    def drop(self, lookup: Lookup, *, gone: bool = False) -> None:
        """Discard a lookup that is no longer wanted, and release its lease. Idempotent.

        Args:
            gone: also cancel its promotions, because the request has ended.
        """
        with self._lock:
            if lookup.cancelled:
                return
            lookup.cancelled, lookup.promotions = True, False
            result = lookup.result
        if result is None:
            return
        if gone:
            self._client.cancel(result)
        else:
            self._client.release(result.lease)

    def close(self, deadline_s: float) -> bool:
        """Stop the threads; False if one did not end in time."""
        with self._changed:
            for lookup in self._queue:
                lookup.cancelled = True
            self._queue.clear()
            self._promotions.clear()
        return self._worker.stop(deadline_s)

    # -- the threads -------------------------------------------------------------------------------

    def _step(self) -> None:
        with self._changed:
            lookup = self._next()
            if lookup is None:
                # Another thread may have put a promotion before those that this one waits for.
                first = self._promotions[:1]
                self._clock.wait_for(
                    self._changed,
                    lambda: self._queue or self._promotions[:1] != first or self._worker.stopping,
                    self._pause_s(),
                )
                lookup = self._next()
        if lookup is None or lookup.cancelled or lookup.taken:
            return
        self._at_hand[threading.get_ident()] = lookup
        self._answer(lookup)
        self._at_hand.pop(threading.get_ident(), None)

    def _next(self) -> Lookup | None:
        """Return the lookup to send now."""
        if self._queue:
            return self._queue.popleft()
        if self._promotions and self._promotions[0][0] <= self._clock.now():
            return heapq.heappop(self._promotions)[2]
        return None

    def _pause_s(self) -> float:
        if not self._promotions:
            return _TICK_S
        return min(max(self._promotions[0][0] - self._clock.now(), 0.0), _TICK_S)

    def _answer(self, lookup: Lookup) -> None:
        session_id = self._client.session_id
        if lookup.find_key_salt is not None and lookup.result is None:
            lookup.key_salt = lookup.find_key_salt()
        if lookup.key_salt is None:
            unknown = LookupResult(0, None, {}, reason=ClientReason.NO_ADAPTER_DIGEST)
            lookup.resolve(unknown, session_id)
            return
        prefetch, before = lookup.prefetch, lookup.result
        keys = self._groups.keys(lookup.hashes, lookup.key_salt)
        result = self._client.lookup(
            keys,
            lease=True,
            prefetch=prefetch,
            wait_s=self._wait_s(lookup),
        )
        with self._lock:
            unwanted = lookup.cancelled or lookup.taken
            failed = before is not None and bool(result.reason)
            if before is None or not (unwanted or failed):
                lookup.resolve(result, session_id)
                self._plan(lookup, result, prefetch=prefetch)
            else:
                lookup.promotions = False
        if unwanted:
            self._client.cancel(result)
        elif before is not None and not failed:
            # After its successor, so that the promotions always have a requester.
            self._client.cancel(before)

    def _wait_s(self, lookup: Lookup) -> float:
        """Return the seconds for which a lookup's promotions are waited for."""
        if lookup.pauses is None:
            return self._promotion_s
        return max(0.001, lookup.pauses.until - self._clock.now())

    def _plan(self, lookup: Lookup, result: LookupResult, *, prefetch: bool) -> None:
        """Schedule the next lookup for when the promotions may be done."""
        if not prefetch or lookup.cancelled:
            return
        now = lookup.answered_at
        if lookup.pauses is None:
            lookup.pauses, lookup.promotion_at = PromotionWait(now + self._promotion_s), now
        lookup.promotions = lookup.pauses.answered(result.eta_us, now)
        if lookup.promotions:
            with self._changed:
                entry = (lookup.pauses.due_at, next(self._numbers), lookup)
                heapq.heappush(self._promotions, entry)
                self._changed.notify()
        elif lookup.pauses.asked_count:
            lookup.promotion_s = now - lookup.promotion_at

    def _recover(self) -> None:
        self._client.count("lookup_crashes")
        lookup = self._at_hand.pop(threading.get_ident(), None)
        if lookup is None:
            return
        lookup.promotions = False
        if lookup.result is None:
            nothing = LookupResult(0, None, absent({}), reason=Reason.INTERNAL)
            lookup.resolve(nothing, self._client.session_id)
