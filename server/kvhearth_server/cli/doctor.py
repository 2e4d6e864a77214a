"""``kvhearth doctor``: checks whether this machine is ready, and names the line that fixes it.

``fail`` keeps the daemon from starting with these settings; ``warn`` costs speed or a feature.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from kvhearth import native
from kvhearth.errors import KVHearthError
from kvhearth.memory_limits import tightest
from kvhearth_server.cli.app import exit_code
from kvhearth_server.cli.config import with_flags
from kvhearth_server.cli.machine import GOOD_FILESYSTEMS, DirectoryFacts, Drive, Machine
from kvhearth_server.cli.output import AsJson, Config, flag, say, size, waiting
from kvhearth_server.config.load import Settings, load_settings
from kvhearth_server.config.model import HUGEPAGE_BYTES
from kvhearth_server.config.rlimit import limit_fix, needed, ssd_files
from kvhearth_server.config.value_types import SsdDir, format_size
from kvhearth_server.memory.mapping import MIB, THP_FIX, Filesystem, FilesystemKind, filesystem_kind
from kvhearth_server.memory.plan import Room, room_of
from kvhearth_server.preflight import arena_plan, problems
from kvhearth_server.tier_startup import fleet_key, unusable_ssd_dir
from kvhearth_server.tiers.remote.url import lifecycle_rule, parse_remote
from kvhearth_server.tiers.ssd.disk.probe import choose
from kvhearth_server.tiers.ssd.settings import capacity_least, segment_bytes_for
from kvhearth_server.transport.reports import Finding, Grade


@dataclass(frozen=True)
class Look:
    """Input of the checks: a machine, for a daemon with these settings.

    Args:
        folder: directory in which direct IO is tried.
        serving: a daemon with these settings runs, and has its directories.
    """

    machine: Machine
    settings: Settings
    folder: Path
    serving: bool = False

    @property
    def arena_place(self) -> Filesystem | None:
        """The file system of the arena's directory, made or to be made; None without one."""
        folder = self.settings.arena_dir
        if folder is None:
            return None
        place = folder if os.path.lexists(folder) else folder.parent
        return filesystem_kind(place) if os.path.isdir(place) else None

    @property
    def room(self) -> Room:
        """Bytes that the arena takes."""
        return room_of(arena_plan(self.settings).geometry, self.arena_place)


def graded(good: object, check: str, found: str, fix: str) -> Finding:
    """Return a finding of ``found``: ok if ``good``, else a warning with its fix."""
    return Finding(check, Grade.OK, found) if good else Finding(check, Grade.WARN, found, fix)


_BAD_FILESYSTEMS = {
    "tmpfs": "is memory",
    "overlay": "is a container's own layer, which ends with it",
    "btrfs": "writes anew where it is to write in place",
    "zfs": "writes anew where it is to write in place",
    "nfs": "is on another machine",
    "nfs4": "is on another machine",
}
_LIBAIO_FIX = (
    "run: sysctl -w fs.aio-max-nr=1048576; in a container, allow io_setup, io_submit, io_getevents "
    "and io_destroy in its seccomp profile"
)
_THREADS_FIX = "see the error: preadv and pwritev must be allowed"


def interface(look: Look) -> Iterator[Finding]:
    """Check the kernel interface for disk I/O that a daemon with these settings takes."""
    wanted = look.settings.ssd_interface
    try:
        name, tried = choose(wanted, look.settings.ssd_depth, look.machine.disk_interface)
    except OSError as error:
        fix = "set ssd_interface: auto; or " if wanted != "auto" else ""
        fix += _LIBAIO_FIX if wanted == "libaio" else _THREADS_FIX
        yield Finding("ssd_interface", Grade.WARN, f"{wanted} -> none; {error.strerror}", fix)
        return
    passed_over = [f"not {each.name}: {each.reason}" for each in tried if not each.works]
    found = "; ".join([f"{wanted} -> {name}", *passed_over])
    yield graded(not passed_over, "ssd_interface", found, _LIBAIO_FIX)


def places(look: Look) -> Iterator[Finding]:
    """Check each directory of the SSD tier; without one, the directory that could be one."""
    if not look.settings.ssd_dirs:
        fix = "name a directory on ext4 or xfs: kvhearth doctor --dir DIR"
        yield _direct(look, "o_direct", look.folder, fix)
        yield _drive(look, "drive", look.machine.place(look.folder))
    for number, each in enumerate(look.settings.ssd_dirs, 1):
        yield from _ssd_dir(look, f"ssd.{number}", each)


