"""Sides of the measurement: an engine alone, one on KVHearth's daemon, one on LMCache's."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError
from kvhearth_lab.bench.daemon import Served
from kvhearth_lab.bench.peers.adapter import reason_of
from kvhearth_lab.bench.ttft.figures import ALONE, BLOCK_TOKENS, LMCACHE, OURS, Sizes
from kvhearth_lab.bench.ttft.vllm_server import (
    Answer,
    Engine,
    EngineFailed,
    Launch,
    ProcessTree,
    environment,
    free_port,
)

_ATTACH_S = 60.0
_LISTEN_S = 120.0
_IDLE_WINDOW_S = 0.2
_IDLE_SHARE = 0.1
_IDLE_S = 20.0


@dataclass(frozen=True)
class Setup:
    """Settings shared by all engines of a run.

    Attributes:
        python: interpreter of the engines' environment.
        model: folder of the model.
        threads: compute threads of each engine.
        folder: folder for logs and sockets; a short path.
        sizes: sizes of the run.
    """

    python: Path
    model: Path
    threads: int
    folder: Path
    sizes: Sizes

    def launch(self, **over: Any) -> Launch:
        """Return the launch of an engine; ``over`` replaces fields of ``Launch``."""
        shared = Launch(self.python, self.model, self.sizes.dtype, self.threads)
        return replace(shared, **over)


@dataclass(frozen=True)
class Daemon:
    """Operations that a run needs of a side's daemon.

    Attributes:
        cpu_s: returns its processor seconds.
        wait_ready: waits until the engine is attached to it.
        wait_quiet: waits until it has finished its work.
    """

    cpu_s: Callable[[], float] = lambda: 0.0
    wait_ready: Callable[[], None] = lambda: None
    wait_quiet: Callable[[], None] = lambda: None


class Side:
    """A restartable engine, and the daemon that it uses, if any.

    Args:
        name: name of the side.
        setup: settings of the run.
        launch: launch of its engine.
        daemon: the engine's daemon.
    """

    def __init__(self, name: str, setup: Setup, launch: Launch, daemon: Daemon | None) -> None:
        self.name = name
        self.caches = daemon is not None
        self.unsettled = 0
        self._setup = setup
        self._launch = launch
        self._daemon = daemon or Daemon()
        self._starts = 0
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The running engine."""
        if self._engine is None:
            raise EngineFailed("the engine was not started")
        return self._engine

    def launch(self) -> None:
        """Start an engine without waiting; ``wait_up`` waits for it."""
        self._starts += 1
        log_path = self._setup.folder / f"{self.name}-{self._starts}.log"
        self._engine = Engine(self._launch, log_path)

    def wait_up(self) -> None:
        """Wait until the engine answers and its daemon knows it.

        Raises:
            EngineFailed: it does not come up.
        """
        self.engine.wait_up()
        self._daemon.wait_ready()

    def stop(self) -> None:
        """End the engine, if there is one."""
        if self._engine is not None:
            self._engine.family.end()
            self._engine = None

    def complete(self, prompt: Sequence[int]) -> Answer:
        """Return an answer after engine and daemon have become idle.

        Raises:
            EngineFailed: there is no answer.
        """
        answer = self.engine.complete(prompt, self._setup.sizes.output_tokens)
        self.settle()
        return answer

    def settle(self) -> None:
        """Wait until engine and daemon are idle, so that the next side has the machine to itself.
        Waits that time out are counted.
        """
        end = time.monotonic() + _IDLE_S
        while time.monotonic() < end:
            before = self.cpu_s()
            time.sleep(_IDLE_WINDOW_S)
            if sum(self.cpu_s()) - sum(before) < _IDLE_SHARE * _IDLE_WINDOW_S:
                break
        else:
            self.unsettled += 1
        self._daemon.wait_quiet()

    def cpu_s(self) -> tuple[float, float]:
        """Return the processor seconds of the engine and of the daemon."""
        return self.engine.family.cpu_s(), self._daemon.cpu_s()


def served_tokens(prompt_tokens: int) -> int:
    """Return the tokens in the whole blocks of a prompt, which a cache may serve."""
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def alone(setup: Setup) -> Side:
    """Return an engine without a connector."""
    return Side(ALONE, setup, setup.launch(), None)


@contextlib.contextmanager
def ours(setup: Setup) -> Iterator[Side]:
    """Provide a daemon of ours, and an engine with the flag of the README."""
    folder = setup.folder / "ours"
    folder.mkdir()
    daemon = Served(folder, None, {"memory": setup.sizes.memory_bytes, "http": "off"})
    try:
        daemon.start()
        transfer = {
            "kv_connector": "KVHearthConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": daemon.client_url.partition("?")[0]},
        }
        doors = Daemon(daemon.cpu_s, lambda: _wait_attached(daemon), lambda: _wait_quiet(daemon))
        yield Side(OURS, setup, setup.launch(transfer=transfer), doors)
    finally:
        daemon.kill()


def _wait_attached(daemon: Served) -> None:
    end = time.monotonic() + _ATTACH_S
    while not daemon.stats(check_books=False).groups:
        if time.monotonic() > end:
            raise EngineFailed("the engine does not attach to the daemon")
        time.sleep(0.05)


def _wait_quiet(daemon: Served) -> None:
    try:
        daemon.wait_quiet()
    except KVHearthError as error:
        raise EngineFailed(str(error)) from None


@contextlib.contextmanager
def lmcache(setup: Setup, python: Path) -> Iterator[Side]:
    """Provide LMCache's daemon, and an engine whose workers do the transfers; a chunk is a block.

    Args:
        setup: settings of the run.
        python: interpreter of an environment with vLLM and LMCache.

    Raises:
        EngineFailed: the daemon does not come up.
    """
    port, shm_name = free_port(), f"kvhearth_ttft_{secrets.token_hex(4)}"
    command = [str(python), "-m", "lmcache.v1.multiprocess.server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--shm-name", shm_name]
    command += ["--chunk-size", str(BLOCK_TOKENS), "--eviction-policy", "LRU"]
    command += ["--l1-size-gb", str(setup.sizes.memory_bytes / (1 << 30)), "--max-workers", "1"]
    command += ["--supported-transfer-mode", "engine_driven", "--disable-observability"]
    daemon = ProcessTree(setup.folder / "lmcache.log", command, environment(setup.threads))
    try:
        _wait_listens(daemon, port)
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
                "lmcache.mp.mq_timeout": 20,
            },
        }
        switches = ("disable-hybrid-kv-cache-manager",)
        launch = setup.launch(python=python, transfer=transfer, switches=switches)
        yield Side(LMCACHE, setup, launch, Daemon(daemon.cpu_s))
    finally:
        daemon.end()
        Path("/dev/shm", shm_name).unlink(missing_ok=True)


def _wait_listens(daemon: ProcessTree, port: int) -> None:
    end = time.monotonic() + _LISTEN_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if daemon.ended is not None:
            raise EngineFailed(f"its daemon ended: {reason_of(daemon.said())}")
        if time.monotonic() > end:
            raise EngineFailed(f"its daemon is not up after {_LISTEN_S:.0f} s")
        time.sleep(0.1)
