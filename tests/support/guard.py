"""A guard of every test: what it leaves behind fails it, and so does a pure test that waits.

- A test must leave the process as it was: handlers of logs, structlog's configuration, environment,
  working directory, threads, child processes, descriptors. The one that does not is the one that
  fails, and not the next one that happens to share its process.
- A test in ``PURE`` neither sleeps nor forks nor starts a process.
  ``@pytest.mark.realtime(reason)`` names the exceptions; ``test_tidy`` bounds their number.
- Nothing here bounds how long a test takes: machines differ. ``suites`` tells what became slower.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvhearth_lab.harness import HUNG_S
from support import nursery

PURE = ("unit", "contract", "golden", "property")
_TESTS = str(Path(__file__).resolve().parents[1])
_NOT_OURS = ("PYTEST_CURRENT_TEST",)


class State:
    """Facts about the process that a test must not change."""

    def __init__(self) -> None:
        self.handlers = [
            each
            for each in logging.getLogger().handlers
            if not type(each).__module__.startswith("_pytest")
        ]
        self.own_handlers = list(logging.getLogger("kvhearth").handlers)
        self.structlog = structlog.is_configured()
        self.environment = {
            name: value for name, value in os.environ.items() if name not in _NOT_OURS
        }
        self.directory = os.getcwd()
        self.threads = set(threading.enumerate())
        self.nursery = nursery.running()
        self.processes = _children(self.nursery)
        self.descriptors = _descriptors()

    def left(self, *, resources: bool = True) -> list[str]:
        """Return what is different now; settings of the process are put back."""
        found = self._settings_left() + (self._resources_left() if resources else [])
        return [f"leaves {each}" for each in found]

    def _resources_left(self) -> list[str]:
        found = list[str]()
        end = time.monotonic() + HUNG_S
        for thread in set(threading.enumerate()) - self.threads:
            thread.join(max(end - time.monotonic(), 0.0))
        names = sorted(each.name for each in set(threading.enumerate()) - self.threads)
        found += [f"threads {', '.join(names)}"] if names else []
        if more := _children(nursery.running()) - self.processes:
            found.append(f"processes {sorted(more)}")
        if nursery.running() is self.nursery:  # else this test is the one that started it
            while (new := self._new_descriptors()) and time.monotonic() < end:
                gc.collect()
                time.sleep(0.01)
            found += [f"descriptors {', '.join(new)}"] if new else []
        return found

    def _settings_left(self) -> list[str]:
        now, found = State(), []
        root, own = logging.getLogger(), logging.getLogger("kvhearth")
        if now.handlers != self.handlers:
            found.append("handlers of the root logger")
            for each in set(now.handlers) - set(self.handlers):
                root.removeHandler(each)
        if now.own_handlers != self.own_handlers:
            found.append("handlers of our logger")
            own.handlers[:] = self.own_handlers
        if now.structlog and not self.structlog:
            found.append("structlog's configuration")
            structlog.reset_defaults()
        if now.environment != self.environment:
            names = {name for name, _ in now.environment.items() ^ self.environment.items()}
            found.append(f"environment {', '.join(sorted(names))}")
            for name in names:
                os.environ.pop(name, None)
            os.environ.update(self.environment)
        if now.directory != self.directory:
            found.append("the working directory")
            os.chdir(self.directory)
        return found

    def _new_descriptors(self) -> list[str]:
        return [
            f"{number} {target}"
            for number, target in _descriptors().items()
            if self.descriptors.get(number) != target
        ]


def _children(forks: nursery.Nursery | None) -> set[int]:
    """Return the processes of this one, and those that its nursery forked for it."""
    found = _children_of(os.getpid())
    return found if forks is None else (found - {forks.pid}) | _children_of(forks.pid)


def _children_of(pid: int) -> set[int]:
    found = set[int]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found |= {int(word) for word in task.read_text().split()}
        except OSError:
            continue  # the thread has ended
    return found


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that lists
    return found


@contextmanager
def noted() -> Iterator[list[str]]:
    """Note what only an impure test may do."""
    found: list[str] = []
    sleep, nap, init, fork = time.sleep, asyncio.sleep, subprocess.Popen.__init__, os.fork

    def note_sleep() -> None:
        frame = sys._getframe(2)
        if frame.f_code.co_filename.startswith(_TESTS):
            found.append(
                f"sleeps at {frame.f_code.co_filename[len(_TESTS) + 1 :]}:{frame.f_lineno}"
            )

    def slept(seconds: float) -> None:
        note_sleep()
        sleep(seconds)

    def napped(seconds: float, *result: Any) -> Any:
        if seconds > 0 and type(asyncio.get_running_loop()).time is asyncio.BaseEventLoop.time:
            note_sleep()
        return nap(seconds, *result)

    def started(process: Any, *words: Any, **options: Any) -> None:
        found.append("starts a process")
        init(process, *words, **options)

    def forked() -> int:
        found.append("forks")
        return fork()

    time.sleep, asyncio.sleep = slept, napped  # type: ignore[assignment]
    subprocess.Popen.__init__, os.fork = started, forked  # type: ignore[method-assign]
    try:
        yield found
    finally:
        time.sleep, asyncio.sleep = sleep, nap
        subprocess.Popen.__init__, os.fork = init, fork  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def guard(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail the test that breaks a rule of this module."""
    before, found, failures = State(), list[str](), request.session.testsfailed
    excepted = any(map(request.node.get_closest_marker, ("realtime", "slow", "gpu")))
    if request.path.parent.name in PURE and not excepted:
        with noted() as found:
            yield
    else:
        yield
    # Else they, and what they map, outlive this fixture.
    request.node.funcargs.clear()
    for record in caplog.get_records("call"):
        record.exc_info = None
    # What a fixture of the module owns may come and go with any of its tests. A failure's traceback
    # keeps the objects of its test, and what they hold open.
    failed = request.session.testsfailed > failures
    left = before.left(resources=not failed and not _shares(request))
    if problems := [*dict.fromkeys(found), *left]:
        pytest.fail("; ".join(problems), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def module_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the last test of a module whose own fixtures leave something behind."""
    before, failures = State(), request.session.testsfailed
    yield
    if problems := before.left(resources=request.session.testsfailed == failures):
        pytest.fail("; ".join(problems), pytrace=False)


def _shares(request: pytest.FixtureRequest) -> bool:
    """Whether the test uses a fixture of ours that other tests use, too."""
    definitions = request.node._fixtureinfo.name2fixturedefs
    return any(
        each.scope != "function" and each.baseid and name != "module_guard"
        for name, found in definitions.items()
        for each in found
    )
