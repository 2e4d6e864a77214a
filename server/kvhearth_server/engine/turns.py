"""Turns of the daemon's loop: tenants share its time, and a tenant's sessions share the tenant's,
however many connections and calls each has.

Deficit round robin. A session that has used up its time of a round waits in its tenant's ring; the
rings have turns one after another, and a turn is one session's. Between two turns the loop serves
sessions that have time left. A session waits only for others: while no descriptor of the loop is
ready, it goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import select
from collections import deque
from collections.abc import Callable

QUANTUM_S = 0.0005
"""Time of one session in one round. A call is not interrupted; what it uses above is owed."""


class Turn:
    """One session's share of the loop's time.

    Attributes:
        tenant: name of the session's tenant.
        left_s: time left in ``round``; the session subtracts what its calls used.
        round: round that ``left_s`` belongs to.
        waiting: what goes on in the session's next turns, oldest first.
        queued: whether it waits in the ring, or has its turn.
    """

    __slots__ = ("left_s", "queued", "round", "tenant", "waiting")

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant
        self.left_s = QUANTUM_S
        self.round = 0
        self.waiting: deque[Callable[[], None]] = deque()
        self.queued = False


class _Ring:
    """Sessions of one tenant that wait for time, and the number of their round."""

    __slots__ = ("next", "now", "round", "tenant")

    def __init__(self, tenant: str, number: int) -> None:
        self.tenant = tenant
        self.round = number
        self.now: deque[Turn] = deque()
        self.next: deque[Turn] = deque()


class Turns:
    """The rings of sessions that wait for time. All methods run on the loop's thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._round = 0
        self._rings: dict[str, _Ring] = {}
        self._now: deque[_Ring] = deque()
        self._next: deque[_Ring] = deque()
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
        if turn.round != (current := self.round_of(turn)):
            turn.round = current
            turn.left_s += QUANTUM_S
        elif not self.anybody_waits():
            turn.left_s = QUANTUM_S
        return turn.left_s > 0

    def round_of(self, turn: Turn) -> int:
        """Return the number of the present round of a session's tenant; no two are alike."""
        ring = self._rings.get(turn.tenant)
        return self._round if ring is None else ring.round

    def anybody_waits(self) -> bool:
        """Return whether a session waits for time, or a descriptor of the loop is ready."""
        if self._now or self._next or self._ready is None:
            return True
        return bool(self._ready.poll(0))

    def wait(self, turn: Turn, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` in one of the session's next turns."""
        turn.waiting.append(go_on)
        if turn.queued:
            return
        turn.queued = True
        ring = self._rings.get(turn.tenant)
        if ring is None:
            ring = self._rings[turn.tenant] = _Ring(turn.tenant, next(self._numbers))
            self._next.append(ring)
        ring.next.append(turn)
        self._schedule()

    async def pass_on(self, cycles: int) -> None:
        """Let the loop go round once, and up to ``cycles`` times while anybody waits."""
        for _ in range(cycles):
            await asyncio.sleep(0)
            if not self.anybody_waits():
                return

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
            # A timer runs after the cycle's events, call_soon before them: who came in during a
            # turn is served before the next one.
            asyncio.get_running_loop().call_later(0, self._have_turn)

    def _have_turn(self) -> None:
        """Serve one session for its time; then let the loop look for others."""
        self._scheduled = False
        if not self._now:
            self._now, self._next = self._next, self._now
            self._round = next(self._numbers)
        ring = self._now.popleft()
        if not ring.now:
            ring.now, ring.next = ring.next, ring.now
            ring.round = next(self._numbers)
        turn = ring.now.popleft()
        alone = len(self._rings) == 1 and not ring.now and not ring.next
        turn.left_s = QUANTUM_S if alone else QUANTUM_S + min(turn.left_s, 0.0)
        turn.round = ring.round
        try:
            while turn.waiting and turn.left_s > 0:
                turn.waiting.popleft()()
        finally:
            turn.queued = bool(turn.waiting)
            if turn.queued:
                ring.next.append(turn)
            if ring.now or ring.next:
                self._next.append(ring)
            else:
                del self._rings[ring.tenant]
            self._schedule()
