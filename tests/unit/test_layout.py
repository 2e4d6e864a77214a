"""Registered pages: pages that are one run of bytes, rejected layouts, and no copies."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support.cases import cases

from kvhearth.errors import KVHearthError, Reason
from kvhearth.page_layout import PagedKV, Shape

PAGES = 6


def _numbered(*shape: int, dtype: str = "uint8") -> np.ndarray:
    return np.arange(np.prod(shape)).astype(dtype).reshape(shape)


def test_one_tensor_is_one_part() -> None:
    base = _numbered(PAGES, 2, 8, dtype="uint16")
    kv = PagedKV([base])
    assert (kv.page_count, kv.page_bytes, kv.device, kv.shape) == (PAGES, 32, "cpu", Shape.SINGLE)
    (view,) = kv.host_parts()
    assert (view == base.reshape(PAGES, -1).view(np.uint8)).all()
    assert kv.host_stack() is None
    view[3] = 9
    assert (base[3] == 0x0909).all(), "a view, not a copy"


def test_layers_of_one_stack_are_one_view() -> None:
    base = _numbered(5, PAGES, 8)
    kv = PagedKV(list(base))
    assert kv.shape is Shape.STACKED
    assert kv.page_bytes == 40
    stack = kv.host_stack()
    assert stack is not None
    assert (stack == base).all()
    assert np.shares_memory(stack, base)


def test_a_stack_that_lies_downwards_keeps_the_order_of_registration() -> None:
    base = _numbered(3, PAGES, 8)
    stack = PagedKV([base[2], base[1], base[0]]).host_stack()
    assert stack is not None
    assert (stack == base[::-1]).all()


def test_layers_inside_a_page_are_one_part() -> None:
    base = _numbered(PAGES, 4, 8)
    kv = PagedKV([base[:, layer] for layer in range(4)])
    assert kv.shape is Shape.SINGLE
    assert len(kv.parts) == 1
    assert (kv.host_parts()[0] == base.reshape(PAGES, -1)).all()


def test_layers_inside_a_page_with_a_hole_are_a_stack() -> None:
    base = _numbered(PAGES, 4, 8)
    kv = PagedKV([base[:, 0], base[:, 2]])
    assert kv.shape is Shape.STACKED
    assert kv.page_bytes == 16


def test_unequal_tensors_are_ragged() -> None:
    kv = PagedKV([_numbered(PAGES, 8), _numbered(PAGES, 4), _numbered(PAGES, 4)])
    assert kv.shape is Shape.RAGGED
    assert [(part.start_bytes, part.end_bytes) for part in kv.parts] == [(0, 8), (8, 12), (12, 16)]


def test_pages_may_lie_apart() -> None:
    base = _numbered(PAGES, 12)
    kv = PagedKV([base[:, 2:10]])
    assert (kv.page_bytes, kv.parts[0].stride_bytes) == (8, 12)
    assert (kv.host_parts()[0] == base[:, 2:10]).all()


def test_dimensions_inside_a_page_may_be_permuted() -> None:
    base = _numbered(PAGES, 2, 3, 4)
    kv = PagedKV([base.transpose(0, 3, 1, 2)])
    assert (kv.host_parts()[0] == base.reshape(PAGES, -1)).all()


def test_one_page_only() -> None:
    base = _numbered(1, 3, 8)
    kv = PagedKV([base[:, layer] for layer in range(3)])
    assert kv.page_bytes == 24
    assert (kv.host_parts()[0] == base.reshape(1, -1)).all()


def test_views_keep_the_memory_alive() -> None:
    view = PagedKV([_numbered(PAGES, 1 << 16)]).host_parts()[0]
    before = view.copy()
    for _ in range(4):
        np.zeros((PAGES, 1 << 16))
    assert (view == before).all()


def _read_only() -> np.ndarray:
    array = _numbered(PAGES, 8)
    array.flags.writeable = False
    return array


@cases(
    ("why", "tensors"),
    [
        ("none", []),
        ("page counts", [_numbered(PAGES, 8), _numbered(PAGES + 1, 8)]),
        ("page not outermost", [_numbered(2, PAGES, 8).transpose(1, 0, 2)]),
        ("hole in a page", [_numbered(PAGES, 8, 2)[:, :, 0]]),
        ("backwards", [_numbered(PAGES, 8)[::-1]]),
        ("page backwards", [_numbered(PAGES, 8)[:, ::-1]]),
        ("broadcast", [np.broadcast_to(np.zeros(8), (PAGES, 8))]),
        ("overlap", [np.lib.stride_tricks.as_strided(_numbered(64), (6, 8), (4, 1))]),
        ("empty page", [np.zeros((PAGES, 0))]),
        ("no page", [np.zeros((0, 8))]),
        ("no dimension", [np.array(3)]),
        ("objects", [np.array([object()] * PAGES)]),
        ("read only", [_read_only()]),
        ("a list", [[1, 2, 3]]),
    ],
)
def test_what_cannot_be_copied_is_refused(why: str, tensors: list[Any]) -> None:
    with pytest.raises(KVHearthError) as caught:
        PagedKV(tensors)
    assert caught.value.reason is Reason.BAD_CONTRACT
    assert len(caught.value.message) > 20


def test_torch_tensors_of_every_width() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8):
        raw = torch.arange(2 * PAGES * 16, dtype=torch.int32).to(torch.uint8)
        base = raw.view(dtype).view(2, PAGES, -1)
        kv = PagedKV(list(base))
        assert kv.page_bytes == 32
        stack = kv.host_stack()
        assert stack is not None
        assert stack.tobytes() == raw.numpy().tobytes()


def test_torch_tensors_begin_inside_a_storage() -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(200, dtype=torch.uint8)
    tensor = base[5:].as_strided((PAGES, 8), (16, 1), 5)
    kv = PagedKV([tensor])
    assert (kv.host_parts()[0] == tensor.numpy()).all()
    assert kv.parts[0].address == tensor.data_ptr()


def test_torch_parameters_and_meta_tensors() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(PAGES, 8))
    assert PagedKV([parameter]).host_parts()[0].shape == (PAGES, 32)
    with pytest.raises(KVHearthError, match="meta"):
        PagedKV([torch.zeros(PAGES, 8, device="meta")])


@pytest.mark.realtime("imports of a new interpreter")
def test_importing_and_using_the_host_path_does_not_import_torch() -> None:
    program = """
