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
from support.core_shell import Desk

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth.wire import frames
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.config.model import Settings
from kvhearth_server.config.rlimit import door_shares
from kvhearth_server.core.lookup import PrefixFastPath
from kvhearth_server.engine import recovery
from kvhearth_server.transport import dispatch as decisions_module
from kvhearth_server.transport.frames import CallsServer

TWO = contract(full(), mamba(), full(8192, shards=2))


class Caller(Desk):
    """A desk and the session that calls at it."""

    def __init__(self, made: Contract = TWO) -> None:
        super().__init__()
        self.engine.boot_id = "boot"
        self.session = self.attach(made)
        number = self.state.group_of(self.session).namespace
        self.log = self.state.events.open(self.state.namespaces.get(number), 0.0)

    def answer(self, name: str, request: Any) -> Any:
        """Return the reply, or the reason and message of its error."""
        parsed = self.dispatcher.parse(name, request.SerializeToString())
        try:
            return self.ask(self.session, name, parsed)
        except KVHearthError as error:
            return error.reason, error.message

    def slot(self) -> tuple[bytes, bytes]:
        """Return slot and generation of one reserved block, as a commit names them."""
        return tuple(each.astype("<u4").tobytes() for each in self.take(self.session, 1))

    def picture(self) -> Any:
        """Return the state that the calls left behind."""
        engine, table = self.engine, self.state.table
        columns = {
            name: column for name, column in vars(table).items() if hasattr(column, "tobytes")
        }
        return (
            {name: column.tobytes() for name, column in columns.items()},
            self.shell.arena.file.view.tobytes(),
            engine.counters.values(),
            [(one.slots.tolist(), one.generations.tolist()) for one in engine.to_sum],
            self.log.next,
        )


def _commits(desk: Caller) -> list[cache_pb2.CommitRequest]:
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
        slot, generation = desk.slot()
        fields: dict[str, Any] = {
            "group": 0, "keys": key(number + 1), "slots": slot, "generations": generation,
            **change,
        }  # fmt: skip
        epoch = fields.pop("epoch", desk.epoch(desk.session))
        group = cache_pb2.GroupCommit(**fields)
        made.append(cache_pb2.CommitRequest(epoch=epoch, groups=[group]))
    return made


def _lookups(desk: Caller) -> list[cache_pb2.LookupRequest]:
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
        epoch, lease_id = fields.pop("epoch", desk.epoch(desk.session)), fields.pop("lease_id")
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
        desk, seen = Caller(), list[Any]()
        for request in _commits(desk):
            seen.append((str(desk.answer("Commit", request)), desk.picture()))
        while desk.engine.to_sum:
            one = desk.engine.to_sum.popleft()
            sums = np.zeros((*one.slots.shape, 16), np.uint8)
            desk.checked(desk.core.writing.summed, one.slots, one.generations, sums)
        for asked in _lookups(desk):
            seen.append((str(desk.answer("Lookup", asked)), desk.picture()))
        released = cache_pb2.ReleaseRequest(lease_ids=[1, 2, 3])
        seen.append((str(desk.answer("Release", released)), desk.picture()))
        desk.check()
        return seen


def test_both_ways_answer_and_do_the_same() -> None:
    for ours, others in zip(_everything(short=True), _everything(short=False), strict=True):
        assert ours == others


def test_the_answer_leaves_before_what_nobody_waits_for() -> None:
    async def scenario() -> None:
        desk, seen = Caller(), list[str]()
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

        slot, generation = desk.slot()
        group = cache_pb2.GroupCommit(keys=key(1), slots=slot, generations=generation)
        commit = cache_pb2.CommitRequest(epoch=desk.epoch(desk.session), groups=[group])

        await server._accepted(theirs)
        token = desk.attached[desk.session].session.token
        ours.send(frames.encode(frames.OPEN, 0, token.encode(), 1 << 20))
        await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
        engine.run_deferred = settled  # type: ignore[method-assign]
        number = frames.METHODS["Commit"]
        ours.send(frames.encode(number, 7, commit.SerializeToString(), 1 << 20))
        async with asyncio.timeout(HUNG_S):
            while len(seen) < 3:
                await asyncio.sleep(0)
        assert seen == [f"answered {frames.DONE}", "woken: False", "woken: True"]
        assert len(engine.to_sum) == 1
        assert engine.counters.get("commits") == engine.counters.get("stored_blocks") == 1
        server.stop()
        ours.close()

    asyncio.run(scenario())


def test_only_the_scheduler_decides() -> None:
    desk = Caller(contract(full(shards=2)))
    request = cache_pb2.LookupRequest(epoch=desk.epoch(desk.session))
    assert isinstance(desk.answer("Lookup", request), cache_pb2.LookupResponse)
    desk.session = desk.members[desk.session][1]
    reason, _ = desk.answer("Lookup", request)
    assert reason is Reason.NOT_SCHEDULER
