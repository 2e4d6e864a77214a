"""Supervised threads: several of one worker, and the rest after a failure."""

from __future__ import annotations

import atexit
import functools
import runpy
from collections.abc import Callable
from queue import SimpleQueue

import pytest
from support.scripted_clock import ScriptedClock

from kvhearth import worker_thread
from kvhearth.worker_thread import SupervisedThread
from kvhearth_lab.harness import HUNG_S


def test_a_worker_of_several_threads_is_woken_and_stopped_as_one() -> None:
    queue: SimpleQueue[int | None] = SimpleQueue()
    taken: SimpleQueue[int | None] = SimpleQueue()
    worker = SupervisedThread(
        "kvhearth-test",
        lambda: taken.put(queue.get()),
        wake=lambda: queue.put(None),
        threads=3,
    )
    worker.start()
    queue.put(1)
    assert taken.get(timeout=HUNG_S) == 1
    assert worker.stop(HUNG_S)
    assert [taken.get(timeout=HUNG_S) for _ in range(3)] == [None] * 3


def test_a_worker_goes_on_after_a_step_and_a_recovery_that_fail(
    clock: ScriptedClock, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, float]] = []
    began = clock.now()

    def step() -> None:
        seen.append(("step", clock.now() - began))
        if len(seen) < 4:
            raise RuntimeError("scripted")
        worker.rest(60)

    def recover() -> None:
        seen.append(("recover", clock.now() - began))
        raise ValueError("scripted")

    worker = SupervisedThread("kvhearth-test", step, recover, pause_s=5, clock=clock)
    worker.start()
    clock.until(lambda: len(seen) == 6)
    stopped_at = clock.now()
    assert worker.stop(HUNG_S)
    assert seen == [
        ("step", 0),
        ("recover", 0),
        ("step", 5),
        ("recover", 5),
        ("step", 10),
        ("step", 70),
    ]
    assert clock.now() == stopped_at, "a rest ends with the stop"
    logged = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert logged == [RuntimeError, ValueError, RuntimeError, ValueError]


def test_all_workers_are_stopped_before_any_has_its_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    # A copy of the module has no workers of other tests.
    own = runpy.run_path(worker_thread.__file__)
    ended: list[bool] = []
    workers: list[SupervisedThread] = []

    def last_word() -> None:
        ended.append(all(worker.stop(0) for worker in workers))

    for _ in range(8):
        queue: SimpleQueue[None] = SimpleQueue()
        step, wake = queue.get, functools.partial(queue.put, None)
        worker = own["SupervisedThread"]("kvhearth-test", step, wake=wake, at_exit=last_word)
        worker.start()
        workers.append(worker)
    for function in at_exit:
        function()
    assert ended == [True] * 8
