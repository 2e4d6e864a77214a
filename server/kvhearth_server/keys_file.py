"""The file of keys for records on SSD: YAML, ``tenant: [{id: ..., key: base64 of 32 bytes}, ...]``.

The first key of a tenant encrypts, all of them decrypt. Nobody but the daemon's user may read it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import YAML_BYTES_MAX, one_line, parse_yaml
from kvhearth_server.config.value_types import check_tenant_name
from kvhearth_server.ownership import read_secret
from kvhearth_server.tiers.ssd.format import key_id

KEY_BYTES = 32
_ID_CHARS_MAX = 64
_DIGITS = 16


@dataclass(frozen=True)
class Key:
    """One key; ``name`` is for people."""

    name: str
    secret: bytes = field(repr=False)

    @property
    def number(self) -> int:
        """The number by which records name it, which does not tell the key."""
        return key_id(self.secret)


def shown_id(number: int) -> str:
    """Return a key's number as the log and ``doctor`` write it."""
    return f"{number:0{_DIGITS}x}"


def read_keys(path: Path, tenants: Iterable[str]) -> Mapping[str, Sequence[Key]]:
    """Return the keys of a file by tenant.

    Raises:
        KVHearthError: ``config_invalid``: it cannot be read, others can read it, a key is wrong, or
            one of ``tenants`` has none. The message has no key.
    """
    try:
        found = _parse(read_secret(path, YAML_BYTES_MAX))
        if without := [name for name in tenants if name not in found]:
            raise ValueError(f"tenant {without[0]} has no key; give every tenant one")
        return found
    except OSError as error:
        wrong = error.strerror or str(error)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        wrong = f"line {mark.line + 1} is not YAML" if mark is not None else "it is not YAML"
    except ValueError as error:
        wrong = str(error)
    raise KVHearthError(
        Reason.CONFIG_INVALID,
        one_line(f"keys_file: {path}: {wrong}; make a key with: openssl rand -base64 32"),
    )


def _parse(data: bytes) -> dict[str, list[Key]]:
    loaded = parse_yaml(data)
    if not isinstance(loaded, dict) or not loaded:
        raise ValueError("write TENANT: [{id: NAME, key: BASE64}]")
    found: dict[str, list[Key]] = {}
    seen: dict[int, str] = {}
    for tenant, rows in loaded.items():
        check_tenant_name(str(tenant))
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"{tenant}: write a list of keys, the first one writes")
        found[str(tenant)] = keys = [_key(str(tenant), row) for row in rows]
        if len({key.name for key in keys}) < len(keys):
            raise ValueError(f"{tenant}: an id is there twice")
        for key in keys:
            if key.number in seen:
                raise ValueError(f"{tenant}: key {key.name!r} is also that of {seen[key.number]}")
            seen[key.number] = str(tenant)
    return found


def _key(tenant: str, row: object) -> Key:
    if not isinstance(row, dict) or row.keys() != {"id", "key"}:
        raise ValueError(f"{tenant}: a key is {{id: NAME, key: BASE64}}")
    name = str(row["id"])
    if not 0 < len(name) <= _ID_CHARS_MAX or not name.isprintable():
        raise ValueError(f"{tenant}: an id has 1..{_ID_CHARS_MAX} printable characters")
    try:
        secret = base64.b64decode(str(row["key"]), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ValueError(f"{tenant}: key {name!r} is not base64 of {KEY_BYTES} bytes")
    return Key(name, secret)
