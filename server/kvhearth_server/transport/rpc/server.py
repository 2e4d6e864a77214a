"""The gRPC server on the unix socket: our two services, health and reflection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvhearth.proto.v1 import admin_pb2, admin_pb2_grpc
from kvhearth_server.engine.engine import Engine
from kvhearth_server.transport.decisions import Decisions
from kvhearth_server.transport.rpc.admin import AdminService
from kvhearth_server.transport.rpc.cache import SERVICE as CACHE
from kvhearth_server.transport.rpc.cache import CacheService
from kvhearth_server.transport.rpc.guard import MessageGuard

_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_SERVICES = (CACHE, _ADMIN)

_CONCURRENT_RPCS_MAX = 2048
"""More are refused by gRPC itself; each client has a handful under way."""


class RpcServer:
    """Serves decisions. Start on the loop; ``stop`` lets calls in flight end within a grace."""

    def __init__(self, engine: Engine, decisions: Decisions, admin_token: str) -> None:
        self._health = health.aio.HealthServicer()
        self._telling: asyncio.Task[None] | None = None
        engine.on_drain = self._tell_draining
        options = [
            ("grpc.max_receive_message_length", engine.shell.message_bytes_max),
            ("grpc.max_send_message_length", engine.shell.message_bytes_max),
            ("grpc.so_reuseport", 0),
        ]
        cache = CacheService(engine, decisions)
        admin = AdminService(engine, admin_token)
        guard = MessageGuard(engine, {CACHE: cache.admit, _ADMIN: admin.admit})
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=_CONCURRENT_RPCS_MAX, interceptors=[guard], options=options
        )
        cache.add_to(self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, path: Path) -> None:
        """Listen on a unix socket and say that we serve.

        As with the attach socket every user may connect whom the directory lets in: a tenant's
        engines run as other users than the daemon. The token decides.
        """
        self._server.add_insecure_port(f"unix:{path}")
        await self._server.start()
        path.chmod(0o666)
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def _tell_draining(self) -> None:
        self._telling = asyncio.get_running_loop().create_task(self.not_serving())

    async def not_serving(self) -> None:
        """Tell probes and balancers, before the end."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """End; calls in flight have ``grace_s``."""
        await self._server.stop(grace_s)
