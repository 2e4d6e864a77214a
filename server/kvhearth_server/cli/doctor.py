"""``kvhearth doctor``: checks whether this machine is ready, and names the line that fixes it.

``fail`` keeps the daemon from starting with these settings; ``warn`` costs speed or a feature.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvhearth import native
from kvhearth.errors import KVHearthError
from kvhearth.memory_limits import tightest
from kvhearth_server.cli.app import exit_code
from kvhearth_server.cli.machine import Drive, Machine
from kvhearth_server.cli.output import AsJson, console, say_json, size, waiting
from kvhearth_server.cli.serve import given, with_flags_of
from kvhearth_server.config.load import Settings, SsdDir, load_settings
from kvhearth_server.config.rlimit import needed, ssd_files
from kvhearth_server.config.value_types import format_size
from kvhearth_server.memory.mapping import MIB, THP_FIX, Filesystem, FilesystemKind, filesystem_kind
from kvhearth_server.memory.plan import room_of
from kvhearth_server.preflight import arena_plan, problems
from kvhearth_server.tier_startup import fleet_key, unusable_ssd_dir
from kvhearth_server.tiers.remote.lifecycle import lifecycle_rule
from kvhearth_server.tiers.remote.url import parse_remote
from kvhearth_server.tiers.ssd.disk.probe import ProbeResult, choose
from kvhearth_server.tiers.ssd.settings import capacity_least, segment_bytes_for


class Grade(enum.StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``fix`` is a command or a setting, empty if nothing needs fixing."""

    check: str
    grade: Grade
    found: str
    fix: str = ""


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


def graded(good: object, check: str, found: str, fix: str, bad: Grade = Grade.WARN) -> Finding:
    """Return a finding of ``found``: ok if ``good``, else ``bad`` with its fix."""
    return Finding(check, Grade.OK, found) if good else Finding(check, bad, found, fix)


_MIB = 1 << 20
_GOOD_FILESYSTEMS = frozenset({"ext4", "xfs"})
_BAD_FILESYSTEMS = {
    "tmpfs": "is memory",
    "overlay": "is a container's own layer, which ends with it",
    "btrfs": "writes anew where it is to write in place",
    "zfs": "writes anew where it is to write in place",
    "nfs": "is on another machine",
    "nfs4": "is on another machine",
}
_CHOSEN = "ssd_interface"
_INTERFACE_FIXES = {
    "libaio": "run: sysctl -w fs.aio-max-nr=1048576; in a container, allow io_setup, io_submit, "
    "io_getevents and io_destroy in its seccomp profile",
    "threads": "see the error: preadv and pwritev must be allowed",
}


def interfaces(look: Look) -> Iterator[Finding]:
    """Check each interface for disk I/O with a read, at the depth of the settings."""
    probe_results = look.machine.disk_interfaces(look.settings.ssd_depth)
    yield _chosen(look, probe_results)
    working = [each.name for each in probe_results if each.works]
    best = "" if not working or working[0] == "threads" else working[0]
    for each in probe_results:
        if each.works:
            yield Finding(each.name, Grade.OK, "works")
        elif best and each.name != look.settings.ssd_interface:
            yield Finding(each.name, Grade.OK, f"{each.reason}; {best} does as well")
        else:
            asked = look.settings.ssd_dirs and each.name == look.settings.ssd_interface
            bad = Grade.FAIL if asked else Grade.WARN
            fix = "set ssd_interface: auto; or " if asked else ""
            yield Finding(each.name, bad, each.reason, fix + _INTERFACE_FIXES[each.name])


def places(look: Look) -> Iterator[Finding]:
    """Check each directory of the SSD tier; without one, the directory that could be one."""
    if not look.settings.ssd_dirs:
        yield _direct(
            look,
            "o_direct",
            look.folder,
            "name a directory on ext4 or xfs: kvhearth doctor --dir DIR",
        )
        yield _drive(look, "drive", look.folder)
        return
    for number, each in enumerate(look.settings.ssd_dirs, 1):
        yield from _ssd_dir(look, f"ssd.{number}", each)


SSD_CHECKS: tuple[Callable[[Look], Iterator[Finding]], ...] = (places, interfaces)


