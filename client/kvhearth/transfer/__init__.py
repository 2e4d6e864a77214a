"""Moves blocks between an engine, its client and copiers: parts of ``Cache`` and the connectors."""

from kvhearth.transfer.copier_pool import CopierPool
from kvhearth.transfer.slot_pool import ReservationPool, Slots

__all__ = ["CopierPool", "ReservationPool", "Slots"]
