"""A real engine over fake memory: a journal in an array, a catalogue in a string.

Tests can crash it: the engine object is dropped at any moment, and a new one adopts the content of
the journal and the catalogue.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth import native
from kvhearth.contract import Contract
from kvhearth.model import U8
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.handshake import Hello
from kvhearth_server.core.slot_table import Geometry, SlotTable
from kvhearth_server.core.state import Limits
from kvhearth_server.engine.engine import Attached, Engine, EngineLimits
from kvhearth_server.engine.sessions import Peer
from kvhearth_server.memory import journal as journal_module
from kvhearth_server.memory.journal import Journal, journal_bytes
from kvhearth_server.memory.numa import KernelTopology
from kvhearth_server.memory.populator import Populator
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS
from kvhearth_server.transport.dispatch import Dispatcher
from support.core_kit import Rig


class Crash(BaseException):
    """Simulated death of the daemon; only the test may catch it."""


class FakeFile:
    """A mapped file, as far as ``Journal`` uses a segment."""

    def __init__(self, size: int) -> None:
        self.view = np.zeros(size, np.uint8)
        self.bytes = size
        self.path = Path("journal")

    def close(self) -> None:
        """Do nothing: there is nothing to unmap."""


@dataclass
class FakeSegment:
    """A segment of zeros and its client lock bytes; ``held`` are those of processes that still map
    it.
    """

    bytes: int
    page_bytes: int = 4096
    held: set[int] = field(default_factory=set)
    view: U8 = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.view = np.zeros(self.bytes, np.uint8)

    def client_byte_held(self, index: int) -> bool:
        """Whether a process still maps the segment under this byte."""
        return index in self.held

    def lock_client_byte(self, index: int) -> int:
        """Lock a byte in ``held``. Return a descriptor, which can be any."""
        self.held.add(index)
        return os.open(os.devnull, os.O_RDONLY)


class FakeGenerations:
    """A fresh array at each start, like the daemon's memfd."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.fd = -1
        self.array = np.zeros(count, np.uint32)

    def reopen(self, _segment: int) -> int:
        return os.open(os.devnull, os.O_RDONLY)


@dataclass(frozen=True)
class FakePlan:
    """The part of ``ArenaPlan`` that the engine reads."""

    geometry: Geometry


class FakeArena:
    """State that survives the daemon: segments, journal, catalogue."""

    durable = True

    def __init__(self, geometry: Geometry) -> None:
        self.plan = FakePlan(geometry)
        self.segments = [FakeSegment(geometry.segment_bytes(i)) for i in _count(geometry)]
        self.file = FakeFile(journal_bytes(geometry, 1))
        self.text = ""
        self.reopen()

    def reopen(self) -> None:
        """Reset the state that a restart of the daemon resets."""
        self.generations = FakeGenerations(self.plan.geometry.slot_count)
        self.catalogue: dict[str, Any] | None = json.loads(self.text) if self.text else None
        nodes = np.zeros(self.plan.geometry.slab_count, np.int64)
        self.populator = Populator(self.plan.geometry, [], None, nodes, KernelTopology())
        self.populator.populated[:] = True

    def put_back(self) -> list[str]:
        """Return the names of files that are gone."""
        return []

    def journal(self, table: SlotTable) -> Journal:
        """Return a journal over a core's table."""
        return Journal(self.file, self.plan.geometry, table)  # type: ignore[arg-type]

    def catalogue_head(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content unchanged."""
        return content

    def write_catalogue(self, head: dict[str, Any], namespaces: Sequence[str]) -> None:
        """Write the catalogue atomically."""
        journal_module.hit("catalogue.before")
        self.text = json.dumps({**head, "namespaces": [json.loads(one) for one in namespaces]})
        journal_module.hit("catalogue.after")


def _count(geometry: Geometry) -> range:
    return range(len(geometry.segments))


class Shell:
    """An engine that can be killed and restarted; ``now`` is its clock."""

    def __init__(self, geometry: Geometry, limits: Limits) -> None:
        self.arena = FakeArena(geometry)
        self.limits = limits
        self.now = 0.0
        self.boots = 0
        self.engine = self._start()

    def _start(self) -> Engine:
        self.boots += 1
        engine = Engine(
            self.arena,  # type: ignore[arg-type]
            self.limits,
            EngineLimits(message_bytes_max=1 << 20, drain_grace_s=0, drain_grace_no_pidfd_s=0),
            Counters(COUNTERS),
            now=lambda: self.now,
        )
        if native.available() is None:
            engine.share_index()
        return engine

    def restart(self) -> Engine:
        """Kill the daemon at once, and start another one on the state that it left."""
        self.arena.reopen()
        self.engine = self._start()
        return self.engine

    def attach(self, contract: Contract, tenant: str, **hello: Any) -> Attached:
        """Attach a process; the descriptors are closed, as at the end of the socket."""
        values: dict[str, Any] = {
            "protocol": PROTOCOL_VERSION,
            "engine_id": "e",
            "contract": contract.to_json(),
        }
        attached = self.engine.attach(Hello(**{**values, **hello}), Peer(1000, 0, -1), tenant)
        for descriptor in attached.descriptors:
            os.close(descriptor)
        return attached


class Desk(Rig):
    """A rig whose core has an engine around it, for tests of calls by their messages."""

    def _begin(self, limits: Limits) -> None:
        self.shell = Shell(self.geometry, limits)
        self.engine, self.core = self.shell.engine, self.shell.engine.core
        self.attached: dict[int, Attached] = {}
        self.dispatcher = Dispatcher(self.engine, None)  # type: ignore[arg-type]

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return self.engine.call(function, *arguments, **named)

    def join(self, made: Contract, *, tenant: str = "t", **hello: Any) -> int:
        values = {"scheduler": True, "rank": 0, "map_arena": True, **hello}
        attached = self.shell.attach(made, tenant, **values)
        self.attached[attached.session.number] = attached
        return attached.session.number

    def ask(self, session: int, name: str, request: Any) -> Any:
        """Decide a call. Return its reply, or an awaitable of it."""
        return self.dispatcher.decide(name, request, self.attached[session].session)


@contextlib.contextmanager
def fault_hook(hook: Callable[[str], None]) -> Iterator[None]:
    """Call ``hook`` at each of the journal's fault points, instead of killing the process."""
    real = journal_module.hit
    journal_module.hit = hook
    try:
        yield
    finally:
        journal_module.hit = real
