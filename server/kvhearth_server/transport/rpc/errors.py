"""Converts errors into gRPC statuses in one place, and counts every refusal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvhearth.errors import KVHearthError, Reason
from kvhearth.wire.frames import STATUS_DETAILS_KEY, encode_status
from kvhearth_server.engine.engine import Engine
from kvhearth_server.transport.dispatch import failure
from kvhearth_server.transport.messages import plain_text

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Context = Any
"""grpc.aio.ServicerContext; its type parameters differ from stub to stub."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_MESSAGE_BYTES_MAX = 512
"""Upper bound on the bytes of gRPC's own message.

It may triple on the wire, and a peer drops an answer with more than 8 KiB of such headers; the
details carry the text too.
"""


def metadata_value(context: Context, name: str) -> str:
    """Return one value of the call's metadata, or ""."""
    pairs: Sequence[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    for key, value in pairs:
        if key == name and isinstance(value, str):
            return value
    return ""


async def guarded(
    engine: Engine, context: Context, work: Callable[[], Reply | Awaitable[Reply]]
) -> Reply:
    """Run ``work``; an error ends the call with its status and reason."""
    try:
        result = work()
        if isinstance(result, Awaitable):
            return await result
        return result
    except Exception as error:  # noqa: BLE001 - a call's main: one call's bug is not the others'
        refusal = failure(engine, error)
    trailing = ((STATUS_DETAILS_KEY, encode_status(refusal)),)
    text = plain_text(refusal.message, _MESSAGE_BYTES_MAX)
    await context.abort(_CODES[int(refusal.status.code)], text, trailing)
    raise AssertionError("abort returned") from refusal


_STREAMS_MAX = 32
_RECEIVING_MAX = 16
"""Messages that a door receives at once, each of at most ``message_bytes_max``; more calls wait."""
_RECEIVING_PER_CALLER_MAX = 8
_RECEIVE_S = 5.0
"""Time allowed for a call's message, from the call's headers to its last byte."""


class Receiving:
    """Places for messages that are being received; one caller cannot take all of them."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(_RECEIVING_MAX)
        self._own: dict[str, asyncio.Semaphore] = {}

    async def message(self, context: Context, caller: str) -> bytes:
        """Return the call's message.

        Args:
            caller: callers of one name share ``_RECEIVING_PER_CALLER_MAX`` places; a few names.

        Raises:
            KVHearthError: ``deadline``, or ``bad_message`` if the call has no message.
        """
        own = self._own.setdefault(caller, asyncio.Semaphore(_RECEIVING_PER_CALLER_MAX))
        try:
            async with asyncio.timeout(_RECEIVE_S), own, self._places:
                data = await context.read()
        except TimeoutError:
            raise KVHearthError(
                Reason.DEADLINE, f"the message was not whole within {_RECEIVE_S:g} s"
            ) from None
        if isinstance(data, bytes):
            return data
        if context.cancelled():
            raise asyncio.CancelledError
        raise KVHearthError(Reason.BAD_MESSAGE, "a call carries one message")


class MessageGuard(grpc.aio.ServerInterceptor):
    """Admits a caller before its message is received, bounds what is being received, and refuses
    bytes that are no message.

    Every method is served as one whose requests are a stream: gRPC would otherwise receive the
    message first, 4 MiB from anybody. Parsing comes last because it can cost a hundred times what
    it cost to send: millions of empty parts fit into one message, and no other call is served
    meanwhile. gRPC itself would end a call whose bytes do not parse as UNKNOWN with the name of a
    Python exception, uncounted.

    Args:
        engine: the engine that counts refusals.
        admit: by service name, a function that raises a ``KVHearthError`` unless the context's
            caller may call, and returns the caller's name for ``Receiving``; services not named are
            open to every caller.
    """

    def __init__(self, engine: Engine, admit: Mapping[str, Callable[[Context], str]]) -> None:
        self._engine = engine
        self._admit = admit
        self._handlers: dict[str, Any] = {}
        self._receiving = Receiving()
        self._streams = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Return the handler of a call, wrapping each method's once; None if there is no such
        method.
        """
        method = handler_call_details.method
        wrapped = self._handlers.get(method)
        if wrapped is None:
            found = await continuation(handler_call_details)
            if found is None:
                return found
            if found.unary_unary is None:
                wrapped = self._handlers[method] = self._bounded(found)
                return wrapped
            service = method.split("/")[1]
            admit = self._admit.get(service, _everybody)
            wrapped = self._wrap(method.rpartition("/")[2], found, admit)
            self._handlers[method] = wrapped
        return wrapped

    def _bounded(self, handler: Any) -> Any:
        """Limit concurrent streams (health's Watch, reflection): they need no token and may never
        end, so they must not take the places of calls.
        """
        inner = handler.unary_stream or handler.stream_stream

        async def run(request: Any, context: Context) -> None:
            if self._streams >= _STREAMS_MAX:
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
                await context.abort(code, f"{_STREAMS_MAX} streams are open; close some")
            self._streams += 1
            try:
                answers = inner(request, context)
                if hasattr(answers, "__aiter__"):
                    async for answer in answers:
                        await context.write(answer)
                else:
                    await answers
            finally:
                self._streams -= 1

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.unary_stream
            else grpc.stream_stream_rpc_method_handler
        )
        return make(run, handler.request_deserializer, handler.response_serializer)

    def _wrap(self, method: str, handler: Any, admit: Callable[[Context], str]) -> Any:
        parse, work, engine = handler.request_deserializer, handler.unary_unary, self._engine

        def received(context: Context) -> Any:
            return self._receiving.message(context, admit(context))

        def parsed(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError as error:
                raise KVHearthError(
                    Reason.BAD_MESSAGE, f"the request cannot be parsed: {error}"
                ) from None

        async def run(_: object, context: Context) -> Any:
            began = time.perf_counter()
            try:
                data = await guarded(engine, context, lambda: received(context))
                began = time.perf_counter()
                request = await guarded(engine, context, lambda: parsed(data))
                return await work(request, context)
            finally:
                code = context.code() or grpc.StatusCode.OK
                engine.timings.observe(method, code.name, time.perf_counter() - began)

        return grpc.stream_unary_rpc_method_handler(run, None, handler.response_serializer)


def _everybody(_: Context) -> str:
    return ""
