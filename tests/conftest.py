"""Hypothesis profiles, and fixtures of several files."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy.testing  # noqa: F401 - the oldest numpy starts a process when it is imported
import pytest
import structlog
from hypothesis import Phase, settings
from hypothesis.internal.conjecture import providers
from support.daemon import Daemon, running_daemon, scratch
from support.guard import guard, module_guard  # noqa: F401 - they are autouse
from support.native import without_native
from support.raw_door import PAGE_BYTES, RawSession, end_well, goes_on
from support.scripted_clock import ScriptedClock, scripted_clock
from support.tier_rig import MakeRig, TierRig

from kvhearth import native as native_module
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of

# Equal examples in every run, not shrunk, since that takes minutes. The other one draws anew.
settings.register_profile(
    "gate",
    max_examples=30,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.generate],
)
settings.register_profile(
    "soak", max_examples=100, derandomize=False, deadline=None, print_blob=True
)
settings.load_profile("gate")

_constants_of_modules = providers._get_local_constants


def _constants() -> providers.Constants:
    """Return what examples also draw: a module's constants only where examples may differ, since
    which modules are loaded depends on the tests before.
    """
    random = not settings.default.derandomize
    return _constants_of_modules() if random else providers.Constants()


providers._get_local_constants = _constants


def pytest_collection_finish() -> None:
    """Exclude what is loaded from later collections of garbage: they took a third of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A scratch directory. pytest's has the names of user and test in its path, and sockets in it
    had too long ones.
    """
    with scratch() as folder:
        yield folder


@pytest.fixture(scope="module")
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon with the settings ``DAEMON`` of the tests' module, which must leave it in order."""
    with running_daemon(arena=False, **request.module.DAEMON) as daemon:
        yield daemon
        end_well(daemon)


@pytest.fixture
def hasty(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon that waits ``TIMEOUT_S`` of the tests' module for openings and frames; the others
    wait longer.
    """
    with running_daemon(arena=False, attach_timeout_s=request.module.TIMEOUT_S) as daemon:
        yield daemon
        end_well(daemon)


@pytest.fixture(scope="module")
def neighbour(daemon: Daemon) -> Iterator[Engine]:
    """A well-behaved engine of that daemon."""
    with engine_of(daemon.url(), contract_of(PAGE_BYTES), "neighbour") as engine:
        yield engine


@pytest.fixture
def unhurt_neighbour(neighbour: Engine) -> Iterator[None]:
    """Checks after the test that the neighbour still stores and loads."""
    yield
    goes_on(neighbour)


@pytest.fixture
def session(daemon: Daemon) -> Iterator[RawSession]:
    """A session of the tests' own making."""
    with RawSession(daemon) as session:
        yield session


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes settings from the environment."""
    for name in [each for each in os.environ if each.startswith("KVHEARTH_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def clock() -> Iterator[ScriptedClock]:
    """A clock that moves on when all threads wait."""
    with scripted_clock() as clock:
        yield clock


@pytest.fixture
def tier_rig() -> Iterator[MakeRig]:
    """What makes rigs, which are closed after the test."""
    with ExitStack() as ends:
        yield lambda *args, **options: ends.enter_context(closing(TierRig(*args, **options)))


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Restores the process' logging after the test."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    structlog.reset_defaults()


@pytest.fixture(params=["native", "numpy"])
def native(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test twice: with the native module, and without it."""
    if request.param == "numpy":
        with without_native():
            yield
        return
    if reason := native_module.available():
        pytest.skip(f"no native module: {reason}")
    yield
