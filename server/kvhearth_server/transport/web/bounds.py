"""Bounds of requests: for whom a body is read, how much of it, and what its JSON may hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, model_validator
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvhearth.errors import KVHearthError, Reason
from kvhearth.wire.handshake import check_json_parts
from kvhearth_server.config.value_types import is_loopback
from kvhearth_server.engine.engine import Engine
from kvhearth_server.transport.web.problems import refusal
from kvhearth_server.transport.web.server import LOCAL

BODY_BYTES_MAX = 1 << 20
"""Enough for 8192 keys of 32 bytes, and for any contract."""
BODY_S = 10.0
PARTS_MAX = 1 << 15
"""Commas and opening brackets of a body."""
_FIELDS_MAX = 16
_DROP_S = 2.0
BEARER = HTTPBearer(
    auto_error=False,
    description="The content of admin.token, or the token of an identity of tokens_file whose role "
    "is operator; for lists, and for sums where the address is guarded, also the content of the "
    "setting read_token_file.",
)


class Bounds:
    """Refuses, at a loopback address, requests for another host, and answers those whose body
    nobody wants.

    A page in a local browser must not read from the daemon by pointing its own name at our address
    (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, engine: Engine, *, any_host: bool) -> None:
        self._app = app
        self._engine = engine
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application around another one."""
        if scope["type"] != "http":
            return
        incoming = _Incoming(scope, receive)
        host, app = Headers(scope=scope).get("host", ""), self._app
        if not (self._any_host or LOCAL in scope or is_loopback(_bare(host))):
            error = KVHearthError(Reason.BAD_MESSAGE, f"host {host!r} is not this daemon's name")
            app = refusal(self._engine, error, status=421)

        async def answer(message: Message) -> None:
            if incoming.left and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            elif incoming.left and not message.get("more_body"):
                await send({**message, "more_body": True})
                await incoming.drop()
                message = {"type": "http.response.body"}
            await send(message)

        if scope["method"] == "HEAD":  # uvicorn leaves the body out, as it knows the method
            scope = {**scope, "method": "GET"}
        await app(scope, incoming.receive, answer)


class _Incoming:
    """The body of a request.

    Attributes:
        left: whether some of it has not been received.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        self._receive = receive
        self.left = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"

    async def receive(self) -> Message:
        """Return the next message, as ASGI has it."""
        message = await self._receive()
        self.left = self.left and bool(message.get("more_body"))
        return message

    async def drop(self) -> None:
        """Receive the rest, for a moment: the kernel would reset a connection that is closed with
        unread bytes, and its peer could not read the answer.
        """
        taken = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DROP_S):
                while self.left and taken <= BODY_BYTES_MAX:
                    taken += len((await self.receive()).get("body", b""))


class BoundedRoute(APIRoute):
    """A route whose body is read for those only whom its dependencies admit, up to a size and for
    some time.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        answer = super().get_route_handler()
        if self.methods != {"POST"}:
            return answer

        async def bounded(request: Request) -> Response:
            for each in self.dependencies:
                assert each.dependency is not None
                await each.dependency(request, await BEARER(request))
            messages: list[Message] = [{"type": "http.request", "body": await _body(request)}]

            async def replay() -> Message:
                return messages.pop() if messages else await request.receive()

            return await answer(Request(request.scope, replay))

        return bounded


async def _body(request: Request) -> bytes:
    """Return the whole body.

    Raises:
        HTTPException: it is too long or too slow, or stops halfway.
        KVHearthError: ``bad_message``: its JSON would be too costly to parse.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES_MAX:
                    raise HTTPException(413, f"the body has more than {BODY_BYTES_MAX} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the body was not here within {BODY_S:.0f} s") from None
    except ClientDisconnect:  # not carried out, since what it asks for is unknown
        raise HTTPException(400, "the body stops halfway") from None
    check_json_parts(body, PARTS_MAX)
    return bytes(body)


class Asked(BaseModel, extra="forbid"):
    """What a body asks for."""

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, found: Any) -> Any:
        """Refuse many at once: each unknown one would be told."""
        if isinstance(found, dict) and len(found) > _FIELDS_MAX:
            raise ValueError(f"{len(found)} fields, at most {_FIELDS_MAX}")
        return found


def _bare(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
