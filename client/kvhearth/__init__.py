"""In-engine client of KVHearth: decisions by call, bytes by shared memory, a miss on any failure.

``connect`` and ``KVClient`` are loaded on first use, so that code that needs only the shared leaves
(errors, contract, model) does not pay for gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.version import PROTOCOL_VERSION, __version__

if TYPE_CHECKING:
    from kvhearth.client import KVClient, connect

__all__ = [
    "PROTOCOL_VERSION",
    "Contract",
    "GroupKind",
    "GroupSpec",
    "KVClient",
    "KVHearthError",
    "Reason",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> Any:
    if name in ("KVClient", "connect"):
        from kvhearth import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
