"""Kinds of pages that this machine offers, and mapping shared files on them without a SIGBUS.

``KernelMemory`` is the only access to ``/proc`` and ``/sys`` here; tests give it another root.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvhearth import shared_memory
from kvhearth.errors import KVHearthError, Reason
from kvhearth.memory_limits import MemoryLimit, address_space, memory_groups, mounts
from kvhearth.shared_memory import (
    MADV_DONTDUMP,
    Collapse,
    SharedMapping,
    advise,
)
from kvhearth_server.config.value_types import format_size

GIB = 1 << 30
MIB = 1 << 20
BASE_PAGE_BYTES = mmap.PAGESIZE

_TMPFS_MAGIC = 0x01021994
_HUGETLBFS_MAGIC = 0x958458F6

_THP_DIRECTORY = "sys/kernel/mm/transparent_hugepage"
_SHMEM_ENABLED = f"{_THP_DIRECTORY}/shmem_enabled"
_THP_ON = frozenset({"always", "within_size", "advise", "force"})
THP_FIX = f"run: echo advise > /{_SHMEM_ENABLED}"


class PageKind(enum.StrEnum):
    """The kind of pages behind a segment, best first."""

    HUGE_1G = "hugetlb-1GiB"
    HUGE_2M = "hugetlb-2MiB"
    THP = "thp"
    BASE = "4KiB"


class HugepagePolicy(enum.StrEnum):
    """Policy for huge pages.

    ``require``: hugetlb pages or an error; ``prefer``: the best available; ``off``: 4 KiB pages.
    """

    REQUIRE = "require"
    PREFER = "prefer"
    OFF = "off"


class FilesystemKind(enum.StrEnum):
    """Kinds of file systems that the memory code distinguishes."""

    HUGETLBFS = "hugetlbfs"
    TMPFS = "tmpfs"
    OTHER = "other"


@dataclass(frozen=True)
class Filesystem:
    """A mounted file system: its kind, page size, sizes and (tmpfs only) ``huge=`` option."""

    kind: FilesystemKind
    page_bytes: int
    free_bytes: int
    total_bytes: int
    huge_option: str = "never"

    def limits(self, folder: Path) -> list[MemoryLimit]:
        """Return the limit that the size of a tmpfs is for files in ``folder``, if it has one."""
        if self.kind is not FilesystemKind.TMPFS or not self.total_bytes:
            return []
        return [
            MemoryLimit(f"the size of the tmpfs of {folder}", self.total_bytes, self.free_bytes)
        ]


@dataclass(frozen=True)
class HugePool:
    """One pool of reserved huge pages, in pages; ``free`` excludes pages promised already."""

    page_bytes: int
    total: int
    free: int

    def fix(self, needed: int, *, is_default: bool) -> str:
        """The command that makes ``needed`` pages free."""
        target = self.total + max(needed - self.free, 0)
        if self.page_bytes >= GIB:
            return (
                f"boot with 'hugepagesz=1G hugepages={target}' on the kernel's command line, "
                f"or run: echo {target} > /{_pool_directory(self.page_bytes)}/nr_hugepages"
            )
        if is_default:
            return f"run: sysctl -w vm.nr_hugepages={target}"
        return f"run: echo {target} > /{_pool_directory(self.page_bytes)}/nr_hugepages"


class KernelMemory:
    """Reads the kernel's figures on memory below ``root`` (``/`` except in tests)."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def pool(self, page_bytes: int) -> HugePool:
        """The pool of huge pages of ``page_bytes``; empty if the kernel has no such pool."""
        directory = _pool_directory(page_bytes)

        def number(name: str) -> int:
            return int(self._text(f"{directory}/{name}") or "0")

        overcommit = max(number("nr_overcommit_hugepages") - number("surplus_hugepages"), 0)
        free = max(number("free_hugepages") - number("resv_hugepages"), 0) + overcommit
        return HugePool(page_bytes, number("nr_hugepages"), free)

    def pool_shortage(self, page_bytes: int, needed: int) -> str:
        """A sentence with the number of free pages, the number of needed pages, and the fix."""
        pool = self.pool(page_bytes)
        fix = pool.fix(needed, is_default=page_bytes == self.default_hugepage_bytes())
        return f"{pool.free} of {needed} pages of {format_size(page_bytes)} are free; {fix}"

    def default_hugepage_bytes(self) -> int:
        """The size of the pages that ``vm.nr_hugepages`` counts; 0 if there are none."""
        return self._meminfo_bytes("Hugepagesize") or 0

    def thp_bytes(self) -> int:
        """The size of a transparent huge page."""
        return int(self._text(f"{_THP_DIRECTORY}/hpage_pmd_size") or 2 * MIB)

    def shmem_thp(self) -> str:
        """The setting for memfds: always, within_size, advise, never, deny or force."""
        setting = self._chosen(_SHMEM_ENABLED)
        if setting in ("deny", "force"):
            return setting
        # Since Linux 6.10 each size has a switch of its own, which overrides the old one.
        kib = self.thp_bytes() // 1024
        own = self._chosen(f"{_THP_DIRECTORY}/hugepages-{kib}kB/shmem_enabled")
        return setting if own in ("", "inherit") else own

    def memfd_thp_allowed(self) -> bool:
        """Whether MADV_HUGEPAGE has an effect on a memfd (not with the kernel's default)."""
        return self.shmem_thp() in _THP_ON

    def tmpfs_thp_allowed(self, filesystem: Filesystem) -> bool:
        """Whether MADV_HUGEPAGE has an effect there; a mounted tmpfs has its own option."""
        setting = self._chosen(_SHMEM_ENABLED)
        if setting in ("deny", "force"):
            return setting == "force"
        return filesystem.huge_option in _THP_ON

    def limits(self) -> list[MemoryLimit]:
        """Return all limits of memory that can be taken without swapping or an OOM kill."""
        return [*self.page_limits(), *self.address_space()]

    def page_limits(self) -> list[MemoryLimit]:
        """Return those that pages count against, whether they are mapped or not yet.

        MemAvailable is the host's, even inside a container, whose control groups have their own.
        """
        groups = (each for group in memory_groups(self._root) for each in group.limits())
        return [*self._machine_limit(), *groups]

    def address_space(self) -> list[MemoryLimit]:
        """Return the limit of this process's mappings, if it has one."""
        return address_space(self._root)

    def pmd_mapped_bytes(self, address: int) -> int:
        """Bytes of this process's mapping at ``address`` that are in transparent huge pages."""
        inside = False
        for line in (self._text("proc/self/smaps") or "").splitlines():
            word = line.split(maxsplit=1)[0] if line else ""
            if "-" in word and not word.endswith(":"):
                start, end = (int(part, 16) for part in word.split("-"))
                inside = start <= address < end
            elif inside and word == "ShmemPmdMapped:":
                return int(line.split()[1]) * 1024
        return 0

    def advise(self, address: int, size_bytes: int, advice: int) -> int:
        """Call ``madvise``; return the error's number, 0 for none."""
        return advise(address, size_bytes, advice)

    def collapse(self) -> Collapse:
        """A collapse of mappings into transparent huge pages, which works with any setting except
        ``deny``.
        """
        return Collapse(self.thp_bytes(), self.advise)

    def collapses(self) -> int:
        """Collapse a huge page, as a trial; return the error's number, 0 for none."""
        size_bytes, trial = self.thp_bytes(), self.collapse()
        descriptor = make_memfd("kvhearth-trial", size_bytes)
        try:
            mapping = SharedMapping(descriptor, size_bytes, size_bytes)
            return 0 if trial.fill(mapping.address, size_bytes) else trial.error
        except OSError as error:
            return error.errno or errno.ENOMEM
        finally:
            os.close(descriptor)

    def _machine_limit(self) -> list[MemoryLimit]:
        total, free = (self._meminfo_bytes(name) for name in ("MemTotal", "MemAvailable"))
        name = "MemAvailable of /proc/meminfo"
        return [] if free is None else [MemoryLimit(name, total or free, free)]

    def _meminfo_bytes(self, name: str) -> int | None:
        for line in (self._text("proc/meminfo") or "").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        return None

    def _chosen(self, relative: str) -> str:
        """The word in brackets of a file such as ``always [never] deny``."""
        text = self._text(relative) or ""
        return text.partition("[")[2].partition("]")[0]

    def _text(self, relative: str) -> str | None:
        try:
            return (self._root / relative).read_text(encoding="utf-8").strip()
        except OSError:
            return None


