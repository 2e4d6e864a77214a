"""Lossy codecs of KV blocks at rest, FP8 and INT4 with a scale for each group of elements.

docs/protocol.md defines the bytes; this module is the reference on the CPU, and the kernels on a
GPU write the same. All arithmetic is IEEE single precision without fused operations. Values beyond
``SATURATION`` become that. A value that is infinite or not a number comes back as NaN, with its
whole group under INT4: a loss never hides a broken block.

The idea of groups with a shared power of two is that of the OCP Microscaling formats, version 1.0;
the one of 4 bits between a minimum and a maximum of each group is common to KV quantisation
(KIVI, KVQuant).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvhearth.model import U8, U32

LOSSLESS = "none"
CODECS = (LOSSLESS, "fp8", "int4")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of the dtypes that can be encoded."""
GROUP_ELEMENTS = {"fp8": 32, "int4": 64}
"""Elements that share a scale, in the order of the shard's bytes."""
ALIGNMENT = 16
"""Bytes of which a block at rest is a multiple; zeros fill it up."""

SATURATION = 2.0**126
_SMALLEST = np.float32(2.0**-126)
_HALF_MAX = np.float32(65504)
_NAN_BF16 = 0x7FC0
_PIECE_ELEMENTS = 1 << 15
"""Elements encoded at once: their single-precision copies stay in a core's cache."""

F32 = npt.NDArray[np.float32]


class Encoding(NamedTuple):
    """One group's codec with the sizes of a shard.

    Attributes:
        codec: ``"fp8"`` or ``"int4"``.
        dtype: dtype of the engine's elements, a key of ``ELEMENT_BYTES``.
        source_bytes: bytes of a shard in the engine's pages.
        stored_bytes: bytes of a shard at rest.
    """

    codec: str
    dtype: str
    source_bytes: int
    stored_bytes: int

    @property
    def elements(self) -> int:
        """Number of elements of a shard."""
        return self.source_bytes // ELEMENT_BYTES[self.dtype]

    def encode(self, source: U8, target: U8) -> None:
        """Encode a shard.

        Args:
            source: its elements as bytes, shape (source_bytes,), dense.
            target: written, shape (stored_bytes,), dense.
        """
        encode = _encode_fp8 if self.codec == "fp8" else _encode_int4
        areas, used = self._areas(target)
        for start, stop in self._pieces():
            values = _widen(self._elements(source, start, stop), self.dtype)
            encode(values, [_part(area, self.elements, start, stop) for area in areas])
        target[used:] = 0

    def decode(self, source: U8, target: U8) -> None:
        """Decode a shard; any bytes decode to some values.

        Args:
            source: its bytes at rest, shape (stored_bytes,), dense.
            target: written, shape (source_bytes,), dense.
        """
        decode = _decode_fp8 if self.codec == "fp8" else _decode_int4
        areas, _ = self._areas(source)
        for start, stop in self._pieces():
            with np.errstate(invalid="ignore", over="ignore"):  # damaged bytes may be infinite
                values = decode([_part(area, self.elements, start, stop) for area in areas])
                _narrow(values, self.dtype, self._elements(target, start, stop))

    def _areas(self, block: U8) -> tuple[list[U8], int]:
        """Return the codes and the arrays of group parameters in a block, and where they end."""
        sizes, areas, at = _area_bytes(self.codec, self.elements), [], 0
        for size in sizes:
            areas.append(block[at : at + size])
            at += size
        return areas, at

    def _pieces(self) -> list[tuple[int, int]]:
        starts = range(0, self.elements, _PIECE_ELEMENTS)
        return [(start, min(start + _PIECE_ELEMENTS, self.elements)) for start in starts]

    def _elements(self, shard: U8, start: int, stop: int) -> U8:
        width = ELEMENT_BYTES[self.dtype]
        return shard[start * width : stop * width]


def encoding_of(codec: str, dtype: str, source_bytes: int) -> Encoding:
    """Return the encoding of shards of ``source_bytes`` bytes.

    Raises:
        ValueError: a codec or dtype that there is not, or a shard that is not whole groups.
    """
    if codec not in GROUP_ELEMENTS:
        raise ValueError(f"{codec!r} is not one of {', '.join(GROUP_ELEMENTS)}")
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"codec {codec} needs KV of {', '.join(ELEMENT_BYTES)}, not {dtype}")
    elements, rest = divmod(source_bytes, ELEMENT_BYTES[dtype])
    group = GROUP_ELEMENTS[codec]
    if rest or elements % group or not elements:
        raise ValueError(f"{source_bytes} bytes of {dtype} are not whole groups of {group}")
    used = sum(_area_bytes(codec, elements))
    return Encoding(codec, dtype, source_bytes, used + -used % ALIGNMENT)


