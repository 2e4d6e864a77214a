"""``kvhearth init``: writes a settings file and a systemd unit for this machine."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml

from kvhearth.memory_limits import tightest
from kvhearth.url import SYSTEM_SOCKET_DIR, default_socket_dir
from kvhearth_server.cli.config import commented_settings
from kvhearth_server.cli.machine import GOOD_FILESYSTEMS, Machine
from kvhearth_server.cli.output import AsJson, flag, parsed, say, size, wrong
from kvhearth_server.config.load import SHARED_MEMORY, load_settings
from kvhearth_server.config.model import HUGEPAGE_BYTES
from kvhearth_server.config.value_types import directory, format_size, parse_size

UNIT = "kvhearth.service"
FILE = "kvhearth.yaml"

_GIB = 1 << 30
_MEMORY_LEAST = 1 << 28
_SLAB = 64 << 20
_SSD_LEAST = 4 * _GIB
_PLAIN = re.compile(r"[\w@%+=:,./-]+")
_SYSTEM_UNIT = Path(__file__).with_name(UNIT)
"""The unit of ``deploy/systemd``; a test compares the two."""
_USER_LINES = (
    *("[", "Description=", "StartLimit", "Type=", "NotifyAccess=", "Environment=", "ExecStart="),
    *("Restart", "# 2 ", "TimeoutS", "WatchdogSec=", "UMask=", "NoNewPrivileges=", "WantedBy="),
)
"""Beginnings of its lines that are a user's unit; a user's systemd cannot do the rest."""


@dataclass(frozen=True)
class Choice:
    """One setting for this machine, its value as text, and the reason for it."""

    name: str
    value: object
    why: str

    @property
    def text(self) -> str:
        """The setting as lines of YAML, the reason above it."""
        value = yaml.safe_dump({self.name: self.value}, default_flow_style=False).strip()
        return f"# {self.why}\n{value}\n"


def choices(machine: Machine, memory: int | None, *, system: bool) -> Iterator[Choice]:
    """Yield the settings that this machine asks for.

    Args:
        memory: bytes for the arena; None to choose them.
        system: whether the daemon is the machine's, and not this user's.
    """
    socket_dir = SYSTEM_SOCKET_DIR if system else default_socket_dir()
    yield Choice("socket_dir", str(socket_dir), "Directory of the sockets.")
    memory, arena_dir, why = _memory(machine, memory, system=system)
    yield Choice("memory", format_size(memory), why)
    if arena_dir is None:
        why = f"{SHARED_MEMORY} is too small: enlarge it, or the cache ends with the daemon."
        yield Choice("arena_dir", "none", why)
    else:
        yield Choice("arena_dir", str(arena_dir), "The cache outlives the daemon there.")
    if found := _ssd(machine, system=system):
        why = "Four fifths of what is free there; the rest keeps writes fast."
        yield Choice("ssd_dirs", found, why)


def _memory(machine: Machine, memory: int | None, *, system: bool) -> tuple[int, Path | None, str]:
    """Return the arena's bytes, its directory if one has room, and the reason for its size."""
    pages = machine.memory.pool(HUGEPAGE_BYTES).free
    pool_bytes = pages * HUGEPAGE_BYTES
    mounts = [each.point for each in machine.mounts() if each.kind == "hugetlbfs"]
    mount = next((each for each in mounts if system or os.access(each, os.W_OK)), None)
    place: Path | None
    if mount is not None and (memory or _MEMORY_LEAST) <= pool_bytes:
        place = mount / "kvhearth"
        # The journal takes up to a 64th part beside the memory, the catalogue less than a slab.
        chosen = max(_SLAB, (pool_bytes - _SLAB) * 64 // 65 // _SLAB * _SLAB)
        why = f"{pages} huge pages of 2 MiB are free; the journal and the catalogue take the rest."
    else:
        place = SHARED_MEMORY / ("kvhearth" if system else f"kvhearth-{os.geteuid()}")
        least = tightest(machine.memory.limits())
        available = least.free_bytes if least is not None else 2 * _MEMORY_LEAST
        room = machine.space(SHARED_MEMORY, place)[0]
        part, word = (2, "half") if system else (4, "quarter")
        if room < (memory or _MEMORY_LEAST):
            place, room = None, available
        chosen = max(_MEMORY_LEAST, min(available // part, room * 9 // 10) // _SLAB * _SLAB)
        told = f"One {word} of the {size(available)} that are available"
        why = f"{told}; no huge pages are reserved (kvhearth doctor)."
    return (chosen, place, why) if memory is None else (memory, place, "As asked for.")


def _ssd(machine: Machine, *, system: bool) -> list[str]:
    """Return a directory and a size for each drive of its own that has a good file system."""
    found, seen = list[str](), set[int]()
    for mount in machine.mounts():
        point, device = mount.point, machine.device_of(mount.point)
        good = mount.kind in GOOD_FILESYSTEMS and point.parts[1:2] not in ((), ("boot",))
        writable = os.access(point, os.W_OK) or (system and "rw" in mount.options)
        if not good or device in seen or not writable or not os.path.isdir(point):
            continue
        if not machine.place(point).on_nvme:
            continue
        seen.add(device)
        free = machine.space(point, point / "kvhearth")[0] * 8 // 10
        if free >= _SSD_LEAST:
            found.append(f"{point}/kvhearth={free // _GIB}GiB")
    return found


def settings_text(chosen: list[Choice]) -> str:
    """Return the settings file: what was chosen and why, then all others in comments."""
    head = (
        "# Settings of the KVHearth daemon on this machine, made by `kvhearth init`.\n"
        "# `kvhearth doctor --config FILE` checks them; `kvhearth config reload` applies changes.\n"
    )
    rest = commented_settings({each.name for each in chosen})
    told = "\n".join(each.text for each in chosen)
    return f"{head}\n{told}\n# -- all other settings, with their defaults --\n{rest}"


def unit_text(config: Path, chosen: list[Choice], *, system: bool) -> str:
    """Return the systemd unit of a daemon with the settings file ``config``."""
    values = {each.name: each.value for each in chosen}
    arena_dir, ssd_dirs = Path(str(values["arena_dir"])), values.get("ssd_dirs")
    arenas = [arena_dir] if arena_dir.is_absolute() else []
    drives = [each.rpartition("=")[0] for each in ssd_dirs] if isinstance(ssd_dirs, list) else []
    made = _words(*arenas, *drives)
    written = _words(*(f"-{each.parent}" for each in arenas), *(f"-{each}" for each in drives))
    given = {
        "Environment": _words(f"KVHEARTH_CONFIG={config}"),
        "ExecStartPre": f"+/usr/bin/install -d -m 0700 -o kvhearth -g kvhearth {made}",
        "ExecStart": f"{_words(_program())} serve",
        "ReadWritePaths": written,
    }
    left_out = () if made else ("ExecStartPre", "ReadWritePaths")
    if not system:
        given["WantedBy"] = "default.target"
    lines = []
    for line in _SYSTEM_UNIT.read_text(encoding="utf-8").splitlines():
        name = line.partition("=")[0]
        wanted = system or not line or line.startswith(_USER_LINES)
        if wanted and name not in left_out:
            lines.append(f"{name}={given[name]}" if name in given else line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _words(*words: object) -> str:
    """Return words as systemd reads them, quoted where they are not plain."""
    told = [str(each).replace("%", "%%") for each in words]
    return " ".join(
        each if _PLAIN.fullmatch(each) else '"' + re.sub(r'(["\\])', r"\\\1", each) + '"'
        for each in told
    )


def _program() -> Path:
    return Path(sys.executable).with_name("kvhearth")


def places(folder: Path | None, *, system: bool) -> tuple[Path, Path]:
    """Return the paths of the settings file and of the unit."""
    if folder is not None:
        return folder.absolute() / FILE, folder.absolute() / UNIT
    if system:
        return Path("/etc/kvhearth") / FILE, Path("/etc/systemd/system") / UNIT
    try:
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    except RuntimeError:  # neither HOME nor an entry in passwd
        raise wrong("you have no home directory; name a directory with --dir") from None
    return home / "kvhearth" / FILE, home / "systemd/user" / UNIT


def init(
    system: Annotated[
        bool | None,
        flag(
            "--system/--user",
            "The machine's daemon, or this user's own. Default: the machine's for root.",
        ),
    ] = None,
    memory: Annotated[
        str | None, flag("--memory", "Memory for the cache. Default: by the machine.", "SIZE")
    ] = None,
    folder: Annotated[
        Path | None, flag("--dir", "Write both files there, and not where systemd looks.", "DIR")
    ] = None,
    force: Annotated[bool, flag("--force", "Replace files that exist.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented settings file and a systemd unit for this machine.

    Looks at memory, huge pages and drives, and writes the reason beside each
    value. Changes nothing else; prints the commands that come next.
    """
    whole = os.geteuid() == 0 if system is None else system
    wanted = parsed("--memory", parse_size, memory) if memory else None
    chosen = list(choices(Machine(), wanted, system=whole))
    place = parsed("--dir", directory, folder) if folder else None
    config, unit = places(place, system=whole)
    texts = {config: settings_text(chosen), unit: unit_text(config, chosen, system=whole)}
    try:
        for path in texts:
            if path.exists() and not force:
                raise wrong(f"{path} exists; look at it, then give --force to replace it")
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"cannot write {error.filename}: {error.strerror}; name a directory with --dir"
        raise wrong(message) from None
    load_settings({}, config)
    commands = _next(config, unit, system=whole)
    values = {each.name: each.value for each in chosen}
    report = {"settings_file": str(config), "unit": str(unit), "settings": values, "next": commands}
    lines = [f"{each.name:10}  {each.value}\n            {each.why}" for each in chosen]
    lines += [f"wrote {config} and {unit}; next:", *(f"  {line}" for line in commands)]
    say(report, "\n".join(lines), as_json=as_json)


def _next(config: Path, unit: Path, *, system: bool) -> list[str]:
    """Return the commands that check the settings and start the daemon."""
    doctor = shlex.join(["kvhearth", "doctor", "--config", str(config)])
    at = shlex.quote(str(unit))
    if not system:
        link = [] if unit.parent.name == "user" else [f"systemctl --user link {at}"]
        return [doctor, *link, "systemctl --user enable --now kvhearth", "loginctl enable-linger"]
    moved = []
    if _program().parts[1] in ("home", "root", "tmp"):
        moved = [f"# {UNIT} cannot run {_program()}: install into /opt/kvhearth, then init again"]
    user = "useradd --system --no-create-home --shell /usr/sbin/nologin kvhearth"
    link = [] if unit.parent == Path("/etc/systemd/system") else [f"systemctl link {at}"]
    return [*moved, user, doctor, *link, "systemctl enable --now kvhearth"]
