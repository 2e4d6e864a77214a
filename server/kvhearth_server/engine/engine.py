"""The engine loop: turns every request into one call of the core and applies the core's actions
before the reply leaves.

Everything here runs on the event loop, so the core needs no locks. Only threads beside the loop
touch the blocks' bytes (see ``checksums``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np

from kvhearth.contract import CONTRACT_JSON_BYTES_MAX, KEY_BYTES_MAX, Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.failpoints import hit
from kvhearth.model import EXTENT_BYTES
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.handshake import Hello, SegmentInfo, Welcome
from kvhearth_server.core.actions import (
    Action,
    Bind,
    BindOne,
    Mark,
    SlabSized,
    Sum,
    Summed,
)
from kvhearth_server.core.core import Core
from kvhearth_server.core.groups import Group
from kvhearth_server.core.holds import hold_room
from kvhearth_server.core.membership import Joining
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.publishing import PublishPolicy
from kvhearth_server.core.removal import tiers_of
from kvhearth_server.core.state import Limits, require
from kvhearth_server.engine.epoch_store import EpochStore
from kvhearth_server.engine.miss_ratio import MissRatios
from kvhearth_server.engine.recovery import (
    CatalogueWriter,
    catalogue_content,
    loading_from,
    namespace_texts,
    safe_after,
    take_over,
)
from kvhearth_server.engine.sessions import Peer, Session, Sessions
from kvhearth_server.engine.tiering.manager import Tiering
from kvhearth_server.engine.token_store import Place, TokenStore
from kvhearth_server.engine.watch import Watch
from kvhearth_server.memory.arena import Arena
from kvhearth_server.memory.journal import Journal
from kvhearth_server.memory.shared_index import SharedIndex, open_shared_index
from kvhearth_server.observability.counters import (
    AGE_BOUNDS,
    FALLBACK,
    CallTimings,
    Counters,
    Histogram,
    Reported,
    TickClock,
)
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.base import Tier

_log = get_logger("kvhearth.engine")
RESTART_AFTER_S = 60.0
"""Time for which a door must be shut before a restart is asked for."""
_MESSAGE_FRAME_BYTES = 4096
"""Bytes of a message that are reserved for everything but keys and extents."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class EngineLimits:
    """Limits and timeouts of the engine around the core."""

    message_bytes_max: int
    drain_grace_s: float
    drain_grace_no_pidfd_s: float
    remote_write: PublishPolicy = PublishPolicy.REUSE


@dataclass(frozen=True)
class Reloaded:
    """Names of settings that changed: those that hold now, and those that need a restart."""

    changed: list[str]
    needs_restart: list[str]


@dataclass(frozen=True)
class Attached:
    """Result of an attach: the welcome, and descriptors that the attach socket sends and closes."""

    session: Session
    hello: Hello
    welcome: Welcome
    descriptors: list[int]


@dataclass(frozen=True)
class ShutDoor:
    """A door that takes nobody for the moment.

    Attributes:
        since: when it was found shut, in the engine's time.
        passes: the cause ends without a restart, such as a full file system.
    """

    reason: str
    since: float
    passes: bool


