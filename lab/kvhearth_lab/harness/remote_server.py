"""A remote for tests of faults: a real server where one is installed, else a directory."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.tiers.remote.helper.__main__ import open_driver
from kvhearth_server.tiers.remote.names import LAYOUT, is_object_name
from kvhearth_server.tiers.remote.url import parse_remote

DIRECTORY, S3, VALKEY = "file", "s3", "valkey"
HOST = "127.0.0.1"
_PORTS = range(20_000, 22_700)
"""So low that those of SeaweedFS 10,000 above are below those of the kernel's clients, too."""
_TRIES = 100
_POLL_S = 0.02
_SERVERS = {S3: ("weed",), VALKEY: ("valkey-server", "redis-server")}
_LIBRARIES = {DIRECTORY: "obstore", S3: "obstore", VALKEY: "glide_sync"}
_KEYS = ("kvhearth", "no-secret")
_NO_MORE_PORTS = ("-s3.port.iceberg=0", "-s3.port.lance=0")
"""Else it listens on ports of its own choice, which a second one cannot have."""
_NO_BUCKET = "NoSuchBucket"
"""SeaweedFS makes the bucket at the first write."""


def binary_of(kind: str) -> str | None:
    """Return the path of a kind's server, which ``PATH`` tells; None without one."""
    return next(filter(None, map(shutil.which, _SERVERS.get(kind, ()))), None)


def installed() -> tuple[str, ...]:
    """Return the kinds of remotes whose library and server are here."""
    return tuple(
        kind
        for kind, library in _LIBRARIES.items()
        if importlib.util.find_spec(library) and (kind == DIRECTORY or binary_of(kind))
    )


class RemoteServer:
    """One remote, which does not run yet.

    Args:
        kind: one of ``installed()``.
        folder: directory for its files, made if it is not there.

    Attributes:
        url: of the remote, for a daemon's settings.
        durable: whether blocks outlive the server's process.

    Raises:
        KVHearthError: ``config_invalid``: its server is not installed, ``socket_unusable``: there
            are no free ports.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        if kind not in installed():
            needed = " or ".join(_SERVERS.get(kind, (_LIBRARIES[kind],)))
            raise KVHearthError(
                Reason.CONFIG_INVALID, f"a remote of kind {kind} needs {needed}, which is not here"
            )
        self.kind, self.durable = kind, kind != VALKEY
        self._folder, self._away = folder, folder.with_name(f"{folder.name}.away")
        self._data = folder / "data"
        self._data.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self.url = f"file://{self._data}"
        if kind != DIRECTORY:
            self._ports = [_free_port() for _ in range(4)]
            self._command, self.url = self._seaweed() if kind == S3 else self._valkey()

    def _valkey(self) -> tuple[list[str], str]:
        port = self._ports[0]
        place = ["--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no"]
        return [str(binary_of(VALKEY)), *place], f"valkey://{HOST}:{port}/kv"

    def _seaweed(self) -> tuple[list[str], str]:
        key, secret = _KEYS
        credentials = [{"accessKey": key, "secretKey": secret}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        who = {"name": "kit", "credentials": credentials, "actions": actions}
        config, secret_file = self._folder / "s3.json", self._folder / "secret"
        config.write_text(json.dumps({"identities": [who]}), encoding="utf-8")
        secret_file.write_text("\n".join(_KEYS) + "\n", encoding="utf-8")
        secret_file.chmod(0o600)
        parts = zip(("s3", "master", "volume", "filer"), self._ports, strict=True)
        command = [
            *(
                str(binary_of(S3)),
                "server",
                f"-dir={self._data}",
                f"-ip={HOST}",
                f"-ip.bind={HOST}",
            ),
            *("-s3", "-filer", "-master.telemetry=false", f"-s3.config={config}"),
            *(f"-{name}.port={port}" for name, port in parts),
            *("-master.volumeSizeLimitMB=64", "-volume.max=20", *_NO_MORE_PORTS),
        ]
        endpoint = f"http://{HOST}:{self._ports[0]}"
        return command, f"s3://bucket/kv?endpoint={endpoint}&region=r&secret_file={secret_file}"

    # -- its process -------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start it; its directory returns if it was away."""
        if not self._command:
            self._return()
            return
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait(self) -> None:
        """Wait until it can be listed.

        Raises:
            KVHearthError: ``internal``: it does not come up.
        """
        end = time.monotonic() + HUNG_S
        while True:
            try:
                self.names()
                return
            except (OSError, KVHearthError) as error:
                if time.monotonic() > end:
                    text = f"the remote {self.url} does not come up: {error}"
                    raise KVHearthError(Reason.INTERNAL, text) from None
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Send SIGKILL; a directory goes away."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        elif not self._command and self._data.exists():
            self._data.rename(self._away)

    def _return(self) -> None:
        """Bring back the directory, and into it what stores that had begun made meanwhile."""
        made = self._folder / "made"
        if self._away.exists() and self._data.exists():
            self._data.rename(made)
        with contextlib.suppress(FileNotFoundError):
            self._away.rename(self._data)
        if made.exists():
            shutil.copytree(made, self._data, dirs_exist_ok=True)
            shutil.rmtree(made)

    def stop(self) -> None:
        """Send SIGSTOP; a directory, which cannot be stopped, stays."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    # -- its content -------------------------------------------------------------------------------

    def names(self) -> set[str]:
        """Return the names of all blocks that it has.

        Raises:
            OSError, KVHearthError: it does not answer.
        """
        if not self._command:
            return _below(self._data)
        with socket.create_connection((HOST, self._ports[0]), HUNG_S):
            pass  # else the library would try for long

        async def listed() -> set[str]:
            driver = open_driver(parse_remote(self.url))
            driver.attach(memoryview(bytearray(1)))
            found = set()
            try:
                async with asyncio.timeout(HUNG_S):
                    async for portion in driver.list(f"{LAYOUT}/"):
                        found |= {each.name for each in portion if is_object_name(each.name)}
            finally:
                await driver.close()
            return found

        try:
            return asyncio.run(listed())
        except Exception as error:  # noqa: BLE001 - each library has errors of its own
            if _NO_BUCKET in str(error):
                return set()
            raise OSError(f"{type(error).__name__}: {error}") from None


def _below(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {name for path in paths if is_object_name(name := str(path.relative_to(folder)))}


def _free_port() -> int:
    for _ in range(_TRIES):
        port = random.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port
    raise KVHearthError(Reason.SOCKET_UNUSABLE, f"no port from {_PORTS[0]} on is free for a remote")
