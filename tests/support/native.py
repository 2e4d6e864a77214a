"""Tests with and without the native module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvhearth import native


@contextmanager
def without_native() -> Iterator[None]:
    """Turn the native module off for what is made within the block, here and in child processes."""
    before = os.environ.get(native.VARIABLE)
    os.environ[native.VARIABLE] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[native.VARIABLE]
        else:
            os.environ[native.VARIABLE] = before
