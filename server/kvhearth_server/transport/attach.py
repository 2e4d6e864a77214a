"""The attach socket: checks identity and contract, hands out descriptors, ends the session."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.wire.handshake import (
    FRAME_BYTES_MAX,
    HEALTH_BYTES_MAX,
    HEALTH_QUESTION,
    HELLO_PARTS_MAX,
    FrameDecoder,
    Hello,
    encode_frame,
    refused,
)
from kvhearth_server.engine.engine import Attached, Engine
from kvhearth_server.engine.sessions import Peer
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.observability.logs import LimitedLog, Throttle, get_logger
from kvhearth_server.observability.metrics.service import GATEWAY_COUNTERS
from kvhearth_server.ownership import listening
from kvhearth_server.transport.accepting import accept_forever
from kvhearth_server.transport.messages import plain_error, plain_text
from kvhearth_server.transport.operators import named

_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("3i")


def peer_of(connection: socket.socket) -> Peer:
    """Return the peer's uid, pid (0 across PID namespaces) and, from Linux 6.5 on, pidfd."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    pidfd = -1
    with contextlib.suppress(OSError):
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        (pidfd,) = struct.unpack("i", raw)
        os.set_inheritable(pidfd, False)
    return Peer(uid, pid, pidfd)


@contextlib.contextmanager
def _ends_with(connection: socket.socket, peer: Peer) -> Iterator[None]:
    """Let a connection end with its peer's process, even if a forked child keeps it open.

    Bytes that the process sent before are still read. Without a pidfd the connection ends when its
    last holder closes it.
    """
    if peer.pidfd < 0:
        yield
        return
    loop = asyncio.get_running_loop()

    def exited() -> None:
        loop.remove_reader(peer.pidfd)
        with contextlib.suppress(OSError):  # both ends may be closed already
            connection.shutdown(socket.SHUT_RD)

    loop.add_reader(peer.pidfd, exited)
    try:
        yield
    finally:
        loop.remove_reader(peer.pidfd)


@dataclass(frozen=True)
class Tenancy:
    """A tenant and its users; with empty ``uids`` it admits no user."""

    name: str
    uids: tuple[int, ...]


def tenant_of(uid: int, tenancies: Sequence[Tenancy]) -> str | None:
    """Return the tenant of a user id, or None."""
    return next((tenancy.name for tenancy in tenancies if uid in tenancy.uids), None)


IDENTITY_CHARS_MAX = 128


@dataclass(frozen=True)
class Admission:
    """Whom the daemon admits.

    Attributes:
        tenancies: the tenants and their users.
        gateway_uids: users whose processes may speak for any of these tenants.
    """

    tenancies: Sequence[Tenancy]
    gateway_uids: Sequence[int] = ()

    def knows(self, uid: int) -> bool:
        """Return whether a user may attach at all."""
        return uid in self.gateway_uids or tenant_of(uid, self.tenancies) is not None

    def tenant(self, uid: int, hello: Hello) -> str:
        """Return the tenant of a user who says ``hello``.

        Raises:
            KVHearthError: ``peer_not_allowed``; ``bad_message`` for an unprintable identity.
        """
        own = tenant_of(uid, self.tenancies)
        if not hello.tenant and not hello.identity and own is not None:
            return own
        if uid not in self.gateway_uids:
            if own is None:
                raise not_allowed(uid)
            raise KVHearthError(
                Reason.PEER_NOT_ALLOWED,
                f"user id {uid} speaks for its own tenant only; leave tenant and identity out, or "
                "name it in the daemon's gateway_uids",
            )
        if len(hello.identity) > IDENTITY_CHARS_MAX or not hello.identity.isprintable():
            raise KVHearthError(
                Reason.BAD_MESSAGE,
                f"identity must be printable and have at most {IDENTITY_CHARS_MAX} characters",
            )
        wanted = hello.tenant or own
        if wanted is None or all(wanted != tenancy.name for tenancy in self.tenancies):
            raise KVHearthError(
                Reason.PEER_NOT_ALLOWED,
                f"no tenant is named {plain_text(hello.tenant)!r}; name one of the daemon's",
            )
        return wanted


