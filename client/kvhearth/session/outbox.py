"""Sends queued requests: batched, retried after a timeout, dropped when the session changes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvhearth.counters import Counters, Warnings
from kvhearth.errors import KVHearthError, Reason
from kvhearth.session.link import Link
from kvhearth.transports.base import LOOKUP, TOUCH, Rpc
from kvhearth.wire.frames import BareError

TOUCHES_MAX = 256
"""Most queued touches and lookups. Dropping one leaks nothing, so they take no room from other
requests.
"""
_DROPPABLE = (TOUCH, LOOKUP)
PARTS_MAX = 64
"""Most groups in one message; the daemon refuses more."""


class QueuedRequest(NamedTuple):
    """One request that has meaning under one session only.

    Attributes:
        rpc: the call.
        request: its message, or a function that makes it, on the session manager's thread; all its
            fields are repeated, or equal within a ``kind``.
        weight: number of ids, slots or keys in it.
        parts: number of groups in it.
        boot_id, session: session that it was made under; it is void under another one.
        kind: requests of one kind may be merged into one message.
        answered: called once on the session manager's thread, or the caller's, with the answer, or
            with None if none will come while the session lasts.
        retries: number of retries after a refusal that was not the daemon's.
    """

    rpc: Rpc[Any, Any]
    request: Any
    weight: int
    boot_id: str
    session: int
    kind: str
    parts: int = 0
    answered: Callable[[Any], None] | None = None
    retries: int = 0

    def settle(self, reply: Any = None) -> None:
        """Tell the answer to who wants it."""
        if self.answered is not None:
            self.answered(reply)


class Outbox:
    """A bounded queue, oldest request first; a request that finds it full is refused.

    Touches and lookups have a separate bound. Lookups go first, so that their leases precede the
    releases, and touches last.
    """

    def __init__(self, requests_max: int, touches_max: int = TOUCHES_MAX) -> None:
        self._lock = threading.Lock()
        self._requests: deque[QueuedRequest] = deque()
        self._droppable: deque[QueuedRequest] = deque()
        self._queues = ((self._requests, requests_max), (self._droppable, touches_max))

    def put(self, queued: QueuedRequest) -> bool:
        """Queue a request; False if the queue is full."""
        with self._lock:
            queue, most = self._queues[queued.rpc in _DROPPABLE]
            if len(queue) >= most:
                return False
            queue.append(queued)
            return True

    def put_back(self, queued_requests: Iterable[QueuedRequest]) -> list[QueuedRequest]:
        """Queue requests again before all others; return those that found no room."""
        sorted_out: tuple[list[QueuedRequest], list[QueuedRequest]] = ([], [])
        for queued in queued_requests:
            sorted_out[queued.rpc in _DROPPABLE].append(queued)
        lost: list[QueuedRequest] = []
        with self._lock:
            for (queue, most), waiting in zip(self._queues, sorted_out, strict=True):
                room = max(most - len(queue), 0)
                queue.extendleft(reversed(waiting[:room]))
                lost += waiting[room:]
        return lost

    def take(self) -> list[QueuedRequest]:
        """Remove and return all requests: lookups, then the others, then touches, oldest first."""
        with self._lock:
            lookups = [queued for queued in self._droppable if queued.rpc is LOOKUP]
            touches = [queued for queued in self._droppable if queued.rpc is not LOOKUP]
            queued_requests = [*lookups, *self._requests, *touches]
            self._requests.clear()
            self._droppable.clear()
        return queued_requests

    def __len__(self) -> int:
        return len(self._requests) + len(self._droppable)


def batch(queued_requests: Iterable[QueuedRequest], weight_max: int) -> list[list[QueuedRequest]]:
    """Group requests into messages of at most ``weight_max`` (a single request may exceed it)."""
    batches: list[list[QueuedRequest]] = []
    last: dict[str, list[QueuedRequest]] = {}
    totals: dict[str, tuple[int, int]] = {}
    for queued in queued_requests:
        weight, parts = totals.get(queued.kind, (0, 0))
        weight, parts = weight + queued.weight, parts + queued.parts
        if queued.kind in last and weight <= weight_max and parts <= PARTS_MAX:
            last[queued.kind].append(queued)
        else:
            last[queued.kind] = [queued]
            batches.append(last[queued.kind])
            weight, parts = queued.weight, queued.parts
        totals[queued.kind] = (weight, parts)
    return batches


def merge(queued_requests: list[QueuedRequest]) -> Any:
    """Merge requests of one kind into one message: protobuf appends repeated fields on merge."""
    first, *others = (
        queued.request() if callable(queued.request) else queued.request
        for queued in queued_requests
    )
    if not others:
        return first
    merged = type(first)()
    for message in (first, *others):
        merged.MergeFrom(message)
    return merged


ERRANDS_MAX = 4096
RETRIES_MAX = 3
"""Retries of a request that gRPC itself rejected; a dropped release would leak its lease."""
_PAUSE_S = 0.25
_SILENT = frozenset({Reason.DAEMON_AWAY, Reason.DEADLINE})
_DONE = frozenset({Reason.UNKNOWN_LEASE, Reason.UNKNOWN_PIN})
"""Reasons that mean that some of the ids were unknown; the daemon has ended the others."""

Call = Callable[[Link, Rpc[Any, Any], Any], Any]


class Courier:
    """The request queue and its delivery.

    Any thread may call ``put``, only the session manager's thread the rest.

    Args:
        call: makes one call with a deadline and raises ``KVHearthError``.
        counters, warnings: receive failures.
    """

    def __init__(self, call: Call, counters: Counters, warnings: Warnings) -> None:
        self._call = call
        self._counters = counters
        self._warnings = warnings
        self._outbox = Outbox(ERRANDS_MAX)
        self._pause_until = 0.0

    def put(self, queued: QueuedRequest) -> None:
        """Queue a request; a full queue drops it (the group's end frees its slots and leases)."""
        if self._outbox.put(queued):
            return
        if queued.rpc is LOOKUP:
            # Its answer is in use already: only a lease and the blocks' recency are lost.
            self._counters.add("lookups_not_posted")
            queued.settle()
        else:
            self._counters.add("outbox_overflow")
            self._warnings.warn(
                "release.dropped",
                "a request is dropped: too many wait",
                request=queued.kind,
            )

    def clear(self) -> None:
        """Drop all requests, with the session that they belong to."""
        self._outbox.take()

    def deliver(self, link: Link, end: float) -> None:
        """Send queued requests until the monotonic time ``end``; unanswered ones stay queued."""
        if time.monotonic() < self._pause_until:
            return
        queued_requests = self._outbox.take()
        session = (link.boot_id, link.welcome.session)
        mine = [queued for queued in queued_requests if (queued.boot_id, queued.session) == session]
        if len(mine) != len(queued_requests):
            self._counters.add("errands_void", len(queued_requests) - len(mine))
        batches = batch(mine, link.welcome.keys_max)
        again: list[QueuedRequest] = []
        for index, together in enumerate(batches):
            try:
                if time.monotonic() >= end:
                    raise KVHearthError(Reason.DEADLINE, "no time left for releases")
                again += self._send(link, together)
            except KVHearthError as error:
                self._counters.add("errands_late")
                self._warnings.warn(
                    "release.delayed", "releases wait, the daemon is silent", error=error
                )
                again += [queued for rest in batches[index:] for queued in rest]
                break
        if again:
            lost = self._outbox.put_back(again)
            self._counters.add("outbox_overflow", len(lost))
            _settle(lost)
            self._pause_until = time.monotonic() + _PAUSE_S

    def _send(self, link: Link, together: list[QueuedRequest]) -> list[QueuedRequest]:
        """Send requests in one message, or one by one if the daemon refuses that.

        Returns:
            Requests to send again because gRPC, not the daemon, refused their message.

        Raises:
            KVHearthError: ``daemon_away`` or ``deadline``: to be sent again later.
        """
        try:
            reply = self._call(link, together[0].rpc, merge(together))
        except KVHearthError as error:
            if error.reason in _SILENT:
                raise
            if error.reason in _DONE:
                self._counters.add("errands_unknown")
                _settle(together)
                return []
            retries = max(queued.retries for queued in together)
            not_ours = isinstance(error, BareError) and error.reason is not Reason.BAD_MESSAGE
            if not_ours and retries < RETRIES_MAX:
                self._counters.add("errands_retried")
                return [each._replace(retries=retries + 1) for each in together]
            if len(together) == 1:
                self._counters.add("errands_refused")
                self._warnings.warn("release.refused", "the daemon refuses a release", error=error)
                _settle(together)
                return []
            return [left for queued in together for left in self._send(link, [queued])]
        _settle(together, reply)
        return []


def _settle(together: Iterable[QueuedRequest], reply: Any = None) -> None:
    for queued in together:
        queued.settle(reply)
