"""The attach socket: identity, contract, descriptors, token; and each session's life line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.wire import FrameDecoder, Hello, encode_frame, refused
from kvhearth_server.engine.engine import Attached, Engine
from kvhearth_server.engine.sessions import Peer, Session
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.transport.peers import Tenancy, peer_of, tenant_of

_READ_BYTES = 64 * 1024
_BACKLOG = 128
_HANDSHAKES_MAX = 64
_log = get_logger("kvhearth.attach")


class AttachServer:
    """Serves one listening socket; every connection is a task of its own."""

    def __init__(self, engine: Engine, tenancies: Sequence[Tenancy], *, timeout_s: float) -> None:
        self._engine = engine
        self._tenancies = tenancies
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._handshakes = asyncio.Semaphore(_HANDSHAKES_MAX)
        self._connections: set[asyncio.Task[None]] = set()

    def start(self, path: Path, supervisor: Supervisor) -> None:
        """Listen; the socket's mode lets every user connect whom the directory lets in, credentials
        decide.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(_BACKLOG)
        self._socket = listener
        supervisor.spawn("attach", self._accept_forever)

    async def stop(self) -> None:
        """Close the door and all life lines."""
        if self._socket is not None:
            self._socket.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept_forever(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._socket is not None
        while True:
            connection, _ = await loop.sock_accept(self._socket)
            connection.setblocking(False)
            task = loop.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        session: Session | None = None
        finished = False
        with connection:
            try:
                decoder = FrameDecoder()
                session = await self._handshake(connection, decoder)
                if session is not None:
                    finished = await self._life_line(connection, decoder)
            except OSError as error:
                _log.debug("attach connection broke", error=str(error))
            finally:
                if session is not None:
                    self._engine.leave(session, finished=finished)

    async def _handshake(self, connection: socket.socket, decoder: FrameDecoder) -> Session | None:
        """The session, or None after a refusal; a slow or silent peer is refused too."""
        peer = peer_of(connection)
        attached: Attached | None = None
        try:
            async with self._handshakes, asyncio.timeout(self._timeout_s):
                hello = await self._hello(connection, decoder)
                tenant = tenant_of(peer.uid, self._tenancies)
                attached = self._engine.attach(hello, peer, tenant)
                await self._send(connection, attached.welcome.to_message(), attached.descriptors)
                return attached.session
        except TimeoutError:
            error = KVHearthError(
                Reason.DEADLINE, f"no hello within {self._timeout_s} s; say hello and try again"
            )
            await self._refuse(connection, peer, error)
        except KVHearthError as error:
            await self._refuse(connection, peer, error)
        except OSError:
            self._give_up(peer, attached)
            raise
        finally:
            for descriptor in attached.descriptors if attached is not None else ():
                os.close(descriptor)
        self._give_up(peer, attached)
        return None

    def _give_up(self, peer: Peer, attached: Attached | None) -> None:
        """The handshake failed: undo the session, if there is one already, else only drop the
        pidfd.
        """
        if attached is not None:
            # The descriptors may have arrived, so the session ends like one that left without a
            # word.
            self._engine.leave(attached.session, finished=False)
        elif peer.pidfd >= 0:
            os.close(peer.pidfd)

    async def _hello(self, connection: socket.socket, decoder: FrameDecoder) -> Hello:
        loop = asyncio.get_running_loop()
        while True:
            data = await loop.sock_recv(connection, _READ_BYTES)
            if not data:
                raise KVHearthError(Reason.BAD_MESSAGE, "closed before its hello")
            messages = decoder.feed(data)
            if len(messages) > 1:
                raise KVHearthError(Reason.BAD_MESSAGE, "spoke before it was welcome")
            if messages:
                return Hello.from_message(messages[0])

    async def _life_line(self, connection: socket.socket, decoder: FrameDecoder) -> bool:
        """Wait for the end; True if the client said goodbye, which it does when its copies are
        done.
        """
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(connection, _READ_BYTES):
            try:
                messages = decoder.feed(data)
                for message in messages:
                    if message.get("kind") == "bye":
                        return True
                    raise KVHearthError(Reason.BAD_MESSAGE, "a life line carries only 'bye'")
            except KVHearthError as error:
                self._engine.counters.add("attach_frames_bad")
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
        _log.warning("attach refused", reason=str(error.reason), why=error.message, uid=peer.uid)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._send(connection, refused(error), [])

    def _count(self, error: KVHearthError) -> None:
        self._engine.counters.add("refusals", 1, str(error.reason))
