"""Addresses of an engine's pages as equal runs, which is how kernels read and write shards."""

from __future__ import annotations

import math

import numpy as np

from kvhearth.model import I64
from kvhearth.page_layout import PagedKV


class PageRuns:
    """The pages of a group, cut into equal runs in the order of the shard's bytes.

    Args:
        kv: the registered pages, of any shape.

    Attributes:
        run_bytes: bytes of a run; a part of several times as many bytes is several runs.
        alignment: bytes of which all addresses and ``run_bytes`` are multiples.
    """

    def __init__(self, kv: PagedKV) -> None:
        self.run_bytes = run_bytes = math.gcd(*(part.run_bytes for part in kv.parts))
        places = [
            (part.address + at, part.stride_bytes)
            for part in kv.parts
            for at in range(0, part.run_bytes, run_bytes)
        ]
        self._starts, self._strides = np.array(places, np.int64).T
        self.alignment = math.gcd(run_bytes, *self._starts.tolist(), *self._strides.tolist())

    def fragments(self, pages: I64) -> I64:
        """Return the addresses of the runs of pages (n,), shape (n, runs of a page)."""
        addresses: I64 = self._starts + pages[:, None] * self._strides
        return addresses
