"""The bounds of the codecs' errors, as docs/protocol.md states them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvhearth.codec import GROUP_ELEMENTS, SATURATION

BITS: dict[str, Any] = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
_SMALLEST = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}


def values_of(words: np.ndarray, dtype: str) -> np.ndarray:
    """Return elements as double precision."""
    with np.errstate(invalid="ignore"):  # signalling no-numbers
        if dtype == "bfloat16":
            return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(float)
        return words.view(dtype).astype(float)


def words_of(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return single-precision values as elements."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def bounds(codec: str, dtype: str, words: np.ndarray, got: np.ndarray) -> None:
    """Assert that decoded elements are as near to the encoded ones as promised."""
    size = GROUP_ELEMENTS[codec]
    wanted = values_of(words, dtype).reshape(-1, size)
    found = values_of(got, dtype).reshape(-1, size)
    finite = np.isfinite(wanted)
    broken = ~finite if codec == "fp8" else np.repeat(~finite.all(1, keepdims=True), size, 1)
    np.testing.assert_array_equal(np.isnan(found), broken)
    wanted = np.clip(np.where(broken, 0, wanted), -SATURATION, SATURATION)
    error = np.abs(np.where(broken, 0, found) - wanted)
    if codec == "fp8":
        largest = np.abs(wanted).max(1, keepdims=True)
        bound = np.maximum(np.abs(wanted) / 16, largest * 2.0**-17) + 2.0**-126
    else:
        low, high = wanted.min(1, keepdims=True), wanted.max(1, keepdims=True)
        bound = (high - low + np.abs(low) / 128) / 29 + 2.0**-122
        bound = bound + np.abs(wanted) * 2.0**-8
    bound = bound + _SMALLEST[dtype]
    worst = int(np.argmax(error - bound))
    assert (error <= bound).all(), f"{wanted.flat[worst]} became {found.flat[worst]}"
