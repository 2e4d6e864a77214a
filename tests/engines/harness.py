"""Engines that tests start, drive and end: vLLM in its own environment, beside KVHearth's.

An engine is forked from a nursery that has vLLM imported, so a start costs seconds, not the half
minute of three interpreters. ``serving`` starts an engine as a user would.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
from support.daemon import Daemon
from support.nursery import Child, Nursery

from kvhearth_lab.harness import HUNG_S

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("KVHEARTH_ENGINES_HOME", ROOT / ".venv-engines"))
"""The engines' environment; models and vLLM's caches live in it too."""
PYTHON = HOME / "bin" / "python"
LMCACHE = Path(os.environ.get("KVHEARTH_LMCACHE_HOME", ROOT / ".venv-lmcache"))
"""The environment of LMCache's daemon."""
LOAD_S = ANSWER_S = HUNG_S
MIB = 1 << 20
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CACHE_ROOT": str(HOME / "cache"),
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""Environment of every engine. The number of threads is the same with and without a connector,
otherwise the baseline would compute in another order.
"""


class EngineError(Exception):
    """A command failed in the engine; the text is the engine's error."""


def model(name: str) -> Path:
    """The folder of a model; made at first use, and again when the recipe has changed."""
    recipe = Path(__file__).with_name("models.py")
    mark = hashlib.sha256(recipe.read_bytes()).hexdigest()[:12]
    folder = HOME / "models" / f"{name}-{mark}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            target = Path(made) / name
            words = [str(PYTHON), str(recipe), str(target), name]
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                timeout=LOAD_S,
                check=False,
                env={**os.environ, **ENVIRONMENT},
            )
            assert done.returncode == 0, f"model {name} was not made\n{done.stderr[-4000:]}"
            target.rename(folder)
    return folder


def arguments(name: str = "tiny", **over: Any) -> dict[str, Any]:
    """Engine arguments for the model ``name``: fp32, so that equal means equal."""
    return {
        "model": str(model(name)),
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "kv_cache_memory_bytes": 128 * MIB,
        "enforce_eager": True,
        "seed": 0,
        **over,
    }


PATIENT = "call_ms=4000&lookup_ms=4000&heartbeat_ms=200"
"""Options of the URL for tests in which a busy machine must not turn a hit into a miss."""


def connector(
    daemon: Daemon | Path,
    role: str = "kv_both",
    *,
    patient: bool = True,
    host: str = "127.0.0.1",
    **extra: Any,
) -> dict[str, Any]:
    """The README's flag for a daemon or its socket directory.

    Args:
        daemon: the daemon, or the directory where its sockets would be.
        role: the ``kv_role``.
        patient: wait long for answers and load every hit; otherwise the connector's own waits. The
            tiny models compute faster than they load.
        host: where the daemon's gateway is, if it has one: the engine then goes through it.
        extra: further entries of ``kv_connector_extra_config``.
    """
    words = PATIENT if patient else ""
    if isinstance(daemon, Daemon) and "listen" in daemon.settings:
        url = daemon.remote_url(words, host)
    else:
        folder = daemon.socket_dir if isinstance(daemon, Daemon) else daemon
        url = f"kvhearth+unix://{folder}?{words}"
    options: dict[str, Any] = {"url": url, "policy": "always"}
    if patient:
        options |= {"lookup_wait_ms": 8000}
    return {
        "kv_connector": "KVHearthConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**options, **extra},
    }


_nursery: Nursery | None = None


def engine_nursery() -> Nursery:
    """The process from which engines are forked."""
    global _nursery
    if _nursery is None:
        _nursery = Nursery(
            str(PYTHON), paths=(), preloaded=["engines.driver"], environment=ENVIRONMENT
        )
    return _nursery


def inside(
    folder: Path, function: str, *, environment: dict[str, str] | None = None, **given: Any
) -> Any:
    """Return the result of a function of ``engines.inside``, called in the engines' environment.

    Args:
        folder: the folder for its output, which is shown if it fails.
        function: its name.
        environment: variables in addition to those of every engine.
        given: its arguments.
    """
    log_path = folder / f"inside-{function}.log"
    ours, theirs = socket.socketpair()
    with ours, log_path.open("wb") as log:
        with theirs:
            arguments = {"function": function, "environment": environment or {}, "given": given}
            child = engine_nursery().birth(
                "engines.inside:answer", [theirs.fileno(), log.fileno()], **arguments
            )
        with ours.makefile("rb") as reply:
            text = reply.read()
    assert child.wait(LOAD_S) == 0, log_path.read_text(errors="replace")[-4000:]
    return json.loads(text)


def close_nursery() -> None:
    """End the nursery, and with it the engines that still run."""
    global _nursery
    if _nursery is not None:
        _nursery.close()
        _nursery = None