class Engine:
    """Core, arena and sessions of one daemon run."""

    shared_index: SharedIndex | None = None
    """Index that clients map; see ``share_index``."""
    adopted_blocks = 0
    """Blocks that were taken over from an earlier run."""
    describe_gateway: Callable[[], str] | None = None
    """Returns the state of this daemon's gateway, if it has one."""

    def __init__(
        self,
        arena: Arena,
        limits: Limits,
        shell: EngineLimits,
        counters: Counters,
        *,
        tiers: Sequence[Tier] = (),
        tokens: TokenStore | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.boot_id = secrets.token_hex(16)
        self.lineage = secrets.token_hex(16)
        """ID of the cold start; a run that takes over an arena takes over its lineage."""
        self.arena = arena
        self.tiers = tuple(tiers)
        """Tiers under memory, cheapest first."""
        self.shell = shell
        self.counters, self.now = counters, now
        self.started_at = now()
        self.drain_begun = asyncio.Event()
        self.reload: Callable[[], Awaitable[Reloaded]] = _nothing_to_reload
        """Reads the settings again and applies what may change; set by the start."""
        seed = secrets.randbits(64)
        self.core = Core(
            arena.plan.geometry,
            limits,
            arena.generations.array,
            hash_seed=seed,
            slab_nodes=arena.populator.slab_nodes,
        )
        self.journal = arena.journal(self.core.state.table)
        self.sessions = Sessions()
        self.timings = CallTimings()
        self.reported = Reported()
        self.ticks = TickClock(self.started_at)
        self.eviction_ages = Histogram(AGE_BOUNDS)
        self.to_sum: deque[Sum] = deque()
        self.work = asyncio.Event()
        """Set when ``to_sum`` has got more."""
        self.notices: dict[str, str] = {}
        """Facts that an operator should know though the daemon serves, by their subject."""
        self.doors_shut: dict[str, ShutDoor] = {}
        """Doors that take nobody for the moment, by name."""
        self.tiering: Tiering | None = None
        self.ssd_catalogue = EpochStore(
            [path for tier in tiers for path in tier.directories], counters
        )
        self.core.state.writeback_queue.on = any(not tier.shared for tier in tiers)
        self.tokens = tokens or TokenStore(None, 0, counters)
        self._noted_version, self._written_version = 0, -1
        """Version of the namespaces for which the last write of the catalogue was asked, and of the
        last one written.
        """
        self._namespace_texts = (-1, list[str]())
        """Namespaces as the catalogue has them, and their version."""
        self.catalogue = CatalogueWriter(self._prepare_catalogue)
        take_over(self)
        self._use_memory()
        if tiers:
            self.tiering = Tiering(
                self.core, self.tiers, self.lineage, self.call, now, shell.remote_write
            )
            self.tiering.orphaned_loads_after = safe_after(self)
        self.adopt_s = now() - self.started_at
        self.miss_ratios = MissRatios(self)
        self.watch = Watch(self)
        self.write_catalogue()

    def gone(self, place: Place, keys: list[bytes]) -> list[bytes]:
        """Return those blocks that are nowhere; none before it is known what the tiers have."""
        if any(tier.recovering for tier in self.tiers):
            return []
        state = self.core.state
        namespace = state.namespaces.find(place.namespace)
        if namespace is None:
            return keys
        tiers = tiers_of(state, namespace, place.kv_group, keys)
        return [keys[row] for row in np.flatnonzero(tiers == 0).tolist()]

    def _use_memory(self) -> None:
        """Let the core know which slabs have memory."""
        table, populator = self.core.state.table, self.arena.populator
        table.slab_populated = populator.populated
        sizes = table.slab_slot_bytes
        self.core.withhold(slab for slab in populator.without_rows if not sizes[slab])

    def share_index(self) -> None:
        """Write the index into memory that clients map, from now on. Logs why if that cannot be."""
        index = open_shared_index(self.core.state)
        if isinstance(index, str):
            _log.info("shared_index.off", reason=index)
            return
        index.publish_all()
        self.shared_index = index
        self._tell_room()

    @property
    def limits(self) -> Limits:
        """Bounds of the core in force."""
        return self.core.state.limits

    def use(self, limits: Limits, ssd_bytes_per_day: int | None = None) -> None:
        """Use other bounds from now on, and another write budget unless it is None."""
        self.core.state.limits = limits
        if ssd_bytes_per_day is not None:
            for tier in self.tiers:
                tier.use_budget(ssd_bytes_per_day)

    # -- calls -------------------------------------------------------------------------------------

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the core, then apply its actions, even if it raised (it may have evicted)."""
        try:
            return function(*args, **kwargs)
        finally:
            self._act()
            self.run_deferred()

    def call_deferred(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the core, but leave to ``run_deferred`` the work that no answer waits for.

        The caller answers and then calls ``run_deferred`` before anything else runs on the loop.
        """
        try:
            return function(*args, **kwargs)
        finally:
            self._act()

    def heard(self, number: int, namespace: Namespace, counters: Mapping[str, int]) -> None:
        """Note a heartbeat of a session with its client's counters; the caller bounds them."""
        session = self.sessions.find(number)
        if session is not None:
            session.heard_at = self.now()
        traffic = namespace.traffic
        for name, rise in self.reported.note(number, namespace.tenant, counters).items():
            if name.startswith(FALLBACK):
                traffic.fallbacks += rise

    def drain(self) -> None:
        """Refuse new stores and sessions from now on."""
        self.drain_begun.set()

    @property
    def draining(self) -> bool:
        """Whether new stores and sessions are refused."""
        return self.drain_begun.is_set()

    def refuse_while_draining(self) -> None:
        """Raise while the daemon is draining.

        Raises:
            KVHearthError: ``draining``.
        """
        if self.draining:
            raise KVHearthError(Reason.DRAINING, "the daemon is shutting down; try again soon")

    @property
    def needs_restart(self) -> str:
        """Why only a restart can help, told once it has been so for a minute; "" if it need not."""
        old = self.now() - RESTART_AFTER_S
        shut = self.doors_shut.values()
        return next((each.reason for each in shut if not each.passes and each.since < old), "")

    # -- attach ------------------------------------------------------------------------------------

    def attach(self, hello: Hello, peer: Peer, tenant: str) -> Attached:
        """Attach a peer: join a group, lock a byte, issue a token, and duplicate the descriptors.

        Raises:
            KVHearthError: any reason of ``Membership.join``, ``protocol_version``, ``draining``.
        """
        self.refuse_while_draining()
        contract = _contract_of(hello)
        self._previous(hello, tenant)
        number, token = self.sessions.issue()
        segment = self.core.state.segment_of[tenant]
        joining = Joining(
            number,
            tenant,
            hello.engine_id,
            contract,
            hello.scheduler,
            hello.rank,
            hello.incarnation,
            hello.map_arena,
            hello.numa_node,
            hello.process_group,
            hello.model_name,
        )
        lock_byte, descriptors = -1, list[int]()
        with contextlib.ExitStack() as undo:
            undo.callback(self.call, self.core.membership.leave, number, finished=True)
            group = self.call(self.core.membership.join, joining)
            if hello.map_arena:
                lock_byte, descriptors = self._descriptors(segment)
                for descriptor in descriptors:
                    undo.callback(os.close, descriptor)
            for descriptor in self._index_descriptors(hello, segment):
                undo.callback(os.close, descriptor)
                descriptors.append(descriptor)
            session = Session(
                number,
                tenant,
                segment,
                token,
                peer,
                lock_byte,
                group.number,
                self.boot_id,
                keys_max=self.keys_max(contract),
                identity=hello.identity,
                heard_at=self.now(),
            )
            self.sessions.add(session)
            if hello.previous_boot == self.boot_id:
                self.reported.follow(number, hello.previous_session)
            # The peer's pidfd stays the caller's until the caller has the session.
            undo.callback(self.sessions.forget, session)
            self.write_catalogue()
            undo.pop_all()
        self.counters.add("sessions_opened")
        hit("attach.joined")
        welcome = self._welcome(session, group, hello)
        return Attached(session, hello, welcome, descriptors)

    def _welcome(self, session: Session, group: Group, hello: Hello) -> Welcome:
        number, mapped = session.segment, hello.map_arena
        namespace = self.core.state.namespaces.get(group.namespace)
        size, unpopulated = self.arena.segments[number], self.arena.populator.unpopulated(number)
        info = SegmentInfo(number, size.bytes, size.page_bytes, unpopulated)
        index = self.shared_index if hello.shared_index else None
        return Welcome(
            boot_id=self.boot_id,
            session=session.number,
            token=session.token,
            incarnation=group.incarnation,
            namespace=namespace.digest.hex(),
            epoch=namespace.epoch,
            generation_count=self.arena.generations.count if mapped or index else 0,
            keys_max=session.keys_max,
            message_bytes_max=self.shell.message_bytes_max,
            leases_max=self.limits.leases_max,
            segments=[info] if mapped else [],
            lineage=self.lineage,
            tables=[] if index is None else [index.shape(session.segment)],
            namespace_number=0 if index is None else namespace.number,
            memory_only=index is not None and not self.tiers,
        )

    def keys_max(self, contract: Contract) -> int:
        """Return the most blocks that one call may name: the configured limit, or fewer if their
        extents would not fit into a message.
        """
        shards = max(group.shards for group in contract.groups)
        each = EXTENT_BYTES * shards + KEY_BYTES_MAX + contract.token_bytes
        most = self.message_room // each
        return max(1, min(self.limits.keys_max, most))

    @property
    def message_room(self) -> int:
        """Bytes of a message for what it is about."""
        return self.shell.message_bytes_max - _MESSAGE_FRAME_BYTES

    def leave(self, session: Session, *, finished: bool) -> None:
        """End a session whose attach socket closed. ``finished``: it said goodbye first."""
        if session.gone:
            return
        self.sessions.leave(session)
        self.counters.add("sessions_closed")
        self.call(self.core.membership.leave, session.number, finished=finished)
        self._drop_requests(session.group)
        if finished or session.lock_byte < 0:
            self._drop(session)
        self.write_catalogue()

    def _drop_requests(self, number: int) -> None:
        """Drop the promotion requests of a group that has ended."""
        if self.tiering is None:
            return
        if not any(group.number == number and not group.ended for group in self.core.state.groups):
            self.tiering.promoter.group_ended(number)

    def drained(self, session: Session) -> None:
        """Record that a session that left can certainly write no more."""
        self.call(self.core.membership.drained, session.number)
        self._drop(session)
        self.write_catalogue()

    def _drop(self, session: Session) -> None:
        self.sessions.drop(session)
        self.reported.forget(session.number)

    def _previous(self, hello: Hello, tenant: str) -> None:
        """Drain the client's old session if the client says that its copies under it are done."""
        old = self.sessions.find(hello.previous_session)
        if old is None or not hello.previous_drained or not old.gone:
            return
        if (old.tenant, old.boot_id) == (tenant, hello.previous_boot):
            self.drained(old)

    def _descriptors(self, segment: int) -> tuple[int, list[int]]:
        """Return a free lock byte, and descriptors of the segment and of the generations."""
        mapped = self.arena.segments[segment]
        taken = self.sessions.lock_bytes(segment)
        for index in range(4 * self.limits.sessions_max):
            if index not in taken and not mapped.client_byte_held(index):
                with contextlib.ExitStack() as undo:
                    generations = self.arena.generations.reopen(segment)
                    undo.callback(os.close, generations)
                    descriptors = [mapped.lock_client_byte(index), generations]
                    undo.pop_all()
                return index, descriptors
        raise KVHearthError(
            Reason.TOO_MANY_SESSIONS,
            "every lock byte is held by a process that still maps the arena",
        )

    def _index_descriptors(self, hello: Hello, segment: int) -> Iterator[int]:
        """Yield descriptors for a client that finds blocks by itself; the caller closes them."""
        if hello.shared_index and self.shared_index is not None:
            if not hello.map_arena:
                yield self.arena.generations.reopen(segment)
            yield self.shared_index.reopen(segment)

    # -- actions -----------------------------------------------------------------------------------

    def _act(self) -> None:
        """Apply what must precede the answer: actions, and changes of the namespaces."""
        version = self.core.state.namespaces.version
        if version != self._noted_version or self.core.state.actions:
            if self.shared_index is not None:
                self.shared_index.follow()
            for action in self.core.state.take_actions():
                self._do(action)
            if self.shared_index is not None:
                self.shared_index.publish_noted()
        if version != self._noted_version:
            self._noted_version = version
            self.write_catalogue()
        self._tell_room()

    def _tell_room(self) -> None:
        """Tell clients that map the index how much may still be leased."""
        if self.shared_index is not None:
            for segment, room in enumerate(self.shared_index.rooms):
                room[0] = max(0, hold_room(self.core.state, segment))

    def run_deferred(self) -> None:
        """Do the work deferred until after the answer. Idempotent."""
        state = self.core.state
        if self.to_sum:
            self.work.set()
        if state.counts:
            self.counters.add_all(state.take_counts())
        if state.evicted_at:
            for used_at in state.take_evicted():
                self.eviction_ages.observe_all(self.ticks.ages_s(used_at, self.now()))
        if self.tiering is not None:
            self.tiering.wake()

    def _do(self, action: Action) -> None:
        if isinstance(action, Sum):
            self.to_sum.append(action)
        else:
            if self.journal is not None:
                _record(self.journal, action)
            if self.shared_index is not None:
                self.shared_index.note(action)

    @property
    def durable(self) -> bool:
        """Whether namespaces and groups outlive this run."""
        return self.arena.durable or bool(self.ssd_catalogue.paths)

    def write_catalogue(self) -> None:
        """Make namespaces and groups durable if the arena or a tier is; what must be so before an
        answer leaves waits for ``catalogue.written``.
        """
        if self.durable:
            self.catalogue.changed()

    def _prepare_catalogue(self) -> Callable[[], None]:
        state = self.core.state
        content = catalogue_content(state, self.sessions, self.boot_id, self.lineage)
        head = self.arena.catalogue_head({**content, "ssd_dirs": loading_from(self)})
        version = state.namespaces.version
        if self._namespace_texts[0] != version:
            self._namespace_texts = (version, namespace_texts(state))
        namespaces = self._namespace_texts[1]

        def write() -> None:
            self.arena.write_catalogue(head, namespaces)
            if self._written_version != version:
                # Write both halves: if one is damaged, the other must not bring back an invalidated
                # epoch.
                self.arena.write_catalogue(head, namespaces)
                self._written_version = version
            self.ssd_catalogue.write(content, namespaces)

        return write


async def _nothing_to_reload() -> Reloaded:
    return Reloaded([], [])


def _record(journal: Journal, action: Action) -> None:
    match action:
        case BindOne():
            journal.bind_one(action)
        case Mark():
            journal.mark(action)
        case Bind():
            journal.bind(action)
        case Summed():
            journal.summed(action)
        case SlabSized():
            journal.slab(action)
        case _:
            raise TypeError(f"no journal entry for {type(action).__name__}")


def _contract_of(hello: Hello) -> Contract:
    """Check a hello, and return its contract.

    Raises:
        KVHearthError: ``protocol_version``, ``bad_message``, ``bad_contract``.
    """
    if hello.protocol != PROTOCOL_VERSION:
        raise KVHearthError(
            Reason.PROTOCOL_VERSION,
            f"client speaks protocol {hello.protocol}, daemon {PROTOCOL_VERSION}: update one",
        )
    for name in ("engine_id", "process_group", "model_name"):
        require(getattr(hello, name).isprintable(), Reason.BAD_MESSAGE, f"{name} must be printable")
    contract = Contract.from_json(hello.contract)
    # Escapes can make the canonical form longer than the text received; a successor must be able to
    # read it.
    text_bytes = len(contract.to_json())
    require(
        text_bytes <= CONTRACT_JSON_BYTES_MAX,
        Reason.BAD_CONTRACT,
        f"its canonical JSON has {text_bytes} bytes, at most {CONTRACT_JSON_BYTES_MAX}",
    )
    return contract
