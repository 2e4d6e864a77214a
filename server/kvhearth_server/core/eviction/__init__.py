"""Eviction policies, which choose the block that leaves the arena when a store needs its slot."""

from __future__ import annotations

from collections.abc import Callable

from kvhearth_server.core.eviction.base import EvictionPolicy, PolicyArrays
from kvhearth_server.core.eviction.s3fifo import S3FifoPolicy
from kvhearth_server.core.eviction.sieve import SievePolicy

__all__ = ["POLICY_NAMES", "EvictionPolicy", "PolicyArrays", "make_policy"]

_POLICIES: dict[str, Callable[[PolicyArrays], EvictionPolicy]] = {
    "s3fifo": S3FifoPolicy,
    "sieve": SievePolicy,
}

POLICY_NAMES = tuple(_POLICIES)
"""Names that ``make_policy`` accepts."""


def make_policy(name: str, arrays: PolicyArrays) -> EvictionPolicy:
    """Make an empty policy over shared arrays.

    Raises:
        ValueError: if there is no policy of that name.
    """
    if name not in _POLICIES:
        raise ValueError(f"no eviction policy {name!r}; choose one of {', '.join(POLICY_NAMES)}")
    return _POLICIES[name](arrays)
