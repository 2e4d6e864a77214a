"""vLLM's own scheduler with faked workers: a line of JSON in, a line of JSON out.

    python rig.py FOLDER

Runs in the engine's interpreter, so it imports only vLLM and the client. The scheduler, its KV
cache manager and the connector's half are vLLM's and KVHearth's own. The workers are faked: they
copy nothing, sample the same token always, and report a step's copies with the next step's output.

Requests have an ``op``: ``prepare`` makes the scheduler, ``fill`` adds requests and runs them until
all decode, ``decode`` runs steps, ``clear`` ends all requests. ``close`` ends the process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvhearth.client import KVClient, connect
from kvhearth.connectors.core.step_metadata import Handshake, RankStored, StepMeta, WorkerReport
from kvhearth.connectors.vllm.identity import process_group_of
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.model import checksum_of
from kvhearth.wire.handshake import Run

BLOCK_TOKENS = 16
HEAD_SIZE = 64
PAGE_BYTES = 2 * BLOCK_TOKENS * HEAD_SIZE * 2
"""K and V of a block: one layer, one head, two bytes a number. The scheduler's work does not depend
on it.
"""
STEP_TOKENS = 8192
ATTACH_S = 60.0
PHASE_S = 120.0
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEAD_SIZE,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "head_dim": HEAD_SIZE,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}
KVHEARTH, OFFLOADING = "kvhearth", "offloading"


@dataclass(frozen=True)
class Config:
    """Parameters of ``prepare``.

    Attributes:
        side: ``kvhearth``, ``offloading`` (vLLM's own connector) or ``none``.
        url: the daemon's, for ``kvhearth``.
        running: requests that run at the same time.
        pages: pages of the engine's KV cache.
        memory_bytes: memory of ``offloading``.
        forward_s: time that the faked workers take for a step with tokens.
    """

    side: str
    url: str
    running: int
    pages: int
    memory_bytes: int
    forward_s: float


class Clock:
    """Processor time of the scheduler's thread inside a connector's methods, and its answers."""

    ADMISSION = (
        "on_new_request",
        "get_num_new_matched_tokens",
        "get_external_cache_hit_sources",
        "update_state_after_alloc",
    )
    STEP = (
        "build_connector_meta",
        "update_connector_output",
        "request_finished_all_groups",
        "has_pending_block_frees",
        "get_kv_connector_stats",
        "take_events",
    )

    def __init__(self, connector: Any) -> None:
        self._spent_s = self._admission_s = 0.0
        self._deferred = 0
        for name in (*self.ADMISSION, *self.STEP):
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        asks, admits = name == "get_num_new_matched_tokens", name in self.ADMISSION

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            answer = method(*args, **kwargs)
            spent = time.thread_time() - start
            self._spent_s += spent
            if admits:
                self._admission_s += spent
            if asks and answer[0] is None:
                self._deferred += 1
            return answer

        return call

    def take(self) -> tuple[float, float, int]:
        """Return, since the last call, the seconds of all methods, those of ``ADMISSION``, and the
        answers that asked vLLM to come again.
        """
        taken = self._spent_s, self._admission_s, self._deferred
        self._spent_s, self._admission_s, self._deferred = 0.0, 0.0, 0
        return taken


class Workers:
    """Workers that copy nothing and report each step's copies one step later."""

    def __init__(self, forward_s: float) -> None:
        self._forward_s = forward_s
        self._sums = np.frombuffer(checksum_of(bytes(PAGE_BYTES)), np.uint8)
        self._output = KVConnectorOutput()
        self.stored_blocks = 0
        self.loads = 0

    def run(self, output: Any) -> ModelRunnerOutput:
        """Return a step's output: one token for each request whose known tokens are computed."""
        names = list(output.num_scheduled_tokens)
        reported, self._output = self._output, self._copied(output.kv_connector_metadata)
        if self._forward_s and names:
            time.sleep(self._forward_s)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            kv_connector_output=reported,
        )

    def _copied(self, meta: Any) -> KVConnectorOutput:
        if isinstance(meta, StepMeta):
            return self._copied_by_us(meta)
        if meta is None:
            return KVConnectorOutput()
        jobs = [*meta.store_jobs, *meta.load_jobs]
        self.stored_blocks += len(meta.store_jobs)
        self.loads += len(meta.load_jobs)
        loaded = {job.req_id for job in meta.load_jobs.values()}
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1)) if jobs else None
        return KVConnectorOutput(finished_recving=loaded or None, kv_connector_worker_meta=done)

    def _copied_by_us(self, meta: StepMeta) -> KVConnectorOutput:
        report = WorkerReport()
        for job in meta.stores:
            report.stored_ranks[job.number] = 1
            outcomes = report.stores.setdefault(job.number, [])
            for group, move in job.moves.items():
                count = len(move.pages)
                self.stored_blocks += count
                ok, sums = np.ones(count, np.bool_), np.tile(self._sums, (count, 1))
                outcomes.append((group, RankStored(0, np.arange(count), ok, sums)))
        loaded = {job.request_id for job in meta.loads}
        self.loads += len(meta.loads)
        failed = set(meta.lost)
        return KVConnectorOutput(
            finished_recving=(loaded | failed) or None,
            failed_recving=failed,
            kv_connector_worker_meta=None if report.empty else report,
        )


