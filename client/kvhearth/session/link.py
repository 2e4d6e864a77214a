"""A client's link to the daemon: attach socket, mapping and transport, opened and closed as one."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cached_property

from kvhearth.session.arena import ArenaMapping
from kvhearth.session.attach import Session, attach
from kvhearth.transports.base import CacheTransport
from kvhearth.transports.frames_unix import FramesUnixTransport
from kvhearth.transports.grpc_unix import GrpcUnixTransport
from kvhearth.url import DaemonUrl
from kvhearth.wire.handshake import Hello, Welcome


@dataclass(frozen=True, eq=False)
class Link:
    """One attachment to one boot of the daemon."""

    session: Session
    transport: CacheTransport
    mapping: ArenaMapping | None

    @cached_property
    def welcome(self) -> Welcome:
        """The daemon's answer at attach."""
        return self.session.welcome

    @cached_property
    def boot_id(self) -> str:
        """Boot id of the daemon."""
        return self.session.welcome.boot_id

    @cached_property
    def session_id(self) -> str:
        """Id of this attachment, unique across boots."""
        return f"{self.boot_id}/{self.welcome.session}"

    def close(self) -> None:
        """Close everything and say goodbye; the caller's copies have drained.

        The mapping goes first: the daemon may reuse this client's memory once the mapping is gone,
        and the closing of the attach socket makes the daemon check that.
        """
        if self.mapping is not None:
            self.mapping.close()
        self.transport.close()
        self.session.goodbye()


def open_link(url: DaemonUrl, hello: Hello) -> Link:
    """Attach, map the arena if ``hello`` asks for it, and prepare the transport.

    Raises:
        KVHearthError: as ``session.attach`` and ``arena.ArenaMapping``; nothing stays open then.
    """
    session = attach(url, hello)
    with contextlib.ExitStack() as undo:
        # No copy ever began: the daemon has nothing to wait for.
        undo.callback(session.goodbye)
        welcome = session.welcome
        mapping = None
        descriptors = session.take_descriptors()
        try:
            if hello.map_arena:
                mapping = ArenaMapping(welcome, descriptors, session.alive)
                undo.callback(mapping.close)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        transport = _transport(url, welcome)
        undo.pop_all()
    return Link(session, transport, mapping)


def _transport(url: DaemonUrl, welcome: Welcome) -> CacheTransport:
    if url.calls == "grpc":
        return GrpcUnixTransport(url.grpc_target, welcome.token, welcome.message_bytes_max)
    return FramesUnixTransport(
        url.calls_path, welcome.token, welcome.message_bytes_max, url.check_daemon
    )
