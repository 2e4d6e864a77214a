"""Adapter of Redis over TCP: redis-py with hiredis, one string a block."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth_lab.bench.peers.adapters.harness import Child, Config, WirePeer, free_port


class Peer(WirePeer):
    """See ``harness.Peer``."""

    def __init__(self) -> None:
        super().__init__()
        self._port = 0

    def start(self, config: Config) -> Mapping[str, Any]:
        kind = self.prepare(config)
        server, env = _server()
        self._port = free_port()
        command = [str(server), "--bind", "127.0.0.1", "--port", str(self._port), "--save", ""]
        command += ["--maxmemory", str(config.memory_bytes), "--maxmemory-policy", "allkeys-lru"]
        self.children.append(Child(config.folder, "redis-server", command, env))
        self.children[0].wait_port(self._port)
        said = subprocess.run(
            [server, "--version"],
            env=env,
            capture_output=True,
            encoding="utf-8",
            check=True,
            timeout=10,
        )
        return {
            "versions": {
                "redis-server": said.stdout.split("v=")[1].split()[0],
                "redis": importlib.metadata.version("redis"),
                "hiredis": importlib.metadata.version("hiredis"),
                "python": sys.version.split()[0],
            },
            "settings": "one server thread, nothing written to a drive",
            "pages": kind,
            "leftovers": [],
            "pids": [self.children[0].pid],
        }

    def connect(self) -> Any:
        client = importlib.import_module("redis").Redis
        return client(host="127.0.0.1", port=self._port, single_connection_client=True)

    def put(self, connection: Any, pages: Sequence[int]) -> None:
        for page in pages:
            connection.set(f"block-{page}", memoryview(self.source[page]))

    def get(self, connection: Any, pages: Sequence[int]) -> None:
        for page in pages:
            self.target[page] = np.frombuffer(connection.get(f"block-{page}"), np.uint8)


def _server() -> tuple[Path, dict[str, str]]:
    """Return Debian's server and its environment: the system's, or what install.sh unpacked.

    Raises:
        RuntimeError: there is none.
    """
    beside = Path(sys.prefix) / "syslibs/usr"
    folders = ":".join(sorted({str(path.parent) for path in beside.rglob("*.so.*")}))
    for path in (Path("/usr/bin/redis-server"), beside / "bin/redis-server"):
        if path.exists():
            return path, {**os.environ, "LD_LIBRARY_PATH": folders}
    raise RuntimeError("no redis-server (Debian: redis-server)")