def _ssd_dir(look: Look, name: str, wanted: SsdDir) -> Iterator[Finding]:
    if not look.serving and (message := unusable_ssd_dir(wanted.path)):
        # The tier works without it; if it is the only one, the start is refused (``problems``).
        found, _, fix = message.partition("; ")
        yield Finding(name, Grade.WARN, found, fix)
        return
    existing = wanted.path if wanted.path.is_dir() else wanted.path.parent
    state = "is there" if existing == wanted.path else "is made at the start"
    yield Finding(name, Grade.OK, f"{wanted.path}: {state}")
    fix = f"move it to ext4 or xfs: --ssd-dir DIR={format_size(wanted.bytes)}"
    place = look.machine.place(existing)
    yield _direct(look, f"{name}.o_direct", existing, fix)
    yield _filesystem(f"{name}.filesystem", place, fix)
    yield _space(look, f"{name}.space", wanted, existing)
    yield _drive(look, f"{name}.drive", place)
    yield from _discard(look, f"{name}.discard", place)


def _direct(look: Look, name: str, folder: Path, fix: str) -> Finding:
    """Check O_DIRECT, which the SSD tier needs to be fast."""
    problem = look.machine.direct_io(folder)
    return graded(not problem, name, f"{folder}: {problem or 'works'}", fix)


def _filesystem(name: str, place: DirectoryFacts, fix: str) -> Finding:
    """Check for a file system that preallocates and writes in place, and that is not the root's."""
    folder, mount = place.folder, place.mount
    if mount is None:
        return Finding(name, Grade.OK, f"{folder}: not known")
    found = f"{mount.kind}, mounted at {mount.point}"
    if mount.kind in GOOD_FILESYSTEMS:
        fix = f"mount a drive of its own there, unless this is meant: {folder} is on the system's"
        return graded(mount.point != Path("/"), name, found, fix)
    why = _BAD_FILESYSTEMS.get(mount.kind, "was not tried here")
    return Finding(name, Grade.WARN, f"{found}: it {why}", fix)


def _space(look: Look, name: str, wanted: SsdDir, existing: Path) -> Finding:
    """Check for room for the whole capacity, less the bytes that the directory already has."""
    free, taken = look.machine.space(existing, wanted.path)
    found = f"{size(wanted.bytes)} are wanted, {size(taken)} taken, {size(free)} free"
    most = (free + taken) * 9 // 10 // MIB
    segment_bytes = look.settings.ssd_segment_bytes or segment_bytes_for(most * MIB)
    least = capacity_least(segment_bytes)
    if not free + taken:
        fix = "nothing can be stored there: name a directory on another file system"
    elif most * MIB < least:
        fix = f"even the least, {size(least)}, has no room: free some, or name another directory"
    else:
        fix = f"free some, or ask for less: --ssd-dir {wanted.path}={most}MiB"
    return graded(wanted.bytes <= taken + free, name, found, fix)


def _drive(look: Look, name: str, place: DirectoryFacts) -> Finding:
    """Check for an NVMe drive under the directory."""
    found = f"{place.folder}: on {' and '.join(map(_named, place.drives))}"
    if not place.drives:
        found += "no drive that is known"
    if place.on_nvme:
        return Finding(name, Grade.OK, found)
    others = [each for each in look.machine.drives() if each.nvme and each not in place.drives]
    if others:
        found += f"; there is {' and '.join(map(_named, others))}"
        fix = f"mount a file system of {others[0].name}, then: kvhearth doctor --dir DIR"
    else:
        found += "; this machine has no NVMe drive"
        fix = (
            "only for an SSD tier: add an NVMe drive (in a cloud, take a machine with local "
            "ones), mount its file system, then: kvhearth doctor --dir DIR"
        )
    return Finding(name, Grade.WARN, found, fix)


def _discard(look: Look, name: str, place: DirectoryFacts) -> Iterator[Finding]:
    """Check whether the drive learns which space is free: otherwise it wears out and slows down."""
    mount = place.mount
    if mount is None or not any(each.discards for each in place.drives):
        return
    by_mount, by_timer = "discard" in mount.options, look.machine.trims_weekly()
    how = "at once" if by_mount else "weekly" if by_timer else "never"
    found = f"{mount.point}: the drive is told {how} which of its blocks are free"
    fix = "run: systemctl enable --now fstrim.timer; once, before the first start: fstrim "
    yield graded(by_mount or by_timer, name, found, fix + str(mount.point))


