"""Between an engine and its client and copiers: bounded queues, and threads that do the waiting.

For engines whose scheduler and only rank are one process. Engines of several ranks use the parts:
``Stock`` where the scheduler is, ``Movers`` at each rank.
"""

from kvhearth.pipeline.load import LoadPipeline
from kvhearth.pipeline.loading import LoadDone, LoadTicket
from kvhearth.pipeline.movers import Movers
from kvhearth.pipeline.stock import Slots, Stock
from kvhearth.pipeline.store import StorePipeline
from kvhearth.pipeline.storing import StoreDone, StoreTicket

__all__ = [
    "LoadDone",
    "LoadPipeline",
    "LoadTicket",
    "Movers",
    "Slots",
    "Stock",
    "StoreDone",
    "StorePipeline",
    "StoreTicket",
]
