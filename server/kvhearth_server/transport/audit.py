"""Audit log: one line for each action of an operator, from every transport, and for each of an
engine that voids blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from kvhearth.errors import KVHearthError
from kvhearth_server.engine.sessions import Session
from kvhearth_server.observability.logs import LimitedLog, Throttle, get_logger
from kvhearth_server.transport.messages import plain_text

_NAME_CHARS = 64
_BUMPS_A_SECOND = 16
_log = get_logger("kvhearth.admin")
_refusals = LimitedLog(_log)
_bumps = LimitedLog(get_logger("kvhearth.audit"), Throttle(burst=_BUMPS_A_SECOND))


@contextlib.contextmanager
def audited(verb: str, door: str, peer: str, **fields: object) -> Iterator[dict[str, object]]:
    """Log ``admin.VERB`` when the block ends, with its result: done, cancelled (the operator hung
    up), failed, or the reason of a refusal.

    Args:
        door: grpc or http.
        peer: the requester, as far as the transport knows it.
        fields: parameters of the action; the block may add results to the dict that it receives.
    """
    details = {
        name: plain_text(v, _NAME_CHARS) if isinstance(v, str) else v for name, v in fields.items()
    }
    result = "failed"
    try:
        yield details
        result = "done"
    except KVHearthError as error:
        result = str(error.reason)
        raise
    except asyncio.CancelledError:
        result = "cancelled"
        raise
    finally:
        say = _log.info if result == "done" else _log.warning
        say(f"admin.{verb}", result=result, door=door, peer=peer, **details)


def bumped(record: Session, epoch: int) -> None:
    """Log that an engine's process raised its namespace's weights epoch, which voids all blocks."""
    peer = record.peer
    _bumps.warning(
        "engine.bumped",
        kind=record.tenant,
        session=record.number,
        uid=peer.uid,
        pid=peer.pid,
        tenant=record.tenant,
        epoch=epoch,
    )


def refused(door: str, peer: str) -> None:
    """Log a request without the admin token, once a second at most."""
    _refusals.warning("admin.refused", kind=door, door=door, peer=peer, result="not_admin")
