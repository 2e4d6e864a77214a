"""A client attached to a fake daemon, for tests of the client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvhearth.client import KVClient, connect
from support.fake_daemon import FakeDaemon, running, small_contract

OPTIONS = "lookup_ms=8000&call_ms=8000&attach_ms=8000&heartbeat_ms=50"
"""Deadlines that calls exceed only if a test delays them."""


def url_of(directory: Path, options: str = OPTIONS) -> str:
    """The URL of a daemon in ``directory``."""
    return f"kvhearth+unix://{directory}?{options}"


@contextlib.contextmanager
def connected(directory: Path, options: str = OPTIONS, **arguments: Any) -> Iterator[KVClient]:
    """A client that is closed at the end."""
    client = connect(
        url_of(directory, options), small_contract(), **{"engine_id": "e1", **arguments}
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