def _named(each: Drive) -> str:
    kind = "" if each.nvme else "not NVMe"
    return f"{each.name} ({', '.join(filter(None, (each.model, size(each.bytes), kind)))})"


CUDA_12_BRANCH = 525
"""The oldest branch of NVIDIA's driver on which CUDA 12 runs."""
REGISTERED_AT_ONCE_MAX = 512 << 30


def examine(look: Look) -> tuple[list[Finding], KVHearthError | None]:
    """Run all checks in the table's order; return findings, and the error that ends a start."""
    found = {each.check: each for check in CHECKS for each in check(look)}
    errors = list(problems(look.settings, look.machine.memory, look.machine.disk_interface))
    for name, error in errors:
        message, _, fix = error.message.partition("; ")
        if name not in found or found[name].grade is Grade.OK:
            found[name] = Finding(name, Grade.FAIL, message, fix)
        found[name] = dataclasses.replace(found[name], grade=Grade.FAIL)
    return list(found.values()), errors[0][1] if errors else None


def hugepages(look: Look) -> Iterator[Finding]:
    """Check for enough free huge pages for the arena, in all and by NUMA node."""
    memory, settings = look.machine.memory, look.settings
    place, room, page_bytes = look.arena_place, look.room, HUGEPAGE_BYTES
    if place and place.kind is FilesystemKind.HUGETLBFS:
        page_bytes = place.page_bytes
    needed, pool = -(-room.bytes // page_bytes), memory.pool(page_bytes)
    found = f"{pool.free} of {pool.total} pages of {size(page_bytes)} are free, "
    found += f"the arena takes {needed} ({room})"
    if settings.hugepages == "off":
        yield Finding("hugepages", Grade.OK, f"{found}; they are off")
        return
    if place and place.kind is FilesystemKind.TMPFS:
        yield Finding("hugepages", Grade.OK, f"none are taken: {settings.arena_dir} is on tmpfs")
        return
    fix = pool.fix(needed, is_default=memory.default_hugepage_bytes() == page_bytes)
    # Pages of an earlier run's files are not free, but the arena already has them.
    yield graded(pool.free >= needed or place is not None, "hugepages", found, fix)
    for node, part in look.machine.node_pools().items():
        found = f"{part.free} of {part.total} pages of 2 MiB are free"
        folder = f"/sys/devices/system/node/{node}/hugepages/hugepages-2048kB"
        fix = f"run: echo {needed} > {folder}/nr_hugepages"
        yield graded(part.free, f"hugepages.{node}", found, fix)


def memory_left(look: Look) -> Iterator[Finding]:
    """Tell the memory that the tightest limit leaves, and that of the arena."""
    limits = look.machine.memory.limits()
    if (place := look.arena_place) is not None and look.settings.arena_dir is not None:
        limits += place.limits(look.settings.arena_dir)
    left = tightest(limits)
    known = "what is available is not known"
    if left is not None:
        known = f"{size(left.free_bytes)} are available by {left.name}"
    yield Finding("memory", Grade.OK, f"{known}, the arena takes {size(look.room.bytes)}")


def transparent(look: Look) -> Iterator[Finding]:
    """Check transparent huge pages for memfds, also by a trial: the second best, if hugetlb pages
    run short.
    """
    memory = look.machine.memory
    found = f"shmem_enabled is {memory.shmem_thp() or 'not there'}, pages "
    if error := look.machine.collapse():
        found += f"cannot be collapsed ({os.strerror(error)}; MADV_COLLAPSE needs Linux 6.1)"
    else:
        found += f"of {size(memory.thp_bytes())} are collapsed out of small ones (MADV_COLLAPSE)"
    yield graded(not error or memory.memfd_thp_allowed(), "thp", found, THP_FIX)


def descriptors(look: Look) -> Iterator[Finding]:
    """Check for enough descriptors for the sessions and SSD directories that the settings allow."""
    limit, settings = look.machine.descriptors(), look.settings
    wanted = needed(settings)
    found = f"{'no limit' if limit < 0 else limit}, {settings.sessions_max} sessions"
    if settings.ssd_dirs:
        found += f" and {ssd_files(settings)} files of the SSD tier"
    found += " take up to"
    good = limit < 0 or limit >= wanted
    yield graded(good, "nofile", f"{found} {wanted}", limit_fix(wanted))


def kernel(look: Look) -> Iterator[Finding]:
    """Check for system calls of newer kernels."""
    release = platform.release()
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


def remote(look: Look) -> Iterator[Finding]:
    """Check the remote by a helper process of its own: create, read, compare, delete."""
    if not look.settings.remote:
        return
    try:
        key = fleet_key(look.settings)
    except KVHearthError:
        return  # the settings' own check has named it
    url = parse_remote(look.settings.remote)
    problem = look.machine.remote_problem(url, key)
    found, _, fix = problem.partition("; ") if problem else ("", "", "")
    works = f"{url.place}: wrote, read, compared and removed a value"
    yield graded(not problem, "remote", found or works, fix or "see the message")
    if url.scheme in ("s3", "gs", "az"):
        yield Finding("remote.lifecycle", Grade.OK, lifecycle_rule(url))


def gpu_driver(look: Look) -> Iterator[Finding]:
    """Check NVIDIA's driver, which engines on its GPUs need; the daemon itself needs none."""
    gpus = look.machine.nvidia()
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
    if look.serving:
        return
    yield Finding("socket_dir", Grade.OK, f"{look.settings.socket_dir}: can be used")
    yield Finding("http", Grade.OK, f"{look.settings.http}: can be used")
    arena = look.settings.arena_dir
    if arena is None:
        fix = "run: mkdir -p /dev/shm/kvhearth, then set arena_dir: /dev/shm/kvhearth"
        fallback = look.settings.arena_fallback.partition(";")[0]
        found = f"none: {fallback or 'a restart of the daemon starts with a cold cache'}"
        yield Finding("arena_dir", Grade.WARN, found, fix)
        return
    kind = look.arena_place.kind if look.arena_place else "nothing"
    yield Finding("arena_dir", Grade.OK, f"{arena}: on {kind}")


def native_module(look: Look) -> Iterator[Finding]:
    """Check the native module, without which copies and lookups run in numpy."""
    found, _, fix = (look.machine.native_problem() or "in use").partition("; ")
    yield graded(found == "in use", "native", found, fix or f"unset {native.VARIABLE}")


CHECKS: tuple[Callable[[Look], Iterator[Finding]], ...] = (
    hugepages,
    memory_left,
    transparent,
    descriptors,
    kernel,
    places,
    interface,
    remote,
    gpu_driver,
    directories,
    native_module,
)
"""The table of checks. A check yields one finding or more."""


def worse_than_ok(settings: Settings) -> list[Finding]:
    """Return the findings about this machine that are not ok, while a daemon serves with these
    settings.
    """
    look = Look(Machine(), settings, _temporary(), serving=True)
    found = [each for check in CHECKS for each in check(look)]
    return [each for each in found if each.grade is not Grade.OK]


_COLOURS = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "red"}


