"""SGLang's own host tier on a CPU: its pools, its storage factory and its controller with the
prefetch and backup threads. Needs SGLang.
"""

from __future__ import annotations

import contextlib
import json
import threading
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_parallel

from kvhearth_lab.harness.engine import content

EXAMPLE = Path(__file__).parents[2] / "deploy/examples/sglang/hicache.json"
PAGE_TOKENS = 16
PAGES = 64
LAYERS = 3
HEADS, DIM = 2, 32
DTYPE = torch.bfloat16
ANSWER_S = 300.0
PATIENT = "call_ms=8000&lookup_ms=8000"
"""Options added to the URL for tests in which a busy machine must not turn a hit into a miss."""
_ON_CPU = {"pin_memory": False, "device": "cpu"}
_LAYER_RANGE = {"start_layer": 0, "end_layer": LAYERS - 1}
_TOKENS = PAGES * PAGE_TOKENS


@contextlib.contextmanager
def serving(model: Path, **args: Any) -> Iterator[None]:
    """Publish the arguments of a server of one rank, as its scheduler does."""
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_rank": 0}
    published = get_context().override_server_args(
        model_path=str(model), load_format="auto", **args
    )
    with published, get_parallel().override(**ranks):
        yield


def mha_device() -> Any:
    """Return a device pool of keys and values, on the CPU."""
    sizes = (_TOKENS, PAGE_TOKENS, DTYPE, HEADS, DIM, LAYERS)
    return MHATokenToKVPool(*sizes, device="cpu", enable_memory_saver=False)


def mha_pool(layout: str = "page_first", device: Any = None) -> Any:
    """Return a host pool of keys and values, of twice ``PAGES`` pages."""
    info = (device or mha_device())._mha_buffer_info()
    ranges = {**_LAYER_RANGE, "device_capacity_tokens": _TOKENS}
    return MHATokenToKVPoolHost(info, 2.0, 0, PAGE_TOKENS, layout, **_ON_CPU, **ranges)


def mla_pool(layout: str = "page_first") -> Any:
    """Return a host pool of MLA's compressed KV."""
    device = MLATokenToKVPool(
        _TOKENS,
        PAGE_TOKENS,
        dtype=DTYPE,
        kv_lora_rank=48,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    ranges = {
        **_LAYER_RANGE,
        "device_capacity_tokens": _TOKENS,
        "target_layer_num": LAYERS,
    }
    info = device._mla_buffer_info()
    return MLATokenToKVPoolHost(info, 2.0, 0, PAGE_TOKENS, layout, **_ON_CPU, **ranges)


def mamba_pool() -> Any:
    """Return a host pool of recurrent states: two buffers, of different dtypes."""
    temporal = torch.zeros(LAYERS, PAGES, 4, 8, dtype=torch.float32)
    info = MambaStateBufferInfo(temporal=temporal, conv=(torch.zeros(LAYERS, PAGES, 6, 3),))
    return MambaPoolHost(info, 2.0, 0, device_capacity=PAGES, layout="page_first", **_ON_CPU)


def extra(url: str, **options: Any) -> dict[str, Any]:
    """Return the example's configuration for a daemon's URL."""
    return {**json.loads(EXAMPLE.read_text()), "url": f"{url}&{PATIENT}", **options}


def config(options: dict[str, Any], **over: Any) -> HiCacheStorageConfig:
    """Return the configuration that SGLang's controller hands to its factory."""
    facts: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "served",
        "extra_config": options,
    }
    return HiCacheStorageConfig(**{**facts, **over})


@contextlib.contextmanager
def backend(pool: Any, options: dict[str, Any], **over: Any) -> Iterator[Any]:
    """Yield our back end, made by SGLang's factory for a host pool."""
    made = StorageBackendFactory.create_backend("dynamic", config(options, **over), pool)
    try:
        made.register_mem_pool_host(pool)
        yield made
    finally:
        made.close()


def tokens_of(text: str, pages: int, salt: str | None = None) -> RadixKey:
    """Return a prompt's tokens as SGLang's tree knows them."""
    chain = np.random.default_rng(list(text.encode())).integers(1, 9999, pages * PAGE_TOKENS)
    return RadixKey(array("q", chain.tolist()), cache_salt=salt)


