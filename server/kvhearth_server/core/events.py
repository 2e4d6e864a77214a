"""Changes of a namespace's blocks, told to those who follow it.

A namespace has a log while somebody reads it, and none otherwise. A reader that begins, or that
lost events, is first told which blocks are there; the log says what has changed since then.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvhearth.model import Tier
from kvhearth_server.core.namespaces import Namespace

KEYS_MAX = 1 << 18
"""Keys of all logs; the tenants have equal parts, and so have the logs of a tenant."""
EVENT_KEYS_MAX = 512
"""Most keys of one event: the smallest message that is allowed holds them."""


class EventKind(enum.StrEnum):
    """The kind of change that an event reports."""

    STORED = "stored"
    REMOVED = "removed"
    MOVED = "moved"


@dataclass(frozen=True)
class Event:
    """Blocks of one KV group that changed alike at once.

    ``cause`` is the reason (an eviction cause) or empty, ``tier`` where the blocks are now.
    """

    kind: EventKind
    kv_group: int
    keys: tuple[bytes, ...]
    cause: str
    tier: Tier


class Cursor(NamedTuple):
    """A reader's place: the number of its next event, and, while it is being told which blocks are
    there, the place to go on from, else -1.
    """

    number: int
    place: int = -1


class _Version(NamedTuple):
    """What a log's events are about; under another one its readers must begin anew."""

    digest: bytes
    epoch: int
    tier_epoch: int

    @classmethod
    def of(cls, namespace: Namespace) -> _Version:
        return cls(namespace.digest, namespace.epoch, namespace.tier_epoch)


class EventLog:
    """The last events of a namespace, numbered without gaps from ``first`` on."""

    def __init__(self, namespace: Namespace, first: int) -> None:
        self.tenant, self.version = namespace.tenant, _Version.of(namespace)
        self.next = first
        self.read_at = 0.0
        self._window: deque[Event] = deque()
        self._keys = 0

    @property
    def oldest(self) -> int:
        """Number of the oldest event that is kept."""
        return self.next - len(self._window)

    def append(self, event: Event, keys_max: int) -> None:
        """Number an event. The oldest ones leave beyond ``keys_max`` keys, but not this one."""
        self.next += 1
        self._window.append(event)
        self._keys += len(event.keys)
        while self._keys > keys_max and len(self._window) > 1:
            self._keys -= len(self._window.popleft().keys)

    def read(self, number: int, keys_max: int) -> list[Event]:
        """Return events from ``number`` on, which is kept or the next: as many as have
        ``keys_max`` keys, and at least one.
        """
        events, keys = list[Event](), 0
        for event in islice(self._window, number - self.oldest, None):
            keys += len(event.keys)
            if events and keys > keys_max:
                break
            events.append(event)
        return events


class EventLogs:
    """The logs of the namespaces that somebody reads, by number."""

    def __init__(self, tenants: int = 1, keys_max: int = KEYS_MAX) -> None:
        self._tenant_keys = keys_max // tenants
        self._logs: dict[int, EventLog] = {}
        self._of_tenant: Counter[str] = Counter()
        self._first = 1
        """First number of the next log: above those of all logs that have ended."""

    def __contains__(self, number: int) -> bool:
        return number in self._logs

    def append(
        self,
        kind: EventKind,
        number: int,
        kv_group: int,
        keys: list[bytes],
        *,
        cause: str = "",
        tier: Tier = Tier.NOWHERE,
    ) -> None:
        """Tell the readers of a namespace, if it has any, of blocks that changed."""
        log = self._logs.get(number)
        if log is None:
            return
        share = self._tenant_keys // self._of_tenant[log.tenant]
        for start in range(0, len(keys), EVENT_KEYS_MAX):
            some = tuple(keys[start : start + EVENT_KEYS_MAX])
            log.append(Event(kind, kv_group, some, cause, tier), share)

    def open(self, namespace: Namespace, now: float) -> EventLog:
        """Return the log of a namespace for a reader: a new one if it had none, or was emptied."""
        log = self._logs.get(namespace.number)
        if log is None or log.version != _Version.of(namespace):
            self._end(namespace.number)
            log = self._logs[namespace.number] = EventLog(namespace, self._first)
            self._of_tenant[log.tenant] += 1
        log.read_at = now
        return log

    def end_unread(self, since: float) -> None:
        """End the logs that nobody has read since a time."""
        for number, log in list(self._logs.items()):
            if log.read_at < since:
                self._end(number)

    def end_all(self) -> None:
        """End all logs: blocks appeared that no event told."""
        for number in list(self._logs):
            self._end(number)

    def _end(self, number: int) -> None:
        log = self._logs.pop(number, None)
        if log is not None:
            self._of_tenant[log.tenant] -= 1
            self._first = max(self._first, log.next + 1)
