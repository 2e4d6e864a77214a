"""Parses and formats the values of settings: sizes, durations, tenants, directories, addresses."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

_BINARY = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_DECIMAL = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}
_SIZE_UNITS = {"": 1, "b": 1}
_SIZE_UNITS |= {name.lower(): size for name, size in (_BINARY | _DECIMAL).items()}
_SIZE_UNITS |= {name[:-1].lower(): size for name, size in (_BINARY | _DECIMAL).items()}
_DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _number_and_unit(text: str, units: Mapping[str, float]) -> tuple[str, str] | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units:
        return None
    return match[1], match[2]


def parse_size(value: object) -> int:
    """Parse bytes from ``4096``, ``"512MiB"``, ``"1.5Gi"`` or ``"64GB"``.

    Units mean the same as in Kubernetes and numfmt: ``Gi`` and ``GiB`` are 1024^3 bytes, ``G`` and
    ``GB`` are 1000^3. Case does not matter.

    Raises:
        ValueError: not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip()
    if text.isdecimal():
        return int(text)
    parsed = None if isinstance(value, bool) else _number_and_unit(text, _SIZE_UNITS)
    size = Fraction(parsed[0]) * _SIZE_UNITS[parsed[1]] if parsed else None
    if size is None or size.denominator != 1:
        raise ValueError("not a size; write bytes or a unit: 65536, 512MiB, 64GiB, 64GB")
    return int(size)


def parse_duration_s(value: object) -> float:
    """Parse seconds from ``30``, ``0.5``, ``"30s"``, ``"500ms"``, ``"5m"``, ``"24h"`` or ``"1d"``.

    Raises:
        ValueError: not a duration.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    parsed = None if isinstance(value, bool) else _number_and_unit(str(value), _DURATION_UNITS)
    if parsed is None:
        raise ValueError("not a duration; write seconds or a unit: 0.5, 30s, 500ms, 5m, 24h")
    return float(parsed[0]) * _DURATION_UNITS[parsed[1]]


def format_size(size: int) -> str:
    """Format a size exactly: ``"64GiB"``, ``"1536MiB"``, ``"64GB"``, ``"5"``.

    Prefers 1024s; 1000s are for sizes that they write in fewer digits.
    """
    texts = [str(size)]
    for units in (_DECIMAL, _BINARY):
        exact = (f"{size // each}{name}" for name, each in units.items() if size % each == 0)
        texts += [next(exact, texts[0])] if size else []
    return min(reversed(texts), key=lambda text: sum(map(str.isdigit, text)))


def format_duration_s(seconds: float) -> str:
    """Format a duration as ``parse_duration_s`` takes it: ``"5s"``, ``"0.5s"``."""
    return f"{seconds:g}s"


HTTP_OFF = "off"
_PORT_MAX = 65535
_HOST_CHARS_MAX = 253
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_UID_MAX = 2**32 - 2  # the last one is the kernel's "no such uid"


@dataclass(frozen=True)
class TenantSetting:
    """One tenant: its users, and its quotas.

    Args:
        name: the tenant's part in its namespaces' digests, and the name of its segment.
        uids: the user ids whose processes attach as this tenant; none for a tenant that only
            engines on other hosts use, through a gateway.
        bytes: its segment's length, before rounding down to whole slabs.
        ssd_bytes: its part of the SSD tier; 0 for a part of what the others leave there, in
            proportion to memory.
    """

    name: str
    uids: tuple[int, ...]
    bytes: int
    ssd_bytes: int = 0

    def __str__(self) -> str:
        on_ssd = f":{format_size(self.ssd_bytes)}" if self.ssd_bytes else ""
        return f"{self.name}={','.join(map(str, self.uids))}:{format_size(self.bytes)}{on_ssd}"


def parse_tenant(value: object) -> TenantSetting:
    """Parse ``NAME=[UID[,UID...]]:SIZE[:SSD]``, or a mapping of name, uids, bytes and ssd_bytes.

    Raises:
        ValueError: the value has another form.
    """
    if isinstance(value, TenantSetting):
        return value
    if isinstance(value, Mapping):
        return _tenant_row(value)
    name, equals, rest = str(value).partition("=")
    uids, *sizes = rest.split(":")
    if not equals or not 1 <= len(sizes) <= 2:
        raise ValueError(
            f"{value!r} is not a tenant; write NAME=UID[,UID...]:SIZE[:SSD]: a=1000:8GiB"
        )
    return _tenant(name, uids.split(",") if uids.strip() else [], *sizes)


def _tenant_row(row: Mapping[object, object]) -> TenantSetting:
    if not {"name", "bytes"} <= row.keys() <= {"name", "uids", "bytes", "ssd_bytes"}:
        raise ValueError(f"{row!r} is not a tenant; write {{name: a, uids: [1000], bytes: 8GiB}}")
    uids = row.get("uids")
    listed = uids if isinstance(uids, list | tuple) else [] if uids is None else [uids]
    return _tenant(str(row["name"]), listed, row["bytes"], row.get("ssd_bytes", 0))


def _tenant(name: str, uids: Sequence[object], size: object, on_ssd: object = 0) -> TenantSetting:
    check_tenant_name(name)
    known = tuple(_parse_uid(uid) for uid in uids)
    return TenantSetting(name, known, parse_size(size), parse_size(on_ssd))


def check_tenant_name(name: str) -> None:
    """Refuse a text that cannot be a tenant's name.

    Raises:
        ValueError: it is empty, too long or of other characters.
    """
    if _TENANT_NAME.fullmatch(name) is None:
        raise ValueError(f"tenant name {name!r}: use at most 63 of a-z 0-9 - _")


@dataclass(frozen=True)
class SsdDir:
    """A directory of the SSD tier.

    Args:
        path: absolute; made at the start if its parent exists.
        bytes: upper bound on the bytes taken there, by the file system's own count.
    """

    path: Path
    bytes: int

    def __str__(self) -> str:
        return f"{self.path}={format_size(self.bytes)}"


def parse_ssd_dir(value: object) -> SsdDir:
    """Parse ``PATH=SIZE``; the path may hold a ``=`` itself.

    Raises:
        ValueError: the text has another form, or the path is not absolute.
    """
    if isinstance(value, SsdDir):
        return value
    path, equals, size = str(value).rpartition("=")
    if not equals or not path:
        raise ValueError(f"{value!r} is not a directory and its size; write /mnt/nvme/kv=500GiB")
    if not path.startswith(("/", "~")):
        raise ValueError(f"{path!r} is not absolute; write it from / on: /mnt/nvme/kv=500GiB")
    return SsdDir(directory(Path(path)), parse_size(size))


def directory(value: Path) -> Path:
    """Parse an absolute path without ``~`` and ``..``.

    Raises:
        ValueError: nothing can have that name.
    """
    if "\0" in str(value):
        raise ValueError("a path has no zero byte; choose another directory")
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise ValueError("not UTF-8, which gRPC wants; choose another directory") from None
    try:
        return Path(os.path.abspath(value.expanduser()))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"not a directory here: {error}; write it from / on") from None


def _parse_uid(value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal() or int(text) > _UID_MAX:
        raise ValueError(f"{value!r} is not a user id; write its number (id -u NAME)")
    return int(text)


def _items(value: object, separators: str) -> list[object]:
    """Split a list setting: a YAML list, repeated flags, or one separated text (environment)."""
    parts = list(value) if isinstance(value, list | tuple) else [value]
    found: list[object] = []
    for part in parts:
        found += re.split(separators, part.strip()) if isinstance(part, str) else [part]
    return [part for part in found if part != ""]


def _parse_tenants(value: object) -> tuple[TenantSetting, ...]:
    return tuple(parse_tenant(item) for item in _items(value, r"[;\s]+"))


def _parse_ssd_dirs(value: object) -> tuple[SsdDir, ...]:
    # A flag or a line of YAML names one directory, which may have a space in its name.
    parts = value if isinstance(value, list | tuple) else _items(value, r"\s+")
    return tuple(parse_ssd_dir(part) for part in parts)


def _parse_uids(value: object) -> tuple[int, ...]:
    return tuple(_parse_uid(item) for item in _items(value, r"[,;\s]+"))


@dataclass(frozen=True)
class Shown:
    """Presentation of a setting in help and sample files.

    Args:
        metavar: placeholder of its value.
        format: writes its default.
        flag: its name on the command line, where that differs from the setting's.
    """

    metavar: str
    format: Callable[[Any], str]
    flag: str = ""


def lower(value: object) -> object:
    """Return text in lower case, any other value unchanged."""
    return value.lower() if isinstance(value, str) else value


def on_or_off(value: object) -> object:
    """Return YAML's booleans as the words that were written, and text in lower case."""
    return ("on" if value else "off") if isinstance(value, bool) else lower(value)


