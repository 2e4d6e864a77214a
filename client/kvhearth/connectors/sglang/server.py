"""The SGLang server that this process is a rank of."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.mem_cache import utils
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_context, get_parallel, get_server_args
from sglang.srt.utils.weight_checker import WeightChecker

from kvhearth.connectors.core.fingerprint import environment
from kvhearth.errors import KVHearthError, Reason

_UPDATES = {
    "begin_weight_update": WeightUpdater,
    "end_weight_update": WeightUpdater,
    "load_weights_from_distributed": WeightUpdater,
    "update_weights_from_disk": WeightUpdater,
    "update_weights_from_ipc": WeightUpdater,
    "update_weights_from_tensor": WeightUpdater,
    "_reset_tensors": WeightChecker,
}
"""SGLang's methods that replace weights of a model in this process."""

_updates = 0
_watching = False


def arguments() -> dict[str, Any]:
    """Return all of SGLang's arguments, as they are in force, and its variables that are set."""
    names = namespace_of(type(get_server_args()))
    found = {name: get_context().config_leaf(name) for name in names}
    return {**found, "environment": environment("SGLANG_")}


def weights_at_start() -> str:
    """Name the weights that the server began with, as ``weights_in_force`` does."""
    return f"{get_server_args().weight_version}/0"


def weights_in_force() -> str:
    """Name the weights that this process computes with: SGLang's version of them, and how often
    they were replaced, since an update may come without a version of its own.
    """
    return f"{get_context().config_leaf('weight_version')}/{_updates}"


def watch_updates() -> None:
    """Count SGLang's updates of weights, each when it begins. Of those before the first call only
    the ones from disk are seen.
    """
    global _updates, _watching
    if _watching:
        return
    _watching = True
    for name, owner in _UPDATES.items():
        setattr(owner, name, _counted(getattr(owner, name)))
    log = get_context().overrides_log()
    _updates = sum("model_path" in fields for _, fields in log)


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def update(*args: Any, **kwargs: Any) -> Any:
        global _updates
        _updates += 1
        return method(*args, **kwargs)

    return update


def check_hashes() -> None:
    """Refuse a SGLang whose page hashes leave ``cache_salt`` out.

    Raises:
        KVHearthError: ``bad_contract``.
    """
    if not hasattr(utils, "storage_namespace_seed"):
        raise KVHearthError(
            Reason.BAD_CONTRACT,
            "this SGLang's page hashes do not have a prompt's cache_salt in them: use 0.5.23",
        )


def run_name(ranks: int) -> str:
    """Return a new name for this run of the server, the same on all ranks of a group.

    Args:
        ranks: ranks of the group; all of them call this.
    """
    mark = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)
    if ranks > 1 and torch.distributed.is_initialized():
        group = get_parallel().tp_group
        torch.distributed.broadcast(mark, src=group.ranks[0], group=group.cpu_group)
    return bytes(mark.tolist()).hex()
