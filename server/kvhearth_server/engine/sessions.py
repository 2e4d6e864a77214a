"""Session records of the engine: tokens, peers, lock bytes, and sessions that may still write."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import select
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvhearth.errors import KVHearthError, Reason


@dataclass(frozen=True)
class Peer:
    """Process at the other end of an attach socket, as identified by the kernel.

    ``pid`` is 0 for a peer in another PID namespace; ``pidfd`` is -1 where the kernel gives none.
    """

    uid: int
    pid: int
    pidfd: int


class Closed(StrEnum):
    """Why the daemon closed a connection for calls; values of a counter's label."""

    BAD_OPENING = "bad_opening"
    LATE_FRAME = "late_frame"
    LATE_TOKEN = "late_token"
    MEMORY = "memory"
    PROTOCOL = "protocol"
    TOO_LARGE = "too_large"
    TOO_MANY_PARTS = "too_many_parts"
    UNREAD = "unread"


class Connection(Protocol):
    """A connection that ends with its session."""

    def abort(self) -> None:
        """End now."""


@dataclass
class Session:
    """One attached process, or one that left and is not drained yet.

    ``lock_byte`` is -1 if the process mapped nothing. ``boot_id`` names the daemon run that it
    attached to; ``ghost`` marks a session of an earlier run. ``keys_max`` is the number of blocks
    that a call may name; ``connections`` are those for calls. ``identity`` names the remote peer
    that a gateway's session speaks for. ``heard_at`` is when it last sent a heartbeat, or attached.
    """

    number: int
    tenant: str
    segment: int
    token: str
    peer: Peer
    lock_byte: int
    group: int
    boot_id: str
    ghost: bool = False
    gone: bool = False
    drained_since: float | None = None
    keys_max: int = 0
    identity: str = ""
    heard_at: float = 0.0
    connections: set[Connection] = field(default_factory=set)

    def exited(self) -> bool | None:
        """Return whether the process has ended, or None if that cannot be determined."""
        if self.peer.pidfd < 0:
            return None
        poller = select.poll()
        poller.register(self.peer.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Close the descriptor that the record holds."""
        if self.peer.pidfd >= 0:
            os.close(self.peer.pidfd)
            self.peer = Peer(self.peer.uid, self.peer.pid, -1)


class Sessions:
    """All session records, by number and by token."""

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._by_number: dict[int, Session] = {}
        self._by_token: dict[str, Session] = {}
        self.someone_left = asyncio.Event()
        """Set when a session leaves; wakes the task that waits for it to drain."""

    @property
    def next_number(self) -> int:
        """Number of the next session; never used twice, not even across restarts."""
        return self._next

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_number.values()))

    def __len__(self) -> int:
        return len(self._by_number)

    def number_from(self, first: int) -> None:
        """Continue from an earlier run's next number, so that no old session passes for a new
        one.
        """
        self._next = max(self._next, first)

    def issue(self) -> tuple[int, str]:
        """Return a number and a secret token for a session that is about to attach."""
        number = self._next
        self._next += 1
        return number, secrets.token_hex(32)

    def add(self, session: Session) -> None:
        """Register a session."""
        self._by_number[session.number] = session
        self._next = max(self._next, session.number + 1)
        if session.token:
            self._by_token[session.token] = session

    def find(self, number: int) -> Session | None:
        """Return the session with this number, or None."""
        return self._by_number.get(number)

    def authenticate(self, token: str, boot_id: str) -> Session:
        """Return the attached session of a token.

        Raises:
            KVHearthError: ``unknown_token``, with the boot id so that the client sees a restart.
        """
        session = self._by_token.get(token)
        if session is None or not hmac.compare_digest(session.token, token):
            raise KVHearthError(
                Reason.UNKNOWN_TOKEN, "no session has this token; attach again", boot_id=boot_id
            )
        return session

    def leave(self, session: Session) -> None:
        """Mark a session as gone, as its attach socket closed. Its token is void; the record stays
        until it is drained.
        """
        session.gone = True
        self.someone_left.set()
        while session.connections:
            session.connections.pop().abort()  # a call under way still runs to its end
        self._by_token.pop(session.token, None)

    def drop(self, session: Session) -> None:
        """Forget a drained session, and close what it holds."""
        session.close()
        self.forget(session)

    def forget(self, session: Session) -> None:
        """Undo ``add``. The caller still owns what the session holds."""
        self._by_token.pop(session.token, None)
        self._by_number.pop(session.number, None)

    def lock_bytes(self, segment: int) -> set[int]:
        """Return the lock bytes of a segment that belong to a record."""
        return {s.lock_byte for s in self if s.segment == segment and s.lock_byte >= 0}
