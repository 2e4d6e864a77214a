"""Failing open: a circuit breaker, and calls whose every failure becomes a miss."""

from __future__ import annotations

import enum
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from logging import ERROR
from typing import Any, TypeVar

import numpy as np

from kvhearth.clock import Clock
from kvhearth.contract import Contract
from kvhearth.counters import Counters, Warnings, log_event
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import Records
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.results import Lease
from kvhearth.session.link import Link
from kvhearth.session.manager import SESSION_ENDS, QueuedRequest, SessionManager
from kvhearth.transports import base
from kvhearth.transports.base import ReplyT, RequestT, Rpc
from kvhearth.wire import messages as codec

BadExtents = Mapping[int, Records] | Records | None

COUNTED = frozenset({Reason.DAEMON_AWAY, Reason.DEADLINE})
"""Failures that mean that the daemon does not answer. Any other refusal is an answer."""


class BreakerState(enum.StrEnum):
    """State of a breaker: ``CLOSED`` lets all calls through, ``OPEN`` none, ``HALF_OPEN`` one."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Opens after ``failures_max`` counted failures in a row, then lets probes through singly.

    While it is open, a call is answered at once without asking the daemon. Pure: the caller passes
    the time and the jitter. Not thread-safe; the caller holds a lock.

    Args:
        failures_max: failures in a row that open it.
        backoff_s: pause before the first probe; doubles with each probe that fails.
        backoff_max_s: the longest pause.
        jitter: returns a number in [0, 1) for each pause; a pause is 0.5 to 1.0 of its nominal
            length.
    """

    def __init__(
        self, failures_max: int, backoff_s: float, backoff_max_s: float, jitter: Callable[[], float]
    ) -> None:
        self._failures_max = failures_max
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._jitter = jitter
        self.calm = True
        """True if it is closed and the last call was answered: ``allow`` would return True, and
        recording one more answer would change nothing.
        """
        self._failures = 0
        self._openings = 0
        self._state = BreakerState.CLOSED
        self._next_probe = 0.0

    @property
    def state(self) -> BreakerState:
        """Current state."""
        return self._state

    def allow(self, now: float) -> bool:
        """Return whether a call may be made. In half-open state, True hands out the one probe.

        A probe whose outcome is never recorded blocks the next one for no longer than a pause.
        """
        if self._state is BreakerState.CLOSED:
            return True
        if now < self._next_probe:
            return False
        self._state = BreakerState.HALF_OPEN
        self._next_probe = now + self._pause_s()
        return True

    def record(self, reason: Reason | None, now: float) -> None:
        """Record a call's outcome: ``None`` for an answer, else the reason of the failure."""
        if reason not in COUNTED:
            self.reset()
            return
        self.calm = False
        self._failures += 1
        if self._state is BreakerState.HALF_OPEN or (
            self._state is BreakerState.CLOSED and self._failures >= self._failures_max
        ):
            self._openings += 1
            self._state = BreakerState.OPEN
            self._next_probe = now + self._pause_s()

    def reset(self) -> None:
        """Close it, as for a new session."""
        self._failures = 0
        self._openings = 0
        self._state = BreakerState.CLOSED
        self.calm = True

    def _pause_s(self) -> float:
        doublings = min(max(self._openings - 1, 0), 32)
        nominal_s = min(self._backoff_s * 2.0**doublings, self._backoff_max_s)
        return nominal_s * (0.5 + 0.5 * self._jitter())


T = TypeVar("T")
ArgumentT = TypeVar("ArgumentT")

_FAILURES_MAX = 3
_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 10.0

_ANSWERED_LATE = frozenset(
    {
        Reason.DEADLINE,
        Reason.DAEMON_AWAY,
        Reason.INTERNAL,
        Reason.CLOSED,
        Reason.BAD_MESSAGE,
    }
)

_LOST = SESSION_ENDS | {Reason.DAEMON_AWAY, Reason.CLOSED}
"""Reasons with which a call fails if the daemon died or was replaced: before anyone noticed, or
while the session manager does, who closes the transport.
"""


class NotSent(KVHearthError):
    """Raised for a call that never left this process."""


def outcome_unknown(error: KVHearthError) -> bool:
    """Return whether the daemon may have performed the request although the call failed."""
    return not isinstance(error, NotSent) and error.reason in _ANSWERED_LATE


def parse_arguments(read: Callable[[ArgumentT], T], argument: ArgumentT) -> T | None:
    """Return ``read(argument)``, or None if an engine's argument is malformed."""
    try:
        return read(argument)
    except Exception:  # noqa: BLE001 - the fail-open boundary: reading runs the engine's own code
        log_event(ERROR, "argument.unreadable", "an argument cannot be read", trace=True)
        return None


