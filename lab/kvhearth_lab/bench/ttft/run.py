"""Runs all parts of ``kvhearth bench ttft``.

The sides are an engine alone, one on KVHearth's daemon, one on another such daemon through its
gateway over TCP, and one on LMCache's daemon.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError
from kvhearth.version import __version__
from kvhearth_lab.bench.daemon import Served, broken
from kvhearth_lab.bench.peers.adapter import PeerFailed, check_installed, reason_of
from kvhearth_lab.bench.report import machine, p50, steps
from kvhearth_lab.bench.ttft.figures import (
    ALONE,
    BLOCK_TOKENS,
    COLD,
    LMCACHE,
    LONGEST,
    MODEL,
    OURS,
    OWN,
    PROBE_TOKENS,
    REMOTE,
    RESTART,
    WARM,
    Cost,
    Report,
    Sample,
    Sizes,
)
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
def ours(setup: Setup, name: str) -> Iterator[Side]:
    """Provide a daemon of ours, and an engine with the flag of the README.

    Args:
        setup: settings of the run.
        name: ``OURS`` for the engine on the daemon's host, ``REMOTE`` for one that reaches it over
            loopback TCP.
    """
    folder = setup.folder / name
    folder.mkdir()
    settings: dict[str, object] = {"memory": setup.sizes.memory_bytes, "http": "off"}
    address = f"127.0.0.1:{free_port()}"
    if name == REMOTE:
        settings["listen"] = address
    daemon = Served(folder, None, settings)
    try:
        daemon.start()
        url = f"kvhearth://{address}" if name == REMOTE else daemon.client_url.partition("?")[0]
        transfer = {
            "kv_connector": "KVHearthConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": url},
        }
        doors = Daemon(daemon.cpu_s, lambda: _wait_attached(daemon), lambda: _wait_quiet(daemon))
        yield Side(name, setup, setup.launch(transfer=transfer), doors)
    finally:
        daemon.kill()


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


ENGINE_BYTES = 5 << 29
"""Approximate private memory of one engine."""
_PROOFS = 3
_BYTE_VALUES = 256

Note = Callable[[str], None]


@dataclass(frozen=True)
class Given:
    """Paths and settings that the operator gives.

    Attributes:
        engine_python: interpreter of an environment with vLLM and kvhearth.
        models: folder that contains the model.
        lmcache_python: interpreter of an environment with vLLM and LMCache, or None.
        threads: compute threads of each engine.
    """

    engine_python: Path
    models: Path
    lmcache_python: Path | None
    threads: int


def run(sizes: Sizes, given: Given, note: Note) -> dict[str, Any]:
    """Measure all sides and return the object that the verb prints.

    Raises:
        KVHearthError: the engine alone or on our daemon does not work.
    """
    start = time.monotonic()
    found: dict[str, Any] = {
        "version": __version__,
        "machine": machine(),
        "sizes": {
            "model": MODEL,
            "dtype": sizes.dtype,
            "prompt_tokens": dict(sizes.lengths),
            "rounds": sizes.rounds,
            "repeats": sizes.repeats,
            "restarts": sizes.restarts,
            "zero_hit_blocks": 2 * sizes.pairs,
            "zero_hit_prompts": 4 * sizes.pairs,
            "zero_hit_prompt_tokens": sizes.pair_tokens,
            "output_tokens": sizes.output_tokens,
            "threads": given.threads,
            "memory_bytes": sizes.memory_bytes,
        },
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvh-")))
        setup = Setup(given.engine_python, given.models / MODEL, given.threads, folder, sizes)
        course = Course(sizes, note)
        try:
            course.begin(setup, given, stack)
            course.zero_hit(0)  # first, because it may evict
            course.rounds()
            for number in range(sizes.restarts):
                course.restart()
                course.after_restart(number)
            course.zero_hit(1)
            found["connector"] = course.contenders[OURS].engine.counters("vllm:kvhearth_")
        except EngineFailed as failed:
            raise broken(str(failed)) from None
        found["first_requests"] = course.first_requests()
        found["unsettled"] = {name: side.unsettled for name, side in course.contenders.items()}
    report = Report(list(sizes.lengths), course.samples, course.costs).as_json()
    found["machine"]["load1_after"] = round(os.getloadavg()[0], 2)
    found["seconds"] = round(time.monotonic() - start, 1)
    return {**report, **found, "skipped": course.skipped}


class Course:
    """The parts of a run, and their results.

    Args:
        sizes: sizes of the run.
        note: receives a line for a person at each part.
    """

    def __init__(self, sizes: Sizes, note: Note) -> None:
        self.contenders: dict[str, Side] = {}
        self.samples: list[Sample] = []
        self.costs: list[Cost] = []
        self.skipped: dict[str, str] = {}
        self._probes: dict[str, list[tuple[float, float]]] = {}
        self._sizes = sizes
        self._note = note

    def begin(self, setup: Setup, given: Given, stack: contextlib.ExitStack) -> None:
        """Start all engines and check that the caches serve.

        Raises:
            EngineFailed: a required one does not work.
        """
        if free_bytes() < 2 * ENGINE_BYTES + self._sizes.memory_bytes:
            self._note("there is little free memory: two engines may not fit")
        self._add(alone(setup), stack)
        self._add(stack.enter_context(ours(setup, OURS)), stack)
        if free_bytes() < 3 * ENGINE_BYTES + 2 * self._sizes.memory_bytes:
            self._skip(REMOTE, "not enough free memory for a third engine")
        else:
            self._add(stack.enter_context(ours(setup, REMOTE)), stack)
        try:
            if given.lmcache_python is None:
                raise EngineFailed("no interpreter was given with --lmcache")
            check_installed(given.lmcache_python)
            if free_bytes() < 4 * ENGINE_BYTES + 3 * self._sizes.memory_bytes:
                raise EngineFailed("not enough free memory for a fourth engine")
            self._add(stack.enter_context(lmcache(setup, given.lmcache_python)), stack)
        except (EngineFailed, PeerFailed) as failed:
            self._skip(LMCACHE, str(failed))
        self._start(self._prove)

    def rounds(self) -> None:
        """Send each prompt cold, from the engine's own memory and from the daemon; side by side."""
        sizes = self._sizes
        self._note(f"TTFT: {sizes.rounds} prompts of {', '.join(sizes.lengths)} tokens")
        for number in steps(sizes.rounds, "cold and warm"):
            for label, length in sizes.lengths.items():
                prompt = _prompt(f"{label} {number}", length)
                for side in self._turns(number):
                    with self._attempt(side):
                        self._sample(side, COLD, label, number, prompt)
                for repeat in range(sizes.repeats):
                    for side in self._turns(number + repeat):
                        with self._attempt(side):
                            self._warm(side, label, number, prompt)

    def _warm(self, side: Side, label: str, number: int, prompt: list[int]) -> None:
        self._sample(side, OWN, label, number, prompt)
        if side.caches:
            side.engine.reset()
            self._sample(side, WARM, label, number, prompt)

    def restart(self) -> None:
        """Restart the engines on the same daemons. Each answers two short prompts that do not help
        later ones, as for a readiness probe.
        """
        self._note("the engines are restarted")
        for side in list(self.contenders.values()):
            with self._attempt(side):
                side.stop()
        self._start(self._probe)

    def after_restart(self, restart: int) -> None:
        """Send all prompts again, on engines that have seen none of them. The first prompt changes
        each time.
        """
        sizes = self._sizes
        for step in steps(sizes.rounds, "after the restart"):
            number = (restart + step) % sizes.rounds
            for label, length in sizes.lengths.items():
                for side in self._turns(step):
                    if side.caches:
                        with self._attempt(side):
                            prompt = _prompt(f"{label} {number}", length)
                            self._sample(side, RESTART, label, number, prompt)

    def zero_hit(self, start: int) -> None:
        """Measure the cost of new prompts, side by side, stores included."""
        sizes = self._sizes
        self._note(f"zero-hit overhead: {2 * sizes.pairs} prompts of {sizes.pair_tokens} tokens")
        for side in list(self.contenders.values()):
            with self._attempt(side):  # allocates the memory that a prompt of this length needs
                side.complete(_prompt(f"zero {start}", sizes.pair_tokens))
        for number in steps(sizes.pairs, "zero-hit overhead"):
            there = self._turns(number)
            for way, contenders in enumerate((there, there[::-1])):
                prompt = _prompt(f"zero {start} {number} {way}", sizes.pair_tokens)
                for side in contenders:
                    if side.name in self.contenders:
                        with self._attempt(side):
                            self.costs.append(self._cost(side, start, number, prompt))

    def _cost(self, side: Side, start: int, number: int, prompt: list[int]) -> Cost:
        before = side.cpu_s()
        answer = side.engine.complete(prompt, self._sizes.output_tokens)
        if answer.cached:
            raise EngineFailed("a prompt was to be new")
        side.settle()
        after = side.cpu_s()
        tokens = len(prompt) + len(answer.tokens)
        return Cost(side.name, start, number, after[0] - before[0], after[1] - before[1], tokens)

    def _add(self, side: Side, stack: contextlib.ExitStack) -> None:
        self.contenders[side.name] = side
        stack.callback(side.stop)

    def first_requests(self) -> dict[str, list[float]]:
        """Return, by side, the seconds to the first token of the first and of the second short
        prompt after a restart; their difference is the engine's own cold start.
        """
        return {
            name: [round(p50(times), 4) for times in zip(*pairs, strict=True)]
            for name, pairs in self._probes.items()
        }

    def _start(self, warm_up: Callable[[Side], None]) -> None:
        for side in list(self.contenders.values()):
            side.launch()
        for side in list(self.contenders.values()):
            with self._attempt(side):
                side.wait_up()
        for side in list(self.contenders.values()):
            with self._attempt(side):
                warm_up(side)
                self._note(f"{side.name}: up")

    def _prove(self, side: Side) -> None:
        """Warm all paths up, and check that the daemon's hits are served."""
        length = self._sizes.lengths[LONGEST]
        seed = f"proof {side.name} {time.monotonic()}"
        for attempt in range(_PROOFS):
            prompt = _prompt(f"{seed} {attempt}", length)
            side.complete(prompt)
            side.complete(prompt)
            if not side.caches:
                return
            side.engine.reset()
            if side.complete(prompt).cached == served_tokens(length):
                return
        raise EngineFailed("its cache does not serve what was stored")

    def _probe(self, side: Side) -> None:
        seed = f"probe {side.name} {time.monotonic()}"
        first, second = (
            side.complete(_prompt(f"{seed} {each}", PROBE_TOKENS)).ttft_s for each in range(2)
        )
        self._probes.setdefault(side.name, []).append((first, second))

    def _sample(self, side: Side, state: str, label: str, number: int, prompt: list[int]) -> None:
        answer = side.complete(prompt)
        expected = 0 if state == COLD else served_tokens(len(prompt))
        found = (answer.ttft_s, answer.tokens, answer.cached, expected)
        self.samples.append(Sample(side.name, state, label, number, *found))

    def _turns(self, number: int) -> list[Side]:
        """Return the sides, beginning with another one each time."""
        contenders = list(self.contenders.values())
        first = number % len(contenders)
        return contenders[first:] + contenders[:first]

    @contextlib.contextmanager
    def _attempt(self, side: Side) -> Iterator[None]:
        """Leave out a peer that fails from here on; our engine and the engine alone must work."""
        try:
            yield
        except EngineFailed as failed:
            if side.name in (ALONE, OURS):
                raise EngineFailed(f"{side.name}: {failed}") from None
            self._skip(side.name, str(failed))

    def _skip(self, name: str, reason: str) -> None:
        self.skipped[name] = reason
        self._note(f"{name}: skipped: {reason}")
        side = self.contenders.pop(name, None)
        if side is not None:
            side.stop()


def free_bytes() -> int:
    """Return the memory available without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return int(found["MemAvailable"].split()[0]) * 1024


def _prompt(seed: str, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(_BYTE_VALUES) for _ in range(length)]
