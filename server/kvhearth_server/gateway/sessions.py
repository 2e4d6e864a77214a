"""Sessions of remote processes: each is one session of the daemon, attached by the gateway."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.session.arena import ArenaMapping
from kvhearth.session.link import Session, attach
from kvhearth.url import UnixUrl
from kvhearth.wire.handshake import Hello, Welcome
from kvhearth.wire.remote import Purpose
from kvhearth_server.gateway.counters import ReportedCounters
from kvhearth_server.gateway.grants import Grants
from kvhearth_server.gateway.limits import IdentityLimits
from kvhearth_server.gateway.streams import TERMS, Stream
from kvhearth_server.gateway.tokens import Identity
from kvhearth_server.observability.logs import get_logger

END_S = 10.0
"""Time for a session's transfers to end once their connections are shut."""
_POPULATED_PAGES_MAX = 1 << 18
"""Pages beyond which page tables are not filled ahead: each session has its own, 8 bytes a page."""

_IDLE_MAX = 1024
"""Limits of identities that nobody uses are forgotten beyond this number."""
_CONNECTIONS_MAX = {Purpose.CALLS: TERMS.calls_connections, Purpose.DATA: TERMS.data_connections}

GroupKey = tuple[str, str, int]
"""Tenant, engine id and incarnation."""

_log = get_logger("kvhearth.gateway")


