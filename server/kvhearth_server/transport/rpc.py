"""gRPC for clients in other languages: engines' calls, health and reflection, on a socket that only
the daemon's user can open. Engines of other users call in frames.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvhearth.proto.v1 import cache_pb2
from kvhearth.wire.frames import SERVICE, STATUS_DETAILS_KEY, TOKEN_KEY, encode_status
from kvhearth_server.engine.engine import Engine
from kvhearth_server.ownership import socket_mask
from kvhearth_server.transport.dispatch import Dispatcher, failure
from kvhearth_server.transport.messages import plain_text

Context = Any
"""grpc.aio.ServicerContext; its type parameters differ from stub to stub."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_MESSAGE_BYTES_MAX = 512
"""Upper bound on the bytes of gRPC's own message; a peer drops an answer with too long headers, and
the details carry the text too.
"""


def cache_service(handler_of: Callable[[str], Callable[[bytes, Any], Any]]) -> Any:
    """Return the cache service; ``handler_of`` returns what answers a call, by its name."""
    (service,) = cache_pb2.DESCRIPTOR.services_by_name.values()
    handlers: dict[str, Any] = {
        method.name: grpc.unary_unary_rpc_method_handler(
            handler_of(method.name),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


class RpcServer:
    """The gRPC socket.

    Args:
        connections_max: connections that may be open at once.
    """

    def __init__(self, engine: Engine, dispatcher: Dispatcher, connections_max: int) -> None:
        self._engine, self._dispatcher = engine, dispatcher
        self._connections_max = connections_max
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._telling: asyncio.Task[None] | None = None

    async def start(self, path: Path) -> None:
        """Answer calls from now on, instead of at the path before.

        Raises:
            OSError: the socket cannot be bound.
        """
        await self.stop(0)  # it removes its path
        self._server = server = self._make()
        try:
            with socket_mask(owner_only=True):
                server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:  # gRPC's answer whatever the cause
            raise OSError(errno.EADDRNOTAVAIL, f"gRPC cannot bind: {error}") from None
        await server.start()
        self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """Tell probes and load balancers that we serve, until we drain."""
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        await self._engine.drain_begun.wait()
        await self._health.enter_graceful_shutdown()

    def _make(self) -> grpc.aio.Server:
        bytes_max = self._engine.shell.message_bytes_max
        options = [
            ("grpc.max_receive_message_length", bytes_max),
            ("grpc.max_send_message_length", bytes_max),
            ("grpc.max_allowed_incoming_connections", self._connections_max),
            ("grpc.so_reuseport", 0),
        ]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((cache_service(lambda name: partial(self._answer, name)),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    async def _answer(self, name: str, data: bytes, context: Context) -> Any:
        """Answer a call; an error ends it with its status and reason."""
        began, code = time.perf_counter(), "OK"
        try:
            session = self._dispatcher.admit(_token(context))
            request = self._dispatcher.parse(name, data)
            reply = self._dispatcher.decide(name, request, session)
            return await reply if isinstance(reply, Awaitable) else reply
        except Exception as error:  # noqa: BLE001 - a call's main: one call's bug is not the others'
            refusal = failure(self._engine, error)
            code = refusal.status.code.name
        finally:
            self._engine.timings.observe(name, code, time.perf_counter() - began)
        details = ((STATUS_DETAILS_KEY, encode_status(refusal)),)
        text = plain_text(refusal.message, _MESSAGE_BYTES_MAX)
        await context.abort(_CODES[int(refusal.status.code)], text, details)
        raise AssertionError("abort returned")

    async def stop(self, grace_s: float) -> None:
        """Stop; calls in flight have ``grace_s``."""
        if self._telling is not None:
            self._telling.cancel()
        if self._server is not None:
            await self._server.stop(grace_s)


def _token(context: Context) -> str:
    pairs: Sequence[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    return next((v for key, v in pairs if key == TOKEN_KEY and isinstance(v, str)), "")
