"""Location of a block's bytes in vLLM's allocation, in each of its layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvhearth.connectors.vllm.adapter import _page_runs
from kvhearth.errors import KVHearthError
from kvhearth.page_layout import PagedKV, Shape

torch = pytest.importorskip("torch")

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 8
PAGE = HEADS * TOKENS * CONTENT
NAMES = [f"layer.{number}" for number in range(LAYERS)]
DIMENSIONS = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}


def cache(layout: str, padding: int = 0) -> tuple[Any, dict[str, Any]]:
    """vLLM's plan and its per-layer views [B, H, N, C] of one allocation."""
    shape = [DIMENSIONS[name] for name in layout]
    strides = [int(np.prod(shape[at + 1 :])) for at in range(5)]
    if padding:
        assert layout.startswith("BL")
        strides[0] += padding
    stride = dict(zip(layout, strides, strict=True))
    size = stride["B"] * BLOCKS if layout[0] == "B" else LAYERS * BLOCKS * PAGE
    data = torch.arange(size, dtype=torch.int32).remainder(251).to(torch.uint8)
    views = {
        name: data.as_strided(
            (BLOCKS, HEADS, TOKENS, CONTENT),
            (stride["B"], stride["H"], stride["N"], stride["C"]),
            number * stride["L"],
        )
        for number, name in enumerate(NAMES)
    }
    spec = SimpleNamespace(page_size_bytes=PAGE)
    plan = SimpleNamespace(
        layers=NAMES,
        offset=0,
        layer_stride=stride["L"],
        block_stride=stride["B"],
        host_resident=False,
    )
    config = SimpleNamespace(
        kv_cache_layout=layout,
        kv_cache_tensors=[plan],
        kv_cache_groups=[SimpleNamespace(layer_names=NAMES, kv_cache_spec=spec)],
        num_blocks=BLOCKS,
    )
    return config, views


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_a_block_is_all_of_its_bytes(layout: str) -> None:
    config, views = cache(layout)
    runs = _page_runs(config, views)
    kv = PagedKV([run for name in NAMES for run in runs[name]])
    assert (kv.page_count, kv.page_bytes) == (BLOCKS, LAYERS * PAGE)
    for block in range(BLOCKS):
        found = np.concatenate([part[block] for part in kv.host_parts()])
        expected = np.concatenate([views[name][block].numpy().ravel() for name in NAMES])
        assert sorted(found.tolist()) == sorted(expected.tolist())


def test_blocks_outermost_are_one_copy_each() -> None:
    config, views = cache("BLHNC")
    runs = _page_runs(config, views)
    assert PagedKV([run for name in NAMES for run in runs[name]]).shape is Shape.SINGLE


def test_padding_between_blocks_is_left_out() -> None:
    config, views = cache("BLHNC", padding=64)
    runs = _page_runs(config, views)
    kv = PagedKV([run for name in NAMES for run in runs[name]])
    assert kv.page_bytes == LAYERS * PAGE
    assert np.array_equal(kv.host_parts()[0][3][:PAGE], views[NAMES[0]][3].numpy().ravel())


def test_a_plan_that_does_not_fit_the_tensors_is_refused() -> None:
    config, views = cache("LBHNC")
    config.kv_cache_tensors[0].layer_stride += 8
    with pytest.raises(KVHearthError, match="plan says"):
        _page_runs(config, views)
