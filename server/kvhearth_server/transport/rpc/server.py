"""gRPC's sockets: the engines' for clients in other languages and for tracing, the operators' for
administration and health.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvhearth.proto.v1 import admin_pb2, cache_pb2
from kvhearth.wire.frames import SERVICE, TOKEN_KEY
from kvhearth_server.config.model import Settings
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.sessions import Session
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.observability.logs import LimitedLog, get_logger
from kvhearth_server.ownership import open_to_all, open_to_owner
from kvhearth_server.transport.dispatch import Dispatcher
from kvhearth_server.transport.operators import Operators
from kvhearth_server.transport.rpc.admin import AdminService
from kvhearth_server.transport.rpc.errors import Context, MessageGuard, guarded, metadata_value

Handler = Callable[[Any, Any], Any]
"""Answers one call: takes its request and gRPC's context."""


class CacheService:
    """Serves ``Dispatcher`` over gRPC."""

    def __init__(self, engine: Engine, dispatcher: Dispatcher) -> None:
        self._engine = engine
        self._dispatcher = dispatcher

    def admit(self, context: Context) -> Session:
        """Return the session of the caller's token.

        Raises:
            KVHearthError: ``unknown_token``.
        """
        return self._dispatcher.admit(metadata_value(context, TOKEN_KEY))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve every method of the schema on ``server``."""
        add_service(server, cache_pb2, self._handler, self._dispatcher.parse)

    def _handler(self, name: str) -> Handler:
        async def handle(request: Any, context: Context) -> Any:
            async def work() -> Any:
                session = self.admit(context)
                reply = await self._dispatcher.decide_in_turn(name, request, session)
                return await reply if isinstance(reply, Awaitable) else reply

            return await guarded(self._engine, context, work)

        return handle


def add_service(
    server: grpc.Server | grpc.aio.Server,
    schema: Any,
    handler_of: Callable[[str], Handler],
    parse: Callable[[str, bytes], Any] | None = None,
) -> None:
    """Serve every method of the service that the generated module ``schema`` has.

    Args:
        parse: parses a method's request; by default the schema does.
    """
    (service,) = schema.DESCRIPTOR.services_by_name.values()
    handlers = {
        method.name: grpc.unary_unary_rpc_method_handler(
            handler_of(method.name),
            request_deserializer=(
                partial(parse, method.name)
                if parse is not None
                else GetMessageClass(method.input_type).FromString
            ),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in service.methods
    }
    generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))


_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_CONCURRENT_RPCS_MAX = 512
"""Upper bound on concurrent calls of a door; gRPC itself refuses more."""
_STREAMS_PER_CONNECTION_MAX = 32
_METADATA_BYTES_MAX = 16 << 10
_HANDSHAKE_MS = 5_000
_IDLE_MS = 60_000
"""Connections without a call are closed after this time; clients' heartbeats keep theirs."""
_ADMIN_CONNECTIONS_MAX = 32
_LOOK_EVERY_S = 1.0
_LOOKS_PER_PROBE = 5
_PROBE_S = 5.0
_PROBES_MISSED_MAX = 3
_PAUSE_FIRST_S = 0.05
_PAUSE_MAX_S = 1.0
_CALM_S = 10.0
"""A door that was open for this long is opened again without a pause."""
_STOP_S = 2.0
_MAIN_LOOP = "_server_main_loop"
_log = get_logger("kvhearth.grpc")
_limited = LimitedLog(_log)


