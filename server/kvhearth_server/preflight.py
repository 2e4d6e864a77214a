"""The conditions under which the daemon starts, checked before it takes any resource.

``serve`` obeys them and ``doctor`` reports them, so that the two cannot disagree.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import ADMIN_TOKEN_FILE
from kvhearth_server.config.load import Settings
from kvhearth_server.config.rlimit import check_limit
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.doors import claimed, refusal
from kvhearth_server.gateway.credentials import Credentials
from kvhearth_server.memory.durable_file import check_lockable
from kvhearth_server.memory.mapping import HugepagePolicy, KernelMemory
from kvhearth_server.memory.plan import ArenaPlan, check_room
from kvhearth_server.ownership import read_own
from kvhearth_server.tier_startup import (
    Probe,
    check_ssd_dirs,
    check_ssd_interface,
    fleet_key,
)
from kvhearth_server.tiers.ssd.disk.probe import probe

_TOKEN_CHARS_MIN, _TOKEN_CHARS_MAX = 16, 1024
_MEMORY = {Reason.MEMORY_UNAVAILABLE: "memory", Reason.HUGEPAGES_UNAVAILABLE: "hugepages"}


def arena_plan(settings: Settings) -> ArenaPlan:
    """Return the arena that the settings ask for."""
    tenants = [(t.name, t.bytes) for t in settings.effective_tenants(os.getuid())]
    geometry = Geometry.of(tenants, settings.slab_bytes, settings.slot_bytes_min)
    policy = HugepagePolicy(settings.hugepages)
    discard, keep = settings.discard_arena, settings.keep_memory
    return ArenaPlan(geometry, settings.arena_dir, policy, discard, keep)


def socket_files(settings: Settings) -> list[Path]:
    """Return the files that a daemon makes in its socket directory."""
    engines = [settings.attach_socket, settings.calls_socket, settings.grpc_socket]
    return [*engines, settings.admin_socket, settings.socket_dir / ADMIN_TOKEN_FILE]


def problems(
    settings: Settings, kernel: KernelMemory | None = None, tried: Probe = probe
) -> Iterator[tuple[str, KVHearthError]]:
    """Yield the names of checks with the errors that keep a daemon with these settings from
    starting; it ends with the first.

    Args:
        kernel: source of the facts about memory.
        tried: tries an interface for disk I/O.
    """
    checks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("nofile", lambda: check_limit(settings)),
        ("arena_dir", lambda: _arena(settings, kernel or KernelMemory())),
        ("remote_fleet_key_file", lambda: fleet_key(settings)),
        ("ssd_dirs", lambda: check_ssd_dirs(settings)),
        ("ssd_interface", lambda: check_ssd_interface(settings, tried)),
        ("http", lambda: _http(settings)),
        ("listen", lambda: Credentials(settings)),
        ("read_token_file", lambda: read_token(settings)),
        ("socket_dir", lambda: _sockets(settings)),
    )
    for name, check in checks:
        try:
            check()
        except KVHearthError as error:
            yield _MEMORY.get(error.reason, name), error


def check(settings: Settings) -> None:
    """Refuse settings with which the daemon cannot start.

    Raises:
        KVHearthError: the first of the ``problems``.
    """
    for _, error in problems(settings):
        raise error


def _arena(settings: Settings, kernel: KernelMemory) -> None:
    if settings.arena_dir is not None and os.path.isdir(settings.arena_dir):
        check_lockable(settings.arena_dir)
    check_room(arena_plan(settings), kernel)


def read_token(settings: Settings) -> str:
    """Return the token that opens the lists over HTTP, or "" if there is none.

    A symbolic link is followed, as secrets of Kubernetes need it.

    Raises:
        KVHearthError: ``config_invalid``: the file cannot be read, others may write to it, or it
            holds no token.
    """
    path = settings.read_token_file
    if path is None:
        return ""
    try:
        text = read_own(path, 8 * _TOKEN_CHARS_MAX, follow=True).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        message = getattr(error, "strerror", None) or "it is not plain text"
    else:
        if _TOKEN_CHARS_MIN <= len(text) <= _TOKEN_CHARS_MAX and text.isprintable():
            return text
        message = f"it does not hold one line of {_TOKEN_CHARS_MIN}..{_TOKEN_CHARS_MAX} characters"
    raise KVHearthError(
        Reason.CONFIG_INVALID,
        f"read_token_file: {path}: {message}; write one with: openssl rand -hex 32",
    )


def _http(settings: Settings) -> None:
    if settings.http_address is not None:
        from kvhearth_server.transport.web.server import at_address

        at_address(*settings.http_address).close()


def _sockets(settings: Settings) -> None:
    folder = settings.socket_dir
    existing = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    try:
        if existing == folder:
            os.close(claimed(folder, fcntl.LOCK_SH))
        # Permissions alone do not tell: even root may not write to /proc or to a read-only mount.
        Path(tempfile.mkdtemp(prefix=".kvhearth-", dir=existing)).rmdir()
        for path in socket_files(settings):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise refusal(folder, error) from None