def hashes_of(text: str, pages: int, salt: str | None = None) -> list[str]:
    """Return SGLang's hashes of the pages of a prompt."""
    tokens = tokens_of(text, pages, salt)
    found: list[str] = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
    return found


def computed(pool: Any, key: str) -> torch.Tensor:
    """Return the bytes of a page that follow from its key, in the pool's flat form."""
    flat = pool.get_dummy_flat_data_page()
    size = flat.numel() * flat.element_size()
    return torch.from_numpy(content(bytes.fromhex(key), 0, 0, size).copy()).view(flat.dtype)


def fill(pool: Any, keys: Sequence[str]) -> torch.Tensor:
    """Write the keys' pages into newly allocated ones and return their host indices."""
    indices = pool.alloc(len(keys) * int(pool.page_size))
    for page, key in zip(indices[:: pool.page_size].tolist(), keys, strict=True):
        pool.set_from_flat_data_page(page, computed(pool, key))
    return indices


def blank(pool: Any, pages: int) -> torch.Tensor:
    """Return the host indices of newly allocated pages of zeros."""
    indices = pool.alloc(pages * int(pool.page_size))
    for page in indices[:: pool.page_size].tolist():
        pool.set_from_flat_data_page(page, torch.zeros_like(pool.get_dummy_flat_data_page()))
    return indices


def wrong(pool: Any, keys: Sequence[str], indices: torch.Tensor) -> list[str]:
    """Return the keys whose pages do not have their bytes."""

    def same(page: int, key: str) -> bool:
        held = pool.get_data_page(page, flat=True).contiguous()
        return torch.equal(held.view(torch.uint8), computed(pool, key).view(torch.uint8))

    pages = indices[:: pool.page_size].tolist()
    return [key for page, key in zip(pages, keys, strict=True) if not same(page, key)]


class Server:
    """A rank's host tier: SGLang's controller, attached to our back end, and its threads.

    The caller publishes the arguments (``serving``).
    """

    def __init__(self, options: dict[str, Any], layout: str = "page_first_direct") -> None:
        device = mha_device()
        allocator = PagedTokenToKVPoolAllocator(_TOKENS, PAGE_TOKENS, DTYPE, "cpu", device, False)
        self.pool = mha_pool(layout, device)
        self.controller = HiCacheController(
            allocator,
            self.pool,
            PAGE_TOKENS,
            None,
            threading.Event(),
            io_backend="direct",
            storage_backend="dynamic",
            model_name="served",
            storage_backend_extra_config=options,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.detach_storage_backend()

    @property
    def storage(self) -> Any:
        """The back end as the controller holds it."""
        return self.controller.storage_backend

    def back_up(self, text: str, pages: int, salt: str | None = None) -> int:
        """Compute a prompt's pages and let the backup thread store them; return how many it did."""
        keys = hashes_of(text, pages, salt)
        indices = fill(self.pool, keys)
        self.controller.write_storage(indices, [0] * len(indices), keys)
        done = self.controller.ack_backup_queue.get(timeout=ANSWER_S)
        self.pool.free(indices)
        return int(done.completed_tokens) // PAGE_TOKENS

    def prefetch(self, text: str, pages: int, salt: str | None = None) -> tuple[int, list[str]]:
        """Let the prefetch threads fetch a prompt; return the pages they brought, and the wrong."""
        self.controller.prefetch(text, tokens_of(text, pages, salt))
        found = self.controller.prefetch_hit_queue.get(timeout=ANSWER_S)
        if not found.hash_value:
            return 0, []
        found.host_indices = indices = blank(self.pool, len(found.hash_value))
        self.controller.prefetch_buffer.put(found)
        brought = 0
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=ANSWER_S)).completed_req:
            brought = int(ack.completed_tokens) // PAGE_TOKENS
        keys = found.hash_value[:brought]
        bad = wrong(self.pool, keys, indices[: brought * PAGE_TOKENS])
        self.pool.free(indices)
        return brought, bad
