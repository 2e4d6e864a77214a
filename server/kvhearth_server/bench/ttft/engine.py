"""One ``vllm serve``, and the questions that are put to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvhearth_server.bench.peers.adapter import reason_of
from kvhearth_server.bench.ttft.processes import Family
from kvhearth_server.bench.ttft.sse import Answer, Completion, EngineFailed, EventStream
from kvhearth_server.config import ENV_PREFIX

UP_S = 300.0
ANSWER_S = 180.0
RESET_S = 30.0
KV_BYTES = 512 << 20
_PART_BYTES = 1 << 16
_NAME = "bench"
_OUTPUT_OPTIONS = {
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
}
FLAGS = {
    "max-model-len": "8192",
    "max-num-batched-tokens": "2048",
    "max-num-seqs": "4",
    "kv-cache-memory-bytes": str(KV_BYTES),
    "block-size": "128",
    "seed": "0",
}
SWITCHES = (
    "enforce-eager",
    "enable-prefix-caching",
    "enable-prompt-tokens-details",
    "disable-uvicorn-access-log",
)


def environment(threads: int) -> dict[str, str]:
    """Variables of every engine. vLLM leaves a core free by itself, and another one with a
    connector: all get the same number of threads, and no thread is tied to a core.
    """
    dropped = ("PYTHONPATH", "PYTHONHASHSEED")
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(ENV_PREFIX) and name not in dropped
    }
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
    }


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


@dataclass(frozen=True)
class Launch:
    """How an engine is started.

    Attributes:
        python: of its environment.
        model: a folder.
        dtype: of the weights and of the KV.
        threads: it computes with.
        transfer: its ``--kv-transfer-config``, None for none.
        switches: more flags without a value.
    """

    python: Path
    model: Path
    dtype: str
    threads: int
    transfer: Mapping[str, object] | None = None
    switches: Sequence[str] = ()

    def command(self, port: int) -> list[str]:
        """The words of its command line."""
        words = [str(self.python), "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)]
        words += ["--host", "127.0.0.1", "--port", str(port)]
        words += ["--served-model-name", _NAME, "--dtype", self.dtype]
        for name, value in FLAGS.items():
            words += [f"--{name}", value]
        words += [f"--{name}" for name in (*SWITCHES, *self.switches)]
        if self.transfer is not None:
            words += ["--kv-transfer-config", json.dumps(self.transfer)]
        return words


class Engine:
    """A server that was started; ``wait_up`` waits for it.

    Args:
        launch: how.
        log_path: for its output.
    """

    def __init__(self, launch: Launch, log_path: Path) -> None:
        self.port = free_port()
        self.family = Family(log_path, launch.command(self.port), environment(launch.threads))

    def wait_up(self) -> None:
        """Wait until it answers.

        Raises:
            EngineFailed: it ended, or it takes too long.
        """
        end = time.monotonic() + UP_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._call("GET", "/health")[0] == 200:
                    return
            if self.family.ended is not None:
                raise EngineFailed(f"the engine ended: {self._complaint()}")
            if time.monotonic() > end:
                raise EngineFailed(f"the engine is not up after {UP_S:.0f} s")
            time.sleep(0.2)

    def complete(self, prompt: Sequence[int], tokens: int) -> Answer:
        """A greedy completion of ``tokens``, streamed.

        Raises:
            EngineFailed: there is none.
        """
        body = {"model": _NAME, "prompt": list(prompt), "max_tokens": tokens, **_OUTPUT_OPTIONS}
        text, headers = json.dumps(body), {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            with contextlib.closing(connection):
                connection.connect()
                made, stream = Completion(time.perf_counter()), EventStream()
                connection.request("POST", "/v1/completions", text, headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise EngineFailed(f"the engine answers {answer.status}")
                while not made.done and (part := answer.read1(_PART_BYTES)):
                    for data in stream.feed(part):
                        made.take(data, time.perf_counter())
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"the engine does not answer: {error!r}") from None
        return made.answer(tokens)

    def reset(self) -> None:
        """Empty its own prefix cache, and nothing else.

        Raises:
            EngineFailed: it does not.
        """
        end = time.monotonic() + RESET_S
        try:
            while self._call("POST", "/reset_prefix_cache")[0] != 200:
                if time.monotonic() > end:
                    raise EngineFailed("the engine does not empty its prefix cache")
                time.sleep(0.1)
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"the engine does not answer: {error!r}") from None

    def counters(self, prefix: str) -> dict[str, float]:
        """Totals of ``/metrics`` whose names begin with ``prefix``, summed over labels."""
        try:
            text = self._call("GET", "/metrics")[1]
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"the engine does not answer: {error!r}") from None
        return parse_counters(text, prefix)

    def _call(self, method: str, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=RESET_S)
        with contextlib.closing(connection):
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")

    def _complaint(self) -> str:
        """The last error that it named; its last line names only who noticed."""
        lines = [line for line in self.family.said().splitlines() if "Error" in line]
        return reason_of("\n".join(lines) or self.family.said())


def parse_counters(text: str, prefix: str) -> dict[str, float]:
    """Samples of Prometheus' text format whose names begin with ``prefix`` and end with
    ``_total``, summed over labels; names without both.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        bare = name.partition("{")[0]
        if bare.startswith(prefix) and bare.endswith("_total"):
            short = bare.removeprefix(prefix).removesuffix("_total")
            found[short] = found.get(short, 0.0) + float(value)
    return found
