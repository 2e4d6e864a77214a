"""Commits and lookups of one key as messages: the fast paths give the same answers and effects as
the general path, and work that no answer waits for runs after the answer.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
import pytest
from support.core_kit import contract, full, key, mamba
from support.core_shell import Shell

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth.wire import frames
from kvhearth_server.config.model import Settings
from kvhearth_server.config.rlimit import door_shares
from kvhearth_server.core.lookup import PrefixFastPath
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.core.state import Limits
from kvhearth_server.engine import recovery
from kvhearth_server.transport import dispatch as decisions_module
from kvhearth_server.transport.dispatch import Dispatcher
from kvhearth_server.transport.frames import CallsServer

TWO = contract(full(), mamba(), full(8192, shards=2))


class Desk:
    """An engine and one session that calls it."""

    def __init__(self, made: Contract = TWO) -> None:
        geometry = Geometry.of([("t", 4 << 16)], 1 << 16, 4096)
        self.shell = Shell(geometry, Limits(held_fraction_max=1.0, stock_fraction_max=1.0))
        self.engine = self.shell.engine
        self.engine.boot_id = "boot"
        self.attached = [
            self.shell.attach(made, "t", scheduler=not rank, rank=rank, map_arena=True)
            for rank in range(made.tensor_parallel)
        ]
        self.session, self.epoch = self.attached[0].session, self.attached[0].welcome.epoch
        self.dispatcher = Dispatcher(self.engine, None)  # type: ignore[arg-type]

    def ask(self, name: str, request: Any) -> Any:
        """Returns the reply, or the reason and message of its error."""
        parsed = self.dispatcher.parse(name, request.SerializeToString())
        try:
            return self.dispatcher.decide(name, parsed, self.session)
        except KVHearthError as error:
            return error.reason, error.message

    def reserve(self, kv_group: int, number: int) -> tuple[bytes, bytes]:
        """Slot and generation of one block, as a commit names them."""
        count = types_pb2.GroupCount(group=kv_group, count=1)
        request = cache_pb2.ReserveRequest(reservation_id=number, epoch=self.epoch, groups=[count])
        (part,) = self.ask("Reserve", request).groups
        extents = np.frombuffer(part.extents, EXTENT_DTYPE)
        return extents["slot"].tobytes(), extents["generation"].tobytes()

    def picture(self) -> Any:
        """Returns the state that the calls left behind."""
        engine, table = self.engine, self.engine.core.state.table
        return (
            {name: column.tobytes() for name, column in vars(table).items()
             if isinstance(column, np.ndarray)},
            self.shell.arena.file.view.tobytes(),
            engine.counters.values(),
            [(one.slots.tolist(), one.generations.tolist()) for one in engine.to_sum],
            engine.core.state.events.next_sequence,
        )  # fmt: skip


def _commits(desk: Desk) -> list[cache_pb2.CommitRequest]:
    """Valid commits and ones that are rejected, each of one group."""
    made = []
    for number, change in enumerate(
        (
            {},
            {"parent": key(1)},
            {"parent": b"short"},
            {"checksums": bytes(range(16))},
            {"checksums": bytes(15)},
            {"keys": key(1)},
            {"keys": b"short"},
            {"keys": key(90) + key(91)},
            {"keys": b""},
            {"group": 1},
            {"group": 2},
            {"group": 9},
            {"slots": b"\1"},
            {"slots": bytes(4)},
            {"slots": b"\xff" * 4},
            {"generations": b"\xff" * 4},
            {"generations": b""},
            {"epoch": 77},
        )
    ):
        slot, generation = desk.reserve(0, number + 1)
        fields: dict[str, Any] = {
            "group": 0, "keys": key(number + 1), "slots": slot, "generations": generation,
            **change,
        }  # fmt: skip
        epoch = fields.pop("epoch", desk.epoch)
        group = cache_pb2.GroupCommit(**fields)
        made.append(cache_pb2.CommitRequest(epoch=epoch, groups=[group]))
    return made


def _lookups(desk: Desk) -> list[cache_pb2.LookupRequest]:
    made = []
    for number, change in enumerate(
        (
            {},
            {"keys": key(4)},
            {"keys": key(1)[:-1]},
            {"keys": key(55)},
            {"keys": key(4) + key(2)},
            {"keys": key(10), "group": 1},
            {"keys": key(4), "group": 9},
            {"keys": key(4), "lease_id": 0},
            {"keys": key(4), "lease_id": 2},
            {"keys": key(4), "epoch": 77},
        )
    ):
        fields: dict[str, Any] = {"group": 0, "keys": key(1), "lease_id": number + 1, **change}
        epoch, lease_id = fields.pop("epoch", desk.epoch), fields.pop("lease_id")
        made.append(
            cache_pb2.LookupRequest(
                epoch=epoch, lease_id=lease_id, groups=[types_pb2.GroupKeys(**fields)]
            )
        )
    return made


def _everything(*, short: bool) -> Any:
    """Returns all answers and the state that they left behind, step by step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery.time, "time", lambda: 1e9)  # a cold start's epoch is the time
        if not short:
            patch.setattr(decisions_module, "few_commits", lambda *args: None)
            patch.setattr(PrefixFastPath, "lookup", lambda *args, **_: None)
        desk, seen = Desk(), list[Any]()
        for request in _commits(desk):
            seen.append((str(desk.ask("Commit", request)), desk.picture()))
        while desk.engine.to_sum:
            one = desk.engine.to_sum.popleft()
            sums = np.zeros((*one.slots.shape, 16), np.uint8)
            desk.engine.call(desk.engine.core.writing.summed, one.slots, one.generations, sums)
        for asked in _lookups(desk):
            seen.append((str(desk.ask("Lookup", asked)), desk.picture()))
        released = cache_pb2.ReleaseRequest(lease_ids=[1, 2, 3])
        seen.append((str(desk.ask("Release", released)), desk.picture()))
        desk.engine.core.check_books()
        return seen


