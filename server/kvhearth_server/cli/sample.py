"""Settings as YAML: the commented sample of all of them, and the ones in force."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from kvhearth_server.cli.serve import metavar
from kvhearth_server.config.load import Settings, Shown, SsdDir, TenantSetting
from kvhearth_server.config.value_types import format_size
from kvhearth_server.core.shares import TenantShares

_COLUMNS = 96
_HEAD = """\
Settings of the KVHearth daemon: each with its default; take away the # of those that you change.
Made by `kvhearth config sample`. A flag goes before the environment, that before this file:
slab_bytes here is KVHEARTH_SLAB_BYTES in the environment and --slab-bytes on the command line.
Sizes are written 65536, 512MiB or 64GiB; durations 0.5, 500ms, 30s or 24h.
"""


def sample() -> str:
    """Return a commented YAML file of all settings with their defaults."""
    lines = [f"# {line}" for line in _HEAD.splitlines()]
    for name, field in Settings.model_fields.items():
        comments = textwrap.wrap(field.description or "", _COLUMNS)
        if field.annotation is not bool:
            comments.append(f"Form: {metavar(field)}")
        lines += ["", *(f"# {line}" for line in comments), f"#{line(name, field, field.default)}"]
    return "\n".join(lines) + "\n"


def settings_yaml(settings: Settings) -> str:
    """Return settings as a YAML file that yields them again (except secrets, which are masked)."""
    return "".join(f"{text}\n" for text in _lines(settings))


def _lines(settings: Settings) -> Iterator[str]:
    for name, field in Settings.model_fields.items():
        yield line(name, field, getattr(settings, name))


def line(name: str, field: FieldInfo, value: object) -> str:
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
        return f"{value.name}={uids}:{format_size(value.bytes)}"
    return str(value) if isinstance(value, SsdDir | TenantShares) else value
