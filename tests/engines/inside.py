"""Questions about the connector that only vLLM's own classes can answer, without an engine.

Runs with the interpreter of the engines' environment, forked from the nursery; ``harness.inside``
is the process's other end.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import ensure_kv_transfer_initialized, get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.utils import allocate_kv_cache

from kvhearth.connectors.core.settings import parse_settings
from kvhearth.connectors.core.step_metadata import LoadJob, Move, StepMeta
from kvhearth.connectors.core.worker import WorkerConnector
from kvhearth.connectors.vllm.adapter import VllmSettings, describe
from kvhearth.connectors.vllm.connector import KVHearthConnector
from kvhearth.copiers.base import Done
from kvhearth.model import EXTENT_DTYPE

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ImportError:  # before 0.33, where the groups are no argument
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    get_global_kv_cache_groups = None

LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
KV_BYTES = 64 << 20
READY_S = 300.0


def answer(
    door: int, log: int, function: str, environment: dict[str, str], given: dict[str, Any]
) -> int:
    """Call ``[module:]function``, else one of the functions below; its result goes to ``door``, its
    output to ``log``.
    """
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    with socket.socket(fileno=door) as reply:
        module, _, name = function.rpartition(":")
        called = getattr(importlib.import_module(module or __name__), name)
        reply.sendall(json.dumps(called(**given)).encode())
    return 0


def layouts(engine: dict[str, Any], transfers: list[dict[str, Any]]) -> list[str | None]:
    """Return the layout that vLLM would demand on CUDA, for each ``--kv-transfer-config``; an
    error's text where it raises.
    """
    config = AsyncEngineArgs(**engine).create_engine_config()
    config.device_config.device_type = "cuda"
    found: list[str | None] = []
    for transfer in transfers:
        config.kv_transfer_config = KVTransferConfig(**transfer)
        try:
            found.append(get_kv_connector_cache_layout(config))
        except ValueError as error:
            found.append(f"ValueError: {error}")
    return found


def children(engine: dict[str, Any], transfers: list[dict[str, Any]]) -> list[list[str]]:
    """Return the names of the connectors that ``MultiConnector`` would make; make ours."""
    config = AsyncEngineArgs(**engine).create_engine_config()
    found = []
    for transfer in transfers:
        config.kv_transfer_config = KVTransferConfig(**transfer)
        pairs = MultiConnector._get_connector_classes_and_configs(config)
        found.append([kind.__name__ for kind, _ in pairs])
        for kind, given in pairs:
            if kind is KVHearthConnector:
                kind(given, KVConnectorRole.SCHEDULER, None)
    return found


def may_sleep(transfers: list[dict[str, Any]]) -> list[bool]:
    """Return whether engines with these connectors may sleep; before 0.33 vLLM does not ask."""
    load_general_plugins()
    configs = [KVTransferConfig(**transfer) for transfer in transfers]
    kinds = [KVConnectorFactory.get_connector_class(config) for config in configs]
    return [
        getattr(kind, "supports_sleep_mode", lambda config: True)(config)
        for kind, config in zip(kinds, configs, strict=True)
    ]


def served(words: list[str]) -> dict[str, str]:
    """Return the connector of ``vllm serve`` with these words, and the daemon's address that it
    uses.
    """
    parser = make_arg_parser(FlexibleArgumentParser())
    parsed = parser.parse_args(["--model", words[0], *words[1:]])
    transfer = AsyncEngineArgs.from_cli_args(parsed).kv_transfer_config
    url = parse_settings(VllmSettings, transfer.kv_connector_extra_config).url
    return {"connector": transfer.kv_connector, "url": url}


class StuckCopier:
    """A copier whose copies never end; ``waits`` holds the timeouts of the waits for it."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def load(self, boot_id: str, extents: Any, pages: Any, *, after: object = None) -> int:
        """Begin a copy."""
        return 1

    def wait(self, ticket: int, timeout_s: float) -> Done | None:
        """Return None: the copy has not ended."""
        self.waits.append(timeout_s)
        return None

    def close(self, deadline_s: float) -> bool:
        """Return True: nothing runs."""
        return True


def idle_waits(engine: dict[str, Any]) -> dict[str, list[float]]:
    """Return how long steps of vLLM's second model runner wait for a load that is under way: the
    step that begins it, another step with tokens, and one without; each by the calls that the
    runner makes.
    """
    config = AsyncEngineArgs(**engine).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    with set_current_vllm_config(config):
        copier = StuckCopier()
        runner, worker = _runner(config, copier)
        found = {name: _waits(runner, worker, copier, name) for name in ("begun", "busy", "idle")}
        worker.shutdown()
    return found


def _runner(config: VllmConfig, copier: StuckCopier) -> tuple[ActiveKVConnector, WorkerConnector]:
    """Make the runner's side of the connector over pages on the CPU, and our half behind it."""
    with tempfile.NamedTemporaryFile() as meeting:
        parallel_state.init_distributed_environment(1, 0, f"file://{meeting.name}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32)
    specs = [dict.fromkeys(LAYERS, spec)]
    groups = [get_global_kv_cache_groups(config, specs)] if get_global_kv_cache_groups else []
    (pages,) = get_kv_cache_configs(config, specs, [KV_BYTES], *groups)
    pages.kv_cache_layout = config.cache_config.kv_cache_layout
    ensure_kv_transfer_initialized(config, pages)
    connector = get_kv_transfer_group()
    layout = config.cache_config.get_resolved_kv_cache_layout()
    caches = allocate_kv_cache(pages, torch.device("cpu"), layout)
    runner = ActiveKVConnector(config, caches)
    connector.shutdown()
    settings = parse_settings(VllmSettings, config.kv_transfer_config.kv_connector_extra_config)
    worker = WorkerConnector(
        settings,
        *describe(settings, config, pages, caches),
        engine_id=config.kv_transfer_config.engine_id,
        rank=0,
        make=lambda kv, arena: copier,
    )
    connector._worker = worker
    end = time.monotonic() + READY_S
    while worker._client.arena is None:
        assert time.monotonic() < end, worker.handshake()
        time.sleep(0.01)
    return runner, worker


def _waits(
    runner: ActiveKVConnector, worker: WorkerConnector, copier: StuckCopier, name: str
) -> list[float]:
    """Run one step; a step named "begun" begins a load."""
    tokens = 0 if name == "idle" else 128
    move = Move(np.array([1]), np.zeros((1, 1), EXTENT_DTYPE))
    load = LoadJob("r", worker._client.arena.boot_id, {0: move})
    step = SimpleNamespace(
        kv_connector_metadata=StepMeta(tokens=tokens, loads=[load] if name == "begun" else []),
        has_sync_kv_loads=False,
        finished_req_ids=set(),
        total_num_scheduled_tokens=tokens,
    )
    copier.waits.clear()
    if tokens:
        batch = SimpleNamespace(idx_mapping=None, req_ids=["r"], num_tokens=tokens)
        runner.pre_forward(step, batch, attn_metadata={LAYERS[0]: object()})
        runner.finish_forward()
        runner.post_forward(set())
    else:
        runner.no_forward(step)
    return list(copier.waits)