@dataclass
class Steps:
    """What a series of steps took.

    Attributes:
        cpu_s: processor time of the scheduler's thread in each step.
        connector_s: the part of it inside the connector.
        admission_s: the part of that until the loads of admitted requests are planned.
        deferred: answers of the connector that asked vLLM to come again.
    """

    cpu_s: list[float] = field(default_factory=list)
    connector_s: list[float] = field(default_factory=list)
    admission_s: list[float] = field(default_factory=list)
    deferred: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the answer."""
        return vars(self)


class Rig:
    """A scheduler and its faked workers."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._member: KVClient | None = None
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        vllm_config = self._vllm_config(folder)
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.bfloat16
        )
        self._scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(
                num_blocks=config.pages,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            log_stats=True,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK_TOKENS,
        )
        self._workers = Workers(config.forward_s)
        connector = self._scheduler.connector
        self._clock = None if connector is None else Clock(connector)
        if config.side == KVHEARTH:
            self._attach(vllm_config)
        gc.collect()
        gc.freeze()

    def _vllm_config(self, folder: Path) -> VllmConfig:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        model_config = ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="bfloat16")
        cache_config = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
        made = VllmConfig(
            model_config=model_config,
            cache_config=cache_config,
            scheduler_config=SchedulerConfig(
                max_num_seqs=self._config.running,
                max_num_batched_tokens=STEP_TOKENS,
                max_model_len=model_config.max_model_len,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=self._transfer(),
        )
        made.cache_config.block_size = BLOCK_TOKENS
        made.cache_config.num_gpu_blocks = self._config.pages
        return made

    def _transfer(self) -> KVTransferConfig | None:
        config = self._config
        if config.side == KVHEARTH:
            return KVTransferConfig(
                kv_connector="KVHearthConnector",
                kv_connector_module_path="kvhearth.connectors.vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                # A busy machine must not turn a hit into a miss: then it would not be measured.
                kv_connector_extra_config={
                    "url": config.url,
                    "policy": "always",
                    "lookup_wait_ms": 10_000,
                },
            )
        if config.side == OFFLOADING:
            return KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config={
                    "cpu_bytes_to_use": config.memory_bytes,
                    "offload_prompt_only": False,
                },
            )
        return None

    def _attach(self, vllm_config: VllmConfig) -> None:
        """Attach the scheduler's half and its only rank."""
        contract = Contract(
            model="bench",
            revision="1",
            kv_dtype="bfloat16",
            groups=(GroupSpec(GroupKind.FULL, BLOCK_TOKENS, PAGE_BYTES),),
        )
        connector = self._scheduler.connector
        handshake = Handshake(contract.to_json(), 1, (0,))
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        self._member = connect(
            self._config.url,
            contract,
            engine_id=str(vllm_config.kv_transfer_config.engine_id),
            scheduler=False,
            run=Run(process_group_of(vllm_config)),
        )
        end = time.monotonic() + ATTACH_S
        while not self._stores():
            if time.monotonic() > end:
                raise RuntimeError("cannot attach, or got no slots")

    def _stores(self) -> bool:
        """Whether a block is stored: the scheduler's half is attached and has empty slots."""
        self.fill(2 * BLOCK_TOKENS, 1, each_step=1)
        return bool(self.clear()["stored_blocks"])

    def fill(self, prompt_tokens: int, count: int, *, each_step: int) -> Steps:
        """Add requests, ``each_step`` of them a step, and step until all decode.

        Prompts depend on the number of the request alone, so that the same call finds its prompts
        again. Their lengths differ by up to a block: blocks become full in turns.
        """
        found = Steps()
        if self._clock is not None:
            self._clock.take()
        names = [f"{prompt_tokens}-{number}" for number in range(count)]
        todo = list(enumerate(names))
        end = time.monotonic() + PHASE_S
        while todo or not self._all_decode():
            spent = 0.0
            for number, name in todo[:each_step]:
                request = self._request(name, prompt_tokens, number)
                start = time.thread_time()
                self._scheduler.add_request(request)
                spent += time.thread_time() - start
            todo = todo[each_step:]
            self._step(found, spent)
            if time.monotonic() > end:
                raise RuntimeError("requests were never computed")
        return found

    def _request(self, name: str, prompt_tokens: int, number: int) -> Request:
        tokens = [number] * BLOCK_TOKENS + [5] * (prompt_tokens - BLOCK_TOKENS)
        tokens += [5] * (2 * number % BLOCK_TOKENS)
        options = SamplingParams(max_tokens=4096, ignore_eos=True)
        return Request(name, tokens, options, None, block_hasher=self._hasher)

    def _all_decode(self) -> bool:
        return all(
            each.num_computed_tokens >= each.num_prompt_tokens
            for each in self._scheduler.requests.values()
        )

    def decode(self, steps: int) -> Steps:
        """Run steps of the running requests."""
        found = Steps()
        if self._clock is not None:
            self._clock.take()
        for _ in range(steps):
            self._step(found)
        return found

    def _step(self, found: Steps, spent: float = 0.0) -> None:
        start = time.thread_time()
        output = self._scheduler.schedule()
        between = time.thread_time()
        made = self._workers.run(output)
        resumed = time.thread_time()
        self._scheduler.update_from_output(output, made)
        found.cpu_s.append(spent + between - start + time.thread_time() - resumed)
        if self._clock is not None:
            seconds, admission_s, deferred = self._clock.take()
            found.connector_s.append(seconds)
            found.admission_s.append(admission_s)
            found.deferred += deferred

    def clear(self) -> dict[str, Any]:
        """End all requests and empty the engine's own cache; wait for the stores."""
        names = list(self._scheduler.requests)
        self._scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        connector = self._scheduler.connector
        end = time.monotonic() + PHASE_S
        while True:
            self._step(Steps())
            pending = connector is not None and connector.has_pending_push_work()
            if not pending and self._scheduler.reset_prefix_cache():
                break
            if time.monotonic() > end:
                raise RuntimeError("stores never end")
            time.sleep(0.001)
        stored, loads = self._workers.stored_blocks, self._workers.loads
        self._workers.stored_blocks = self._workers.loads = 0
        gc.collect()
        return {"stored_blocks": stored, "loads": loads}

    def close(self) -> None:
        """Detach."""
        self._scheduler.shutdown()
        if self._member is not None:
            self._member.close()


def serve(folder: Path, requests: Any, answer: Callable[[Any], None]) -> None:
    """Answer requests until ``close`` or their end."""
    rig: Rig | None = None
    for line in requests:
        asked = json.loads(line)
        op = asked.pop("op")
        if op == "prepare":
            rig = Rig(Config(**asked), folder)
            answer({"ready": True})
        elif op == "close" or rig is None:
            break
        else:
            found = getattr(rig, op)(**asked)
            answer(found.as_json() if isinstance(found, Steps) else found)
    if rig is not None:
        rig.close()
    answer({})


def main() -> None:
    """Run with the folder from the command line."""
    # vLLM logs to stdout; the answers must be alone there.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1")
    serve(Path(sys.argv[1]), sys.stdin, answer)


if __name__ == "__main__":
    main()
