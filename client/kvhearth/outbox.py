"""Errands that nobody waits for: releases, aborts, unpins, touches, in one bounded queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvhearth.transports.base import TOUCH, Rpc

TOUCHES_MAX = 256
"""Touches that may wait. Nothing leaks when one is dropped, so they take no other errand's room."""
PARTS_MAX = 64
"""Groups that one message may carry; the daemon refuses more."""


class Errand(NamedTuple):
    """One request that has meaning under one session only.

    Attributes:
        rpc: the call.
        request: its message; all its fields are repeated or equal within a ``kind``.
        weight: ids, slots or keys in it.
        parts: groups in it.
        boot_id, session: under which it was made; under another one it is void.
        kind: errands of one kind may be merged into one message.
        retries: how often it was sent again after a refusal that was not the daemon's.
    """

    rpc: Rpc[Any, Any]
    request: Any
    weight: int
    boot_id: str
    session: int
    kind: str
    parts: int = 0
    retries: int = 0


class Outbox:
    """A bounded queue; the oldest errand goes first, one that finds it full is refused.

    Touches have a bound of their own and go last.
    """

    def __init__(self, errands_max: int, touches_max: int = TOUCHES_MAX) -> None:
        self._lock = threading.Lock()
        self._errands: deque[Errand] = deque()
        self._touches: deque[Errand] = deque()
        self._queues = ((self._errands, errands_max), (self._touches, touches_max))

    def put(self, errand: Errand) -> bool:
        """Queue an errand; False if the queue is full."""
        with self._lock:
            queue, most = self._queues[errand.rpc is TOUCH]
            if len(queue) >= most:
                return False
            queue.append(errand)
            return True

    def put_back(self, errands: Iterable[Errand]) -> int:
        """Queue errands again before all others; returns how many found no room."""
        sorted_out: tuple[list[Errand], list[Errand]] = ([], [])
        for errand in errands:
            sorted_out[errand.rpc is TOUCH].append(errand)
        lost = 0
        with self._lock:
            for (queue, most), waiting in zip(self._queues, sorted_out, strict=True):
                room = max(most - len(queue), 0)
                queue.extendleft(reversed(waiting[:room]))
                lost += max(len(waiting) - room, 0)
        return lost

    def take(self) -> list[Errand]:
        """All errands, oldest first, then the touches; the queue is empty afterwards."""
        with self._lock:
            errands = [*self._errands, *self._touches]
            self._errands.clear()
            self._touches.clear()
        return errands

    def __len__(self) -> int:
        return len(self._errands) + len(self._touches)


def batch(errands: Iterable[Errand], weight_max: int) -> list[list[Errand]]:
    """Group errands into messages of at most ``weight_max`` (one alone may exceed it)."""
    batches: list[list[Errand]] = []
    last: dict[str, list[Errand]] = {}
    totals: dict[str, tuple[int, int]] = {}
    for errand in errands:
        weight, parts = totals.get(errand.kind, (0, 0))
        weight, parts = weight + errand.weight, parts + errand.parts
        if errand.kind in last and weight <= weight_max and parts <= PARTS_MAX:
            last[errand.kind].append(errand)
        else:
            last[errand.kind] = [errand]
            batches.append(last[errand.kind])
            weight, parts = errand.weight, errand.parts
        totals[errand.kind] = (weight, parts)
    return batches


def merge(errands: list[Errand]) -> Any:
    """One message for errands of one kind: protobuf appends repeated fields when it merges."""
    merged = type(errands[0].request)()
    for errand in errands:
        merged.MergeFrom(errand.request)
    return merged