class Caller:
    """Makes calls for the facade: gate, breaker, counters, and the rule that nothing is raised.

    Args:
        session_manager: holds the link.
        counters: count the decisions and their failures.
        clock: times the breaker.
        decides: whether this process may take decisions; without it there is no link for them.
    """

    def __init__(
        self, session_manager: SessionManager, counters: Counters, clock: Clock, *, decides: bool
    ) -> None:
        self._clock = clock
        self._session_manager = session_manager
        self._decides = decides
        self._counters = counters
        self._warnings = Warnings()
        self._breaker = Breaker(_FAILURES_MAX, _BACKOFF_S, _BACKOFF_MAX_S, random.random)
        self._breaker_link: Link | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether this client answers nothing any more: it is closed, or a forked child's copy."""
        return self._closed or os.getpid() != self._pid

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child's copy, in which a lock may be held for ever."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Answer every later decision with ``closed``."""
        self._closed = True

    def link(self) -> Link:
        """Return the current link; a dead daemon is noticed here, without waiting for a deadline.

        Raises:
            KVHearthError: ``not_scheduler``, ``closed``, ``daemon_away`` or the reason of the
                daemon's permanent refusal.
        """
        link = self.held_link()
        if self._died(link):
            raise NotSent(Reason.DAEMON_AWAY, "the daemon has gone")
        return link

    def link_to_ask(self) -> Link:
        """Return the link for an immediate ``call``; like ``link`` otherwise.

        Skips the check for a dead daemon where the call itself notices one as soon.
        """
        link = self.held_link()
        if not link.transport.has_connection() and self._died(link):
            raise NotSent(Reason.DAEMON_AWAY, "the daemon has gone")
        return link

    def held_link(self) -> Link:
        """Return the link like ``link``, but without checking whether its daemon has died."""
        if not self._decides:
            raise KVHearthError(Reason.NOT_SCHEDULER, "only the scheduler's client takes decisions")
        if self._closed:
            raise NotSent(Reason.CLOSED, "this client is closed")
        link = self._session_manager.link
        if link is None:
            refusal = self._session_manager.refusal
            reason = Reason.DAEMON_AWAY if refusal is None else refusal.reason
            raise NotSent(reason, "not attached to a daemon")
        return link

    def decide(self, name: str, work: Callable[[], T], miss: Callable[[Reason], T]) -> T:
        """Return ``work()``, or ``miss(reason)`` if it fails in any way."""
        if self._closed or os.getpid() != self._pid:
            return miss(Reason.CLOSED)
        self._counters.add(name)
        try:
            return work()
        except NotSent as error:
            reason = error.reason  # the session manager, or the call before, has logged why
        except KVHearthError as error:
            reason = error.reason
            self._warnings.warn(
                "call.failed",
                "the call goes without the cache",
                kind=f"{name}:{reason}",
                call=name,
                reason=reason,
                error=error.message,
            )
        except Exception:  # noqa: BLE001 - the fail-open boundary: the engine sees none
            reason = Reason.INTERNAL
            log_event(
                ERROR, "call.crashed", "the call goes without the cache", trace=True, call=name
            )
        self._counters.add(f"{name}_failed")
        self._counters.add(f"fail_open_{reason}")
        return miss(reason)

    def call(
        self, link: Link, rpc: Rpc[RequestT, ReplyT], request: RequestT, deadline_s: float
    ) -> ReplyT:
        """Make one call through the breaker.

        The link is lost if the daemon died, if another daemon answers, and if the session has
        ended.

        Raises:
            KVHearthError: as the transport; ``daemon_away`` if the daemon died, whatever the
                transport reports; ``NotSent`` while the breaker is open; ``stale_boot`` if another
                daemon answers.
        """
        # Checked without the lock, which is not needed in the good case.
        calm = link is self._breaker_link and self._breaker.calm
        if not calm and not self._allowed(link):
            raise NotSent(Reason.DAEMON_AWAY, "the daemon did not answer lately")
        try:
            reply = link.transport.call(rpc, request, deadline_s)
        except KVHearthError as error:
            self._record(error.reason)
            if error.reason in _LOST and not self._closed and self._died(link):
                raise KVHearthError(Reason.DAEMON_AWAY, "the daemon has gone") from None
            if error.reason in SESSION_ENDS:
                self._session_manager.lose(link, error)
            raise
        if not self._breaker.calm:
            self._record(None)
        if reply.boot_id != link.boot_id:
            self._session_manager.lose(link, "another daemon answers")
            raise KVHearthError(Reason.STALE_BOOT, "another daemon answers: attaching anew")
        return reply

    def post(
        self,
        link: Link,
        rpc: Rpc[Any, Any],
        request: Any,
        *,
        kind: str = "",
        weight: int = 1,
        parts: int = 0,
        answered: Callable[[Any], None] | None = None,
    ) -> None:
        """Queue a request that no caller waits for; see ``QueuedRequest`` for the arguments."""
        welcome = link.welcome
        kind = kind or rpc.name
        self._session_manager.put(
            QueuedRequest(
                rpc, request, weight, welcome.boot_id, welcome.session, kind, parts, answered
            )
        )

    def _died(self, link: Link) -> bool:
        """Return whether the daemon has died; if so, the link is lost."""
        if link.session.alive():
            return False
        self._session_manager.lose(link, "its life line ended")
        return True

    def _allowed(self, link: Link) -> bool:
        with self._lock:
            if link is not self._breaker_link:
                self._breaker_link = link
                self._breaker.reset()
            return self._breaker.allow(self._clock.now())

    def _record(self, reason: Reason | None) -> None:
        with self._lock:
            self._breaker.record(reason, self._clock.now())


