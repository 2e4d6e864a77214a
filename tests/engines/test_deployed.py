"""The engines of ``deploy/``: their commands as plain processes, beside a daemon as deployed."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines.kit import prompt, wait_attached, wait_settled, wait_stored, whole_blocks
from engines.serving import running_server, served
from support.daemon import running_daemon
from support.manifests import ENGINES

from kvhearth_server.config.load import ENV_PREFIX

LENGTH = 2000
PLACES = ("arena_dir", "socket_dir", "http", "http_insecure", "ssd_dirs", "hugepages")
"""Settings that name what only the container has."""


@pytest.mark.parametrize("name", ENGINES)
def test_a_deployed_engine_hits_the_cache_of_the_daemon_beside_it(name: str, logs: Path) -> None:
    """The container's words but for the model; of the daemon's settings all but its places."""
    deployed = ENGINES[name]()
    given = {n.removeprefix(ENV_PREFIX).lower(): v for n, v in deployed.daemon_environment.items()}
    settings = {n: v for n, v in given.items() if n not in PLACES and v}
    assert settings["grpc"] == "off"
    transfer = {n: v for n, v in deployed.transfer.items() if n != "kv_connector_extra_config"}
    text = prompt(f"deployed {name}", LENGTH)
    with running_daemon(**{**settings, "memory": "256MiB", "allow_uids": ""}) as daemon:
        with running_server(logs, **served(daemon, transfer)) as server:
            wait_attached(daemon)
            first = server.complete(text)
            assert first["cached"] == 0
            wait_stored(daemon, LENGTH // 128)
            server.reset()
            again = server.complete(text)
            assert again["cached"] == whole_blocks(LENGTH)
            assert again["text"] == first["text"]
            server.stop()
        wait_settled(daemon)
