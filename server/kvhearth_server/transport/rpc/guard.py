"""Errors of the core become gRPC statuses in one place, and every refusal is counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from kvhearth.errors import KVHearthError
from kvhearth.statuses import STATUS_DETAILS_KEY, encode_status
from kvhearth_server.engine.engine import Engine

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Context = Any
"""grpc.aio.ServicerContext; its type parameters differ from stub to stub."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


def metadata_value(context: Context, name: str) -> str:
    """One value of the call's metadata, or empty."""
    pairs: Sequence[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    for key, value in pairs:
        if key == name and isinstance(value, str):
            return value
    return ""


async def guarded(
    engine: Engine, context: Context, work: Callable[[], Reply | Awaitable[Reply]]
) -> Reply:
    """Run ``work``; a domain error ends the call with its status and reason."""
    try:
        result = work()
        if isinstance(result, Awaitable):
            return await result
        return result
    except KVHearthError as error:
        engine.counters.add("refusals", 1, str(error.reason))
        refusal = error
    trailing = ((STATUS_DETAILS_KEY, encode_status(refusal)),)
    await context.abort(_CODES[int(refusal.status.code)], refusal.message, trailing)
    raise AssertionError("abort returned") from refusal
