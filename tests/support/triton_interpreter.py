"""Triton's interpreter for the kernels, without its environment variable in other tests."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from kvhearth.copiers import kernels


def interpreted_kernels() -> Any:
    """Return the kernels as they run in Triton's interpreter, on CPU memory.

    The module of the programs is imported with ``TRITON_INTERPRET`` set, which Triton reads where
    a program is defined. It stays imported: no other test of a machine without a device uses it.
    """
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    name = f"{kernels.__name__}.programs"
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        if name in sys.modules and not sys.modules[name].INTERPRETED:
            del sys.modules[name]
        reason = kernels.available()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    assert reason is None, reason
    return kernels
