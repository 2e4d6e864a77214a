"""Methods of issuing copies, the choice between them, and the file that remembers their rates.

``loop`` calls the driver once a copy, ``batch`` once for all (CUDA 12.8 and newer), ``kernel``
moves small fragments by the GPU's processors, which the engine also needs (docs/adr/0023).
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any

from kvhearth.copiers.base import CopyKind
from kvhearth.counters import log_event
from kvhearth.errors import KVHearthError, Reason

METHOD_ENV = "KVHEARTH_COPY_METHOD"
"""Environment variable that names the method if no argument or option does."""
AUTO = "auto"
FRAGMENT_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""Sizes of fragments at which the methods are measured."""
KERNEL_GAIN = 1.25
"""A kernel takes processors from the engine: it must be this many times as fast as the rest."""
BATCH_GAIN = 0.95
"""One call for many copies saves the host's time: it may be slightly slower than a loop."""
_FILE_BYTES_MAX = 64 << 10
_ENTRIES_MAX = 16
_GBPS_MAX = 1e6


class CopyMethod(enum.StrEnum):
    """A method of issuing copies."""

    LOOP = "loop"
    BATCH = "batch"
    KERNEL = "kernel"


def requested(argument: str = AUTO, environment: Mapping[str, str] = os.environ) -> str:
    """Return the method that the user wants, or ``auto``.

    Args:
        argument: an argument or option, which precedes the environment unless ``auto``.

    Raises:
        KVHearthError: ``config_invalid`` for a method that does not exist.
    """
    value = environment.get(METHOD_ENV, "") if argument == AUTO else argument
    if value not in ("", AUTO, *CopyMethod):
        names = ", ".join((AUTO, *CopyMethod))
        raise KVHearthError(Reason.CONFIG_INVALID, f"copy method {value!r} is none of {names}")
    return value or AUTO


@dataclass(frozen=True)
class Rates:
    """Measured rates of one kind of GPU.

    Attributes:
        values: GB/s by direction and method, one for each of ``FRAGMENT_BYTES``; 0 for a method
            that failed or copied wrong bytes.
    """

    values: Mapping[CopyKind, Mapping[CopyMethod, tuple[float, ...]]]

    def best(self, kind: CopyKind, fragment_bytes: float) -> CopyMethod:
        """Return the method for copies of ``fragment_bytes`` on average."""
        # The nearest size below, so that a method is not used for smaller copies than it suits.
        at = max(sum(size <= fragment_bytes for size in FRAGMENT_BYTES) - 1, 0)
        rates = {method: values[at] for method, values in self.values.get(kind, {}).items()}
        loop, batch = rates.get(CopyMethod.LOOP, 0.0), rates.get(CopyMethod.BATCH, 0.0)
        engine = CopyMethod.BATCH if batch > loop * BATCH_GAIN else CopyMethod.LOOP
        if rates.get(CopyMethod.KERNEL, 0.0) > max(loop, batch) * KERNEL_GAIN:
            return CopyMethod.KERNEL
        return engine

    def methods(self) -> set[CopyMethod]:
        """Return the methods that were measured."""
        return {method for rates in self.values.values() for method in rates}

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``from_json``."""
        return {
            str(kind): {str(method): list(values) for method, values in rates.items()}
            for kind, rates in self.values.items()
        }

    @classmethod
    def from_json(cls, data: Any) -> Rates | None:
        """Parse ``to_json``'s values; None unless they are complete and plausible."""
        try:
            values = {
                CopyKind(kind): {
                    CopyMethod(method): tuple(float(value) for value in numbers)
                    for method, numbers in rates.items()
                }
                for kind, rates in data.items()
            }
        except (AttributeError, TypeError, ValueError):
            return None
        rows = [row for rates in values.values() for row in rates.values()]
        right = all(
            len(row) == len(FRAGMENT_BYTES) and all(0 <= value <= _GBPS_MAX for value in row)
            for row in rows
        )
        complete = set(values) == set(CopyKind) and all(
            CopyMethod.LOOP in rates for rates in values.values()
        )
        return cls(values) if right and complete else None


def choose(
    kind: CopyKind,
    fragment_bytes: float,
    wanted: str,
    problems: Mapping[CopyMethod, str],
    rates: Rates | None,
) -> CopyMethod:
    """Return the method for a submission into registered memory.

    Args:
        fragment_bytes: average bytes of its copies.
        wanted: a method, or ``auto``.
        problems: reason why each method cannot be used, or empty.
        rates: what was measured; None while nothing was.
    """
    if wanted != AUTO and not problems[CopyMethod(wanted)]:
        return CopyMethod(wanted)
    if rates is not None:
        best = rates.best(kind, fragment_bytes)
        if not problems[best]:
            return best
    return CopyMethod.LOOP if problems[CopyMethod.BATCH] else CopyMethod.BATCH


# -- the file ----------------------------------------------------------------------------------


def rates_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file that remembers rates, in the user's cache directory."""
    base = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "kvhearth" / "copy-rates.json"


def load_rates(path: Path, identity: str) -> Rates | None:
    """Return the remembered rates of a GPU and driver; None if there are none that are right."""
    return Rates.from_json(_entries(path).get(identity))


def save_rates(path: Path, identity: str, rates: Rates) -> None:
    """Remember rates, best effort: without them they are measured at the next start."""
    entries = {name: value for name, value in _entries(path).items() if name != identity}
    kept = dict([*entries.items(), (identity, rates.to_json())][-_ENTRIES_MAX:])
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_text(json.dumps(kept), encoding="utf-8")
        # A reader finds the old file or the new one.
        part.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        log_event(INFO, "copy.rates_not_remembered", "the rates are not remembered", error=error)


def _entries(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        entries = json.loads(data) if len(data) <= _FILE_BYTES_MAX else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}
