"""CacheService: decisions over gRPC, for clients in other languages and for tracing."""

from __future__ import annotations

from typing import Any

import grpc

from kvhearth.frames import METHODS
from kvhearth.proto.v1 import cache_pb2
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.sessions import Session
from kvhearth_server.transport.decisions import Decisions
from kvhearth_server.transport.rpc.guard import Context, guarded, metadata_value

SERVICE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name
TOKEN_KEY = "kvhearth-token"


class CacheService:
    """The gRPC face of ``Decisions``."""

    def __init__(self, engine: Engine, decisions: Decisions) -> None:
        self._engine = engine
        self._decisions = decisions

    def admit(self, context: Context) -> Session:
        """The session of the caller's token.

        Raises:
            KVHearthError: ``unknown_token``.
        """
        return self._decisions.admit(metadata_value(context, TOKEN_KEY))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve every method of the schema on ``server``."""
        handlers = {name: self._handler(name) for name in METHODS}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _handler(self, name: str) -> Any:
        async def handle(request: Any, context: Context) -> Any:
            def work() -> Any:
                return self._decisions.decide(name, request, self.admit(context))

            return await guarded(self._engine, context, work)

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=getattr(cache_pb2, f"{name}Request").FromString,
            response_serializer=getattr(cache_pb2, f"{name}Response").SerializeToString,
        )
