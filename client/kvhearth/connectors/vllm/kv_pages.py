"""vLLM's KV cache on one rank as ``PagedKV``s, with each group's description for the contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhearth.connectors.vllm.identity import EngineGroup
from kvhearth.errors import KVHearthError, Reason
from kvhearth.page_layout import PagedKV


def engine_pages(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], context_parallel: int
) -> tuple[list[EngineGroup], list[PagedKV]]:
    """Return the groups that can be cached, and their pages.

    Where vLLM places whole pages, their bytes are taken as they lie in its allocation, including
    padding, by the strides of its plan. The strides are checked against the registered tensors.

    Args:
        kv_cache_config: vLLM's KV cache configuration of this rank.
        kv_caches: registered tensors by layer name, blocks first.
        context_parallel: ranks over which a group's tokens may be spread.

    Raises:
        KVHearthError: ``bad_contract`` naming the part that cannot be cached.
    """
    groups, pages = [], []
    runs = _page_runs(kv_cache_config, kv_caches)
    for number in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[number]
        if group.host_resident:
            raise _bad(f"group {number} lives in host memory")
        names = [name for name in group.layer_names if name in runs]
        if len(names) != len(group.layer_names) or not names:
            raise _bad(f"group {number}: not all of its layers have pages")
        kv = PagedKV([run for name in names for run in runs[name]])
        if kv.page_count != kv_cache_config.num_blocks:
            raise _bad(f"group {number}: {kv.page_count} pages, not {kv_cache_config.num_blocks}")
        groups.append(_describe(number, group, len(names), kv.page_bytes, context_parallel))
        pages.append(kv)
    if not groups:
        raise _bad("no group of its KV cache can be found again by block hashes")
    return groups, pages


def _describe(
    number: int, group: Any, layers: int, page_bytes: int, context_parallel: int
) -> EngineGroup:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    spec = getattr(group.kv_cache_spec, "first_spec", group.kv_cache_spec)
    if type(spec).__name__ == "RSWASpec":
        raise _bad("KV of a window over generated tokens is no function of the prefix")
    kind = str(get_kv_cache_spec_kind(group.kv_cache_spec).value)
    if kind == "mamba" and spec.mamba_cache_mode != "align":
        raise _bad(
            f"mamba_cache_mode {spec.mamba_cache_mode!r} keeps no states to restore: use "
            "--enable-prefix-caching, which sets 'align'"
        )
    window = 0
    if kind.startswith("sliding_window"):
        window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    elif kind == "chunked_local_attention":
        window = int(spec.attention_chunk_size) + 1
    return EngineGroup(
        kv_group=number,
        kind=kind,
        block_tokens=spec.block_size * (context_parallel if spec.dcp_sharded else 1),
        window_tokens=window,
        layers=layers,
        page_bytes=page_bytes,
        dtype=str(getattr(spec, "dtype", "torch.uint8")),
    )


def _page_runs(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return, by layer, tensors whose first dimension is vLLM's block and whose blocks are
    dense.
    """
    runs: dict[str, list[Any]] = {}
    specs = _layer_specs(kv_cache_config)
    whole = _places_whole_pages(str(kv_cache_config.kv_cache_layout or ""))
    for plan in kv_cache_config.kv_cache_tensors:
        if plan.host_resident:
            continue
        for index, name in enumerate(plan.layers):
            cache = kv_caches.get(name)
            if cache is None or name not in specs:
                continue
            first = cache[0] if isinstance(cache, list | tuple) else cache
            start = plan.offset + index * plan.layer_stride
            if whole:
                page = specs[name].page_size_bytes
                count = kv_cache_config.num_blocks
                runs[name] = [_raw(first, start, count, page, plan.block_stride)]
            else:
                # A page is cut into one run a head.
                runs[name] = [first[:, head] for head in range(first.shape[1])]
    return runs


def _raw(tensor: Any, start: int, count: int, page: int, stride: int) -> Any:
    """Return ``count`` pages from byte ``start`` of a tensor's allocation on, shape (count,
    page).
    """
    import torch

    storage = tensor.untyped_storage()
    base = tensor.data_ptr() - storage.data_ptr()
    if base != start or storage.nbytes() < start + (count - 1) * stride + page:
        raise _bad(f"a layer lies at {base} of its allocation, vLLM's plan says {start}")
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, start, (count, page), (stride, 1))


def _layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    specs = {}
    for group in kv_cache_config.kv_cache_groups:
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            specs[name] = group.kv_cache_spec if per_layer is None else per_layer[name]
    return specs


def _places_whole_pages(layout: str) -> bool:
    """Whether a layer's page is one run: layers and blocks are the two outer dimensions."""
    return set(layout[:2]) == {"L", "B"}


def _bad(problem: str) -> KVHearthError:
    return KVHearthError(Reason.BAD_CONTRACT, problem)