def _chosen(look: Look, probe_results: list[ProbeResult]) -> Finding:
    """Report the interface that a daemon with these settings takes here, and why no better one."""
    wanted, by_name = look.settings.ssd_interface, {each.name: each for each in probe_results}
    try:
        name, tried = choose(wanted, look.settings.ssd_depth, lambda name, _: by_name[name])
    except OSError as error:
        working = [each.name for each in probe_results if each.works]
        fix = f"set ssd_interface: auto, which takes {working[0]} here" if working else ""
        bad = Grade.FAIL if look.settings.ssd_dirs else Grade.WARN
        found = f"{wanted} -> none; {error.strerror}"
        return Finding(_CHOSEN, bad, found, fix or _INTERFACE_FIXES["threads"])
    passed_over = [f"not {each.name}: {each.reason}" for each in tried if not each.works]
    return Finding(_CHOSEN, Grade.OK, "; ".join([f"{wanted} -> {name}", *passed_over]))


def _ssd_dir(look: Look, name: str, place: SsdDir) -> Iterator[Finding]:
    if not look.serving and (message := unusable_ssd_dir(place.path)):
        # The tier works without it; if it is the only one, the start is refused (``problems``).
        found, _, fix = message.partition("; ")
        yield Finding(name, Grade.WARN, found, fix)
        return
    existing = place.path if place.path.is_dir() else place.path.parent
    state = "is there" if existing == place.path else "is made at the start"
    yield Finding(name, Grade.OK, f"{place.path}: {state}")
    fix = f"move it to ext4 or xfs: --ssd-dir DIR={format_size(place.bytes)}"
    yield _direct(look, f"{name}.o_direct", existing, fix)
    yield _filesystem(look, f"{name}.filesystem", existing, fix)
    yield _space(look, f"{name}.space", place, existing)
    yield _drive(look, f"{name}.drive", existing)
    yield from _discard(look, f"{name}.discard", existing)


def _direct(look: Look, name: str, folder: Path, fix: str) -> Finding:
    """Check O_DIRECT, which the SSD tier needs to be fast."""
    problem = look.machine.direct_io(folder)
    return graded(not problem, name, f"{folder}: {problem or 'works'}", fix)


def _filesystem(look: Look, name: str, folder: Path, fix: str) -> Finding:
    """Check for a file system that preallocates and writes in place, and that is not the root's."""
    mount = look.machine.mount_of(folder)
    if mount is None:
        return Finding(name, Grade.OK, f"{folder}: not known")
    found = f"{mount.kind}, mounted at {mount.point}"
    if mount.kind in _GOOD_FILESYSTEMS:
        fix = f"mount a drive of its own there, unless this is meant: {folder} is on the system's"
        return graded(mount.point != Path("/"), name, found, fix)
    why = _BAD_FILESYSTEMS.get(mount.kind, "was not tried here")
    return Finding(name, Grade.WARN, f"{found}: it {why}", fix)


def _space(look: Look, name: str, place: SsdDir, existing: Path) -> Finding:
    """Check for room for the whole capacity, less the bytes that the directory already has."""
    free, taken = look.machine.space(existing, place.path)
    missing = place.bytes - taken - free
    found = f"{size(place.bytes)} are wanted, {size(taken)} taken, {size(free)} free"
    most = (free + taken) * 9 // 10 // _MIB
    segment_bytes = look.settings.ssd_segment_bytes or segment_bytes_for(most * _MIB)
    least = capacity_least(segment_bytes)
    if not free + taken:
        fix = "nothing can be stored there: name a directory on another file system"
    elif most * _MIB < least:
        fix = f"even the least, {size(least)}, has no room: free some, or name another directory"
    else:
        fix = f"free some, or ask for less: --ssd-dir {place.path}={most}MiB"
    return graded(missing <= 0, name, found, fix)


def _drive(look: Look, name: str, folder: Path) -> Finding:
    """Check for an NVMe drive under the directory."""
    devices = look.machine.devices
    own = devices.drives_under(look.machine.device_of(folder))
    others = [each for each in devices.drives() if each.nvme and each not in own]
    found = f"{folder}: on {' and '.join(map(_named, own)) or 'no drive that is known'}"
    if own and all(each.nvme for each in own):
        return Finding(name, Grade.OK, found)
    if others:
        found = f"{found}; there is {' and '.join(map(_named, others))}"
        fix = f"mount a file system of {others[0].name}, then: kvhearth doctor --dir DIR"
    else:
        found = f"{found}; this machine has no NVMe drive"
        fix = (
            "only for an SSD tier: add an NVMe drive (in a cloud, take a machine with local "
            "ones), mount its file system, then: kvhearth doctor --dir DIR"
        )
    return Finding(name, Grade.WARN, found, fix)


