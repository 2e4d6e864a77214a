"""Sizes and durations as people write them, and back to text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_SIZE_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _number_and_unit(text: str, units: Mapping[str, float]) -> tuple[float, float] | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units:
        return None
    return float(match[1]), units[match[2]]


def parse_size(value: object) -> int:
    """Bytes from ``4096``, ``"512MiB"`` or ``"1.5GiB"`` (Kubernetes' ``Mi`` is taken too).

    Raises:
        ValueError: not a size. Decimal units (``GB``) are refused: most who write one mean ``GiB``.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip()
    if text.isdecimal():
        return int(text)
    long = re.sub(r"(?i)([kmgt])i$", r"\1iB", text)
    parsed = None if isinstance(value, bool) else _number_and_unit(long, _SIZE_UNITS)
    size = parsed[0] * parsed[1] if parsed else math.nan
    if not size.is_integer():
        raise ValueError("not a size; write bytes or a unit of 1024: 65536, 512MiB, 64GiB")
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
    return parsed[0] * parsed[1]


def format_size(size: int) -> str:
    """The shortest exact text of a size: ``"64GiB"``, ``"1536MiB"``, ``"5"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _SIZE_UNITS[unit.lower()] == 0:
            return f"{size // _SIZE_UNITS[unit.lower()]}{unit}"
    return str(size)


def format_duration_s(seconds: float) -> str:
    """A duration as ``parse_duration_s`` takes it: ``"5s"``, ``"0.5s"``."""
    return f"{seconds:g}s"
