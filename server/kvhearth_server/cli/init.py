"""``kvhearth init``: writes a settings file and a systemd unit for this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import yaml

from kvhearth.errors import KVHearthError, Reason
from kvhearth.memory_limits import tightest
from kvhearth.url import SYSTEM_SOCKET_DIR, default_socket_dir
from kvhearth_server.cli.config import commented_settings
from kvhearth_server.cli.machine import Machine
from kvhearth_server.cli.output import AsJson, say_json, size, written_directory
from kvhearth_server.config.load import SHARED_MEMORY, load_settings
from kvhearth_server.config.model import HUGEPAGE_BYTES
from kvhearth_server.config.value_types import format_size, parse_size

EPILOG = "Examples: kvhearth init; kvhearth init --system --memory 64GiB --dir /tmp/look"
UNIT = "kvhearth.service"
FILE = "kvhearth.yaml"

_GIB = 1 << 30
_MEMORY_LEAST = 1 << 28
_SLAB = 64 << 20
_SSD_LEAST = 4 * _GIB
_GOOD_FILESYSTEMS = frozenset({"ext4", "xfs"})
_SYSTEM_UNIT = Path(__file__).with_name(UNIT)
"""The unit of ``deploy/systemd``; a test compares the two."""
_USER_UNIT = """\
[Unit]
Description=KVHearth: keeps the KV cache of LLM inference engines warm
StartLimitIntervalSec=60
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
Environment=KVHEARTH_CONFIG={config}
ExecStart={program} serve
Restart=on-failure
RestartSec=1
# 2 is a bad setting: starting again does not mend it.
RestartPreventExitStatus=2
TimeoutStartSec=10min
TimeoutStopSec=30
WatchdogSec=30
UMask=0077
NoNewPrivileges=true

