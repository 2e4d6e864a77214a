"""Who is measured: an engine alone, one on our daemon, one on LMCache's."""

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
from kvhearth_lab.bench.peers.adapter import reason_of
from kvhearth_lab.bench.ttft.figures import ALONE, LMCACHE, OURS
from kvhearth_lab.bench.ttft.sizes import BLOCK_TOKENS, Sizes
from kvhearth_lab.bench.ttft.vllm_server import (
    Answer,
    BlockSpec,
    Engine,
    EngineFailed,
    Launch,
    environment,
    free_port,
)
from kvhearth_lab.harness.daemon import Served

_ATTACH_S = 60.0
_LISTEN_S = 120.0
_IDLE_WINDOW_S = 0.2
_IDLE_SHARE = 0.1
_IDLE_S = 20.0


@dataclass(frozen=True)
class Setup:
    """What all engines of a run have in common.

    Attributes:
        python: of the engines' environment.
        model: a folder.
        threads: each engine computes with.
        folder: for logs and sockets; a short path.
        sizes: of the run.
    """

    python: Path
    model: Path
    threads: int
    folder: Path
    sizes: Sizes

    def launch(self, **over: Any) -> Launch:
        """How an engine is started, with other values of ``Launch`` in ``over``."""
        shared = Launch(self.python, self.model, self.sizes.dtype, self.threads)
        return replace(shared, **over)


@dataclass(frozen=True)
class Daemon:
    """What a run needs of a side's daemon.

    Attributes:
        cpu_s: its processor seconds.
        wait_ready: waits until the engine is known to it.
        wait_quiet: waits until it is done with what it was given.
    """

    cpu_s: Callable[[], float] = lambda: 0.0
    wait_ready: Callable[[], None] = lambda: None
    wait_quiet: Callable[[], None] = lambda: None


class Side:
    """An engine that can be started again, and the daemon that it uses, if any.

    Args:
        name: of the side.
        setup: of the run.
        launch: how its engine is started.
        daemon: the engine's.
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
        """The engine that runs."""
        if self._engine is None:
            raise EngineFailed("the engine was not started")
        return self._engine

    def launch(self) -> None:
        """Start an engine; ``wait_up`` waits for it."""
        self._starts += 1
        log_path = self._setup.folder / f"{self.name}-{self._starts}.log"
        self._engine = Engine(self._launch, log_path)

    def wait_up(self) -> None:
        """Wait until the engine answers and its daemon knows it.

        Raises:
            EngineFailed: that does not come.
        """
        self.engine.wait_up()
        self._daemon.wait_ready()

    def stop(self) -> None:
        """End the engine, if there is one."""
        if self._engine is not None:
            self._engine.family.end()
            self._engine = None

    def complete(self, prompt: Sequence[int]) -> Answer:
        """An answer, and then quiet.

        Raises:
            EngineFailed: there is none.
        """
        answer = self.engine.complete(prompt, self._setup.sizes.output_tokens)
        self.settle()
        return answer

    def settle(self) -> None:
        """Wait until engine and daemon do nothing any more, so that whoever is measured next has
        the machine to itself. What never gets quiet is counted.
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
        """Processor seconds of the engine and of the daemon."""
        return self.engine.family.cpu_s(), self._daemon.cpu_s()


def served_tokens(prompt_tokens: int) -> int:
    """Tokens in the whole blocks of a prompt: what a cache may serve."""
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def alone(setup: Setup) -> Side:
    """An engine without a connector."""
    return Side(ALONE, setup, setup.launch(), None)


@contextlib.contextmanager
def ours(setup: Setup) -> Iterator[Side]:
    """A daemon of ours, and an engine with the flag of the README."""
    folder = setup.folder / "ours"
    folder.mkdir()
    daemon = Served(folder, "--memory", str(setup.sizes.memory_bytes), "--http", "off")
    try:
        daemon.ready()
        transfer = {
            "kv_connector": "KVHearthConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": daemon.url.partition("?")[0]},
        }
        doors = Daemon(daemon.cpu_s, lambda: _wait_attached(daemon), lambda: _wait_quiet(daemon))
        yield Side(OURS, setup, setup.launch(transfer=transfer), doors)
    finally:
        daemon.end()


def _wait_attached(daemon: Served) -> None:
    end = time.monotonic() + _ATTACH_S
    while not daemon.stats().groups:
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
    """LMCache's daemon, and an engine whose workers do the transfers; a chunk is a block.

    Args:
        setup: of the run.
        python: of an environment with vLLM and LMCache.

    Raises:
        EngineFailed: the daemon does not come up.
    """
    port, shm_name = free_port(), f"kvhearth_ttft_{secrets.token_hex(4)}"
    command = [str(python), "-m", "lmcache.v1.multiprocess.server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--shm-name", shm_name]
    command += ["--chunk-size", str(BLOCK_TOKENS), "--eviction-policy", "LRU"]
    command += ["--l1-size-gb", str(setup.sizes.memory_bytes / (1 << 30)), "--max-workers", "1"]
    command += ["--supported-transfer-mode", "engine_driven", "--disable-observability"]
    daemon = BlockSpec(setup.folder / "lmcache.log", command, environment(setup.threads))
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


def _wait_listens(daemon: BlockSpec, port: int) -> None:
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
