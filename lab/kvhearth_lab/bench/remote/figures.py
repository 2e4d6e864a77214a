"""Sizes and figures of ``kvhearth bench remote``: targets and plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth_lab.bench.local.figures import BATCH, PAGE_BYTES
from kvhearth_lab.bench.peers.adapters.harness import CONNECTIONS
from kvhearth_lab.bench.report import Figure, picture

PEERS = ("redis", "mooncake", "lm")
BATCH_BYTES = BATCH * PAGE_BYTES
STORM_CONNECTIONS = 16
"""Clients of the storm; each stores on a connection of its own, without pause."""


@dataclass(frozen=True)
class Sizes:
    """Counts and seconds of one run.

    Attributes:
        memory_bytes: memory of each daemon, ours or a peer's.
        rounds: rounds of batches of 128 x 2 MiB, on each number of connections.
        ones: single blocks.
        lookups: lookups of 512 keys, and empty calls.
        storm_s: seconds of the storm of stores beside local lookups, and of the idle time before.
    """

    memory_bytes: int
    rounds: int
    ones: int
    lookups: int
    storm_s: float


FULL = Sizes(1 << 30, rounds=7, ones=100, lookups=1000, storm_s=10.0)
QUICK = Sizes(1 << 30, rounds=2, ones=10, lookups=100, storm_s=2.0)

FIGURES = (
    Figure("ceiling_put_gbs", "bare socket into a sink, GB/s, best number of connections"),
    Figure("ceiling_gbs", "bare socket from a source, GB/s, likewise"),
    Figure("put_ratio", "put over the ceiling, checksums verified", ">=", 0.7),
    Figure("get_ratio", "get over the ceiling, checksums verified", ">=", 0.7),
    Figure("put_unverified_ratio", "put over the ceiling without checksums", ">=", 0.8),
    Figure("get_unverified_ratio", "get over the ceiling without checksums", ">=", 0.8),
    Figure("put_vs_redis", "put over Redis's", ">=", 1.5),
    Figure("get_vs_redis", "get over Redis's", ">=", 1.5),
    Figure("put_vs_mooncake", "put over Mooncake's", ">=", 1.5),
    Figure("get_vs_mooncake", "get over Mooncake's", ">=", 1.5),
    Figure("put_vs_lm", "put over LMCache's server's", ">=", 1.2),
    Figure("get_vs_lm", "get over LMCache's server's", ">=", 1.2),
    Figure("tls_ratio", "put with TLS over put without, best number of connections", ">=", 0.5),
    Figure("cpu_s_per_gb", "processor seconds of daemon and gateway for each GB put", "<=", 0.35),
    Figure("cpu_s_per_gb_get", "the same for each GB got", "<=", 0.35),
    Figure("client_cpu_s_per_gb", "processor seconds of the client for each GB put"),
    Figure("put_one_p50_us", "one block of 2 MiB, microseconds until it is committed"),
    Figure("put_one_p99_us", "the same, p99"),
    Figure("get_one_p50_us", "one block of 2 MiB, lookup and load, microseconds"),
    Figure("get_one_p99_us", "the same, p99"),
    Figure("frame_remote_p50_us", "empty call through the gateway, microseconds"),
    Figure("lookup512_remote_ratio", "lookup of 512 keys over the empty call", "<=", 3),
    Figure("control_p99_factor", "local lookups' p99 during a storm of puts over idle", "<=", 3.0),
)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: GB/s of all sides by number of connections; raises as ``picture``."""
    with picture(path, 12, 5) as both:
        for axes, operation in zip(both, ("put", "get"), strict=True):
            sides = [side for side in found["gbs"] if operation in found["gbs"][side]]
            for place, side in enumerate(sides):
                own = found["gbs"][side][operation]
                known = [count for count in CONNECTIONS if str(count) in own]
                width = 0.8 / len(sides)
                at = [
                    CONNECTIONS.index(count) + (place - len(sides) / 2) * width for count in known
                ]
                axes.bar(at, [own[str(count)] for count in known], width=width * 0.9, label=side)
            axes.set_xticks(range(len(CONNECTIONS)), [str(count) for count in CONNECTIONS])
            axes.set_xlabel("connections")
            axes.set_ylabel("GB/s")
            axes.set_title(f"{operation} of 128 x 2 MiB")
            axes.legend()
