"""The findings of ``kvhearth doctor``: what is checked, what it means, and the line that fixes
it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator

from kvhearth_server.cli.checks_ssd import SSD_CHECKS
from kvhearth_server.cli.findings import Finding, Grade, Look, graded
from kvhearth_server.cli.output import size
from kvhearth_server.descriptors import needed, ssd_files
from kvhearth_server.memory.pages import MIB, THP_FIX, FilesystemKind, filesystem_kind

HUGE = 2 * MIB
CUDA_12_BRANCH = 525
"""The oldest branch of NVIDIA's driver on which CUDA 12 runs."""
REGISTERED_AT_ONCE_MAX = 512 << 30


def examine(look: Look) -> list[Finding]:
    """Every check, in the order of the table."""
    return [finding for check in CHECKS for finding in check(look)]


def hugepages(look: Look) -> Iterator[Finding]:
    """Enough free 2 MiB pages for the arena, in all and by NUMA node."""
    memory, policy = look.machine.memory, look.settings.hugepages
    needed = -(-look.settings.memory_bytes // HUGE)
    pool = memory.pool(HUGE)
    found = f"{pool.free} of {pool.total} pages of 2 MiB are free, the arena takes {needed}"
    if policy == "off":
        yield Finding("hugepages", Grade.OK, f"{found}; they are off")
    else:
        fix = pool.fix(needed, is_default=memory.default_hugepage_bytes() == HUGE)
        bad = Grade.FAIL if policy == "require" else Grade.WARN
        yield graded(pool.free >= needed, "hugepages", found, fix, bad)
    for node, part in look.machine.node_pools().items():
        found = f"{part.free} of {part.total} pages of 2 MiB are free"
        folder = f"/sys/devices/system/node/{node}/hugepages/hugepages-2048kB"
        fix = f"run: echo {needed} > {folder}/nr_hugepages"
        good = part.free or policy == "off"
        yield graded(good, f"hugepages.{node}", found, fix)


def memory_left(look: Look) -> Iterator[Finding]:
    """Enough memory where there are not enough huge pages."""
    memory, wanted = look.machine.memory, look.settings.memory_bytes
    huge_free = memory.pool(HUGE).free * HUGE if look.settings.hugepages != "off" else 0
    left = memory.available_bytes()
    if left is None:
        yield Finding("memory", Grade.OK, "what is available is not known")
        return
    found = f"{size(left)} are available, the arena takes {size(wanted)}"
    fix = f"set a smaller memory: kvhearth serve --memory {max(left * 3 // 4 // MIB, 64)}MiB"
    yield graded(max(left, huge_free) >= wanted, "memory", found, fix, Grade.FAIL)


def transparent(look: Look) -> Iterator[Finding]:
    """Transparent huge pages for memfds: the second best, if hugetlb pages run short."""
    setting = look.machine.memory.shmem_thp() or "not there"
    allowed = look.machine.memory.memfd_thp_allowed()
    yield graded(allowed, "thp", f"shmem_enabled is {setting}", THP_FIX)


def memlock(look: Look) -> Iterator[Finding]:
    """May the arena be locked (mlock, RDMA, registered buffers of io_uring)?"""
    limit = look.machine.limit(resource.RLIMIT_MEMLOCK)
    found = "no limit" if limit < 0 else f"at most {size(limit)} may be locked"
    fix = (
        "systemd: LimitMEMLOCK=infinity; docker run: --ulimit memlock=-1; "
        "shell: ulimit -l unlimited"
    )
    yield graded(limit < 0 or limit >= look.settings.memory_bytes, "memlock", found, fix)


def descriptors(look: Look) -> Iterator[Finding]:
    """Enough descriptors for the sessions and the SSD directories that the settings allow."""
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
    """Calls of newer kernels."""
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
    """NVIDIA's driver, which engines on its GPUs need; the daemon itself needs none."""
    gpus = look.machine.devices.nvidia()
    fix = (
        "install the driver on the host, then restart it: apt install nvidia-driver (Debian), "
        "ubuntu-drivers install --gpgpu (Ubuntu), dnf install nvidia-open (NVIDIA's repository)"
    )
    if not gpus.driver:
        count = f"{gpus.on_bus} GPUs of NVIDIA and no driver" if gpus.on_bus else "no NVIDIA GPU"
        told = f"{count}; the daemon needs none, engines copy by the CPU then"
        yield graded(gpus.on_bus == 0, "nvidia", told, fix)
        return
    kinds = [f"{gpus.models.count(model)} x {model}" for model in sorted(set(gpus.models))]
    told = f"driver {gpus.driver}, {', '.join(kinds) or 'no GPU'}"
    if gpus.nodes == 0:
        told += "; none can be opened here, as an engine's container must (--gpus all)"
    if look.settings.memory_bytes > REGISTERED_AT_ONCE_MAX:
        told += "; clients register such an arena in pieces, since r580 takes 512 GiB at once"
    if gpus.branch < CUDA_12_BRANCH:
        told += f"; CUDA 12 needs {CUDA_12_BRANCH} or newer"
    yield graded(gpus.branch >= CUDA_12_BRANCH, "nvidia", told, fix)


def directories(look: Look) -> Iterator[Finding]:
    """Where sockets and arena go."""
    place = look.settings.socket_dir
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    writable = os.access(existing, os.W_OK | os.X_OK)
    state = "writable" if writable else f"{existing} is not writable for user {os.getuid()}"
    fix = f"run: install -d -o {os.getuid()} -m 750 {place}"
    yield graded(writable, "socket_dir", f"{place}: {state}", fix, Grade.FAIL)
    arena = look.settings.arena_dir
    fix = "run: mkdir -p /dev/shm/kvhearth, then set arena_dir: /dev/shm/kvhearth"
    if arena is None:
        found = "none: a restart of the daemon starts with a cold cache"
        yield Finding("arena_dir", Grade.WARN, found, fix)
        return
    existing = next(folder for folder in (arena, *arena.parents) if folder.exists())
    kind = filesystem_kind(existing).kind
    good = kind is not FilesystemKind.OTHER and os.access(existing, os.W_OK | os.X_OK)
    told = f"{arena}: on {kind}, writable" if good else f"{arena}: no writable hugetlbfs or tmpfs"
    yield graded(good, "arena_dir", told, fix, Grade.FAIL)


def versions(look: Look) -> Iterator[Finding]:
    """The packages that the daemon needs."""
    for package in look.machine.packages():
        found = f"{package.version or 'not installed'}, at least {package.least} is needed"
        fix = f"run: pip install '{package.name}>={package.least}'"
        yield graded(package.enough, f"version.{package.name}", found, fix, Grade.FAIL)


CHECKS: tuple[Callable[[Look], Iterator[Finding]], ...] = (
    hugepages,
    memory_left,
    transparent,
    memlock,
    descriptors,
    kernel,
    *SSD_CHECKS,
    gpu_driver,
    directories,
    versions,
)
"""What is checked. A check yields one finding or more."""
