"""A scripted daemon of two tiers, whose blocks are promoted as a test scripts."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.model import pack_bits
from kvhearth.proto.v1 import cache_pb2 as pb
from support.fake_daemon import KEY_BYTES, PAGE_BYTES, SLOTS, FakeDaemon, extents

CONTRACT = Contract("m", "r", "uint8", (GroupSpec(GroupKind.FULL, 16, PAGE_BYTES),))


class Tower:
    """Blocks of a scripted daemon: the first ``dram`` of the requested ones are in memory, the
    others on SSD or, with ``asking`` lookups left, at a remote that is being asked.

    Attributes:
        step: number of blocks promoted before each later lookup, once a lookup has requested it.
        asked: all lookups.
    """

    def __init__(
        self, daemon: FakeDaemon, *, dram: int, step: int = 1, eta_us: int = 2000, asking: int = 0
    ) -> None:
        self.daemon = daemon
        self.dram = dram
        self.step = step
        self.eta_us = eta_us
        self.asking = asking
        self.asked: list[Any] = []
        daemon.generations[:] = np.ones(SLOTS, np.uint32).tobytes()
        daemon.segment[:] = bytes(len(daemon.segment))
        daemon.answer("Lookup", self._answer)

    def _answer(self, request: Any) -> Any:
        self.daemon.answer("Lookup", self._answer)
        self.asked.append(request)
        count = len(request.groups[0].keys) // KEY_BYTES
        up = min(self.dram, count)
        asking, self.asking = self.asking > 0, max(0, self.asking - 1)
        self.dram += self.step if request.prefetch and not asking else 0
        bits = np.arange(count) < up
        presence = pb.GroupPresence(
            group=0,
            present=pack_bits(bits if asking else np.ones(count, np.bool_)),
            ready=pack_bits(bits),
            leased=pack_bits(bits),
            tiers=np.where(bits, 1, 3 if asking else 2).astype(np.uint8).tobytes(),
            extents=extents(up).tobytes(),
        )
        return pb.LookupResponse(
            lease_id=request.lease_id if up else 0,
            hit_tokens=16 * up,
            groups=[presence],
            eta_us=self.eta_us if up < count else 0,
        )


def ended(daemon: FakeDaemon) -> tuple[list[int], list[int]]:
    """Return the lease ids and cancelled ids of all releases, sorted."""
    requests = daemon.requests["Release"]
    leases = [number for request in requests for number in request.lease_ids]
    return sorted(leases), sorted(n for request in requests for n in request.cancelled_ids)
