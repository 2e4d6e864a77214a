"""One daemon per arena directory: a ``flock`` that ends after everything else of its holder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from kvhearth.errors import KVHearthError, Reason

LOCK_FILE_NAME = "arena.lock"


def lock_directory(path: Path) -> int:
    """Lock the directory ``path`` for this process; closing the returned descriptor unlocks it.

    The lock file stays behind: removing it would let two processes lock two different files.

    Why the lock is parked in a socket. A successor may start only when every life line (client
    socket) of this daemon is cut, because readers of the old boot trust the life line. When a
    process is killed, the kernel closes its descriptors in ascending order but runs their final
    releases in batches and, since Linux 4.3, last in first out: a lock on a high descriptor is
    free while thousands of sockets are still up (measured: 2,000 of 3,000), one on a low
    descriptor is free after them, and neither order is promised. Here the only reference to the
    locked description lies in the receive queue of a socket. It is dropped when that socket is
    released, and so its own release falls into a later batch than all of the process's
    descriptors, whatever their numbers. An ordinary ``close`` still unlocks before it returns.

    Raises:
        KVHearthError: ``ARENA_BUSY`` if another process holds it, ``ARENA_UNUSABLE`` if the
            directory cannot be used.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(path / LOCK_FILE_NAME, flags, 0o600)
    except OSError as error:
        raise _unusable(path, error.strerror) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _park(lock)
    except BlockingIOError:
        raise _busy(path) from None
    finally:
        os.close(lock)


def check_lockable(path: Path) -> None:
    """Refuse a directory that ``lock_directory`` would refuse now; nothing is made or kept.

    Raises:
        KVHearthError: as ``lock_directory``.
    """
    try:
        lock = os.open(path / LOCK_FILE_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        if not os.access(path, os.W_OK | os.X_OK):
            raise _unusable(path, os.strerror(errno.EACCES)) from None
        return
    except OSError as error:
        raise _unusable(path, error.strerror) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy(path) from None
    finally:
        os.close(lock)


def _unusable(path: Path, why: str | None) -> KVHearthError:
    return KVHearthError(
        Reason.ARENA_UNUSABLE,
        f"cannot open {path / LOCK_FILE_NAME} ({why}); "
        "give a directory that exists and that the daemon may write to",
    )


def _busy(path: Path) -> KVHearthError:
    return KVHearthError(
        Reason.ARENA_BUSY,
        f"another daemon uses the arena directory {path}; stop it, or give this one another",
    )


def _park(descriptor: int) -> int:
    """Send ``descriptor`` into a socket that nobody reads; the socket's descriptor."""
    sender, keeper = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with sender, keeper:
        socket.send_fds(sender, [b"L"], [descriptor])
        return keeper.detach()
