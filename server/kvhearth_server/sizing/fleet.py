"""Capacity model of a fleet of hosts that share one remote tier: what it costs, what breaks first.

The constants are defaults to replace by own measurements; docs/sizing.md says where each is from.
"""

from __future__ import annotations

from dataclasses import dataclass

_DAY_S = 86_400
_WEEK_S = 7 * _DAY_S


@dataclass(frozen=True)
class Fleet:
    """A fleet and its load.

    Attributes:
        hosts: hosts with an engine and a daemon.
        bytes: of all blocks in the remote tier.
        requests_per_s: requests a second of one host; ``keys``: blocks of one request.
        block_bytes: of one object in the remote tier.
        known_fraction: part of the keys that a host's own memory of what exists answers.
        remote_fraction: part of the requests that load from the remote tier.
        load_bytes: of such a load.
        turnover_s: time in which all bytes are written once.
        host_bytes_per_s: network of one host; ``storage_bytes_per_s``: of the remote tier.
    """

    hosts: int = 1000
    bytes: int = 10 * 10**15
    requests_per_s: float = 50.0
    keys: int = 512
    block_bytes: int = 2 << 20
    known_fraction: float = 0.95
    remote_fraction: float = 0.1
    load_bytes: int = 10**9
    turnover_s: float = _WEEK_S
    host_bytes_per_s: float = 25e9
    storage_bytes_per_s: float = 1e12


@dataclass(frozen=True)
class Constants:
    """Costs of one unit, measured or from price lists.

    Attributes:
        master_bytes: metadata of an object at a master; ``value_bytes``: beside a value in a
            key-value store.
        keys_per_core_s: keys that one core of a master answers in large calls; ``calls_per_core_s``
            calls of few keys.
        calls_per_lookup, keys_per_call: of a search for the end of a prefix by halving.
        master_memory_bytes, master_cores: the largest machine for a master.
        prefix_requests_per_s: requests that one prefix of an object store takes.
        gets_dollars, puts_dollars: price of a million requests.
    """

    master_bytes: int = 939
    value_bytes: int = 150
    keys_per_core_s: float = 284_000
    calls_per_core_s: float = 21_400
    calls_per_lookup: int = 3
    keys_per_call: int = 8
    master_memory_bytes: int = 1 << 40
    master_cores: int = 16
    prefix_requests_per_s: float = 5_500
    gets_dollars: float = 0.4
    puts_dollars: float = 5.0


@dataclass(frozen=True)
class Bound:
    """A need beside what there is of it; above 1 it breaks."""

    name: str
    need: float
    there_is: float
    unit: str
    instead: str

    @property
    def ratio(self) -> float:
        """The need as a part of what there is."""
        return self.need / self.there_is if self.there_is else float("inf")


@dataclass(frozen=True)
class FleetNeeds:
    """Needs of a fleet.

    Attributes:
        objects: blocks in the remote tier.
        master_metadata_bytes: at one master; ``value_metadata_bytes``: beside values.
        naive_keys_per_s: if every key were asked for at the remote tier; ``naive_cores`` of a
            master; ``naive_dollars_per_day`` at an object store.
        calls_per_s: with halving; ``calls_cores`` of a master for them.
        asked_calls_per_s: of those, what the hosts do not know themselves; ``asked_cores``.
        requests_per_s: keys of these calls, each one request at an object store;
            ``requests_dollars_per_day``; ``prefixes`` that they need.
        load_bytes_per_s: of the fleet; ``host_load_bytes_per_s`` of one host.
        puts_per_s: writes; ``puts_dollars_per_week``.
        fan_in_s: time until one holder has sent the same load to every host.
        bounds: what breaks, worst first.
    """

    objects: int
    master_metadata_bytes: int
    value_metadata_bytes: int
    naive_keys_per_s: float
    naive_cores: float
    naive_dollars_per_day: float
    calls_per_s: float
    calls_cores: float
    asked_calls_per_s: float
    asked_cores: float
    requests_per_s: float
    requests_dollars_per_day: float
    prefixes: int
    load_bytes_per_s: float
    host_load_bytes_per_s: float
    puts_per_s: float
    puts_dollars_per_week: float
    fan_in_s: float
    bounds: list[Bound]

    @property
    def breaks_first(self) -> str:
        """Name of the bound that is exceeded most; empty if none is."""
        worst = self.bounds[0]
        return worst.name if worst.ratio > 1 else ""


def fleet_needs(fleet: Fleet, costs: Constants | None = None) -> FleetNeeds:
    """Return the needs of a fleet."""
    by = costs or Constants()
    objects = -(-fleet.bytes // fleet.block_bytes)
    lookups = fleet.hosts * fleet.requests_per_s
    naive = lookups * fleet.keys
    calls = lookups * min(by.calls_per_lookup, -(-fleet.keys // by.keys_per_call))
    asked = calls * (1 - fleet.known_fraction)
    requests = asked * min(by.keys_per_call, fleet.keys)
    loads = lookups * fleet.remote_fraction * fleet.load_bytes
    puts = objects / fleet.turnover_s

    def cores(calls_per_s: float) -> float:
        keys = calls_per_s * min(by.keys_per_call, fleet.keys)
        return max(calls_per_s / by.calls_per_core_s, keys / by.keys_per_core_s)

    needs = FleetNeeds(
        objects=objects,
        master_metadata_bytes=objects * by.master_bytes,
        value_metadata_bytes=objects * by.value_bytes,
        naive_keys_per_s=naive,
        naive_cores=naive / by.keys_per_core_s,
        naive_dollars_per_day=naive * _DAY_S * by.gets_dollars / 1e6,
        calls_per_s=calls,
        calls_cores=cores(calls),
        asked_calls_per_s=asked,
        asked_cores=cores(asked),
        requests_per_s=requests,
        requests_dollars_per_day=requests * _DAY_S * by.gets_dollars / 1e6,
        prefixes=-int(-requests // by.prefix_requests_per_s),
        load_bytes_per_s=loads,
        host_load_bytes_per_s=loads / fleet.hosts,
        puts_per_s=puts,
        puts_dollars_per_week=puts * _WEEK_S * by.puts_dollars / 1e6,
        fan_in_s=fleet.hosts * 2 * fleet.load_bytes / fleet.host_bytes_per_s,
        bounds=[],
    )
    needs.bounds.extend(sorted(_bounds(fleet, by, needs), key=lambda bound: -bound.ratio))
    return needs


def _bounds(fleet: Fleet, by: Constants, needs: FleetNeeds) -> list[Bound]:
    return [
        Bound(
            "metadata of one master",
            needs.master_metadata_bytes,
            by.master_memory_bytes,
            "bytes",
            "larger blocks, or cells of at most 100 hosts by namespace over one object store",
        ),
        Bound(
            "storage network",
            needs.load_bytes_per_s,
            fleet.storage_bytes_per_s,
            "bytes/s",
            "serve from memory and SSD first: publish only blocks that were used twice",
        ),
        Bound(
            "network of a host",
            needs.host_load_bytes_per_s,
            fleet.host_bytes_per_s,
            "bytes/s",
            "load less per request, or recompute where that is faster",
        ),
        Bound(
            "lookups at one master",
            needs.asked_cores,
            by.master_cores,
            "cores",
            "remember on each host what exists, or use cells",
        ),
    ]
