"""Who is at the other end of a unix socket, by the kernel's word."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.engine.sessions import Peer

_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("3i")


def peer_of(connection: socket.socket) -> Peer:
    """uid, pid (0 across PID namespaces) and, from Linux 6.5 on, a pidfd of the peer."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    pidfd = -1
    with contextlib.suppress(OSError):
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        (pidfd,) = struct.unpack("i", raw)
        os.set_inheritable(pidfd, False)
    return Peer(uid, pid, pidfd)


@dataclass(frozen=True)
class Tenancy:
    """Which user belongs to which tenant; ``uids`` empty admits nobody."""

    name: str
    uids: tuple[int, ...]


def tenant_of(uid: int, tenancies: Sequence[Tenancy]) -> str:
    """The tenant of a user id.

    Raises:
        KVHearthError: ``peer_not_allowed`` naming the uid and the setting.
    """
    for tenancy in tenancies:
        if uid in tenancy.uids:
            return tenancy.name
    raise KVHearthError(
        Reason.PEER_NOT_ALLOWED,
        f"user id {uid} belongs to no tenant; name it in the daemon's tenants or allow_uids",
    )
