"""What an engine names its pages by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvhearth.model import I64


def page_numbers(pages: I64 | Sequence[int]) -> I64 | None:
    """A copy of the caller's pages, shape (n,); None if these are not integers."""
    try:
        numbers = np.asarray(pages)
        if numbers.ndim != 1 or (numbers.size and not np.issubdtype(numbers.dtype, np.integer)):
            return None
        return numbers.astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