def _area_bytes(codec: str, elements: int) -> tuple[int, ...]:
    """Return the bytes of the codes and of each array of group parameters, in their order."""
    groups = elements // GROUP_ELEMENTS[codec]
    return (elements, groups) if codec == "fp8" else (elements // 2, 2 * groups, 2 * groups)


def _part(area: U8, elements: int, start: int, stop: int) -> U8:
    """Return the part of an area that belongs to some of the shard's elements."""
    return area[start * len(area) // elements : stop * len(area) // elements]


def _widen(words: U8, dtype: str) -> F32:
    """Return elements in single precision, a new array."""
    if dtype == "float32":
        return words.view(np.float32).copy()
    if dtype == "float16":
        return words.view(np.float16).astype(np.float32)
    return (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow(values: F32, dtype: str, words: U8) -> None:
    """Write values as elements, rounded to the nearest, ties to even."""
    if dtype == "float32":
        words.view(np.float32)[:] = values
    elif dtype == "float16":
        # Rounding may have left a value above the largest one of this dtype.
        words.view(np.float16)[:] = np.clip(values, -_HALF_MAX, _HALF_MAX)
    else:
        bits = values.view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
        words.view(np.uint16)[:] = np.where(np.isnan(values), _NAN_BF16, rounded)


def _saturated(values: F32) -> F32:
    return np.clip(values, -np.float32(SATURATION), np.float32(SATURATION))


def _encode_fp8(values: F32, areas: list[U8]) -> None:
    codes, scales = areas
    rows = values.reshape(-1, GROUP_ELEMENTS["fp8"])
    size = np.abs(rows)
    finite = np.isfinite(size)
    size = np.where(finite, _saturated(size), 0)
    largest = size.max(axis=1).view(np.uint32)
    # The smallest power of two that brings the largest value to 448 = 1.75 * 2^8 or less.
    power = np.maximum((largest + np.uint32(0x1FFFFF)) >> 23, 9) - np.uint32(8)
    scales[:] = power
    scaled = size * ((np.uint32(254) - power) << np.uint32(23)).view(np.float32)[:, None]
    bits = scaled.view(np.uint32)
    normal = ((bits + (np.uint32(0x7FFFF) + ((bits >> 20) & 1))) >> 20) - np.uint32(960)
    # Adding 2^14 rounds to multiples of 2^-9, of which the low bits then have the number.
    tiny = (scaled + np.float32(16384)).view(np.uint32) - np.uint32(0x46800000)
    code = np.where(scaled < 2.0**-6, tiny, normal)
    code = np.where(finite, code, 0x7F) | ((rows.view(np.uint32) >> 24) & 0x80)
    codes[:] = code.reshape(-1)


def _decode_fp8(areas: list[U8]) -> F32:
    codes, scales = areas
    values = _FP8_VALUES[codes].reshape(-1, GROUP_ELEMENTS["fp8"])
    factor = (scales.astype(np.uint32) << np.uint32(23)).view(np.float32)
    result: F32 = (values * factor[:, None]).reshape(-1)
    return result


def _encode_int4(values: F32, areas: list[U8]) -> None:
    codes, steps, lows = areas
    rows = values.reshape(-1, GROUP_ELEMENTS["int4"])
    broken = np.any(~np.isfinite(rows), axis=1)
    rows = np.where(broken[:, None], 0, _saturated(rows))
    lowest = rows.min(axis=1).view(np.uint32)
    down = np.where(lowest >> 31, np.uint32(0xFFFF), np.uint32(0))
    low = ((lowest + down) & np.uint32(0xFFFF0000)).view(np.float32)
    step = (rows.max(axis=1) - low) / np.float32(15)
    step = ((step.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    step = np.maximum(step, _SMALLEST)
    above = (rows - low[:, None]) * (np.float32(1) / step)[:, None]
    # Adding 2^23 rounds to whole numbers, which the low bits then have.
    code = (np.minimum(above, 15) + np.float32(1 << 23)).view(np.uint32) & 15
    half = GROUP_ELEMENTS["int4"] // 2
    codes[:] = (code[:, :half] | (code[:, half:] << 4)).reshape(-1)
    steps.view(np.uint16)[:] = np.where(broken, _NAN_BF16, step.view(np.uint32) >> 16)
    lows.view(np.uint16)[:] = low.view(np.uint32) >> 16


def _decode_int4(areas: list[U8]) -> F32:
    codes, steps, lows = areas
    half = GROUP_ELEMENTS["int4"] // 2
    packed = codes.reshape(-1, half)
    code = np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)
    step, low = _widen(steps, "bfloat16"), _widen(lows, "bfloat16")
    result: F32 = (code * step[:, None] + low[:, None]).reshape(-1)
    return result


def _fp8_values() -> F32:
    """Return the values of all codes of E4M3: a sign, 4 bits of exponent, 3 of fraction."""
    code: U32 = np.arange(256, dtype=np.uint32)
    exponent, fraction = (code >> 3) & 15, code & 7
    normal = ((exponent + 120) << 23 | fraction << 20).astype(np.uint32).view(np.float32)
    size = np.where(exponent == 0, fraction.astype(np.float32) / 512, normal)
    size[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -size, size).astype(np.float32)


_FP8_VALUES = _fp8_values()
