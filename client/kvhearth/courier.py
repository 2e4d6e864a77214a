"""Delivers errands: few messages, again after a silence, never under another session."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.link import Link
from kvhearth.meters import Counters, Warnings
from kvhearth.outbox import Errand, Outbox, batch, merge
from kvhearth.statuses import BareError
from kvhearth.transports.base import Rpc

ERRANDS_MAX = 4096
RETRIES_MAX = 3
"""Of an errand that gRPC itself refused: a release that is dropped leaks a lease."""
_PAUSE_S = 0.25
_SILENT = frozenset({Reason.DAEMON_AWAY, Reason.DEADLINE})
_DONE = frozenset({Reason.UNKNOWN_LEASE, Reason.UNKNOWN_PIN})
"""Some of the ids were not known; the daemon has ended the others."""

Call = Callable[[Link, Rpc[Any, Any], Any], Any]


class Courier:
    """The queue of errands and its delivery; ``put`` from any thread, the rest from the keeper's.

    Args:
        call: makes one call with a deadline and raises ``KVHearthError``.
        counters, warnings: where trouble is told.
    """

    def __init__(self, call: Call, counters: Counters, warnings: Warnings) -> None:
        self._call = call
        self._counters = counters
        self._warnings = warnings
        self._outbox = Outbox(ERRANDS_MAX)
        self._pause_until = 0.0

    def put(self, errand: Errand) -> None:
        """Queue an errand; a full queue drops it (the group's end frees what it was about)."""
        if not self._outbox.put(errand):
            self._counters.add("outbox_overflow")
            self._warnings.warn("outbox", "dropped a %s: too many wait already", errand.kind)

    def clear(self) -> None:
        """Forget all errands, with the session that they belong to."""
        self._outbox.take()

    def deliver(self, link: Link, end: float) -> None:
        """Send what waits, until the monotonic time ``end``; what got no answer waits on."""
        if time.monotonic() < self._pause_until:
            return
        errands = self._outbox.take()
        session = (link.boot_id, link.welcome.session)
        mine = [errand for errand in errands if (errand.boot_id, errand.session) == session]
        if len(mine) != len(errands):
            self._counters.add("errands_void", len(errands) - len(mine))
        batches = batch(mine, link.welcome.keys_max)
        again: list[Errand] = []
        for index, together in enumerate(batches):
            try:
                if time.monotonic() >= end:
                    raise KVHearthError(Reason.DEADLINE, "no time left for releases")
                again += self._send(link, together)
            except KVHearthError as error:
                self._counters.add("errands_late")
                self._warnings.warn("errands", "releases wait, the daemon is silent: %s", error)
                again += [errand for rest in batches[index:] for errand in rest]
                break
        if again:
            self._counters.add("outbox_overflow", self._outbox.put_back(again))
            self._pause_until = time.monotonic() + _PAUSE_S

    def _send(self, link: Link, together: list[Errand]) -> list[Errand]:
        """Send errands in one message, or one by one if the daemon refuses that.

        Returns:
            What is to be sent again, of a message that gRPC refused and not the daemon.

        Raises:
            KVHearthError: ``daemon_away`` or ``deadline``: to be sent again later.
        """
        try:
            self._call(link, together[0].rpc, merge(together))
        except KVHearthError as error:
            if error.reason in _SILENT:
                raise
            if error.reason in _DONE:
                self._counters.add("errands_unknown")
                return []
            retries = max(errand.retries for errand in together)
            not_ours = isinstance(error, BareError) and error.reason is not Reason.BAD_MESSAGE
            if not_ours and retries < RETRIES_MAX:
                self._counters.add("errands_retried")
                return [each._replace(retries=retries + 1) for each in together]
            if len(together) == 1:
                self._counters.add("errands_refused")
                self._warnings.warn("refused", "the daemon refuses a release: %s", error)
                return []
            return [left for errand in together for left in self._send(link, [errand])]
        return []
