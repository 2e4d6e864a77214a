"""Interface of a slower tier to the core, which answers from memory without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvhearth.contract import GroupSpec
from kvhearth.model import Bools
from kvhearth_server.core.namespaces import Namespace


class LowerTier(Protocol):
    """The slower tiers, as a lookup sees them."""

    def present(self, namespace: Namespace, kv_group: int, keys: Sequence[bytes]) -> Bools:
        """Report which keys of the namespace's current epoch could be loaded, shape (n,)."""


@dataclass(frozen=True)
class PromotionRequest:
    """Blocks on a slower tier that would lengthen a hit, root first.

    ``parents`` are the preceding keys in the chain, empty for none.
    """

    namespace: Namespace
    kv_group: int
    spec: GroupSpec
    keys: list[bytes]
    parents: list[bytes]
