"""Durable small files: a framed value in a file, and the lock of an arena directory."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import socket
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from kvhearth import failpoints as faults
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.value_types import format_size
from kvhearth_server.memory.mapping import (
    Filesystem,
    FilesystemKind,
    address_of,
    closed_on_failure,
    filesystem_kind,
    map_shared,
    populate,
)
from kvhearth_server.ownership import check_own, read_own, sync_directory, unwritable

LOCK_FILE_NAME = "arena.lock"


def lock_directory(path: Path) -> int:
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
        if problem := unwritable(path):
            raise _unusable(path, problem) from None
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
    """One value of at most ``capacity_bytes`` in the file ``path``.

    The file takes at least two pages, on hugetlbfs one huge page, whatever the capacity (with 1 GiB
    pages: 1 GiB). A file made with a smaller capacity is replaced by a larger one that holds the
    same value. Two processes must not open one file (see ``lock_directory``).

    Raises:
        KVHearthError: ``HUGEPAGES_UNAVAILABLE`` or ``MEMORY_UNAVAILABLE`` if there is no room,
            ``ARENA_UNUSABLE`` if the file cannot be made or opened.
    """

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._descriptor = -1
        try:
            self._filesystem = filesystem_kind(path.parent)
            self._descriptor = self._open()
            self._mapping = self._map(self._descriptor)
        except OSError as error:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            raise self._refusal(error) from error

    @property
    def fd(self) -> int:
        """Descriptor of the file."""
        return self._descriptor

    def read(self) -> bytes | None:
        """The newest complete value; None if nothing was ever written (or nothing is complete)."""
        newest = self._newest()
        return None if newest is None else newest[2]

    def write(self, data: bytes) -> None:
        """Replace the value; after a crash during the write, ``read`` gives the old or the new one.

        Raises:
            KVHearthError: ``ARENA_UNUSABLE`` if ``data`` is larger than the capacity.
        """
        if len(data) > self.capacity_bytes:
            raise KVHearthError(
                Reason.ARENA_UNUSABLE,
                f"{self.path} holds at most {self.capacity_bytes} bytes, not {len(data)}; "
                "remove what is not needed any more, or open it with a larger capacity",
            )
        sequence, half = self._next()
        start = half * self._half_bytes
        payload = start + HEADER_BYTES
        self._mapping[start:payload] = bytes(HEADER_BYTES)
        self._sync()
        self._mapping[payload : payload + len(data)] = data
        self._sync()
        faults.hit("durable.payload_written")
        self._mapping[start:payload] = _header(sequence, data)
        self._sync()
        faults.hit("durable.header_written")

    def close(self) -> None:
        """Unmap and close the file; closing twice does nothing."""
        if self._descriptor >= 0:
            self._mapping.close()
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def _half_bytes(self) -> int:
        return len(self._mapping) // 2

    def _next(self) -> tuple[int, int]:
        """Sequence and half of the next value. It looks without a copy, so that other threads run
        during the checksums of a long one.
        """
        with memoryview(self._mapping) as view:
            found = [
                (value[0], half)
                for half in (0, 1)
                if (value := _parse(view, half * self._half_bytes, self._half_bytes))
            ]
            del value
        sequence, half = max(found, default=(0, 1))
        return sequence + 1, 1 - half

    def _newest(self) -> tuple[int, int, bytes] | None:
        """(sequence, half, value) of the newest complete half."""
        found = [
            (*value, half)
            for half in (0, 1)
            if (value := _parse(self._mapping, half * self._half_bytes, self._half_bytes))
        ]
        if not found:
            return None
        sequence, data, half = max(found, key=lambda value: value[0])
        return sequence, half, data

    def _open(self) -> int:
        """Open the file, or make it; it appears under its name only when it is usable."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return self._make(None)
        with closed_on_failure(descriptor):
            check_own(descriptor, self.path)
            if os.fstat(descriptor).st_size >= self._file_bytes():
                return descriptor
            value = self._value_of(descriptor)
        os.close(descriptor)
        return self._make(value)

    def _make(self, value: bytes | None) -> int:
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.unlink(missing_ok=True)  # left by a daemon that was killed at this point
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(fresh, flags, 0o600)
        with closed_on_failure(descriptor) as undo:
            undo.callback(fresh.unlink, missing_ok=True)
            os.ftruncate(descriptor, self._file_bytes())
            with self._map(descriptor) as mapping:
                if value is not None:
                    mapping[: HEADER_BYTES + len(value)] = framed(1, value)
                if self._on_disk:
                    mapping.flush()
                    os.fsync(descriptor)
            fresh.rename(self.path)
            if self._on_disk:
                sync_directory(self.path.parent)
            return descriptor

    def _map(self, descriptor: int) -> mmap.mmap:
        size_bytes = os.fstat(descriptor).st_size
        if self._filesystem.kind is not FilesystemKind.HUGETLBFS:
            os.posix_fallocate(descriptor, 0, size_bytes)  # a hole on a full disk would be a SIGBUS
            return map_shared(descriptor, size_bytes)
        mapping = map_shared(descriptor, size_bytes)
        populate(address_of(mapping), size_bytes, self._filesystem.page_bytes)
        return mapping

    def _value_of(self, descriptor: int) -> bytes | None:
        if os.fstat(descriptor).st_size < 2 * HEADER_BYTES:
            return None
        with self._map(descriptor) as self._mapping:
            return self.read()

    def _file_bytes(self) -> int:
        return file_bytes(self.capacity_bytes, self._filesystem)

    @property
    def _on_disk(self) -> bool:
        return self._filesystem.kind is FilesystemKind.OTHER

    def _sync(self) -> None:
        if self._on_disk:
            self._mapping.flush()
            os.fsync(self._descriptor)

    def _refusal(self, error: OSError) -> KVHearthError:
        what = f"cannot use {self.path} for {format_size(self.capacity_bytes)} ({error.strerror})"
        if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT, errno.EDQUOT):
            return KVHearthError(
                Reason.ARENA_UNUSABLE, f"{what}; give a directory the daemon may write to"
            )
        if self._filesystem.kind is FilesystemKind.HUGETLBFS:
            return KVHearthError(
                Reason.HUGEPAGES_UNAVAILABLE, f"{what}; raise the number of huge pages"
            )
        return KVHearthError(Reason.MEMORY_UNAVAILABLE, f"{what}; make room on its file system")