class Returns:
    """Puts requests that return leases, slots and pins into the session manager's queue.

    Its methods raise the errors of ``codec``: ``bad_group``, ``bad_extents``.
    """

    def __init__(self, caller: Caller, contract: Contract) -> None:
        self._caller = caller
        self._contract = contract

    def release_id(self, link: Link, lease_id: int, *, promotions: bool = False) -> None:
        """Release a lease by its id; with ``promotions``, cancel its lookup's promotions too."""
        request = pb.ReleaseRequest(lease_ids=[lease_id])
        if promotions:
            request.cancelled_ids.append(lease_id)
        self._caller.post(link, base.RELEASE, request)

    def cancel(self, link: Link, lookup_id: int) -> None:
        """Cancel the promotions of a lookup."""
        self._caller.post(link, base.RELEASE, pb.ReleaseRequest(cancelled_ids=[lookup_id]))

    def release(self, link: Link, lease: Lease, bad: BadExtents) -> None:
        """Release a lease and report its bad extents, as many as one call takes.

        Bad extents that do not fit are found by the next load.
        """
        if bad is None:
            self.release_id(link, lease.id)
            return
        request = pb.ReleaseRequest(lease_ids=[lease.id])
        reported, most = 0, link.welcome.keys_max
        for group, extents in lease.by_group(bad).items():
            some = np.asarray(extents).reshape(-1)[: most - reported]
            if some.size:
                request.bad.append(codec.pack_slots(self._contract, group, some))
                reported += int(some.size)
        # Kept apart from the other releases: an unknown lease among them must not lose a report.
        kind = f"{base.RELEASE.name}:bad" if request.bad else base.RELEASE.name
        self._caller.post(
            link,
            base.RELEASE,
            request,
            kind=kind,
            weight=max(reported, 1),
            parts=len(request.bad),
        )

    def abort(self, link: Link, groups: Mapping[int, Records], *, in_doubt: bool) -> None:
        """Give back reserved extents, in as many calls as they need."""
        most = link.welcome.keys_max
        chunks = [
            codec.pack_slots(self._contract, group, flat[start : start + most])
            for group, flat in ((group, each.reshape(-1)) for group, each in groups.items())
            for start in range(0, max(flat.size, 1), most)
        ]
        kind = f"{base.ABORT.name}:in_doubt" if in_doubt else base.ABORT.name
        for slots in chunks:
            request = pb.AbortRequest(groups=[slots], in_doubt=in_doubt)
            weight = len(slots.slots) // 4
            self._caller.post(link, base.ABORT, request, kind=kind, weight=weight, parts=1)

    def abort_reservation(self, link: Link, reservation_id: int) -> None:
        """Give back a reservation whose reply was lost."""
        request = pb.AbortRequest(reservation_ids=[reservation_id])
        self._caller.post(link, base.ABORT, request)

    def unpin(self, link: Link, pin_ids: Sequence[int]) -> None:
        """End pins."""
        for pin_id in pin_ids:
            self._caller.post(link, base.UNPIN, pb.UnpinRequest(pin_ids=[pin_id]))

    def touch(self, link: Link, query: codec.Query, epoch: int) -> None:
        """Mark blocks as used."""
        request = pb.TouchRequest(epoch=epoch)
        query.put_into(request.groups)
        kind = f"{base.TOUCH.name}:{epoch}"
        self._caller.post(
            link,
            base.TOUCH,
            request,
            kind=kind,
            weight=query.key_count,
            parts=len(query.blobs),
        )
