"""Keeps a session with the daemon: attaches, sends heartbeats and queued requests, reattaches."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from logging import ERROR, INFO, WARNING
from typing import Any, NamedTuple

from kvhearth.clock import Clock
from kvhearth.counters import Counters, Report, Warnings, log_event
from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.session.arena import ArenaMapping
from kvhearth.session.link import EPOCH_UNKNOWN, Link, WeightsEpoch, open_link
from kvhearth.transports.base import BUMP_EPOCH, HEARTBEAT, LOOKUP, TOUCH, Rpc
from kvhearth.url import DaemonUrl
from kvhearth.wire.frames import BareError
from kvhearth.wire.handshake import Hello
from kvhearth.worker_thread import SupervisedThread

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

    Touches and lookups have a separate bound, and the oldest makes way. Lookups go first, so that
    their leases precede the releases, and touches last.
    """

    def __init__(self, requests_max: int, touches_max: int = TOUCHES_MAX) -> None:
        self._lock = threading.Lock()
        self._requests: deque[QueuedRequest] = deque()
        self._droppable: deque[QueuedRequest] = deque()
        self._queues = ((self._requests, requests_max), (self._droppable, touches_max))

    def put(self, queued: QueuedRequest) -> QueuedRequest | None:
        """Queue a request; return the one that is lost if the queue is full."""
        with self._lock:
            queue, most = self._queues[queued.rpc in _DROPPABLE]
            lost = None
            if len(queue) >= most:
                if queue is self._requests:
                    return queued
                lost = queue.popleft()
            queue.append(queued)
            return lost

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
        clock: times the pauses.
    """

    def __init__(self, call: Call, counters: Counters, warnings: Warnings, clock: Clock) -> None:
        self._call = call
        self._clock = clock
        self._counters = counters
        self._warnings = warnings
        self._outbox = Outbox(ERRANDS_MAX)
        self._pause_until = 0.0

    def put(self, queued: QueuedRequest) -> None:
        """Queue a request; a full queue drops one (the group's end frees its slots and leases)."""
        lost = self._outbox.put(queued)
        if lost is None:
            return
        if lost.rpc is LOOKUP:
            # Its answer is in use already: only a lease and the blocks' recency are lost.
            self._counters.add("lookups_not_posted")
            lost.settle()
        else:
            self._counters.add("outbox_overflow")
            self._warnings.warn(
                "release.dropped", "a request is dropped: too many wait", request=lost.kind
            )

    def clear(self) -> None:
        """Drop all requests, with the session that they belong to."""
        self._outbox.take()

    def deliver(self, link: Link, end: float) -> None:
        """Send queued requests until the monotonic time ``end``; unanswered ones stay queued."""
        if self._clock.now() < self._pause_until:
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
                if self._clock.now() >= end:
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
            self._pause_until = self._clock.now() + _PAUSE_S

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


Drain = Callable[[float], bool]
"""Waits up to the given seconds for copies that are under way; True if none is left."""


class QuiesceHooks:
    """Callbacks that must report "no copies in flight" before a session is closed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._quiesce_hooks: list[Drain] = []

    def add(self, drain: Drain) -> None:
        """Register a drain permanently."""
        self._quiesce_hooks.append(drain)

    def finished(self, deadline_s: float) -> bool:
        """Return whether all drains reported within ``deadline_s`` that no copy is left."""
        end = self._clock.now() + deadline_s
        for drain in tuple(self._quiesce_hooks):
            try:
                if not drain(max(end - self._clock.now(), 0.0)):
                    return False
            except Exception:  # noqa: BLE001 - foreign code: a failure means not drained
                log_event(ERROR, "session.drain_failed", "a drain failed", trace=True)
                return False
        return True


REFUSALS = frozenset(
    {
        Reason.BAD_CONTRACT,
        Reason.CONTRACT_MISMATCH,
        Reason.PEER_NOT_ALLOWED,
        Reason.PROTOCOL_VERSION,
    }
)
"""Reasons of refused attaches that need an operator's intervention."""
SESSION_ENDS = frozenset({Reason.UNKNOWN_TOKEN, Reason.GROUP_GONE, Reason.STALE_INCARNATION})
"""Answers after which the session is unusable."""

Attached = Callable[[], None]
"""Prepares something for a session that has just begun; does not wait."""

_TICK_S = 0.25
_GATHER_S = 0.1
_LINGER_S = 0.025
_ATTACH_PAUSE_S = 0.1
_ATTACH_PAUSE_MAX_S = 2.0
_REATTACH_PAUSE_S = 0.5
_REFUSED_PAUSE_S = 30.0
_DRAIN_S = 2.0
_CRASH_PAUSE_S = 1.0


class SessionManager:
    """Owns the link. Other threads read ``link`` and call ``lose``, ``put`` and ``stop``.

    Args:
        url: location of the daemon.
        hello: this process's hello; the manager fills in the previous session.
        counters: sent with heartbeats.
        clock: times attaches, heartbeats and deliveries.
    """

    def __init__(self, url: DaemonUrl, hello: Hello, counters: Counters, clock: Clock) -> None:
        self._clock = clock
        self.refusal: KVHearthError | None = None
        self.epochs = WeightsEpoch()
        self._url = url
        self._hello = hello
        self._counters = counters
        self._report = Report()
        self._warnings = Warnings()
        self.quiesce_hooks = QuiesceHooks(clock)
        self._attached: list[Attached] = []
        self._courier = Courier(self._call, counters, self._warnings, clock)
        self._state = threading.Condition()
        self._wake = threading.Event()
        # `link` may be used for decisions now; `_held` is open, but possibly lost.
        self.link: Link | None = None
        self._held: Link | None = None
        self._group_complete = False
        self._attach_at = 0.0
        self._attach_failures = 0
        self._beat_at = 0.0
        self._worker = SupervisedThread(
            "kvhearth-keeper",
            self._turn,
            lambda: counters.add("keeper_failures"),
            wake=self._stopped,
            at_exit=self._leave_open,
            pause_s=_CRASH_PAUSE_S,
            clock=clock,
        )

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def add_attached(self, attached: Attached) -> None:
        """Register a callback permanently; see ``KVClient.add_attached``."""
        self._attached.append(attached)
        if self.link is not None:
            self._prepare(attached)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait for a complete group; False on timeout, refusal or ``stop``."""
        with self._state:
            self._clock.wait_for(
                self._state,
                lambda: self._ready() or self.refusal is not None or self._worker.stopping,
                timeout_s,
            )
            return self._ready()

    def lose(self, link: Link, why: object) -> None:
        """Stop using ``link``; the thread closes it and attaches again."""
        with self._state:
            if self.link is not link:
                return
            self.link = None
            self._group_complete = False
            # Retired before the drains run: copies that begin after their answer would be missed.
            link.session.retire()
            self._state.notify_all()
        self._counters.add("links_lost")
        self._warnings.warn("session.lost", "lost the KVHearth daemon, attaching anew", error=why)
        self._wake.set()

    def put(self, queued: QueuedRequest) -> None:
        """Queue a request; a full queue drops it (the group's end frees its slots and leases)."""
        self._courier.put(queued)
        if not self._wake.is_set():
            self._wake.set()

    def beat(self, link: Link) -> None:
        """Send one heartbeat.

        Raises:
            KVHearthError: as the call, a session that ended is lost by then; ``bad_message`` for
                ranges that the arena does not have.
        """
        report = self._report.rise(link.boot_id, self._counters.snapshot())
        reply = self._call(link, HEARTBEAT, pb.HeartbeatRequest(counters=report))
        self._report.heard(link.boot_id)
        with self._state:
            self.epochs.heard(link.boot_id, reply.epoch)
            self._group_complete = reply.group_complete
            self._state.notify_all()
        if isinstance(link.mapping, ArenaMapping):
            link.mapping.heard(reply.unpopulated)

    def _tell_label(self, link: Link, epoch: int) -> None:
        """Name this engine's weights to a daemon that lost their name in a cold start: it would
        find blocks of the contract's first weights on remote tiers.

        Raises:
            KVHearthError: as the call.
        """
        label = self.epochs.label
        request = pb.BumpEpochRequest(expected_epoch=epoch, label=label, relabel=True)
        try:
            self._call(link, BUMP_EPOCH, request)
        except KVHearthError as error:
            if error.reason is not Reason.STALE_EPOCH:
                raise
            self.epochs.use(EPOCH_UNKNOWN)  # another engine has named other weights
            return
        self.epochs.bumped(link.boot_id, epoch, label)

    def stop(self, timeout_s: float) -> None:
        """End the thread; the link stays open. Idempotent."""
        self._worker.stop(timeout_s)

    def finish(self, deadline_s: float) -> bool:
        """Drain, deliver and say goodbye, after ``stop``. False if copies did not drain."""
        end = self._clock.now() + deadline_s
        link = self._held
        if link is None:
            return True
        link.session.retire()
        if not self.quiesce_hooks.finished(deadline_s):
            log_event(
                WARNING, "session.left_open", "copies still run: the KVHearth session stays open"
            )
            return False
        if self.link is link:
            self._courier.deliver(link, end)
        with self._state:
            self.link = self._held = None
        link.close()
        return True

    def _ready(self) -> bool:
        return self.link is not None and self._group_complete

    def _stopped(self) -> None:
        self._wake.set()
        with self._state:
            self._state.notify_all()

    def _leave_open(self) -> None:
        """Leave the session to the process's end: copies may still run."""
        if self._held is not None:
            self._held.transport.close()
            self._held.session.leave_open()

    def _turn(self) -> None:
        if self._clock.wait(self._wake, self._step()):
            # Wait briefly so that requests queued together share one message. Requests queued
            # during a delivery set the event again.
            self._worker.rest(_LINGER_S)
            self._wake.clear()

    def _step(self) -> float:
        """Do the work that is due; return the seconds until more may be due."""
        link = self._held
        if link is not None and self.link is link:
            link.session.mend()
        if link is not None and self.link is link and not link.session.alive():
            self.lose(link, "its life line ended")
        if link is not None and self.link is not link and not self._finish_link(link):
            return _TICK_S
        if self._held is None:
            wait_s = self._attach_at - self._clock.now()
            return min(wait_s, _TICK_S) if wait_s > 0 else self._attach()
        assert link is not None
        self._courier.deliver(link, self._clock.now() + self._url.call_ms / 1000)
        if self._clock.now() >= self._beat_at:
            self._beat_quietly(link)
        return max(min(self._beat_at - self._clock.now(), _TICK_S), 0.0)

    def _attach(self) -> float:
        try:
            link = open_link(self._url, self._hello, self._clock)
        except KVHearthError as error:
            return self._attach_failed(error)
        self._held = link
        welcome = link.welcome
        self.epochs.attached(link.boot_id, welcome.epoch, welcome.lineage)
        try:
            # The link is usable only once the decisions' socket answers too.
            self.beat(link)
            if self.epochs.label_due and self._hello.scheduler:
                self._tell_label(link, welcome.epoch)
        except KVHearthError as error:
            self._close(link)
            return self._attach_failed(error)
        with self._state:
            if self._worker.stopping:
                # `finish` may have looked for a link before this one was there.
                self._close(link)
                return 0.0
            self.link, self.refusal, self._attach_failures = link, None, 0
            # A daemon that ends each session at once must not make this thread spin.
            self._attach_at = self._clock.now() + _REATTACH_PAUSE_S
            self._state.notify_all()
        self._counters.add("attaches")
        log_event(
            INFO,
            "session.attached",
            "attached to the KVHearth daemon",
            boot_id=link.boot_id,
            session=link.welcome.session,
        )
        for attached in tuple(self._attached):
            self._prepare(attached)
        return self._plan_beat()

    def _prepare(self, attached: Attached) -> None:
        try:
            attached()
        except Exception:  # noqa: BLE001 - foreign code: the session works without
            log_event(
                ERROR, "session.not_prepared", "a new session could not be prepared", trace=True
            )

    def _attach_failed(self, error: KVHearthError) -> float:
        self._attach_failures += 1
        self._counters.add("attach_failures")
        if error.reason in REFUSALS:
            pause_s = _REFUSED_PAUSE_S
            if self.refusal is None or self.refusal.reason is not error.reason:
                log_event(
                    ERROR,
                    "session.refused",
                    "KVHearth refuses this engine, it runs without a cache",
                    reason=error.reason,
                    error=error.message,
                    details=error.details,
                )
            with self._state:
                self.refusal = error
                self._state.notify_all()
        else:
            doublings = min(self._attach_failures - 1, 16)
            nominal_s = min(_ATTACH_PAUSE_S * 2.0**doublings, _ATTACH_PAUSE_MAX_S)
            pause_s = nominal_s * (0.5 + 0.5 * random.random())
            self._warnings.warn(
                "session.attach_failed", "cannot attach to KVHearth, trying on", error=error
            )
        self._attach_at = self._clock.now() + pause_s
        return min(pause_s, _TICK_S)

    def _finish_link(self, link: Link) -> bool:
        """Close a lost link once copies have drained, and record that they have."""
        if not self.quiesce_hooks.finished(_DRAIN_S):
            self._counters.add("drains_unfinished")
            self._warnings.warn(
                "session.not_drained", "copies of a lost session still run: not attaching yet"
            )
            return False
        # The end of this session frees everything that the queued requests are about.
        self._courier.clear()
        self._close(link)
        return True

    def _close(self, link: Link) -> None:
        """Close a link that no copy uses; the next hello reports this to the daemon."""
        link.close()
        self._held = None
        self._hello = dataclasses.replace(
            self._hello,
            previous_boot=link.boot_id,
            previous_session=link.welcome.session,
            previous_drained=True,
        )

    def _beat_quietly(self, link: Link) -> None:
        try:
            self.beat(link)
        except KVHearthError as error:
            # The session continues: only the attach socket tells whether the daemon lives.
            self._counters.add("heartbeat_failures")
            self._warnings.warn(
                "session.heartbeat_failed", "KVHearth does not answer a heartbeat", error=error
            )
        self._plan_beat()

    def _plan_beat(self) -> float:
        """Return the seconds to the next heartbeat, which comes sooner while the group gathers."""
        pause_s = self._url.heartbeat_ms / 1000
        if not self._group_complete:
            pause_s = min(pause_s, _GATHER_S)
        self._beat_at = self._clock.now() + pause_s
        return min(pause_s, _TICK_S)

    def _call(self, link: Link, rpc: Any, request: Any) -> Any:
        try:
            reply = link.transport.call(rpc, request, self._url.call_ms / 1000)
        except KVHearthError as error:
            if error.reason in SESSION_ENDS:
                self.lose(link, error)
            raise
        if reply.boot_id != link.boot_id:
            self.lose(link, "another daemon answers")
            raise KVHearthError(Reason.STALE_BOOT, "another daemon answers: attaching anew")
        return reply
