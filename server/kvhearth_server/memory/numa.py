"""NUMA nodes of this machine: where memory is taken, and on which node a part of a segment lies.

``Topology`` is the only access to the nodes; tests give another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
from pathlib import Path
from typing import Protocol

import numpy as np

from kvhearth.model import I64
from kvhearth.numa import parse_list

_NODES = "sys/devices/system/node"
_MBIND_GET_MEMPOLICY = {"x86_64": (237, 239), "aarch64": (235, 236)}
_PREFERRED = 1
_OF_ADDRESS = 1 | 2
"""Flags ``MPOL_F_NODE | MPOL_F_ADDR``: the node of the page at an address."""
_NODES_MAX = 1024
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class Topology(Protocol):
    """Nodes that have both memory and processors for this process.

    Attributes:
        nodes: the kernel's numbers, ascending; at least one.
    """

    nodes: tuple[int, ...]

    def run_on(self, node: int) -> None:
        """Let the calling thread run on the node's processors only, where this is allowed."""

    def prefer(self, address: int, size_bytes: int, node: int) -> None:
        """Let pages of a mapping be taken from ``node`` while it has any.

        Raises:
            OSError: the kernel refuses, as in containers; the thread that touches a page first then
                decides.
        """

    def node_of(self, address: int) -> int:
        """Return the node of the page at an address.

        Raises:
            OSError: the kernel refuses, or there is no page.
        """


class KernelTopology:
    """The kernel's nodes; ``root`` is ``/`` except in tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._cpus: dict[int, set[int]] = {}
        allowed = os.sched_getaffinity(0)
        for node in self._with_memory(root):
            listed = _text(root / _NODES / f"node{node}/cpulist")
            if cpus := allowed.intersection(parse_list(listed)):
                self._cpus[node] = cpus
        self.nodes = tuple(self._cpus) or (0,)

    @staticmethod
    def _with_memory(root: Path) -> list[int]:
        nodes = parse_list(_text(root / _NODES / "has_memory"))
        for line in _text(root / "proc/self/status").splitlines():
            name, _, value = line.partition(":")
            if name == "Mems_allowed_list":
                allowed = parse_list(value)
                return [node for node in nodes if node in allowed]
        return nodes

    def run_on(self, node: int) -> None:
        if node in self._cpus:
            os.sched_setaffinity(0, self._cpus[node])

    def prefer(self, address: int, size_bytes: int, node: int) -> None:
        mask = (ctypes.c_ulong * (_NODES_MAX // 64))()
        mask[node // 64] = 1 << node % 64
        mbind, _ = _numbers()
        _check(
            _syscall(mbind, *_longs(address, size_bytes, _PREFERRED), mask, *_longs(_NODES_MAX, 0))
        )

    def node_of(self, address: int) -> int:
        node = ctypes.c_int(-1)
        _, get_mempolicy = _numbers()
        _check(_syscall(get_mempolicy, ctypes.byref(node), *_longs(0, 0, address, _OF_ADDRESS)))
        return node.value


def _numbers() -> tuple[int, int]:
    machine = platform.machine()
    if machine not in _MBIND_GET_MEMPOLICY:
        raise OSError(errno.ENOSYS, f"mbind's system call is not known on {machine}")
    return _MBIND_GET_MEMPOLICY[machine]


def _longs(*numbers: int) -> list[ctypes.c_ulong]:
    return [ctypes.c_ulong(number) for number in numbers]


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


class Placement:
    """Partition of segments among nodes: each node gets as many neighbouring units of them.

    Args:
        topology: the nodes.
        unit_bytes: size of a part that lies on one node, as a slab.
    """

    def __init__(self, topology: Topology, unit_bytes: int) -> None:
        self.topology = topology
        self._unit_bytes = unit_bytes

    def planned(self, size_bytes: int) -> I64:
        """Return the node of each unit of a segment, in order."""
        nodes, units = self.topology.nodes, -(-size_bytes // self._unit_bytes)
        bounds = np.arange(len(nodes) + 1) * units // len(nodes)
        return np.repeat(np.array(nodes, np.int64), np.diff(bounds))

    def prefer(self, address: int, size_bytes: int) -> str:
        """Let each unit's pages come from its node; return the kernel's refusal, "" for none."""
        if len(self.topology.nodes) < 2:
            return ""
        planned, unit = self.planned(size_bytes), self._unit_bytes
        try:
            for node in sorted(set(planned.tolist())):
                start = int(np.searchsorted(planned, node)) * unit
                end = min(int(np.searchsorted(planned, node, "right")) * unit, size_bytes)
                self.topology.prefer(address + start, end - start, node)
        except OSError as error:
            return f"memory is not bound to NUMA nodes ({error.strerror}); first touch decides"
        return ""

    def nodes_of(self, address: int, size_bytes: int, has_pages: bool) -> I64:
        """Return the node of each unit of a segment: the kernel's where it has pages, or else the
        planned one.
        """
        nodes = self.planned(size_bytes)
        if has_pages and len(self.topology.nodes) > 1:
            with contextlib.suppress(OSError):
                for index in range(len(nodes)):
                    nodes[index] = self.topology.node_of(address + index * self._unit_bytes)
        return nodes
