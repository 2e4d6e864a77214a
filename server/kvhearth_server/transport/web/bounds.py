"""What a request may be before anybody looks at it: who it is meant for, how long, how slow."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.engine.engine import Engine
from kvhearth_server.transport.web.problems import problem_of
from kvhearth_server.transport.web.protocol import REFUSED
from kvhearth_server.values import is_loopback

BODY_BYTES_MAX = 64 << 10
BODY_S = 10.0


class Bounds:
    """Refuses bodies that are too long, those that are too slow, and, on a loopback address,
    those that were meant for another host: a page in a browser here may not read from us by giving
    its own name our address (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, engine: Engine, *, any_host: bool) -> None:
        self._app = app
        self._engine = engine
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application around another one."""
        if scope["type"] != "http":
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if not self._any_host and not is_loopback(_bare(host)):
            error = KVHearthError(Reason.BAD_MESSAGE, f"host {host!r} is not this daemon's name")
            await self._refuse(scope, receive, send, error, 421)
            return
        try:
            async with asyncio.timeout(BODY_S):
                body = await _whole_body(receive)
        except TimeoutError:
            slow = KVHearthError(Reason.DEADLINE, f"the body was not here within {BODY_S:.0f} s")
            await self._refuse(scope, receive, send, slow, 408)
            return
        if body is None:
            # What a request that stops halfway asks for is not known: it is not done.
            if not scope.get("state", {}).get(REFUSED):
                self._engine.counters.add("refusals", 1, str(Reason.BAD_MESSAGE))
            return
        if len(body) > BODY_BYTES_MAX:
            told = f"the body has more than {BODY_BYTES_MAX} bytes"
            await self._refuse(scope, receive, send, KVHearthError(Reason.BAD_MESSAGE, told), 413)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        if scope["method"] == "HEAD":  # uvicorn leaves the body out, as it knows what was asked
            scope = {**scope, "method": "GET"}
        await self._app(scope, replay, send)

    async def _refuse(
        self, scope: Scope, receive: Receive, send: Send, error: KVHearthError, status: int
    ) -> None:
        self._engine.counters.add("refusals", 1, str(error.reason))
        response = problem_of(error, status=status, headers={"connection": "close"})
        await response(scope, receive, send)


async def _whole_body(receive: Receive) -> bytes | None:
    """The body, or as much of it as shows that it is too long; None if the peer goes before."""
    body = bytearray()
    while len(body) <= BODY_BYTES_MAX:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return bytes(body)


def _bare(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
