"""Operators of the daemon: known by ``admin.token``, or by the token of a remote identity."""

from __future__ import annotations

import enum
import hmac

from kvhearth_server.gateway.doors import Doors
from kvhearth_server.gateway.identity import Role


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
        doors: knows the identities of the settings' file; None without one.
        guarded: whether sums need a token, too.
    """

    def __init__(
        self,
        admin_token: str,
        read_token: str = "",
        doors: Doors | None = None,
        *,
        guarded: bool = False,
    ) -> None:
        self.guarded = guarded
        self.doors = doors
        self._admin = admin_token.encode()
        self._read = read_token.encode()

    def rights(self, token: str) -> tuple[Right, str]:
        """Return the rights and the identity's name of a token, "" for one of the daemon's own."""
        data = token.encode(errors="surrogatepass")
        if hmac.compare_digest(data, self._admin):
            return Right.ALL, ""
        if self._read and hmac.compare_digest(data, self._read):
            return Right.READ, ""
        found = self.doors.of_token(token) if self.doors is not None else None
        if found is None:
            return Right.NONE, ""
        return (Right.ALL if found.role is Role.OPERATOR else Right.NONE), found.name
