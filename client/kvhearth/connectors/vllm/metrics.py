"""vLLM's statistics and Prometheus hooks. Importing it requires vLLM."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvhearth.connectors.core import counters as stats


class HearthStats(KVConnectorStats):
    """Counters and gauges of ``stats`` by name, in ``data``."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Clear all values."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sum of both."""
        return HearthStats(data=stats.merged(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return the values for the log line."""
        return dict(stats.summary(self.data))

    def is_empty(self) -> bool:
        """Whether there are no values."""
        return not self.data


class HearthProm(KVConnectorPromMetrics):
    """The ``vllm:kvhearth_*`` metrics in the engine's ``/metrics``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._by_engine(metric_types[Counter], name, text)
            for name, text in stats.COUNTERS.items()
        }
        self._gauges = {
            name: self._by_engine(metric_types[Gauge], name, text)
            for name, text in stats.GAUGES.items()
        }

    def _by_engine(self, kind: Any, name: str, text: str) -> dict[int, Any]:
        metric = kind(name=f"vllm:kvhearth_{name}", documentation=text, labelnames=self._labelnames)
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts since the last call."""
        for name, value in transfer_stats_data.items():
            if name in self._counters and value > 0:
                self._counters[name][engine_idx].inc(value)
            elif name in self._gauges:
                self._gauges[name][engine_idx].set(value)
