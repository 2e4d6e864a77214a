"""NUMA nodes: memory is divided among them, and slots near their writer are taken first."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from support.cases import cases
from support.core_kit import Rig, contract, full
from support.memory_places import tmpfs_directory

from kvhearth.contract import Contract
from kvhearth.numa import own_node, parse_list
from kvhearth_server.core.core import Core
from kvhearth_server.core.slot_table import Geometry, SlabPool, SlotTable, State
from kvhearth_server.memory.arena import open_arena
from kvhearth_server.memory.mapping import HugepagePolicy
from kvhearth_server.memory.numa import KernelTopology, Placement
from kvhearth_server.memory.plan import ArenaPlan
from kvhearth_server.memory.segments import create_segment, open_segment

MIB = 1 << 20
OFF = HugepagePolicy.OFF


class Nodes:
    """Several nodes over real memory: a page is where it was preferred, or as ``lies`` says."""

    def __init__(
        self, *nodes: int, lies: dict[int, int] | None = None, refuse: bool = False
    ) -> None:
        self.nodes = nodes
        self.refuse = refuse
        self.preferred: list[tuple[int, int, int]] = []
        self.ran: dict[int, str] = {}
        self._lies = lies or {}

    def run_on(self, node: int) -> None:
        self.ran[node] = threading.current_thread().name

    def prefer(self, address: int, size_bytes: int, node: int) -> None:
        if self.refuse:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        self.preferred.append((address, size_bytes, node))

    def node_of(self, address: int) -> int:
        if self.refuse:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        for start, size_bytes, node in self.preferred:
            if start <= address < start + size_bytes:
                return self._lies.get(node, node)
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def test_each_node_gets_as_many_whole_units() -> None:
    assert Placement(Nodes(0), MIB).planned(5 * MIB).tolist() == [0] * 5
    assert Placement(Nodes(0, 8), MIB).planned(5 * MIB).tolist() == [0, 0, 8, 8, 8]
    assert Placement(Nodes(0, 1), MIB).planned(MIB).tolist() == [1]


def test_each_part_is_preferred_on_its_node_and_planned_there() -> None:
    nodes = Nodes(0, 8)
    segment = create_segment(8 * MIB, OFF, placement=Placement(nodes, 2 * MIB))
    base = segment.address
    assert nodes.preferred == [(base, 4 * MIB, 0), (base + 4 * MIB, 4 * MIB, 8)]
    assert segment.nodes.tolist() == [0, 0, 8, 8]
    assert os.fstat(segment.fd).st_blocks * 512 >= 8 * MIB
    segment.close()


def test_the_kernel_says_where_pages_of_an_earlier_run_really_are() -> None:
    with tmpfs_directory() as folder:
        create_segment(4 * MIB, OFF, path=folder / "segment").close()
        placement = Placement(Nodes(0, 1, lies={1: 0}), 2 * MIB)
        segment = open_segment(folder / "segment", OFF, placement=placement)
        assert segment.nodes.tolist() == [0, 0]
        segment.close()


def test_a_refusal_is_noted_and_first_touch_decides() -> None:
    segment = create_segment(4 * MIB, OFF, placement=Placement(Nodes(0, 1, refuse=True), 2 * MIB))
    assert segment.nodes.tolist() == [0, 1]
    assert ["first touch decides" in note for note in segment.steps_down] == [True]
    segment.close()


def test_an_arena_s_slabs_know_their_nodes_also_when_it_is_adopted() -> None:
    geometry = Geometry.of([("a", 4 * MIB), ("b", 2 * MIB)], MIB, 4096)
    with tmpfs_directory() as folder:
        plan = ArenaPlan(geometry, folder / "arena", OFF)
        for _ in range(2):
            arena = open_arena(plan, Nodes(0, 1))
            assert arena.populator.slab_nodes.tolist() == [0, 0, 1, 1, 0, 1]
            arena.write_catalogue(arena.catalogue_head({}), [])
            arena.close()


def pool_of(nodes: list[int]) -> tuple[SlotTable, SlabPool]:
    geometry = Geometry.of([("a", len(nodes) * MIB)], MIB, 4096)
    table = SlotTable(geometry, np.zeros(geometry.slot_count, np.uint32))
    table.slab_node[:] = nodes
    return table, SlabPool(table, 0, lambda slab, size: None)


def taken(table: SlotTable, pool: SlabPool, count: int, node: int) -> list[int]:
    """Take slots of 256 KiB, four a slab; return the nodes that they lie on."""
    slots = pool.take(MIB // 4, count, node)
    table.state[slots] = State.RESERVED
    pool.check()
    return table.slab_node[table.slabs_of(slots)].tolist()


def test_slots_of_the_writer_s_node_come_first() -> None:
    table, pool = pool_of([0, 0, 1, 1])
    assert pool.has_nodes
    assert pool.can_take(MIB // 4) == 16
    assert taken(table, pool, 5, 1) == [1] * 5
    assert taken(table, pool, 5, 0) == [0] * 5
    assert taken(table, pool, 5, 1) == [1] * 3 + [0] * 2
    assert taken(table, pool, 5, 1) == [0]


def test_a_writer_of_no_known_node_gets_the_emptier_one() -> None:
    table, pool = pool_of([0, 1, 1])
    assert taken(table, pool, 3, -1) == [1] * 3
    assert taken(table, pool, 6, 5) == [1] * 5 + [0]


def test_freed_slots_go_back_to_their_node() -> None:
    table, pool = pool_of([0, 1])
    slots = pool.take(MIB // 4, 8, 0)
    table.state[slots] = State.RESERVED
    table.state[slots] = State.FREE
    pool.give(slots)
    pool.check()
    assert taken(table, pool, 4, 1) == [1] * 4
    assert taken(table, pool, 4, 1) == [0] * 4


def rig_of(nodes: list[int], made: Contract, *ranks: int) -> tuple[Rig, int]:
    """Attach an engine whose ranks run on the nodes ``ranks`` to a core of several nodes."""
    rig = Rig(len(nodes))
    rig.core = Core(rig.geometry, rig.core.state.limits, slab_nodes=np.array(nodes))
    first, *others = [
        rig.join(made, scheduler=rank == 0, rank=rank, node=node) for rank, node in enumerate(ranks)
    ]
    rig.members[first] = [first, *others]
    return rig, first


@cases(("ranks", "nodes"), [((1,), [[1]] * 3), ((1, 0), [[1, 0]] * 3)])
def test_each_rank_s_shards_lie_near_it(ranks: tuple[int, ...], nodes: list[list[int]]) -> None:
    rig, session = rig_of([0, 0, 1, 1], contract(full(shards=len(ranks))), *ranks)
    grant = rig.core.writing.reserve(session, 1, rig.epoch(session), [(0, 3)]).handed[0]
    table = rig.state.table
    assert table.slab_node[table.slabs_of(grant.slots)].tolist() == nodes
    rig.check()


def test_lists_of_the_kernel() -> None:
    assert parse_list("0-2,8\n") == [0, 1, 2, 8]
    assert parse_list("\n") == []
    with pytest.raises(ValueError, match="invalid"):
        parse_list("no")


def machine_with(folder: Path, **cpus: str) -> Path:
    for name, listed in cpus.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "cpulist").write_text(listed)
    numbers = ",".join(name.removeprefix("node") for name in cpus)
    (folder / "online").write_text(numbers)
    (folder / "has_memory").write_text(numbers)
    return folder


def test_a_process_knows_its_node_where_there_are_several(tmp_path: Path) -> None:
    mine = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert own_node(machine_with(tmp_path / "one", node0=mine)) == -1
    assert own_node(machine_with(tmp_path / "two", node0="1000", node1=mine)) == 1
    other = "1000-1003"
    assert own_node(machine_with(tmp_path / "none", node0=other, node1=other)) == -1
    assert own_node(tmp_path / "nothing") == -1


def test_nodes_without_processors_or_memory_for_us_are_left_out(tmp_path: Path) -> None:
    mine = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    machine_with(tmp_path / "sys/devices/system/node", node0=mine, node1="", node2=mine)
    assert KernelTopology(tmp_path).nodes == (0, 2)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name:\tx\nMems_allowed_list:\t1-2\n")
    assert KernelTopology(tmp_path).nodes == (2,)
    assert KernelTopology(tmp_path / "nothing").nodes == (0,)


def test_the_kernel_s_own_calls() -> None:
    topology = KernelTopology()
    node = topology.nodes[-1]
    memory = mmap.mmap(-1, 2 * MIB)
    address = int(np.frombuffer(memory, np.uint8, count=1).ctypes.data)
    try:
        topology.prefer(address, 2 * MIB, node)
        memory[0] = 1
        found = topology.node_of(address)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        pytest.skip(f"this container or kernel refuses mbind: {error.strerror}")
    if len(topology.nodes) == 1:
        assert found == node
        pytest.skip("one node: the calls work, but there is nothing to choose from")
    assert found == node
