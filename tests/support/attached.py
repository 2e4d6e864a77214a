"""A client attached to a fake daemon, for tests of the client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvhearth.client import KVClient, connect
from kvhearth.contract import Contract
from support.fake_daemon import FakeDaemon, running, small_contract
from support.scripted_clock import ScriptedClock, scripted_clock

OPTIONS = "lookup_ms=8000&call_ms=8000&attach_ms=8000&heartbeat_ms=50"
"""Deadlines that calls exceed only if a test delays them."""


def url_of(directory: Path, options: str = OPTIONS) -> str:
    """The URL of a daemon in ``directory``."""
    return f"kvhearth+unix://{directory}?{options}"


@contextlib.contextmanager
def connected(
    directory: Path,
    options: str = OPTIONS,
    *,
    clock: ScriptedClock | None = None,
    contract: Contract | None = None,
    **arguments: Any,
) -> Iterator[KVClient]:
    """A client on a scripted clock, ``client.clock``; it is closed at the end."""
    with contextlib.nullcontext(clock) if clock else scripted_clock() as own:
        client = connect(
            url_of(directory, options),
            contract or small_contract(),
            clock=own,
            **{"engine_id": "e1", **arguments},
        )
        try:
            yield client
        finally:
            assert client.close(), "copies did not drain"


@contextlib.contextmanager
def attached(
    directory: Path, options: str = OPTIONS, **arguments: Any
) -> Iterator[tuple[FakeDaemon, KVClient]]:
    """A fake daemon and a client that is ready."""
    with (
        running(directory, small_contract()) as daemon,
        connected(directory, options, **arguments) as client,
    ):
        assert client.wait_ready(10)
        yield daemon, client
