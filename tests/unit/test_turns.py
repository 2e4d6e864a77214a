"""Turns of the loop: time goes to sessions, whatever they have waiting."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvhearth_server.engine.turns import QUANTUM_S, Turn, Turns


class Worker:
    """A session with connections that always have a call waiting, each of ``call_s``."""

    def __init__(
        self,
        turns: Turns,
        call_s: float,
        connections: int,
        served: Counter[int],
        tenant: str = "",
    ) -> None:
        self.turn = Turn(tenant)
        self.number = id(self)
        self._turns = turns
        self._call_s = call_s
        self._served = served
        self.active = True
        for _ in range(connections):
            self._turns.wait(self.turn, self._work)

    def _work(self) -> None:
        self._served[self.number] += 1
        self.turn.left_s -= self._call_s
        if self.active:
            self._turns.wait(self.turn, self._work)


def run(work: Callable[[Turns], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await work(Turns())

    return asyncio.run(asyncio.wait_for(main(), 60))


async def cycles(count: int) -> None:
    """Lets the loop go round ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("first", "second"), [((1e-4, 64), (1e-4, 1)), ((5e-3, 64), (2e-4, 2))])
def test_time_is_shared_by_session_not_by_connection(
    first: tuple[float, int], second: tuple[float, int]
) -> None:
    async def work(turns: Turns) -> None:
        served: Counter[int] = Counter()
        workers = [Worker(turns, *each, served) for each in (first, second)]
        await cycles(4000)
        for worker in workers:
            worker.active = False
        times = [
            served[worker.number] * call_s
            for worker, (call_s, _) in zip(workers, (first, second), strict=True)
        ]
        assert min(times) > 0.9 * max(times), times

    run(work)


def test_tenants_share_time_whatever_their_sessions() -> None:
    async def work(turns: Turns) -> None:
        served: Counter[int] = Counter()
        crowd = [Worker(turns, 3e-3, 8, served, "a") for _ in range(20)]
        alone = Worker(turns, 2e-4, 1, served, "b")
        await cycles(4000)
        for worker in (*crowd, alone):
            worker.active = False
        taken = sum(served[worker.number] for worker in crowd) * 3e-3
        assert 0.9 < taken / (served[alone.number] * 2e-4) < 1.1
        counts = [served[worker.number] for worker in crowd]
        assert max(counts) - min(counts) <= 1

    run(work)


def test_a_tenants_ring_brings_new_time_once_a_round() -> None:
    """A session that does not wait gets no more than each of those that do."""

    async def work(turns: Turns) -> None:
        served: Counter[int] = Counter()
        crowd = [Worker(turns, QUANTUM_S, 1, served, "a") for _ in range(10)]
        light, count = Turn("a"), 0
        for _ in range(400):
            await cycles(1)
            while turns.may_go(light):
                light.left_s -= QUANTUM_S
                count += 1
        for worker in crowd:
            worker.active = False
        assert count <= max(served.values()) + 2

    run(work)


def test_one_cycle_has_one_turn() -> None:
    """The loop looks for others between any two sessions' turns."""

    async def work(turns: Turns) -> None:
        served: Counter[int] = Counter()
        workers = [Worker(turns, QUANTUM_S / 2, 8, served) for _ in range(10)]
        await cycles(1)
        before = served.total()
        for _ in range(100):
            await cycles(1)
            assert served.total() - before <= 2
            before = served.total()
        assert max(served.values()) - min(served.values()) <= 2
        for worker in workers:
            worker.active = False

    run(work)


def test_who_has_time_left_may_go_while_others_wait() -> None:
    async def work(turns: Turns) -> None:
        served: Counter[int] = Counter()
        busy = Worker(turns, QUANTUM_S, 4, served)
        light = Turn()
        for _ in range(50):
            assert turns.may_go(light)
            light.left_s -= QUANTUM_S / 10
            await cycles(1)
        assert not turns.may_go(busy.turn)
        light.left_s = 0.0
        light.round = turns.round_of(light)
        assert not turns.may_go(light), "its time of this round is used"
        await cycles(2)
        assert turns.may_go(light), "a new round brings new time"
        busy.active = False

    run(work)


def test_who_is_alone_goes_on() -> None:
    async def work(turns: Turns) -> None:
        turn = Turn()
        turn.left_s = 0.0
        assert not turns.may_go(turn), "without a selector somebody may wait"
        turns.watch(asyncio.get_running_loop())
        assert turns.may_go(turn)
        asyncio.get_running_loop().call_soon_threadsafe(int)  # makes the loop's own pipe readable
        turn.left_s = -1.0
        assert not turns.may_go(turn)

    run(work)


def test_a_portion_takes_a_turn() -> None:
    async def work(turns: Turns) -> None:
        order = []

        async def portions(name: str, turn: Turn) -> None:
            for _ in range(5):
                await turns.next(turn)
                order.append(name)

        shared = Turn()
        tasks = [portions("many", shared) for _ in range(10)]
        await asyncio.gather(*tasks, portions("one", Turn()))
        last = max(place for place, name in enumerate(order) if name == "one")
        assert last < 15, order

    run(work)


def test_a_bug_of_one_session_does_not_stop_the_ring() -> None:
    async def work(turns: Turns) -> None:
        loop = asyncio.get_running_loop()
        seen = []
        loop.set_exception_handler(lambda _, context: seen.append(context))
        turn, other = Turn(), Turn()

        def fails() -> None:
            raise ValueError("planted")

        turns.wait(turn, fails)
        turns.wait(turn, lambda: seen.append("same"))
        turns.wait(other, lambda: seen.append("other"))
        await cycles(10)
        assert {"same", "other"} <= {one for one in seen if isinstance(one, str)}
        assert len(seen) == 3
        assert not turn.queued
        assert not other.queued

    run(work)


def test_events_come_between_two_turns() -> None:
    """Who comes in during a turn is served before the next turn."""

    async def work(turns: Turns) -> None:
        loop, order = asyncio.get_running_loop(), list[str]()
        ours, theirs = socket.socketpair()

        def served() -> None:
            order.append("event")
            theirs.recv(1)

        def take() -> None:
            order.append("turn")
            ours.send(b"x")

        with ours, theirs:
            loop.add_reader(theirs, served)
            for name in "abcd":
                turns.wait(Turn(name), take)
            await cycles(20)
            loop.remove_reader(theirs)
        assert order == ["turn", "event"] * 4

    run(work)


def test_background_work_passes_the_loop_on_while_sessions_wait() -> None:
    async def work(turns: Turns) -> tuple[int, int]:
        served: Counter[int] = Counter()
        turns.watch(asyncio.get_running_loop())
        worker = Worker(turns, 1e-3, 1, served)
        await turns.pass_on(8)
        busy = served.total()
        worker.active = False
        await cycles(4)
        rounds = 0

        def count() -> None:
            nonlocal rounds
            rounds += 1
            loop.call_later(0, count)

        loop = asyncio.get_running_loop()
        loop.call_later(0, count)
        await turns.pass_on(8)
        return busy, rounds

    busy, idle = run(work)
    assert busy >= 6, "each cycle serves a session"
    assert idle <= 1, "nobody waits: one cycle is all"
