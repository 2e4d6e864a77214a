"""Keeps KV caches of LLM inference engines warm: blocks by key, in a daemon on the same host.

    import kvhearth

    contract = kvhearth.contract_for(pages, model="llama-3-8b", revision="main", block_tokens=16)
    keys = kvhearth.chain_keys(tokens, 16)
    with kvhearth.open("kvhearth+unix:///run/kvhearth", contract) as cache:
        cache.store(keys, pages)                   # a future: copied and committed on a thread
        cache.lookup(keys).hit_blocks              # blocks that need no prefill
        done = cache.load(keys, pages).result()    # verified by checksums
        done.usable_blocks, done.reason

``pages`` is a numpy array or torch tensor of shape (n, ...), on the CPU or a GPU, a list of n
blocks, or ``Pages`` of an engine's paged pool. ``keys`` are n chained hashes (``chain_keys``), or
any bytes, strings or ints. ``contract`` tells everything that must be equal for KV bytes to be
interchangeable. A daemon that is away, full or slow is a result with a ``reason``, never an
exception: the engine computes as if there were no cache.

``help(kvhearth.Cache)`` has the details. Engines of several ranks or KV groups use ``connect``,
whose ``KVClient`` takes the decisions, with the copiers in ``kvhearth.copiers``; the vLLM connector
is in ``kvhearth.connectors.vllm``.
"""

# The API is loaded on first use: code that needs only the shared leaves (errors, contract, model)
# does not pay for gRPC.
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.version import PROTOCOL_VERSION, __version__

if TYPE_CHECKING:
    from kvhearth.cache import Cache, LoadResult, Presence, StoreResult, contract_for, open
    from kvhearth.client import KVClient, connect
    from kvhearth.keys import chain_keys
    from kvhearth.page_layout import PagedKV
    from kvhearth.transfer.lanes import Transfer
    from kvhearth.transfer.memory import Pages

__all__ = [
    "PROTOCOL_VERSION",
    "Cache",
    "Contract",
    "GroupKind",
    "GroupSpec",
    "KVClient",
    "KVHearthError",
    "LoadResult",
    "PagedKV",
    "Pages",
    "Presence",
    "Reason",
    "StoreResult",
    "Transfer",
    "__version__",
    "chain_keys",
    "connect",
    "contract_for",
    "open",
]

_HOMES = {
    "cache": ("Cache", "LoadResult", "Presence", "StoreResult", "contract_for", "open"),
    "client": ("KVClient", "connect"),
    "keys": ("chain_keys",),
    "page_layout": ("PagedKV",),
    "transfer.lanes": ("Transfer",),
    "transfer.memory": ("Pages",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"kvhearth.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
