"""The eviction policy: it chooses the block that leaves the arena when a store needs its slot."""

from __future__ import annotations

from kvhearth_server.core.eviction.base import EvictionPolicy, PolicyArrays
from kvhearth_server.core.eviction.s3fifo import S3FifoPolicy

__all__ = ["EvictionPolicy", "PolicyArrays", "S3FifoPolicy"]
