"""Descriptors that a daemon may need, its limit of them, and each door's share."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.model import Settings
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.ssd.settings import segment_bytes_for, segments_max

RESERVE = 64
"""Descriptors that no door's peers may take: for files, for errors, for the operator."""
_BASE = RESERVE + 192
"""Descriptors of the daemon itself: arena, listeners, gRPC, ``admin.sock``, and the reserve."""
_PER_SESSION = 12
"""Descriptors for each session: attach socket, pidfd and those of processes that left, calls
sockets, gRPC connection, and some of each on the way.
"""
CALLS_PER_SESSION_MAX = 64
HTTP_MAX = 224
_HANDSHAKES = 128
_LEAST = 8

_log = get_logger("kvhearth.daemon")


def ssd_files(settings: Settings) -> int:
    """Return the most segment files that the SSD tier may come to keep open."""
    size = settings.ssd_segment_bytes
    return sum(
        segments_max(each.bytes, size or segment_bytes_for(each.bytes))
        for each in settings.ssd_dirs
    )


def needed(settings: Settings) -> int:
    """Return the descriptors needed with all sessions and all files."""
    return _BASE + _PER_SESSION * settings.sessions_max + ssd_files(settings)


@dataclass(frozen=True)
class DoorShares:
    """Upper bounds of what peers may open, so that no door takes another's descriptors.

    Attributes:
        attach: descriptors of attach connections and of the processes behind them.
        calls: connections to the calls socket.
        calls_fair: connections that each session may open, however many others have.
        grpc: connections to the engines' gRPC socket.
        http: connections over HTTP.
    """

    attach: int
    calls: int
    calls_fair: int
    grpc: int
    http: int


def door_shares(settings: Settings, limit: int | None = None) -> DoorShares:
    """Return the shares under a limit of descriptors; by default the process's.

    Attach and calls have three eighths each, gRPC and HTTP one each; none gets more than its
    sessions can use. The sum leaves what the daemon itself needs.
    """
    if limit is None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    sessions = settings.sessions_max
    most = _BASE + 8 * CALLS_PER_SESSION_MAX * (sessions + _HANDSHAKES) + ssd_files(settings)
    total = most if limit == resource.RLIM_INFINITY else min(limit, most)
    eighth = max(_LEAST, (total - _BASE - ssd_files(settings)) // 8)
    calls = min(3 * eighth, CALLS_PER_SESSION_MAX * sessions + _HANDSHAKES)
    return DoorShares(
        attach=min(3 * eighth, 6 * sessions + 2 * _HANDSHAKES),
        calls=calls,
        calls_fair=min(CALLS_PER_SESSION_MAX, max(1, calls // 2 // sessions)),
        grpc=min(eighth, sessions + _LEAST),
        http=min(eighth, HTTP_MAX),
    )


def limit_fix(descriptors: int) -> str:
    """Return how an operator raises the limit to so many descriptors."""
    return (
        f"systemd: LimitNOFILE={descriptors}; docker run: --ulimit nofile={descriptors}; "
        f"shell: ulimit -n {descriptors}"
    )


def check_limit(settings: Settings, limit: int | None = None) -> None:
    """Refuse a limit that leaves each door less than its least share, or the daemon's own files
    none; by default the process's, which may be raised to its hard one.

    Raises:
        KVHearthError: ``socket_unusable``.
    """
    if limit is None:
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = RESERVE + 8 * _LEAST + ssd_files(settings)
    if limit != resource.RLIM_INFINITY and limit < least:
        raise KVHearthError(
            Reason.SOCKET_UNUSABLE,
            f"the limit of open files is {limit}, and the daemon needs {least} at least; "
            + limit_fix(needed(settings)),
        )


def raise_limit(settings: Settings) -> None:
    """Raise the soft limit, of which 1,024 are usual, to the hard one; log a warning if that is too
    low.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed(settings):
        _log.warning(
            "descriptors.few",
            message="clients could be turned away; see kvhearth doctor",
            limit=hard,
            needed=needed(settings),
            sessions_max=settings.sessions_max,
            ssd_files=ssd_files(settings),
        )