class GrpcDoor:
    """One gRPC socket. It is opened anew when gRPC's own loop has ended or answers no more: of
    grpcio up to 1.85.1 one call whose path is no UTF-8 ends that loop, and the socket with it
    (docs/adr/0019).

    Args:
        name: the door's name in metrics, in the log and at ``/readyz``.
        path: of the socket.
        engine: is told while the door is shut.
        make: makes a server that has its services, but no socket.
        bound: context in which the socket is bound; it decides who may connect.
        turned: called when the door has opened (True) or is shut (False).
    """

    def __init__(
        self,
        name: str,
        path: Path,
        engine: Engine,
        make: Callable[[], grpc.aio.Server],
        bound: Callable[[], AbstractContextManager[None]],
        turned: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._name = name
        self._path = path
        self._engine = engine
        self._make = make
        self._bound = bound
        self._turned = turned
        self.ended_by: BaseException | None = None
        """Error that has ended gRPC's loop, until it ends again."""
        self._closing = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._loop_task: asyncio.Task[Any] | None = None
        self._probe: grpc.aio.Channel | None = None

    async def start(self, supervisor: Supervisor) -> None:
        """Open the door, and keep it open from now on.

        Raises:
            OSError: it cannot be opened.
        """
        await self._open()
        supervisor.spawn(f"{self._name}_door", self._keep_open)

    async def stop(self, grace_s: float) -> None:
        """Shut the door for good; calls under way have ``grace_s``."""
        self._closing.set()
        await self._shut(grace_s)

    async def _open(self) -> None:
        self._path.unlink(missing_ok=True)
        server = self._make()
        try:
            with self._bound():
                server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:  # gRPC's answer whatever the cause
            raise OSError(
                errno.EADDRNOTAVAIL, f"gRPC cannot bind: {error}", str(self._path)
            ) from None
        before = asyncio.all_tasks()
        await server.start()
        self._server = server
        self._loop_task = _main_loop(asyncio.all_tasks() - before)
        if self._loop_task is not None:
            self._loop_task.add_done_callback(self._note_end)
        self._probe = grpc.aio.insecure_channel(f"unix:{self._path}", options=_PROBE_OPTIONS)
        self._probe.get_state(try_to_connect=True)  # before others take all places
        await self._turned(True)

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self.ended_by = None if task.cancelled() else task.exception()

    async def _shut(self, grace_s: float) -> None:
        server, self._server = self._server, None
        probe, self._probe = self._probe, None
        if probe is not None:
            await probe.close()
        if server is None:
            return
        # Not awaited: it raises again whatever has ended gRPC's loop.
        stopping = asyncio.ensure_future(server.stop(grace_s))
        await asyncio.wait([stopping], timeout=grace_s + _STOP_S)
        if stopping.done():
            _ending(stopping)  # looked at, so that nothing reports it
        else:
            stopping.cancel()
            _limited.warning("grpc.stop_late", kind=f"{self._name} stop", door=self._name)

    async def _keep_open(self) -> None:
        loop, pause_s = asyncio.get_running_loop(), _PAUSE_FIRST_S
        while not self._closing.is_set():
            opened_at = loop.time()
            reason = await self._broken()
            if self._closing.is_set():
                return
            self._engine.doors_shut[self._name] = reason
            self._engine.counters.add("door_restarts", 1, self._name)
            _limited.warning("grpc.door_shut", kind=self._name, door=self._name, reason=reason)
            await self._turned(False)
            await self._shut(0)
            pause_s = _PAUSE_FIRST_S if loop.time() - opened_at > _CALM_S else pause_s
            await self._reopen(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _reopen(self, pause_s: float) -> None:
        while not self._closing.is_set():
            await asyncio.sleep(pause_s)
            try:
                await self._open()
            except OSError as error:
                reason = f"it cannot be opened: {error}"
                self._engine.doors_shut[self._name] = reason
                _limited.warning("grpc.door_shut", kind=self._name, door=self._name, reason=reason)
                pause_s = _PAUSE_MAX_S
                continue
            if self._closing.is_set():
                await self._shut(0)
                return
            del self._engine.doors_shut[self._name]
            _limited.info("grpc.door_open", kind=f"{self._name} open", door=self._name)
            return

    async def _broken(self) -> str:
        """Return the reason why the door is shut, once it is."""
        looks = missed = 0
        while not self._closing.is_set():
            if self._loop_task is None:
                await asyncio.sleep(_LOOK_EVERY_S)
            else:
                await asyncio.wait([self._loop_task], timeout=_LOOK_EVERY_S)
                if self._loop_task.done():
                    return f"gRPC's loop ended: {_ending(self._loop_task)}"
            if not self._path.is_socket():
                return "its socket was removed"
            looks += 1
            if looks % _LOOKS_PER_PROBE == 0:
                missed = 0 if await self._answers() else missed + 1
            if missed >= _PROBES_MISSED_MAX:
                return "it answers no call"
        return ""

    async def _answers(self) -> bool:
        """Whether gRPC answers; that it knows no such method is an answer."""
        if self._probe is None:
            return True  # it stops
        try:
            ask: Any = self._probe.unary_unary("/probe/probe")
            await ask(b"", timeout=_PROBE_S)
        except grpc.RpcError as error:
            code: Any = error.code()
            return code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        except (asyncio.CancelledError, grpc.aio.UsageError):
            if self._closing.is_set():
                return True
            raise
        return True


_PROBE_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.default_authority", "localhost"),
]


def _main_loop(tasks: Iterable[asyncio.Task[Any]]) -> asyncio.Task[Any] | None:
    """Return the task that accepts a server's calls; None if this gRPC names it differently."""
    for task in tasks:
        if getattr(task.get_coro(), "__qualname__", "").endswith(_MAIN_LOOP):
            return task
    return None


def _ending(task: asyncio.Future[Any]) -> str:
    """Return the kind of end; its text may be the peer's."""
    return "cancelled" if task.cancelled() else type(task.exception()).__name__


class RpcServer:
    """The gRPC sockets: the engines', unless the settings turn it off, and the operators'."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        dispatcher: Dispatcher,
        operators: Operators,
        connections_max: int,
    ) -> None:
        self._engine = engine
        self._health = health.aio.HealthServicer()
        self._telling: asyncio.Task[None] | None = None
        self._cache = CacheService(engine, dispatcher)
        self._admin = AdminService(engine, operators)
        self._connections_max = connections_max
        admin = settings.admin_socket
        self._doors = [
            GrpcDoor("admin", admin, engine, self._admin_server, open_to_owner, self._admin_turned)
        ]
        if settings.grpc == "on":
            # Every user may connect who can reach the directory, as at the attach socket: a
            # tenant's engines run as other users than the daemon. The token decides.
            path, turned = settings.grpc_socket, self._cache_turned
            engines = GrpcDoor("grpc", path, engine, self._cache_server, open_to_all, turned)
            self._doors.append(engines)

    def _server(self, guard: MessageGuard, connections_max: int) -> grpc.aio.Server:
        bytes_max = self._engine.shell.message_bytes_max
        options = [
            ("grpc.max_receive_message_length", bytes_max),
            ("grpc.max_send_message_length", bytes_max),
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", connections_max),
            ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION_MAX),
            ("grpc.max_metadata_size", _METADATA_BYTES_MAX),
            ("grpc.absolute_max_metadata_size", _METADATA_BYTES_MAX),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            # The window of a stream must not grow by estimates before its call is admitted.
            ("grpc.http2.bdp_probe", 0),
        ]
        return grpc.aio.server(
            maximum_concurrent_rpcs=_CONCURRENT_RPCS_MAX, interceptors=[guard], options=options
        )

    def _cache_server(self) -> grpc.aio.Server:
        guard = MessageGuard(self._engine, {SERVICE: lambda call: self._cache.admit(call).tenant})
        server = self._server(guard, self._connections_max)
        self._cache.add_to(server)
        return server

    def _admin_server(self) -> grpc.aio.Server:
        guard = MessageGuard(self._engine, {_ADMIN: self._admin.admit})
        server = self._server(guard, _ADMIN_CONNECTIONS_MAX)
        add_service(server, admin_pb2, lambda name: getattr(self._admin, name))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (_ADMIN, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    async def _admin_turned(self, is_open: bool) -> None:
        for name in ("", _ADMIN):
            await self._tell(name, is_open)

    async def _cache_turned(self, is_open: bool) -> None:
        await self._tell(SERVICE, is_open)

    async def _tell(self, service: str, is_open: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set(service, status.SERVING if is_open else status.NOT_SERVING)

    async def start(self, supervisor: Supervisor) -> None:
        """Listen on the sockets and report that we serve.

        Raises:
            OSError: a socket cannot be bound.
        """
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        for door in self._doors:
            await door.start(supervisor)
        self._telling = asyncio.create_task(self._tell_draining())

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error in a task that nobody awaits; gRPC leaves that which ended its loop in
        one, and the door has told it.
        """
        error = context.get("exception")
        if error is None or all(door.ended_by is not error for door in self._doors):
            loop.default_exception_handler(context)

    async def _tell_draining(self) -> None:
        await self._engine.drain_begun.wait()
        await self.not_serving()

    async def not_serving(self) -> None:
        """Report to probes and load balancers that we no longer serve, before the end."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Stop; calls in flight have ``grace_s``."""
        if self._telling is not None:
            self._telling.cancel()
        await asyncio.gather(*(door.stop(grace_s) for door in self._doors))
