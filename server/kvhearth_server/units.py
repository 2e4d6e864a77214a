"""Sizes and durations as people write them, and back to text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

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
    """Bytes from ``4096``, ``"512MiB"``, ``"1.5Gi"`` or ``"64GB"``.

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
    """Seconds from ``30``, ``0.5``, ``"30s"``, ``"500ms"``, ``"5m"``, ``"24h"`` or ``"1d"``.

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
    """An exact text of a size: ``"64GiB"``, ``"1536MiB"``, ``"64GB"``, ``"5"``.

    Prefers 1024s; 1000s are for sizes that they write in fewer digits.
    """
    texts = [str(size)]
    for units in (_DECIMAL, _BINARY):
        exact = (f"{size // each}{name}" for name, each in units.items() if size % each == 0)
        texts += [next(exact, texts[0])] if size else []
    return min(reversed(texts), key=lambda text: sum(map(str.isdigit, text)))


def format_duration_s(seconds: float) -> str:
    """A duration as ``parse_duration_s`` takes it: ``"5s"``, ``"0.5s"``."""
    return f"{seconds:g}s"
