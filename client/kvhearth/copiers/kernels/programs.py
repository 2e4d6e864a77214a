"""Triton programs of `kernels`; importing this module imports Triton.

Addresses are integers, so that one launch reaches device memory and registered host memory alike.
Triton compiles these functions: they have no annotations of types and use nothing but its language.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether these functions run in Triton's interpreter (``TRITON_INTERPRET=1`` at the import)."""


# Instead of tl.sum and its likes: those run in the interpreter only if it was chosen before Triton
# was first imported, and the interpreter knows these functions.
_sum = tl.standard._sum_combine
_larger = tl.standard._elementwise_max
_smaller = tl.standard._elementwise_min


@triton.jit
def move_fragments(descriptors, count, BLOCK: tl.constexpr):
    """Copy fragment i from ``descriptors[i, 0]`` to ``[i, 1]``, ``[i, 2]`` bytes.

    Fragments are dealt to axis 0 of the grid, pieces of one fragment to axis 1. Words of 8 bytes
    are moved where both addresses allow it, single bytes otherwise.
    """
    lane = tl.arange(0, BLOCK).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * BLOCK
    step = tl.num_programs(1).to(tl.int64) * BLOCK
    for fragment in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.load(descriptors + 3 * fragment)
        target = tl.load(descriptors + 3 * fragment + 1)
        size = tl.load(descriptors + 3 * fragment + 2)
        words = tl.where(((source | target) & 7) == 0, size // 8, 0)
        for start in range(first, words, step):
            at = start + lane
            word = tl.load(source.to(tl.pointer_type(tl.int64)) + at, mask=at < words)
            tl.store(target.to(tl.pointer_type(tl.int64)) + at, word, mask=at < words)
        for start in range(8 * words + first, size, step):
            at = start + lane
            byte = tl.load(source.to(tl.pointer_type(tl.int8)) + at, mask=at < size)
            tl.store(target.to(tl.pointer_type(tl.int8)) + at, byte, mask=at < size)


@triton.jit
def _place(fragments, run_bytes, at, mask):
    """Return the addresses of the bytes of a shard, cut into equal runs, at ``at``."""
    run = at // run_bytes
    return tl.load(fragments + run, mask=mask, other=0) + (at - run * run_bytes)


@triton.jit
def _lanes(fragments, run_bytes, at, mask):
    """Return words of a shard at byte offsets ``at``; 0 where masked."""
    address = _place(fragments, run_bytes, at, mask)
    return tl.load(address.to(tl.pointer_type(tl.uint64)), mask=mask, other=0)


@triton.jit
def _product(word, key):
    """Return the product of the halves of ``word ^ key``."""
    mixed = word ^ key
    return (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit
def sum_blocks(fragments, parts, sums, constants, run_bytes, size, rows, BLOCKS: tl.constexpr):
    """Add up the stripes of each 1 KiB of each shard into 8 lanes.

    Axis 0 of the grid is the shard, axis 1 a group of ``BLOCKS`` KiB. ``fragments`` has ``parts``
    addresses a shard, ``sums`` ``rows`` x 8 lanes a shard.
    """
    shard = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    stripe = tl.arange(0, 16)[None, :, None]
    lane = tl.arange(0, 8)[None, None, :]
    number = block[:, None, None] * 16 + stripe
    mask = (number < (size - 1) // 64) & (lane < 8)
    mine = fragments + shard * parts
    word = _lanes(mine, run_bytes, number * 64 + lane * 8, mask)
    other = _lanes(mine, run_bytes, number * 64 + (lane ^ 1) * 8, mask)
    total = tl.where(mask, _product(word, tl.load(constants + stripe + lane)), 0) + other
    target = sums + (shard * rows + block[:, None]) * 8 + tl.arange(0, 8)[None, :]
    tl.store(target, tl.reduce(total, 1, _sum), mask=block[:, None] < rows)


@triton.jit
def fold_shards(fragments, parts, sums, lanes, constants, run_bytes, size, rows):
    """Mix the sums of a shard's blocks, in order, and its last 64 bytes into 8 lanes."""
    shard = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 8)
    state = tl.load(constants + 32 + lane)
    key = tl.load(constants + 16 + lane)
    factor = tl.load(constants + 40)
    mine = sums + shard * rows * 8 + lane
    for row in tl.range(0, rows - 1, num_stages=4):
        state += tl.load(mine + row * 8)
        state = (state ^ (state >> 47) ^ key) * factor
    state += tl.load(mine + (rows - 1) * 8)
    runs, at = fragments + shard * parts, size - 64 + lane * 8
    state += _product(_lanes(runs, run_bytes, at, lane < 8), tl.load(constants + 24 + lane))
    state += _lanes(runs, run_bytes, size - 64 + (lane ^ 1) * 8, lane < 8)
    tl.store(lanes + shard * 8 + lane, state)


@triton.jit
def _widened(fragments, run_bytes, element, mask, DTYPE: tl.constexpr):
    """Return elements of a shard in single precision; 0 where masked."""
    if DTYPE == "float32":
        place = _place(fragments, run_bytes, element * 4, mask)
        return tl.load(place.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    place = _place(fragments, run_bytes, element * 2, mask)
    if DTYPE == "float16":
        word = tl.load(place.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0)
        return word.to(tl.float32)
    bits = tl.load(place.to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.uint32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _narrowed(fragments, run_bytes, element, mask, value, DTYPE: tl.constexpr):
    """Write values as elements of a shard, rounded to the nearest, ties to even."""
    if DTYPE == "float32":
        place = _place(fragments, run_bytes, element * 4, mask)
        tl.store(place.to(tl.pointer_type(tl.float32)), value, mask=mask)
        return
    place = _place(fragments, run_bytes, element * 2, mask)
    bits = value.to(tl.uint32, bitcast=True)
    is_number = (bits & 0x7FFFFFFF) <= 0x7F800000
    if DTYPE == "float16":
        within = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
        half = tl.where(is_number, within, value).to(tl.float16)
        tl.store(place.to(tl.pointer_type(tl.float16)), half, mask=mask)
        return
    bits = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    bits = tl.where(is_number, bits, 0x7FC0).to(tl.uint16)
    tl.store(place.to(tl.pointer_type(tl.uint16)), bits, mask=mask)


@triton.jit
def _fill(start, stop):
    """Write zeros between two addresses that are less than 16 bytes apart."""
    at = start + tl.arange(0, 16)
    tl.store(at.to(tl.pointer_type(tl.uint8)), (at * 0).to(tl.uint8), mask=at < stop)


@triton.jit
def encode_fp8(
    fragments, parts, targets, count, elements, run_bytes, DTYPE: tl.constexpr, GROUPS: tl.constexpr
):
    """Gather the runs of each shard, and write them to ``targets`` as FP8.

    Shards are dealt to axis 0 of the grid, ``GROUPS`` groups of one at a time to axis 1. The
    arithmetic is that of ``kvhearth.codec``, step by step.
    """
    for shard in range(tl.program_id(0), count, tl.num_programs(0)):
        codes = tl.multiple_of(tl.load(targets + shard), 16)
        scales = codes + elements
        for first in range(tl.program_id(1) * GROUPS, elements // 32, tl.num_programs(1) * GROUPS):
            group = first + tl.arange(0, GROUPS)
            element = group[:, None] * 32 + tl.arange(0, 32)[None, :]
            mask = element < elements
            x = _widened(fragments + shard * parts, run_bytes, element, mask, DTYPE)
            size = tl.abs(x)
            finite = size.to(tl.uint32, bitcast=True) < 0x7F800000
            size = tl.where(finite, tl.minimum(size, 8.507059173023462e37), 0.0)
            largest = tl.reduce(size, 1, _larger).to(tl.uint32, bitcast=True)
            power = tl.maximum((largest + 0x1FFFFF) >> 23, 9) - 8
            scaled = size * ((254 - power) << 23).to(tl.float32, bitcast=True)[:, None]
            bits = scaled.to(tl.uint32, bitcast=True)
            normal = ((bits + (0x7FFFF + ((bits >> 20) & 1))) >> 20) - 960
            tiny = (scaled + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
            code = tl.where(finite, tl.where(scaled < 0.015625, tiny, normal), 0x7F)
            code = code | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80)
            place = (codes + element).to(tl.pointer_type(tl.uint8))
            tl.store(place, code.to(tl.uint8), mask=mask)
            place = (scales + group).to(tl.pointer_type(tl.uint8))
            tl.store(place, power.to(tl.uint8), mask=group < elements // 32)
        if tl.program_id(1) == 0:
            used = elements + elements // 32
            _fill(codes + used, codes + (used + 15) // 16 * 16)


@triton.jit
def decode_fp8(
    fragments, parts, sources, count, elements, run_bytes, DTYPE: tl.constexpr, GROUPS: tl.constexpr
):
    """Read shards at ``sources`` as FP8, and scatter their elements to their runs."""
    for shard in range(tl.program_id(0), count, tl.num_programs(0)):
        codes = tl.multiple_of(tl.load(sources + shard), 16)
        for first in range(tl.program_id(1) * GROUPS, elements // 32, tl.num_programs(1) * GROUPS):
            group = first + tl.arange(0, GROUPS)
            element = group[:, None] * 32 + tl.arange(0, 32)[None, :]
            mask = element < elements
            place = (codes + elements + group).to(tl.pointer_type(tl.uint8))
            power = tl.load(place, mask=group < elements // 32, other=1).to(tl.uint32)
            place = (codes + element).to(tl.pointer_type(tl.uint8))
            code = tl.load(place, mask=mask, other=0).to(tl.uint32)
            size = code & 0x7F
            normal = ((size << 20) + 0x3C000000).to(tl.float32, bitcast=True)
            value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
            value = tl.where(size == 0x7F, float("nan"), value)
            # By its bit: some versions of Triton negate by 0 - x, which loses the sign of zero.
            value = value.to(tl.uint32, bitcast=True) | ((code & 0x80) << 24)
            value = value.to(tl.float32, bitcast=True)
            value = value * (power << 23).to(tl.float32, bitcast=True)[:, None]
            mine = fragments + shard * parts
            _narrowed(mine, run_bytes, element, mask, value, DTYPE)


@triton.jit
def _codes4(x, low, factor):
    """Return the codes of elements between 0 and 15."""
    above = tl.minimum((x - low[:, None]) * factor[:, None], 15.0)
    return (above + 8388608.0).to(tl.uint32, bitcast=True) & 15


@triton.jit
def encode_int4(
    fragments, parts, targets, count, elements, run_bytes, DTYPE: tl.constexpr, GROUPS: tl.constexpr
):
    """Gather the runs of each shard, and write them to ``targets`` as INT4; see ``encode_fp8``."""
    groups = elements // 64
    for shard in range(tl.program_id(0), count, tl.num_programs(0)):
        codes = tl.multiple_of(tl.load(targets + shard), 16)
        for first in range(tl.program_id(1) * GROUPS, groups, tl.num_programs(1) * GROUPS):
            group = first + tl.arange(0, GROUPS)
            index = tl.arange(0, 32)[None, :]
            mask = (group[:, None] < groups) & (index < 32)
            mine, element = fragments + shard * parts, group[:, None] * 64 + index
            x = _widened(mine, run_bytes, element, mask, DTYPE)
            y = _widened(mine, run_bytes, element + 32, mask, DTYPE)
            x_size = tl.abs(x).to(tl.uint32, bitcast=True)
            y_size = tl.abs(y).to(tl.uint32, bitcast=True)
            broken = tl.reduce(tl.maximum(x_size, y_size), 1, _larger) >= 0x7F800000
            limit = 8.507059173023462e37
            x = tl.where(broken[:, None], 0.0, tl.minimum(tl.maximum(x, -limit), limit))
            y = tl.where(broken[:, None], 0.0, tl.minimum(tl.maximum(y, -limit), limit))
            lowest = tl.reduce(tl.minimum(x, y), 1, _smaller).to(tl.uint32, bitcast=True)
            lowest = (lowest + tl.where((lowest >> 31) != 0, 0xFFFF, 0)) & 0xFFFF0000
            low = lowest.to(tl.float32, bitcast=True)
            range15 = tl.reduce(tl.maximum(x, y), 1, _larger) - low
            step = tl.div_rn(range15, low * 0 + 15.0).to(tl.uint32, bitcast=True)
            step = ((step + 0xFFFF) & 0xFFFF0000).to(tl.float32, bitcast=True)
            step = tl.maximum(step, 1.1754943508222875e-38)
            factor = tl.div_rn(step * 0 + 1.0, step)
            code = _codes4(x, low, factor) | (_codes4(y, low, factor) << 4)
            place = (codes + group[:, None] * 32 + index).to(tl.pointer_type(tl.uint8))
            tl.store(place, code.to(tl.uint8), mask=mask)
            steps = step.to(tl.uint32, bitcast=True) >> 16
            steps = tl.where(broken, 0x7FC0, steps).to(tl.uint16)
            place = (codes + groups * 32 + group * 2).to(tl.pointer_type(tl.uint16))
            tl.store(place, steps, mask=group < groups)
            tl.store(place + groups, (lowest >> 16).to(tl.uint16), mask=group < groups)
        if tl.program_id(1) == 0:
            _fill(codes + groups * 36, codes + (groups * 36 + 15) // 16 * 16)


@triton.jit
def decode_int4(
    fragments, parts, sources, count, elements, run_bytes, DTYPE: tl.constexpr, GROUPS: tl.constexpr
):
    """Read shards at ``sources`` as INT4, and scatter their elements to their runs."""
    groups = elements // 64
    for shard in range(tl.program_id(0), count, tl.num_programs(0)):
        codes = tl.multiple_of(tl.load(sources + shard), 16)
        for first in range(tl.program_id(1) * GROUPS, groups, tl.num_programs(1) * GROUPS):
            group = first + tl.arange(0, GROUPS)
            index = tl.arange(0, 32)[None, :]
            mask = (group[:, None] < groups) & (index < 32)
            place = (codes + groups * 32 + group * 2).to(tl.pointer_type(tl.uint16))
            step = tl.load(place, mask=group < groups, other=0).to(tl.uint32) << 16
            low = tl.load(place + groups, mask=group < groups, other=0).to(tl.uint32) << 16
            step = step.to(tl.float32, bitcast=True)[:, None]
            low = low.to(tl.float32, bitcast=True)[:, None]
            place = (codes + group[:, None] * 32 + index).to(tl.pointer_type(tl.uint8))
            code = tl.load(place, mask=mask, other=0)
            mine, element = fragments + shard * parts, group[:, None] * 64 + index
            x = (code & 15).to(tl.float32) * step + low
            _narrowed(mine, run_bytes, element, mask, x, DTYPE)
            y = (code >> 4).to(tl.float32) * step + low
            _narrowed(mine, run_bytes, element + 32, mask, y, DTYPE)
