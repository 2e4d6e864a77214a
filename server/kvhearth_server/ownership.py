"""The daemon's own files: whose a directory or file is, since who owns one can read and write all
KV in it, and how a file is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

_VOLUME_FOLDER = stat.S_ISGID | stat.S_IRWXG
_VOLUME_FILE = stat.S_IRGRP | stat.S_IWGRP
"""Bits that a kubelet sets in a volume of a pod with an ``fsGroup``, at each start of it."""


def foreign(place: Path | int) -> str:
    """Return the reason why a path or an open file is not the daemon's alone, or "" if it is.

    Its owner must be the daemon's user or root, and nobody else may write to it, except the
    ``fsGroup`` of the daemon's pod.

    Raises:
        OSError: it cannot be examined.
    """
    facts = os.stat(place)
    if facts.st_uid not in (os.geteuid(), 0):
        return f"user {facts.st_uid} owns it"
    refused = stat.S_IWOTH if _in_pod_volume(facts) else stat.S_IWOTH | stat.S_IWGRP
    if facts.st_mode & refused:
        return f"its mode {stat.S_IMODE(facts.st_mode):04o} lets others write to it (chmod go-w)"
    return ""


def listening(path: Path, backlog: int, *, owner_only: bool = False) -> socket.socket:
    """Return a listening socket that every user may connect to who can reach its directory, or only
    the daemon's.

    Raises:
        OSError: it cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setblocking(False)
        with socket_mask(owner_only=owner_only):
            listener.bind(str(path))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def unwritable(folder: Path) -> str:
    """Return the reason why the daemon can make nothing in a directory, or "" if it can.

    Raises:
        OSError: it cannot be examined.
    """
    if os.access(folder, os.W_OK | os.X_OK):
        return ""
    read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if read_only else errno.EACCES)


def _in_pod_volume(facts: os.stat_result) -> bool:
    bits = _VOLUME_FOLDER if stat.S_ISDIR(facts.st_mode) else _VOLUME_FILE
    own_groups = (os.getegid(), *os.getgroups())
    return facts.st_mode & bits == bits and facts.st_gid in own_groups


@contextlib.contextmanager
def socket_mask(*, owner_only: bool) -> Iterator[None]:
    """Let every user connect to a socket that is bound here, or the daemon's and root only; a later
    chmod would follow links.

    The mask is the process's: files made meanwhile need a mode of their own, as all have.
    """
    before = os.umask(0o177 if owner_only else 0o111)
    try:
        yield
    finally:
        os.umask(before)


def check_own(descriptor: int, path: Path, refused: Callable[[int], str] = foreign) -> None:
    """Refuse an open file that another user could write, or of which ``refused`` gives a reason.

    Raises:
        PermissionError: its ``strerror`` tells why.
    """
    if message := refused(descriptor):
        raise PermissionError(errno.EPERM, message, str(path))


def exposed(place: Path | int) -> str:
    """Return the reason why a file of secrets is not the daemon's alone, or "" if it is.

    Nobody else may read it, except a group that root chose: an orchestrator mounts its secrets so.

    Raises:
        OSError: it cannot be examined.
    """
    facts = os.stat(place)
    allowed = stat.S_IRGRP if facts.st_uid == 0 != os.geteuid() else 0
    if message := foreign(place):
        return message
    if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO) & ~allowed:
        return f"its mode {stat.S_IMODE(facts.st_mode):04o} lets others read it (chmod 600)"
    return ""


def read_secret(path: Path, bytes_max: int) -> bytes:
    """Read a file of secrets, which nobody else can read; as ``read_own``."""
    return read_own(path, bytes_max, refused=exposed, follow=True)


def read_own(
    path: Path,
    bytes_max: int | None = None,
    *,
    refused: Callable[[int], str] = foreign,
    follow: bool = False,
) -> bytes:
    """Read a file of the daemon's own.

    Args:
        follow: follow symbolic links, as secrets of Kubernetes need it.

    Raises:
        OSError: it cannot be read, is ``refused``, or has more than ``bytes_max`` bytes.
    """

    def opened(path: str, flags: int) -> int:
        return os.open(path, flags | (0 if follow else os.O_NOFOLLOW))

    with open(path, "rb", opener=opened) as file:
        check_own(file.fileno(), path, refused)
        data = file.read(-1 if bytes_max is None else bytes_max + 1)
    if bytes_max is not None and len(data) > bytes_max:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file as a whole and durably; only its owner can read it. One process at a time may
    call it for a path.

    Raises:
        OSError: it cannot be; the old file may still be there.
    """
    fresh = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(fresh, flags, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(fresh, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names in a directory survive a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
