"""Dynamo's own indexer, which routers ask, credits an engine with what its daemon has."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from engines.harness import PYTHON, Engine, arguments, connector, running_engine
from engines.kit import BLOCK_TOKENS, evict, prompt, wait_attached, whole_blocks
from support.daemon import Daemon, free_port, running_daemon, until

from kvhearth_lab.harness import HUNG_S

LENGTH = 1000
WHOLE = LENGTH // BLOCK_TOKENS * BLOCK_TOKENS


class Indexer:
    """``python -m dynamo.indexer`` at a port."""

    def __init__(self, port: int) -> None:
        self._port = port

    def tokens(self, text: Sequence[int], worker: int = 1) -> dict[str, int]:
        """Return how many tokens of a prompt an engine has on each medium or a faster one."""
        body = json.dumps({"model_name": "m", "token_ids": text}).encode()
        url, kind = f"http://127.0.0.1:{self._port}/query", {"content-type": "application/json"}
        request = urllib.request.Request(url, data=body, headers=kind)
        with urllib.request.urlopen(request, timeout=HUNG_S) as answer:
            found = json.load(answer)["instances"].get(str(worker), {})
        return {medium: found.get(medium, 0) for medium in ("gpu", "cpu", "disk")}

    def up(self) -> bool:
        """Whether it answers."""
        try:
            self.tokens([0])
        except urllib.error.URLError:
            return False
        return True

    def knows(self, text: Sequence[int], gpu: int, cpu: int, disk: int) -> None:
        """Wait until it knows of just so many tokens."""
        wanted = {"gpu": gpu, "cpu": cpu, "disk": disk}
        until(lambda: self.tokens(text) == wanted, f"the indexer knows {wanted}")


@contextlib.contextmanager
def running_indexer(logs: Path, events_port: int) -> Iterator[Indexer]:
    """Yield an indexer that follows an engine's events."""
    port, endpoint = free_port(), f"tcp://127.0.0.1:{events_port}"
    words = [str(PYTHON), "-m", "dynamo.indexer", "--port", str(port), "--model-name", "m"]
    words += ["--block-size", str(BLOCK_TOKENS), "--workers", f"1={endpoint}"]
    with (logs / "indexer.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            found = Indexer(port)
            until(found.up, "the indexer answers")
            yield found
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def publishing_engine(logs: Path, daemon: Daemon, events_port: int) -> Iterator[Engine]:
    """Yield an attached engine that publishes events."""
    # vLLM binds an address only if it has a star.
    endpoint = f"tcp://*:{events_port}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    flags = arguments(kv_transfer_config=connector(daemon), kv_events_config=events)
    with running_engine(logs, **flags) as engine:
        wait_attached(daemon)
        yield engine


def wait_heard(engine: Engine, indexer: Indexer) -> None:
    """Wait until an indexer hears an engine."""
    numbers = iter(range(1000))

    def hears() -> bool:
        early = prompt(f"early {next(numbers)}", 2 * BLOCK_TOKENS)
        engine.one(early, tokens=1)
        return indexer.tokens(early)["gpu"] > 0

    until(hears, "it hears the engine")


def test_an_indexer_matches_what_others_stored(logs: Path) -> None:
    """What an engine that has ended stored, before the daemon was killed, matches for another."""
    text, port = prompt("indexed by others", LENGTH), free_port()
    with running_daemon(memory="64MiB") as daemon:
        with publishing_engine(logs, daemon, free_port()) as first:
            first.one(text, tokens=1)
        daemon.kill()
        daemon.start()
        with (
            publishing_engine(logs, daemon, port) as second,
            running_indexer(logs, port) as indexer,
        ):
            wait_heard(second, indexer)
            second.reset()  # routers forget all, and are told again what the daemon has
            indexer.knows(text, 0, WHOLE, WHOLE)


def test_an_indexer_matches_what_the_daemon_has(tmp_path: Path, logs: Path) -> None:
    """In memory beside the engine's own cache, in memory alone, on SSD, and nowhere."""
    text, port = prompt("indexed", LENGTH), free_port()
    options = {"ssd_dirs": [f"{tmp_path}/ssd=256MiB"], "ssd_segment_bytes": "2MiB"}
    with (
        running_daemon(memory="64MiB", **options) as daemon,
        publishing_engine(logs, daemon, port) as engine,
        running_indexer(logs, port) as indexer,
    ):
        wait_heard(engine, indexer)
        engine.one(text, tokens=1)
        indexer.knows(text, WHOLE, WHOLE, WHOLE)
        engine.reset()
        indexer.knows(text, 0, WHOLE, WHOLE)
        until(lambda: daemon.counters()["demoted_blocks"] >= WHOLE // BLOCK_TOKENS, "saved")
        evict(daemon, "memory")
        indexer.knows(text, 0, 0, WHOLE)
        assert engine.one(text)["cached"] == whole_blocks(LENGTH)
        evict(daemon, "all")
        engine.reset()
        indexer.knows(text, 0, 0, 0)
