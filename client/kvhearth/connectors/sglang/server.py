"""The SGLang server that this process is a rank of."""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.runtime_context import get_context, get_parallel


def argument(name: str) -> Any:
    """Return the value that one of SGLang's arguments has in the running server."""
    return get_context().config_leaf(name)


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
