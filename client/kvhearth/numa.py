"""NUMA nodes as the kernel lists them, and the node that this process runs on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

UNKNOWN = -1
_NODES = Path("/sys/devices/system/node")


def parse_list(text: str) -> list[int]:
    """Parse a list of the kernel's such as ``0-3,8``.

    Raises:
        ValueError: it is none.
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def own_node(folder: Path = _NODES) -> int:
    """Return the node of all processors that this thread may use.

    Returns -1 if they belong to several nodes, or if the machine has one node only.
    """
    with contextlib.suppress(OSError, ValueError):
        nodes = parse_list((folder / "online").read_text(encoding="utf-8"))
        allowed = os.sched_getaffinity(0)
        for node in nodes if len(nodes) > 1 else ():
            if allowed.issubset(
                parse_list((folder / f"node{node}/cpulist").read_text(encoding="utf-8"))
            ):
                return node
    return UNKNOWN
