"""Encoded blocks of the CUDA copier: kernels in the interpreter, streams scripted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.arena_fake import FakeArena, summed
from support.cuda_fake import FakeCuda, FakeDevice

from kvhearth.codec import CODECS, encoding_of
from kvhearth.copiers import Done, HostCopier
from kvhearth.copiers.cuda import CudaCopier
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import FLAG_SUMMED, FLAG_VERIFY
from kvhearth.page_layout import PagedKV
from kvhearth_lab.harness import HUNG_S

pytest.importorskip("torch")
pytest.importorskip("triton")

PAGES = 8
BOOT = "boot-1"


class Bench:
    """Two copiers of the same pages into arenas of their own: the GPU's and the host's.

    A portion has two blocks, and the window two portions.
    """

    def __init__(self, codec: str = "fp8") -> None:
        self.layers = np.zeros((2, PAGES, 256), np.float16)
        self.layers[:] = np.random.default_rng(0).standard_normal(self.layers.shape)
        self.kv = PagedKV(list(self.layers))
        encoding = encoding_of(codec, "float16", self.kv.page_bytes)
        size = encoding.stored_bytes
        self.cuda = FakeCuda()
        self.device = FakeDevice(self.cuda, portion_bytes=2 * size, window_bytes=4 * size)
        self.arena, self.wanted = FakeArena(size), FakeArena(size)
        self.cuda.pin(self.arena)
        self.copier = CudaCopier(
            self.kv,
            self.arena,
            device=self.device,
            encoding=encoding,
            verify_fraction=1.0,
        )
        self.host = HostCopier(self.kv, self.wanted, encoding=encoding)

    def store(self, pages: list[int], slots: list[int]) -> Done:
        ticket = self.copier.store(BOOT, np.array(pages), self.arena.extents(slots))
        assert ticket is not None
        done = self.copier.wait(ticket, HUNG_S)
        assert done is not None
        return done

    def load(self, extents: Any, pages: list[int]) -> Done:
        ticket = self.copier.load(BOOT, extents, np.array(pages))
        assert ticket is not None
        done = self.copier.wait(ticket, HUNG_S)
        assert done is not None
        return done

    def close(self) -> None:
        assert self.copier.close()
        assert self.host.close()
        assert self.cuda.misuse == []


@pytest.fixture
def bench(request: Any) -> Iterator[Bench]:
    found = Bench(getattr(request, "param", "fp8"))
    yield found
    found.close()


@pytest.mark.parametrize("bench", CODECS[1:], indirect=True)
def test_blocks_are_those_of_the_host_copier_both_ways(bench: Bench) -> None:
    """Seven blocks are four portions, which use the same staging memory one after another."""
    pages, slots = [3, 0, 7, 1, 6, 2, 5], [9, 2, 4, 3, 11, 0, 8]
    assert bench.store(pages, slots).ok.all()
    sums = bench.host.store_now(BOOT, np.array(pages), bench.wanted.extents(slots)).checksums
    for slot in slots:
        np.testing.assert_array_equal(bench.arena.slot(slot), bench.wanted.slot(slot))
    extents = summed(bench.arena.extents(slots), sums, FLAG_SUMMED | FLAG_VERIFY)
    assert bench.host.load_now(
        BOOT, summed(bench.wanted.extents(slots), sums), np.array(pages)
    ).ok.all()
    wanted = bench.layers.copy()
    bench.layers[:, pages] = 0
    done = bench.load(extents, pages)
    assert (done.ok.all(), done.bytes) == (True, 7 * bench.arena.slot_bytes)
    np.testing.assert_array_equal(bench.layers, wanted)


def test_flipped_bytes_at_rest_are_found(bench: Bench) -> None:
    slots = [1, 2, 3]
    assert bench.store([1, 2, 3], slots).ok.all()
    sums = bench.host.store_now(BOOT, np.array([1, 2, 3]), bench.wanted.extents(slots)).checksums
    bench.arena.slot(2)[5] ^= 1
    done = bench.load(summed(bench.arena.extents(slots), sums, FLAG_SUMMED), [4, 5, 6])
    assert done.ok.tolist() == [True, False, True]


def test_a_slot_that_leaves_use_is_not_written_and_the_others_are(bench: Bench) -> None:
    bench.device.held = True
    slots = [0, 1, 2, 3, 4, 5, 6]
    ticket = bench.copier.store(BOOT, np.arange(7), bench.arena.extents(slots))
    assert ticket is not None
    assert bench.copier.wait(ticket, 0.2) is None
    bench.arena.bump(6)
    bench.device.held = False
    done = bench.copier.wait(ticket, HUNG_S)
    assert done is not None
    assert done.ok.tolist() == [True] * 6 + [False]
    bench.host.store_now(BOOT, np.arange(6), bench.wanted.extents(slots[:6]))
    for slot in slots[:6]:
        np.testing.assert_array_equal(bench.arena.slot(slot), bench.wanted.slot(slot))
    assert (bench.arena.slot(6) == 0xA5).all()


def test_pages_that_cannot_be_encoded_are_refused() -> None:
    layers = np.zeros((2, PAGES, 256), np.float16)
    cuda = FakeCuda()
    cuda.missing["kernel"] = "no Triton"
    encoding = encoding_of("int4", "float16", 1024)
    with pytest.raises(KVHearthError, match="codec int4: no Triton") as caught:
        CudaCopier(
            PagedKV(list(layers)),
            FakeArena(encoding.stored_bytes),
            device=FakeDevice(cuda),
            encoding=encoding,
        )
    assert caught.value.reason is Reason.BAD_CONTRACT


def test_a_kernel_that_cannot_be_launched_fails_its_batch(bench: Bench) -> None:
    bench.cuda.fail_call = "kernel"
    done = bench.store([0, 1], [0, 1])
    bench.cuda.fail_call = ""
    assert done.reasons == {"copy_failed": 2}
    assert bench.store([0, 1], [0, 1]).ok.all()
