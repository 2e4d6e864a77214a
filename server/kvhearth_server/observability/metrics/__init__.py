"""Every metric of the daemon, in one table: name, kind, labels, unit, meaning and use.

They are read off a snapshot at each scrape; nothing here runs beside a request.
"""

from __future__ import annotations

from kvhearth_server.observability.metrics.cache import CACHE
from kvhearth_server.observability.metrics.metric import Metric
from kvhearth_server.observability.metrics.service import SERVICE
from kvhearth_server.observability.metrics.ssd import SSD, TIERS

__all__ = ["TABLE", "Metric"]

TABLE: tuple[Metric, ...] = CACHE + TIERS + SSD + SERVICE
