"""The codecs: layout at rest, the bounds that docs/protocol.md states, and values without order."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.cases import cases
from support.codec_bounds import BITS, bounds, values_of, words_of
from support.core_kit import no_deadline

import kvhearth
from kvhearth.codec import ELEMENT_BYTES, GROUP_ELEMENTS, SATURATION, encoding_of
from kvhearth.copiers import kernels
from kvhearth.transfer.memory import source_of

CODECS = tuple(GROUP_ELEMENTS)
DTYPES = tuple(ELEMENT_BYTES)
GOLDEN = {
    "fp8": "32a171a29751053780d5fce4bfcc7faf",
    "int4": "d519a093f1d7fab916b07e46e94cb8bf",
}


def roundtrip(codec: str, dtype: str, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return elements' bytes after a way through the codec, and the bytes at rest."""
    encoding = encoding_of(codec, dtype, words.nbytes)
    stored = np.full(encoding.stored_bytes, 0xA5, np.uint8)
    encoding.encode(words.view(np.uint8), stored)
    back = np.full(words.nbytes, 0xA5, np.uint8)
    encoding.decode(stored, back)
    return back.view(words.dtype), stored


@cases("codec", CODECS)
@cases("dtype", DTYPES)
@no_deadline
@given(data=st.data())
def test_any_bits_come_back_within_the_bounds(codec: str, dtype: str, data: st.DataObject) -> None:
    """Draws bit patterns: zeros, denormals, outliers, infinities and no-numbers among them."""
    count = 64 * data.draw(st.integers(1, 4))
    words = data.draw(hnp.arrays(BITS[dtype], count, fill=st.integers(0, 9).map(BITS[dtype])))
    got, _ = roundtrip(codec, dtype, words)
    bounds(codec, dtype, words, got)


@cases("codec", CODECS)
@cases("dtype", DTYPES)
@cases("scale", [1e-38, 1e-6, 1e-2, 1.0, 300.0, 6e4, 1e37])
@cases("outlier", [1.0, 50.0, -1e4])
def test_normal_values_come_back_within_the_bounds(
    codec: str, dtype: str, scale: float, outlier: float
) -> None:
    if dtype == "float16" and scale > 6e4:
        return
    random = np.random.default_rng(7)
    # The bytes of the largest are encoded in several pieces.
    drawn = random.standard_normal(1 << (17 if scale == 1.0 else 13)) * scale
    drawn[:: 64 * 3] *= outlier
    values = np.clip(drawn, -3e38, 3e38).astype(np.float32)
    words = words_of(np.clip(values, -6e4, 6e4) if dtype == "float16" else values, dtype)
    got, _ = roundtrip(codec, dtype, words)
    bounds(codec, dtype, words, got)


@cases("codec", CODECS)
@cases("dtype", DTYPES)
@cases("middle", [1.003, -1.003, 1000.7, -1000.7])
@cases("width", [0.0, 1e-3, 1e-2])
def test_a_small_range_far_from_zero(codec: str, dtype: str, middle: float, width: float) -> None:
    """The least element is no bfloat16, and the range is less than a step between those."""
    values = (middle * (1 + width * np.linspace(-1, 1, 128))).astype(np.float32)
    words = words_of(values, dtype)
    got, _ = roundtrip(codec, dtype, words)
    bounds(codec, dtype, words, got)


@cases("codec", CODECS)
@cases("dtype", DTYPES)
def test_zeros_and_powers_of_two_are_exact(codec: str, dtype: str) -> None:
    for value in (0.0, 1.0, -0.5, 2.0**-10):
        words = words_of(np.full(128, value, np.float32), dtype)
        got, _ = roundtrip(codec, dtype, words)
        np.testing.assert_array_equal(values_of(got, dtype), values_of(words, dtype))


@cases("dtype", DTYPES)
def test_broken_values_stay_broken_and_spread_no_further_than_their_group(dtype: str) -> None:
    values = np.linspace(-3, 3, 256, dtype=np.float32)
    values[[5, 70]] = np.nan, np.inf
    words = words_of(values, dtype)
    got, _ = roundtrip("fp8", dtype, words)
    assert np.flatnonzero(np.isnan(values_of(got, dtype))).tolist() == [5, 70]
    got, _ = roundtrip("int4", dtype, words)
    assert np.flatnonzero(np.isnan(values_of(got, dtype))).tolist() == list(range(128))


