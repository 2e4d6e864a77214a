"""A ``vllm serve`` process, and HTTP requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth_lab.bench.peers.adapter import reason_of
from kvhearth_server.config.load import ENV_PREFIX

_END_S = 30.0
_KILL_S = 15.0
_SESSION_FIELD = 3
"""Index of the session in /proc/PID/stat, counted after the name."""


def parse_session(stat: str) -> int | None:
    """Return the session from ``/proc/PID/stat``; None for a process that has ended and only waits
    to be reaped. A process may have any name, brackets included.
    """
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[_SESSION_FIELD])


def session_pids(session: int) -> list[int]:
    """Return all live processes of a session."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if parse_session((path / "stat").read_text(encoding="utf-8")) == session:
                found.append(int(path.name))
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """Return the processor time of all live threads."""
    nanoseconds = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    nanoseconds += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
    return nanoseconds / 1e9


class ProcessTree:
    """A process in a session of its own, so that all its descendants are found and ended.

    Args:
        log_path: file for its output.
        command, environment: as for Popen.
    """

    def __init__(
        self, log_path: Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def ended(self) -> int | None:
        """Exit code of the first process, None while it runs."""
        return self._process.poll()

    def cpu_s(self) -> float:
        """Return the processor time of all its live threads."""
        return cpu_s(session_pids(self._process.pid))

    def said(self) -> str:
        """Return its output."""
        return self._log_path.read_text(errors="replace", encoding="utf-8")

    def end(self) -> None:
        """Stop it; kill remaining processes after a while."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_KILL_S)
        until = time.monotonic() + _KILL_S
        while session_pids(self._process.pid) and time.monotonic() < until:
            time.sleep(0.02)


_EVENT_BYTES_MAX = 1 << 20
_DONE = "[DONE]"
_SHOWN_CHARS = 200


class EngineFailed(Exception):
    """An engine or a peer's daemon cannot be measured; the text gives the reason in one line."""


class EventStream:
    """Splits bytes from a socket into events."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        self._held_bytes = 0

    def feed(self, part: bytes) -> Iterator[str]:
        """Yield the data of each event that ``part`` completes.

        Raises:
            EngineFailed: an event has more than 1 MiB, or is no UTF-8.
        """
        *lines, self._rest = (self._rest + part).split(b"\n")
        if self._held_bytes + len(self._rest) > _EVENT_BYTES_MAX:
            raise EngineFailed("the engine sends an event without end")
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._lines.append(text[5:].removeprefix(b" "))
                self._held_bytes += len(text)
            elif not text and self._lines:
                data = b"\n".join(self._lines)
                self._lines, self._held_bytes = [], 0
                try:
                    yield data.decode()
                except UnicodeDecodeError:
                    raise EngineFailed("the engine sends an event that is no UTF-8") from None


@dataclass(frozen=True)
class Answer:
    """A completion.

    Attributes:
        ttft_s: time from the request to the first token.
        tokens: ids of all tokens.
        cached: prompt tokens that the engine did not compute.
    """

    ttft_s: float
    tokens: tuple[int, ...]
    cached: int


class Completion:
    """Gathers the events of one streamed completion.

    Args:
        started: time at which the request was sent, seconds of any clock.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._ttft_s: float | None = None
        self._tokens: list[int] = []
        self._cached: int | None = None
        self.done = False

    def take(self, data: str, now: float) -> None:
        """Add one event that arrived at ``now``.

        Raises:
            EngineFailed: it is no event of a completion.
        """
        if data == _DONE:
            self.done = True
            return
        event = _object(data)
        if "error" in event:
            raise EngineFailed(f"the engine answers: {str(event['error'])[:_SHOWN_CHARS]}")
        for choice in _list(event.get("choices"), data):
            ids = _list(choice.get("token_ids") if isinstance(choice, dict) else None, data)
            if ids and self._ttft_s is None:
                self._ttft_s = now - self._started
            self._tokens += [int(each) for each in ids]
        usage = event.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details") or {}
            self._cached = int(details.get("cached_tokens") or 0)

    def answer(self, tokens: int) -> Answer:
        """Return the whole completion after its end.

        Raises:
            EngineFailed: it is incomplete; ``tokens`` were requested.
        """
        if self._ttft_s is None or len(self._tokens) != tokens or not self.done:
            raise EngineFailed(f"the engine sent {len(self._tokens)} tokens instead of {tokens}")
        if self._cached is None:
            raise EngineFailed("the engine does not say how many tokens were cached")
        return Answer(self._ttft_s, tuple(self._tokens), self._cached)


def _object(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise EngineFailed(f"the engine sends no JSON object: {data[:_SHOWN_CHARS]!r}")
    return event


def _list(value: object, data: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise EngineFailed(f"the engine sends no completion: {data[:_SHOWN_CHARS]!r}")
    return value


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
    """Return the variables of every engine. vLLM leaves a core free by itself, and another one with
    a connector; here all get the same number of threads, and no thread is pinned to a core.
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
    """Return a port of 127.0.0.1 that is free at the moment."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


@dataclass(frozen=True)
class Launch:
    """Command line of an engine.

    Attributes:
        python: interpreter of its environment.
        model: folder of the model.
        dtype: dtype of weights and KV.
        threads: compute threads.
        transfer: its ``--kv-transfer-config``, or None.
        switches: additional flags without a value.
    """

    python: Path
    model: Path
    dtype: str
    threads: int
    transfer: Mapping[str, object] | None = None
    switches: Sequence[str] = ()

    def command(self, port: int) -> list[str]:
        """Return the words of its command line."""
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
    """A started server; ``wait_up`` waits for it.

    Args:
        launch: its command line.
        log_path: file for its output.
    """

    def __init__(self, launch: Launch, log_path: Path) -> None:
        self.port = free_port()
        self.family = ProcessTree(log_path, launch.command(self.port), environment(launch.threads))

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
        """Return a greedy, streamed completion of ``tokens``.

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
        """Return totals of ``/metrics`` whose names begin with ``prefix``, summed over labels."""
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
        """Return the last line with an error; the very last line names only the process that
        noticed it.
        """
        lines = [line for line in self.family.said().splitlines() if "Error" in line]
        return reason_of("\n".join(lines) or self.family.said())


def parse_counters(text: str, prefix: str) -> dict[str, float]:
    """Return samples of Prometheus' text format whose names begin with ``prefix`` and end with
    ``_total``, summed over labels, with both parts removed from the names.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        bare = name.partition("{")[0]
        if bare.startswith(prefix) and bare.endswith("_total"):
            short = bare.removeprefix(prefix).removesuffix("_total")
            found[short] = found.get(short, 0.0) + float(value)
    return found
