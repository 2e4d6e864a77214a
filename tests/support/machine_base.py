"""Base of the core's state machine: clients that come and go, a daemon that dies, and the
invariants after every step. The rules of reading and writing are in the modules beside this one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.core import Core
from kvhearth_server.core.events import EventKind, EventLog
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.removal import EVICTIONS
from kvhearth_server.core.slot_table import Geometry, State
from kvhearth_server.core.state import CoreState, Limits
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.sessions import Session
from kvhearth_server.memory.journal import STATE_WORDS, slab_sizes
from support.core_kit import contract, full, key, mamba, refused, shards_of, window
from support.core_model import Block, Memory, Model, Place
from support.core_shell import Crash, Shell, fault_hook

SLAB_BYTES = 32 * 1024
KEYS = 12
"""A small universe of keys, the same in all namespaces, so that they collide."""
HELD_FRACTION, STOCK_FRACTION = 0.6, 0.4
SESSIONS = 4
NAMESPACES = 2
"""Bounds of one tenant."""

CONTRACTS = [
    contract(full(block_tokens=2)),
    contract(full(4000, shards=2, block_tokens=2), window(5, 9000, block_tokens=2)),
    contract(full(block_tokens=4), mamba(20000, block_tokens=4), window(3, block_tokens=2)),
    contract(full(block_tokens=2), revision="r2"),
]
ENGINES = [("t0", "e0"), ("t0", "e1"), ("t1", "e0")]
WORDS = np.array([STATE_WORDS[state] for state in sorted(State)], np.uint32)

T = TypeVar("T")

key_numbers = st.integers(0, KEYS - 1)
starts = st.sampled_from([0, 0, 0, 1, 2, 3, 6])
mostly = st.sampled_from([True, True, False])
portions = st.sampled_from([None, None, 1, 3])
"""Most blocks that one call of a reservation may evict."""
some_keys = st.one_of(
    st.integers(1, KEYS).map(lambda n: [key(i) for i in range(n)]),
    st.lists(key_numbers.map(key), min_size=1, max_size=KEYS),
)


@dataclass(eq=False)
class Client:
    """One process: attached, or detached and perhaps still writing."""

    record: Session
    engine: tuple[str, str]
    contract: Contract
    rank: int
    boot_id: str
    attached: bool = True

    def __post_init__(self) -> None:
        self.number, self.group = self.record.number, self.record.group
        self.scheduler = not self.rank

    @property
    def place(self) -> tuple[str, int]:
        """Its group, with the boot: numbers of groups start again with each daemon."""
        return self.boot_id, self.group


def run_machine(
    machine: type[RuleBasedStateMachine], number: int, *, examples: int, steps: int
) -> None:
    """Run as many examples of a state machine; ``number`` seeds their choices."""
    run_state_machine_as_test(
        seed(number)(type("Seeded", (machine,), {})),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            database=None,
            deadline=None,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def survives(step: Callable[..., None]) -> Callable[..., None]:
    """Decorate a step during which the daemon may die."""

    @functools.wraps(step)
    def run(self: MachineBase, **arguments: Any) -> None:
        try:
            step(self, **arguments)
            self.sync()
        except Crash:
            self.come_back(torn=True)
        self.pending = []

    return run


def decides(
    when: Callable[[Any], object] = lambda self: True, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a rule of a step of a living scheduler, which is drawn from ``data``. The step may run
    in states for which ``when`` holds; the daemon may die during it.
    """

    def decorate(step: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(step)
        def run(self: MachineBase, data: st.DataObject, **arguments: Any) -> None:
            step(self, data, pick(data, self.deciders(), "scheduler"), **arguments)

        made: Callable[..., None] = rule(data=st.data(), **strategies)(survives(run))
        return precondition(lambda self: bool(self.deciders() and when(self)))(made)

    return decorate


def pick(data: st.DataObject, items: Sequence[T], label: str) -> T:
    """Draw one of the items by its index, so that a failing example stays readable."""
    return items[data.draw(st.integers(0, len(items) - 1), label=label)]


def overlap(one: Place, other: Place) -> bool:
    """Whether two places share a byte."""
    apart = one.offset + one.length <= other.offset or other.offset + other.length <= one.offset
    return one.segment == other.segment and not apart


class MachineBase(RuleBasedStateMachine):
    """The daemon, its clients, the model and the invariants."""

    shell: Shell
    memory: Memory
    geometry: Geometry
    limits: Limits
    tenants: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.exits = contextlib.ExitStack()
        self.exits.enter_context(fault_hook(self._pass_point))
        self.fuse: int | None = None
        self.pending: list[Block] = []
        self.bad: Block | None = None
        self.shrinking: int | None = None
        self.pinned_gone: list[tuple[Block, str]] = []
        """Blocks with a pin that the last step evicted for room, and the causes."""
        self.clients: list[Client] = []
        self.model = Model()
        self.serial = itertools.count(1)
        self.sums: list[tuple[Any, Any, Any]] = []
        self.withdrawn: set[tuple[int, int]] = set()
        self.logs: dict[int, tuple[EventLog, int]] = {}
        """By namespace the log that was read last, and the number of its next event."""
        self.started = False
        self.quiet_steps = 0
        """Steps since the daemon came up."""
        self.before: dict[int, tuple[int, int]] = {}
        """Bytes held in each segment before the last step, and its capacity."""
        self.portions: tuple[Core, Iterator[None]] | None = None

    @initialize(
        tenants=st.integers(1, 2),
        slabs=st.integers(2, 4),
        quota=st.sampled_from([None, None, 40_000]),
    )
    def begin(self, tenants: int, slabs: int, quota: int | None) -> None:
        self.tenants = [f"t{i}" for i in range(tenants)]
        self.geometry = Geometry.of(
            [(name, slabs * SLAB_BYTES) for name in self.tenants], SLAB_BYTES, 4096
        )
        self.limits = Limits(
            held_fraction_max=HELD_FRACTION,
            stock_fraction_max=STOCK_FRACTION,
            keys_max=24,
            sessions_max=SESSIONS * tenants,
            namespaces_max=NAMESPACES * tenants,
            leases_max=3,
            pins_max=2,
            pin_ttl_max_s=100.0,
            namespace_quota_bytes=quota,
        )
        self.memory = Memory(self.geometry)
        self.shell = Shell(self.geometry, self.limits)
        self.started = True
        for engine in ENGINES[: 1 + tenants]:
            if engine[0] in self.tenants:
                made = CONTRACTS[(slabs + len(self.clients)) % len(CONTRACTS)]
                self._attach_all(engine, made, range(made.world_size))

    # -- short names ------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        return self.shell.engine

    @property
    def core(self) -> Core:
        return self.shell.engine.core

    @property
    def state(self) -> CoreState:
        return self.shell.engine.core.state

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        refusal: Reason | None = None,
        **named: Any,
    ) -> Any:
        """Call the core through the engine; it must refuse for that reason, if there is one."""
        with refused(refusal) if refusal else contextlib.nullcontext():
            return self.engine.call(function, *arguments, **named)

    def _pass_point(self, _: str) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise Crash

    def living(self, client: Client) -> bool:
        """Whether the client's session is attached and its group has not ended."""
        group = self.state.groups.of_session(client.number)
        return client.attached and group is not None and not group.ended

    def attached(self) -> list[Client]:
        """Return the processes that are attached."""
        return [client for client in self.clients if client.attached]

    def deciders(self) -> list[Client]:
        """Return the schedulers of living groups."""
        return [c for c in self.clients if c.scheduler and self.living(c)]

    def kv_group(self, data: st.DataObject, client: Client) -> int:
        """Draw one of a contract's groups."""
        return data.draw(st.integers(0, len(client.contract.groups) - 1), label="kv group")

    def space(self, client: Client) -> Namespace:
        """Return the namespace of a client of a living group."""
        return self.state.namespaces.get(self.state.group_of(client.number).namespace)

    def known(self, client: Client, kv_group: int, named: list[bytes]) -> list[Block | None]:
        """Return the model's current block under each key."""
        space = self.space(client)
        found = [self.model.blocks.get((space.number, kv_group, each)) for each in named]
        return [block if block and block.epoch == space.epoch else None for block in found]

    # -- coming and going -------------------------------------------------------------------------

    @precondition(lambda self: not self.deciders() or self.quiet_steps % 4 == 0)
    @rule(
        engine=st.sampled_from(ENGINES),
        kind=st.integers(0, len(CONTRACTS) - 1),
        ranks=st.sampled_from([range(2), range(2), range(1), range(1, 2)]),
    )
    @survives
    def attach_engine(self, engine: tuple[str, str], kind: int, ranks: range) -> None:
        """Attach the missing members of an engine, or only some of them."""
        if engine[0] in self.tenants:
            self._attach_all(engine, CONTRACTS[kind], ranks)

    def _attach_all(self, engine: tuple[str, str], made: Contract, ranks: range) -> None:
        here = [c for c in self.clients if c.engine == engine and self.living(c)]
        made = here[0].contract if here else made
        for rank in ranks:
            if rank < made.world_size and rank not in {c.rank for c in here}:
                self._attach(engine, made, rank)

    def _attach(self, engine: tuple[str, str], made: Contract, rank: int) -> None:
        old = next(
            (c for c in self.clients if (c.engine, c.rank, c.attached) == (engine, rank, False)),
            None,
        )
        previous: dict[str, Any] = {}
        if old is not None:
            self._goes_quiet(old)
            previous = {
                "previous_boot": old.boot_id,
                "previous_session": old.number,
                "previous_drained": True,
            }
        tenant, engine_id = engine
        try:
            attached = self.shell.attach(
                made, tenant, engine_id=engine_id, rank=rank, scheduler=rank == 0, **previous
            )
        except KVHearthError as error:
            groups = [group for group in self.state.groups if group.tenant == tenant]
            attached = sum(len(group.attached) for group in groups)
            spaces = sum(space.tenant == tenant for space in self.state.namespaces)
            at_bound = {
                Reason.TOO_MANY_SESSIONS: attached >= SESSIONS,
                Reason.TOO_MANY_NAMESPACES: spaces >= NAMESPACES,
            }
            if not at_bound.get(error.reason):
                raise
            return
        if old is not None:
            assert self.engine.sessions.find(old.number) is None, "its word was not taken"
        self.clients.append(Client(attached.session, engine, made, rank, self.engine.boot_id))

    def _goes_quiet(self, client: Client) -> None:
        """Record that the process no longer writes and maps nothing."""
        self.model.quiet([client.number])
        if client.record.lock_byte >= 0:
            self.shell.arena.segments[client.record.segment].held.discard(client.record.lock_byte)
        self.clients.remove(client)

    @precondition(lambda self: len(self.model.blocks) > 4 and self.quiet_steps % 4 == 2)
    @rule(data=st.data(), finished=st.booleans())
    @survives
    def leave(self, data: st.DataObject, finished: bool) -> None:
        """Close a process's attach socket, with or without a goodbye."""
        if not self.attached():
            return
        client = pick(data, self.attached(), "who leaves")
        living = self.living(client)
        client.attached = False
        if finished:
            self._goes_quiet(client)
        self.engine.leave(client.record, finished=finished)
        if living and not any(c.group == client.group and self.living(c) for c in self.clients):
            self.model.end_group(client.group)

    @precondition(lambda self: any(not client.attached for client in self.clients))
    @rule(data=st.data())
    @survives
    def drained(self, data: st.DataObject) -> None:
        """Drain a process that left without a goodbye."""
        self.drain(pick(data, [c for c in self.clients if not c.attached], "who is drained"))

    def drain(self, client: Client) -> None:
        """Let a process end, and let the daemon notice it."""
        self._goes_quiet(client)
        record = self.engine.sessions.find(client.number)
        if record is not None:
            self.engine.drained(record)

    # -- dying ------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.model.blocks) > 6 and self.quiet_steps > 15)
    @rule(data=st.data())
    def memory_ends(self, data: st.DataObject) -> None:
        """The machine has no memory for some slabs, at least for a while."""
        slabs = range(self.state.table.geometry.slab_count)
        some = data.draw(st.sets(st.sampled_from(slabs), max_size=1), label="slabs")
        if data.draw(st.booleans(), label="ends"):
            self.call(self.core.withhold, some)
        else:
            sizes = self.state.table.slab_slot_bytes
            self.call(self.core.offer, [slab for slab in some if not sizes[slab]])

    @rule()
    def kill_the_daemon(self) -> None:
        """Kill the daemon between two calls."""
        self.fuse = None
        self.come_back(torn=False)

    @precondition(lambda self: self.fuse is None and self.quiet_steps > 10)
    @rule(points=st.integers(0, 12))
    def arm(self, points: int) -> None:
        """Let the daemon die at a fault point within one of the next calls."""
        self.fuse = points

    def come_back(self, *, torn: bool) -> None:
        """Start a new daemon that adopts the state of the dead one and knows no client any more."""
        self.quiet_steps = 0
        before, dead = self.model.blocks, self.state
        for client in self.clients:
            client.attached = False
        self.shell.restart()
        self.logs.clear()
        self.sums.clear()
        self.withdrawn.clear()
        self.model.leases.clear()
        self.model.pins.clear()
        for held in self.model.held:
            held.in_doubt = True
        self.model.blocks = self._adopted([*before.values(), *self.pending])
        missing = set(before) - set(self.model.blocks)
        for name in missing:
            block = before[name]
            gone = dead.index.find(name[0], name[1], [name[2]])[0] != block.slots[0]
            stale = self.state.namespaces.get(name[0]).epoch != block.epoch
            assert stale or (torn and gone), f"{block} was not adopted"

    def _adopted(self, candidates: list[Block]) -> dict[tuple[int, int, bytes], Block]:
        """Return the blocks that the new core has; each must be one of the candidates."""
        found: dict[tuple[int, int, bytes], Block] = {}
        table = self.state.table
        by_head = {(*block.name, block.slots[0]): block for block in candidates}
        for number, kv_group, heads in self.state.index.items():
            for each, head in heads.items():
                block = by_head[number, kv_group, each, head]
                assert shards_of(table, head) == block.slots
                assert block.epoch == self.state.namespaces.get(number).epoch
                block.generations = table.generation[block.slots].tolist()
                block.summed = block.announced = bool(table.state[head] == State.SUMMED)
                block.leases = block.pins = 0
                found[number, kv_group, each] = block
        return found

    # -- invariants -------------------------------------------------------------------------------

    def sync(self) -> None:
        """Read the events: the model learns of evictions from them, and judges them."""
        for space in self.state.namespaces:
            log = self.state.events.open(space, 0.0)
            before, number = self.logs.get(space.number, (log, log.oldest))
            number = number if log is before else log.oldest
            assert number >= log.oldest, "events were lost"
            events = log.read(number, 1 << 20)
            self.logs[space.number] = log, log.next
            for event in events:
                for each in event.keys:
                    name = (space.number, event.kv_group, each)
                    if event.kind is EventKind.REMOVED:
                        self._judge(self.model.blocks.pop(name), event.cause)
                    else:
                        self._stored(name)
        ended = {name[0] for name in self.model.pins} - {s.number for s in self.state.namespaces}
        self.model.drop_pins_of(ended | set(self.state.namespaces.ended))
        for gone, cause in self.pinned_gone:
            self._check_went_last(gone, cause)
        self.pinned_gone.clear()

    def _check_went_last(self, gone: Block, cause: str) -> None:
        """Check that a pinned block went after all others whose room would have done as well."""
        table = self.state.table
        for block in self.model.blocks.values():
            if block.announced and not (block.leases or block.pins):
                same = table.slot_bytes_of(np.array([*gone.slots[:1], *block.slots[:1]]))
                near = self.segment_of(gone) == self.segment_of(block) and same[0] == same[1]
                near &= cause != "quota" or gone.namespace == block.namespace
                assert not near, f"{gone} went before {block}, which has no pin"

    def segment_of(self, block: Block) -> int:
        """The segment that has a block."""
        return self.state.segment_of[self.state.namespaces.get(block.namespace).tenant]

    def _judge(self, block: Block, cause: str) -> None:
        if cause in EVICTIONS:
            assert not block.leases, f"a leased block was evicted ({cause})"
            if block.pins and cause in ("quota", "space"):
                self.pinned_gone.append((block, cause))
        if cause in ("quota", "asked"):
            assert block.namespace == self.shrinking
        elif cause == "epoch":
            assert block.epoch < self.state.namespaces.get(block.namespace).epoch
        elif cause == "checksum":
            assert block is self.bad
        else:
            assert cause in EVICTIONS

    def _stored(self, name: tuple[int, int, bytes]) -> None:
        waiting = [block for block in self.pending if block.name == name]
        block = self.model.blocks.get(name) or waiting[0]
        assert not block.announced, "announced twice"
        block.announced = True

    @invariant()
    def holds(self) -> None:
        """Check the invariants after every step, after every process that may still write has
        written.
        """
        if not self.started:
            return
        self.quiet_steps += 1
        self.sync()
        self._scribble()
        self.core.check_books()
        self._check_a_portion()
        self._check_blocks()
        self._check_journal()
        for one in self.model.served:
            same = self.state.table.generation[one.slot] == one.generation
            if one.boot == self.shell.boots and same:
                assert self.memory.holds(one.place, one.token), "a reader would read wrong bytes"
        for segment, books in enumerate(self.state.books):
            # What was held when memory ended stays; no more may be held meanwhile.
            bound, capacity = self.before.get(segment, (0, 0))
            most = HELD_FRACTION * max(books.capacity, capacity)
            assert books.bound <= max(most, bound)
            self.before[segment] = books.bound, books.capacity
        for space in self.state.namespaces:
            assert space.quota_bytes is None or space.used_bytes <= space.quota_bytes

    def _check_a_portion(self) -> None:
        """Check the books in portions, one a step: changes between two portions are no
        disagreement.
        """
        if self.portions is None or self.portions[0] is not self.core:
            self.portions = self.core, self.core.book_portions()
        if next(self.portions[1], self) is self:
            self.portions = None

    def _scribble(self) -> None:
        table = self.state.table
        self.model.held = [h for h in self.model.held if h.writers or not h.in_doubt]
        for held in self.model.held:
            states = table.state[held.slots]
            assert np.isin(states, (State.RESERVED, State.QUARANTINED)).all(), (
                f"{held} was let go, and somebody may write to it"
            )
            for place in held.places:
                self.memory.write(place, ("garbage", next(self.serial)))

    def _check_blocks(self) -> None:
        table, model = self.state.table, self.model
        assert len(self.state.index) == len(model.blocks)
        for (number, kv_group, each), block in model.blocks.items():
            head = int(self.state.index.find(number, kv_group, [each])[0])
            assert shards_of(table, head) == block.slots
            assert table.generation[block.slots].tolist() == block.generations
            summed = State.SUMMED if block.summed else State.COMMITTED
            assert (table.state[block.slots] == summed).all()
            assert block.announced == block.summed
            for place, token in zip(block.places, block.tokens, strict=True):
                assert self.memory.holds(place, token), f"wrong bytes in {block}"

    def _check_journal(self) -> None:
        """Check that the journal agrees with the table."""
        journal, table = self.engine.journal, self.state.table
        assert journal is not None
        assert slab_sizes(journal.slab_words) == table.slab_slot_bytes.tolist()
        assert np.array_equal(journal.headers["state"], WORDS[table.state])

    def teardown(self) -> None:
        """Detach and drain all clients and expire all pins: nothing may remain held."""
        try:
            if self.started:
                self.fuse = None
                self._end_everything()
        finally:
            self.exits.close()

    def _end_everything(self) -> None:
        for client in list(self.clients):
            if client.attached:
                client.attached = False
                self.engine.leave(client.record, finished=False)
            self.drain(client)
        # Processes that died while they attached may be in the catalogue, but map nothing.
        for record in self.engine.sessions:
            self.engine.drained(record)
        self.call(self.core.pinning.expire, 1e9)
        self.core.check_books()
        table = self.state.table
        assert np.isin(table.state, (State.FREE, State.COMMITTED, State.SUMMED)).all()
        assert not table.refs.any()
        assert not table.pins.any()
        assert len(self.state.groups) == 0
        for books in self.state.books:
            assert books.bound == 0
