"""A mover without a helper process, whose remote is a dictionary."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvhearth.model import CHECKSUM_BYTES, U8
from kvhearth_server.tiers.base import (
    BlockSpec,
    Corrupt,
    Counts,
    Done,
    Failed,
    Missing,
    Outcome,
    Refusal,
    Throttled,
)
from kvhearth_server.tiers.remote.mover import (
    Answer,
    Delete,
    Exists,
    Get,
    Put,
)
from kvhearth_server.tiers.remote.process import Staging


@dataclass
class Value:
    """A block at the remote: ``content`` is (shards, length)."""

    length: int
    shards: int
    content: bytes
    sums: bytes
    parent: bytes


class ScriptedMover:
    """Does each request at the next ``poll``.

    Args:
        regions: the bytes of each arena segment.

    Attributes:
        due_at: see ``process.Mover``.
        held: no request ends.
        refusal: what requests get instead of a ticket.
        failure: how requests end instead, after ``poll``.
        requests: all requests so far.
    """

    def __init__(self, regions: Sequence[U8]) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.due_at = math.inf
        self.held = False
        self.up, self.problem = True, ""
        self.refusal: Throttled | None = None
        self.failure: Failed | None = None
        self.requests: list[Exists] = []
        self.values: dict[tuple[str, bytes], Value] = {}
        self.restarts, self.alone, self.good_probes = 0, True, 0
        self.counts, self.staging = Counts(), Staging(1 << 20)
        self._regions = list(regions)
        self._waiting: list[tuple[int, Exists]] = []
        self._cancelled: set[int] = set()
        self._next = 1
        self._draining = False

    def submit(self, request: Exists, deadline_s: float) -> int | Throttled:
        if self._draining:
            return Throttled(Refusal.DRAINING)
        if self.refusal is not None:
            return self.refusal
        self.requests.append(request)
        ticket, self._next = self._next, self._next + 1
        self._waiting.append((ticket, request))
        os.eventfd_write(self.event_fd, 1)
        return ticket

    def takes(self, family: BlockSpec) -> bool:
        return True

    def cancel(self, ticket: int) -> None:
        self._cancelled.add(ticket)

    def poll(self) -> list[Answer]:
        if self.held or not self._waiting:
            return []
        os.eventfd_read(self.event_fd)
        waiting, self._waiting = self._waiting, []
        return [self._answer(ticket, request) for ticket, request in waiting]

    def using_slots(self) -> list[Get]:
        """Return the requests that read or write slots."""
        return [request for _, request in self._waiting if isinstance(request, Get)]

    @property
    def calls(self) -> int:
        """Number of requests that ask whether keys are there."""
        return sum(type(each) is Exists for each in self.requests)

    def drain(self, deadline_s: float) -> bool:
        self._draining = True
        return not self.held

    def close(self) -> None:
        os.close(self.event_fd)

    # -- the remote --------------------------------------------------------------------------------

    def _answer(self, ticket: int, request: Exists) -> Answer:
        count, family = len(request.keys), request.family
        sums = np.zeros((count, family.shards), f"V{CHECKSUM_BYTES}")
        parents = [b""] * count
        if ticket in self._cancelled or self.failure is not None:
            ended = self.failure or Failed("cancelled")
            return Answer(ticket, [ended] * count, checksums=sums, parents=parents)
        outcomes: list[Outcome] = []
        for row, key in enumerate(request.keys):
            if isinstance(request, Put):
                outcomes.append(self._put(request, row))
            elif isinstance(request, Get):
                after = bool(outcomes) and isinstance(outcomes[-1], Missing)
                found = None if after else self.value(request.space, key, family)
                outcomes.append(Missing() if found is None else self._get(request, row, found))
                if found is not None:
                    sums[row] = np.frombuffer(found.sums, sums.dtype)
                    parents[row] = found.parent
            elif isinstance(request, Delete):
                self.drop(request.space, key)
                outcomes.append(Done())
            else:
                there = (request.space, key) in self.values
                whole = self.value(request.space, key, family) is not None
                outcomes.append(Done() if whole else Corrupt("remote") if there else Missing())
        if isinstance(request, Get) and not isinstance(request, Put):
            return Answer(ticket, outcomes, checksums=sums, parents=parents)
        return Answer(ticket, outcomes)

    def _put(self, request: Put, row: int) -> Outcome:
        length, parts = request.family.length, []
        for shard in range(request.family.shards):
            place = request.places[row, shard]
            data = self._regions[int(place["region"])][int(place["offset"]) :][:length].tobytes()
            if xxhash.xxh3_128_digest(data) != request.checksums[row, shard].tobytes():
                return Corrupt("source")
            parts.append(data)
        sums, parent = request.checksums[row].tobytes(), request.parents[row]
        value = Value(length, request.family.shards, b"".join(parts), sums, parent)
        self.values[request.space, request.keys[row]] = value
        return Done()

    def _get(self, request: Get, row: int, found: Value) -> Outcome:
        for shard in range(found.shards):
            data = found.content[shard * found.length :][: found.length]
            place = request.places[row, shard]
            room = self._regions[int(place["region"])][int(place["offset"]) :][: found.length]
            room[:] = np.frombuffer(data, np.uint8)
            if xxhash.xxh3_128_digest(data) != found.sums[16 * shard :][:16]:
                return Corrupt("remote")
        return Done()

    def value(self, space: str, key: bytes, family: BlockSpec) -> Value | None:
        """Return a value of this shape."""
        found = self.values.get((space, key))
        whole = found is not None and (found.length, found.shards) == (family.length, family.shards)
        return found if whole else None

    def drop(self, space: str, key: bytes) -> None:
        """Remove a value if it is there."""
        self.values.pop((space, key), None)
