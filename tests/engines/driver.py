"""One vLLM engine driven by a test; ``harness.Engine`` is the process's other end.

Runs with the interpreter of the engines' environment, forked from a nursery that has vLLM
imported. Each line on the socket is a JSON object with ``id`` and ``do``; each answer has that
``id`` and either the command's return value or ``error``. Commands run concurrently, so that one
can abort, look or kill while another generates.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import json
import os
import re
import signal
import socket
import time
import uuid
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm import SamplingParams
from vllm.distributed.kv_events import KVEventBatch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.metrics.reader import get_metrics_snapshot

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
LINE_BYTES_MAX = 1 << 24


def serve(door: int, log: int, environment: dict[str, str]) -> int:
    """Serve the socket ``door`` until it closes; everything printed goes to ``log``."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    if name := os.environ.get("KVHEARTH_TEST_NETWORK"):
        _enter_network(name)
    # Every process forked from here on, above all the engine's core, dies with its parent.
    os.register_at_fork(after_in_child=_die_with_parent)
    asyncio.run(_serve(socket.socket(fileno=door)))
    return 0


def _hints(actions: dict[str, dict[str, Any]] | None) -> KvHintsEnvelope | None:
    if actions is None:
        return None
    each = [KvHintAction(f"of {kind}", kind, "1", payload) for kind, payload in actions.items()]
    return KvHintsEnvelope("1", uuid.uuid4().hex, each)


