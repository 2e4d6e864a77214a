"""Two hosts' engines and daemons, with nothing between them but a remote: what one of them stores,
the other one loads.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines.conftest import DAEMON_MEMORY
from engines.harness import Engine, arguments, connector, running_engine
from engines.kit import Reference, cold, prompt, same, wait_attached, warm, whole_blocks
from support.daemon import Daemon, stopped_daemon, until
from support.networks import NETWORK_ENV, Hosts, two_hosts
from support.remote_servers import (
    ACCESS,
    Server,
    make_bucket,
    running,
    seaweed,
    secret_file,
    valkey,
)

from kvhearth_lab.harness.daemon import tied

LENGTH = 1000
SERVED = whole_blocks(LENGTH)
PUBLISHED_S = 30.0
RECOVERED_S = 60.0


@dataclass
class Remote:
    """A remote that both hosts reach; a directory has no server."""

    url: str
    server: Server | None = None


@dataclass
class Host:
    """A host's daemon, whose memory does not outlive it, and its engine."""

    daemon: Daemon
    engine: Engine

    def published(self) -> int:
        """Return the blocks that its daemon has published."""
        return self.daemon.counters().get("published_blocks", 0)

    def stores(self, text: list[int], reference: Reference) -> None:
        """Run a new prompt and wait until its blocks are at the remote."""
        before = self.published()
        same(cold(self.engine, self.daemon, text), reference.answer(text), "cold")
        wanted = before + LENGTH // 128
        until(lambda: self.published() >= wanted, "the blocks are published", PUBLISHED_S)

    def loads(self, text: list[int], reference: Reference) -> bool:
        """Run a prompt with nothing in the engine's own cache. Fail unless the answer is that of an
        engine without any cache; return whether all its blocks came from the daemon.
        """
        found = warm(self.engine, text)
        same(found, reference.answer(text), "warm")
        return bool(found["cached"] == SERVED)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as found:
        yield found


@pytest.fixture(scope="module", params=["seaweed", "valkey", "file"])
def remote(
    request: pytest.FixtureRequest, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Remote]:
    folder = tmp_path_factory.mktemp("remote")
    if request.param == "file":
        pytest.importorskip("obstore")
        yield Remote(f"file://{folder}")
        return
    pytest.importorskip("obstore" if request.param == "seaweed" else "glide_sync")
    make = seaweed if request.param == "seaweed" else valkey
    with running(server := make(folder, host=hosts.gateways[0])):
        if request.param == "seaweed":
            make_bucket(server.url, "bucket")
            secret = secret_file(folder, *ACCESS)
            yield Remote(f"{server.url}&insecure=yes&{secret}", server)
        else:
            yield Remote(f"{server.url}?insecure=yes", server)


@contextlib.contextmanager
def host(logs: Path, hosts: Hosts, number: int, remote: Remote) -> Iterator[Host]:
    """Run a daemon and an engine on the host of that number."""
    starter = tied(before=hosts.entering(number))
    shared = {"remote": remote.url, "remote_write": "all", "remote_staging": "64MiB"}
    with stopped_daemon(arena=False, starter=starter, memory=DAEMON_MEMORY, **shared) as daemon:
        daemon.start()
        options = arguments(kv_transfer_config=connector(daemon))
        with running_engine(logs, {NETWORK_ENV: hosts.names[number]}, **options) as engine:
            wait_attached(daemon)
            yield Host(daemon, engine)


@pytest.fixture(scope="module")
def one(logs: Path, hosts: Hosts, remote: Remote) -> Iterator[Host]:
    with host(logs, hosts, 0, remote) as found:
        yield found


@pytest.fixture(scope="module")
def other(logs: Path, hosts: Hosts, remote: Remote) -> Iterator[Host]:
    with host(logs, hosts, 1, remote) as found:
        yield found


def test_one_host_loads_what_the_other_one_stored(
    one: Host, other: Host, reference: Reference
) -> None:
    for near, far, name in ((one, other, "there"), (other, one, "and back")):
        text = prompt(name)
        near.stores(text, reference)
        loads = far.daemon.counters()["promoted_blocks"]
        until(lambda: far.loads(text, reference), "all blocks come")  # noqa: B023 - used at once
        assert far.daemon.counters()["promoted_blocks"] - loads == SERVED // 128


def test_a_restarted_daemon_loads_what_it_published_itself(
    one: Host, other: Host, reference: Reference
) -> None:
    text = prompt("restarted")
    one.stores(text, reference)
    one.daemon.restart()
    wait_attached(one.daemon)
    until(lambda: one.loads(text, reference), "all blocks come", RECOVERED_S)


def test_a_stopped_server_costs_hits_and_no_answer(
    remote: Remote, one: Host, other: Host, reference: Reference
) -> None:
    if remote.server is None:
        pytest.skip("a directory has no server")
    text = prompt("stopped")
    one.stores(text, reference)
    remote.server.send(signal.SIGSTOP)
    try:
        assert not other.loads(text, reference)
    finally:
        remote.server.send(signal.SIGCONT)
    another = prompt("stopped before")
    one.stores(another, reference)
    until(lambda: other.loads(another, reference), "hits are back", RECOVERED_S)
