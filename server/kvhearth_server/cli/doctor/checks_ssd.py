"""The disk checks of ``kvhearth doctor``: each ``--ssd-dir``, or where one could be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from kvhearth_server.cli.doctor.finding import Finding, Grade, Look, graded
from kvhearth_server.cli.doctor.machine import Drive
from kvhearth_server.cli.output import size
from kvhearth_server.config.load import SsdDir
from kvhearth_server.config.value_types import format_size
from kvhearth_server.tier_startup import unusable_ssd_dir
from kvhearth_server.tiers.ssd.disk.probe import Verdict, choose
from kvhearth_server.tiers.ssd.settings import capacity_least, segment_bytes_for

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
    "io_uring": "run: sysctl -w kernel.io_uring_disabled=0; in a container, allow io_uring_setup, "
    "io_uring_enter and io_uring_register in its seccomp profile",
    "libaio": "run: sysctl -w fs.aio-max-nr=1048576; in a container, allow io_setup, io_submit, "
    "io_getevents and io_destroy in its seccomp profile",
    "threads": "see the error: preadv and pwritev must be allowed",
}


def interfaces(look: Look) -> Iterator[Finding]:
    """Check each interface for disk I/O with a read, at the depth of the settings."""
    verdicts = look.machine.disk_interfaces(look.settings.ssd_depth)
    yield _chosen(look, verdicts)
    working = [each.name for each in verdicts if each.works]
    best = "" if not working or working[0] == "threads" else working[0]
    for each in verdicts:
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


def _chosen(look: Look, verdicts: list[Verdict]) -> Finding:
    """Report the interface that a daemon with these settings takes here, and why it takes no better
    one.
    """
    wanted, by_name = look.settings.ssd_interface, {each.name: each for each in verdicts}
    try:
        name, tried = choose(wanted, look.settings.ssd_depth, lambda name, _: by_name[name])
    except OSError as error:
        working = [each.name for each in verdicts if each.works]
        fix = f"set ssd_interface: auto, which takes {working[0]} here" if working else ""
        bad = Grade.FAIL if look.settings.ssd_dirs else Grade.WARN
        found = f"{wanted} -> none; {error.strerror}"
        return Finding(_CHOSEN, bad, found, fix or _INTERFACE_FIXES["threads"])
    passed_over = [f"not {each.name}: {each.reason}" for each in tried if not each.works]
    return Finding(_CHOSEN, Grade.OK, "; ".join([f"{wanted} -> {name}", *passed_over]))


def _ssd_dir(look: Look, name: str, place: SsdDir) -> Iterator[Finding]:
    if message := unusable_ssd_dir(place.path):
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
    """Check whether the drive learns which space is free: without that, it wears out sooner and
    slows down.
    """
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