COUNTS_KIND = "counts"
_COUNTS_MAX = 256


def gateway_counts(message: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Return a gateway's counts, by counter and label, from its frame.

    Raises:
        KVHearthError: ``bad_message`` for any that is no counter of gateways.
    """
    rows = message.get("counts")
    if not isinstance(rows, list) or len(rows) > _COUNTS_MAX or not all(map(_is_count, rows)):
        raise KVHearthError(Reason.BAD_MESSAGE, "counts: not a list of a gateway's counters")
    return {(name, label): count for name, label, count in rows}


def _is_count(row: object) -> bool:
    if not isinstance(row, list) or [type(each) for each in row] != [str, str, int]:
        return False
    name, label, count = row
    known = GATEWAY_COUNTERS.get(name)
    if known is None or not 0 <= count < 1 << 53:
        return False
    return label in known.words if known.label else not label


def not_allowed(uid: int) -> KVHearthError:
    """Return the refusal of a user of no tenant, which names the uid and the settings."""
    return KVHearthError(
        Reason.PEER_NOT_ALLOWED,
        f"user id {uid} belongs to no tenant; name it in the daemon's tenants or allow_uids",
    )


_READ_BYTES = 64 * 1024
_BYE_BYTES_MAX = 4096
"""Most bytes after the welcome; a session may leave a message unfinished for its life."""
_BACKLOG = 128
_HANDSHAKES_MAX = 64
_ACCEPT_AGAIN_S = 0.001
_ACCEPT_PAUSE_S = 0.05
_REFUSE_S = 1.0
_log = get_logger("kvhearth.attach")
_refusals = LimitedLog(_log)
_LINES_A_SECOND = 64
"""Log lines per second for each event of engines; a large engine's ranks all attach at once."""
_DIGITS_SHOWN = 12


class AttachServer:
    """Serves one listening socket; every connection is a task of its own.

    A silent peer occupies one of ``_HANDSHAKES_MAX`` places, but no peer waits for a place: when
    all are taken, the user with the most of them loses the oldest. The same happens when
    ``descriptors_max`` are taken; a peer for whom there is no place even then is refused.

    A user of no tenant may only ask for the daemon's health: a longer frame is refused by its
    length. Hellos are read one in a turn of the loop, since many may arrive together and each takes
    up to a millisecond, for which engines' calls would wait.
    """

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        *,
        timeout_s: float,
        descriptors_max: int,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._timeout_s = timeout_s
        self._descriptors_max = descriptors_max
        self._socket: socket.socket | None = None
        self._closing = False
        self._engines = LimitedLog(_log, Throttle(burst=_LINES_A_SECOND))
        self._silent: dict[asyncio.Timeout, int] = {}
        self._turn = asyncio.Lock()
        self._connections: set[asyncio.Task[None]] = set()

    def start(self, supervisor: Supervisor, path: Path) -> None:
        """Listen on the socket, or anew if it was removed.

        The socket's mode lets every user connect who can reach its directory; the peer's
        credentials decide.
        """
        former, self._socket = self._socket, listening(path, _BACKLOG)
        if former is not None:
            former.close()
        work = partial(accept_forever, self._socket, self._accepted, self._cannot_accept)
        supervisor.spawn("attach", work, replaces=True)

    async def stop(self) -> None:
        """Close the socket and all connections."""
        self._closing = True
        if self._socket is not None:
            self._socket.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _cannot_accept(self, error: OSError) -> float:
        """Make room where silent peers hold descriptors."""
        _refusals.warning("attach.cannot_accept", kind="accept", error=str(error))
        return _ACCEPT_AGAIN_S if self._hurry() else _ACCEPT_PAUSE_S

    async def _accepted(self, connection: socket.socket) -> None:
        if self._descriptors() >= self._descriptors_max and not self._hurry():
            self._turn_away(connection)
            return
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    def _descriptors(self) -> int:
        """Return how many are taken: a connection has its socket and its peer's pidfd, a process
        that left without its copies done has a pidfd.
        """
        connections = len(self._connections)
        return 2 * connections + max(0, len(self._engine.sessions) - connections)

    def _turn_away(self, connection: socket.socket) -> None:
        error = KVHearthError(
            Reason.TOO_MANY_SESSIONS,
            "the daemon's descriptors for engines are taken; end some, or raise its limit",
        )
        self._count(error)
        self._engine.counters.add("connections_refused", 1, "attach")
        _refusals.warning("attach.refused", kind="descriptors", reason=str(error.reason))
        with connection, contextlib.suppress(OSError):
            connection.send(encode_frame(refused(error)))

    async def _serve(self, connection: socket.socket) -> None:
        peer = peer_of(connection)
        attached: Attached | None = None
        finished = False
        with connection:
            try:
                known = self._admission.knows(peer.uid)
                bytes_max = FRAME_BYTES_MAX if known else HEALTH_BYTES_MAX
                decoder = FrameDecoder(bytes_max, HELLO_PARTS_MAX)
                attached = await self._handshake(connection, peer, decoder)
                if attached is not None:
                    # A successor must know of the session before it can write to the arena.
                    await self._engine.catalogue.written()
                    await self._welcome(connection, attached)
                    self._tell(attached, peer, "engine.attached")
                    with _ends_with(connection, peer):
                        finished = await self._life_line(connection, decoder)
            except OSError as error:
                _log.debug("attach.broken", error=str(error))
            except Exception:  # noqa: BLE001 - a connection's main: its bug is not the others'
                self._engine.counters.add("task_failures", 1, "attach_connection")
                _log.exception("attach.failed")
            finally:
                if attached is not None:
                    # No goodbye counts as unfinished even right after the welcome: descriptors may
                    # have arrived.
                    self._engine.leave(attached.session, finished=finished)
                    if finished:
                        self._tell(attached, peer, "engine.left")
                    elif not self._closing:
                        self._tell(attached, peer, "engine.lost")
                elif peer.pidfd >= 0:
                    os.close(peer.pidfd)

    def _tell(self, attached: Attached, peer: Peer, event: str) -> None:
        """Log one line about an engine's process: its identity and the event."""
        hello, welcome = attached.hello, attached.welcome
        say = self._engines.warning if event == "engine.lost" else self._engines.info
        say(
            event,
            kind=event,
            engine_id=plain_text(hello.engine_id),
            incarnation=welcome.incarnation,
            rank=hello.rank,
            scheduler=hello.scheduler,
            session=welcome.session,
            uid=peer.uid,
            pid=peer.pid,
            tenant=attached.session.tenant,
            namespace=welcome.namespace[:_DIGITS_SHOWN],
            epoch=welcome.epoch,
            **named(hello.identity),
        )

    async def _handshake(
        self, connection: socket.socket, peer: Peer, decoder: FrameDecoder
    ) -> Attached | None:
        """Return the session; None after a refusal, of a slow peer too, or a question that is no
        hello.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                self._take_place(deadline, peer.uid)
                try:
                    first = await self._first(connection, decoder)
                finally:
                    self._silent.pop(deadline, None)
                answer = self._answer(first, peer)
                if answer is not None:
                    await self._send(connection, answer, [])
                    return None
                hello = Hello.from_message(first)
            tenant = self._admission.tenant(peer.uid, hello)
            async with self._turn:
                await asyncio.sleep(0)
                return self._engine.attach(hello, peer, tenant)
        except TimeoutError:
            error = KVHearthError(
                Reason.DEADLINE,
                f"no hello within {self._timeout_s} s, or others needed the place of this silent "
                "connection; say hello at once and try again",
            )
        except KVHearthError as refusal:
            known = self._admission.knows(peer.uid)
            error = plain_error(refusal) if known else not_allowed(peer.uid)
        await self._refuse(connection, peer, error)
        return None

    def _take_place(self, deadline: asyncio.Timeout, uid: int) -> None:
        if len(self._silent) >= _HANDSHAKES_MAX:
            self._hurry()
        self._silent[deadline] = uid

    def _hurry(self) -> bool:
        """End the oldest handshake of the user who has the most; return False if there is none."""
        for uid, _ in Counter(self._silent.values()).most_common(1):
            oldest = next(deadline for deadline, its in self._silent.items() if its == uid)
            del self._silent[oldest]
            self._engine.counters.add("connections_refused", 1, "attach")
            # An expired handshake already has its task about to run.
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
            return True
        return False

    async def _welcome(self, connection: socket.socket, attached: Attached) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(connection, attached.welcome.to_message(), attached.descriptors)
        finally:
            for descriptor in attached.descriptors:
                os.close(descriptor)

    def _health(self) -> dict[str, Any]:
        """Return the answer to a health request, which any peer that can connect may send."""
        tiering = self._engine.tiering
        degraded = list(tiering.tier.problems().values()) if tiering else []
        shut = [f"{door}: {each.reason}" for door, each in self._engine.doors_shut.items()]
        return {
            "kind": "health",
            "serving": not self._engine.draining,
            "degraded": degraded,
            "doors_shut": shut,
        }

    def _answer(self, first: dict[str, Any], peer: Peer) -> dict[str, Any] | None:
        """Return the answer to a first frame that is no hello; None for any other."""
        if first == HEALTH_QUESTION:
            return self._health()
        if first.get("kind") != COUNTS_KIND:
            return None
        if peer.uid not in (*self._admission.gateway_uids, os.getuid()):
            raise not_allowed(peer.uid)
        self._engine.counters.add_all(gateway_counts(first))
        return {"kind": "counted"}

    async def _first(self, connection: socket.socket, decoder: FrameDecoder) -> dict[str, Any]:
        """Return the first frame."""
        loop = asyncio.get_running_loop()
        heard = False
        while True:
            data = await loop.sock_recv(connection, _READ_BYTES)
            if not data:
                if not heard:
                    # The peer only looked whether a daemon lives; there is no request to refuse.
                    raise ConnectionResetError("closed without a word")
                raise KVHearthError(Reason.BAD_MESSAGE, "closed before its hello")
            heard = True
            async with self._turn:
                await asyncio.sleep(0)
                messages = decoder.feed(data)
            if len(messages) > 1:
                raise KVHearthError(Reason.BAD_MESSAGE, "spoke before it was welcome")
            if messages:
                return messages[0]

    async def _life_line(self, connection: socket.socket, decoder: FrameDecoder) -> bool:
        """Wait for the end; return whether the client said that its copies are done."""
        loop = asyncio.get_running_loop()
        count = 0
        while data := await loop.sock_recv(connection, _READ_BYTES):
            try:
                count += len(data)
                if count > _BYE_BYTES_MAX:
                    raise KVHearthError(Reason.BAD_MESSAGE, "an attach socket carries only 'bye'")
                messages = decoder.feed(data)
                for message in messages:
                    if message.get("kind") == "bye":
                        return True
                    raise KVHearthError(Reason.BAD_MESSAGE, "an attach socket carries only 'bye'")
            except KVHearthError as error:
                self._count(error)
                with contextlib.suppress(OSError):
                    await self._send(connection, refused(error), [])
                return False
        return False

    async def _send(
        self, connection: socket.socket, message: dict[str, Any], descriptors: list[int]
    ) -> None:
        """Send a frame; the descriptors travel with its first byte."""
        frame = encode_frame(message)
        sent = 0
        if descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
            sent = connection.sendmsg([frame], rights)
        await asyncio.get_running_loop().sock_sendall(connection, frame[sent:])

    async def _refuse(self, connection: socket.socket, peer: Peer, error: KVHearthError) -> None:
        self._count(error)
        _refusals.warning(
            "attach.refused",
            kind=str(error.reason),
            reason=str(error.reason),
            why=error.message,
            uid=peer.uid,
            pid=peer.pid,
            tenant=tenant_of(peer.uid, self._admission.tenancies) or "",
        )
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_REFUSE_S):
                await self._send(connection, refused(error), [])

    def _count(self, error: KVHearthError) -> None:
        if error.reason is Reason.BAD_MESSAGE:
            self._engine.counters.add("attach_frames_bad")
        self._engine.counters.add("refusals", 1, str(error.reason))
