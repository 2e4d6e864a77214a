"""Keys and page numbers as an engine passes them, and their checked copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvhearth.model import I64

KeysAndPages = Mapping[int, tuple[Sequence[bytes], I64 | Sequence[int]]]
"""By KV cache group: n keys in chain order and n distinct engine pages."""


def own_pages(groups: KeysAndPages) -> KeysAndPages:
    """Return a copy of a caller's keys, which are read once, with their pages."""
    return {group: (tuple(keys), pages) for group, (keys, pages) in groups.items()}


def page_numbers(pages: I64 | Sequence[int]) -> I64 | None:
    """Return a copy of the caller's pages, shape (n,); None if they are not integers."""
    try:
        numbers = np.asarray(pages)
        if numbers.ndim != 1 or (numbers.size and not np.issubdtype(numbers.dtype, np.integer)):
            return None
        return numbers.astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