[Install]
WantedBy=default.target
"""


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
    outlives = "The cache outlives the daemon there."
    yield Choice("arena_dir", str(arena_dir), outlives)
    if found := _ssd(machine, system=system):
        why = "Four fifths of what is free there; the rest keeps writes fast."
        yield Choice("ssd_dirs", found, why)


def _memory(machine: Machine, memory: int | None, *, system: bool) -> tuple[int, Path, str]:
    """Return the arena's bytes and directory, and the reason for its size."""
    pages = machine.memory.pool(HUGEPAGE_BYTES).free
    mount = next((each.point for each in machine.mounts() if each.kind == "hugetlbfs"), None)
    usable = mount is not None and (system or os.access(mount, os.W_OK))
    if mount is not None and usable and (memory or _MEMORY_LEAST) <= pages * HUGEPAGE_BYTES:
        pool = _within(pages * HUGEPAGE_BYTES)
        why = f"{pages} huge pages of 2 MiB are free; the journal and the catalogue take the rest."
        return memory or pool, mount / "kvhearth", why if memory is None else "As asked for."
    name = "kvhearth" if system else f"kvhearth-{os.geteuid()}"
    place = SHARED_MEMORY / name
    if memory is not None:
        return memory, place, "As asked for."
    least = tightest(machine.memory.limits())
    available = least.free_bytes if least is not None else 2 * _MEMORY_LEAST
    room = machine.space(SHARED_MEMORY, place)[0]
    part = 2 if system else 4
    chosen = max(_MEMORY_LEAST, min(available // part, room * 9 // 10) // _SLAB * _SLAB)
    told = f"One {'half' if part == 2 else 'quarter'} of the {size(available)} that are available"
    return chosen, place, f"{told}; no huge pages are reserved (kvhearth doctor)."


def _within(pool_bytes: int) -> int:
    """Return the memory in whole slabs that a pool of huge pages has room for, with the journal and
    the catalogue beside it.
    """
    return max(_SLAB, (pool_bytes - _SLAB) * 64 // 65 // _SLAB * _SLAB)


def _ssd(machine: Machine, *, system: bool) -> list[str]:
    """Return a directory and a size for each drive of its own that has a good file system."""
    found, seen = list[str](), set[int]()
    for mount in machine.mounts():
        device = machine.device_of(mount.point)
        good = mount.kind in _GOOD_FILESYSTEMS and mount.point.parts[1:2] not in ((), ("boot",))
        drives = machine.devices.drives_under(device)
        writable = os.access(mount.point, os.W_OK) or (system and "rw" in mount.options)
        if not good or device in seen or not writable or not mount.point.is_dir():
            continue
        if not drives or not all(each.nvme for each in drives):
            continue
        seen.add(device)
        free = machine.space(mount.point, mount.point / "kvhearth")[0] * 8 // 10
        if free >= _SSD_LEAST:
            found.append(f"{mount.point}/kvhearth={free // _GIB}GiB")
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
    program = _program()
    if not system:
        return _USER_UNIT.format(config=config, program=program)
    values = {each.name: each.value for each in chosen}
    arena_dir = str(values["arena_dir"])
    writable = [str(Path(arena_dir).parent)]
    drives = [str(each).partition("=")[0] for each in _listed(values.get("ssd_dirs"))]
    text = _SYSTEM_UNIT.read_text()
    for old, new in (
        (_line(text, "Environment="), f"Environment=KVHEARTH_CONFIG={config}"),
        (_line(text, "ExecStart="), f"ExecStart={program} serve"),
        ("/dev/hugepages/kvhearth\n", f"{arena_dir}\n"),
        (
            "ReadWritePaths=-/dev/hugepages",
            "ReadWritePaths=" + " ".join(f"-{each}" for each in [*writable, *drives]),
        ),
    ):
        text = text.replace(old, new)
    made = f"-m 0700 -o kvhearth -g kvhearth {arena_dir}"
    more = "".join(f" {each}" for each in drives)
    return text.replace(f"install -d {made}", f"install -d {made}{more}")


def _program() -> Path:
    return Path(sys.executable).with_name("kvhearth")


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def places(folder: Path | None, *, system: bool) -> tuple[Path, Path]:
    """Return the paths of the settings file and of the unit."""
    if folder is not None:
        return folder.absolute() / FILE, folder.absolute() / UNIT
    if system:
        return Path("/etc/kvhearth") / FILE, Path("/etc/systemd/system") / UNIT
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return home / "kvhearth" / FILE, home / "systemd/user" / UNIT


def init(
    system: Annotated[
        bool | None,
        typer.Option(
            "--system/--user",
            help="The machine's daemon, or this user's own. Default: the machine's for root.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", help="Memory for the cache. Default: by the machine.")
    ] = "",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Write both files there, and not where systemd looks.", metavar="DIR"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented settings file and a systemd unit for this machine.

    Looks at memory, huge pages and drives, and writes the reason beside each
    value. Changes nothing else; prints the commands that come next.
    """
    whole = os.geteuid() == 0 if system is None else system
    chosen = list(choices(Machine(), parse_size(memory) if memory else None, system=whole))
    place = None if folder is None else written_directory(folder, "--dir")
    config, unit = places(place, system=whole)
    for path in (config, unit):
        if path.exists() and not force:
            message = f"{path} exists; look at it, then give --force to replace it"
            raise KVHearthError(Reason.CONFIG_INVALID, message)
    texts = {config: settings_text(chosen), unit: unit_text(config, chosen, system=whole)}
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"cannot write {error.filename}: {error.strerror}; name a directory with --dir"
        raise KVHearthError(Reason.CONFIG_INVALID, message) from None
    load_settings({}, config)
    following = _next(config, unit, system=whole)
    if as_json:
        values = {each.name: each.value for each in chosen}
        say_json(
            {"settings_file": str(config), "unit": str(unit), "settings": values, "next": following}
        )
        return
    for each in chosen:
        typer.echo(f"{each.name:10}  {each.value}\n            {each.why}")
    typer.echo(f"wrote {config} and {unit}; next:")
    for line in following:
        typer.echo(f"  {line}")


def _next(config: Path, unit: Path, *, system: bool) -> list[str]:
    """Return the commands that check the settings and start the daemon."""
    doctor = f"kvhearth doctor --config {config}"
    if not system:
        link = [] if unit.parent.name == "user" else [f"systemctl --user link {unit}"]
        return [doctor, *link, "systemctl --user enable --now kvhearth", "loginctl enable-linger"]
    moved = []
    if _program().parts[1] in ("home", "root", "tmp"):
        moved = [f"# {UNIT} cannot run {_program()}: install into /opt/kvhearth, then init again"]
    user = "useradd --system --no-create-home --shell /usr/sbin/nologin kvhearth"
    link = [] if unit.parent == Path("/etc/systemd/system") else [f"systemctl link {unit}"]
    return [*moved, user, doctor, *link, "systemctl enable --now kvhearth"]