Size = Annotated[int, BeforeValidator(parse_size), Shown("SIZE", format_size)]
OptionalFile = Annotated[Path | None, Shown("FILE", str)]
OptionalSize = Annotated[
    int | None,
    BeforeValidator(lambda value: None if value is None else parse_size(value)),
    Shown("SIZE", format_size),
]
Seconds = Annotated[
    float,
    BeforeValidator(parse_duration_s),
    Field(ge=0, allow_inf_nan=False),
    Shown("DURATION", format_duration_s),
]
Tenants = Annotated[
    tuple[TenantSetting, ...],
    NoDecode,
    BeforeValidator(_parse_tenants),
    Shown("NAME=[UID[,UID...]]:SIZE[:SSD]", str),
]
SsdDirs = Annotated[
    tuple[SsdDir, ...],
    NoDecode,
    BeforeValidator(_parse_ssd_dirs),
    Shown("PATH=SIZE", str, "--ssd-dir"),
]
Remote = Annotated[str, BeforeValidator(lambda value: str(value).strip()), Shown("URL", str)]
Uids = Annotated[tuple[int, ...], NoDecode, BeforeValidator(_parse_uids), Shown("UID", str)]


def parse_http(value: object) -> str:
    """Parse an HTTP address: ``HOST:PORT``, ``[IPV6]:PORT`` or ``off``.

    Raises:
        ValueError: the text has another form.
    """
    text = "off" if value is False else str(value).strip()  # YAML reads off as false
    if text.lower() == HTTP_OFF:
        return HTTP_OFF
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    numbered = re.fullmatch("[0-9]{1,5}", port) is not None and int(port) <= _PORT_MAX
    if not colon or not _is_host(bare) or not numbered or (":" in bare and bare == host):
        raise ValueError(f"{text!r} is not HOST:PORT; write 127.0.0.1:9460, [::1]:9460 or off")
    return text


def _is_host(text: str) -> bool:
    """Return whether ``text`` is an address, or a name that a resolver takes."""
    if len(text) > _HOST_CHARS_MAX or not text.isascii() or not text.isprintable() or " " in text:
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST_NAME.fullmatch(text) is not None
    return True


Address = Annotated[str, BeforeValidator(parse_http), Shown("HOST:PORT|off", str)]


def host_and_port(text: str) -> tuple[str, int] | None:
    """Return host and port of a text from ``parse_http``; None for ``off``."""
    if text == HTTP_OFF:
        return None
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ``host``; of names, only localhost is known."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
