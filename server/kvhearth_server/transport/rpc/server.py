"""CacheService over gRPC, for clients in other languages and for tracing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvhearth.proto.v1 import admin_pb2, cache_pb2
from kvhearth.wire.frames import SERVICE, TOKEN_KEY
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.sessions import Session
from kvhearth_server.ownership import open_to_all
from kvhearth_server.transport.dispatch import Dispatcher
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
        add_service(server, cache_pb2, self._handler)

    def _handler(self, name: str) -> Handler:
        async def handle(request: Any, context: Context) -> Any:
            def work() -> Any:
                return self._dispatcher.decide(name, request, self.admit(context))

            return await guarded(self._engine, context, work)

        return handle


def add_service(
    server: grpc.Server | grpc.aio.Server, schema: Any, handler_of: Callable[[str], Handler]
) -> None:
    """Serve every method of the service that the generated module ``schema`` has."""
    (service,) = schema.DESCRIPTOR.services_by_name.values()
    handlers = {
        method.name: grpc.unary_unary_rpc_method_handler(
            handler_of(method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in service.methods
    }
    generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))


_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_SERVICES = (SERVICE, _ADMIN)

_CONCURRENT_RPCS_MAX = 2048
"""Upper bound on concurrent calls; gRPC itself refuses more. Each client has a handful under
way.
"""


class RpcServer:
    """The gRPC server. Start it on the loop; ``stop`` lets calls in flight end within a grace."""

    def __init__(self, engine: Engine, dispatcher: Dispatcher, admin_token: str) -> None:
        self._health = health.aio.HealthServicer()
        self._telling: asyncio.Task[None] | None = None
        self._drain_begun = engine.drain_begun
        options = [
            ("grpc.max_receive_message_length", engine.shell.message_bytes_max),
            ("grpc.max_send_message_length", engine.shell.message_bytes_max),
            ("grpc.so_reuseport", 0),
        ]
        cache = CacheService(engine, dispatcher)
        admin = AdminService(engine, admin_token)
        guard = MessageGuard(engine, {SERVICE: cache.admit, _ADMIN: admin.admit})
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=_CONCURRENT_RPCS_MAX, interceptors=[guard], options=options
        )
        cache.add_to(self._server)
        add_service(self._server, admin_pb2, lambda name: getattr(admin, name))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, path: Path) -> None:
        """Listen on a unix socket and report that we serve.

        Every user may connect who can reach its directory, as at the attach socket: a tenant's
        engines run as other users than the daemon. The token decides.
        """
        with open_to_all():
            self._server.add_insecure_port(f"unix:{path}")
        await self._server.start()
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._telling = asyncio.create_task(self._tell_draining())

    async def _tell_draining(self) -> None:
        await self._drain_begun.wait()
        await self.not_serving()

    async def not_serving(self) -> None:
        """Report to probes and load balancers that we no longer serve, before the end."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Stop; calls in flight have ``grace_s``."""
        if self._telling is not None:
            self._telling.cancel()
        await self._server.stop(grace_s)
