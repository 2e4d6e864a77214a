"""The checks of ``kvhearth doctor``: each yields findings, their meaning, and the line that fixes
them.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator

from kvhearth.errors import KVHearthError
from kvhearth_server.cli.doctor.checks_ssd import SSD_CHECKS
from kvhearth_server.cli.doctor.finding import Finding, Grade, Look, graded
from kvhearth_server.cli.output import size
from kvhearth_server.config.model import Settings
from kvhearth_server.config.rlimit import needed, ssd_files
from kvhearth_server.memory.page_kinds import (
    MIB,
    THP_FIX,
    Filesystem,
    FilesystemKind,
    filesystem_kind,
)
from kvhearth_server.memory.plan import room_of
from kvhearth_server.preflight import arena_plan, problems

HUGE = 2 * MIB
CUDA_12_BRANCH = 525
"""The oldest branch of NVIDIA's driver on which CUDA 12 runs."""
REGISTERED_AT_ONCE_MAX = 512 << 30


def examine(look: Look) -> tuple[list[Finding], KVHearthError | None]:
    """Run every check, in the order of the table; return the findings and the error with which a
    start would end.
    """
    found = {each.check: each for check in CHECKS for each in check(look)}
    errors = list(problems(look.settings, look.machine.memory, look.machine.disk_interface))
    for name, error in errors:
        if name not in found or found[name].grade is not Grade.FAIL:
            message, _, fix = error.message.partition("; ")
            found[name] = Finding(name, Grade.FAIL, message, fix)
    return list(found.values()), errors[0][1] if errors else None


