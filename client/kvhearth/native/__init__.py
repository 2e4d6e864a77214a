"""Loader of the native module: copies, checksums and the shared index's lookup, in C.

KVHearth works without it: every user of ``library`` has a path in numpy, which is also the oracle
of the tests. ``KVHEARTH_NATIVE=0`` in the environment turns it off.
"""

from __future__ import annotations

import ctypes
import functools
import os
from logging import WARNING
from pathlib import Path

from kvhearth.counters import log_event

VARIABLE = "KVHEARTH_NATIVE"
REBUILD = "run: python -m kvhearth.native.build"


class Unavailable(Exception):
    """The library cannot be used; the message says why, and what to do."""


def available() -> str | None:
    """Return None if the native module is in use, else the reason why not."""
    if os.environ.get(VARIABLE) == "0":
        return f"turned off by {VARIABLE}=0"
    return _loaded()[1]


def library() -> ctypes.CDLL | None:
    """Return the library, or None if it is not available.

    Calls through it release the interpreter's lock. Each user declares the ``argtypes`` and
    ``restype`` of its own functions.
    """
    return None if available() else _loaded()[0]


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    # Imported here: `python -m kvhearth.native.build` runs it as the main module.
    from kvhearth.native.build import LIBRARY, sources_digest

    try:
        return load(LIBRARY, sources_digest()), None
    except Unavailable as error:
        log_event(WARNING, "native.missing", "copies and lookups are slower", reason=error)
        return None, str(error)


def load(path: Path, digest: str) -> ctypes.CDLL:
    """Load a library that was compiled from the sources of a digest; "" takes any.

    Raises:
        Unavailable: it is missing, broken, of another interface or of other sources.
    """
    from kvhearth.native.build import ABI

    if not path.is_file():
        raise Unavailable(f"not built; {REBUILD}")
    try:
        found = ctypes.CDLL(str(path))
        found.kvh_abi.restype = ctypes.c_int64
        found.kvh_sources.restype = ctypes.c_char_p
        abi, compiled_from = found.kvh_abi(), found.kvh_sources().decode()
    except (OSError, AttributeError) as error:
        raise Unavailable(f"cannot be loaded: {error}; {REBUILD}") from error
    if abi != ABI:
        raise Unavailable(f"of interface {abi}, not {ABI}; {REBUILD}")
    # Digests and not times: a checkout and an installation both write files in any order.
    if digest not in ("", compiled_from):
        raise Unavailable(f"compiled from other sources; {REBUILD}")
    return found