def _discard(look: Look, name: str, folder: Path) -> Iterator[Finding]:
    """Check whether the drive learns which space is free: otherwise it wears out and slows down."""
    drives = look.machine.devices.drives_under(look.machine.device_of(folder))
    mount = look.machine.mount_of(folder)
    if not any(each.discards for each in drives) or mount is None:
        return
    by_mount, by_timer = "discard" in mount.options, look.machine.trims_weekly()
    how = "at once" if by_mount else "weekly" if by_timer else "never"
    found = f"{mount.point}: the drive is told {how} which of its blocks are free"
    fix = "run: systemctl enable --now fstrim.timer; once, before the first start: fstrim "
    yield graded(by_mount or by_timer, name, found, fix + str(mount.point))


def _named(each: Drive) -> str:
    kind = "" if each.nvme else "not NVMe"
    return f"{each.name} ({', '.join(filter(None, (each.model, size(each.bytes), kind)))})"


HUGE = 2 * MIB
CUDA_12_BRANCH = 525
"""The oldest branch of NVIDIA's driver on which CUDA 12 runs."""
REGISTERED_AT_ONCE_MAX = 512 << 30


def examine(look: Look) -> tuple[list[Finding], KVHearthError | None]:
    """Run all checks in the table's order; return findings, and the error that ends a start."""
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
    """Tell the memory that the tightest limit leaves, and that of the arena."""
    place = _arena_place(look.settings)
    wanted = room_of(arena_plan(look.settings).geometry, place).bytes
    limits = look.machine.memory.limits()
    if place is not None and look.settings.arena_dir is not None:
        limits += place.limits(look.settings.arena_dir)
    left = tightest(limits)
    known = "what is available is not known"
    if left is not None:
        known = f"{size(left.free_bytes)} are available by {left.name}"
    yield Finding("memory", Grade.OK, f"{known}, the arena takes {size(wanted)}")


def _arena_place(settings: Settings) -> Filesystem | None:
    """Return the file system of the arena's directory, made or to be made; None without one."""
    folder = settings.arena_dir
    if folder is None:
        return None
    place = folder if os.path.lexists(folder) else folder.parent
    return filesystem_kind(place) if os.path.isdir(place) else None


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
        fallback = look.settings.arena_fallback.partition(";")[0]
        found = f"none: {fallback or 'a restart of the daemon starts with a cold cache'}"
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
    *SSD_CHECKS,
    remote,
    gpu_driver,
    directories,
    native_module,
    versions,
)
"""The table of checks. A check yields one finding or more."""


def worse_than_ok(settings: Settings) -> list[dict[str, str]]:
    """Return the findings about this machine that are not ok, while a daemon serves with these
    settings: each has ``check``, ``grade``, ``found`` and ``fix``.
    """
    look = Look(Machine(), settings, _temporary(), serving=True)
    found = [each for check in CHECKS if check is not directories for each in check(look)]
    return [dataclasses.asdict(each) for each in found if each.grade is not Grade.OK]


EPILOG = "Example: kvhearth doctor --memory 64GiB --arena-dir /dev/hugepages/kvhearth"
_COLOURS = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "red"}


@with_flags_of(Settings)
def doctor(
    config: Path | None = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Directory whose drive is checked, with direct I/O, if ssd_dirs is not set. "
            "Default: the temporary directory.",
            metavar="DIR",
            show_default=False,
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
    settings = load_settings(given(flags), config)
    with waiting("looking"):
        found, error = examine(Look(Machine(), settings, folder or _temporary()))
    failed = [finding for finding in found if finding.grade is Grade.FAIL]
    code = exit_code(error) if error is not None else int(bool(failed))
    verdict = "ready: kvhearth serve starts with these settings"
    if failed:
        why = error.message if error is not None else f"{failed[0].check}: {failed[0].found}"
        verdict = f"not ready, kvhearth serve would end with {code}: {why}"
    if as_json:
        findings = [dataclasses.asdict(finding) for finding in found]
        report = {"ready": not failed, "exit_code": code, "verdict": verdict}
        say_json({**report, "findings": findings})
    else:
        _print(found)
        console().print(escape(verdict), soft_wrap=True)
    if code:
        raise typer.Exit(code)


def _temporary() -> Path:
    """Return the temporary directory; /tmp if none is writable, as on a read-only root."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path("/tmp")


def _print(found: list[Finding]) -> None:
    out = console()
    width = max(len(finding.check) for finding in found)
    for finding in found:
        grade = f"[{_COLOURS[finding.grade]}]{finding.grade:4}[/]"
        out.print(f"{grade}  {finding.check:{width}}  {escape(finding.found)}")
        if finding.fix:
            out.print(f"{'':{width + 8}}{escape(finding.fix)}")
