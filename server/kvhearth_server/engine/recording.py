"""Recordings of lookups and stores for traces: each is a bounded buffer that an operator empties.

A recording that nobody asks about ends by itself, so that an operator's command that was killed
leaves nothing behind.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.state import require
from kvhearth_server.engine.accesses import Access, Accesses

RECORDINGS_MAX = 4
BUFFER_BYTES_MAX = 16 << 20
IDLE_S = 10.0
_ACCESS_BYTES = 64
"""Bytes of an access in a message, but for its keys."""


@dataclass(frozen=True)
class Space:
    """A KV group of a namespace in one epoch, by the number that a recording gave it."""

    number: int
    namespace: Namespace
    epoch: int
    kv_group: int


@dataclass(frozen=True)
class Recorded:
    """Accesses since the last call, each with the number of its space.

    Attributes:
        spaces: those that earlier calls did not return.
        lost_keys: keys that found no room since the last call.
        more: whether more has arrived already.
    """

    recording: int
    began_at: float
    spaces: list[Space]
    accesses: list[tuple[int, Access]]
    lost_keys: int
    more: bool


@dataclass
class _Recording:
    number: int
    began_at: float
    asked_at: float
    end: Callable[[], None] = lambda: None
    accesses: deque[tuple[int, Access]] = field(default_factory=deque)
    spaces: dict[tuple[int, int, int], Space] = field(default_factory=dict)
    new_spaces: list[Space] = field(default_factory=list)
    bytes: int = 0
    lost_keys: int = 0


class Recordings:
    """All recordings of a daemon.

    Args:
        accesses: what is recorded.
        now: monotonic time in seconds.
    """

    def __init__(self, accesses: Accesses, now: Callable[[], float]) -> None:
        self._accesses, self._now = accesses, now
        self._open: dict[int, _Recording] = {}

    async def take(self, number: int, bytes_max: int, *, end: bool = False) -> Recorded:
        """Return what a recording took down since the last call.

        Args:
            number: 0 begins a recording.
            bytes_max: upper bound on the bytes of the answer's accesses.
            end: whether to end it if the answer has all of the rest.

        Raises:
            KVHearthError: ``bad_message`` for a recording that has ended, ``too_many_sessions``.
        """
        self._end_idle()
        if not number:
            number = self._begin()
        one = self._open.get(number)
        if one is None:
            raise KVHearthError(
                Reason.BAD_MESSAGE, "this recording has ended: nobody asked about it for 10 s"
            )
        if end:
            await self._accesses.drain()
        one.asked_at = self._now()
        taken, size = list[tuple[int, Access]](), 0
        while one.accesses and size < bytes_max:
            taken.append(one.accesses.popleft())
            size += len(taken[-1][1].blob) + _ACCESS_BYTES
        one.bytes -= size
        spaces, one.new_spaces = one.new_spaces, []
        lost, one.lost_keys = one.lost_keys, 0
        if end and not one.accesses:
            self._close(one)
        return Recorded(number, one.began_at, spaces, taken, lost, bool(one.accesses))

    def _begin(self) -> int:
        require(
            len(self._open) < RECORDINGS_MAX,
            Reason.TOO_MANY_SESSIONS,
            f"{RECORDINGS_MAX} recordings are under way; end one",
        )
        number, now = secrets.randbits(62) + 1, self._now()
        one = self._open[number] = _Recording(number, now, now)
        one.end = self._accesses.listen(lambda accesses: self._note(one, accesses))
        return number

    def _close(self, one: _Recording) -> None:
        one.end()
        self._open.pop(one.number, None)

    def _end_idle(self) -> None:
        for one in list(self._open.values()):
            if self._now() - one.asked_at > IDLE_S:
                self._close(one)

    def _note(self, one: _Recording, accesses: Sequence[Access]) -> None:
        if self._now() - one.asked_at > IDLE_S:
            self._close(one)
            return
        for access in accesses:
            if access.at < one.began_at:
                continue
            if one.bytes > BUFFER_BYTES_MAX:
                one.lost_keys += len(access.blob) // access.namespace.contract.hash_bytes
                continue
            place = (access.namespace.number, access.epoch, access.kv_group)
            space = one.spaces.get(place)
            if space is None or space.namespace is not access.namespace:
                number = len(one.spaces)
                space = Space(number, access.namespace, access.epoch, access.kv_group)
                one.spaces[place] = space
                one.new_spaces.append(space)
            one.accesses.append((space.number, access))
            one.bytes += len(access.blob) + _ACCESS_BYTES
