"""Descriptors that a daemon may need, and its limit of them."""

from __future__ import annotations

import resource

from kvhearth_server.config.model import Settings
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.ssd.settings import segment_bytes_for, segments_max

_BASE = 128
_PER_SESSION = 8
"""Descriptors for each session: calls socket, attach socket, pidfd, lock, gRPC connection, and some
of each on the way.
"""

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
