"""The vLLM connector: ``--kv-transfer-config '{"kv_connector": ...}'`` keeps vLLM's KV cache in
KVHearth.

Importing this package needs neither vLLM nor a GPU nor a daemon; ``KVHearthConnector`` is imported
on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhearth.connectors.vllm.connector import KVHearthConnector

__all__ = ["KVHearthConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVHearthConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvhearth.connectors.vllm.connector import KVHearthConnector

    return KVHearthConnector
