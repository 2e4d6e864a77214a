"""Long work of operators on the loop, in portions: whoever waits is served between two of them."""

from __future__ import annotations

import asyncio

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.books import BooksError
from kvhearth_server.engine.engine import Engine

EVICTED_MAX = 512
"""Blocks of a portion; some milliseconds."""


async def check_books(engine: Engine) -> str:
    """Recount everything; what disagrees, or an empty string."""
    try:
        for _ in engine.core.book_portions():
            await asyncio.sleep(0)
    except BooksError as error:
        return str(error)
    return ""


async def evict(engine: Engine, digest: bytes, keep_bytes: int) -> int:
    """As ``Core.evict``, but no more blocks than the namespace had when it began: stores that come
    in meanwhile do not keep it going.

    Raises:
        KVHearthError: ``unknown_namespace``.
    """
    left = engine.core.blocks_of(digest)
    evicted = 0
    while left > 0:
        portion = min(left, EVICTED_MAX)
        try:
            gone = engine.call(engine.core.evict, digest, keep_bytes, portion)
        except KVHearthError as error:
            # Empty and unused, it may have made place for another one since the last portion.
            if error.reason is Reason.UNKNOWN_NAMESPACE and evicted:
                break
            raise
        evicted += gone
        left -= max(gone, 1)
        if gone < portion and not engine.core.evictor.cut_short:
            break
        await asyncio.sleep(0)
    return evicted
