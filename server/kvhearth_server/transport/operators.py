"""Operators of the daemon: known by ``admin.token``, or by the token of a remote identity."""

from __future__ import annotations

import asyncio
import enum
import hmac

from kvhearth.errors import KVHearthError
from kvhearth_server.gateway.doors import Doors
from kvhearth_server.gateway.identity import Identity, Role


class Right(enum.IntEnum):
    """What an operator may do; each has those before it."""

    NONE = 0
    SUMS = 1
    LISTS = 2
    ALL = 3


RIGHTS = {Role.ENGINE: Right.NONE, Role.READER: Right.SUMS, Role.ADMIN: Right.ALL}
"""Rights of remote identities. Lists name all tenants' models and engines, and a reader has one
tenant: it gets none.
"""


class Operators:
    """Tells operators' rights and names by their tokens.

    Args:
        admin_token: the content of ``admin.token``.
        read_token: opens the lists; "" for none.
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

    async def rights(self, token: str, address: str) -> tuple[Right, str]:
        """Return the rights and the identity's name of a token, "" for one of the daemon's own; a
        slow hash is taken beside the loop.
        """
        data = token.encode(errors="surrogatepass")
        if hmac.compare_digest(data, self._admin):
            return Right.ALL, ""
        if self._read and hmac.compare_digest(data, self._read):
            return Right.LISTS, ""
        if self.doors is None or not token:
            return Right.NONE, ""
        found = self.doors.known(token)
        if found is not None:
            return _rights_of(found)
        try:
            return _rights_of(await asyncio.to_thread(self.doors.identify, token, None, address))
        except KVHearthError:
            return Right.NONE, ""


def _rights_of(identity: Identity | None) -> tuple[Right, str]:
    return (Right.NONE, "") if identity is None else (RIGHTS[identity.role], identity.name)
