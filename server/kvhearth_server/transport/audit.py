"""Audit log: one line for each action of an operator, from every transport."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from kvhearth.errors import KVHearthError
from kvhearth_server.observability.logs import LimitedLog, get_logger
from kvhearth_server.transport.messages import plain_text

_NAME_CHARS = 64
_log = get_logger("kvhearth.admin")
_refusals = LimitedLog(_log)


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


def refused(door: str, peer: str) -> None:
    """Log a request without the admin token, once a second at most."""
    _refusals.warning("admin.refused", kind=door, door=door, peer=peer, result="not_admin")
