"""Read-only views of the state for operators: lease holders, and the location of a key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvhearth.model import Tier
from kvhearth_server.core.groups import Group
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import CoreState


@dataclass(frozen=True)
class Held:
    """Leases of one group; slots and bytes count once for each lease on them."""

    group: Group
    leases: int
    slots: int
    bytes: int
    oldest_s: float


@dataclass(frozen=True)
class Place:
    """Location of a key; ``why_not`` is empty if its block would be served."""

    namespace: Namespace
    kv_group: int
    state: State
    tier: Tier
    epoch: int
    leases: int
    pins: int
    shard_bytes: int
    shards: int
    why_not: str


LEASES_AT_ONCE = 128


def held_by_groups(state: CoreState, now: float) -> Iterator[Held | None]:
    """Yield the groups that hold leases, and None after each portion of leases: leases may come and
    go meanwhile.
    """
    for group in state.groups:
        if not group.leases:
            continue
        oldest, ids = min(group.leased_at.values()), list(group.leases)
        leases = slots = total = 0
        for index, lease in enumerate(ids, 1):
            if (held := group.leases.get(lease)) is not None:
                leases, slots = leases + 1, slots + len(held)
                total += state.table.total_bytes(held)
            if index % LEASES_AT_ONCE == 0:
                yield None
        yield Held(group, leases, slots, total, max(0.0, now - oldest))


def places(state: CoreState, key: bytes) -> list[Place]:
    """All blocks of a key, in every namespace and KV group; each group's index is searched once."""
    found = []
    for namespace in state.namespaces:
        for kv_group in range(len(namespace.contract.groups)):
            head = int(state.index.find(namespace.number, kv_group, [key])[0])
            if head >= 0:
                found.append(_place(state, namespace, kv_group, head))
    return sorted(found, key=lambda place: (place.namespace.number, place.kv_group))


def _place(state: CoreState, namespace: Namespace, kv_group: int, head: int) -> Place:
    table = state.table
    spec = namespace.contract.groups[kv_group]
    at = State(int(table.state[head]))
    epoch = int(table.epoch[head])
    return Place(
        namespace,
        kv_group,
        at,
        Tier.DRAM,
        epoch,
        int(table.refs[head]),
        int(table.pins[head]),
        spec.page_bytes,
        spec.shards,
        _why_not(at, epoch, namespace.epoch),
    )


def _why_not(state: State, epoch: int, current: int) -> str:
    if epoch != current:
        return f"its weights epoch {epoch} is not the namespace's {current}: weights have changed"
    if state is State.COMMITTED:
        return "committed, its checksum is still being taken: ask again"
    if state is not State.SUMMED:
        return f"its slots are {state.name.lower()}, only summed ones are served"
    return ""
