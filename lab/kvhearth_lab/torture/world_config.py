"""Shape of a world: sizes, models, clients and settings, all drawn from its random numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvhearth_server.engine.epoch_store import RESERVE_BYTES
from kvhearth_server.tiers.ssd.settings import capacity_least

MIB = 1 << 20
SLAB_BYTES = 2 * MIB
SLOT_BYTES_MIN = 16 << 10
STAGING_BYTES = 2 * MIB

ROOMY = "roomy"
"""Memory for everything, twice: nothing is evicted, every sealed block must always be there."""
SPILLING = "spilling"
"""Memory for a part, drives for everything: blocks that leave memory must be on a drive."""
FLEETING = "fleeting"
"""Memory that ends with the daemon, drives for everything: blocks on a drive must come back."""
PRESSED = "pressed"
"""Too little of both: eviction everywhere; no byte may be wrong, no capacity exceeded."""
SHARED = "shared"
"""Memory for a part, and a remote for everything: blocks that are at the remote must come back."""
KINDS = (ROOMY, SPILLING, FLEETING, PRESSED, SHARED)
GATEWAY_HOST = "127.0.0.1"
_GATEWAY_SHARE = 0.35
_FLUSHED = 4
_PAGES = (4096, 16384, 16384, 40000, 49152)


@dataclass(frozen=True)
class Shape:
    """The configuration of a world, in plain values, so that it can be written down and read back.

    Attributes:
        kind: one of ``KINDS``.
        memory_bytes: size of the arena.
        ssd_bytes: capacity of the SSD directory, 0 for none.
        segment_bytes: size of its files.
        models: (page bytes, shards) of each model.
        clients: (model, whether it uses the simple API, too) of each client.
        blocks_max: blocks that clients begin to store, in all.
        skewed: whether the daemon's clocks can jump.
        remote: numbers of the clients that reach the daemon by its gateway.
        tier: kind of the remote behind memory (``harness.remote_server``); empty for none.
    """

    kind: str
    memory_bytes: int
    ssd_bytes: int
    segment_bytes: int
    models: tuple[tuple[int, int], ...]
    clients: tuple[tuple[int, bool], ...]
    blocks_max: int
    flush: bool
    interface: str
    skewed: bool
    remote: tuple[int, ...] = ()
    tier: str = ""

    @property
    def has_local(self) -> bool:
        """Whether a client attaches on the daemon's own socket."""
        return len(self.remote) < len(self.clients)

    @property
    def arena_stays(self) -> bool:
        """Whether the arena's files outlive the daemon."""
        return self.kind != FLEETING

    @property
    def blocks_kept(self) -> int:
        """Number of blocks beyond ``blocks_max`` that are reserved for faults that need stores."""
        return self.blocks_max // 3

    @property
    def keeps(self) -> bool:
        """Whether no sealed block may get lost without a fault that took it."""
        return self.kind != PRESSED

    def settings(self, ssd: Path, port: int = 0, tier_url: str = "") -> dict[str, object]:
        """Return the daemon's settings, by field name; ``ssd`` is the drive's directory, ``port``
        that of its gateway, ``tier_url`` the remote's.
        """
        values: dict[str, object] = {
            "memory": self.memory_bytes,
            "slab_bytes": SLAB_BYTES,
            "slot_bytes_min": SLOT_BYTES_MIN,
            "hugepages": "off",
            "drain_grace_s": 0.2,
            "drain_grace_no_pidfd_s": 0.4,
            "stock_fraction_max": 0.3,
            "held_fraction_max": 0.9,
            "log_level": "info",
            "http": "off",
        }
        if self.remote:
            values["listen"] = f"{GATEWAY_HOST}:{port}"
        if self.tier:
            values |= {"remote": tier_url, "remote_write": "all", "remote_staging": STAGING_BYTES}
            values["http"] = f"{GATEWAY_HOST}:0"
        if self.ssd_bytes:
            values["ssd_dirs"] = f"{ssd}={self.ssd_bytes}"
            values["ssd_segment_bytes"] = self.segment_bytes
            values["ssd_interface"] = self.interface
            values["ssd_flush"] = self.flush
        return values

    def as_json(self) -> dict[str, Any]:
        """Return the values for the log of steps."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Shape:
        """Build the shape from the log of steps.

        Raises:
            TypeError, KeyError: the entry is of another version.
        """
        models = tuple((int(a), int(b)) for a, b in said["models"])
        clients = tuple((int(a), bool(b)) for a, b in said["clients"])
        remote = tuple(int(a) for a in said["remote"])
        return cls(**{**said, "models": models, "clients": clients, "remote": remote})


def _kind(number: int, *, ssd: bool, tiers: Sequence[str], remote: bool | None) -> str:
    if remote:
        return SHARED
    kinds = [SPILLING, ROOMY, FLEETING, PRESSED] if ssd else [ROOMY, PRESSED]
    if tiers and remote is None:
        kinds.append(SHARED)
    return kinds[number % len(kinds)]


def shape_of(
    rng: random.Random,
    number: int,
    *,
    ssd: bool,
    skewed: bool,
    gateway: bool | None = None,
    tiers: Sequence[str] = (),
    remote: bool | None = None,
) -> Shape:
    """Return the shape of world ``number``; kinds rotate. With ``skewed``, its clocks may jump if
    the dice say so. ``gateway`` forces a gateway or forbids it; by default the dice decide.
    ``tiers`` are the kinds of remotes that there may be, which ``remote`` forces or forbids.
    """
    kind = _kind(number, ssd=ssd, tiers=tiers, remote=remote)
    has_ssd = ssd and kind != SHARED and (kind != ROOMY or rng.random() < 0.6)
    shards = rng.choice([1, 2])
    models = ((rng.choice(_PAGES), shards), (rng.choice(_PAGES), 1))
    blocks = rng.choice([500, 700])
    largest = blocks * max(page * count for page, count in models)
    memory = {
        ROOMY: -(-2 * largest // SLAB_BYTES) * SLAB_BYTES + 16 * SLAB_BYTES,
        SPILLING: rng.choice([5, 6, 8]) * SLAB_BYTES,
        FLEETING: rng.choice([6, 10]) * SLAB_BYTES,
        PRESSED: rng.choice([3, 4]) * SLAB_BYTES,
        SHARED: rng.choice([5, 6, 8]) * SLAB_BYTES,
    }[kind]
    segment = rng.choice([1, 2]) * MIB
    # Several times the blocks: one stored again or carried over is there twice for a time.
    room = 4 * largest + 24 * segment
    if kind == PRESSED:
        room = RESERVE_BYTES + capacity_least(segment) + rng.choice([0, 4]) * segment
    clients = ((0, shards == 1), (1, True), (rng.choice([0, 1]), False))
    # Sometimes at random, and certainly in a run of minutes.
    flush = rng.random() < 0.15 or number % 6 == _FLUSHED
    interface = rng.choice(["auto", "auto", "auto", "threads"])
    # The clock of a remote's helper would not jump with the daemon's.
    skewed = skewed and rng.random() < 0.5 and kind != SHARED
    # The last draws: what comes before is the same with and without a gateway.
    by_dice = rng.random() < _GATEWAY_SHARE
    remote_clients = rng.sample(range(len(clients)), rng.choice([1, 2, 3, 3]))
    has_gateway = by_dice if gateway is None else gateway
    clients_of_gateway = tuple(sorted(remote_clients)) if has_gateway else ()
    return Shape(
        kind=kind,
        memory_bytes=memory,
        ssd_bytes=room if has_ssd else 0,
        segment_bytes=segment,
        models=models,
        clients=clients,
        blocks_max=blocks if kind != PRESSED else 12 * blocks,
        flush=flush,
        interface=interface,
        skewed=skewed,
        remote=clients_of_gateway,
        tier=rng.choice(tiers) if kind == SHARED else "",
    )
