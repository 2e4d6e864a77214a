"""Loads the settings of a start from flags, environment and YAML file.

The order is flag > ``KVHEARTH_*`` environment > YAML file > default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from kvhearth import failpoints as faults
from kvhearth import native
from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import default_socket_dir
from kvhearth_server.config.model import ENV_PREFIX, RELOADABLE, Settings
from kvhearth_server.config.value_types import Shown
from kvhearth_server.observability.logs import one_line

__all__ = ["ENV_PREFIX", "Settings", "load_settings"]

CONFIG_ENV = "KVHEARTH_CONFIG"
SHARED_MEMORY = Path("/dev/shm")
ARENA_EXTRA = 64 << 20
"""Bytes beside the arena's memory and its journal, at most: the catalogue."""
YAML_BYTES_MAX = 1 << 20
_CHARS_MAX = 400
_PROBLEMS_MAX = 20


def read_settings_file(path: Path | None) -> dict[str, object]:
    """Return the names and values of a settings file; empty without a path.

    Raises:
        KVHearthError: ``CONFIG_INVALID``.
    """
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            loaded = parse_yaml(file.read(YAML_BYTES_MAX + 1))
    except (OSError, ValueError, yaml.YAMLError) as error:
        message = _cut(" ".join(str(error).split()))
        raise KVHearthError(
            Reason.CONFIG_INVALID, one_line(f"cannot read --config {path}: {message}")
        ) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise KVHearthError(
            Reason.CONFIG_INVALID, f"{path} holds no settings; write lines like 'memory: 64GiB'"
        )
    return {str(name): value for name, value in loaded.items()}


