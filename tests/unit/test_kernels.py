"""The GPU kernels in Triton's interpreter, against numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.arena_fake import FakeArena
from support.cases import cases
from support.codec_bounds import BITS, words_of
from support.triton_interpreter import interpreted_kernels

from kvhearth.codec import CODECS, ELEMENT_BYTES, encoding_of
from kvhearth.copiers.host import HostCopier
from kvhearth.copiers.kernels.pages import PageRuns
from kvhearth.copiers.kernels.xxh3 import checksums
from kvhearth.model import checksum_of
from kvhearth.page_layout import PagedKV

MEMORY_BYTES = 1 << 20

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kvhearth.copiers.kernels import programs

POINTERS = dict.fromkeys(("descriptors", "fragments", "targets", "sources"), "*i64")
POINTERS |= dict.fromkeys(("sums", "lanes", "constants"), "*u64")
for name, constants in %r.items():
    program = getattr(programs, name)
    kinds = {one: POINTERS.get(one, "i32") for one in program.arg_names}
    kinds.update(dict.fromkeys(constants, "constexpr"))
    for capability in (80, 90):
        made = compile(ASTSource(program, kinds, constants), GPUTarget("cuda", capability, 32))
        print(name, capability, len(made.asm["cubin"]) > 0)
"""
PROGRAMS: dict[str, dict[str, int | str]] = {
    "move_fragments": {"BLOCK": 1024},
    "sum_blocks": {"BLOCKS": 8},
    "fold_shards": {},
    "encode_fp8": {"DTYPE": "bfloat16", "GROUPS": 32},
    "decode_fp8": {"DTYPE": "float16", "GROUPS": 32},
    "encode_int4": {"DTYPE": "float16", "GROUPS": 32},
    "decode_int4": {"DTYPE": "bfloat16", "GROUPS": 32},
}


@pytest.fixture(scope="module")
def kernels() -> Any:
    return interpreted_kernels()


def table(rows: Any, columns: int = 3) -> Any:
    import torch

    return torch.from_numpy(np.array(rows, np.int64).reshape(-1, columns))


# -- moving fragments ------------------------------------------------------------------------------


