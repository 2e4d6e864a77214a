"""One table of all metrics and counters of the daemon: name, kind, labels, meaning and use.

They are read off a snapshot at each scrape; nothing here runs beside a request.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvhearth_server.observability.counters import Counter
from kvhearth_server.observability.metrics.cache import CACHE, OWNERS
from kvhearth_server.observability.metrics.metric import Metric
from kvhearth_server.observability.metrics.service import GATEWAY, SERVICE
from kvhearth_server.observability.metrics.tiers import REMOTE, SSD, TIERS

__all__ = ["COUNTERS", "TABLE", "Metric"]

TABLE: tuple[Metric, ...] = CACHE + OWNERS + TIERS + SSD + REMOTE + SERVICE + GATEWAY

COUNTERS: Mapping[str, Counter] = {each.name: each for row in TABLE for each in row.counters}
"""Counters by name, as the daemon counts them and ``/v1/stats`` shows them."""