def test_both_ways_answer_and_do_the_same() -> None:
    for ours, others in zip(_everything(short=True), _everything(short=False), strict=True):
        assert ours == others


def test_the_answer_leaves_before_what_nobody_waits_for() -> None:
    async def scenario() -> None:
        desk, seen = Desk(), list[str]()
        engine = desk.engine
        server = CallsServer(engine, desk.dispatcher, door_shares(Settings()), timeout_s=60)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        run_deferred = engine.run_deferred

        def settled() -> None:
            try:
                seen.append(f"answered {frames.HEADER.unpack_from(ours.recv(1 << 16))[1]}")
            except BlockingIOError:
                seen.append("not answered")
            seen.append(f"woken: {engine.work.is_set()}")
            run_deferred()
            seen.append(f"woken: {engine.work.is_set()}")

        slot, generation = desk.reserve(0, 1)
        group = cache_pb2.GroupCommit(keys=key(1), slots=slot, generations=generation)
        commit = cache_pb2.CommitRequest(epoch=desk.epoch, groups=[group])

        await server._accepted(theirs)
        ours.send(frames.encode(frames.OPEN, 0, desk.session.token.encode(), 1 << 20))
        await asyncio.sleep(0.01)
        ours.recv(1 << 16)
        engine.run_deferred = settled  # type: ignore[method-assign]
        number = frames.METHODS["Commit"]
        ours.send(frames.encode(number, 7, commit.SerializeToString(), 1 << 20))
        await asyncio.sleep(0.01)
        assert seen == [f"answered {frames.DONE}", "woken: False", "woken: True"]
        assert len(engine.to_sum) == 1
        assert engine.counters.get("commits") == engine.counters.get("stored_blocks") == 1
        server.stop()
        ours.close()

    asyncio.run(scenario())


def test_only_the_scheduler_decides() -> None:
    desk = Desk(contract(full(shards=2), tensor_parallel=2))
    request = cache_pb2.LookupRequest(epoch=desk.epoch)
    assert isinstance(desk.ask("Lookup", request), cache_pb2.LookupResponse)
    desk.session = desk.attached[1].session
    reason, _ = desk.ask("Lookup", request)
    assert reason is Reason.NOT_SCHEDULER