class _StatFs(ctypes.Structure):
    """``struct statfs`` of the 64-bit Linux platforms, as far as it is needed."""

    _fields_ = (
        ("f_type", ctypes.c_long),
        ("f_bsize", ctypes.c_long),
        ("f_blocks", ctypes.c_ulong),
        ("f_bfree", ctypes.c_ulong),
        ("f_bavail", ctypes.c_ulong),
        ("rest", ctypes.c_char * 256),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def filesystem_kind(path: Path) -> Filesystem:
    """The file system that ``path`` (an existing file or directory) is on.

    Raises:
        OSError: ``path`` does not exist or cannot be reached.
    """
    facts = _StatFs()
    if _libc.statfs(os.fsencode(path), ctypes.byref(facts)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    magic = facts.f_type & 0xFFFFFFFF
    block_bytes = int(facts.f_bsize)
    free, total = int(facts.f_bavail) * block_bytes, int(facts.f_blocks) * block_bytes
    if magic == _HUGETLBFS_MAGIC:
        return Filesystem(FilesystemKind.HUGETLBFS, block_bytes, free, total)
    if magic == _TMPFS_MAGIC:
        # A tmpfs without a size limit reports 0 blocks: total_bytes is 0 then.
        option = _huge_option(path)
        return Filesystem(FilesystemKind.TMPFS, BASE_PAGE_BYTES, free, total, option)
    return Filesystem(FilesystemKind.OTHER, BASE_PAGE_BYTES, free, total)


def _huge_option(path: Path) -> str:
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    options = (option for each in mounts() if each.device == wanted for option in each.options)
    return next((each[5:] for each in options if each.startswith("huge=")), "never")


def _pool_directory(page_bytes: int) -> str:
    return f"sys/kernel/mm/hugepages/hugepages-{page_bytes // 1024}kB"


@contextlib.contextmanager
def closed_on_failure(descriptor: int) -> Iterator[contextlib.ExitStack]:
    """Close ``descriptor`` unless the block succeeds; further undo callbacks may be added."""
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        yield undo
        undo.pop_all()


_MFD_NOEXEC_SEAL = 0x0008
_SEAL_FUTURE_WRITE = 0x0010


def make_memfd(name: str, size_bytes: int, flags: int = 0) -> int:
    """Make a memfd that ``seal`` can seal; it has no pages yet.

    Raises:
        OSError: the kernel has no such memory.
    """
    flags |= os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        # vm.memfd_noexec=2 (Linux 6.3) refuses a memfd without this flag.
        descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create(name, flags)
    with closed_on_failure(descriptor):
        os.ftruncate(descriptor, size_bytes)
    return descriptor


def seal(descriptor: int, *, read_only: bool = False) -> None:
    """Let nobody resize a memfd; with ``read_only``, nobody make another writable mapping of it."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | (_SEAL_FUTURE_WRITE if read_only else 0))


def address_of(mapping: mmap.mmap) -> int:
    """Start address of the mapping in this process."""
    return int(np.frombuffer(mapping, np.uint8, count=1).ctypes.data)


def map_file(descriptor: int, size_bytes: int, align_bytes: int = 1) -> SharedMapping:
    """Map a whole file read-write, at a border of its huge pages; this reserves hugetlb pages. A
    core dump leaves the mapping out, as far as the kernel allows it.

    Raises:
        OSError: ENOMEM if there are too few huge pages.
    """
    mapping = SharedMapping(descriptor, size_bytes, align_bytes)
    mapping.advise(MADV_DONTDUMP)
    return mapping


def populate(address: int, size_bytes: int, page_bytes: int) -> None:
    """Fault in a part of a shared mapping, in whole pages; contents do not change.

    Raises:
        OSError: ENOSPC, ENOMEM or EFAULT if a page is unavailable (an error, not a SIGBUS).
    """
    if number := shared_memory.populate(address, size_bytes, page_bytes):
        raise OSError(number, os.strerror(number))


# Linux's numbers; the standard library's fcntl lacks the names.
_F_OFD_GETLK = 36
_F_OFD_SETLK = 37
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid on 64-bit Linux


class PageSource(Protocol):
    """Source of the pages of one mapped segment.

    Attributes:
        kind, page_bytes: kind and size of the pages; ``settle`` corrects what was hoped for.
        huge_bytes: bytes in huge pages of any kind, once it has settled.
    """

    kind: PageKind
    page_bytes: int
    huge_bytes: int

    def fill(self, address: int, size_bytes: int) -> None:
        """Take the pages of a part, which begins and ends at borders of pages.

        Raises:
            OSError: there is no memory for a page.
        """

    def settle(self, populated_bytes: int) -> str:
        """Look what pages there are, after these bytes have got theirs; return what is wrong, or
        "".
        """

    def limits(self, start: int, size_bytes: int) -> list[MemoryLimit]:
        """Return the limits that the pages which a part lacks count against; none if it has all."""


class Segment:
    """One region of memory that daemon and clients map.

    Attributes:
        bytes: its size.
        source: where its pages come from.
        path: its file, or None for a memfd.
        fd: the daemon's own descriptor. Never pass it to a client: see ``lock_client_byte``.
        view: the bytes, ``u8`` of shape (bytes,), writable.
        address: start of ``view`` in this process.
        nodes: NUMA node of each unit of its placement, ``i64``; empty without one.
        steps_down: for each better kind of page that was unavailable, a sentence with the fix.
    """

    def __init__(
        self,
        fd: int,
        mapping: SharedMapping,
        source: PageSource,
        *,
        path: Path | None = None,
        steps_down: list[str] | None = None,
    ) -> None:
        self.fd = fd
        self.bytes = mapping.size_bytes
        self.source = source
        self.path = path
        self.steps_down = steps_down if steps_down is not None else []
        self.address = mapping.address
        self.view: npt.NDArray[np.uint8] = np.asarray(mapping)
        self.nodes: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def page_kind(self) -> PageKind:
        """The kind of its pages; hoped for, until all have been taken."""
        return self.source.kind

    @property
    def page_bytes(self) -> int:
        """The size of its pages, likewise."""
        return self.source.page_bytes

    @property
    def huge_bytes(self) -> int:
        """Bytes of it in huge pages of any kind, after it was populated."""
        return self.source.huge_bytes

    def populate(self, start: int, size_bytes: int) -> None:
        """Take the pages of a part and fault them in; contents do not change.

        Raises:
            OSError: there is no memory for a page. To touch the part could be a SIGBUS.
        """
        page = self.source.page_bytes
        first, end = start // page * page, min(-(-(start + size_bytes) // page) * page, self.bytes)
        self.source.fill(self.address + first, end - first)

    def settle(self, populated_bytes: int) -> None:
        """Look what pages it has got, and note what is wrong; after it was populated."""
        note = self.source.settle(populated_bytes)
        if note and note not in self.steps_down:
            self.steps_down.append(note)

    def reopen(self) -> int:
        """Open a new file description of the same memory, read-write; the caller closes it."""
        # Through /proc even for files: by now the path may name another file, or none.
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def lock_client_byte(self, index: int) -> int:
        """Open a description with an OFD write lock on byte ``index``; returns its descriptor.

        Pass it to the client and close it. The lock then lasts while the client has the descriptor
        or maps the memory through it, and is not ended by close, fork or kill -9 of one of several
        holders.

        Raises:
            KVHearthError: ``ARENA_BUSY`` if an earlier client still holds that byte.
        """
        descriptor = self.reopen()
        try:
            fcntl.fcntl(descriptor, _F_OFD_SETLK, _byte_lock(index))
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise KVHearthError(
                Reason.ARENA_BUSY,
                f"client byte {index} is still held by an earlier client; take another index",
            ) from None
        return descriptor

    def client_byte_held(self, index: int) -> bool:
        """Whether any process still holds or maps the result of ``lock_client_byte(index)``."""
        answer = fcntl.fcntl(self.fd, _F_OFD_GETLK, _byte_lock(index))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def held_bytes(self) -> list[int]:
        """The client bytes that any process still holds or maps, ascending."""
        found: list[int] = []
        while True:
            start = found[-1] + 1 if found else 0
            # A length of zero stands for everything from ``start`` on.
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 0, 0)
            kind, _, first, _, _ = _FLOCK.unpack(fcntl.fcntl(self.fd, _F_OFD_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                return found
            found.append(max(first, start))

    @property
    def surplus_bytes(self) -> int:
        """Bytes of the file beyond the mapping, left over from a larger arena."""
        return os.fstat(self.fd).st_size - self.bytes

    def trim(self) -> None:
        """Free the surplus; a process that still maps that part gets a SIGBUS on touching it."""
        os.ftruncate(self.fd, self.bytes)

    def close(self) -> None:
        """Unmap and close; a file stays. Closing twice does nothing.

        While another holder keeps an array over ``view``, the mapping lives until that array is
        gone.
        """
        if self.fd < 0:
            return
        self.view = np.empty(0, np.uint8)
        os.close(self.fd)
        self.fd = -1


def _byte_lock(index: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