def hugepages(look: Look) -> Iterator[Finding]:
    """Check for enough free huge pages for the arena, in all and by NUMA node."""
    memory, settings = look.machine.memory, look.settings
    place = _arena_place(settings)
    page_bytes = place.page_bytes if place and place.kind is FilesystemKind.HUGETLBFS else HUGE
    room = room_of(arena_plan(settings).geometry, place)
    needed, pool = -(-room.bytes // page_bytes), memory.pool(page_bytes)
    found = f"{pool.free} of {pool.total} pages of {size(page_bytes)} are free, "
    found += f"the arena takes {needed} ({room})"
    if settings.hugepages == "off":
        yield Finding("hugepages", Grade.OK, f"{found}; they are off")
    elif place and place.kind is FilesystemKind.TMPFS:
        yield Finding("hugepages", Grade.OK, f"none are taken: {settings.arena_dir} is on tmpfs")
    else:
        fix = pool.fix(needed, is_default=memory.default_hugepage_bytes() == page_bytes)
        # Pages of an earlier run's files are not free, but the arena already has them.
        good = pool.free >= needed or place is not None
        yield graded(good, "hugepages", found, fix)
    for node, part in look.machine.node_pools().items():
        found = f"{part.free} of {part.total} pages of 2 MiB are free"
        folder = f"/sys/devices/system/node/{node}/hugepages/hugepages-2048kB"
        fix = f"run: echo {needed} > {folder}/nr_hugepages"
        there = part.free or settings.hugepages == "off"
        yield graded(there, f"hugepages.{node}", found, fix)


def memory_left(look: Look) -> Iterator[Finding]:
    """Check the memory that is available beside the arena."""
    wanted = room_of(arena_plan(look.settings).geometry, _arena_place(look.settings)).bytes
    left = look.machine.memory.available_bytes()
    known = "what is available is not known" if left is None else f"{size(left)} are available"
    yield Finding("memory", Grade.OK, f"{known}, the arena takes {size(wanted)}")


def _arena_place(settings: Settings) -> Filesystem | None:
    """Return the file system of the arena's directory, or of the one that it will be made in; None
    for an anonymous arena, or no directory.
    """
    folder = settings.arena_dir
    if folder is None:
        return None
    place = folder if os.path.lexists(folder) else folder.parent
    return filesystem_kind(place) if os.path.isdir(place) else None


def transparent(look: Look) -> Iterator[Finding]:
    """Check transparent huge pages for memfds: the second best, if hugetlb pages run short."""
    setting = look.machine.memory.shmem_thp() or "not there"
    allowed = look.machine.memory.memfd_thp_allowed()
    yield graded(allowed, "thp", f"shmem_enabled is {setting}", THP_FIX)


def descriptors(look: Look) -> Iterator[Finding]:
    """Check for enough descriptors for the sessions and the SSD directories that the settings
    allow.
    """
    limit, settings = look.machine.limit(resource.RLIMIT_NOFILE), look.settings
    wanted = needed(settings)
    found = f"{'no limit' if limit < 0 else limit}, {settings.sessions_max} sessions"
    if settings.ssd_dirs:
        found += f" and {ssd_files(settings)} files of the SSD tier"
    found += " take up to"
    fix = (
        f"systemd: LimitNOFILE={wanted}; docker run: --ulimit nofile={wanted}; "
        f"shell: ulimit -n {wanted}"
    )
    yield graded(limit < 0 or limit >= wanted, "nofile", f"{found} {wanted}", fix)


def kernel(look: Look) -> Iterator[Finding]:
    """Check for system calls of newer kernels."""
    release = look.machine.kernel_release()
    yield graded(
        look.machine.peer_pidfd(),
        "peer_pidfd",
        f"SO_PEERPIDFD (Linux 6.5), this is {release}",
        "run a kernel of 6.5 or newer; until then a dead client's slots rest for "
        f"drain_grace_no_pidfd_s = {look.settings.drain_grace_no_pidfd_s:g} s",
    )
    yield graded(
        look.machine.populate(),
        "populate",
        f"MADV_POPULATE_WRITE (Linux 5.14), this is {release}",
        "run a kernel of 5.14 or newer; until then memory that runs out at start is a SIGBUS",
    )


def gpu_driver(look: Look) -> Iterator[Finding]:
    """Check NVIDIA's driver, which engines on its GPUs need; the daemon itself needs none."""
    gpus = look.machine.devices.nvidia()
    fix = (
        "install the driver on the host, then restart it: apt install nvidia-driver (Debian), "
        "ubuntu-drivers install --gpgpu (Ubuntu), dnf install nvidia-open (NVIDIA's repository)"
    )
    if not gpus.driver:
        count = f"{gpus.on_bus} GPUs of NVIDIA and no driver" if gpus.on_bus else "no NVIDIA GPU"
        message = f"{count}; the daemon needs none, engines copy by the CPU then"
        yield graded(gpus.on_bus == 0, "nvidia", message, fix)
        return
    kinds = [f"{gpus.models.count(model)} x {model}" for model in sorted(set(gpus.models))]
    message = f"driver {gpus.driver}, {', '.join(kinds) or 'no GPU'}"
    if gpus.nodes == 0:
        message += "; none can be opened here, as an engine's container must (--gpus all)"
    if look.settings.memory_bytes > REGISTERED_AT_ONCE_MAX:
        message += "; clients register such an arena in pieces, since r580 takes 512 GiB at once"
    if gpus.branch < CUDA_12_BRANCH:
        message += f"; CUDA 12 needs {CUDA_12_BRANCH} or newer"
    yield graded(gpus.branch >= CUDA_12_BRANCH, "nvidia", message, fix)


def directories(look: Look) -> Iterator[Finding]:
    """Check the places of sockets, HTTP and arena; ``problems`` names their faults."""
    yield Finding("socket_dir", Grade.OK, f"{look.settings.socket_dir}: can be used")
    yield Finding("http", Grade.OK, f"{look.settings.http}: can be used")
    arena = look.settings.arena_dir
    if arena is None:
        fix = "run: mkdir -p /dev/shm/kvhearth, then set arena_dir: /dev/shm/kvhearth"
        found = "none: a restart of the daemon starts with a cold cache"
        yield Finding("arena_dir", Grade.WARN, found, fix)
        return
    place = _arena_place(look.settings)
    yield Finding("arena_dir", Grade.OK, f"{arena}: on {place.kind if place else 'nothing'}")


def versions(look: Look) -> Iterator[Finding]:
    """Check the packages that the daemon needs."""
    for package in look.machine.packages():
        found = f"{package.version or 'not installed'}, at least {package.least} is needed"
        fix = f"run: pip install '{package.name}>={package.least}'"
        yield graded(package.enough, f"version.{package.name}", found, fix, Grade.FAIL)


CHECKS: tuple[Callable[[Look], Iterator[Finding]], ...] = (
    hugepages,
    memory_left,
    transparent,
    descriptors,
    kernel,
    *SSD_CHECKS,
    gpu_driver,
    directories,
    versions,
)
"""The table of checks. A check yields one finding or more."""
