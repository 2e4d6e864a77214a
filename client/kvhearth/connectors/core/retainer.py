"""Keeps the blocks of ended requests from eviction for a while: KV that survives a tool call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvhearth.client import KVClient
from kvhearth.connectors.core.engine import Counters
from kvhearth.results import Pin
from kvhearth.worker_thread import SupervisedThread

QUEUE_MAX = 256
"""Most requests whose blocks wait to be kept; those of further ones are not kept."""
STORED_S = 10.0
"""Longest wait for a request's stores; what is stored then is kept."""
_LOOK_S, _TICK_S = 0.05, 1.0

Keys = Mapping[int, Sequence[bytes]]
"""Keys by KV group."""


class _Wish(NamedTuple):
    """Blocks to keep for ``seconds``; without keys, a session whose pin ends."""

    session_id: str
    keys: Keys
    seconds: float
    until: float


class Retainer:
    """Pins the blocks of a session's last request until its next one, on a thread.

    A wish: what the daemon refuses is counted, and nothing waits for it.

    Args:
        client: the scheduler's client.
        counters: the connector's.
        storing: tells whether some of these blocks are still being stored.
    """

    def __init__(
        self, client: KVClient, counters: Counters, storing: Callable[[Keys], bool]
    ) -> None:
        self._client, self._counters, self._storing = client, counters, storing
        self._wishes = deque[_Wish]()
        self._pins: dict[str, tuple[Pin, float]] = {}
        """By session its pin, and when that ends."""
        self._worker = SupervisedThread(
            "kvhearth-retain", self._step, self._recover, clock=client.clock
        )
        self._changed = self._worker.changed
        self._worker.start()

    def retain(self, session_id: str, keys: Keys, seconds: float) -> None:
        """Keep blocks, in place of those that were kept for the session before."""
        self._put(_Wish(session_id, keys, seconds, self._client.clock.now() + STORED_S))

    def resume(self, session_id: str) -> None:
        """End the pin of a session that goes on: its request holds the blocks itself."""
        if session_id in self._pins:
            self._put(_Wish(session_id, {}, 0.0, 0.0))

    def close(self, deadline_s: float) -> bool:
        """Stop the thread; pins stay until they expire. False if that took too long."""
        return self._worker.stop(deadline_s)

    def _put(self, wish: _Wish) -> None:
        with self._changed:
            if len(self._wishes) < QUEUE_MAX:
                self._wishes.append(wish)
                self._changed.notify()
                return
        self._counters.add("retain_refused", sum(map(len, wish.keys.values())))

    def _step(self) -> None:
        wishes, now = list(self._wishes), self._client.clock.now()
        due = [each for each in wishes if now >= each.until or not self._storing(each.keys)]
        for wish in due:
            self._wishes.remove(wish)
            self._grant(wish, now)
        with self._changed:
            wake_s = _LOOK_S if self._wishes else _TICK_S
            seen = len(self._wishes)
            self._client.clock.wait_for(
                self._changed, lambda: len(self._wishes) > seen or self._worker.stopping, wake_s
            )

    def _grant(self, wish: _Wish, now: float) -> None:
        self._pins = {name: pin for name, pin in self._pins.items() if pin[1] > now}
        before = self._pins.pop(wish.session_id, None)
        if wish.keys:
            self._pin(wish, now)
        if before is not None:
            self._client.unpin(before[0])
            self._counters.add("retain_resumed")

    def _pin(self, wish: _Wish, now: float) -> None:
        pin = self._client.pin(wish.keys, wish.seconds)
        asked = sum(map(len, wish.keys.values()))
        kept = sum(int(flags.sum()) for flags in pin.pinned.values())
        self._counters.add_all({"retained_blocks": kept, "retain_refused": asked - kept})
        if not pin.reason:
            self._pins[wish.session_id] = pin, now + wish.seconds

    def _recover(self) -> None:
        self._client.count("retain_crashes")
