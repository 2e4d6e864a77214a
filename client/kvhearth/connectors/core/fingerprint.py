"""Digest of an engine's settings: of all of them, but a list of those that are harmless.

A setting that nobody thought of then keeps engines apart, instead of giving one the other's KV.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth.connectors.core.weights import directory_digest, file_digest

_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash", "_attn_implementation")
"""Entries of any configuration that say where it came from, not what it is."""
_PRINTED = ("torch.dtype", "torch.device")
"""Types of whose values the text says all."""
_FOLDER = re.compile(r"(path|dir|directory|folder)$")
"""Ends of the names of settings whose value may be a directory without a separator."""
_ABOUT = re.compile(
    r"(_PORTS?|_HOST(NAME)?|_IP|_ADDR(ESS)?|_RANK(_LOCAL)?|_DIR|_ROOT|_ID|_KEY|_TOKEN|TIMEOUT\w*"
    r"|_LOGG?\w*|_LEVEL|INTERVAL\w*|_SOURCE|CACHE_(MB|SIZE_MB))$"
)
"""Ends of the names of variables that say where, when or how loud, not what is computed."""


@dataclass(frozen=True)
class Fingerprint:
    """Digest of settings.

    Attributes:
        digest: hex digest, equal for settings that say the same.
        unknown: names of settings that cannot be compared between two runs of an engine, such as
            functions and files that cannot be read.
    """

    digest: str
    unknown: tuple[str, ...]


def fingerprint(settings: Mapping[str, Any], harmless: Collection[str] = ()) -> Fingerprint:
    """Return the digest of settings, wherever their files are.

    A value that is the path of a file or directory counts by what is in there, a text of JSON by
    what it says, and an object by its fields.

    Args:
        settings: values by name.
        harmless: names that do not count; those of nested settings have dots.
    """
    reader = _Reader(frozenset(harmless))
    plain = reader.mapping(settings, "")
    text = json.dumps(plain, sort_keys=True)
    return Fingerprint(hashlib.sha256(text.encode()).hexdigest(), tuple(reader.unknown))


def fields_of(settings: Any) -> dict[str, Any]:
    """Return an object's settings by name: a dataclass's fields, else its attributes."""
    if dataclasses.is_dataclass(settings):
        names = [field.name for field in dataclasses.fields(settings)]
        return {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    return dict(vars(settings))


def environment(prefix: str) -> dict[str, str]:
    """Return the variables of this process that begin with ``prefix`` and may change KV."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(prefix) and not _ABOUT.search(name)
    }


class _Reader:
    """Turns values into ones that JSON has, and collects the names of those that have none."""

    def __init__(self, harmless: frozenset[str]) -> None:
        self.unknown: list[str] = []
        self._harmless = harmless

    def mapping(self, values: Mapping[Any, Any], place: str) -> dict[str, Any]:
        found = {}
        for name, value in values.items():
            here = f"{place}.{name}" if place else str(name)
            if name in _VOLATILE or here in self._harmless:
                continue
            try:
                found[f"{type(name).__name__}:{name}"] = self._plain(value, here)
            except Exception:  # noqa: BLE001 - whatever an engine's object raises
                self.unknown.append(here)
        return found

    def _plain(self, value: Any, place: str) -> Any:
        if value is None or isinstance(value, (bool, float)):
            return value
        if isinstance(value, int):
            return value if abs(value) < 1 << 63 else hex(value)
        if isinstance(value, bytes):
            return ["bytes", value.hex()]
        if isinstance(value, enum.Enum):
            return ["enum", type(value).__name__, value.name]
        if isinstance(value, (str, os.PathLike)):
            return self._text(os.fspath(value), place)
        if isinstance(value, Mapping):
            return self.mapping(value, place)
        if isinstance(value, (list, tuple)):
            return self._list(value, place)
        if isinstance(value, (set, frozenset)):
            return sorted(self._list(value, place), key=json.dumps)
        return self._object(value, place)

    def _list(self, values: Iterable[Any], place: str) -> list[Any]:
        return [self._plain(value, place) for value in values]

    def _object(self, value: Any, place: str) -> Any:
        if isinstance(value, type):
            return ["class", value.__module__, value.__qualname__]
        if callable(getattr(value, "to_dict", None)):
            return self.mapping(value.to_dict(), place)
        if hasattr(value, "__struct_fields__"):
            names = value.__struct_fields__
            return self.mapping({name: getattr(value, name) for name in names}, place)
        if dataclasses.is_dataclass(value):
            return self.mapping(fields_of(value), place)
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name in _PRINTED:
            return ["text", name, str(value)]
        self.unknown.append(place)
        return ["object", name]

    def _text(self, text: str, place: str) -> Any:
        if text[:1] in ("{", "["):
            try:
                return self._plain(json.loads(text), place)
            except ValueError:
                return text
        path = Path(text).expanduser()
        # A word such as "triton" may be a directory's name, too, where the engine was started.
        folder = os.sep in text or _FOLDER.search(place)
        try:
            if folder and path.is_dir():
                return ["files", directory_digest(path)]
            return ["file", file_digest(path).hex()] if path.is_file() else text
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) != errno.ENAMETOOLONG:
                self.unknown.append(place)
            return text
