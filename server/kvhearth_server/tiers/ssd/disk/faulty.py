"""A device that misbehaves on command: around a real queue, for tests and the torture kit."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhearth_server.tiers.ssd.disk.base import DiskQueue, Op, Reaped, Request
from kvhearth_server.tiers.ssd.disk.kernel import signal_event


@dataclass
class Faults:
    """What goes wrong. May be changed from any thread while the queue runs.

    Attributes:
        errors: requests of an op end with this errno without reaching the device.
        rate: share of the requests that ``errors`` and ``short`` hit.
        short: ops whose results are half of what they should be.
        held: ops whose results are kept back until they are no longer named here.
        fds: only requests for these descriptors are hit; empty for all.
    """

    errors: dict[Op, int] = field(default_factory=dict)
    rate: float = 1.0
    short: frozenset[Op] = frozenset()
    held: frozenset[Op] = frozenset()
    fds: frozenset[int] = frozenset()
    seed: int = 0


class FaultyQueue:
    """Passes requests on to ``inner``, or fails, shortens or delays them."""

    def __init__(self, inner: DiskQueue, faults: Faults) -> None:
        self.name, self.depth, self.event_fd = inner.name, inner.depth, inner.event_fd
        self.faults = faults
        self.injected = 0
        self._inner = inner
        self._random = random.Random(faults.seed)
        self._requests: dict[int, Request] = {}
        self._ready: list[Reaped] = []
        self._kept: list[Reaped] = []

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def submit(self, requests: Sequence[Request]) -> int:
        taken = 0
        for request in requests:
            if self.in_flight >= self.depth:
                break
            error = self.faults.errors.get(request.op, 0)
            if error and self._hits(request):
                self._ready.append(Reaped(request.tag, -error))
                signal_event(self.event_fd)
            elif not self._inner.submit([request]):
                break
            self._requests[request.tag] = request
            taken += 1
        return taken

    def reap(self) -> list[Reaped]:
        found = [*self._ready, *self._kept, *self._inner.reap()]
        self._ready, self._kept = [], []
        done = []
        for each in found:
            request = self._requests[each.tag]
            if request.op in self.faults.held and self._is_meant(request):
                self._kept.append(each)
                continue
            del self._requests[each.tag]
            short = each.result > 0 and request.op in self.faults.short and self._hits(request)
            done.append(Reaped(each.tag, each.result // 2) if short else each)
        return done

    def wake(self) -> None:
        """Have the driver look again: what was held may go."""
        os.eventfd_write(self.event_fd, 1)

    def close(self) -> None:
        self._inner.close()

    def _is_meant(self, request: Request) -> bool:
        return not self.faults.fds or request.fd in self.faults.fds

    def _hits(self, request: Request) -> bool:
        hit = self._is_meant(request) and self._random.random() < self.faults.rate
        self.injected += hit
        return hit