@with_flags()
def doctor(
    config: Config = None,
    folder: Annotated[
        Path | None,
        flag(
            "--dir",
            "Directory whose drive is checked, with direct I/O, if ssd_dirs is not set. "
            "Default: the temporary directory.",
            "DIR",
        ),
    ] = None,
    as_json: AsJson = False,
    **flags: object,
) -> None:
    """Check whether kvhearth serve starts here with the same flags, environment
    and file.

    Each finding that is not ok names the command that fixes it. The last line
    is the verdict. The exit code is the one that kvhearth serve would end with,
    0 if it would serve. Run it as the daemon's user while the daemon is
    stopped, because a running one holds its memory and sockets.
    """
    settings = load_settings(flags, config)
    with waiting("looking"):
        found, error = examine(Look(Machine(), settings, folder or _temporary()))
    code = 0 if error is None else exit_code(error)
    verdict = "ready: kvhearth serve starts with these settings"
    if error is not None:
        verdict = f"not ready, kvhearth serve would end with {code}: {error.message}"
    findings = [dataclasses.asdict(each) for each in found]
    report = {"ready": error is None, "exit_code": code, "verdict": verdict, "findings": findings}
    say(report, Group(*_lines(found), Text(verdict)), as_json=as_json)
    if code:
        raise typer.Exit(code)


def _temporary() -> Path:
    """Return the temporary directory; /tmp if none is writable, as on a read-only root."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path("/tmp")


def _lines(found: list[Finding]) -> Iterator[Text]:
    width = max(len(each.check) for each in found)
    for each in found:
        grade = (f"{each.grade:4}", _COLOURS[each.grade])
        yield Text.assemble(grade, f"  {each.check:{width}}  {each.found}")
        if each.fix:
            yield Text(f"{'':{width + 8}}{each.fix}")
