"""Moves blocks between an engine, its client and copiers: bounded queues and background threads.

For engines whose scheduler and only rank are one process. Engines of several ranks use the parts:
``Stock`` in the scheduler's process, ``CopierPool`` at each rank.
"""

from kvhearth.transfer.copier_pool import CopierPool
from kvhearth.transfer.load import LoadPipeline
from kvhearth.transfer.loading import LoadDone, LoadTicket
from kvhearth.transfer.slot_pool import Slots, Stock
from kvhearth.transfer.store import StorePipeline
from kvhearth.transfer.storing import StoreDone, StoreTicket

__all__ = [
    "CopierPool",
    "LoadDone",
    "LoadPipeline",
    "LoadTicket",
    "Slots",
    "Stock",
    "StoreDone",
    "StorePipeline",
    "StoreTicket",
]
