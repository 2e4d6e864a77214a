"""The back end of SGLang's HiCache: ``--hicache-storage-backend dynamic`` keeps what falls out of
its host memory in KVHearth.

Importing this package needs no SGLang; ``KVHearthHiCache`` is imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhearth.connectors.sglang.adapter import KVHearthHiCache

__all__ = ["KVHearthHiCache"]


def __getattr__(name: str) -> Any:
    if name != "KVHearthHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvhearth.connectors.sglang.adapter import KVHearthHiCache

    return KVHearthHiCache
