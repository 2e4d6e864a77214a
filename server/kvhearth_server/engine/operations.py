"""Operators' long work in portions, so that the loop serves requests in between: evict, forget,
unpin, and a recount of everything.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.check_books import BooksError
from kvhearth_server.core.state import require
from kvhearth_server.engine.engine import Engine

EVICTED_MAX = 128
"""Blocks of one portion; each takes some 10 microseconds."""
COPIES_MAX = 128
"""Copies on SSD of one portion; each costs some microseconds in three indexes."""
WRITTEN_S = 2.0
"""Longest wait for blocks that are being written; they are held, so nothing can evict them."""
_LOOK_S = 0.005
PINS_MAX = 16
"""Pins of one portion; each names up to ``keys_max`` blocks."""

Where = Literal["memory", "ssd", "all"]


@dataclass(frozen=True)
class Removed:
    """Numbers of blocks that an operator's eviction removed, by tier."""

    memory: int = 0
    ssd: int = 0


async def check_books(engine: Engine) -> str:
    """Recount everything; return the disagreement found, or an empty string."""
    try:
        for _ in engine.core.book_portions():
            await asyncio.sleep(0)
    except BooksError as error:
        return str(error)
    return ""


async def evict(
    engine: Engine, digest: bytes, keep_bytes: int, where: Where | None = None
) -> Removed:
    """Remove a namespace's blocks, coldest first, until it uses ``keep_bytes`` at most.

    Leased blocks stay, pinned ones go last; if memory is to keep nothing, the pins end. Blocks
    removed from SSD stay removed across restarts.

    Args:
        where: by default everywhere if ``keep_bytes`` is 0, else in memory.

    Raises:
        KVHearthError: ``unknown_namespace``; ``bad_message`` if SSD is to keep some blocks;
            ``ssd_unusable`` if no drive records the removal.
    """
    namespace = engine.core.named(digest)
    where = where or ("memory" if keep_bytes else "all")
    require(
        where == "memory" or not keep_bytes,
        Reason.BAD_MESSAGE,
        "the SSD tier has no order of coldness: keep 0 bytes there, or evict from memory only",
    )
    if where != "ssd" and not keep_bytes:
        await unpin(engine, digest)
    memory = await _evict_memory(engine, digest, keep_bytes) if where != "ssd" else 0
    engine.tokens.sweep()
    if where == "memory" or engine.tiering is None:
        return Removed(memory)
    if where == "all":
        end = engine.now() + WRITTEN_S
        while engine.core.writeback.writes(namespace) and engine.now() < end:
            await asyncio.sleep(_LOOK_S)
            memory += await _evict_memory(engine, digest, keep_bytes)
    copies = await _drop_copies(engine, digest)
    engine.tokens.sweep()
    return Removed(memory, copies)


async def _drop_copies(engine: Engine, digest: bytes) -> int:
    """Drop a namespace's copies on SSD in portions; return how many there were."""
    tiering, namespace = engine.tiering, engine.core.state.namespaces.find(digest)
    if tiering is None or namespace is None:
        return 0  # empty and unused, the namespace made place for another one meanwhile
    name = tiering.names.name(namespace)
    engine.call(engine.core.drop_copies, digest)
    dropped = 0
    while engine.core.state.namespaces.find(digest) is namespace:
        gone = tiering.forget_copies(namespace, name, COPIES_MAX)
        if not gone:
            break
        dropped += gone
        await asyncio.sleep(0)
    await engine.catalogue.written()
    await engine.ssd_catalogue.confirm()
    return dropped


async def forget(
    engine: Engine, digest: bytes, expected: int | None, label: str | None = None
) -> int:
    """Invalidate all blocks of a namespace at once because its weights have changed; return the new
    weights epoch.

    Args:
        expected: refuse unless this is the current epoch; None accepts any.
        label: as for ``Core.bump_epoch``.

    Raises:
        KVHearthError: ``unknown_namespace``, ``stale_epoch``; ``ssd_unusable`` if no drive records
            the new epoch, which still holds until a restart.
    """
    epoch = engine.call(engine.core.bump_namespace, digest, expected, label)
    engine.tokens.sweep()
    await engine.catalogue.written()
    if engine.ssd_catalogue.paths:
        await engine.ssd_catalogue.confirm()
    return epoch


async def unpin(engine: Engine, digest: bytes | None, session: str | None = None) -> int:
    """End the pins of a namespace (None for all), or those of one session there; return how many.

    Raises:
        KVHearthError: ``unknown_namespace``.
    """
    number = None if digest is None else engine.core.named(digest).number
    pinning, ended = engine.core.pinning, 0
    for _ in range(0, len(pinning), PINS_MAX):  # pins that come meanwhile do not keep it going
        ended += engine.call(pinning.end_all, number, "operator", name=session, most=PINS_MAX)
        await asyncio.sleep(0)
    return ended


async def _evict_memory(engine: Engine, digest: bytes, keep_bytes: int) -> int:
    """Evict in portions as ``Core.evict`` does, but no more blocks than the namespace had at the
    start: stores that arrive meanwhile do not keep it going.
    """
    namespace = engine.core.state.namespaces.find(digest)
    left = namespace.blocks if namespace else 0
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
        if left <= 0 or (gone < portion and not engine.core.evictor.cut_short):
            break  # at once: the rest was held, and a look now shows by which engines
        await asyncio.sleep(0)
    return evicted
