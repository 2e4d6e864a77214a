"""Keeps a session with the daemon: attaches, sends heartbeats and queued requests, reattaches."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable
from logging import ERROR, INFO, WARNING
from typing import Any

from kvhearth.counters import Counters, Report, Warnings, log_event
from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.session.arena import ArenaMapping
from kvhearth.session.link import EPOCH_UNKNOWN, Link, WeightsEpoch, open_link
from kvhearth.session.outbox import Courier, QueuedRequest
from kvhearth.transports.base import BUMP_EPOCH, HEARTBEAT
from kvhearth.url import DaemonUrl
from kvhearth.wire.handshake import Hello
from kvhearth.worker_thread import SupervisedThread

Drain = Callable[[float], bool]
"""Waits up to the given seconds for copies that are under way; True if none is left."""


class QuiesceHooks:
    """Callbacks that must report "no copies in flight" before a session is closed."""

    def __init__(self) -> None:
        self._quiesce_hooks: list[Drain] = []

    def add(self, drain: Drain) -> None:
        """Register a drain permanently."""
        self._quiesce_hooks.append(drain)

    def finished(self, deadline_s: float) -> bool:
        """Return whether all drains reported within ``deadline_s`` that no copy is left."""
        end = time.monotonic() + deadline_s
        for drain in tuple(self._quiesce_hooks):
            try:
                if not drain(max(end - time.monotonic(), 0.0)):
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
    """

    def __init__(self, url: DaemonUrl, hello: Hello, counters: Counters) -> None:
        self.refusal: KVHearthError | None = None
        self.epochs = WeightsEpoch()
        self._url = url
        self._hello = hello
        self._counters = counters
        self._report = Report()
        self._warnings = Warnings()
        self.quiesce_hooks = QuiesceHooks()
        self._attached: list[Attached] = []
        self._courier = Courier(self._call, counters, self._warnings)
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
            self._state.wait_for(
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
        end = time.monotonic() + deadline_s
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
        if self._wake.wait(self._step()):
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
            wait_s = self._attach_at - time.monotonic()
            return min(wait_s, _TICK_S) if wait_s > 0 else self._attach()
        assert link is not None
        self._courier.deliver(link, time.monotonic() + self._url.call_ms / 1000)
        if time.monotonic() >= self._beat_at:
            self._beat_quietly(link)
        return max(min(self._beat_at - time.monotonic(), _TICK_S), 0.0)

    def _attach(self) -> float:
        try:
            link = open_link(self._url, self._hello)
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
            self._attach_at = time.monotonic() + _REATTACH_PAUSE_S
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
        self._attach_at = time.monotonic() + pause_s
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
        self._beat_at = time.monotonic() + pause_s
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
