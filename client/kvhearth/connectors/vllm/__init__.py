"""vLLM keeps its KV cache in KVHearth: ``--kv-transfer-config '{"kv_connector": ...}'``.

Importing this package needs neither vLLM nor a GPU nor a daemon; ``KVHearthConnector`` is loaded
when it is asked for.
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
