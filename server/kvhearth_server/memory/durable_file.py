"""Durable small files: a framed value in a file, and the lock of an arena directory."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvhearth import failpoints as faults
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.memory.mapping import Segment
from kvhearth_server.ownership import read_own, unwritable

LOCK_FILE_NAME = "arena.lock"


def lock_directory(path: Path, how: int = fcntl.LOCK_EX) -> int:
    """Lock the directory ``path`` for this process; closing the returned descriptor unlocks it.

    The lock file stays behind: removing it would let two processes lock two different files.

    The lock is parked in a socket for this reason. A successor may start only when every attach
    socket of this daemon is closed, because readers of the old boot trust the attach socket. When a
    process is killed, the kernel closes its descriptors in ascending order but runs their final
    releases in batches and, since Linux 4.3, last in first out: a lock on a high descriptor is free
    while thousands of sockets are still up (measured: 2,000 of 3,000), one on a low descriptor is
    free after them, and neither order is promised. Here the only reference to the locked
    description lies in the receive queue of a socket. It is dropped when that socket is released,
    so its own release falls into a later batch than all of the process's descriptors, whatever
    their numbers. An ordinary ``close`` still unlocks before it returns.

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
        fcntl.flock(lock, how | fcntl.LOCK_NB)
        return _park(lock)
    except BlockingIOError:
        raise KVHearthError(
            Reason.ARENA_BUSY,
            f"another daemon uses the arena directory {path}; stop it, or give this one another",
        ) from None
    finally:
        os.close(lock)


def check_lockable(path: Path) -> None:
    """Refuse a directory that ``lock_directory`` would refuse now; nothing is made or kept.

    Raises:
        KVHearthError: as ``lock_directory``.
    """
    if os.path.lexists(path / LOCK_FILE_NAME):
        os.close(lock_directory(path, fcntl.LOCK_SH))
    elif problem := unwritable(path):
        raise _unusable(path, problem)


def _unusable(path: Path, why: str | None) -> KVHearthError:
    return KVHearthError(
        Reason.ARENA_UNUSABLE,
        f"cannot open {path / LOCK_FILE_NAME} ({why}); "
        "give a directory that exists and that the daemon may write to",
    )


def _park(descriptor: int) -> int:
    """Send ``descriptor`` into a socket that is never read; returns the socket's descriptor."""
    sender, kept = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with sender, kept:
        socket.send_fds(sender, [b"L"], [descriptor])
        return kept.detach()


_MAGIC = b"KVHBLOB1"
_FIELDS = struct.Struct("<8sIIQQ")  # magic, version, 0, sequence, length; then the CRC-32
_CRC = struct.Struct("<I")
_VERSION = 1
HEADER_BYTES = 64


class DurableBlob:
    """One value in the halves of a file's memory, which ``peek`` reads.

    The file outlives the process, not the machine. Two processes must not open one file (see
    ``lock_directory``).
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.capacity_bytes = segment.bytes // 2 - HEADER_BYTES

    def write(self, data: bytes) -> None:
        """Replace the value; after a crash during the write, ``peek`` gives the old or the new one.

        Raises:
            KVHearthError: ``ARENA_UNUSABLE`` if ``data`` is larger than the capacity.
        """
        if len(data) > self.capacity_bytes:
            raise KVHearthError(
                Reason.ARENA_UNUSABLE,
                f"{self.segment.path} holds at most {self.capacity_bytes} bytes, not {len(data)}; "
                "remove what is not needed any more",
            )
        view = self.segment.view.data
        newest = _newest(view)
        sequence, half = (newest.sequence + 1, 1 - newest.half) if newest else (1, 0)
        start = half * (len(view) // 2)
        payload = start + HEADER_BYTES
        view[start:payload] = bytes(HEADER_BYTES)
        view[payload : payload + len(data)] = data
        faults.hit("durable.payload_written")
        view[start:payload] = _header(sequence, data)
        faults.hit("durable.header_written")


def blob_bytes(capacity_bytes: int, page_bytes: int) -> int:
    """Size of the file of a blob with this capacity: two halves, in whole pages together."""
    return -(-2 * (HEADER_BYTES + capacity_bytes) // page_bytes) * page_bytes


def peek(path: Path) -> bytes | None:
    """Read the newest complete value of a blob's file without changing it; None if there is none.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        data = read_own(path)
    except FileNotFoundError:
        return None
    found = _newest(memoryview(data))
    return bytes(found.value) if found else None


def framed(sequence: int, data: bytes) -> bytes:
    """A value with the header by which ``unframed`` knows it."""
    return _header(sequence, data) + data


def unframed(data: bytes) -> tuple[int, bytes] | None:
    """The sequence and the value of ``framed``; None if a bit of them is not as it was."""
    found = _parse(memoryview(data), 0)
    return (found.sequence, bytes(found.value)) if found else None


def _header(sequence: int, data: bytes | memoryview) -> bytes:
    fields = _FIELDS.pack(_MAGIC, _VERSION, 0, sequence, len(data))
    crc = zlib.crc32(fields, zlib.crc32(data))
    return (fields + _CRC.pack(crc)).ljust(HEADER_BYTES, b"\0")


class _Stored(NamedTuple):
    """A complete value. It is no copy, so that other threads run during a long one's checksum."""

    sequence: int
    half: int
    value: memoryview


def _newest(view: memoryview) -> _Stored | None:
    """The complete value with the greater sequence of a file's two halves."""
    middle = len(view) // 2
    found = [_parse(view[:middle], 0), _parse(view[middle:], 1)]
    return max(filter(None, found), key=lambda each: each.sequence, default=None)


def _parse(data: memoryview, half: int) -> _Stored | None:
    """The value behind a header; None if it is not complete."""
    if len(data) < HEADER_BYTES:
        return None
    magic, version, _, sequence, length = _FIELDS.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or length > len(data) - HEADER_BYTES:
        return None
    value = data[HEADER_BYTES : HEADER_BYTES + length]
    good = data[:HEADER_BYTES] == _header(sequence, value)
    return _Stored(sequence, half, value) if good else None


def catalogue_text(head: Mapping[str, object], namespaces: Sequence[str]) -> bytes:
    """The JSON of a durable catalogue: ``head``, and ``namespaces``, which are JSON objects."""
    text = json.dumps(head, separators=(",", ":")).removesuffix("}")
    return "".join((text, ',"namespaces":[', ",".join(namespaces), "]}")).encode()


def link_anew(descriptor: int, path: Path) -> bool:
    """Give an open file a name; False if that cannot be."""
    own = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Only with a directory's descriptor Python follows the link there.
        os.link(str(descriptor), path, src_dir_fd=own, follow_symlinks=True)
    except OSError:
        return False
    finally:
        os.close(own)
    return True