def _enter_network(name: str) -> None:
    """Move this thread, and all that it starts, to a network namespace of ``support.networks``."""
    with open(f"/run/netns/{name}", encoding="ascii") as namespace:
        found = ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET)
    assert found == 0, os.strerror(ctypes.get_errno())


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _serve(door: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=door, limit=LINE_BYTES_MAX)
    driver = Driver()
    tasks: set[asyncio.Task[None]] = set()
    try:
        while line := await reader.readline():
            task = asyncio.create_task(_answer(driver, json.loads(line), writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        driver.close()


async def _answer(driver: Driver, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    number = request.pop("id")
    command = request.pop("do")
    try:
        answer = {"id": number, "value": await getattr(driver, command)(**request)}
    except Exception as error:  # noqa: BLE001 - the test gets to see it
        answer = {"id": number, "error": f"{type(error).__name__}: {error}"}
    writer.write(json.dumps(answer).encode() + b"\n")
    await writer.drain()


def taken(found: dict[str, Any], output: Any) -> dict[str, Any]:
    """Add an output of vLLM to a result, and return that."""
    [best] = output.outputs
    found["tokens"] = list(best.token_ids)
    if best.logprobs is not None:
        pairs = zip(best.token_ids, best.logprobs, strict=True)
        found["logprobs"] = [table[token].logprob for token, table in pairs]
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = [
            None if table is None else max(each.logprob for each in table.values())
            for table in output.prompt_logprobs
        ]
    found["cached"] = output.num_cached_tokens or found["cached"]
    found["finish"] = best.finish_reason
    if output.kv_transfer_params is not None:
        found["transfer"] = output.kv_transfer_params
    return found


class Driver:
    """The commands; each returns a value that JSON can carry."""

    def __init__(self) -> None:
        self._engine: AsyncLLM | None = None
        self._loras: dict[str, LoRARequest] = {}
        self._events: zmq.asyncio.Socket | None = None
        self._published: list[dict[str, Any]] = []

    async def load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Start the engine from ``AsyncEngineArgs``; return its sizes.

        With one rank the worker lives in the core's process, which is forked: a third of the
        time that three interpreters take.
        """
        started = time.monotonic()
        alone = (
            arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
            == 1
        )
        if alone:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            arguments = {**arguments, "distributed_executor_backend": "uni"}
        config = AsyncEngineArgs(**arguments).create_engine_config()
        if alone:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self._engine = AsyncLLM(
            vllm_config=config, executor_class=Executor.get_class(config), log_stats=True
        )
        cache = config.cache_config
        return {
            "seconds": time.monotonic() - started,
            "blocks": cache.num_gpu_blocks,
            "block_tokens": cache.block_size,
            "version": importlib.metadata.version("vllm"),
        }

    async def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run requests together; return their results (see ``_one``)."""
        return list(await asyncio.gather(*(self._one(**each) for each in requests)))

    async def _one(
        self,
        *,
        prompt: list[int],
        tokens: int = 12,
        delay_s: float = 0.0,
        abort_after_s: float | None = None,
        abort_after_tokens: int | None = None,
        salt: str | None = None,
        lora: str | None = None,
        transfer: dict[str, Any] | None = None,
        actions: dict[str, dict[str, Any]] | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run one greedy request of token ids, optionally aborted on its way. ``actions`` are an
        orchestrator's hints: by type their payload.
        """
        await asyncio.sleep(delay_s)
        found: dict[str, Any] = {"tokens": [], "logprobs": [], "cached": 0, "finish": "abort"}
        name = uuid.uuid4().hex

        async def follow() -> None:
            started = time.monotonic()
            options = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
            options |= sampling or {}
            if transfer is not None:
                options["extra_args"] = {"kv_transfer_params": transfer}
            text: dict[str, Any] = {"prompt_token_ids": prompt}
            if salt is not None:
                text["cache_salt"] = salt
            sampled, hints = SamplingParams(**options), _hints(actions)
            async for output in self.engine.generate(
                text, sampled, name, lora_request=self._lora(lora), kv_hints=hints
            ):
                found.setdefault("ttft_s", time.monotonic() - started)
                taken(found, output)
                if abort_after_tokens is not None and len(found["tokens"]) >= abort_after_tokens:
                    found["finish"] = "abort"
                    return

        try:
            async with asyncio.timeout(abort_after_s):
                await follow()
        except TimeoutError:
            found["finish"] = "abort"
        return found

    async def reset(self, external: bool = False) -> bool:
        """Empty the engine's own prefix cache; False if any block is still held."""
        return bool(await self.engine.reset_prefix_cache(reset_connector=external))

    async def metrics(self) -> dict[str, float]:
        """Return counters and gauges by Prometheus name, summed over labels."""
        found: dict[str, float] = {}
        for each in get_metrics_snapshot():
            if hasattr(each, "value"):
                found[each.name] = found.get(each.name, 0.0) + each.value
        return found

    async def labelled(self, name: str, label: str) -> dict[str, float]:
        """Return counters and gauges named ``name``, by the value of ``label``."""
        return {
            each.labels[label]: each.value
            for each in get_metrics_snapshot()
            if each.name == name and label in each.labels
        }

    async def subscribe(self, endpoint: str) -> None:
        """Subscribe to the engine's KV events at a ZMQ endpoint, as a router does."""
        self._events = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, b"")
        self._events.connect(endpoint)
        asyncio.create_task(self._listen(self._events))  # noqa: RUF006 - ends with the process

    async def _listen(self, events: zmq.asyncio.Socket) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while True:
            _, _, payload = await events.recv_multipart()
            for event in decoder.decode(payload).events:
                self._published.append(
                    {"event": type(event).__name__, **msgspec.structs.asdict(event)}
                )

    async def published(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        found, self._published = self._published, []
        return found

    async def healthy(self) -> bool:
        """Raise if the engine's core is dead."""
        await self.engine.check_health()
        return True

    @property
    def engine(self) -> AsyncLLM:
        """The engine made by ``load``."""
        assert self._engine is not None, "load first"
        return self._engine

    def close(self) -> None:
        """End the engine and its processes."""
        if self._engine is not None:
            self._engine.shutdown(timeout=5)

    def _lora(self, path: str | None) -> LoRARequest | None:
        if path is None:
            return None
        if path not in self._loras:
            name = re.sub(r"\W", "_", path)
            self._loras[path] = LoRARequest(name, len(self._loras) + 1, path)
        return self._loras[path]
