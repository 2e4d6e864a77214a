"""Engines and daemons shared by the engine tests: a start costs seconds, so few are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines.harness import (
    HOME,
    LMCACHE,
    Engine,
    arguments,
    close_nursery,
    connector,
    engine_nursery,
    running_engine,
)
from engines.kit import Reference
from support.daemon import Daemon, free_port, running_daemon

DAEMON_MEMORY = "256MiB"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test here ``engines`` and skips it where its environment is not built. SGLang's
    tests run in SGLang's own, or skip themselves.
    """
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker("engines")
        home, target = (LMCACHE, "lmcache") if "lmcache" in item.path.name else (HOME, "engines")
        if "sglang" not in item.path.name and not (home / ".ready").exists():
            item.add_marker(pytest.mark.skip(reason=f"needs an environment: make test-{target}"))


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder for the engines' logs. The engines' nursery runs meanwhile: a test that started it
    would leave it behind.
    """
    engine_nursery()
    yield tmp_path_factory.mktemp("engines")
    close_nursery()


@pytest.fixture(scope="session")
def reference(logs: Path) -> Iterator[Reference]:
    """The tiny model without any cache."""
    found = Reference(logs)
    yield found
    found.engine.stop()


@pytest.fixture(scope="module")
def reach(request: pytest.FixtureRequest) -> dict[str, object]:
    """The daemon's settings for the way that its engines reach it: by its unix sockets, unless
    ``kit.BOTH_WAYS`` says otherwise.
    """
    remote = getattr(request, "param", "unix") == "remote"
    return {"listen": f"127.0.0.1:{free_port()}"} if remote else {}


@pytest.fixture(scope="module")
def daemon(reach: dict[str, object]) -> Iterator[Daemon]:
    """A daemon whose arena outlives its process."""
    with running_daemon(memory=DAEMON_MEMORY, **reach) as found:
        yield found


@pytest.fixture(scope="module")
def engine(logs: Path, daemon: Daemon) -> Iterator[Engine]:
    """The tiny model, connected to that daemon."""
    with running_engine(logs, **arguments(kv_transfer_config=connector(daemon))) as found:
        yield found
