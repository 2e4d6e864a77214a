"""Supervised threads: several of one worker, and the rest after a failure."""

from __future__ import annotations

import subprocess
import sys
import threading
from queue import SimpleQueue

import pytest
from support.daemon import until

from kvhearth.worker_thread import SupervisedThread

DONE_S = 10.0


def test_a_worker_of_several_threads_is_woken_and_stopped_as_one() -> None:
    queue: SimpleQueue[int | None] = SimpleQueue()
    taken: list[int | None] = []
    worker = SupervisedThread(
        "kvhearth-test",
        lambda: taken.append(queue.get()),
        wake=lambda: queue.put(None),
        threads=3,
    )
    worker.start()
    queue.put(1)
    until(lambda: taken == [1])
    assert worker.stop(DONE_S)
    assert taken == [1, None, None, None]


def test_a_worker_rests_after_a_failure_but_not_beyond_its_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed = threading.Event()

    def step() -> None:
        failed.set()
        raise RuntimeError("scripted")

    worker = SupervisedThread("kvhearth-test", step, pause_s=60)
    worker.start()
    assert failed.wait(DONE_S)
    assert worker.stop(DONE_S)
    assert caplog.text.count("RuntimeError: scripted") == 1


def test_all_workers_are_stopped_before_any_has_its_last_word() -> None:
    script = (
        "from kvhearth.worker_thread import SupervisedThread\n"
        "ended = lambda: print(all(each.stop(0) for each in workers))\n"
        "workers = [SupervisedThread('one', lambda: None, at_exit=ended) for _ in range(8)]\n"
        "for worker in workers:\n"
        "    worker._step = lambda worker=worker: worker.rest(60)\n"
        "    worker.start()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, timeout=30
    )
    assert ended.stdout == b"True\n" * 8
