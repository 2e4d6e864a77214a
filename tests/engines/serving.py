"""``vllm serve`` as a user starts it, and a client of its HTTP interface."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines.harness import ENVIRONMENT, MIB, PYTHON, Logged, end_tree, model, told
from support.daemon import Daemon, free_port

from kvhearth_lab.harness import HUNG_S

UP_S = ANSWER_S = HUNG_S
NAME = "m"


class Server(Logged):
    """One ``vllm serve`` process.

    Args:
        folder: the folder for its log.
        environment: variables in addition to those of every engine.
        options: command line options; dictionaries become JSON, True a bare flag.
    """

    starts = 0

    def __init__(
        self, folder: Path, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        Server.starts += 1
        self.port = free_port()
        self.log_path = folder / f"server-{Server.starts}.log"
        flags = ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", NAME]
        name_or_path = options.pop("model")
        for name, value in options.items():
            flags.append("--" + name.replace("_", "-"))
            if value is not True:
                flags.append(json.dumps(value) if isinstance(value, dict) else str(value))
        words = [str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", name_or_path, *flags]
        variables = {n: v for n, v in os.environ.items() if not n.startswith("KVHEARTH_")}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**variables, **ENVIRONMENT, **(environment or {})},
            )
        try:
            self._wait_up()
        except BaseException:
            self.kill()
            raise

    def _wait_up(self) -> None:
        end = time.monotonic() + UP_S
        while True:
            with contextlib.suppress(OSError):
                if self.get("/health")[0] == 200:
                    return
            assert self.process.poll() is None, f"the server ended\n{self.log_tail()}"
            assert time.monotonic() < end, f"the server does not come up\n{self.log_tail()}"
            time.sleep(0.2)

    def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        """Return status and body of a request without a body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def complete(self, prompt: list[int], tokens: int = 12, **more: object) -> dict[str, Any]:
        """Stream a greedy completion: ``ttft_s``, ``tokens``, ``text``, ``cached``. ``more`` is
        sent, too.
        """
        body = {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **more,
        }
        found: dict[str, Any] = {"tokens": [], "text": ""}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            started = time.monotonic()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read().decode()
            for line in answer:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                self._take(found, json.loads(line[6:]), started)
        return found

    @staticmethod
    def _take(found: dict[str, Any], event: dict[str, Any], started: float) -> None:
        for choice in event["choices"]:
            found.setdefault("ttft_s", time.monotonic() - started)
            found["text"] += choice["text"]
            found["tokens"] += choice.get("token_ids") or []
        if event.get("usage"):
            details = event["usage"].get("prompt_tokens_details") or {}
            found["cached"] = details.get("cached_tokens") or 0

    def metrics(self) -> dict[str, float]:
        """Return its ``/metrics`` by name with labels."""
        status, text = self.get("/metrics")
        assert status == 200, text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, value in lines}

    def reset(self, external: bool = False) -> None:
        """Call ``/reset_prefix_cache``; fail if blocks stay held."""
        path = f"/reset_prefix_cache?reset_external={str(external).lower()}"
        end = time.monotonic() + HUNG_S
        while True:
            status, text = self.get(path, "POST")
            if status == 200:
                return
            assert time.monotonic() < end, f"{status} {text}\n{self.log_tail()}"
            time.sleep(0.1)

    def stop(self) -> None:
        """Send SIGTERM, as a supervisor would; kill -9 after a while."""
        self.process.terminate()
        try:
            self.process.wait(HUNG_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill -9 all its processes."""
        end_tree(self.process.pid)
        self.process.wait(HUNG_S)


def served(daemon: Daemon, transfer: dict[str, Any], **over: object) -> dict[str, Any]:
    """Return the options of a server of the tiny model beside a daemon, with that flag. The model
    computes faster than it loads: it is told to load every hit.
    """
    extra = {"url": daemon.url(), "policy": "always"}
    return {
        "model": str(model("tiny")),
        "dtype": "float32",
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 128 * MIB,
        "enforce_eager": True,
        "enable_prompt_tokens_details": True,
        "kv_transfer_config": {"kv_connector_extra_config": extra, **transfer},
        **over,
    }


@contextlib.contextmanager
def running_server(folder: Path, **options: Any) -> Iterator[Server]:
    """A running server; its log is printed if the block fails."""
    server = Server(folder, **options)
    with told(server):
        try:
            yield server
        finally:
            server.kill()
