"""Runs all parts of ``kvhearth bench local``."""

from __future__ import annotations

import time
from typing import Any

from kvhearth.version import __version__
from kvhearth_lab.bench.local.baseline import core_part, idle_part
from kvhearth_lab.bench.local.copies import copy_part
from kvhearth_lab.bench.local.figures import Result
from kvhearth_lab.bench.local.lookups import lookup_part
from kvhearth_lab.bench.local.sizes import Sizes
from kvhearth_lab.bench.report import machine

_PARTS = (idle_part, copy_part, lookup_part, core_part)


def run(sizes: Sizes) -> dict[str, Any]:
    """Measure everything and return the object that the verb prints.

    Raises:
        KVHearthError: a daemon, a client or a part of the run does not work, so that figures would
            mean nothing.
    """
    result = Result()
    result.values["version"] = __version__
    result.values["machine"] = machine()
    start = time.monotonic()
    for part in _PARTS:
        part(result, sizes)
    result.values["seconds"] = round(time.monotonic() - start, 1)
    return result.as_json()
