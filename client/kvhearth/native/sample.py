"""Hashes of sampled keys, in C: without a copy of the keys, and none of what is not sampled."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvhearth.native import library

I64 = npt.NDArray[np.int64]


class _Sampling(ctypes.Structure):
    _fields_ = (
        ("by", ctypes.c_uint64),
        ("last", ctypes.c_uint64),
        ("hashes", ctypes.c_void_p),
        ("owners", ctypes.c_void_p),
    )


_I64, _VOID = ctypes.c_int64, ctypes.c_void_p
# The interpreter's lock is kept: a call takes microseconds.
_SAMPLE = ctypes.PYFUNCTYPE(_I64, _VOID, _VOID, _VOID, _I64, _I64)


class KeySampler:
    """Finds the keys of a sample; used by one thread.

    Args:
        by: odd factor of the hash.

    Raises:
        OSError: there is no native module.
    """

    def __init__(self, by: int) -> None:
        native = library()
        if native is None:
            raise OSError("the native module is not available")
        self._sample = _SAMPLE(("kvh_sample", native))
        self._blobs = (ctypes.c_char_p * 0)()
        self._sizes = (ctypes.c_int64 * 0)()
        self._how = _Sampling(by=by)
        self._at = ctypes.addressof(self._how)
        self._grow(8192)
        self.use(1 << 64)

    def use(self, threshold: int) -> None:
        """Sample keys whose hash is below ``threshold`` from now on."""
        self._how.last = threshold - 1

    def _grow(self, keys: int) -> None:
        self._room = keys
        self._hashes = np.zeros(keys, np.uint64)
        self._owners: I64 = np.zeros(keys, np.int64)
        self._how.hashes, self._how.owners = self._hashes.ctypes.data, self._owners.ctypes.data

    def find(self, blobs: Sequence[bytes], key_bytes: int) -> tuple[npt.NDArray[np.uint64], I64]:
        """Return the hashes of sampled keys, and the numbers of their blobs; both of shape (n,).

        They are in the order of the blobs, each from its last key to its first.

        Args:
            blobs: keys of ``key_bytes``, at least 8, side by side.
        """
        count, sizes = len(blobs), [len(blob) for blob in blobs]
        if (keys := sum(sizes) // key_bytes) > self._room:
            self._grow(2 * keys)
        if count > len(self._blobs):
            self._blobs = (ctypes.c_char_p * (2 * count))()
            self._sizes = (ctypes.c_int64 * (2 * count))()
        self._blobs[:count] = [*blobs]
        self._sizes[:count] = [*sizes]
        found: int = self._sample(
            self._at,
            ctypes.addressof(self._blobs),
            ctypes.addressof(self._sizes),
            count,
            key_bytes,
        )
        return self._hashes[:found].copy(), self._owners[:found].copy()
