"""The YAML file of settings: read within bounds, whatever is in it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import yaml

from kvhearth.errors import KVHearthError, Reason

WRONG_CHARS_MAX = 400
_FILE_BYTES_MAX = 1 << 20
_FILE_NODES_MAX = 10_000


def read_settings_file(path: Path | None) -> dict[str, object]:
    """Names and values as they are written there; nothing without a path.

    Raises:
        KVHearthError: ``CONFIG_INVALID``.
    """
    if path is None:
        return {}
    try:
        loaded = _bounded(_parsed(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        told = cut(" ".join(str(error).split()), WRONG_CHARS_MAX)
        raise KVHearthError(
            Reason.CONFIG_INVALID, one_line(f"cannot read --config {path}: {told}")
        ) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise KVHearthError(
            Reason.CONFIG_INVALID, f"{path} holds no settings; write lines like 'memory: 64GiB'"
        )
    return {str(name): value for name, value in loaded.items()}


def _parsed(path: Path) -> object:
    """What a file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too long or too deep, or a value is not of the kind that it says.
        yaml.YAMLError: it is not YAML.
    """
    with path.open("rb") as file:
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise ValueError(f"more than {_FILE_BYTES_MAX} bytes are no settings")
    try:
        return yaml.safe_load(data.decode())
    except RecursionError:
        raise ValueError("nested too deep for settings") from None
    except (ValueError, LookupError, ArithmeticError, AttributeError, TypeError) as error:
        # PyYAML lets its constructors' own errors through: of a date that no calendar has, say.
        raise ValueError(f"a value cannot be read: {error}") from None


def _bounded(loaded: object) -> object:
    """``loaded``, unless aliases make it very much larger than its file, or endless.

    Raises:
        ValueError: they do.
    """
    left, count = [loaded], 0
    while left:
        node = left.pop()
        inner = node.values() if isinstance(node, dict) else node
        if isinstance(inner, str | bytes) or not isinstance(inner, Collection):
            continue
        count += len(inner)
        if count > _FILE_NODES_MAX:
            raise ValueError(f"more than {_FILE_NODES_MAX} values are no settings")
        left.extend(inner)
    return loaded


def cut(text: str, chars_max: int) -> str:
    """``text``, its end left out where it is longer than ``chars_max``."""
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."


def one_line(text: str) -> str:
    """``text`` with what is not printable as an escape: it may come from a file or a name."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