def end_tree(pid: int) -> None:
    """Kill -9 a process and all its descendants by their ids; wait for their ends."""
    try:
        top = psutil.Process(pid)
        family = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family[1:], timeout=HUNG_S)


class Logged:
    """A process with a log."""

    log_path: Path

    def log_text(self) -> str:
        """Return everything printed so far."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        """Return the end of the log, for messages."""
        return "\n".join(self.log_text().splitlines()[-lines:])


@contextlib.contextmanager
def told(process: Logged) -> Iterator[None]:
    """Print the process' log if the block fails."""
    try:
        yield
    except BaseException:
        print(f"-- {process.log_path}\n{process.log_tail(80)}")
        raise


class Engine(Logged):
    """One engine process and its commands; ``driver.Driver`` describes them.

    Args:
        folder: the folder for its log.
        environment: variables in addition to those of every engine.
        options: engine arguments.
    """

    starts = 0

    def __init__(
        self, folder: Path, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        Engine.starts += 1
        self.log_path = folder / f"engine-{Engine.starts}.log"
        self._door, theirs = socket.socketpair()
        with theirs, self.log_path.open("ab") as log:
            self.process: Child = engine_nursery().birth(
                "engines.driver:serve",
                [theirs.fileno(), log.fileno()],
                environment=environment or {},
            )
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._asked = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.sizes: dict[str, Any] = self.ask("load", LOAD_S, arguments=options)
        except BaseException:
            self.kill()
            raise

    # -- commands ----------------------------------------------------------------------------------

    def begin(self, command: str, **values: Any) -> Future[Any]:
        """Send a command; the answer arrives later."""
        answer: Future[Any] = Future()
        with self._lock:
            self._asked += 1
            self._waiting[self._asked] = answer
            line = json.dumps({"id": self._asked, "do": command, **values})
            self._door.sendall(line.encode() + b"\n")
        return answer

    def ask(self, command: str, timeout_s: float = ANSWER_S, **values: Any) -> Any:
        """Send a command and wait for its answer."""
        answer = self.begin(command, **values)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise AssertionError(
                f"{command}: no answer within {timeout_s} s\n{self.log_tail()}"
            ) from None

    def generate(
        self, *prompts: Sequence[int], timeout_s: float = ANSWER_S, **options: Any
    ) -> list[dict[str, Any]]:
        """Run prompts together with the same options; return their results."""
        requests = [{"prompt": list(each), **options} for each in prompts]
        found: list[dict[str, Any]] = self.ask("generate", timeout_s, requests=requests)
        return found

    def one(self, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        """Run one prompt; return its result."""
        return self.generate(prompt, **options)[0]

    def reset(self) -> None:
        """Empty its own prefix cache; fail if the engine keeps holding blocks."""
        for _ in range(200):
            if self.ask("reset"):
                return
            threading.Event().wait(0.05)
        raise AssertionError(f"the engine still holds blocks\n{self.log_tail()}")

    def metric(self, name: str) -> float:
        """Return one counter or gauge, summed over its labels; 0 if it has none."""
        found: dict[str, float] = self.ask("metrics")
        return found.get(name, 0.0)

    # -- the process -------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Return its processes: the driver first, then the engine's core and workers."""
        top = psutil.Process(self.process.pid)
        return [top.pid, *(one.pid for one in top.children(recursive=True))]

    def stop(self) -> None:
        """End it as a user would: connectors get ``shutdown``."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_WR)
        try:
            self.process.wait(HUNG_S)
        except subprocess.TimeoutExpired:
            print(f"-- engine did not stop\n{self.log_tail()}")
            self.kill()
            raise
        finally:
            self._door.close()

    def kill(self) -> None:
        """Kill -9 all its processes."""
        end_tree(self.process.pid)
        self.process.wait(HUNG_S)
        self._door.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._door.makefile("rb") as lines:
            for line in lines:
                answer = json.loads(line)
                with self._lock:
                    future = self._waiting.pop(answer["id"])
                if "error" in answer:
                    future.set_exception(EngineError(answer["error"]))
                else:
                    future.set_result(answer["value"])
        with self._lock:
            left = list(self._waiting.values())
            self._waiting.clear()
        for future in left:
            future.set_exception(EngineError("the engine's process is gone"))


@contextlib.contextmanager
def running_engine(
    folder: Path, environment: dict[str, str] | None = None, **options: Any
) -> Iterator[Engine]:
    """A running engine; its log is printed if the block fails."""
    engine = Engine(folder, environment, **options)
    with told(engine):
        try:
            yield engine
        finally:
            if engine.process.poll() is None:
                engine.stop()
