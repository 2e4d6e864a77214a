"""Sessions of remote processes: each is one session of the daemon, attached by the gateway."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import threading
import time
from dataclasses import replace

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.session.arena import ArenaMapping
from kvhearth.session.link import Session, attach
from kvhearth.url import UnixUrl
from kvhearth.wire.handshake import Hello, Welcome
from kvhearth.wire.remote import Purpose
from kvhearth_server.gateway.book import Book
from kvhearth_server.gateway.identity import Identity
from kvhearth_server.gateway.meter import Meter, Meters
from kvhearth_server.gateway.streams import Stream
from kvhearth_server.observability.logs import get_logger

END_S = 10.0
"""Time for a session's transfers to end once their connections are shut."""
_POPULATED_PAGES_MAX = 1 << 18
"""Pages beyond which page tables are not filled ahead: each session has its own, 8 bytes a page."""

GroupKey = tuple[str, str, int]
"""Tenant, engine id and incarnation."""

_log = get_logger("kvhearth.gateway")


class RemoteSession:
    """One attached remote process.

    Attributes:
        meter: counts what its identity uses.
        token: names the session to the gateway; the daemon's own never leaves the gateway.
        book: the grants of its group.
        mapping: the arena; None for a process that did not ask for it.
        line: the life line; None while it is broken, and before the first.
        expires: monotonic time at which a broken life line ends the session; infinite before the
            first.
    """

    def __init__(
        self,
        identity: Identity,
        meter: Meter,
        hello: Hello,
        session: Session,
        mapping: ArenaMapping | None,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.identity = identity
        self.meter = meter
        self.hello = hello
        self.daemon = session
        self.mapping = mapping
        self.contract = Contract.from_json(hello.contract)
        self.book = Book()
        self.line: Stream | None = None
        self.expires = math.inf
        self.ended = False
        self._changed = threading.Condition()
        self._streams: dict[Stream, Purpose] = {}

    def belongs_to(self, identity: Identity) -> bool:
        """Return whether the session is an identity's, whatever its bounds and role are by now."""
        return (identity.name, identity.tenant) == (self.identity.name, self.identity.tenant)

    @property
    def welcome(self) -> Welcome:
        """The daemon's welcome."""
        return self.daemon.welcome

    @property
    def remote_welcome(self) -> Welcome:
        """The welcome for the remote process."""
        return replace(self.welcome, token=self.token)

    @property
    def group(self) -> GroupKey:
        """Key of its group."""
        return self.identity.tenant, self.hello.engine_id, self.welcome.incarnation

    def join(self, stream: Stream, purpose: Purpose, most: int) -> None:
        """Add a connection for calls or data.

        Raises:
            KVHearthError: ``unknown_token`` if the session has ended, ``too_many_sessions`` if it
                has ``most`` of them.
        """
        with self._changed:
            if self.ended:
                raise KVHearthError(Reason.UNKNOWN_TOKEN, "the session has ended; attach again")
            if sum(each is purpose for each in self._streams.values()) >= most:
                raise KVHearthError(
                    Reason.TOO_MANY_SESSIONS,
                    f"the session has {most} connections for {purpose.name.lower()}; close some",
                )
            self.meter.open_connection()
            self._streams[stream] = purpose

    def leave(self, stream: Stream) -> None:
        """Remove a connection; its thread touches no slot any more."""
        with self._changed:
            if self._streams.pop(stream, None) is not None:
                self.meter.close_connection()
            self._changed.notify_all()

    def note_held(self) -> None:
        """Tell the meter what the group's book holds now."""
        self.meter.hold(id(self.book), *self.book.held())

    def take_line(self, stream: Stream | None, expires: float = 0.0) -> None:
        """Set the life line, None for a broken one; an earlier one is ended."""
        with self._changed:
            before, self.line, self.expires = self.line, stream, expires
        if before is not None and stream is not None:
            before.end()

    def broken(self, stream: Stream, expires: float) -> bool:
        """Note that a life line broke; False if it was another's turn already."""
        with self._changed:
            if self.line is not stream:
                return False
            self.line, self.expires = None, expires
            return True

    def shut(self) -> bool:
        """End all connections, and wait for the threads that move bytes; False if one goes on."""
        with self._changed:
            self.ended = True
            if self.line is not None:
                self.line.end()
            for stream in self._streams:
                stream.end()
            return self._changed.wait_for(self.settled, END_S)

    def settled(self) -> bool:
        """Return whether no thread moves bytes of the session."""
        return Purpose.DATA not in self._streams.values()


class Sessions:
    """All sessions of a gateway.

    Args:
        url: the daemon.
        meters: of the identities.
        speaks: see ``hello_for``.
    """

    def __init__(self, url: UnixUrl, meters: Meters, *, speaks: bool) -> None:
        self.url = url
        self._meters = meters
        self._speaks = speaks
        self._lock = threading.Lock()
        self._by_token: dict[bytes, RemoteSession] = {}
        self._books: dict[GroupKey, Book] = {}
        self._unsettled: list[RemoteSession] = []

    def open(self, identity: Identity, hello: Hello) -> RemoteSession:
        """Attach for a remote process. Ended first are a session that it names as its previous
        one, and one whose place it takes.

        Raises:
            KVHearthError: as ``kvhearth.session.link.attach``; ``memory_unavailable``.
        """
        for each in self.all():
            if _precedes(each, identity, hello) or _makes_way(each, identity, hello):
                self.end(each, "followed")
        meter = self._meters.of(identity)
        meter.open_session()
        with contextlib.ExitStack() as undo:
            undo.callback(meter.close_session)
            opened = self._attach(identity, meter, hello)
            undo.pop_all()
        with self._lock:
            opened.book = self._books.setdefault(opened.group, opened.book)
            opened.book.ranks.add(hello.rank)
            self._by_token[_digest(opened.token)] = opened
        return opened

    def _attach(self, identity: Identity, meter: Meter, hello: Hello) -> RemoteSession:
        session = attach(self.url, hello_for(identity, hello, speaks=self._speaks))
        with contextlib.ExitStack() as undo:
            undo.callback(session.goodbye)
            mapping = None
            descriptors = session.take_descriptors()
            try:
                if hello.map_arena:
                    infos = session.welcome.segments
                    pages = sum(info.bytes // info.page_bytes for info in infos)
                    mapping = ArenaMapping(
                        session.welcome,
                        descriptors,
                        session.alive,
                        populate=pages <= _POPULATED_PAGES_MAX,
                    )
                    undo.callback(mapping.close)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            opened = RemoteSession(identity, meter, hello, session, mapping)
            undo.pop_all()
        return opened

    def find(self, token: str) -> RemoteSession:
        """Return the session of a token.

        Raises:
            KVHearthError: ``unknown_token``.
        """
        with self._lock:
            found = self._by_token.get(_digest(token))
        if found is None:
            raise KVHearthError(Reason.UNKNOWN_TOKEN, "no session has this token; attach again")
        return found

    def all(self) -> list[RemoteSession]:
        """Return all sessions."""
        with self._lock:
            return list(self._by_token.values())

    def end(self, session: RemoteSession, why: str) -> None:
        """End a session after its transfers, and tell the daemon; the scheduler's end is that of
        its ranks' sessions, too. Idempotent.
        """
        with self._lock:
            if self._by_token.pop(_digest(session.token), None) is None:
                return
            session.book.ranks.discard(session.hello.rank)
            others = [each for each in self._by_token.values() if each.group == session.group]
            over = not others or session.hello.scheduler
            if over and self._books.get(session.group) is session.book:
                del self._books[session.group]
        settled = session.shut()
        if over:
            settled = session.book.close(time.monotonic() + END_S) and settled
            session.note_held()
        session.meter.close_session()
        if session.mapping is not None:
            session.mapping.close()
        if settled:
            session.daemon.goodbye()
        else:
            with self._lock:
                self._unsettled.append(session)
        _log.info(
            "gateway.left",
            why=why,
            engine_id=session.hello.engine_id,
            rank=session.hello.rank,
            session=session.welcome.session,
            identity=session.identity.name,
            settled=settled,
        )
        if over:
            for each in others:
                self.end(each, "scheduler left")

    def settle(self) -> None:
        """Tell the daemon of ended sessions whose transfers have ended since.

        Without a word it would keep their slots aside for as long as this process lives.
        """
        with self._lock:
            done = [each for each in self._unsettled if each.settled()]
            self._unsettled = [each for each in self._unsettled if each not in done]
        for each in done:
            each.daemon.goodbye()


def hello_for(identity: Identity, hello: Hello, *, speaks: bool) -> Hello:
    """Return the gateway's hello for a remote process's; the identity decides the tenant.

    Args:
        speaks: whether to name tenant and identity, which takes a user in ``gateway_uids``. If not,
            the tenant is that of the gateway's own user.
    """
    return replace(
        hello,
        pid=os.getpid(),
        previous_boot="",
        previous_session=0,
        previous_drained=False,
        numa_node=-1,
        shared_index=False,
        tenant=identity.tenant if speaks else "",
        identity=identity.name if speaks else "",
    )


def _precedes(session: RemoteSession, identity: Identity, hello: Hello) -> bool:
    return (
        session.belongs_to(identity)
        and session.hello.engine_id == hello.engine_id
        and (session.welcome.boot_id, session.welcome.session)
        == (hello.previous_boot, hello.previous_session)
    )


def _makes_way(session: RemoteSession, identity: Identity, hello: Hello) -> bool:
    """Return whether a session without a life line has the newcomer's place in its engine. Its
    process is dead, most likely, and the newcomer would be refused until the session is given up.
    """
    theirs = session.hello
    return (
        session.line is None
        and session.expires < math.inf
        and session.identity == identity
        and theirs.engine_id == hello.engine_id
        and ((theirs.scheduler and hello.scheduler) or theirs.rank == hello.rank >= 0)
    )


def _digest(token: str) -> bytes:
    # Looked up by its digest: the time of a comparison tells nothing about the token.
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