def test_values_beyond_the_range_saturate() -> None:
    words = words_of(np.array([3e38, -3e38] * 32, np.float32), "float32")
    for codec in CODECS:
        got, _ = roundtrip(codec, "float32", words)
        limits = np.array([SATURATION, -SATURATION] * 32, np.float32)
        np.testing.assert_allclose(values_of(got, "float32"), limits, rtol=1 / 64)


@cases("codec", CODECS)
@cases("dtype", DTYPES)
def test_any_bytes_decode(codec: str, dtype: str) -> None:
    encoding = encoding_of(codec, dtype, 4096)
    damaged = np.random.default_rng(1).integers(0, 256, encoding.stored_bytes, np.uint8)
    damaged[-200:] = 0xFF
    encoding.decode(damaged, np.zeros(4096, np.uint8))


@cases("codec", CODECS)
def test_the_largest_half_does_not_become_infinite(codec: str) -> None:
    words = np.array([65504, -65504, 65000, 3] * 16, np.float16)
    got, _ = roundtrip(codec, "float16", words)
    assert np.isfinite(got).all()


def test_the_bytes_at_rest_by_hand() -> None:
    values = np.zeros(64, np.float32)
    values[:5] = 448, -224, 1, 0.5 * 2.0**-9, 1.5 * 2.0**-9
    values[32:] = -3.5
    _, stored = roundtrip("fp8", "float32", values)
    assert stored.tobytes().hex() == "7ef6380002" + 27 * "00" + 32 * "fe" + "7f78" + 14 * "00"
    values = np.tile(np.arange(16, dtype=np.float32), 4) - 7
    _, stored = roundtrip("int4", "float32", values)
    codes = "".join(f"{code * 0x11:02x}" for code in range(16)) * 2
    assert stored.tobytes().hex() == codes + "803f" + "e0c0" + 12 * "00"


@cases("codec", CODECS)
def test_the_digest_of_many_bytes_at_rest(codec: str) -> None:
    number = np.arange(1 << 15, dtype=np.uint32) * 40503
    words = (number & 0x7FF | (number >> 8 & 0x80FF) | 0x3C00).astype(np.uint16)
    _, stored = roundtrip(codec, "bfloat16", words)
    assert hashlib.sha256(stored.tobytes()).hexdigest()[:32] == GOLDEN[codec]


@cases(
    ("arguments", "reason"),
    [
        (("int5", "bfloat16", 128), "is not one of fp8, int4"),
        (("fp8", "fp8_e4m3", 128), "needs KV of float32, bfloat16, float16, not fp8_e4m3"),
        (("fp8", "bfloat16", 0), "not whole groups of 32"),
        (("fp8", "bfloat16", 65), "not whole groups of 32"),
        (("int4", "float32", 128), "not whole groups of 64"),
    ],
)
def test_shards_that_cannot_be_encoded(arguments: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        encoding_of(*arguments)


@cases(("codec", "share"), [("fp8", 1 / 2 + 1 / 64), ("int4", 1 / 4 + 1 / 32)])
def test_sizes_at_rest(codec: str, share: float) -> None:
    assert encoding_of(codec, "bfloat16", 1 << 20).stored_bytes == share * (1 << 20)
    assert encoding_of(codec, "bfloat16", 128).stored_bytes % 16 == 0


def test_pages_on_a_gpu_are_refused() -> None:
    pages = np.zeros((2, 64), np.float16)
    contract = kvhearth.contract_for(pages, model="m", revision="r", codec="fp8")
    elsewhere: Any = SimpleNamespace(device="cuda:0")
    if kernels.available() is None:
        pytest.skip("other tests have brought the interpreter, or there is a device")
    with pytest.raises(ValueError, match="codec fp8 for pages on cuda:0: no "):
        source_of(kvhearth.Pages(elsewhere, [0, 1]), 2, contract, written=False)
    assert source_of(pages, 2, contract, written=False).device == "cpu"