class _PlainLoader(yaml.SafeLoader):
    """Refuses aliases, by which a short file would hold very many values, or endless ones."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("write it out: settings have no aliases")
        return super().compose_node(parent, index)


def parse_yaml(data: bytes) -> object:
    """Return a file's content, parsed as YAML without aliases.

    Args:
        data: at most ``YAML_BYTES_MAX`` bytes; more are refused.

    Raises:
        ValueError: it is too long or too deep, or a value is not of the kind that it says.
        yaml.YAMLError: it is not YAML.
    """
    if len(data) > YAML_BYTES_MAX:
        raise ValueError(f"more than {YAML_BYTES_MAX} bytes are no settings")
    try:
        return yaml.load(data.decode(), _PlainLoader)
    except RecursionError:
        raise ValueError("nested too deep for settings") from None
    except (ValueError, LookupError, ArithmeticError, AttributeError, TypeError) as error:
        # PyYAML lets its constructors' own errors through, for example of an impossible date.
        raise ValueError(f"a value cannot be read: {error}") from None


def _cut(text: str) -> str:
    """Return ``text``, shortened to a length that a message takes."""
    return text if len(text) <= _CHARS_MAX else text[: _CHARS_MAX - 3] + "..."


def flag_of(name: str) -> str:
    """Return the flag of a setting: ``--slab-bytes`` of ``slab_bytes``."""
    field = Settings.model_fields.get(name)
    named = [each.flag for each in (field.metadata if field else ()) if isinstance(each, Shown)]
    return "".join(named) or "--" + name.replace("_", "-")


def load_settings(flags: Mapping[str, object], config_path: Path | None = None) -> Settings:
    """Load the settings from flags, environment and YAML file.

    Args:
        flags: by field name; only those that were given.
        config_path: the YAML file; without it the one that ``KVHEARTH_CONFIG`` names, if any.

    Raises:
        KVHearthError: ``CONFIG_INVALID``; it names each bad setting, its value and the fix.
    """
    path = config_path or (Path(found) if (found := os.environ.get(CONFIG_ENV)) else None)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    from_env = EnvSettingsSource(Settings)()
    for values, origin in (
        (read_settings_file(path), lambda name: f"{name} (in {path})"),
        (from_env, lambda name: ENV_PREFIX + name.upper()),
        (dict(flags), flag_of),
    ):
        merged |= values
        origins |= {name: origin(name) for name in values}
    # Checked here, because pydantic-settings takes names like _env_file for its own arguments.
    unknown = [name for name in merged if name not in Settings.model_fields]
    problems = [
        f"{_cut(origins[name])}: there is no such setting; {_hint(name)}" for name in unknown
    ]
    try:
        settings = Settings(**{n: v for n, v in merged.items() if n not in unknown})
    except ValidationError as error:
        problems += [_explain(dict(line), merged, origins) for line in error.errors()]
    if problems:
        more = len(problems) - _PROBLEMS_MAX
        message = problems[:_PROBLEMS_MAX] + ([f"and {more} more"] if more > 0 else [])
        raise KVHearthError(Reason.CONFIG_INVALID, one_line("; ".join(message)))
    return settings if "socket_dir" in merged else _placed(settings, "arena_dir" in merged)


def _placed(settings: Settings, arena_given: bool) -> Settings:
    """Return the settings with the directories of a daemon that is given no socket directory.

    Its arena is on /dev/shm, so that the cache outlives it. A daemon with a socket directory of its
    own gets none unasked: two daemons of a user would meet in it.
    """
    values = {name: getattr(settings, name) for name in Settings.model_fields}
    values["socket_dir"] = default_socket_dir()
    if arena_given:
        return Settings(**values)
    arena_dir = SHARED_MEMORY / f"kvhearth-{os.geteuid()}"
    if reason := _unusable(arena_dir, settings):
        return Settings(**values).without_arena_dir(
            f"{reason}: the arena is in anonymous memory, and the cache ends with the daemon; give "
            "an arena_dir where it fits, or none to have it so"
        )
    return Settings(**{**values, "arena_dir": arena_dir})


def _unusable(arena_dir: Path, settings: Settings) -> str:
    """Return the reason why the default arena cannot be on /dev/shm; "" if it can be there."""
    if settings.hugepages == "require":
        return f"huge pages are required, and {SHARED_MEMORY} has none"
    try:
        taken = sum(each.stat().st_blocks * 512 for each in arena_dir.glob("*"))
        room = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return f"{SHARED_MEMORY} cannot be used ({error.strerror})"
    free = room.f_bavail * room.f_frsize + taken
    needed = settings.memory + settings.memory // 32 + ARENA_EXTRA
    if free >= needed:
        return ""
    free_mib, needed_mib = free >> 20, -(-needed >> 20)
    return f"{SHARED_MEMORY} has {free_mib}MiB free, and the arena takes {needed_mib}MiB"


def merged_settings(running: Settings, read: Settings) -> tuple[Settings, list[str], list[str]]:
    """Return the running settings with what may change of those that were read again, the names of
    these changes, and the names of changes that need a restart.
    """
    names = [n for n in Settings.model_fields if getattr(running, n) != getattr(read, n)]
    changed = [name for name in names if name in RELOADABLE]
    restart = [name for name in names if name not in RELOADABLE]
    values = {name: getattr(running, name) for name in Settings.model_fields}
    values |= {name: getattr(read, name) for name in changed}
    return Settings(**values), changed, restart


def unread_environment() -> list[str]:
    """Return the ``KVHEARTH_*`` variables that are set but read by no setting, sorted: probably
    misspelt.

    They are worth a warning and not a refusal: Kubernetes sets ``KVHEARTH_PORT`` and the like in
    every pod beside a Service of that name.
    """
    of_tests = {faults.ENVIRONMENT_NAME, faults.DISK_ENVIRONMENT_NAME}
    known = {CONFIG_ENV, native.VARIABLE, *of_tests}
    known |= {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    return sorted(n for n in os.environ if n.startswith(ENV_PREFIX) and n not in known)


def _explain(
    line: Mapping[str, Any], written: Mapping[str, object], origins: Mapping[str, str]
) -> str:
    """Turn one line of pydantic's into a sentence: setting, value, what is wrong, fix."""
    cause = line.get("ctx", {}).get("error")
    wrong = str(cause) if cause is not None else str(line["msg"])
    if not line["loc"]:
        return wrong
    name = str(line["loc"][0])
    return f"{origins[name]}: {_cut(repr(written[name]))}: {wrong[:1].lower()}{_cut(wrong[1:])}"


def _hint(name: str) -> str:
    near = difflib.get_close_matches(_cut(name), Settings.model_fields, n=1)
    return f"did you mean {near[0]}?" if near else "see kvhearth serve --help"
