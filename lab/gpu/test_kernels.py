"""The kernels on a real device, against the CPU's functions, in device and in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.codec_bounds import bounds

from kvhearth.codec import CODECS, encoding_of
from kvhearth.copiers import kernels
from kvhearth.copiers.kernels.xxh3 import checksums
from kvhearth.model import checksum_of

pytestmark = pytest.mark.gpu

SHARDS, PARTS, RUN_BYTES = 24, 8, 32 << 10


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    assert kernels.available() is None
    return module


@pytest.fixture(params=["device", "host"])
def memory(request: Any, torch: Any) -> Any:
    """Words of half precision that the GPU reaches: its own memory, and page-locked memory."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(SHARDS * PARTS * RUN_BYTES // 2, generator=generator)
    halves = (values * 3).to(torch.float16)
    return halves.cuda() if request.param == "device" else halves.pin_memory()


def runs_of(torch: Any, memory: Any) -> tuple[Any, np.ndarray]:
    """Return the addresses of shards' scattered runs, and the shards' bytes."""
    order = np.random.default_rng(2).permutation(SHARDS * PARTS).reshape(SHARDS, PARTS)
    content = memory.cpu().numpy().view(np.uint8).reshape(-1, RUN_BYTES)
    table = torch.from_numpy(memory.data_ptr() + order * RUN_BYTES).cuda()
    return table, content[order].reshape(SHARDS, -1)


def test_fragments_move_both_ways(torch: Any, memory: Any) -> None:
    target = torch.zeros_like(memory)
    random = np.random.default_rng(3)
    rows, at = [], 0
    while at < memory.nbytes - 70_000:
        size = int(random.choice([0, 1, 7, 64, 576, 4096, 65536]))
        at += int(random.integers(0, 64))
        rows.append((memory.data_ptr() + at, target.data_ptr() + at, size))
        at += size
    kernels.move(torch.tensor(rows, dtype=torch.int64).cuda())
    torch.cuda.synchronize()
    wanted = np.zeros(memory.nbytes, np.uint8)
    source = memory.cpu().numpy().view(np.uint8)
    for begin, _, size in rows:
        offset = begin - memory.data_ptr()
        wanted[offset : offset + size] = source[offset : offset + size]
    np.testing.assert_array_equal(target.cpu().numpy().view(np.uint8), wanted)


def test_checksums_are_those_of_the_cpu(torch: Any, memory: Any) -> None:
    fragments, shards = runs_of(torch, memory)
    stream = torch.cuda.Stream()
    lanes = kernels.accumulate(fragments, RUN_BYTES, stream)
    stream.synchronize()
    found = checksums(lanes.cpu().numpy(), PARTS * RUN_BYTES)
    assert [each.tobytes() for each in found] == [checksum_of(each.tobytes()) for each in shards]


@pytest.mark.parametrize("codec", CODECS[1:])
def test_codecs_write_the_bytes_of_the_cpu(torch: Any, memory: Any, codec: str) -> None:
    fragments, shards = runs_of(torch, memory)
    encoding = encoding_of(codec, "float16", PARTS * RUN_BYTES)
    size = encoding.stored_bytes
    rest = torch.zeros(SHARDS, size, dtype=torch.uint8, device=memory.device)
    rest = rest if rest.is_cuda else rest.pin_memory()
    blocks = (rest.data_ptr() + torch.arange(SHARDS) * size).cuda()
    kernels.encode(fragments, RUN_BYTES, blocks, encoding)
    torch.cuda.synchronize()
    wanted = np.zeros((SHARDS, size), np.uint8)
    for shard, block in zip(shards, wanted, strict=True):
        encoding.encode(shard, block)
    np.testing.assert_array_equal(rest.cpu().numpy(), wanted)
    memory.zero_()
    kernels.decode(blocks, fragments, RUN_BYTES, encoding)
    torch.cuda.synchronize()
    _, back = runs_of(torch, memory)
    bounds(codec, "float16", shards.view(np.uint16), back.view(np.uint16))
