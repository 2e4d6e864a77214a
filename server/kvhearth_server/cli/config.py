"""``kvhearth config``: the settings in force, a commented sample, a check, and a reload."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic.fields import FieldInfo

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.admin_client import daemon_at
from kvhearth_server.cli.output import AsJson, Config, SocketDir, note, plain, say_json
from kvhearth_server.cli.serve import metavar
from kvhearth_server.config.load import (
    Settings,
    Shown,
    SsdDir,
    TenantSetting,
    load_settings,
    unread_environment,
)
from kvhearth_server.config.value_types import format_size

_COLUMNS = 96
_HEAD = """\
Settings of the KVHearth daemon: each with its default; take away the # of those that you change.
Made by `kvhearth config sample`. A flag goes before the environment, that before this file:
slab_bytes here is KVHEARTH_SLAB_BYTES in the environment and --slab-bytes on the command line.
Sizes are written 65536, 512MiB or 64GiB; durations 0.5, 500ms, 30s or 24h.
"""


def sample_text() -> str:
    """Return a commented YAML file of all settings with their defaults."""
    return "\n".join(f"# {line}" for line in _HEAD.splitlines()) + "\n" + commented_settings()


def commented_settings(without: Collection[str] = ()) -> str:
    """Return a line for each setting with its default, in a comment, below its description."""
    lines = list[str]()
    for name, field in Settings.model_fields.items():
        if name in without:
            continue
        comments = textwrap.wrap(field.description or "", _COLUMNS)
        if field.annotation is not bool:
            comments.append(f"Form: {metavar(field)}")
        lines += ["", *(f"# {line}" for line in comments)]
        lines.append(f"#{setting_line(name, field, field.default)}")
    return "\n".join(lines) + "\n"


def settings_yaml(settings: Settings) -> str:
    """Return settings as a YAML file that yields them again (except secrets, which are masked)."""
    fields = Settings.model_fields.items()
    lines = (setting_line(name, field, getattr(settings, name)) for name, field in fields)
    return "".join(f"{line}\n" for line in lines)


def setting_line(name: str, field: FieldInfo, value: object) -> str:
    """Return ``name: value`` as YAML in one line, the value as people write it."""
    value = _written(field, value)
    if value is None:  # left empty, which reads as nothing
        return f"{name}:"
    written = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, allow_unicode=True)
    return f"{name}: {written.removesuffix('...' + chr(10)).strip()}"


def _written(field: FieldInfo, value: object) -> Any:
    if isinstance(value, tuple | list):
        return [_item(part) for part in value]
    shown = next((item for item in field.metadata if isinstance(item, Shown)), None)
    if shown is not None and value is not None:
        text = shown.format(value)
        return int(text) if text.isdecimal() else text
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _item(value: object) -> object:
    if isinstance(value, TenantSetting):
        uids = ",".join(map(str, value.uids))
        on_ssd = f":{format_size(value.ssd_bytes)}" if value.ssd_bytes else ""
        return f"{value.name}={uids}:{format_size(value.bytes)}{on_ssd}"
    return str(value) if isinstance(value, SsdDir) else value


SHOW_EPILOG = "Example: kvhearth config show kvhearth.yaml"
SAMPLE_EPILOG = "Example: kvhearth config sample > kvhearth.yaml"
RELOAD_EPILOG = "Example: kvhearth config reload"


def show(
    file: Annotated[
        Path | None,
        typer.Argument(help="YAML file of settings; same as --config.", metavar="[FILE]"),
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Check the settings from environment and file and print them as YAML, with
    secrets masked; exit with 2 if they are invalid.
    """
    if file is not None and config is not None:
        raise KVHearthError(Reason.CONFIG_INVALID, f"{file} and --config {config}: name one file")
    for name in unread_environment():
        note(f"kvhearth: warning: no setting reads the environment variable {name}")
    settings = load_settings({}, file or config)
    if as_json:
        say_json(settings.model_dump(mode="json"))
    else:
        typer.echo(settings_yaml(settings), nl=False)


def sample(as_json: AsJson = False) -> None:
    """Print a commented YAML file of all settings with their defaults."""
    if as_json:
        fields = Settings.model_fields.items()
        defaults = Settings.model_validate({}).model_dump(mode="json")
        say_json(
            {name: {"default": defaults[name], "help": field.description} for name, field in fields}
        )
    else:
        typer.echo(sample_text(), nl=False)


def reload(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """Make the running daemon read its settings again, from the flags, the
    environment and the file of its start.

    Prints which settings changed and hold now, and which need a restart. With
    an invalid setting nothing changes. SIGHUP does the same.
    """
    reply = daemon_at(socket_dir).reload_settings()
    if as_json:
        say_json(plain(reply))
        return
    typer.echo(f"changed: {', '.join(reply.changed) or 'nothing'}")
    if reply.needs_restart:
        typer.echo(f"need a restart: {', '.join(reply.needs_restart)}")
