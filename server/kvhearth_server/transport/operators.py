"""Operators of the daemon: known by ``admin.token``, or by the token of a remote identity; and the
log of what they and engines ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hmac
from collections.abc import Iterator
from contextvars import ContextVar

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.state import require
from kvhearth_server.engine.sessions import Session
from kvhearth_server.gateway.credentials import Credentials
from kvhearth_server.gateway.tokens import Role
from kvhearth_server.observability.logs import LimitedLog, Throttle, get_logger
from kvhearth_server.transport.messages import plain_text


class Right(enum.IntEnum):
    """What an operator may do; each has those before it."""

    NONE = 0
    READ = 1
    ALL = 2


class Operators:
    """Tells operators' rights and names by their tokens.

    Args:
        admin_token: the content of ``admin.token``.
        read_token: opens what only tells; "" for none.
        credentials: know the identities of the settings' file; None without one.
        guarded: whether sums need a token, too.
    """

    def __init__(
        self,
        admin_token: str,
        read_token: str = "",
        credentials: Credentials | None = None,
        *,
        guarded: bool = False,
    ) -> None:
        self.guarded = guarded
        self.credentials = credentials
        self._admin = admin_token.encode()
        self._read = read_token.encode()

    def rights(self, token: str) -> tuple[Right, str]:
        """Return the rights and the identity's name of a token, "" for one of the daemon's own."""
        data = token.encode(errors="surrogatepass")
        if hmac.compare_digest(data, self._admin):
            return Right.ALL, ""
        if self._read and hmac.compare_digest(data, self._read):
            return Right.READ, ""
        found = self.credentials.of_token(token) if self.credentials is not None else None
        if found is None:
            return Right.NONE, ""
        return (Right.ALL if found.role is Role.OPERATOR else Right.NONE), found.name


_NAME_CHARS = 64
_log = get_logger("kvhearth.admin")
_refusals = LimitedLog(_log)
_BUMPS_A_SECOND = 16
LABEL_BYTES_MAX = 256
_bumps = LimitedLog(get_logger("kvhearth.audit"), Throttle(burst=_BUMPS_A_SECOND))


operator: ContextVar[str] = ContextVar("operator", default="")
"""Name of the identity behind a request; "" for the daemon's own tokens."""


@contextlib.contextmanager
def audited(verb: str, peer: str, **fields: object) -> Iterator[dict[str, object]]:
    """Log ``admin.VERB`` when the block ends, with its result: done, cancelled (the operator hung
    up), failed, or the reason of a refusal.

    Args:
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
        by = named(operator.get())
        say(f"admin.{verb}", result=result, peer=peer, **by, **details)


def check_label(label: str | None) -> None:
    """Refuse names of weights or sessions that no log could show.

    Raises:
        KVHearthError: ``bad_message``.
    """
    good = label is None or (len(label.encode()) <= LABEL_BYTES_MAX and label.isprintable())
    require(good, Reason.BAD_MESSAGE, f"a label is printable, of at most {LABEL_BYTES_MAX} bytes")


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
        **named(record.identity),
    )


def named(identity: str) -> dict[str, str]:
    """Return the log's field for the remote identity behind a session; none if it is local."""
    return {"identity": plain_text(identity, _NAME_CHARS)} if identity else {}


def refused(peer: str) -> None:
    """Log a request without the admin token, once a second at most."""
    _refusals.warning("admin.refused", kind="http", peer=peer, result="not_admin")