def file_bytes(capacity_bytes: int, filesystem: Filesystem) -> int:
    """Size of the file of a blob with this capacity."""
    unit = max(filesystem.page_bytes, mmap.PAGESIZE)
    # Halves of whole pages, so that a sync of one half never writes the other. A huge page holds
    # both, because no sync is needed there.
    if filesystem.kind is not FilesystemKind.HUGETLBFS:
        unit *= 2
    return -(-2 * (HEADER_BYTES + capacity_bytes) // unit) * unit


def peek(path: Path) -> bytes | None:
    """Read the newest complete value of a blob's file without changing it; None if there is none.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        data = read_own(path)
    except FileNotFoundError:
        return None
    half = len(data) // 2
    if half < HEADER_BYTES:
        return None
    found = [value for start in (0, half) if (value := _parse(data, start, half))]
    return max(found, key=lambda value: value[0])[1] if found else None


def framed(sequence: int, data: bytes) -> bytes:
    """A value with the header by which ``unframed`` knows it."""
    return _header(sequence, data) + data


def unframed(data: bytes) -> tuple[int, bytes] | None:
    """The sequence and the value of ``framed``; None if a bit of them is not as it was."""
    return _parse(data, 0, len(data)) if len(data) >= HEADER_BYTES else None


def _header(sequence: int, data: bytes | memoryview) -> bytes:
    fields = _FIELDS.pack(_MAGIC, _VERSION, 0, sequence, len(data))
    crc = zlib.crc32(fields, zlib.crc32(data))
    return (fields + _CRC.pack(crc)).ljust(HEADER_BYTES, b"\0")


_Bytes_co = TypeVar("_Bytes_co", bytes, memoryview, covariant=True)


class _Sliced(Protocol[_Bytes_co]):
    def __getitem__(self, part: slice, /) -> _Bytes_co: ...


def _parse(
    mapping: _Sliced[_Bytes_co], start: int, half_bytes: int
) -> tuple[int, _Bytes_co] | None:
    """(sequence, value) of the half at ``start``, or None if it is not complete."""
    header = mapping[start : start + HEADER_BYTES]
    magic, version, _, sequence, length = _FIELDS.unpack_from(header)
    if magic != _MAGIC or version != _VERSION or length > half_bytes - HEADER_BYTES:
        return None
    data = mapping[start + HEADER_BYTES : start + HEADER_BYTES + length]
    return (sequence, data) if header == _header(sequence, data) else None


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