def _fragments(random: np.random.Generator, count: int, aligned: bool) -> list[tuple[int, ...]]:
    """Return fragments (source, target, bytes) of two areas, of which no two targets overlap."""
    rows, at = [], 0
    for _ in range(count):
        grain = 8 if aligned else 1
        size = int(random.choice([0, 1, 7, 8, 9, 64, 576, 4096, 8191, 8193, 20_000]))
        at += grain * int(random.integers(1, 8))
        source = grain * int(random.integers(0, (MEMORY_BYTES - size) // grain))
        rows.append((source, at, size))
        at += size + -size % grain
    return rows


@pytest.mark.parametrize("aligned", [True, False])
def test_random_fragments_arrive_and_nothing_beside_them(kernels: Any, aligned: bool) -> None:
    for seed, count in enumerate((1, 1, 3, 3, 40, 40)):
        random = np.random.default_rng(seed)
        source = random.integers(0, 256, MEMORY_BYTES, np.uint8)
        target = random.integers(0, 256, MEMORY_BYTES, np.uint8)
        wanted = target.copy()
        rows = _fragments(random, count, aligned)
        for begin, at, size in rows:
            wanted[at : at + size] = source[begin : begin + size]
        addresses = table(rows)
        addresses[:, 0] += source.ctypes.data
        addresses[:, 1] += target.ctypes.data
        kernels.move(addresses)
        np.testing.assert_array_equal(target, wanted)


def test_no_fragments_and_wrong_tables(kernels: Any) -> None:
    kernels.move(table([]))
    for bad in (table([1, 2, 3]).int(), table([1, 2], 2), table(range(9)).t()):
        with pytest.raises(ValueError, match="pass a contiguous int64 tensor of 3 columns"):
            kernels.move(bad)


# -- checksums -------------------------------------------------------------------------------------


def _sums(kernels: Any, runs: np.ndarray) -> np.ndarray:
    """Return the checksums of shards of runs, shape (n, m, bytes), that a kernel computes."""
    count, parts, run_bytes = runs.shape
    addresses = runs.ctypes.data + np.arange(count * parts) * run_bytes
    lanes = kernels.accumulate(table(addresses, parts), run_bytes)
    return checksums(lanes.numpy(), parts * run_bytes)


@cases("parts", [1, 3])
@cases("run_bytes", [248, 256, 264, 1016, 1024, 1032, 1088, 2048, 8200, 16384 + 640])
def test_the_checksums_are_those_of_the_cpu(kernels: Any, parts: int, run_bytes: int) -> None:
    runs = np.random.default_rng(run_bytes).integers(0, 256, (3, parts, run_bytes), np.uint8)
    runs[1] = 0
    runs[2] = 255
    wanted = [checksum_of(shard.tobytes()) for shard in runs]
    assert [each.tobytes() for each in _sums(kernels, runs)] == wanted


def test_runs_may_lie_anywhere(kernels: Any) -> None:
    memory = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
    starts = np.random.default_rng(1).permutation(40)[:12].reshape(3, 4) * 1208
    lanes = kernels.accumulate(table(starts + memory.ctypes.data, 4), 1200)
    for each, row in zip(checksums(lanes.numpy(), 4800), starts.tolist(), strict=True):
        shard = b"".join(memory[start : start + 1200].tobytes() for start in row)
        assert each.tobytes() == checksum_of(shard)


def test_shards_that_are_not_long_or_whole_words_are_refused(kernels: Any) -> None:
    assert kernels.accumulate(table([], 2), 512).shape == (0, 8)
    for parts, run_bytes in ((1, 240), (1, 1028), (3, 80)):
        with pytest.raises(ValueError, match="241 and more, by 8"):
            kernels.accumulate(table(range(parts), parts), run_bytes)


# -- codecs ----------------------------------------------------------------------------------------


def _patterns(dtype: str, count: int, seed: int) -> np.ndarray:
    """Return elements of all sizes, some groups with outliers, denormals or broken values."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(count) * 10.0 ** random.integers(-6, 4, count)
    words = words_of(np.clip(values, -6e4, 6e4).astype(np.float32), dtype)
    words[:: 67 * 64] = 1  # the smallest denormal
    some = words.view(BITS[dtype])
    at = random.integers(0, count, 5)
    some[at] = random.integers(0, 1 << (8 * some.itemsize), 5).astype(some.dtype)
    some[count // 2 : count // 2 + 64] = 0
    return words


@cases("codec", CODECS[1:])
@cases("dtype", ELEMENT_BYTES)
@cases(("parts", "elements"), [(1, 64), (2, 2048 * 3), (7, 7 * 320)])
def test_a_kernel_encodes_and_decodes_as_the_cpu_does(
    kernels: Any, codec: str, dtype: str, parts: int, elements: int
) -> None:
    """Runs lie apart and in another order, blocks at rest have guards around them."""
    shards = 3
    words = _patterns(dtype, shards * elements, seed=elements).reshape(shards, elements)
    encoding = encoding_of(codec, dtype, words[0].nbytes)
    run_bytes = words[0].nbytes // parts
    runs = np.random.default_rng(5).permutation(shards * parts).reshape(shards, parts)
    memory = np.zeros((shards * parts, run_bytes), np.uint8)
    memory[runs] = words.view(np.uint8).reshape(shards, parts, run_bytes)
    rest = np.full((shards, encoding.stored_bytes + 32), 0xA5, np.uint8)
    wanted = rest.copy()
    for row, shard in zip(wanted, words, strict=True):
        encoding.encode(shard.view(np.uint8), row[16:-16])
    blocks = table(rest.ctypes.data + 16 + np.arange(shards) * rest.shape[1], 1)[:, 0]
    blocks = blocks.contiguous()
    assert blocks[0] % 16 == 0
    fragments = table(memory.ctypes.data + runs * run_bytes, parts)
    kernels.encode(fragments, run_bytes, blocks, encoding)
    np.testing.assert_array_equal(rest, wanted)

    back = np.zeros(encoding.source_bytes, np.uint8)
    memory[:] = 0x5A
    kernels.decode(blocks, fragments, run_bytes, encoding)
    for row, places in zip(rest, runs, strict=True):
        encoding.decode(row[16:-16], back)
        np.testing.assert_array_equal(memory[places].reshape(-1), back)


def _tensors(shape: str) -> list[np.ndarray]:
    """Return 6 pages of 4 KiB of half precision in a layout of each kind."""
    if shape == "single":
        return [np.zeros((6, 2048), np.float16)]
    if shape == "stacked":
        return list(np.zeros((4, 6, 512), np.float16))
    return [np.zeros((6, count), np.float16) for count in (1024, 64, 960)]


@cases("codec", CODECS[1:])
@cases("shape", ["single", "stacked", "ragged"])
def test_pages_of_every_layout_are_what_the_host_copier_makes_of_them(
    kernels: Any, codec: str, shape: str
) -> None:
    tensors = _tensors(shape)
    random = np.random.default_rng(3)
    for each in tensors:
        each[:] = random.standard_normal(each.shape)
    kv, pages, slots = PagedKV(tensors), np.array([4, 0, 2]), [5, 1, 9]
    assert kv.shape == shape
    encoding = encoding_of(codec, "float16", kv.page_bytes)
    arena, other = FakeArena(encoding.stored_bytes), FakeArena(encoding.stored_bytes)
    copier = HostCopier(kv, arena, encoding=encoding)
    extents = arena.extents(slots)
    assert copier.store_now(arena.boot_id, pages, extents).ok.all()
    runs = PageRuns(kv)
    assert runs.alignment >= 8
    fragments = table(runs.fragments(pages), len(runs.fragments(pages)[0]))
    blocks = table(other.address(0) + extents["offset"].astype(np.int64), 1)[:, 0].contiguous()
    kernels.encode(fragments, runs.run_bytes, blocks, encoding)
    for slot in slots:
        np.testing.assert_array_equal(other.slot(slot), arena.slot(slot))

    sums = checksums(kernels.accumulate(fragments, runs.run_bytes).numpy(), kv.page_bytes)
    plain_arena = FakeArena(kv.page_bytes)
    plain = HostCopier(kv, plain_arena)
    done = plain.store_now(plain_arena.boot_id, pages, plain_arena.extents(slots))
    np.testing.assert_array_equal(sums, done.checksums)
    assert plain.close()

    assert copier.load_now(arena.boot_id, extents, pages).ok.all()
    wanted = [each.copy() for each in tensors]
    for each in tensors:
        each[pages] = 0
    kernels.decode(blocks, fragments, runs.run_bytes, encoding)
    for each, want in zip(tensors, wanted, strict=True):
        np.testing.assert_array_equal(each, want)
    assert copier.close()


def test_runs_that_make_up_no_shard_are_refused(kernels: Any) -> None:
    encoding = encoding_of("fp8", "bfloat16", 1024)
    kernels.encode(table([], 2), 512, table([], 1)[:, 0], encoding)
    for parts, run_bytes, blocks in ((2, 256, 1), (1, 1024, 2)):
        rows = table(range(blocks), 1)[:, 0].contiguous()
        with pytest.raises(ValueError, match="blocks of 1024 bytes of bfloat16"):
            kernels.encode(table(range(parts), parts), run_bytes, rows, encoding)


def test_the_kernels_say_why_they_cannot_be_used(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = f"{kernels.__name__}.programs"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, programs, SimpleNamespace(INTERPRETED=False))
    assert "no CUDA device" in kernels.available()
    monkeypatch.delitem(sys.modules, programs)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "no Triton" in kernels.available()


@pytest.mark.realtime("runs a compiler of devices")
def test_the_kernels_compile_for_devices(tmp_path: Any) -> None:
    """Triton's own assembler makes the machine code of an A100 and an H100, without a device."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE % PROGRAMS],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [f"{name} {capability} True" for name in PROGRAMS for capability in (80, 90)]
    assert done.stdout.splitlines() == lines, done.stderr
