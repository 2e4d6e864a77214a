"""Turns of the daemon's loop: sessions share its time, however many connections and calls each has.

Deficit round robin by session. A session that has used up its time of a round waits in a ring; one
member of the ring has its turn at a time, and between two turns the loop serves sessions that have
time left. A session waits only for others: while no descriptor of the loop is ready, it goes on.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable

QUANTUM_S = 0.001
"""Time of one session in one round. A call is not interrupted; what it uses above is owed."""


class Turn:
    """One session's share of the loop's time.

    Attributes:
        left_s: time left in ``round``; the session subtracts what its calls used.
        round: round that ``left_s`` belongs to.
        waiting: what goes on in the session's next turns, oldest first.
        queued: whether it waits in the ring, or has its turn.
    """

    __slots__ = ("left_s", "queued", "round", "waiting")

    def __init__(self) -> None:
        self.left_s = QUANTUM_S
        self.round = 0
        self.waiting: deque[Callable[[], None]] = deque()
        self.queued = False


class Turns:
    """The ring of sessions that wait for time. All methods run on the loop's thread."""

    def __init__(self) -> None:
        self._round = 0
        self._now: deque[Turn] = deque()
        self._next: deque[Turn] = deque()
        self._scheduled = False
        self._ready: select.poll | None = None

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Learn from the loop's selector whether anybody waits; without one, somebody always does.

        asyncio offers no public way to ask. A descriptor of epoll can itself be polled.
        """
        selector = getattr(loop, "_selector", None)
        if selector is not None and hasattr(selector, "fileno"):
            self._ready = select.poll()
            self._ready.register(selector.fileno(), select.POLLIN)

    def may_go(self, turn: Turn) -> bool:
        """Return whether a session has time left. A new round brings new time, and so does a loop
        in which nobody else waits.
        """
        if turn.left_s > 0:
            return True
        if turn.queued:
            return False
        if turn.round != self._round:
            turn.round = self._round
            turn.left_s += QUANTUM_S
        elif not self._anybody_waits():
            turn.left_s = QUANTUM_S
        return turn.left_s > 0

    def _anybody_waits(self) -> bool:
        if self._now or self._next or self._ready is None:
            return True
        return bool(self._ready.poll(0))

    def wait(self, turn: Turn, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` in one of the session's next turns."""
        turn.waiting.append(go_on)
        if turn.queued:
            return
        turn.queued = True
        self._next.append(turn)
        self._schedule()

    async def next(self, turn: Turn) -> None:
        """Wait for the session's next turn, and take all of it: for a portion of a long call."""
        woken = asyncio.get_running_loop().create_future()

        def wake() -> None:
            turn.left_s = 0.0
            if not woken.done():
                woken.set_result(None)

        self.wait(turn, wake)
        await woken

    def _schedule(self) -> None:
        if not self._scheduled and (self._now or self._next):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._have_turn)

    def _have_turn(self) -> None:
        """Serve one session for its time; then let the loop look for others."""
        self._scheduled = False
        if not self._now:
            self._now, self._next = self._next, self._now
            self._round += 1
        turn = self._now.popleft()
        alone = not self._now and not self._next
        turn.left_s = QUANTUM_S if alone else QUANTUM_S + min(turn.left_s, 0.0)
        turn.round = self._round
        try:
            while turn.waiting and turn.left_s > 0:
                turn.waiting.popleft()()
        finally:
            turn.queued = bool(turn.waiting)
            if turn.queued:
                self._next.append(turn)
            self._schedule()