class RemoteSession:
    """One attached remote process.

    Attributes:
        limits: those of its identity.
        token: names the session to the gateway; the daemon's own never leaves the gateway.
        grants: those of its group.
        daemon: the daemon's session.
        calls_path: the daemon's calls socket.
        mapping: the arena; None for a process that did not ask for it.
        expires: monotonic time at which a broken life line ends the session; infinite with one, and
            before the first.
    """

    def __init__(
        self,
        identity: Identity,
        limits: IdentityLimits,
        hello: Hello,
        session: Session,
        calls_path: str,
        mapping: ArenaMapping | None,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.identity = identity
        self.limits = limits
        self.hello = hello
        self.daemon = session
        self.calls_path = calls_path
        self.mapping = mapping
        self.contract = Contract.from_json(hello.contract)
        self.grants = Grants()
        self.expires = math.inf
        self.ended = False
        self._line: Stream | None = None
        self._late = False
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
    def group(self) -> GroupKey:
        """Key of its group."""
        return self.identity.tenant, self.hello.engine_id, self.welcome.incarnation

    @contextlib.contextmanager
    def connection(self, stream: Stream, purpose: Purpose) -> Iterator[None]:
        """Add a connection for calls or data meanwhile.

        Raises:
            KVHearthError: ``unknown_token`` if the session has ended, ``too_many_sessions`` if it
                has too many of them.
        """
        with self.limits.connection():
            with self._changed:
                if self.ended:
                    raise KVHearthError(Reason.UNKNOWN_TOKEN, "the session has ended; attach again")
                most = _CONNECTIONS_MAX[purpose]
                if list(self._streams.values()).count(purpose) >= most:
                    raise KVHearthError(
                        Reason.TOO_MANY_SESSIONS,
                        f"the session has {most} connections for {purpose.name.lower()}; close "
                        "some",
                    )
                self._streams[stream] = purpose
            try:
                yield
            finally:
                with self._changed:
                    del self._streams[stream]
                    self._changed.notify_all()
                    if self._late and self._settled():
                        self._late = False
                        self.daemon.goodbye()

    def take_line(self, stream: Stream) -> None:
        """Set the life line; an earlier one is ended."""
        with self._changed:
            before, self._line, self.expires = self._line, stream, math.inf
        if before is not None:
            before.end()

    def broken(self, stream: Stream) -> bool:
        """Note that a life line broke; False if it was another's turn already."""
        with self._changed:
            if self._line is not stream:
                return False
            self._line, self.expires = None, time.monotonic() + TERMS.resume_s
            return True

    def shut(self) -> bool:
        """End all connections, and wait for the threads that move bytes. Return False if one goes
        on: the daemon is told once it has ended, since it would keep the slots aside for as long as
        this process lives.
        """
        with self._changed:
            self.ended = True
            for stream in (*self._streams, *([self._line] if self._line else ())):
                stream.end()
            self._late = not self._changed.wait_for(self._settled, END_S)
            return not self._late

    def _settled(self) -> bool:
        return Purpose.DATA not in self._streams.values()


class Sessions:
    """All sessions of a gateway.

    Args:
        url: the daemon.
        counters: of bounds that were met.
        speaks: see ``hello_for``.
    """

    def __init__(self, url: UnixUrl, counters: ReportedCounters, *, speaks: bool) -> None:
        self._url = url
        self._bound_met = partial(counters.add, "gateway_bounds_met")
        self._speaks = speaks
        self._lock = threading.Lock()
        self._by_token: dict[str, RemoteSession] = {}
        self._groups: dict[GroupKey, Grants] = {}
        self._limits: dict[str, IdentityLimits] = {}

    def limits_of(self, identity: Identity) -> IdentityLimits:
        """Return an identity's limits, with its present bounds."""
        name = identity.name
        with self._lock:
            if name not in self._limits:
                if len(self._limits) >= _IDLE_MAX:
                    used = {key: each for key, each in self._limits.items() if not each.idle}
                    self._limits = used
                self._limits[name] = IdentityLimits(name, self._bound_met)
            found = self._limits[name]
        found.use(identity.bounds)
        return found

    def open(self, identity: Identity, hello: Hello) -> RemoteSession:
        """Attach for a remote process. Ended first are a session that it names as its previous
        one, and one whose place it takes.

        Raises:
            KVHearthError: as ``kvhearth.session.link.attach``; ``memory_unavailable``.
        """
        for each in self.all():
            if _gives_way(each, identity, hello):
                self.end(each, "followed")
        limits = self.limits_of(identity)
        limits.enter("sessions")
        with contextlib.ExitStack() as undo:
            undo.callback(limits.leave, "sessions")
            opened = self._attach(identity, limits, hello)
            undo.pop_all()
        with self._lock:
            opened.grants = self._groups.setdefault(opened.group, opened.grants)
            opened.grants.ranks.add(hello.rank)
            limits.grants.append(opened.grants)
            self._by_token[opened.token] = opened
        return opened

    def _attach(self, identity: Identity, limits: IdentityLimits, hello: Hello) -> RemoteSession:
        session = attach(self._url, hello_for(identity, hello, speaks=self._speaks))
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
            calls_path = self._url.calls_path
            opened = RemoteSession(identity, limits, hello, session, calls_path, mapping)
            undo.pop_all()
        return opened

    def find(self, token: str) -> RemoteSession:
        """Return the session of a token.

        Raises:
            KVHearthError: ``unknown_token``.
        """
        with self._lock:
            found = self._by_token.get(token)
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
            if self._by_token.pop(session.token, None) is None:
                return
            session.grants.ranks.discard(session.hello.rank)
            session.limits.grants.remove(session.grants)
            others = [each for each in self._by_token.values() if each.group == session.group]
            over = not others or session.hello.scheduler
            if over and self._groups.get(session.group) is session.grants:
                del self._groups[session.group]
        settled = session.shut()
        if over:
            session.grants.close(time.monotonic() + END_S)
        session.limits.leave("sessions")
        if session.mapping is not None:
            session.mapping.close()
        if settled:
            session.daemon.goodbye()
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


def _gives_way(session: RemoteSession, identity: Identity, hello: Hello) -> bool:
    """Return whether a newcomer names a session as its previous one, or has the place in its engine
    of one without a life line. That one's process is dead, most likely, and the newcomer would be
    refused until the session is given up.
    """
    theirs, welcome = session.hello, session.welcome
    if not session.belongs_to(identity) or theirs.engine_id != hello.engine_id:
        return False
    named = (welcome.boot_id, welcome.session) == (hello.previous_boot, hello.previous_session)
    place = (theirs.scheduler and hello.scheduler) or theirs.rank == hello.rank >= 0
    return named or (session.expires < math.inf and place)