import sys, numpy
import kvhearth, kvhearth.copiers, kvhearth.copiers.cuda, kvhearth.copiers.device
from kvhearth.page_layout import PagedKV
PagedKV([numpy.zeros((2, 8))]).host_parts()
sys.exit(1 if "torch" in sys.modules else 0)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("places", [(9, 0, 33), (4096, 8192, 0), (7,)])
def test_blocks_anywhere_in_a_pool_are_pages_in_place(places: tuple[int, ...]) -> None:
    pool = _numbered(16384)
    blocks = [pool[start : start + 9] for start in places]
    kv, numbers = PagedKV.around(blocks)
    (view,) = kv.host_parts()
    assert (kv.page_bytes, kv.page_count) == (9, max(numbers) + 1)
    for block, number in zip(blocks, numbers.tolist(), strict=True):
        assert (view[number] == block).all()
        view[number] = 77
        assert (block == 77).all(), "a view, not a copy"
    reached = view.__array_interface__["data"][0] + (kv.page_count - 1) * view.strides[0] + 9
    assert reached <= pool.ctypes.data + pool.nbytes, "nothing beyond the last block"


def test_blocks_that_overlap_are_no_pages() -> None:
    pool = _numbered(64)
    with pytest.raises(ValueError, match="overlap"):
        PagedKV.around([pool[8:16], pool[0:8], pool[15:23]])
